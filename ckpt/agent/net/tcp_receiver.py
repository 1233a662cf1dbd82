"""The receiver's side of transfers over TCP. The module tcp_sender describes the protocol of a data connection.

All work runs on threads, which have the lowest priority unless a start waits for the frames. The expensive calls
release the GIL: one recv_into per piece once the piece has arrived, and xxh3 over the piece while it is in the cache.
"""

from __future__ import annotations

import collections
import logging
import os
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
from ckpt.agent.runtime.workers import NICE
from ckpt.errors import AgentError, CkptError
from ckpt.format.frames import FrameHasher
from ckpt.ipc.addresses import Address, SocketReceiver, cut, receive_exactly, resolve, send_all, tune, wait_at_most
from ckpt.threads import Tasks

log = logging.getLogger("ckpt")

WANT, GO, BUSY = 1, 2, 3  # kinds of the records on a data connection
NUMBER = struct.Struct(">I")
COUNT = struct.Struct(">Q")
# The most to have requested and not yet received, on one connection. Below half of it, more is requested.
ASK_BYTES, ASK_FRAMES = 32 << 20, STREAM_FRAMES
# A transfer fails after so many connections that brought bytes, but no whole frame.
CUTS_MAX = 20
# The pause before a reconnect, times a random factor of 0.5 to 1.5.
PAUSE_S, PAUSE_S_MAX = 0.05, 2.0


@dataclass(frozen=True, slots=True)
class FetchTerms:
    """The parameters of an agent's fetches.

    `greet(offer, peer)`: makes the dialling side of a handshake for role DATA. `inward`: the rate limit. `connections`:
    per transfer. `stall_s`: a connection is given up if it moves fewer than SLOWEST_BYTES in this time. `patience_s`: a
    transfer fails when a connection fails and, for this long, no bytes came and the sender served no other receiver.
    `nice`: whether threads run at the lowest priority. `reached`: the last working address of each peer, by name,
    shared by all transfers."""

    greet: Callable[[str, str], Dialler]
    inward: Bucket
    connections: int
    stall_s: float
    patience_s: float
    nice: bool = True
    reached: dict[str, Address] = field(default_factory=dict)


@dataclass(slots=True)
class Dial:
    """Makes data connections for the offer `name` of agent `peer`.

    `addresses`: where the peer listens. `keep`: called with each socket before it blocks; may refuse it with OSError.
    `drop`: called with a socket that failed, to close it."""

    terms: FetchTerms
    peer: str
    name: str
    addresses: Sequence[Address]
    keep: Callable[[socket.socket], None]
    drop: Callable[[socket.socket], None]

    def connect(self) -> tuple[socket.socket, Session]:
        """A connection after GO, and its session. Errors: _TurnedAway if the sender is busy; OSError, EOFError,
        AgentError."""
        error: Exception | None = None
        known = self.terms.reached.get(self.peer)
        # The last working address comes first, since a wrong one may cost CONNECT_S each time.
        for address in sorted(self.addresses, key=lambda each: each != known):
            try:
                return self._connect_to(address)
            except (OSError, EOFError, AgentError) as exc:
                error = exc
        raise error or OSError("no address")

    def _connect_to(self, address: Address) -> tuple[socket.socket, Session]:
        error: OSError | None = None
        for place in resolve(address):
            sock = socket.socket(place.family, socket.SOCK_STREAM)
            try:
                self.keep(sock)
                tune(sock)
                sock.settimeout(CONNECT_S)
                sock.connect(place.sockaddr)
                session = self._greet(sock)
                # The address is right even if the sender is busy, so it is noted before GO.
                self.terms.reached[self.peer] = address
                _await_turn(sock, session)
                wait_at_most(sock, self.terms.stall_s)
                return sock, session
            except BaseException as exc:
                self.drop(sock)
                if not isinstance(exc, OSError):
                    raise
                error = exc
        raise error or OSError("no address")

    def _greet(self, sock: socket.socket) -> Session:
        wait_at_most(sock, HANDSHAKE_S)
        exchange = self.terms.greet(self.name, self.peer)
        sock.sendall(exchange.first)
        while exchange.session is None:
            header = receive_exactly(sock, handshake.HEADER_BYTES)
            sock.sendall(exchange.step(bytes(header + receive_exactly(sock, handshake.body_bytes(header)))))
        return exchange.session


class TcpFetch:
    """A Fetch over TCP. Its threads share the ledger. Each one connects, requests and receives frames, and reconnects
    after a cut."""

    def __init__(
        self,
        terms: FetchTerms,
        peer: str,
        addresses: Sequence[Address],
        name: str,
        target: memoryview,
        frames: Frames,
        ledger: Ledger,
        landed: Callable[[int], None] | None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        if numbers is not None and len(numbers) != len(frames):
            raise AgentError(f"{len(numbers)} numbers for {len(frames)} frames of {name}")
        self.done = settled_by_us()
        self._numbers = numbers if numbers is not None else range(len(frames))
        self._terms, self._peer, self._name = terms, peer, name
        self._dial = Dial(terms, peer, name, list(addresses), self._keep, self._drop)
        self._target, self._landed = target.cast("B"), landed
        self._places = frames.places()
        self._ledger = ledger
        self._changed = threading.Condition()  # guards the ledger and the fields below
        self._error: Exception | None = None
        self._socks: set[socket.socket] = set()
        self._threads = 0
        # Connections that brought bytes and ended, since the last whole frame.
        self._cuts = 0
        self._moved_s = time.monotonic()
        # The number of pieces that the sender's last BUSY named, and when that number last changed.
        self._others = -1
        self._others_s = self._moved_s

    def start(self, tasks: Tasks) -> None:
        """Starts the threads. If `tasks` are closed, `done` fails."""
        count = min(self._terms.connections, len(self._ledger.missing))
        if not count:
            self.done.set_result(None)
            return
        with self._changed:
            self._threads = count
        for number in range(count):
            try:
                tasks.start(f"fetch-{number}", self._work)
            except CkptError as exc:
                self._fail(exc)
                for _ in range(number, count):
                    self._leave()
                return

    def missing(self) -> list[int]:
        with self._changed:
            return self._ledger.missing

    def cancel(self) -> None:
        self._fail(AgentError(f"the transfer of {self._name} was cancelled"))

    # -- inside; all of it on the fetch's own threads

    @property
    def _over(self) -> bool:
        return self._error is not None or self._ledger.complete

    def _is_failed(self) -> bool:
        return self._error is not None

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if not self._over:
                self._error = error
                for sock in self._socks:
                    cut(sock)
                self._changed.notify_all()

    def _work(self) -> None:
        pause_s = PAUSE_S
        try:
            if self._terms.nice:
                be_nice()
            while self._await_work():
                before = self._moved_s
                asked: collections.deque[int] = collections.deque()
                try:
                    self._use_connection(asked)
                except _TurnedAway as exc:
                    self._note_others(exc.count)
                    pause_s = min(2 * pause_s, PAUSE_S_MAX)
                    self._trouble(exc, False, pause_s)
                except (OSError, EOFError, AgentError, _WrongHash) as exc:
                    with self._changed:
                        self._ledger.give_back(asked)
                        self._changed.notify_all()
                    moved = self._moved_s > before
                    pause_s = PAUSE_S if moved else min(2 * pause_s, PAUSE_S_MAX)
                    self._trouble(exc, moved, pause_s)
        except Exception as exc:
            self._fail(exc)
        finally:
            self._leave()

    def _await_work(self) -> bool:
        """Waits until there are frames to request; False once the transfer is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._ledger.waiting > 0)
            return not self._over

    def _trouble(self, error: Exception, moved: bool, pause_s: float) -> None:
        """Pauses after a failed connection, or fails the transfer if there was no progress for too long."""
        with self._changed:
            idle_s = time.monotonic() - max(self._moved_s, self._others_s)
            self._cuts += moved
            if idle_s < self._terms.patience_s and self._cuts < CUTS_MAX:
                # The random factor spreads the retries of many receivers that a busy sender refused together.
                self._changed.wait_for(lambda: self._over, pause_s * random.uniform(0.5, 1.5))
                return
        what = f"{self._name} could not be got from agent {self._peer} at {', '.join(map(str, self._dial.addresses))}"
        how = f"{self._cuts} connections were cut without a whole frame, nothing has come for {idle_s:.0f} s"
        there = "" if self._cuts else "; if it cannot be reached there, set CKPT_LISTEN on its node"
        self._fail(AgentError(f"{what}: {how}; the last: {error}{there}"))

    def _note_others(self, count: int) -> None:
        """Notes the pieces that a busy sender has sent to others. While the number grows, this transfer waits its
        turn."""
        with self._changed:
            if count != self._others:
                self._others, self._others_s = count, time.monotonic()

    def _leave(self) -> None:
        """Ends a thread. The last one settles `done`; every connection is closed by then."""
        with self._changed:
            self._threads -= 1
            last, error = self._threads == 0, self._error
            if last:
                self._target = memoryview(b"")  # so that the memory can be unmapped
        if last and error is not None:
            self.done.set_exception(error)
        elif last:
            self.done.set_result(None)

    def _use_connection(self, asked: collections.deque[int]) -> None:
        """Connects and receives until nothing is left to request. `asked`: requested frames that are not here yet,
        oldest first."""
        sock, session = self._dial.connect()
        try:
            receiver = SocketReceiver(sock, self._terms.stall_s)
            while self._ask(sock, session, asked):
                self._receive(receiver, asked[0])
                asked.popleft()
        finally:
            self._drop(sock)

    def _keep(self, sock: socket.socket) -> None:
        with self._changed:
            if self._over:
                raise OSError("it is over")
            self._socks.add(sock)

    def _drop(self, sock: socket.socket) -> None:
        with self._changed:
            self._socks.discard(sock)
            sock.close()

    def _ask(self, sock: socket.socket, session: Session, asked: collections.deque[int]) -> bool:
        """Requests more frames if too few are on their way. Returns whether any are."""
        room = ASK_BYTES - sum(self._places[number][1] for number in asked)
        if asked and (room < ASK_BYTES // 2 or len(asked) > ASK_FRAMES // 2):
            return True
        with self._changed:
            more = [] if self._error is not None else self._ledger.take(ASK_FRAMES - len(asked), room)
        asked.extend(more)
        if more:
            ask_for(sock, session, [self._numbers[n] for n in more])
        return bool(asked)

    def _receive(self, receiver: SocketReceiver, number: int) -> None:
        inward, target, hasher = self._terms.inward, self._target, FrameHasher()
        start, length = self._places[number]
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
                self._moved_s = time.monotonic()
        with self._changed:
            right = self._ledger.landed(number, hasher.result())
            if right:
                self._cuts = 0
                if self._ledger.complete:
                    self._changed.notify_all()
        if not right:
            log.warning("frame %d of %s came damaged from agent %s", number, self._name, self._peer)
            # The rest of this connection is not trusted either.
            raise _WrongHash("a frame came damaged")
        if self._landed is not None:
            try:
                self._landed(number)
            except Exception as exc:
                log.exception("who was told of a frame of %s made a mistake", self._name)
                self._fail(exc)


def ask_for(sock: socket.socket, session: Session, numbers: Sequence[int]) -> None:
    """Requests frames by their numbers in the offer, at most ASK_FRAMES. Errors: OSError."""
    send_all(sock, memoryview(session.sealer.seal(WANT, b"".join(map(NUMBER.pack, numbers)))))


def _await_turn(sock: socket.socket, session: Session) -> None:
    """Receives the sender's GO. Errors: _TurnedAway if it is BUSY instead; OSError, EOFError, AgentError."""
    header = receive_exactly(sock, handshake.RECORD_HEADER_BYTES)
    kind, payload = session.opener.open(header + receive_exactly(sock, session.opener.rest_bytes(header)))
    if kind == BUSY and len(payload) == COUNT.size:
        raise _TurnedAway(*COUNT.unpack(payload))
    if kind != GO or payload:
        raise AgentError("the sender's first word is malformed")


class _TurnedAway(Exception):
    """The sender serves as many connections as it can. `count`: pieces that it has sent to all peers."""

    def __init__(self, count: int) -> None:
        super().__init__(f"it serves others, and has given them {count} pieces")
        self.count = count


class _WrongHash(Exception):
    """A frame has another hash than announced; it is requested again on a new connection."""


def settled_by_us() -> Future[Any]:
    """A new future that its receiver cannot cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def be_nice() -> None:
    """Gives the calling thread the lowest priority."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
