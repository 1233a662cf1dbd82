"""The addresses of agents, and the socket options, time-outs and receive loops of TCP connections between agents."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import struct
from dataclasses import dataclass

from ckpt.errors import AgentError, UsageError

# A connection ends when sent bytes stay unacknowledged this long, or the peer is silent this long.
SILENCE_S_MAX = 20.0

# The least that a connection must move within the limit of one call (see `set_call_timeout`).
CALL_BYTES_MIN = 64 << 10

_PROBE_S, _PROBES = 5, 3  # keepalive probes, after SILENT_S without traffic
_TIMEVAL = struct.Struct("ll")


@dataclass(frozen=True, order=True, slots=True)
class Address:
    """The address at which an agent listens. `host`: a name, or a literal IPv4 or IPv6 address without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @staticmethod
    def parse(text: str, variable: str = "") -> Address:
        """The address in "HOST:PORT" or "[IPV6]:PORT". `variable`: the setting it comes from, for the error. Errors:
        UsageError if the text is no address."""
        match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([\w.-]+)):(\d{1,5})", text)
        if match is None or int(match[3]) > 65535:
            where = f"{variable}: " if variable else ""
            raise UsageError(f"{where}{text[:200]!r} is not an address: give HOST:PORT, or [HOST]:PORT for IPv6")
        return Address(match[1] or match[2], int(match[3]))


@dataclass(frozen=True, slots=True)
class SocketAddress:
    """A resolved address, as the kernel takes it."""

    family: int
    sockaddr: tuple[str | int | bytes, ...]


def resolve(address: Address, passive: bool = False) -> list[SocketAddress]:
    """The socket addresses of `address`, best first. `passive`: for listening. Errors: AgentError if the look-up fails.
    A look-up of a name may block for many seconds; on the main thread use it only for literal hosts."""
    flags = socket.AI_PASSIVE if passive else 0
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as exc:
        raise AgentError(f"the host of {address} cannot be looked up: {exc}") from exc
    return [SocketAddress(family, sockaddr) for family, _, _, _, sockaddr in found]


def tune(sock: socket.socket) -> None:
    """Sets the options of a TCP connection: small messages are sent at once, and a dead peer is noticed within about
    SILENT_S, both while sending and while waiting."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(SILENCE_S_MAX))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE_S_MAX * 1000))


def set_call_timeout(sock: socket.socket, seconds: float) -> None:
    """Makes the socket blocking, with a kernel time-out for each call: then BlockingIOError, or a short count. A Python
    time-out would cost an extra system call per piece, and would return pieces that are not whole."""
    sock.setblocking(True)
    limit = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def send_all(sock: socket.socket, data: memoryview) -> None:
    """Sends all of `data`. `set_call_timeout` must have been called for the socket. Errors: TimeoutError if a call
    moves fewer than CALL_BYTES_MIN, and not all that is left; OSError."""
    left = len(data)
    while left:
        try:
            sent = sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent == left:
            return
        if sent < CALL_BYTES_MIN:
            raise TimeoutError("the peer accepts no data, or too little")
        data, left = data[sent:], left - sent


class SocketReceiver:
    """Receives bytes from a socket into memory. The socket blocks, and nothing else reads from it meanwhile. A peer
    that sends a byte now and then is given up, too.

    The kernel wakes the thread when all wanted bytes are there, not for every few packets. On loopback this saves a
    fifth of the CPU time of both ends."""

    def __init__(self, sock: socket.socket, stall_s: float) -> None:
        """`stall_s`: the time in which CALL_BYTES_MIN, or the rest of a piece, must arrive."""
        self._sock, self._stall_ms = sock, max(1, int(stall_s * 1000))
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._wake_bytes = 0

    def receive(self, nbytes: int) -> bytearray:
        """Receives `nbytes` bytes. Errors: as `fill`."""
        room = bytearray(nbytes)
        self.fill(memoryview(room))
        return room

    def fill(self, room: memoryview) -> None:
        """Fills `room`. Errors: TimeoutError if too little arrives within `stall_s`; EOFError; OSError."""
        left = len(room)
        while left:
            self._set_wake_bytes(left)
            # The poll may end with less than `left` bytes, if the kernel's buffer holds no more.
            in_time = bool(self._poll.poll(self._stall_ms))
            try:
                got = self._sock.recv_into(room, left, socket.MSG_DONTWAIT)
            except BlockingIOError:
                raise TimeoutError("the peer sends nothing") from None
            if not got:
                raise EOFError("the peer closed the connection")
            if got < left and got < CALL_BYTES_MIN and not in_time:
                raise TimeoutError("the peer sends too little")
            room, left = room[got:], left - got

    def _set_wake_bytes(self, count: int) -> None:
        if count != self._wake_bytes:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._wake_bytes = count


def shut_down(sock: socket.socket) -> None:
    """Shuts the socket down, which wakes threads that wait in a call on it. The owner of the socket closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


PIECE_BYTES = 2 << 20  # moved by one call without a rate limit; the fastest on loopback
