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
from ckpt.agent.runtime.coroutines import Cancelled, Promise, spawn
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
        self._is_connecting = isinstance(exchange, Dialler)
        self._running = spawn(self._run())

    def cancel(self) -> None:
        self._running.cancel()

    def time_out(self) -> None:
        """Fails the handshake, unless it has ended."""
        if not self._running.is_settled:
            self.cancel()
            what = "could not be reached" if self._is_connecting else "did not greet"
            self._on_error(AgentError(f"{self._peer_text} {what} in time"))

    # -- inside

    async def _run(self) -> None:
        try:
            session = await self._greet()
        except BaseException as exc:
            if isinstance(exc, NotAuthentic):
                with contextlib.suppress(OSError):
                    self._sock.send(exc.answer)
            self._loop.unwatch(self._sock)
            self._sock.close()
            if isinstance(exc, Cancelled | GeneratorExit):
                raise
            self._on_error(exc if isinstance(exc, AgentError) else AgentError(f"{self._peer_text}: {exc}"))
        else:
            self._loop.unwatch(self._sock)
            self._on_done(self._sock, session)

    async def _greet(self) -> Session:
        """Errors: OSError, EOFError, NotAuthentic."""
        await self._wait_for(selectors.EVENT_WRITE if self._is_connecting else selectors.EVENT_READ)
        if isinstance(self._handshake, Dialler):
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            self._is_connecting = False
            self._send(self._handshake.hello)
        while self._handshake.session is None:
            header = await self._receive(handshake.HEADER_BYTES)
            body = await self._receive(handshake.body_bytes(header))
            self._send(self._handshake.step(header + body))
        return self._handshake.session

    async def _receive(self, count: int) -> bytes:
        received = b""
        while len(received) < count:
            try:
                got = self._sock.recv(count - len(received))
            except BlockingIOError:
                await self._wait_for(selectors.EVENT_READ)
                continue
            if not got:
                raise EOFError("closed the connection in the middle of the handshake: is the secret the same?")
            received += got
        return received

    async def _wait_for(self, events: int) -> None:
        ready = Promise[None]()
        self._loop.watch(self._sock, events, lambda _: ready.set_result(None))
        await ready

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
