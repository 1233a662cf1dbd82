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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from ckpt.agent.net import handshake
from ckpt.agent.net.handshake import Dialler, Session
from ckpt.agent.net.rate_limit import Bucket
from ckpt.agent.net.tcp_receiver import (
    BUSY,
    COUNT,
    GO,
    NUMBER,
    REQUEST_FRAMES_MAX,
    WANT,
    Dial,
    Fetch,
    FetchTerms,
    receive_record,
    request_frames,
    uncancellable_future,
)
from ckpt.agent.net.transport import Frames
from ckpt.agent.runtime.workers import lower_thread_priority
from ckpt.clock import Clock
from ckpt.errors import AgentError, CkptError
from ckpt.ipc.addresses import Address, SocketReceiver, send_all, set_call_timeout, shut_down
from ckpt.threads import Tasks

log = logging.getLogger("ckpt")

CONNECTIONS = 2  # per transfer; on loopback and 10 Gbit/s a third one gains nothing
SERVED_MAX = 64  # connections that this agent serves at a time; further ones get BUSY and try again
STALL_S = 30.0
PATIENCE_S = 30.0


@dataclass(slots=True)
class _Offer:
    source: memoryview
    byte_ranges: list[tuple[int, int]]  # (offset, length) of each frame
    urgent: bool
    socks: set[socket.socket] = field(default_factory=set)
    withdrawal: Future[None] | None = None  # set once the offer is withdrawn

    def is_withdrawn(self) -> bool:
        return self.withdrawal is not None


class Transport:
    """Moves frames between this agent and others. Thread-safe; only `close` blocks."""

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
        """`greet(name of an offer, peer)`: makes the handshake for a connection to that peer's listener.
        `bytes_per_s`: see `set_rate`. `clock`: the clock of the rate limit. `served_max`: connections served at a
        time. The other arguments are those of FetchTerms."""
        self._send_bucket, self._receive_bucket = Bucket(bytes_per_s, clock), Bucket(bytes_per_s, clock)
        self._unlimited_bucket = Bucket(None, clock)
        self._terms = FetchTerms(greet, self._receive_bucket, connections, stall_s, patience_s)
        self._urgent_terms = replace(self._terms, receive_bucket=self._unlimited_bucket, is_low_priority=False)
        self._tasks = Tasks("peers")
        self._lock = threading.Lock()
        self._offers: dict[str, _Offer] = {}
        self._fetches: set[Fetch] = set()
        # The sockets of streams that are being connected; None once the transport is closed.
        self._connecting_socks: set[socket.socket] | None = set()
        self._served_count, self._served_max = 0, served_max
        # Pieces sent, to all peers. Two concurrent ones may count as one.
        self._sent_pieces = 0

    def offer(self, name: str, source: memoryview, frames: Frames, urgent: bool = False) -> None:
        """Lets agents of the run fetch these frames of `source`, which must not change until `withdraw` has settled.

        `urgent`: a start waits for the frames, so they are sent at normal priority and without the rate limit.
        Errors: AgentError if the name is taken or too long, or a frame is not in `source`."""
        if len(name.encode()) > handshake.NAME_BYTES_MAX:
            raise AgentError(f"the name of a transfer has {len(name)} characters: {name[:100]!r}")
        source = source.cast("B")
        frames = frames.with_offsets(frames.offsets, source.nbytes)
        with self._lock:
            if name in self._offers:
                raise AgentError(f"{name} is offered already")
            self._offers[name] = _Offer(source, frames.byte_ranges(), urgent)

    def withdraw(self, name: str) -> Future[None]:
        """Ends an offer and cuts its readers off. Settled when nothing reads `source` any more; at once if the offer is
        unknown."""
        gone = uncancellable_future()
        with self._lock:
            offer = self._offers.pop(name, None)
            busy = offer is not None and bool(offer.socks)
            if offer is not None:
                offer.withdrawal = gone
                for sock in offer.socks:
                    shut_down(sock)
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
        landed: Callable[[int], None] | None = None,
        urgent: bool = False,
        numbers: Sequence[int] | None = None,
    ) -> Fetch:
        """Fetches the frames of the offer `name` of agent `peer` into `target`.

        `addresses`: where the peer listens, best first. `landed`: called with the number of each frame that is in place
        and verified, on a thread of the transport. `urgent`: as in `offer`. `numbers`: the offer's number of each of
        `frames`, if `frames` is a part of the offer. Cut connections are reopened while frames keep arriving.
        Errors: AgentError."""
        frames = frames.with_offsets(frames.offsets, target.nbytes)
        terms = self._urgent_terms if urgent else self._terms
        fetch = Fetch(terms, peer, addresses, name, target, frames, landed, numbers)
        with self._lock:
            self._fetches = {each for each in self._fetches if not each.completion.done()} | {fetch}
        fetch.start(self._tasks)
        return fetch

    def stream(
        self, peer: str, addresses: Sequence[Address], name: str, numbers: Sequence[int]
    ) -> Future[socket.socket]:
        """A connection that delivers the bytes of these frames of the offer `name` of agent `peer`, in this order, and
        nothing else. At most STREAM_FRAMES frames.

        It serves a rank that reads the frames into its own memory and verifies them while a start waits; so it is
        urgent. The connection may end early; then fetch the rest. The caller owns the socket, whose calls have the
        transport's time-out. The future fails with AgentError or OSError if there is no connection. Errors: CkptError
        if the transport is closed."""
        opened: Future[socket.socket] = uncancellable_future()
        dial = Dial(
            self._urgent_terms, peer, name, list(addresses), self._add_connecting_sock, self._close_connecting_sock
        )

        def work() -> None:
            sock: socket.socket | None = None
            try:
                sock, session = dial.connect()
                request_frames(sock, session, numbers)
                with self._lock:
                    if self._connecting_socks is None:
                        raise AgentError("the transport is closed")
                    self._connecting_socks.discard(sock)
            except Exception as exc:
                if sock is not None:
                    self._close_connecting_sock(sock)
                known = isinstance(exc, OSError | AgentError)
                opened.set_exception(exc if known else AgentError(f"{name} of agent {peer}: {exc}"))
            else:
                opened.set_result(sock)

        self._tasks.start("stream", work)
        return opened

    def _add_connecting_sock(self, sock: socket.socket) -> None:
        with self._lock:
            if self._connecting_socks is None:
                raise OSError("the transport is closed")
            self._connecting_socks.add(sock)

    def _close_connecting_sock(self, sock: socket.socket) -> None:
        with self._lock:
            if self._connecting_socks is not None:
                self._connecting_socks.discard(sock)
            sock.close()

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Limits the bytes per second in each direction, over all transfers that are not urgent. None: no limit."""
        self._send_bucket.set_rate(bytes_per_s)
        self._receive_bucket.set_rate(bytes_per_s)

    def close(self) -> None:
        """Ends all transfers and offers, and waits for their threads."""
        with self._lock:
            names, fetches = list(self._offers), list(self._fetches)
            for sock in self._connecting_socks or ():
                shut_down(sock)
            self._connecting_socks = None
        for name in names:
            self.withdraw(name)
        for fetch in fetches:
            fetch.cancel()
        self._tasks.close()

    def accept(self, sock: socket.socket, session: Session) -> None:
        """Serves a data connection that another agent made to this agent's listener, on a thread of its own, or closes
        it. Takes over the socket. Does not wait."""
        with self._lock:
            offer = self._offers.get(session.subject)
            is_busy = self._served_count >= self._served_max
            if offer is not None and not is_busy:
                offer.socks.add(sock)
                self._served_count += 1
        if offer is None or is_busy:
            # OSError: the peer has closed the connection already.
            with contextlib.suppress(OSError):
                if offer is not None:
                    sock.send(session.sealer.seal(BUSY, COUNT.pack(self._sent_pieces)))
            sock.close()
            return
        try:
            self._tasks.start("serve", lambda: self._serve(sock, session, offer))
        except CkptError:  # the transport was closed meanwhile
            self._end_serving(sock, offer)

    def _serve(self, sock: socket.socket, session: Session, offer: _Offer) -> None:
        try:
            if not offer.urgent:
                lower_thread_priority()
            set_call_timeout(sock, self._terms.stall_s)
            receiver = SocketReceiver(sock, self._terms.stall_s)
            sock.sendall(session.sealer.seal(GO, b""))
            while offer.withdrawal is None:
                for number in _receive_request(receiver, session, len(offer.byte_ranges)):
                    self._send_frame(sock, offer, number)
        except EOFError:
            pass  # the receiver has all it needs, or will reconnect
        except (OSError, CkptError) as exc:
            if offer.withdrawal is None:
                log.info("agent %s is not served %s any more: %s", session.peer, session.subject, exc)
        finally:
            self._end_serving(sock, offer)

    def _send_frame(self, sock: socket.socket, offer: _Offer, number: int) -> None:
        at, length = offer.byte_ranges[number]
        bucket = self._unlimited_bucket if offer.urgent else self._send_bucket
        stop, size = at + length, bucket.piece_bytes
        while at < stop:
            bucket.wait(min(size, stop - at), offer.is_withdrawn)
            if offer.withdrawal is not None:
                raise AgentError("the offer was withdrawn")
            with offer.source[at : min(at + size, stop)] as piece:
                send_all(sock, piece)
            self._sent_pieces += 1
            at += size

    def _end_serving(self, sock: socket.socket, offer: _Offer) -> None:
        with self._lock:
            # Closed under the lock: its number may be reused at once, and `withdraw` shuts sockets down by number.
            sock.close()
            offer.socks.discard(sock)
            self._served_count -= 1
            gone = offer.withdrawal if not offer.socks else None
        if gone is not None:
            gone.set_result(None)


def _receive_request(receiver: SocketReceiver, session: Session, count: int) -> list[int]:
    """The frame numbers of the receiver's next request. `count`: frames of the offer. Errors: EOFError at the end;
    OSError; NotAuthentic; AgentError if the request is malformed."""
    kind, payload = receive_record(receiver, session)
    if kind != WANT or len(payload) % NUMBER.size or len(payload) > REQUEST_FRAMES_MAX * NUMBER.size:
        raise AgentError("a request for frames is malformed")
    numbers: list[int] = [number for (number,) in NUMBER.iter_unpack(payload)]
    if any(number >= count for number in numbers):
        raise AgentError(f"a frame was asked for that is not among the {count} of the offer")
    return numbers
