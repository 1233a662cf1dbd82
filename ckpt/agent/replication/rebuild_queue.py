"""The queue of rebuilds at one node: starts each when its memory is free. Main thread only.

All ranks of a lost node are requested at once, before any has allocated a page. So rebuilds under way count with the
bytes that they will still allocate; otherwise all would be admitted by the same free memory. A rebuild that does not
fit waits until others end. One that does not fit alone is refused, and its requester takes another source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckpt.agent.replication.parity_worker import SCRATCH_BYTES
from ckpt.agent.replication.replica_store import ReplicaStore


@dataclass(frozen=True, slots=True, eq=False)
class RebuildWork:
    """One rebuild, of a copy of `size` bytes. `leave`: replica bytes that must stay free beside it; 0: no such limit.
    `urgent`: it goes before others. `reader`: its requester. `filled`: bytes written so far; any thread. Either `begin`
    or `refuse` is called, once. After `begin` the rebuild is under way until `RebuildQueue.ended`."""

    size: int
    leave: int
    urgent: bool
    reader: str
    filled: Callable[[], int]
    begin: Callable[[], None]
    refuse: Callable[[str], None]


class RebuildQueue:
    """Rebuilds of one node. `free_bytes`: memory that may still be taken on this machine."""

    def __init__(self, copies: ReplicaStore, free_bytes: Callable[[], int]) -> None:
        self._copies, self._free_bytes = copies, free_bytes
        self._under_way: list[RebuildWork] = []
        self._waiting: list[RebuildWork] = []

    @property
    def to_take_bytes(self) -> int:
        """Bytes that rebuilds under way will still allocate; their scratch memory counts in full."""
        return sum(work.size - work.filled() + SCRATCH_BYTES for work in self._under_way)

    def want(self, work: RebuildWork) -> None:
        """Adds a rebuild: it begins now, begins when others have ended, or is refused."""
        self._waiting.append(work)
        self._waiting.sort(key=lambda each: not each.urgent)  # stable: else in order of arrival
        self._go_on()

    def ended(self, work: RebuildWork) -> None:
        """A rebuild has ended, as a copy or without a result."""
        self._under_way.remove(work)
        self._go_on()

    def unwanted(self, reader: str, why: str) -> None:
        """Refuses the rebuilds that wait for that reader."""
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
