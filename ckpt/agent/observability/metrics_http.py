"""The HTTP server of the agent's metrics: it answers GET /metrics and nothing else. Runs on the agent's event loop.

Every client that can connect may read the page, and can do nothing else. A request has at most REQUEST_MAX bytes. A
connection lives at most CONNECTION_S, and closes after one answer. At most CONNECTIONS_MAX are open: a further one
replaces the oldest. The page is made at most once in PAGE_S.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from collections.abc import Callable

from ckpt.agent.runtime.connections import Loop, ServerSocket, create_server

log = logging.getLogger("ckpt")

REQUEST_MAX = 8192
CONNECTION_S = 5.0
CONNECTIONS_MAX = 16
PAGE_S = 0.2
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsHttp:
    """Owns the listening socket and the connections. `page` makes the body. `address`: HOST:PORT, as bound."""

    def __init__(self, loop: Loop, host: str, port: int, page: Callable[[], bytes]) -> None:
        """`host`: a literal address; `port` 0: any free port. Errors: OSError."""
        self.loop = loop
        self._make_page = page
        self._cached_page: tuple[float, bytes] | None = None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = create_server(family, (host, port))
        bound = int(sock.getsockname()[1])
        self.address = f"[{host}]:{bound}" if family == socket.AF_INET6 else f"{host}:{bound}"
        self.listener = ServerSocket(loop, sock, self._on_connection)

    def close(self) -> None:
        self.listener.close()

    def make_response(self, request: bytes) -> bytes:
        if len(request) > REQUEST_MAX:
            return _format_response("431 Request Header Fields Too Large", b"the request is too long\n")
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

    def _on_connection(self, sock: socket.socket, address: object) -> None:
        if len(self.listener.guests) >= CONNECTIONS_MAX:
            self.listener.cancel_oldest()
        self.listener.add_guest(_Caller(self, sock), CONNECTION_S)


class _Caller:
    """One connection."""

    def __init__(self, server: MetricsHttp, sock: socket.socket) -> None:
        self._server, self._sock = server, sock
        self._request = bytearray()
        self._unsent: memoryview | None = None  # the part of the answer still to be sent; None: the request goes on
        server.loop.watch(sock, selectors.EVENT_READ, self._on_ready)

    def cancel(self) -> None:
        self._server.listener.guests.pop(self, None)
        self._server.loop.unwatch(self._sock)
        self._sock.close()

    time_out = cancel

    def _on_ready(self, events: int) -> None:
        if self._sock.fileno() < 0:
            return  # dropped in this turn of the loop
        try:
            if self._unsent is None:
                self._receive()
            if self._unsent is not None:
                self._send(self._unsent)
        except BlockingIOError:
            return
        except Exception as exc:
            if not isinstance(exc, OSError):
                log.exception("the metrics could not be shown")
            self.cancel()

    def _receive(self) -> None:
        part = self._sock.recv(REQUEST_MAX + 1 - len(self._request))
        self._request += part
        if b"\r\n\r\n" in self._request or b"\n\n" in self._request or len(self._request) > REQUEST_MAX:
            self._unsent = memoryview(self._server.make_response(bytes(self._request)))
            self._server.loop.watch(self._sock, selectors.EVENT_WRITE, self._on_ready)
        elif not part:
            self.cancel()

    def _send(self, left: memoryview) -> None:
        while left:
            left = self._unsent = left[self._sock.send(left) :]
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        self.cancel()


def _format_response(status: str, body: bytes, more: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
        f"{more}Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
