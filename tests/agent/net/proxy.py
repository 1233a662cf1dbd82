"""A network between two agents that cuts and changes what the listening side sends. What it does is said per
connection, in the order in which they are made; later ones pass unharmed."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ckpt.agent.net import handshake
from ckpt.agent.net.tcp_receiver import GO
from ckpt.ipc.addresses import Address
from ckpt.threads import Tasks

CHUNK = 64 << 10


@dataclass(frozen=True)
class Fault:
    """`after`: bytes of frames that pass before it happens. `flip`: that byte is changed; else both ends are closed,
    or, with `hang`, nothing more is passed on."""

    after: int
    flip: bool = False
    hang: bool = False


def greeting_bytes(name: str) -> int:
    """What the listening side named so sends before the first frame."""
    exchange = 2 * handshake.HEADER_BYTES + handshake.NONCE_BYTES + 32 + 1 + len(name)
    return exchange + len(handshake.Sealer(b"").seal(GO, b""))


class Proxy:
    """`every`: the fault of all connections that have none of their own. `passed`: bytes of frames each let through."""

    def __init__(self, to: Address, name: str, faults: Sequence[Fault | None], every: Fault | None = None) -> None:
        self._to, self._faults, self._every = to, faults, every
        self._skip = greeting_bytes(name)
        self.passed: list[int] = []
        self._listener = socket.create_server(
            (to.host, 0), family=socket.AF_INET6 if ":" in to.host else socket.AF_INET
        )
        self.address = Address(to.host, self._listener.getsockname()[1])
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._tasks = Tasks("proxy")
        self._socks: set[socket.socket] = set()
        self._tasks.start("loop", self._run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.eventfd_write(self._stop, 1)
        self._tasks.close()
        os.close(self._stop)

    def _run(self) -> None:
        with selectors.DefaultSelector() as self._selector, self._listener:
            self._selector.register(self._stop, selectors.EVENT_READ)
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            while True:
                for key, _ in self._selector.select():
                    if key.data is None:
                        for sock in self._socks:
                            sock.close()
                        return
                    if key.fileobj in self._socks or key.fileobj is self._listener:  # else closed in this round
                        key.data()

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection((self._to.host, self._to.port))
        except OSError:  # nobody is there any more
            near.close()
            return
        number = len(self.passed)
        self.passed.append(-self._skip)
        fault = self._faults[number] if number < len(self._faults) else self._every
        self._socks |= {near, far}
        self._selector.register(near, selectors.EVENT_READ, lambda: self._forward(near, far))
        self._selector.register(far, selectors.EVENT_READ, lambda: self._backward(far, near, number, fault))

    def _close(self, *socks: socket.socket) -> None:
        for sock in socks:
            if sock in self._socks:
                self._socks.discard(sock)
                with contextlib.suppress(KeyError):  # it hangs
                    self._selector.unregister(sock)
                sock.close()

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        try:
            data = near.recv(CHUNK)
            far.sendall(data)
        except OSError:
            data = b""
        if not data:
            self._close(near, far)

    def _backward(self, far: socket.socket, near: socket.socket, number: int, fault: Fault | None) -> None:
        at = self.passed[number]
        room = CHUNK
        if fault is not None and not fault.flip:
            room = min(CHUNK, fault.after - at)
        try:
            data = far.recv(room) if room else b""
            if fault is not None and fault.flip and at <= fault.after < at + len(data):
                data = bytearray(data)
                data[fault.after - at] ^= 0x10
            near.sendall(data)
        except OSError:
            data = b""
        self.passed[number] += len(data)
        if fault is not None and not fault.flip and self.passed[number] >= fault.after:
            if fault.hang:
                self._selector.unregister(far)
            else:
                self._close(near, far)
        elif not data:
            self._close(near, far)
