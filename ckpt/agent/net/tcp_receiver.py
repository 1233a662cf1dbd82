"""The receiver's side of transfers over TCP. The module tcp_sender describes the protocol of a data connection.

All work runs on threads, which have the lowest priority unless a start waits for the frames. The expensive calls
release the GIL: one recv_into per piece once the piece has arrived, and xxh3 over the piece while it is in the cache.
"""

from __future__ import annotations

import collections
import logging
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ckpt.agent.net import handshake
from ckpt.agent.net.dialer import CONNECT_S, HANDSHAKE_S
from ckpt.agent.net.handshake import Dialler, Session
from ckpt.agent.net.rate_limit import Bucket
from ckpt.agent.net.transport import STREAM_FRAMES, Frames, Ledger
from ckpt.agent.runtime.workers import lower_thread_priority
from ckpt.errors import AgentError, CkptError
from ckpt.format.frames import FrameHasher
from ckpt.ipc.addresses import (
    Address,
    SocketAddress,
    SocketReceiver,
    resolve,
    send_all,
    set_call_timeout,
    shut_down,
    tune,
)
from ckpt.threads import Tasks

log = logging.getLogger("ckpt")

WANT, GO, BUSY = 1, 2, 3  # kinds of the records on a data connection
NUMBER = struct.Struct(">I")
COUNT = struct.Struct(">Q")
# The most to have requested and not yet received, on one connection. Below half of it, more is requested.
REQUEST_BYTES_MAX, REQUEST_FRAMES_MAX = 32 << 20, STREAM_FRAMES
# A transfer fails after so many connections that brought bytes, but no whole frame.
CUTS_MAX = 20
# The pause before a reconnect, times a random factor of 0.5 to 1.5.
PAUSE_S, PAUSE_S_MAX = 0.05, 2.0


@dataclass(frozen=True, slots=True)
class FetchTerms:
    """The parameters of an agent's fetches.

    `greet(offer, peer)`: makes the dialling side of a handshake for role DATA. `inward`: the rate limit. `connections`:
    per transfer. `stall_s`: a connection is given up if it moves fewer than CALL_BYTES_MIN in this time. `patience_s`:
    a transfer fails when a connection fails and, for this long, no bytes came and the sender served no other receiver.
    `is_low_priority`: whether threads run at the lowest priority. `working_addresses`: the last working address of each
    peer, by name, shared by all transfers."""

    make_dialler: Callable[[str, str], Dialler]
    receive_bucket: Bucket
    connections: int
    stall_s: float
    patience_s: float
    is_low_priority: bool = True
    working_addresses: dict[str, Address] = field(default_factory=dict)


@dataclass(slots=True)
class Dial:
    """Makes data connections for the offer `name` of agent `peer`.

    `addresses`: where the peer listens. `register_sock`: called with each socket before it blocks; may refuse it with
    OSError. `close_sock`: called with a socket that failed, to close it."""

    terms: FetchTerms
    peer: str
    name: str
    addresses: Sequence[Address]
    register_sock: Callable[[socket.socket], None]
    close_sock: Callable[[socket.socket], None]

    def connect(self) -> tuple[socket.socket, Session]:
        """A connection after GO, and its session. Errors: _SenderBusy; OSError, EOFError, AgentError."""
        error: Exception | None = None
        known = self.terms.working_addresses.get(self.peer)
        # The last working address comes first, since a wrong one may cost CONNECT_S each time.
        for address in sorted(self.addresses, key=lambda each: each != known):
            try:
                for place in resolve(address):
                    try:
                        return self._connect_to(address, place)
                    except OSError as exc:
                        error = exc
            except (EOFError, AgentError) as exc:
                error = exc
        raise error or OSError("no address")

    def _connect_to(self, address: Address, place: SocketAddress) -> tuple[socket.socket, Session]:
        sock = socket.socket(place.family, socket.SOCK_STREAM)
        try:
            self.register_sock(sock)
            tune(sock)
            sock.settimeout(CONNECT_S)
            sock.connect(place.sockaddr)
            receiver = SocketReceiver(sock, HANDSHAKE_S)
            session = self._do_handshake(sock, receiver)
            # The address is right even if the sender is busy, so it is noted before GO.
            self.terms.working_addresses[self.peer] = address
            _receive_go(receiver, session)
            set_call_timeout(sock, self.terms.stall_s)
            return sock, session
        except BaseException:
            self.close_sock(sock)
            raise

    def _do_handshake(self, sock: socket.socket, receiver: SocketReceiver) -> Session:
        set_call_timeout(sock, HANDSHAKE_S)
        exchange = self.terms.make_dialler(self.name, self.peer)
        sock.sendall(exchange.hello)
        while exchange.session is None:
            header = receiver.receive(handshake.HEADER_BYTES)
            sock.sendall(exchange.step(bytes(header + receiver.receive(handshake.body_bytes(header)))))
        return exchange.session


class Fetch:
    """One transfer under way into this agent's memory. Its threads share the ledger. Each one connects, requests and
    receives frames, and reconnects after a cut.

    `completion`: settled once all frames are in place and verified, or with the error (AgentError, DamagedData). By
    then all connections are closed and nothing writes to the memory, so the memory may be used again."""

    def __init__(
        self,
        terms: FetchTerms,
        peer: str,
        addresses: Sequence[Address],
        name: str,
        target: memoryview,
        frames: Frames,
        landed: Callable[[int], None] | None,
        numbers: Sequence[int] | None,
    ) -> None:
        if numbers is not None and len(numbers) != len(frames):
            raise AgentError(f"{len(numbers)} numbers for {len(frames)} frames of {name}")
        self.completion = uncancellable_future()
        self._offer_numbers = numbers if numbers is not None else range(len(frames))
        self._terms, self._name = terms, name
        self._dial = Dial(terms, peer, name, list(addresses), self._register_sock, self._close_sock)
        self._target, self._on_frame = target.cast("B"), landed
        self._byte_ranges = frames.byte_ranges()
        self._ledger = Ledger(name, frames)
        self._condition = threading.Condition()  # guards the ledger and the fields below
        self._error: Exception | None = None
        self._socks: set[socket.socket] = set()
        self._thread_count = 0
        # Connections that brought bytes and ended, since the last whole frame.
        self._cut_count = 0
        self._last_bytes_s = time.monotonic()
        # The number of pieces that the sender's last BUSY named, and when that number last changed.
        self._sender_pieces = -1
        self._sender_progress_s = self._last_bytes_s

    def start(self, tasks: Tasks) -> None:
        """Starts the threads. If `tasks` are closed, `completion` fails."""
        count = min(self._terms.connections, len(self._ledger.missing))
        if not count:
            self.completion.set_result(None)
            return
        with self._condition:
            self._thread_count = count
        for number in range(count):
            try:
                tasks.start(f"fetch-{number}", self._run_thread)
            except CkptError as exc:
                self._fail(exc)
                for _ in range(number, count):
                    self._end_thread()
                return

    def missing(self) -> list[int]:
        """The frames that are not in place and verified. The other frames stay valid if the transfer fails. Any
        thread."""
        with self._condition:
            return self._ledger.missing

    def cancel(self) -> None:
        """Ends the transfer soon, with AgentError in `completion`; does nothing after its end. Does not wait. Any
        thread."""
        self._fail(AgentError(f"the transfer of {self._name} was cancelled"))

    # -- inside; all of it on the fetch's own threads

    @property
    def _is_ended(self) -> bool:
        return self._error is not None or self._ledger.is_complete

    def _is_failed(self) -> bool:
        return self._error is not None

    def _fail(self, error: Exception) -> None:
        with self._condition:
            if not self._is_ended:
                self._error = error
                for sock in self._socks:
                    shut_down(sock)
                self._condition.notify_all()

    def _run_thread(self) -> None:
        pause_s = PAUSE_S
        try:
            if self._terms.is_low_priority:
                lower_thread_priority()
            while self._await_work():
                before = self._last_bytes_s
                asked: collections.deque[int] = collections.deque()
                try:
                    self._receive_over_connection(asked)
                except _SenderBusy as exc:
                    self._record_sender_pieces(exc.sent_pieces)
                    pause_s = min(2 * pause_s, PAUSE_S_MAX)
                    self._pause_or_fail(exc, False, pause_s)
                except (OSError, EOFError, AgentError, _WrongHash) as exc:
                    with self._condition:
                        self._ledger.return_frames(asked)
                        self._condition.notify_all()
                    moved = self._last_bytes_s > before
                    pause_s = PAUSE_S if moved else min(2 * pause_s, PAUSE_S_MAX)
                    self._pause_or_fail(exc, moved, pause_s)
        except Exception as exc:
            self._fail(exc)
        finally:
            self._end_thread()

    def _await_work(self) -> bool:
        """Waits until there are frames to request; False once the transfer is over."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_ended or self._ledger.unrequested_count > 0)
            return not self._is_ended

    def _pause_or_fail(self, error: Exception, moved: bool, pause_s: float) -> None:
        """Pauses after a failed connection, or fails the transfer if there was no progress for too long."""
        with self._condition:
            idle_s = time.monotonic() - max(self._last_bytes_s, self._sender_progress_s)
            self._cut_count += moved
            if idle_s < self._terms.patience_s and self._cut_count < CUTS_MAX:
                # The random factor spreads the retries of many receivers that a busy sender refused together.
                self._condition.wait_for(lambda: self._is_ended, pause_s * random.uniform(0.5, 1.5))
                return
        at = ", ".join(map(str, self._dial.addresses))
        what = f"{self._name} could not be got from agent {self._dial.peer} at {at}"
        how = f"{self._cut_count} connections were cut without a whole frame, nothing has come for {idle_s:.0f} s"
        there = "" if self._cut_count else "; if it cannot be reached there, set CKPT_LISTEN on its node"
        self._fail(AgentError(f"{what}: {how}; the last: {error}{there}"))

    def _record_sender_pieces(self, count: int) -> None:
        """Notes the pieces that a busy sender has sent to others. While the number grows, this transfer waits its
        turn."""
        with self._condition:
            if count != self._sender_pieces:
                self._sender_pieces, self._sender_progress_s = count, time.monotonic()

    def _end_thread(self) -> None:
        """Ends a thread. The last one settles `completion`; every connection is closed by then."""
        with self._condition:
            self._thread_count -= 1
            last, error = self._thread_count == 0, self._error
            if last:
                self._target = memoryview(b"")  # so that the memory can be unmapped
        if last and error is not None:
            self.completion.set_exception(error)
        elif last:
            self.completion.set_result(None)

    def _receive_over_connection(self, asked: collections.deque[int]) -> None:
        """Connects and receives until nothing is left to request. `asked`: requested frames that are not here yet,
        oldest first."""
        sock, session = self._dial.connect()
        try:
            receiver = SocketReceiver(sock, self._terms.stall_s)
            while self._request_more(sock, session, asked):
                self._receive_frame(receiver, asked[0])
                asked.popleft()
        finally:
            self._close_sock(sock)

    def _register_sock(self, sock: socket.socket) -> None:
        with self._condition:
            if self._is_ended:
                raise OSError("it is over")
            self._socks.add(sock)

    def _close_sock(self, sock: socket.socket) -> None:
        with self._condition:
            self._socks.discard(sock)
            sock.close()

    def _request_more(self, sock: socket.socket, session: Session, asked: collections.deque[int]) -> bool:
        """Requests more frames if too few are on their way. Returns whether any are."""
        room = REQUEST_BYTES_MAX - sum(self._byte_ranges[number][1] for number in asked)
        if asked and (room < REQUEST_BYTES_MAX // 2 or len(asked) > REQUEST_FRAMES_MAX // 2):
            return True
        with self._condition:
            more = [] if self._error is not None else self._ledger.take_frames(REQUEST_FRAMES_MAX - len(asked), room)
        asked.extend(more)
        if more:
            request_frames(sock, session, [self._offer_numbers[n] for n in more])
        return bool(asked)

    def _receive_frame(self, receiver: SocketReceiver, number: int) -> None:
        inward, target, hasher = self._terms.receive_bucket, self._target, FrameHasher()
        start, length = self._byte_ranges[number]
        stop, size = start + length, inward.piece_bytes
        at = start
        try:
            while at < stop:
                inward.wait(min(size, stop - at), self._is_failed)
                with target[at : min(at + size, stop)] as piece:
                    receiver.fill(piece)
                    hasher.update(piece)
                at += size
        finally:
            if at > start:
                self._last_bytes_s = time.monotonic()
        with self._condition:
            right = self._ledger.verify_frame(number, hasher.result())
            if right:
                self._cut_count = 0
                if self._ledger.is_complete:
                    self._condition.notify_all()
        if not right:
            log.warning("frame %d of %s came damaged from agent %s", number, self._name, self._dial.peer)
            # The rest of this connection is not trusted either.
            raise _WrongHash("a frame came damaged")
        if self._on_frame is not None:
            try:
                self._on_frame(number)
            except Exception as exc:
                log.exception("who was told of a frame of %s made a mistake", self._name)
                self._fail(exc)


def request_frames(sock: socket.socket, session: Session, numbers: Sequence[int]) -> None:
    """Requests frames by their numbers in the offer, at most REQUEST_FRAMES_MAX. Errors: OSError."""
    send_all(sock, memoryview(session.sealer.seal(WANT, b"".join(map(NUMBER.pack, numbers)))))


def receive_record(receiver: SocketReceiver, session: Session) -> tuple[int, bytes]:
    """Kind and payload of the peer's next record. Errors: OSError, EOFError, NotAuthentic."""
    header = receiver.receive(handshake.RECORD_HEADER_BYTES)
    return session.opener.open(header + receiver.receive(session.opener.rest_bytes(header)))


def _receive_go(receiver: SocketReceiver, session: Session) -> None:
    """Receives the sender's GO. Errors: _SenderBusy if it is BUSY instead; OSError, EOFError, AgentError."""
    kind, payload = receive_record(receiver, session)
    if kind == BUSY and len(payload) == COUNT.size:
        raise _SenderBusy(*COUNT.unpack(payload))
    if kind != GO or payload:
        raise AgentError("the sender's first word is malformed")


class _SenderBusy(Exception):
    """The sender serves as many connections as it can. `count`: pieces that it has sent to all peers."""

    def __init__(self, count: int) -> None:
        super().__init__(f"it serves others, and has given them {count} pieces")
        self.sent_pieces = count


class _WrongHash(Exception):
    """A frame has another hash than announced; it is requested again on a new connection."""


def uncancellable_future() -> Future[Any]:
    """A new future that its receiver cannot cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
