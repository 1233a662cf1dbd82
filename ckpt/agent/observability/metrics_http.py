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
REST_S = 1.0  # pause after a failed accept
SWEEP_S = 1.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(slots=True, eq=False)
class Caller:
    """One connection. `until_s`: when it is closed. `left`: the part of the answer still to be sent; None: the request
    has not ended yet."""

    sock: socket.socket
    until_s: float
    request: bytearray
    left: memoryview | None = None


class MetricsHttp:
    """Owns the listening socket and the connections. `page` makes the body. `address`: HOST:PORT, as bound."""

    def __init__(self, server: EventLoop, host: str, port: int, page: Callable[[], bytes]) -> None:
        """`host`: a literal address; `port` 0: any free port. Errors: OSError."""
        self._server = server
        self._make_page = page
        self._page: tuple[float, bytes] | None = None
        self._callers: list[Caller] = []  # oldest first
        self._sweeping = False
        self._closed = False
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
        self._closed = True
        self._server.unwatch(self._listener)
        self._listener.close()
        for caller in list(self._callers):
            self._drop(caller)

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
                self._rest()
                return
            sock.setblocking(False)
            if len(self._callers) >= CONNECTIONS_MAX:
                self._drop(self._callers[0])
            caller = Caller(sock, time.monotonic() + CONNECTION_S, bytearray())
            self._callers.append(caller)
            self._server.watch(sock, selectors.EVENT_READ, functools.partial(self._on_caller, caller))
            if not self._sweeping:
                self._sweeping = True
                self._server.later(SWEEP_S, self._sweep)

    def _rest(self) -> None:
        """Stops accepting for REST_S: a waiting client would keep the loop busy."""
        self._server.unwatch(self._listener)

        def again() -> None:
            if not self._closed:
                self._server.watch(self._listener, selectors.EVENT_READ, self._on_connect)

        self._server.later(REST_S, again)

    def _sweep(self) -> None:
        now_s = time.monotonic()
        for caller in [each for each in self._callers if each.until_s <= now_s]:
            self._drop(caller)
        self._sweeping = bool(self._callers)
        if self._sweeping:
            self._server.later(SWEEP_S, self._sweep)

    def _on_caller(self, caller: Caller, events: int) -> None:
        if caller not in self._callers:
            return  # dropped in this turn of the loop
        try:
            if caller.left is None:
                self._receive(caller)
            if caller.left is not None:
                self._send(caller)
        except BlockingIOError:
            return
        except Exception as exc:
            if not isinstance(exc, OSError):
                log.exception("the metrics could not be shown")
            self._drop(caller)

    def _receive(self, caller: Caller) -> None:
        part = caller.sock.recv(REQUEST_MAX + 1 - len(caller.request))
        caller.request += part
        ended = b"\r\n\r\n" in caller.request or b"\n\n" in caller.request
        if len(caller.request) > REQUEST_MAX:
            caller.left = memoryview(_answer("431 Request Header Fields Too Large", b"the request is too long\n"))
        elif ended:
            caller.left = memoryview(self._answer_to(bytes(caller.request)))
        elif not part:
            self._drop(caller)
            return
        if caller.left is not None:
            watching = functools.partial(self._on_caller, caller)
            self._server.watch(caller.sock, selectors.EVENT_WRITE, watching)

    def _answer_to(self, request: bytes) -> bytes:
        words = request.splitlines()[0].split(b" ") if request.strip() else []
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _answer("400 Bad Request", b"this is no HTTP request\n")
        if words[0] != b"GET":
            return _answer("405 Method Not Allowed", b"only GET\n", "Allow: GET\r\n")
        if words[1].split(b"?")[0] != b"/metrics":
            return _answer("404 Not Found", b"there is /metrics, and nothing else\n")
        now_s = time.monotonic()
        if self._page is None or now_s - self._page[0] >= PAGE_S:
            self._page = now_s, self._make_page()
        return _answer("200 OK", self._page[1])

    def _send(self, caller: Caller) -> None:
        while caller.left:
            caller.left = caller.left[caller.sock.send(caller.left) :]
        with contextlib.suppress(OSError):
            caller.sock.shutdown(socket.SHUT_WR)
        self._drop(caller)

    def _drop(self, caller: Caller) -> None:
        self._callers.remove(caller)
        self._server.unwatch(caller.sock)
        caller.sock.close()


def _answer(status: str, body: bytes, more: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
        f"{more}Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
