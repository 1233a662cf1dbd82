"""What the faulty HTTP servers of the tests have in common: connections that are known, reset, cut, or never answered.

The server that a handler belongs to keeps the open connections in `open_sockets`, so that it can end them.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from http.server import BaseHTTPRequestHandler
from typing import Protocol


class Keeper(Protocol):
    open_sockets: set[socket.socket]


class FaultyHandler(BaseHTTPRequestHandler):
    server: Keeper
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.server.open_sockets.add(self.connection)

    def finish(self) -> None:
        self.server.open_sockets.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, *_: object) -> None:
        pass

    def reset(self) -> None:
        """Ends the connection by a reset instead of an answer."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def lose_reply(self) -> None:
        """What was asked is done; nobody is told."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def write_half(self, body: bytes) -> None:
        """The first half of a body whose whole length was announced."""
        self.close_connection = True
        self.wfile.write(body[: len(body) // 2])
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
