"""Whose turn it is to be made again at this node, as far as its memory goes. Main thread only.

All ranks of a lost node are asked for at once, before one of them has taken a page: what was begun counts with what it
has yet to take, or all would be let in by the same free memory. What does not fit beside it waits for its turn: work
that ends gives its space back, and one that fails all of it. Nothing is waited for but work that is under way, which
ends; what does not fit alone is refused, so that who wants it takes it from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckpt.agent.replication.parity_worker import SCRATCH_BYTES
from ckpt.agent.replication.replica_store import ReplicaStore


@dataclass(frozen=True, slots=True, eq=False)
class RebuildWork:
    """What becomes a copy of `size` bytes. `leave`: bytes that it has to leave; 0: it is needed more than anything.
    `urgent`: before what is not. `reader`: who wants it. `filled`: how many of its bytes it has written; any thread.
    Of `begin` and `refuse` one is called, once: it is its turn, until `Making.ended`, or why it never will be."""

    size: int
    leave: int
    urgent: bool
    reader: str
    filled: Callable[[], int]
    begin: Callable[[], None]
    refuse: Callable[[str], None]


class RebuildQueue:
    """`free_bytes`: what may still be taken on this machine."""

    def __init__(self, copies: ReplicaStore, free_bytes: Callable[[], int]) -> None:
        self._copies, self._free_bytes = copies, free_bytes
        self._under_way: list[RebuildWork] = []
        self._waiting: list[RebuildWork] = []

    @property
    def to_take_bytes(self) -> int:
        """What is under way will take so much more than it has; its scratch counts as if none of that were there."""
        return sum(work.size - work.filled() + SCRATCH_BYTES for work in self._under_way)

    def want(self, work: RebuildWork) -> None:
        """It begins now, or when others have ended; or it is refused."""
        self._waiting.append(work)
        self._waiting.sort(key=lambda each: not each.urgent)  # in the order in which they came, else
        self._go_on()

    def ended(self, work: RebuildWork) -> None:
        """It is a copy, or nothing is left of it."""
        self._under_way.remove(work)
        self._go_on()

    def unwanted(self, reader: str, why: str) -> None:
        """What waits for that reader is refused."""
        gone = [work for work in self._waiting if work.reader == reader]
        self._waiting = [work for work in self._waiting if work.reader != reader]
        for work in gone:
            work.refuse(why)
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting:
            why_not = self._why_not(self._waiting[0])
            if why_not and self._under_way:
                return
            work = self._waiting.pop(0)
            if why_not:
                work.refuse(why_not)
            else:
                self._under_way.append(work)
                work.begin()

    def _why_not(self, work: RebuildWork) -> str:
        if work.size + SCRATCH_BYTES + self.to_take_bytes + self._copies.to_take_bytes > self._free_bytes():
            return f"there is no memory for {work.size >> 20} MiB and the way to them"
        others_bytes = sum(each.size + SCRATCH_BYTES for each in self._under_way)
        if work.leave and not self._copies.fits([others_bytes, work.size, work.leave]):
            return f"{work.size >> 20} MiB would not leave the {work.leave >> 20} MiB that the job needs"
        return ""
