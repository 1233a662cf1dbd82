"""The transport over TCP, with the sender's side of a transfer. The receiver's side is tcp_receiver.

Each transfer uses a few connections, and bytes go straight from memory to memory. A data connection begins with the
usual handshake, which names the transfer. Then the sender answers GO, or BUSY if it already serves as many connections
as it can. BUSY carries the number of pieces sent so far; the receiver tries again while that number grows. After GO the
receiver sends records (WANT) with the numbers of frames. The sender replies with the raw bytes of these frames, since
the receiver knows their lengths and hashes. All records have the connection's MAC; the raw bytes have none. A sender
that does not have the offer closes the connection.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from ckpt.agent.net import handshake
from ckpt.agent.net.handshake import Dialler, Session
from ckpt.agent.net.rate_limit import Bucket
from ckpt.agent.net.tcp_receiver import (
    ASK_FRAMES,
    BUSY,
    COUNT,
    GO,
    NUMBER,
    WANT,
    Dial,
    FetchTerms,
    TcpFetch,
    ask_for,
    be_nice,
    settled_by_us,
)
from ckpt.agent.net.transport import Frames, Ledger
from ckpt.clock import Clock
from ckpt.errors import AgentError, CkptError
from ckpt.ipc.addresses import Address, cut, receive_exactly, send_all, wait_at_most
from ckpt.threads import Tasks

log = logging.getLogger("ckpt")

CONNECTIONS = 2  # per transfer; on loopback and 10 Gbit/s a third one gains nothing
SERVED_MAX = 64  # connections that this agent serves at a time; further ones get BUSY and try again
STALL_S = 30.0
PATIENCE_S = 30.0


@dataclass(slots=True)
class _Offer:
    source: memoryview
    places: list[tuple[int, int]]  # (offset, length) of each frame
    urgent: bool
    socks: set[socket.socket] = field(default_factory=set)
    gone: Future[None] | None = None  # set once the offer is withdrawn

    def is_gone(self) -> bool:
        return self.gone is not None


class TcpTransport:
    """The Transport over TCP. `accept` takes the connections that a PeerListener got for role DATA."""

    def __init__(
        self,
        greet: Callable[[str, str], Dialler],
        bytes_per_s: float | None = None,
        clock: Clock | None = None,
        connections: int = CONNECTIONS,
        stall_s: float = STALL_S,
        patience_s: float = PATIENCE_S,
        served_max: int = SERVED_MAX,
    ) -> None:
        """`bytes_per_s`: see `set_rate`. `clock`: the clock of the rate limit. `served_max`: connections served at a
        time. The other arguments are those of FetchTerms."""
        self._outward, self._inward = Bucket(bytes_per_s, clock), Bucket(bytes_per_s, clock)
        self._unlimited = Bucket(None, clock)
        self._terms = FetchTerms(greet, self._inward, connections, stall_s, patience_s)
        self._urgent = replace(self._terms, inward=self._unlimited, nice=False)
        self._tasks = Tasks("peers")
        self._lock = threading.Lock()
        self._offers: dict[str, _Offer] = {}
        self._fetches: set[TcpFetch] = set()
        # The sockets of streams that are being connected; None once the transport is closed.
        self._dialling: set[socket.socket] | None = set()
        self._served, self._served_max = 0, served_max
        # Pieces sent, to all peers. Two concurrent ones may count as one.
        self._given = 0

    def offer(self, name: str, source: memoryview, frames: Frames, urgent: bool = False) -> None:
        if len(name.encode()) > handshake.NAME_BYTES_MAX:
            raise AgentError(f"the name of a transfer has {len(name)} characters: {name[:100]!r}")
        source = source.cast("B")
        frames = frames.at(frames.offsets, source.nbytes)
        with self._lock:
            if name in self._offers:
                raise AgentError(f"{name} is offered already")
            self._offers[name] = _Offer(source, frames.places(), urgent)

    def withdraw(self, name: str) -> Future[None]:
        gone = settled_by_us()
        with self._lock:
            offer = self._offers.pop(name, None)
            busy = offer is not None and bool(offer.socks)
            if offer is not None:
                offer.gone = gone
                for sock in offer.socks:
                    cut(sock)
        if not busy:
            gone.set_result(None)
        return gone

    def fetch(
        self,
        peer: str,
        addresses: Sequence[Address],
        name: str,
        target: memoryview,
        frames: Frames,
        only: Iterable[int] | None = None,
        landed: Callable[[int], None] | None = None,
        urgent: bool = False,
        numbers: Sequence[int] | None = None,
    ) -> TcpFetch:
        frames = frames.at(frames.offsets, target.nbytes)
        terms, ledger = self._urgent if urgent else self._terms, Ledger(name, frames, only)
        fetch = TcpFetch(terms, peer, addresses, name, target, frames, ledger, landed, numbers)
        with self._lock:
            self._fetches = {each for each in self._fetches if not each.done.done()} | {fetch}
        fetch.start(self._tasks)
        return fetch

    def stream(
        self, peer: str, addresses: Sequence[Address], name: str, numbers: Sequence[int]
    ) -> Future[socket.socket]:
        opened: Future[socket.socket] = settled_by_us()
        dial = Dial(self._urgent, peer, name, list(addresses), self._dials, self._dialled)

        def work() -> None:
            sock: socket.socket | None = None
            try:
                sock, session = dial.connect()
                ask_for(sock, session, numbers)
                with self._lock:
                    if self._dialling is None:
                        raise AgentError("the transport is closed")
                    self._dialling.discard(sock)
            except Exception as exc:
                if sock is not None:
                    self._dialled(sock)
                known = isinstance(exc, OSError | AgentError)
                opened.set_exception(exc if known else AgentError(f"{name} of agent {peer}: {exc}"))
            else:
                opened.set_result(sock)

        self._tasks.start("stream", work)
        return opened

    def _dials(self, sock: socket.socket) -> None:
        with self._lock:
            if self._dialling is None:
                raise OSError("the transport is closed")
            self._dialling.add(sock)

    def _dialled(self, sock: socket.socket) -> None:
        with self._lock:
            if self._dialling is not None:
                self._dialling.discard(sock)
            sock.close()

    def set_rate(self, bytes_per_s: float | None) -> None:
        self._outward.set_rate(bytes_per_s)
        self._inward.set_rate(bytes_per_s)

    def close(self) -> None:
        with self._lock:
            names, fetches = list(self._offers), list(self._fetches)
            for sock in self._dialling or ():
                cut(sock)
            self._dialling = None
        for name in names:
            self.withdraw(name)
        for fetch in fetches:
            fetch.cancel()
        self._tasks.close()

    def accept(self, sock: socket.socket, session: Session) -> None:
        """Serves a connection on its own thread, or closes it. Takes over the socket. Does not wait."""
        with self._lock:
            offer = self._offers.get(session.about)
            is_busy = self._served >= self._served_max
            if offer is not None and not is_busy:
                offer.socks.add(sock)
                self._served += 1
        if offer is None or is_busy:
            # OSError: the peer has closed the connection already.
            with contextlib.suppress(OSError):
                if offer is not None:
                    sock.send(session.sealer.seal(BUSY, COUNT.pack(self._given)))
            sock.close()
            return
        try:
            self._tasks.start("serve", lambda: self._serve(sock, session, offer))
        except CkptError:  # the transport was closed meanwhile
            self._served_out(sock, offer)

    def _serve(self, sock: socket.socket, session: Session, offer: _Offer) -> None:
        try:
            if not offer.urgent:
                be_nice()
            wait_at_most(sock, self._terms.stall_s)
            sock.sendall(session.sealer.seal(GO, b""))
            while offer.gone is None:
                for number in _wanted(sock, session, len(offer.places)):
                    self._send(sock, offer, number)
        except EOFError:
            pass  # the receiver has all it needs, or will reconnect
        except (OSError, CkptError) as exc:
            if offer.gone is None:
                log.info("agent %s is not served %s any more: %s", session.peer, session.about, exc)
        finally:
            self._served_out(sock, offer)

    def _send(self, sock: socket.socket, offer: _Offer, number: int) -> None:
        at, length = offer.places[number]
        bucket = self._unlimited if offer.urgent else self._outward
        stop, size = at + length, bucket.piece_bytes
        while at < stop:
            bucket.wait(min(size, stop - at), offer.is_gone)
            if offer.gone is not None:
                raise AgentError("the offer was withdrawn")
            with offer.source[at : min(at + size, stop)] as piece:
                send_all(sock, piece)
            self._given += 1
            at += size

    def _served_out(self, sock: socket.socket, offer: _Offer) -> None:
        with self._lock:
            # Closed under the lock: its number may be reused at once, and `withdraw` shuts sockets down by number.
            sock.close()
            offer.socks.discard(sock)
            self._served -= 1
            gone = offer.gone if not offer.socks else None
        if gone is not None:
            gone.set_result(None)


def _wanted(sock: socket.socket, session: Session, count: int) -> list[int]:
    """The frame numbers of the receiver's next request. `count`: frames of the offer. Errors: EOFError at the end;
    OSError; NotAuthentic; AgentError if the request is malformed."""
    header = receive_exactly(sock, handshake.RECORD_HEADER_BYTES)
    kind, payload = session.opener.open(header + receive_exactly(sock, session.opener.rest_bytes(header)))
    if kind != WANT or len(payload) % NUMBER.size or len(payload) > ASK_FRAMES * NUMBER.size:
        raise AgentError("a request for frames is malformed")
    numbers: list[int] = [number for (number,) in NUMBER.iter_unpack(payload)]
    if any(number >= count for number in numbers):
        raise AgentError(f"a frame was asked for that is not among the {count} of the offer")
    return numbers
