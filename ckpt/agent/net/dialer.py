"""The dialer and the listener: connect, accept and do the handshake on the agent's main thread, without blocking it.

An incoming connection that is not from an agent of the run is closed: after HANDSHAKE_S, at its first wrong byte, or
when HALF_OPEN_MAX newer ones wait. The oldest is closed first, since a genuine agent finishes within a few round trips.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
from collections.abc import Callable

from ckpt.agent.net import handshake
from ckpt.agent.net.handshake import Answerer, Dialler, NotAuthentic, Session
from ckpt.agent.runtime.connections import Loop, ServerSocket, create_server
from ckpt.clock import Clock, SystemClock
from ckpt.errors import AgentError
from ckpt.ipc.addresses import Address, SocketAddress, resolve, tune
from ckpt.types import format_count

log = logging.getLogger("ckpt")

CONNECT_S = 5.0
HANDSHAKE_S = 5.0
HALF_OPEN_MAX = 64
LOG_INTERVAL_S = 60.0  # the least time between log lines about refused connections


Done = Callable[[socket.socket, Session], None]
Failed = Callable[[AgentError], None]


class PendingHandshake:
    """One handshake under way; owns the socket until `done`.

    Exactly one of `done` and `failed` is called, unless `cancel` comes first, and never inside the constructor. `done`
    takes over the socket, which is non-blocking; nothing after the handshake was read from it. The creator calls
    `time_out` when the handshake has lasted too long."""

    def __init__(
        self, loop: Loop, sock: socket.socket, exchange: Dialler | Answerer, to: str, done: Done, failed: Failed
    ) -> None:
        self._loop, self._sock, self._handshake, self._peer_text = loop, sock, exchange, to
        self._on_done, self._on_error = done, failed
        self._buffer = bytearray(handshake.HEADER_BYTES)
        self._received_bytes = 0
        self._is_open = True
        self._is_connecting = isinstance(exchange, Dialler)
        loop.watch(sock, selectors.EVENT_WRITE if self._is_connecting else selectors.EVENT_READ, self._on_ready)

    def cancel(self) -> None:
        if self._is_open:
            self._stop_watching()
            self._sock.close()

    def _fail(self, error: AgentError) -> None:
        if self._is_open:
            self.cancel()
            self._on_error(error)

    def _stop_watching(self) -> None:
        self._is_open = False
        self._loop.unwatch(self._sock)

    def time_out(self) -> None:
        """Fails the handshake, unless it has ended."""
        what = "could not be reached" if self._is_connecting else "did not greet"
        self._fail(AgentError(f"{self._peer_text} {what} in time"))

    def _on_ready(self, events: int) -> None:
        if not self._is_open:
            return
        try:
            self._step()
        except BlockingIOError:
            return
        except NotAuthentic as exc:
            with contextlib.suppress(OSError):
                self._sock.send(exc.answer)
            self._fail(exc)
        except (OSError, EOFError) as exc:
            self._fail(AgentError(f"{self._peer_text}: {exc}"))

    def _step(self) -> None:
        if self._is_connecting:
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            self._is_connecting = False
            self._loop.watch(self._sock, selectors.EVENT_READ, self._on_ready)
            assert isinstance(self._handshake, Dialler)
            self._send(self._handshake.hello)
            return
        while True:
            got = self._sock.recv_into(memoryview(self._buffer)[self._received_bytes :])
            if not got:
                raise EOFError("closed the connection in the middle of the handshake: is the secret the same?")
            self._received_bytes += got
            if self._received_bytes < len(self._buffer):
                continue
            # Every message has a body, so this length means that only the header is here.
            if self._received_bytes == handshake.HEADER_BYTES:
                self._buffer.extend(bytes(handshake.body_bytes(self._buffer)))
                if self._received_bytes < len(self._buffer):
                    continue
            self._send(self._handshake.step(bytes(self._buffer)))
            self._buffer, self._received_bytes = bytearray(handshake.HEADER_BYTES), 0
            session = self._handshake.session
            if session is not None:
                self._stop_watching()
                self._on_done(self._sock, session)
                return

    def _send(self, message: bytes) -> None:
        """Sends a handshake message. It has a few hundred bytes and the socket's buffer is empty, so a short send is an
        error."""
        if message and self._sock.send(message) != len(message):
            raise OSError(errno.ENOBUFS, "there is no room to send")


def dial(loop: Loop, place: SocketAddress, exchange: Dialler, done: Done, failed: Failed) -> PendingHandshake:
    """Starts a connection and its handshake. Errors: AgentError if it fails at once, as without a route; later errors
    go to `failed`."""
    to = f"the agent at {Address(str(place.sockaddr[0]), int(place.sockaddr[1]))}"
    sock: socket.socket | None = None
    try:
        sock = socket.socket(place.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        tune(sock)
        code = sock.connect_ex(place.sockaddr)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
        greeting = PendingHandshake(loop, sock, exchange, to, done, failed)
        loop.call_later(CONNECT_S + HANDSHAKE_S, greeting.time_out)
        return greeting
    except BaseException as exc:
        if sock is not None:
            sock.close()
        if isinstance(exc, OSError):
            raise AgentError(f"{to} cannot be connected to: {exc.strerror or exc}") from exc
        raise


class PeerListener:
    """A listening socket and the handshakes under way on it; owns them. Main thread only.

    `made`: makes the answering side of one handshake. `done`: takes over each connection whose handshake succeeded.
    `address`: where it listens, with the port that the kernel chose if 0 was given."""

    def __init__(
        self,
        loop: Loop,
        address: Address,
        made: Callable[[], Answerer],
        done: Done,
        clock: Clock | None = None,
    ) -> None:
        """Starts to listen. A host name (no literal) is looked up, which blocks. Errors: AgentError if it fails."""
        self._loop, self._make_answerer, self._on_connection = loop, made, done
        self._clock = clock or SystemClock()
        self._refused_count = 0
        self._last_log_s: float | None = None
        try:
            place = resolve(address, passive=True)[0]
            sock = create_server(place.family, place.sockaddr)
        except (AgentError, OSError) as exc:
            what = "--listen and CKPT_LISTEN take an address of this machine and a port that is free (0: any)"
            raise AgentError(f"cannot listen on {address}: {exc}; {what}") from exc
        self.address = Address(address.host, int(sock.getsockname()[1]))
        self._listener = ServerSocket(loop, sock, self._start_handshake, clock)

    @property
    def half_open_count(self) -> int:
        return len(self._listener.guests)

    def close(self) -> None:
        self._listener.close()

    def _start_handshake(self, sock: socket.socket, sockaddr: tuple[str, int]) -> None:
        if self.half_open_count >= HALF_OPEN_MAX:
            self._listener.cancel_oldest()
            self._refuse("too many connections wait for a greeting")

        def done(sock: socket.socket, session: Session) -> None:
            self._listener.guests.pop(greeting, None)
            self._on_connection(sock, session)

        def failed(error: AgentError) -> None:
            self._listener.guests.pop(greeting, None)
            self._refuse(str(error))

        try:
            tune(sock)
            caller = f"who called from {sockaddr[0]}"
            greeting = PendingHandshake(self._loop, sock, self._make_answerer(), caller, done, failed)
            self._listener.add_guest(greeting, HANDSHAKE_S)
        except OSError as exc:
            sock.close()
            self._refuse(f"a caller from {sockaddr[0]}: {exc}")

    def _refuse(self, why: str) -> None:
        """Logs a refused connection, at most once in LOG_INTERVAL_S, so that strangers cannot fill the disk."""
        self._refused_count += 1
        now_s = self._clock.now_s()
        if self._last_log_s is None or now_s - self._last_log_s >= LOG_INTERVAL_S:
            were = "was" if self._refused_count == 1 else "were"
            text = f"{format_count(self._refused_count, 'connection')} from other hosts {were} refused"
            log.warning("%s, the last because: %s", text, why)
            self._refused_count, self._last_log_s = 0, now_s
