"""The HTTP server of the agent's metrics: it answers GET /metrics and nothing else. Runs on the agent's event loop.

Every client that can connect may read the page, and can do nothing else. A request has at most REQUEST_MAX bytes. A
connection lives at most CONNECTION_S, and closes after one answer. At most CONNECTIONS_MAX are open: a further one
replaces the oldest. The page is made at most once in PAGE_S.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt.agent.runtime.event_loop import EventLoop

log = logging.getLogger("ckpt")

REQUEST_MAX = 8192
CONNECTION_S = 5.0
CONNECTIONS_MAX = 16
PAGE_S = 0.2
ACCEPT_AT_ONCE = 8
ACCEPT_PAUSE_S = 1.0  # pause after a failed accept
SWEEP_S = 1.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(slots=True, eq=False)
class Caller:
    """One connection. `deadline_s`: when it is closed. `unsent`: the part of the answer still to be sent; None: the
    request has not ended yet."""

    sock: socket.socket
    deadline_s: float
    request: bytearray
    unsent: memoryview | None = None


class MetricsHttp:
    """Owns the listening socket and the connections. `page` makes the body. `address`: HOST:PORT, as bound."""

    def __init__(self, server: EventLoop, host: str, port: int, page: Callable[[], bytes]) -> None:
        """`host`: a literal address; `port` 0: any free port. Errors: OSError."""
        self._server = server
        self._make_page = page
        self._cached_page: tuple[float, bytes] | None = None
        self._callers: list[Caller] = []  # oldest first
        self._is_sweep_scheduled = False
        self._is_closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
            self._listener.listen(128)
        except BaseException:
            self._listener.close()
            raise
        bound = int(self._listener.getsockname()[1])
        self.address = f"[{host}]:{bound}" if family == socket.AF_INET6 else f"{host}:{bound}"
        server.watch(self._listener, selectors.EVENT_READ, self._on_connect)

    def close(self) -> None:
        self._is_closed = True
        self._server.unwatch(self._listener)
        self._listener.close()
        for caller in list(self._callers):
            self._close_caller(caller)

    # -- inside

    def _on_connect(self, events: int) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            # No descriptor is free, or the client is gone again.
            except OSError as exc:
                log.info("a connection to the metrics could not be accepted: %s", exc)
                self._pause_accepting()
                return
            sock.setblocking(False)
            if len(self._callers) >= CONNECTIONS_MAX:
                self._close_caller(self._callers[0])
            caller = Caller(sock, time.monotonic() + CONNECTION_S, bytearray())
            self._callers.append(caller)
            self._server.watch(sock, selectors.EVENT_READ, functools.partial(self._on_caller, caller))
            if not self._is_sweep_scheduled:
                self._is_sweep_scheduled = True
                self._server.call_later(SWEEP_S, self._sweep)

    def _pause_accepting(self) -> None:
        """Stops accepting for ACCEPT_PAUSE_S: a waiting client would keep the loop busy."""
        self._server.unwatch(self._listener)

        def again() -> None:
            if not self._is_closed:
                self._server.watch(self._listener, selectors.EVENT_READ, self._on_connect)

        self._server.call_later(ACCEPT_PAUSE_S, again)

    def _sweep(self) -> None:
        now_s = time.monotonic()
        for caller in [each for each in self._callers if each.deadline_s <= now_s]:
            self._close_caller(caller)
        self._is_sweep_scheduled = bool(self._callers)
        if self._is_sweep_scheduled:
            self._server.call_later(SWEEP_S, self._sweep)

    def _on_caller(self, caller: Caller, events: int) -> None:
        if caller not in self._callers:
            return  # dropped in this turn of the loop
        try:
            if caller.unsent is None:
                self._receive(caller)
            if caller.unsent is not None:
                self._send(caller)
        except BlockingIOError:
            return
        except Exception as exc:
            if not isinstance(exc, OSError):
                log.exception("the metrics could not be shown")
            self._close_caller(caller)

    def _receive(self, caller: Caller) -> None:
        part = caller.sock.recv(REQUEST_MAX + 1 - len(caller.request))
        caller.request += part
        ended = b"\r\n\r\n" in caller.request or b"\n\n" in caller.request
        if len(caller.request) > REQUEST_MAX:
            caller.unsent = memoryview(
                _format_response("431 Request Header Fields Too Large", b"the request is too long\n")
            )
        elif ended:
            caller.unsent = memoryview(self._make_response(bytes(caller.request)))
        elif not part:
            self._close_caller(caller)
            return
        if caller.unsent is not None:
            watching = functools.partial(self._on_caller, caller)
            self._server.watch(caller.sock, selectors.EVENT_WRITE, watching)

    def _make_response(self, request: bytes) -> bytes:
        words = request.splitlines()[0].split(b" ") if request.strip() else []
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _format_response("400 Bad Request", b"this is no HTTP request\n")
        if words[0] != b"GET":
            return _format_response("405 Method Not Allowed", b"only GET\n", "Allow: GET\r\n")
        if words[1].split(b"?")[0] != b"/metrics":
            return _format_response("404 Not Found", b"there is /metrics, and nothing else\n")
        now_s = time.monotonic()
        if self._cached_page is None or now_s - self._cached_page[0] >= PAGE_S:
            self._cached_page = now_s, self._make_page()
        return _format_response("200 OK", self._cached_page[1])

    def _send(self, caller: Caller) -> None:
        while caller.unsent:
            caller.unsent = caller.unsent[caller.sock.send(caller.unsent) :]
        with contextlib.suppress(OSError):
            caller.sock.shutdown(socket.SHUT_WR)
        self._close_caller(caller)

    def _close_caller(self, caller: Caller) -> None:
        self._callers.remove(caller)
        self._server.unwatch(caller.sock)
        caller.sock.close()


def _format_response(status: str, body: bytes, more: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
        f"{more}Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
