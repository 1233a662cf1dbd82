"""A trainer's first words with its agent, and what it does where that agent is of no use to it.

- One of another version of the messages makes way where nobody needs it: what it has reaches the store first, as far as
  it had not yet, and it ends; this waits for that, and starts another. What lay in its memory is gone then, and comes
  from the store.
- One that hangs is ended, since it holds the run's lock and no other could be started. That takes more than silence:
  its main thread, whose one task is to answer, has not run at all for as long as a word lay there for it. One that was
  stopped by a signal is told to go on first, since its memory may be all that there is. The arenas of trainers that
  live are theirs as well, and they hand them to the next agent; what only the hung one had is lost with it. So is one
  that takes no connection any more, since as many wait for it as it lets.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckpt.errors import AgentError, OtherVersion
from ckpt.events import Events
from ckpt.ipc import client, messages
from ckpt.settings import Settings
from ckpt.storage.names import shown
from ckpt.threads import Tasks

HELLO_S = 20.0  # for an answer, before it is looked whether the agent hangs
BUSY_S = 120.0  # for an answer of one that does not
MAKES_WAY_S = 600.0  # for what is being committed
END_S = 30.0  # after SIGKILL
_PROGRAM = b"ckpt.agent.node.main"
_UCRED = struct.Struct("3i")


def meet(
    url: str,
    settings: Settings,
    tasks: Tasks,
    events: Events,
    on_message: Callable[[messages.Message], None],
    on_lost: Callable[[str], None],
    hello_s: float = HELLO_S,
    busy_s: float = BUSY_S,
) -> client.Connection:
    """A connection to an agent that has answered; see above. Errors: AgentError."""
    busy_until_s = time.monotonic() + busy_s
    while True:
        try:
            sock = client.connect(url, settings)
        except AgentError as exc:
            if not isinstance(exc.__cause__, TimeoutError) or time.monotonic() > busy_until_s:
                raise
            _end_deaf(url, settings, events, hello_s, exc)
            continue
        with contextlib.ExitStack() as stack:
            agent = _Agent.of(sock)
            if agent is not None:
                stack.callback(os.close, agent.pidfd)
            before_ns = agent.ran_ns() if agent is not None else None
            try:
                return client.Connection(sock, tasks, on_message, on_lost, hello_s=hello_s)
            except OtherVersion as exc:
                if agent is None:
                    raise
                _await_way(agent, url, events, exc)
            except AgentError as exc:
                if agent is None or time.monotonic() > busy_until_s:
                    raise
                if agent.is_gone(0.0):
                    continue  # it was just ending
                if not isinstance(exc.__cause__, TimeoutError):
                    raise
                if before_ns is not None and agent.ran_ns() == before_ns:
                    _revive_or_end(agent, url, events, hello_s)


def _end_deaf(url: str, settings: Settings, events: Events, hello_s: float, why: AgentError) -> None:
    """One that takes no connection in all that time. Errors: `why` where it cannot be seen; as `_revive_or_end`."""
    place = client.places(url, settings)
    agent = _Agent.that_holds(place.run_lock)
    if agent is None:
        raise why
    try:
        before_ns, until_s = agent.ran_ns(), time.monotonic() + hello_s
        while time.monotonic() < until_s:
            if not _is_deaf(place):
                return
        if before_ns is not None and agent.ran_ns() == before_ns:
            _revive_or_end(agent, url, events, hello_s)
    finally:
        os.close(agent.pidfd)


def _is_deaf(place: client.AgentPaths) -> bool:
    """Whether as many wait for it as it lets, still. One that has taken them, and has nothing else to do, does not run
    either."""
    try:
        sock = client.connect_nowait(place)
    except AgentError as exc:
        return isinstance(exc.__cause__, TimeoutError)
    if sock is not None:
        sock.close()
    return False


def pid_of(sock: socket.socket) -> int:
    """Of the process that listens at the other end; 0 where it is in another pid namespace."""
    pid, _, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(pid)


@dataclass(frozen=True, slots=True)
class _Agent:
    """The process at the other end of a connection, which is the one that listens there."""

    pid: int
    pidfd: int

    @staticmethod
    def of(sock: socket.socket) -> _Agent | None:
        """None where it cannot be seen from here, as in another pid namespace. The caller closes `pidfd`."""
        pid = pid_of(sock)
        try:
            return _Agent(pid, os.pidfd_open(pid))
        except (OSError, ValueError):
            return None

    @staticmethod
    def that_holds(lock: Path) -> _Agent | None:
        """The one that a trainer has started, and that has this run's lock; None where none is seen. Its command line
        does not say so: in another container the same path is another file. The caller closes `pidfd`."""
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if _PROGRAM in _words(pid) and _has_open(pid, lock):
                with contextlib.suppress(OSError):
                    return _Agent(pid, os.pidfd_open(pid))
        return None

    def is_gone(self, timeout_s: float) -> bool:
        return bool(select.select([self.pidfd], [], [], timeout_s)[0])

    def ran_ns(self) -> int | None:
        """How long its main thread has run on a processor, as far as the kernel says; None where it waits for one."""
        if self.state() == "R":
            return None
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()[0])
        return None

    def state(self) -> str:
        """As the kernel names it: T is stopped. "" where that is not known."""
        with contextlib.suppress(OSError, IndexError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return ""

    def is_ours(self) -> bool:
        """Whether it is one that a trainer of this user has started."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}").stat().st_uid == os.getuid() and _PROGRAM in _words(self.pid)
        return False

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)


def _words(pid: int) -> list[bytes]:
    """The command line of a process; none where it cannot be read."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


def _has_open(pid: int, path: Path) -> bool:
    """Whether that process has that file open; not where that cannot be seen."""
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if fd.samefile(path):
                    return True
    return False


def _await_way(agent: _Agent, url: str, events: Events, why: OtherVersion) -> None:
    """Errors: OtherVersion where it does not end in time."""
    text = f"ckpt: the agent of {shown(url)} (process {agent.pid}) is of another release and makes way, once what it"
    events.emit("agent.replaced", f"{text} has is in the store: waiting up to {MAKES_WAY_S:g} s", loud=True)
    if not agent.is_gone(MAKES_WAY_S):
        raise OtherVersion(f"{why}; it was waited for for {MAKES_WAY_S:g} s, and is still there") from why


def _revive_or_end(agent: _Agent, url: str, events: Events, patience_s: float) -> None:
    """Errors: AgentError where it is not ours to end, or does not."""
    what = f"the agent of {shown(url)} (process {agent.pid}) has not answered, nor run at all, for {patience_s:g} s"
    if not agent.is_ours():
        raise AgentError(f"{what}; it is none that a trainer of yours has started: look what it waits for, or end it")
    if agent.state() == "T":
        events.emit("agent.hung", f"ckpt: {what}: it was stopped by a signal, and is told to go on", loud=True)
        agent.signal(signal.SIGCONT)
        return
    text = f"ckpt: {what}: it hangs, and is ended; what only its memory has is lost. Another one is started"
    events.emit("agent.hung", text, loud=True)
    agent.signal(signal.SIGKILL)
    if not agent.is_gone(END_S):
        raise AgentError(f"{what}, and does not end; the kernel's log may say why (a disk or a file server that hangs)")
