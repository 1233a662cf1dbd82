"""A transport between agents of one process: a thread copies. It stands for whatever is not TCP, and passes the same
tests (test_transports.py)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from ckpt.agent.net.handshake import Dialler, Session
from ckpt.agent.net.tcp_receiver import uncancellable_future
from ckpt.agent.net.transport import Frames, Ledger
from ckpt.errors import AgentError, CkptError
from ckpt.format.frames import frame_hash
from ckpt.ipc.addresses import Address
from ckpt.threads import Tasks


class Hub:
    """The agents that reach each other by it. `greeted`: how often a connection was asked for, which none needs."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.agents: dict[str, Within] = {}
        self.moved = 0  # bytes

    def make(self, name: str) -> Callable[[Callable[[str, str], Dialler]], Within]:
        """As a MakeTransport, for the agent of that name."""

        def made(greet: Callable[[str, str], Dialler]) -> Within:
            self.agents[name] = Within(self, name)
            return self.agents[name]

        return made


class Within:
    """See Transport."""

    def __init__(self, hub: Hub, name: str) -> None:
        self._hub = hub
        self.offers: dict[str, tuple[memoryview, Frames]] = {}
        self._tasks = Tasks(f"within-{name}", pool_size=2)
        self._fetches: set[WithinFetch] = set()
        self._closed = False

    def offer(self, name: str, source: memoryview, frames: Frames, urgent: bool = False) -> None:
        source = source.cast("B")
        frames = frames.with_offsets(frames.offsets, source.nbytes)
        with self._hub.lock:
            if name in self.offers:
                raise AgentError(f"{name} is offered already")
            self.offers[name] = source, frames

    def withdraw(self, name: str) -> Future[None]:
        with self._hub.lock:  # nothing is read without it
            self.offers.pop(name, None)
        gone = uncancellable_future()
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
    ) -> WithinFetch:
        target = target.cast("B")
        frames = frames.with_offsets(frames.offsets, target.nbytes)
        made = WithinFetch(Ledger(name, frames, only))
        self._fetches.add(made)

        def run() -> None:
            nonlocal target
            failure: CkptError | None = None
            try:
                for number in made.missing():
                    self._copy(made, peer, name, number if numbers is None else numbers[number], number, target, frames)
                    if landed is not None:
                        landed(number)
            except CkptError as exc:
                failure = exc.with_traceback(None)
            target = memoryview(b"")  # whoever hears of the end closes what it was a part of
            if failure is not None:
                made.completion.set_exception(failure)
            else:
                made.completion.set_result(None)

        self._tasks.submit(run)
        return made

    def _copy(
        self, fetch: WithinFetch, peer: str, name: str, theirs: int, ours: int, target: memoryview, frames: Frames
    ) -> None:
        offset, length = frames.byte_ranges()[ours]
        while True:
            with self._hub.lock:
                other = self._hub.agents.get(peer)
                offer = other.offers.get(name) if other is not None else None
                if fetch.called_off or offer is None or theirs >= len(offer[1]):
                    raise AgentError("it was called off" if fetch.called_off else f"agent {peer} does not give {name}")
                at, there = offer[1].byte_ranges()[theirs]
                if there != length:
                    raise AgentError(f"frame {ours} of {name} has another length")
                target[offset : offset + length] = offer[0][at : at + length]
                self._hub.moved += length
            if fetch.verify_frame(ours, frame_hash(target[offset : offset + length])):
                return

    def stream(
        self, peer: str, addresses: Sequence[Address], name: str, numbers: Sequence[int]
    ) -> Future[socket.socket]:
        raise AgentError("there are no connections here")

    def accept(self, sock: socket.socket, session: Session) -> None:
        sock.close()

    def set_rate(self, bytes_per_s: float | None) -> None: ...

    def close(self) -> None:
        for fetch in self._fetches:
            fetch.cancel()
        with self._hub.lock:
            self.offers.clear()
        self._tasks.close()


class WithinFetch:
    """See Fetch."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._lock = ledger, threading.Lock()
        self.called_off = False
        self.completion: Future[None] = uncancellable_future()

    def missing(self) -> list[int]:
        with self._lock:
            return self._ledger.missing

    def verify_frame(self, number: int, value: tuple[int, int]) -> bool:
        with self._lock:
            return self._ledger.verify_frame(number, value)

    def cancel(self) -> None:
        self.called_off = True
