"""The agent process as a trainer sees it: `connect_or_replace` connects to a working agent, and replaces one that
cannot serve.

- An agent with another version of the messages ends by itself, if no trainer needs it. It first commits its newest
  checkpoint. `connect_or_replace` waits for that and starts a new agent. The old agent's memory is lost; a restore
  reads the store.
- An agent that hangs is killed, because it holds the run lock. Silence alone is no proof. An agent hangs if its main
  thread, which only answers messages, used no CPU time while a message waited for it.
- An agent that was stopped by a signal is continued first, since its memory may be the only copy.
- An agent whose backlog of connections stays full is treated like one that hangs.

Living trainers hold the arenas, too, and hand them to the next agent. Data that only the killed agent held is lost.
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
from ckpt.storage.names import redact_url
from ckpt.threads import Tasks

HELLO_S = 20.0  # the wait for an answer, before the agent is checked for a hang
BUSY_S = 120.0  # the wait for an agent that is busy, but does not hang
OTHER_VERSION_WAIT_S = 600.0  # the wait for an agent of another version, which may be committing
KILL_WAIT_S = 30.0  # the wait after SIGKILL
_PROGRAM = b"ckpt.agent.node.main"
_UCRED = struct.Struct("3i")


def connect_or_replace(
    url: str,
    settings: Settings,
    tasks: Tasks,
    events: Events,
    on_message: Callable[[messages.Message], None],
    on_lost: Callable[[str], None],
    hello_s: float = HELLO_S,
    busy_s: float = BUSY_S,
) -> client.Connection:
    """A connection to an agent that has answered hello. It replaces the agent if needed, as the module says. Errors:
    AgentError; OtherVersion if an agent of another version does not end in time."""
    busy_until_s = time.monotonic() + busy_s
    while True:
        try:
            sock = client.connect(url, settings)
        except AgentError as exc:
            if not isinstance(exc.__cause__, TimeoutError) or time.monotonic() > busy_until_s:
                raise
            _end_unresponsive(url, settings, events, hello_s, exc)
            continue
        with contextlib.ExitStack() as stack:
            agent = _Agent.from_socket(sock)
            if agent is not None:
                stack.callback(os.close, agent.pidfd)
            before_ns = agent.cpu_time_ns() if agent is not None else None
            try:
                return client.Connection(sock, tasks, on_message, on_lost, hello_s=hello_s)
            except OtherVersion as exc:
                if agent is None:
                    raise
                _wait_for_other_version(agent, url, events, exc)
            except AgentError as exc:
                if agent is None or time.monotonic() > busy_until_s:
                    raise
                if agent.has_ended(0.0):
                    continue
                if not isinstance(exc.__cause__, TimeoutError):
                    raise
                if before_ns is not None and agent.cpu_time_ns() == before_ns:
                    _continue_or_kill(agent, url, events, hello_s)


def _end_unresponsive(url: str, settings: Settings, events: Events, hello_s: float, why: AgentError) -> None:
    """Ends an agent that accepts no connection for `hello_s`, if it hangs. Errors: `why` if the agent's process cannot
    be seen; those of `_continue_or_kill`."""
    place = client.make_agent_paths(url, settings)
    agent = _Agent.find_lock_holder(place.run_lock)
    if agent is None:
        raise why
    try:
        before_ns, until_s = agent.cpu_time_ns(), time.monotonic() + hello_s
        while time.monotonic() < until_s:
            if not _is_backlog_full(place):
                return
        if before_ns is not None and agent.cpu_time_ns() == before_ns:
            _continue_or_kill(agent, url, events, hello_s)
    finally:
        os.close(agent.pidfd)


def _is_backlog_full(place: client.AgentPaths) -> bool:
    """Whether the agent's backlog of connections is still full. This check is needed beside the CPU time: an idle agent
    that accepted all connections uses no CPU time, too."""
    try:
        sock = client.connect_nowait(place)
    except AgentError as exc:
        return isinstance(exc.__cause__, TimeoutError)
    if sock is not None:
        sock.close()
    return False


def peer_pid(sock: socket.socket) -> int:
    """The pid of the process that listens at the other end; 0 if it is in another pid namespace."""
    pid, _, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(pid)


@dataclass(frozen=True, slots=True)
class _Agent:
    """An agent's process. The caller that gets one closes `pidfd`."""

    pid: int
    pidfd: int

    @staticmethod
    def from_socket(sock: socket.socket) -> _Agent | None:
        """The process that listens at the other end of `sock`; None if it cannot be seen, as in another pid
        namespace."""
        pid = peer_pid(sock)
        try:
            return _Agent(pid, os.pidfd_open(pid))
        except (OSError, ValueError):
            return None

    @staticmethod
    def find_lock_holder(lock: Path) -> _Agent | None:
        """The agent process that has this lock file open; None if there is none to be seen. The path in its command
        line is no proof, since in another container the same path is another file."""
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if _PROGRAM in _command_line(pid) and _has_open(pid, lock):
                with contextlib.suppress(OSError):
                    return _Agent(pid, os.pidfd_open(pid))
        return None

    def has_ended(self, timeout_s: float) -> bool:
        return bool(select.select([self.pidfd], [], [], timeout_s)[0])

    def cpu_time_ns(self) -> int | None:
        """CPU time that its main thread has used, in ns; None if the thread is running or runnable, or the kernel does
        not say."""
        if self.state() == "R":
            return None
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()[0])
        return None

    def state(self) -> str:
        """The state of the process as the kernel names it ("T": stopped); "" if unknown."""
        with contextlib.suppress(OSError, IndexError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return ""

    def is_own_agent(self) -> bool:
        """Whether it is an agent that belongs to this user."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}").stat().st_uid == os.getuid() and _PROGRAM in _command_line(self.pid)
        return False

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)


def _command_line(pid: int) -> list[bytes]:
    """The words of a process' command line; none if it cannot be read."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


def _has_open(pid: int, path: Path) -> bool:
    """Whether that process is seen to have that file open."""
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            # OSError: the descriptor was closed meanwhile.
            with contextlib.suppress(OSError):
                if fd.samefile(path):
                    return True
    return False


def _wait_for_other_version(agent: _Agent, url: str, events: Events, why: OtherVersion) -> None:
    """Waits until an agent of another version has ended. Errors: OtherVersion if it does not end in
    OTHER_VERSION_WAIT_S."""
    text = f"ckpt: the agent of {redact_url(url)} (process {agent.pid}) belongs to another release. It ends once its"
    events.emit(
        "agent.replaced", f"{text} checkpoints are in the store; waiting up to {OTHER_VERSION_WAIT_S:g} s", loud=True
    )
    if not agent.has_ended(OTHER_VERSION_WAIT_S):
        raise OtherVersion(f"{why}; it has not ended within {OTHER_VERSION_WAIT_S:g} s") from why


def _continue_or_kill(agent: _Agent, url: str, events: Events, patience_s: float) -> None:
    """Continues a stopped agent; kills one that hangs. Errors: AgentError if the agent is not this user's, or does not
    end."""
    what = f"the agent of {redact_url(url)} (process {agent.pid}) has neither answered nor run for {patience_s:g} s"
    if not agent.is_own_agent():
        raise AgentError(f"{what}. It is not your user's agent, so ckpt does not end it: check why it waits, or end it")
    if agent.state() == "T":
        events.emit("agent.hung", f"ckpt: {what}. A signal had stopped it; ckpt lets it continue", loud=True)
        agent.send_signal(signal.SIGCONT)
        return
    text = f"ckpt: {what}. It hangs, so ckpt kills it and starts another one; checkpoints only in its memory are lost"
    events.emit("agent.hung", text, loud=True)
    agent.send_signal(signal.SIGKILL)
    if not agent.has_ended(KILL_WAIT_S):
        raise AgentError(
            f"{what}, and does not end when killed; look for a hanging disk or file server in the kernel's log"
        )
