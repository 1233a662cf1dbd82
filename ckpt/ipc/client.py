"""The client of an agent, used by trainers and tools: finds the agent, starts one if there is none, exchanges messages.

There is one agent per (user, node, store URL). Its socket and locks are in one folder of the user, mode 0700. A client
that finds no agent takes the start lock, looks again, spawns an agent in a new session and waits until it serves. So
n ranks that start together start one agent. The agent holds the run lock as long as it lives. It unlinks a stale
socket only while it holds this lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from ckpt.errors import AgentError, CkptError, UsageError, is_injected
from ckpt.ipc import messages
from ckpt.ipc.spawn import spawn_agent
from ckpt.settings import Settings
from ckpt.storage.names import redact_url
from ckpt.threads import Flag, Outcome, Tasks

# The version of the messages. An agent of another version ends if no trainer needs it (see agent_process).
VERSION = 1
START_TIMEOUT_S = 30.0
REQUEST_TIMEOUT_S = 120.0
# A working agent accepts connections at once, even many of them.
ACCEPT_S = 10.0


@dataclass(frozen=True, slots=True)
class AgentPaths:
    """The paths of one agent's files. `socket` has at most 107 bytes, the limit of a Unix address."""

    folder: Path
    socket: Path
    run_lock: Path
    start_lock: Path
    log: Path


def make_agent_paths(url: str, settings: Settings) -> AgentPaths:
    """The paths of the agent of `url`; makes their folder. Errors: AgentError if the folder cannot be made, is not
    private to the user, or the path is too long; UsageError if the URL is no UTF-8."""
    folder = settings.runtime_dir
    try:
        named = url.encode()
    except UnicodeEncodeError as exc:
        raise UsageError(
            f"the name {redact_url(url)!r} is not valid UTF-8, so no agent can serve it; rename that folder"
        ) from exc
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.lstat()
    except OSError as exc:
        text = f"cannot make the folder for ckpt's sockets, {folder}: {exc}; set CKPT_RUNTIME_DIR to another folder"
        raise AgentError(text) from exc
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise AgentError(
            f"{folder} must be a folder of your own with mode 0700 (it has mode {info.st_mode & 0o777:o}, "
            f"owner {info.st_uid}); run chmod 700 on it, or set CKPT_RUNTIME_DIR to another folder for ckpt's sockets"
        )
    name = "agent-" + hashlib.sha256(named).hexdigest()[:16]
    sock = folder / f"{name}.sock"
    if len(os.fsencode(sock)) > 107:
        raise AgentError(f"the socket path {sock} is longer than 107 bytes; set CKPT_RUNTIME_DIR to a shorter path")
    log = settings.agent_log or folder / f"{name}.log"
    return AgentPaths(folder, sock, folder / f"{name}.lock", folder / f"{name}.start", log)


def connect_nowait(place: AgentPaths) -> socket.socket | None:
    """A connection to the agent, or None if no agent listens. Errors: AgentError; its cause is a TimeoutError if the
    agent's backlog stays full for ACCEPT_S."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    until_s = time.monotonic() + ACCEPT_S
    try:
        # A blocking connect would end at a signal, and Python would take that for a connection. So this loop waits.
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
        text = f"the agent at {place.socket} accepted no connection within {ACCEPT_S:g} s"
        raise AgentError(text) from TimeoutError(str(exc))
    except OSError as exc:
        sock.close()
        raise AgentError(f"cannot connect to the agent at {place.socket}: {exc}") from exc
    return sock


def connect(url: str, settings: Settings, timeout_s: float = START_TIMEOUT_S) -> socket.socket:
    """A connection to the agent of `url`; starts the agent if there is none. Errors: AgentError, with the end of the
    agent's log if the agent failed to start; those of `connect_nowait`."""
    place = make_agent_paths(url, settings)
    deadline = time.monotonic() + timeout_s
    sock = connect_nowait(place)
    if sock is not None:
        return sock
    with _locked(place.start_lock, deadline):
        while (sock := connect_nowait(place)) is None:
            if not spawn_agent(url, place.socket, place.run_lock, place.log, deadline):
                # An agent that is just ending still holds the run lock.
                time.sleep(0.05)
            if time.monotonic() > deadline:
                raise AgentError(
                    f"the agent of {redact_url(url)} did not start within {timeout_s:g} s; see its log {place.log}"
                )
    return sock


@contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:  # a read-only file system, or a full one
        text = f"cannot start an agent in the folder for ckpt's sockets: {exc}; set CKPT_RUNTIME_DIR to another folder"
        raise AgentError(text) from exc
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise AgentError(
                        f"another process holds {path} and has not started the agent in time; end that process, or "
                        "start again later"
                    ) from None
                time.sleep(0.005)
        yield
    finally:
        os.close(fd)


class Pending:
    """A request without an answer yet. One thread waits for the answer, and calls `forget` when it stops waiting."""

    def __init__(self, connection: Connection, request_id: int, kind: str) -> None:
        self.id = request_id
        self.future = Outcome[messages.Message]()
        self.progress = Flag()  # the agent has reported progress since the last look
        self._connection, self._kind = connection, kind

    def wait_for_answer(self, timeout_s: float | None) -> messages.Message:
        """The answer. Errors: the error that the agent answered; AgentError if the agent is gone; TimeoutError."""
        message = self.future.result(timeout_s)
        messages.raise_error(message)
        return message

    def wait_while_progressing(self, timeout_s: float) -> messages.Message | None:
        """The answer; None if there is none within `timeout_s`, but the agent reported progress in that time. Errors:
        those of `answer`; AgentError, instead of TimeoutError, if the agent reported no progress."""
        try:
            return self.wait_for_answer(timeout_s)
        except TimeoutError as exc:
            if is_injected(exc):
                raise
            if not self.progress.is_set():
                text = f"the agent did not answer {self._kind!r} and made no progress for {timeout_s:g} s"
                raise AgentError(text) from None
            self.progress.clear()
            return None

    def forget(self) -> None:
        self._connection.forget(self.id)


class Connection:
    """A connection to an agent, with a reader thread. Answers go to their requests, other messages to `on_message`.

    `on_message` runs on the reader thread, in the order of arrival, and must not wait for an answer itself. `on_lost`
    runs there once, with the reason, if the connection is lost after the agent answered hello. Thread-safe. After
    `close` every request raises AgentError.
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
        """Says hello, and takes over the socket. Errors: the error that the agent answered to hello; AgentError if the
        agent is gone, or does not answer within `hello_s` (then its cause is a TimeoutError)."""
        self._sock = sock
        self._on_message = on_message
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._pending_by_id: dict[int, Pending] = {}
        self._next_id = 0
        self._is_closed = False
        self._is_ready = False
        self._reader = tasks.start("agent-socket", self._read_messages)
        try:
            hello = self.request("hello", {"version": VERSION, "role": role}, timeout_s=hello_s)
        except BaseException:
            self.close()
            raise
        self.incarnation = str(hello.fields["incarnation"])
        self.agent_pid = int(hello.fields["pid"])
        # The secret of the last start on several nodes, and the epoch of that start.
        self.known_secret: list[Any] | None = hello.fields["secret"]
        self._is_ready = True

    @property
    def is_open(self) -> bool:
        return not self._is_closed

    def request(
        self,
        kind: str,
        fields: dict[str, Any] | None = None,
        fds: Sequence[int] = (),
        blobs: Sequence[bytes] = (),
        timeout_s: float | None = REQUEST_TIMEOUT_S,
    ) -> messages.Message:
        """Sends a request and returns its answer. With timeout_s=None it waits as long as the agent lives.

        Errors: the error that the agent answered; AgentError if the agent is gone or does not answer in time.
        """
        pending = self.start_request(kind, fields, fds, blobs)
        try:
            return pending.wait_for_answer(timeout_s)
        except TimeoutError as exc:
            if is_injected(exc):
                raise
            raise AgentError(f"the agent did not answer {kind!r} within {timeout_s:g} s") from exc
        finally:
            pending.forget()

    def start_request(
        self,
        kind: str,
        fields: dict[str, Any] | None = None,
        fds: Sequence[int] = (),
        blobs: Sequence[bytes] = (),
    ) -> Pending:
        """Sends a request and does not wait. Errors: AgentError if the agent is gone."""
        with self._lock:
            self._next_id += 1
            pending = Pending(self, self._next_id, kind)
            self._pending_by_id[pending.id] = pending
        try:
            self._send({"t": kind, "id": pending.id, **(fields or {})}, fds, blobs)
        except BaseException:
            pending.forget()
            raise
        return pending

    def forget(self, request_id: int) -> None:
        with self._lock:
            self._pending_by_id.pop(request_id, None)

    def status(self, timeout_s: float | None = REQUEST_TIMEOUT_S) -> dict[str, Any]:
        """The agent's status. Errors: those of `request` and `decode_body`."""
        return decode_body(self.request("status", timeout_s=timeout_s))

    def notify(self, kind: str, fields: dict[str, Any], fds: Sequence[int] = (), blobs: Sequence[bytes] = ()) -> None:
        """Sends a message that has no answer. Errors: AgentError if the agent is gone."""
        self._send({"t": kind, **fields}, fds, blobs)

    def close(self) -> None:
        """Ends the connection and its thread; the agent then treats this trainer as gone. A second call finishes the
        work if Ctrl-C interrupted the first."""
        with self._lock:
            self._is_closed = True
        with contextlib.suppress(OSError):  # already gone
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._reader is not threading.current_thread():
            self._reader.join(10)
        self._sock.close()

    def abandon_in_child(self) -> None:
        """Closes the descriptor in a forked child, so that the child neither keeps the socket open nor uses it."""
        self._is_closed = True
        self._sock.close()

    def _send(self, fields: dict[str, Any], fds: Sequence[int], blobs: Sequence[bytes]) -> None:
        if self._is_closed:
            raise AgentError("the connection to the agent is closed")
        try:
            messages.send(self._sock, fields, fds, blobs)
        except OSError as exc:
            if is_injected(exc):
                raise
            raise AgentError(f"the agent is gone: {exc}") from exc

    def _read_messages(self) -> None:
        why = "it closed the connection"
        try:
            while True:
                message = messages.receive(self._sock)
                if message is None:
                    return
                if "id" in message.fields and message.kind in ("reply", "error"):
                    with self._lock:
                        asked = self._pending_by_id.pop(message.fields["id"], None)
                    if asked is not None:
                        asked.future.set_result(message)
                    else:
                        message.close()
                elif "id" in message.fields and message.kind == "progress":
                    with self._lock:
                        moving = self._pending_by_id.get(message.fields["id"])
                    if moving is not None:
                        moving.progress.set()
                else:
                    self._on_message(message)
        except (OSError, CkptError) as exc:
            why = f"{type(exc).__name__}: {exc}"
        finally:
            self._fail_pending()
            with self._lock:
                lost, self._is_closed = not self._is_closed, True
            if lost:
                self._sock.close()
                if self._is_ready:
                    self._on_lost(why)

    def _fail_pending(self) -> None:
        with self._lock:
            pending = list(self._pending_by_id.values())
            self._pending_by_id.clear()
        for each in pending:
            if not each.future.done():
                each.future.set_exception(AgentError("the agent ended before it answered"))


def decode_body(answer: messages.Message) -> dict[str, Any]:
    """The body of an answer that travels as a blob, since it may be too long for a message. Errors: AgentError if it
    cannot be read."""
    try:
        found = msgpack.unpackb(answer.blobs[0])
    except (LookupError, ValueError, msgpack.UnpackException) as exc:
        raise AgentError("the answer of the agent cannot be read") from exc
    if not isinstance(found, dict):
        raise AgentError("the answer of the agent cannot be read")
    return found
