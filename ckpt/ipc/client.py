"""The trainer's (or a tool's) end of the socket: find the agent, start it if there is none, talk to it.

There is one agent per (user, node, store URL). Its socket and locks live in one 0700 folder of the user. Who finds no
agent takes the start lock, looks again, spawns one in a session of its own, and waits for it to say that it serves:
so n ranks that start together make one agent. The agent itself holds the run lock for as long as it lives, and only
under it unlinks a stale socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import select
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from ckpt.errors import AgentError, CkptError, UsageError, is_from_outside
from ckpt.ipc import messages
from ckpt.settings import Settings
from ckpt.storage.names import shown
from ckpt.threads import Flag, Outcome, Tasks

VERSION = 1  # of the messages; an agent of another version makes way once nobody needs it (see replacing)
START_TIMEOUT_S = 30.0
REQUEST_TIMEOUT_S = 120.0
ACCEPT_S = 10.0  # one that is at work takes connections at once, however many come


@dataclass(frozen=True, slots=True)
class AgentPaths:
    """Where one agent's files are. `socket` stays under the 107 bytes a Unix address may have."""

    folder: Path
    socket: Path
    run_lock: Path
    start_lock: Path
    log: Path


def places(url: str, settings: Settings) -> AgentPaths:
    """Makes the folder. Errors: AgentError when it is not the user's alone, or the path is too long; UsageError where
    the URL is no UTF-8, as all that agents say is."""
    folder = settings.runtime_dir
    try:
        named = url.encode()
    except UnicodeEncodeError as exc:
        raise UsageError(f"no agent can serve {shown(url)!r}, a name that is no UTF-8; rename that folder") from exc
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.lstat()
    except OSError as exc:
        raise AgentError(f"cannot make the folder for sockets {folder}: {exc}; set CKPT_RUNTIME_DIR") from exc
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise AgentError(
            f"{folder} must be a folder of your own with mode 0700 (it is mode {info.st_mode & 0o777:o}, "
            f"owner {info.st_uid}); mend it or set CKPT_RUNTIME_DIR"
        )
    name = "agent-" + hashlib.sha256(named).hexdigest()[:16]
    sock = folder / f"{name}.sock"
    if len(os.fsencode(sock)) > 107:
        raise AgentError(f"the socket path {sock} is longer than 107 bytes; set CKPT_RUNTIME_DIR to a shorter folder")
    log = settings.agent_log or folder / f"{name}.log"
    return AgentPaths(folder, sock, folder / f"{name}.lock", folder / f"{name}.start", log)


def connect_nowait(place: AgentPaths) -> socket.socket | None:
    """A connection, or None where no agent listens. Errors: AgentError; from a TimeoutError where as many connections
    as it lets wait do so already, and none is taken within ACCEPT_S."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    until_s = time.monotonic() + ACCEPT_S
    try:
        # The kernel would wait as well, but not any more once a signal has come: Python takes that for a connection.
        sock.setblocking(False)
        while True:
            try:
                sock.connect(os.fspath(place.socket))
                break
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    raise
                time.sleep(0.01)
        sock.setblocking(True)
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    except BlockingIOError as exc:
        sock.close()
        text = f"the agent at {place.socket} takes no connection within {ACCEPT_S:g} s"
        raise AgentError(text) from TimeoutError(str(exc))
    except OSError as exc:
        sock.close()
        raise AgentError(f"cannot connect to the agent at {place.socket}: {exc}") from exc
    return sock


def connect(url: str, settings: Settings, timeout_s: float = START_TIMEOUT_S) -> socket.socket:
    """A connection to the agent of `url`, started if there is none. Errors: AgentError with the end of its log; as
    `connect_nowait`."""
    place = places(url, settings)
    deadline = time.monotonic() + timeout_s
    sock = connect_nowait(place)
    if sock is not None:
        return sock
    with _locked(place.start_lock, deadline):
        while (sock := connect_nowait(place)) is None:
            if not _spawn(url, place, deadline):
                time.sleep(0.05)  # an agent that is just ending still holds the run lock
            if time.monotonic() > deadline:
                raise AgentError(f"no agent served {shown(url)} within {timeout_s:g} s; see {place.log}")
    return sock


@contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:  # a read-only file system, or a full one
        raise AgentError(f"cannot start an agent in the folder for sockets: {exc}; set CKPT_RUNTIME_DIR") from exc
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise AgentError(f"another process has been starting an agent for too long ({path})") from None
                time.sleep(0.005)
        yield
    finally:
        os.close(fd)


def _spawn(url: str, place: AgentPaths, deadline: float) -> bool:
    """True once it serves; False when another agent still holds the run lock (it says "busy")."""
    import ckpt

    package_dir = os.fspath(Path(ckpt.__file__).parent.parent)
    path = os.pathsep.join(p for p in (package_dir, os.environ.get("PYTHONPATH", "")) if p)
    command = [
        *("/bin/sh", "-c", '"$@" &', "sh"),  # the shell ends at once: the agent is no child of the trainer's
        *(sys.executable, "-P", "-m", "ckpt.agent.node.main", "--url", url, "--socket", os.fspath(place.socket)),
        *("--lock", os.fspath(place.run_lock), "--log", os.fspath(place.log), "--ready-fd"),
    ]
    ready_read, low = os.pipe()
    # Above those of the standard streams, which the agent has others under: a trainer without any has them to give.
    ready_write = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(low)
    try:
        try:
            with open(place.log, "ab") as log:
                subprocess.run(
                    [*command, str(ready_write)],
                    check=True,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    env={**os.environ, "PYTHONPATH": path},
                    pass_fds=[ready_write],
                    start_new_session=True,
                )
        except (OSError, subprocess.CalledProcessError) as exc:
            raise AgentError(f"cannot start the agent ({sys.executable}): {exc}") from exc
        finally:
            os.close(ready_write)
        said = _read_ready(ready_read, deadline)
    finally:
        os.close(ready_read)
    if said in ("ok", "busy"):
        return said == "ok"
    tail = place.log.read_bytes()[-2000:].decode(errors="replace").strip() if place.log.exists() else ""
    logged = f"its log {place.log} ends with:\n{tail}" if tail else f"its log {place.log} is empty"
    raise AgentError(f"the agent did not start: {said or 'it ended at once'}; {logged}")


def _read_ready(fd: int, deadline: float) -> str:
    said = b""
    while not said.endswith(b"\n"):
        readable, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            return "it said nothing in time (where this machine has far too much to do, start again once it has less)"
        chunk = os.read(fd, 4096)
        if not chunk:
            break
        said += chunk
    return said.decode(errors="replace").strip()


class Pending:
    """A request that is not answered yet. One thread waits for it, and calls `forget` once it does not any more."""

    def __init__(self, connection: Connection, request_id: int, kind: str) -> None:
        self.id = request_id
        self.future = Outcome[messages.Message]()
        self.moves = Flag()  # the agent has said so since it was looked at last
        self._connection, self._kind = connection, kind

    def answer(self, timeout_s: float | None) -> messages.Message:
        """Errors: what the agent answers; AgentError when it is gone; TimeoutError."""
        message = self.future.result(timeout_s)
        messages.raise_error(message)
        return message

    def wait_while_moving(self, timeout_s: float) -> messages.Message | None:
        """The answer; None where it takes longer, and the agent has said in that time that it gets further.

        Errors: as `answer`, but AgentError where it has not."""
        try:
            return self.answer(timeout_s)
        except TimeoutError as exc:
            if is_from_outside(exc):
                raise
            if not self.moves.is_set():
                text = f"the agent did not answer {self._kind!r}, and nothing of it moved for {timeout_s:g} s"
                raise AgentError(text) from None
            self.moves.clear()
            return None

    def forget(self) -> None:
        self._connection.forget(self.id)


class Connection:
    """One connected socket with a reader thread: requests get their answers, all else goes to `on_message`.

    `on_message` runs on the reader thread, in the order of arrival, and must not wait for an answer itself.
    `on_lost` runs there once, when the agent is gone after it had answered hello, and is told how that was seen.
    Thread-safe. After `close` every request raises AgentError.
    """

    def __init__(
        self,
        sock: socket.socket,
        tasks: Tasks,
        on_message: Callable[[messages.Message], None],
        on_lost: Callable[[str], None],
        role: str = "trainer",
        hello_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        """Errors: what the agent answers to hello; AgentError where it is gone, or where it does not answer within
        `hello_s` seconds, from the TimeoutError then."""
        self._sock = sock
        self._on_message = on_message
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._pending: dict[int, Pending] = {}
        self._next_id = 0
        self._closed = False
        self._made = False
        self._reader = tasks.start("agent-socket", self._read)
        try:
            hello = self.request("hello", {"version": VERSION, "role": role}, timeout_s=hello_s)
        except BaseException:
            self.close()  # nobody else will: there is no connection
            raise
        self.incarnation = str(hello.fields["incarnation"])
        self.agent_pid = int(hello.fields["pid"])
        self.secret: list[Any] | None = hello.fields["secret"]  # of the last start on several nodes, and its epoch
        self._made = True

    @property
    def is_open(self) -> bool:
        return not self._closed

    def request(
        self,
        kind: str,
        fields: dict[str, Any] | None = None,
        fds: Sequence[int] = (),
        blobs: Sequence[bytes] = (),
        timeout_s: float | None = REQUEST_TIMEOUT_S,
    ) -> messages.Message:
        """Sends and waits for the answer (timeout_s=None: as long as the agent lives).

        Errors: what the agent answers; AgentError when it is gone or silent.
        """
        pending = self.ask(kind, fields, fds, blobs)
        try:
            return pending.answer(timeout_s)
        except TimeoutError as exc:
            if is_from_outside(exc):
                raise
            raise AgentError(f"the agent did not answer {kind!r} within {timeout_s:g} s") from exc
        finally:
            pending.forget()

    def ask(
        self,
        kind: str,
        fields: dict[str, Any] | None = None,
        fds: Sequence[int] = (),
        blobs: Sequence[bytes] = (),
    ) -> Pending:
        """Sends, and waits for nothing. Errors: AgentError when the agent is gone."""
        with self._lock:
            self._next_id += 1
            pending = Pending(self, self._next_id, kind)
            self._pending[pending.id] = pending
        try:
            self._send({"t": kind, "id": pending.id, **(fields or {})}, fds, blobs)
        except BaseException:
            pending.forget()
            raise
        return pending

    def forget(self, request_id: int) -> None:
        with self._lock:
            self._pending.pop(request_id, None)

    def status(self, timeout_s: float | None = REQUEST_TIMEOUT_S) -> dict[str, Any]:
        """What the agent says of itself. Errors: as `request`."""
        return body_of(self.request("status", timeout_s=timeout_s))

    def notify(self, kind: str, fields: dict[str, Any], fds: Sequence[int] = (), blobs: Sequence[bytes] = ()) -> None:
        """Sends without an answer. Errors: AgentError when the agent is gone."""
        self._send({"t": kind, **fields}, fds, blobs)

    def close(self) -> None:
        """Ends the connection and its thread; the agent takes it as the end of this trainer's interest. So does a
        second call, where Ctrl-C has ended the first."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(OSError):  # already gone
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._reader is not threading.current_thread():
            self._reader.join(10)
        self._sock.close()

    def abandon_in_child(self) -> None:
        """In a forked child: lets go of the descriptor, so that it neither holds the socket nor speaks on it."""
        self._closed = True
        self._sock.close()

    def _send(self, fields: dict[str, Any], fds: Sequence[int], blobs: Sequence[bytes]) -> None:
        if self._closed:
            raise AgentError("the connection to the agent is closed")
        try:
            messages.send(self._sock, fields, fds, blobs)
        except OSError as exc:
            if is_from_outside(exc):
                raise
            raise AgentError(f"the agent is gone: {exc}") from exc

    def _read(self) -> None:
        why = "it closed the connection"
        try:
            while True:
                message = messages.receive(self._sock)
                if message is None:
                    return
                if "id" in message.fields and message.kind in ("reply", "error"):
                    with self._lock:
                        asked = self._pending.pop(message.fields["id"], None)
                    if asked is not None:
                        asked.future.set_result(message)
                    else:
                        message.close()
                elif "id" in message.fields and message.kind == "moving":
                    with self._lock:
                        moving = self._pending.get(message.fields["id"])
                    if moving is not None:
                        moving.moves.set()
                else:
                    self._on_message(message)
        except (OSError, CkptError) as exc:
            why = f"{type(exc).__name__}: {exc}"  # the connection is of no more use
        finally:
            self._fail_pending()
            with self._lock:
                lost, self._closed = not self._closed, True
            if lost:
                self._sock.close()
                if self._made:
                    self._on_lost(why)

    def _fail_pending(self) -> None:
        with self._lock:
            pending = list(self._pending.values())
            self._pending.clear()
        for each in pending:
            if not each.future.done():
                each.future.set_exception(AgentError("the agent went away before it answered"))


def body_of(answer: messages.Message) -> dict[str, Any]:
    """What an answer says that may be longer than a message. Errors: AgentError."""
    try:
        found = msgpack.unpackb(answer.blobs[0])
    except (LookupError, ValueError, msgpack.UnpackException) as exc:
        raise AgentError("what the agent says cannot be read") from exc
    if not isinstance(found, dict):
        raise AgentError("what the agent says cannot be read")
    return found
