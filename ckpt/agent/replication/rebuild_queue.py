"""The queue of rebuilds at one node: starts each when its memory is free. Main thread only.

All ranks of a lost node are requested at once, before any has allocated a page. So rebuilds under way count with the
bytes that they will still allocate; otherwise all would be admitted by the same free memory. A rebuild that does not
fit waits until others end. One that does not fit alone is refused, and its requester takes another source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt.agent.replication.parity_worker import SCRATCH_BYTES
from ckpt.agent.replication.replica_arenas import ReplicaArenas
from ckpt.agent.runtime.coroutines import Promise
from ckpt.errors import AgentError


@dataclass(frozen=True, slots=True, eq=False)
class RebuildWork:
    """One rebuild, of a copy of `size` bytes. `reserved_bytes`: replica bytes that must stay free beside it; 0: no such
    limit. `urgent`: it goes before others. `reader`: its requester. `get_filled_bytes`: bytes written so far; any
    thread. `turn`: settled when the rebuild may begin; from then on it is under way until `RebuildQueue.end_work`."""

    size: int
    reserved_bytes: int
    urgent: bool
    reader: str
    get_filled_bytes: Callable[[], int]
    turn: Promise[None] = field(default_factory=Promise)


class RebuildQueue:
    """Rebuilds of one node. `free_bytes`: memory that may still be taken on this machine."""

    def __init__(self, arenas: ReplicaArenas, free_bytes: Callable[[], int]) -> None:
        self._arenas, self._free_bytes = arenas, free_bytes
        self._running_work: list[RebuildWork] = []
        self._queued_work: list[RebuildWork] = []

    @property
    def unallocated_bytes(self) -> int:
        """Bytes that rebuilds under way will still allocate; their scratch memory counts in full."""
        return sum(work.size - work.get_filled_bytes() + SCRATCH_BYTES for work in self._running_work)

    def enqueue(self, work: RebuildWork) -> Promise[None]:
        """Adds a rebuild. Returns its turn, which comes now or when others have ended. Errors of the promise:
        AgentError if the rebuild is refused."""
        self._queued_work.append(work)
        self._queued_work.sort(key=lambda each: not each.urgent)  # stable: else in order of arrival
        self._start_next()
        return work.turn

    def end_work(self, work: RebuildWork) -> None:
        """A rebuild has ended, as a copy or without a result."""
        self._running_work.remove(work)
        self._start_next()

    def refuse_queued(self, reader: str, why: str) -> None:
        """Refuses the rebuilds that wait for that reader."""
        gone = [work for work in self._queued_work if work.reader == reader]
        self._queued_work = [work for work in self._queued_work if work.reader != reader]
        for work in gone:
            work.turn.set_error(AgentError(why))
        self._start_next()

    def _start_next(self) -> None:
        while self._queued_work:
            why_not = self._refusal_reason(self._queued_work[0])
            if why_not and self._running_work:
                return
            work = self._queued_work.pop(0)
            if why_not:
                work.turn.set_error(AgentError(why_not))
            else:
                self._running_work.append(work)
                work.turn.set_result(None)

    def _refusal_reason(self, work: RebuildWork) -> str:
        if work.size + SCRATCH_BYTES + self.unallocated_bytes + self._arenas.unallocated_bytes > self._free_bytes():
            return f"there is no memory for {work.size >> 20} MiB and the way to them"
        others_bytes = sum(each.size + SCRATCH_BYTES for each in self._running_work)
        if work.reserved_bytes and not self._arenas.fits([others_bytes, work.size, work.reserved_bytes]):
            return f"{work.size >> 20} MiB would not leave the {work.reserved_bytes >> 20} MiB that the job needs"
        return ""
