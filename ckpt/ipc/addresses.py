"""Addresses of agents, and what every TCP connection between them is set to."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import struct
from dataclasses import dataclass

from ckpt.errors import AgentError, UsageError

SILENT_S = 20.0  # unacknowledged bytes older than that end a connection, and so does a peer that says nothing

SLOWEST_BYTES = 64 << 10  # what a connection moves at least in the time that `wait_at_most` gives one call

_PROBE_S, _PROBES = 5, 3  # once a connection has been idle for SILENT_S
_TIMEVAL = struct.Struct("ll")


@dataclass(frozen=True, order=True, slots=True)
class Address:
    """Where an agent listens. `host`: a name or a literal IPv4 or IPv6 address without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @staticmethod
    def parse(text: str, variable: str = "") -> Address:
        """From "HOST:PORT" or "[IPV6]:PORT". `variable`: which says so. Errors: UsageError."""
        match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([\w.-]+)):(\d{1,5})", text)
        if match is None or int(match[3]) > 65535:
            where = f"{variable}: " if variable else ""
            raise UsageError(f"{where}{text[:200]!r} is no address: give HOST:PORT, or [HOST]:PORT for IPv6")
        return Address(match[1] or match[2], int(match[3]))


@dataclass(frozen=True, slots=True)
class SocketAddress:
    """An address as the kernel takes it."""

    family: int
    sockaddr: tuple[str | int | bytes, ...]


def resolve(address: Address, passive: bool = False) -> list[SocketAddress]:
    """Where that address leads, best first. A name may take many seconds to look up: not for the main thread, unless
    the host is a literal. `passive`: to listen there. Errors: AgentError."""
    flags = socket.AI_PASSIVE if passive else 0
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as exc:
        raise AgentError(f"the host of {address} cannot be looked up: {exc}") from exc
    return [SocketAddress(family, sockaddr) for family, _, _, _, sockaddr in found]


def tune(sock: socket.socket) -> None:
    """No delay for small messages; an end that is gone is noticed within about SILENT_S, whether we send or wait."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(SILENT_S))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_S * 1000))


def wait_at_most(sock: socket.socket, seconds: float) -> None:
    """Makes it blocking, in the kernel and each call no longer than that: then BlockingIOError, or less than asked for.
    A Python time-out would ask twice for each piece, and give no whole ones."""
    sock.setblocking(True)
    limit = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def receive_exactly(sock: socket.socket, nbytes: int) -> bytearray:
    """From a socket that `wait_at_most` was called for. Errors: EOFError at the end; TimeoutError where fewer than
    SLOWEST_BYTES, and not all, came in that time, and again: who sends a byte now and then holds nobody up; OSError."""
    room = bytearray(nbytes)
    view, is_short = memoryview(room), False
    while view:
        try:
            got = sock.recv_into(view, len(view), socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("the peer sent nothing in time") from None
        if not got:
            raise EOFError("the peer closed the connection")
        if got < len(view) and got < SLOWEST_BYTES:
            if is_short:
                raise TimeoutError("the peer sent too little in time")
            is_short = True  # a signal can have ended it early, and the end of the connection is seen next time
        view = view[got:]
    return room


def send_all(sock: socket.socket, data: memoryview) -> None:
    """On a socket that `wait_at_most` was called for. Errors: TimeoutError where fewer than SLOWEST_BYTES moved in that
    time; OSError."""
    left = len(data)
    while left:
        try:
            sent = sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent == left:
            return
        if sent < SLOWEST_BYTES:
            raise TimeoutError("the peer takes nothing, or too little")
        data, left = data[sent:], left - sent


class SocketReceiver:
    """Fills memory from a socket that `wait_at_most` was called for, and of which nothing else is read.

    The kernel is asked to wake us once what is wanted is there as a whole, not for each few packets of it: on loopback
    that is a fifth of what both ends spend."""

    def __init__(self, sock: socket.socket, stall_s: float) -> None:
        """`stall_s`: in which SLOWEST_BYTES have to come, or what is left of a piece."""
        self._sock, self._stall_ms = sock, max(1, int(stall_s * 1000))
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._low_bytes = 0

    def fill(self, room: memoryview) -> None:
        """Errors: TimeoutError where too little came in that time, so that a peer that dribbles is given up as one that
        is silent; EOFError; OSError."""
        left = len(room)
        while left:
            self._wake_at(left)
            in_time = bool(self._poll.poll(self._stall_ms))  # with less than that where its buffers hold no more
            try:
                got = self._sock.recv_into(room, left, socket.MSG_DONTWAIT)
            except BlockingIOError:
                raise TimeoutError("the peer sends nothing") from None
            if not got:
                raise EOFError("the peer closed the connection")
            if got < left and got < SLOWEST_BYTES and not in_time:
                raise TimeoutError("the peer sends too little")
            room, left = room[got:], left - got

    def _wake_at(self, count: int) -> None:
        if count != self._low_bytes:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._low_bytes = count


def cut(sock: socket.socket) -> None:
    """Wakes whoever waits in a call on it; who owns it closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


PIECE_BYTES = 2 << 20  # moved with one call where nothing limits: measured best on loopback
