"""A snapshot, and what of its copy is still pending."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from ckpt.threads import Outcome
from ckpt.trainer.snapshot.bindings import CopyPlan
from ckpt.trainer.snapshot.cpu_copier import Ticket
from ckpt.trainer.snapshot.deferred_copy import Key


class Snapshot:
    """One rank's state in one arena, as of one call of `take`. `done`: resolved once nothing more will be written and
    the bytes were checked; never with an exception. `abandon_reason`: why the content must not be used, or None.
    `stall_s`: how long training paused for the snapshot; complete once done. `is_deferred`: whether anything was copied
    after `take`."""

    def __init__(self, slot: int, settle: Callable[[Snapshot], None]) -> None:
        self.slot = slot
        self.done = Outcome[None]()
        self.abandon_reason: str | None = None
        self.stall_s = 0.0
        self.is_deferred = False
        self._end_copy = settle

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns once the snapshot is done. On the training thread it ends a copy that still runs. On any other thread
        it waits for the copy, and checks it. If the copy is on a device, or the check fails, it waits until the
        training thread ends the copy: at the end of the step at the latest. Errors: TimeoutError after timeout_s of
        this last part."""
        self._end_copy(self)
        self.done.result(timeout_s)


@dataclass(slots=True)
class PendingCopy:
    """A snapshot whose deferred copy runs (`deferred_ticket`), or whose eager copy is still to be compared
    (`deferred_ticket` is None)."""

    snapshot: Snapshot
    plan: CopyPlan
    eager_ticket: Ticket
    deferred_ticket: Ticket | None = None
    checking_thread: int | None = None  # the thread that checks it
    torn_keys: set[Key] | None = None  # the outcome of `TensorWatch.find_torn`, if known

    @property
    def tickets(self) -> list[Ticket]:
        return [ticket for ticket in (self.eager_ticket, self.deferred_ticket) if ticket is not None]

    def wait_for_writes(self) -> None:
        for ticket in self.tickets:
            ticket.wait()


@dataclass(frozen=True, slots=True)
class PendingRead:
    """What remains of a check until it is judged. It holds no view of the arena. `barrier`: see Copier."""

    barrier: Callable[[], None]
    judged_future: Future[None]
    storages: frozenset[int]
