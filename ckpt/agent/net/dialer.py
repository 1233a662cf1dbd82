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
from typing import Protocol

from ckpt.agent.net import handshake
from ckpt.agent.net.handshake import Answerer, Dialler, NotAuthentic, Session
from ckpt.clock import Clock, SystemClock
from ckpt.errors import AgentError
from ckpt.ipc.addresses import Address, SocketAddress, resolve, tune
from ckpt.types import format_count

log = logging.getLogger("ckpt")

CONNECT_S = 5.0
HANDSHAKE_S = 5.0
HALF_OPEN_MAX = 64
SWEEP_S = 0.1  # the least time between checks for overdue handshakes
ACCEPT_RETRY_S = 1.0  # the pause before accepting again after `accept` failed
LOG_INTERVAL_S = 60.0  # the least time between log lines about refused connections
_BACKLOG = 256


class Loop(Protocol):
    """The part of the agent's main loop that connections need. Only `post` may be called from any thread."""

    def watch(self, sock: socket.socket, events: int, what: Callable[[int], None]) -> None:
        """Calls `what(events)` whenever the socket is ready for some of `events` (selectors.EVENT_READ, EVENT_WRITE).

        A second call for the same socket replaces the first. `what` may be called once more after `unwatch`, in the
        same iteration of the loop."""
        ...

    def unwatch(self, sock: socket.socket) -> None: ...

    def post(self, what: Callable[[], None]) -> None:
        """Runs `what` on the main thread, soon; calls run in order."""
        ...

    def call_later(self, delay_s: float, what: Callable[[], None]) -> None:
        """Runs `what` on the main thread after `delay_s`. It cannot be cancelled."""
        ...


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
    try:
        sock = socket.socket(place.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as exc:
        raise AgentError(f"{to} cannot be connected to: {exc}") from exc
    try:
        tune(sock)
        code = sock.connect_ex(place.sockaddr)
        if code not in (0, errno.EINPROGRESS):
            raise AgentError(f"{to} cannot be connected to: {os.strerror(code)}")
        greeting = PendingHandshake(loop, sock, exchange, to, done, failed)
        loop.call_later(CONNECT_S + HANDSHAKE_S, greeting.time_out)
        return greeting
    except OSError as exc:
        sock.close()
        raise AgentError(f"{to} cannot be connected to: {exc}") from exc
    except BaseException:
        sock.close()
        raise


def _listen_error(address: Address, why: object) -> AgentError:
    what = "--listen and CKPT_LISTEN take an address of this machine and a port that is free (0: any)"
    return AgentError(f"cannot listen on {address}: {why}; {what}")


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
        self._half_open: dict[int, tuple[PendingHandshake, float]] = {}  # with its deadline; oldest first
        self._is_sweep_scheduled = False
        self._last_number = 0
        self._refused_count = 0
        self._last_log_s: float | None = None
        try:
            place = resolve(address, passive=True)[0]
        except AgentError as exc:
            raise _listen_error(address, exc) from exc
        self._sock = socket.socket(place.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind(place.sockaddr)
            self._sock.listen(_BACKLOG)
        except OSError as exc:
            self._sock.close()
            raise _listen_error(address, exc.strerror or exc) from exc
        self.address = Address(address.host, int(self._sock.getsockname()[1]))
        loop.watch(self._sock, selectors.EVENT_READ, self._on_connect)

    @property
    def half_open_count(self) -> int:
        return len(self._half_open)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.unwatch(self._sock)
            self._sock.close()
        for greeting, _ in self._half_open.values():
            greeting.cancel()
        self._half_open.clear()

    def _on_connect(self, events: int) -> None:
        # The bound gives other sockets of the loop their turn.
        for _ in range(HALF_OPEN_MAX):
            if self._sock.fileno() < 0:
                return
            try:
                sock, sockaddr = self._sock.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # the peer has closed the connection already
            except OSError as exc:
                # No more descriptors. Accepting again at once would keep the loop busy.
                log.warning("connections of other agents cannot be accepted: %s", exc)
                self._loop.unwatch(self._sock)
                self._loop.call_later(ACCEPT_RETRY_S, self._resume_accepting)
                return
            self._start_handshake(sock, str(sockaddr[0]))

    def _resume_accepting(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.watch(self._sock, selectors.EVENT_READ, self._on_connect)

    def _start_handshake(self, sock: socket.socket, host: str) -> None:
        if len(self._half_open) >= HALF_OPEN_MAX:
            oldest = next(iter(self._half_open))
            self._half_open.pop(oldest)[0].cancel()
            self._refuse("too many connections wait for a greeting")
        self._last_number += 1
        number = self._last_number

        def done(sock: socket.socket, session: Session) -> None:
            self._half_open.pop(number, None)
            self._on_connection(sock, session)

        def failed(error: AgentError) -> None:
            self._half_open.pop(number, None)
            self._refuse(str(error))

        try:
            sock.setblocking(False)
            tune(sock)
            greeting = PendingHandshake(
                self._loop, sock, self._make_answerer(), f"who called from {host}", done, failed
            )
            self._half_open[number] = greeting, self._clock.now_s() + HANDSHAKE_S
            if not self._is_sweep_scheduled:
                self._sweep()
        except OSError as exc:
            sock.close()
            self._refuse(f"a caller from {host}: {exc}")

    def _sweep(self) -> None:
        """Ends overdue handshakes. One timer serves all, since a flood of connections would leave a flood of timers."""
        now_s = self._clock.now_s()
        for greeting, end_s in list(self._half_open.values()):
            if end_s <= now_s:
                greeting.time_out()
        self._is_sweep_scheduled = bool(self._half_open)
        if self._is_sweep_scheduled:
            _, end_s = next(iter(self._half_open.values()))
            self._loop.call_later(max(end_s - now_s, SWEEP_S), self._sweep)

    def _refuse(self, why: str) -> None:
        """Logs a refused connection, at most once in LOG_INTERVAL_S, so that strangers cannot fill the disk."""
        self._refused_count += 1
        now_s = self._clock.now_s()
        if self._last_log_s is None or now_s - self._last_log_s >= LOG_INTERVAL_S:
            were = "was" if self._refused_count == 1 else "were"
            text = f"{format_count(self._refused_count, 'connection')} from other hosts {were} refused"
            log.warning("%s, the last because: %s", text, why)
            self._refused_count, self._last_log_s = 0, now_s
