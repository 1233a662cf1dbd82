"""The stager: a thread that waits for snapshots, seals their arenas and reports them, while training goes on."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ckpt.errors import CkptError, SaveFailed
from ckpt.events import Events
from ckpt.layout.layout import Declaration
from ckpt.threads import Condition, Tasks
from ckpt.trainer.link.link import Link
from ckpt.trainer.link.slots import Plan, RankSlot
from ckpt.trainer.loop.run_report import RunReport
from ckpt.trainer.snapshot.pending_copy import Snapshot
from ckpt.trainer.snapshot.samples import TakenSamples
from ckpt.types import ITEMSIZE, Epoch, Identity, Version, format_count


@dataclass(frozen=True, slots=True)
class Filling:
    """A snapshot that is being copied into the arena of a slot. The slot is held until the copy is over.
    `attempt_number`: the number of the save attempt. `stall_index`: in the report's `stalls_s`. `stall_before_copy_s`:
    how long training stood still before the copy."""

    attempt_number: int
    slot_number: int
    slot: RankSlot
    plan: Plan
    version: Version
    stall_index: int
    stall_before_copy_s: float
    snapshot: Snapshot
    shared: bytes
    own: bytes
    about: bytes
    samples: TakenSamples | None


class Stager:
    """Owns the thread, from `begin` to `end`. Every filling that was put is answered by `snapshot-staged`.

    `put(filling)` hands a filling over. Ctrl-C is raised before that call or behind it, but not within. `expect` and
    `drop` are for the time before: from `expect` on the snapshot counts as open.
    `staged_declaration`: of the newest snapshot. `differing_tensors`: replicas that have differed between ranks."""

    def __init__(self, link: Link, events: Events, receipt: RunReport) -> None:
        self.staged_declaration: Declaration | None = None
        self.differing_tensors: frozenset[str] = frozenset()
        self._link = link
        self._events = events
        self._receipt = receipt
        self._fillings: queue.SimpleQueue[Filling | None] = queue.SimpleQueue()
        self.put: Callable[[Filling], None] = self._fillings.put
        self._changed = Condition()
        self._open_snapshots: set[Snapshot] = set()

    def begin(self, tasks: Tasks) -> None:
        tasks.start("stager", self._run)

    def expect(self, filling: Filling) -> None:
        self._open_snapshots.add(filling.snapshot)

    def drop(self, filling: Filling) -> None:
        self._open_snapshots.discard(filling.snapshot)

    def wait_until_idle(self, timeout_s: float | None) -> None:
        """Waits until no snapshot is being copied into an arena. Errors: SaveFailed after timeout_s."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._open_snapshots, timeout_s):
                raise SaveFailed(f"the copy of an earlier snapshot did not end within {timeout_s:.4g} s")

    def end(self) -> None:
        """Ends the thread, once it has come to all fillings."""
        self._fillings.put(None)

    def report_missed(self, attempt: int, version: Version, why: str, updates: tuple[int, int] | None = None) -> None:
        """Answers an appointment that is not kept; see Saver.report_missed."""
        self._receipt.missed_snapshots += 1
        about = {"attempt": attempt, "version": str(version), "why": why[:500]}
        self._link.notify("snapshot-staged", about if updates is None else {**about, "updates": updates})

    def report_not_staged(self, version: Version, error: BaseException) -> str:
        """Emits an event that the step was not staged. Returns the reason in words."""
        why = str(error) if isinstance(error, CkptError) else f"{type(error).__name__}: {error}"
        self._events.emit("snapshot.failed", f"ckpt: step {version.step} was not staged: {why}", loud=True)
        return why

    def _run(self) -> None:
        while (filling := self._fillings.get()) is not None:
            try:
                self._finish(filling)
            except Exception as exc:
                # This thread goes on, and the save attempt is answered.
                why = self.report_not_staged(filling.version, exc)
                self.report_missed(filling.attempt_number, filling.version, why)
            finally:
                with self._changed:
                    self._open_snapshots.discard(filling.snapshot)
                    self._changed.notify_all()

    def _finish(self, filling: Filling) -> None:
        receipt, declaration = self._receipt, filling.plan.declaration
        try:
            filling.snapshot.wait()
            stall_s = filling.stall_before_copy_s + filling.snapshot.stall_s
            receipt.stalls_s[filling.stall_index] = stall_s
            why = filling.snapshot.abandon_reason or ""
            if not why:
                self._seal_arena(filling)
        finally:
            # Before the report: the agent may appoint the slot again at once.
            filling.slot.release(filling.version)
        if why:
            receipt.missed_snapshots += 1
            self._link.levels.record(filling.version, "local", False, why)
        else:
            receipt.snapshot_count += 1
            values_bytes = len(filling.shared) + len(filling.own) + len(filling.about)
            receipt.staged_bytes += declaration.staging.data_bytes + values_bytes
            self.staged_declaration = declaration
            self.differing_tensors |= filling.plan.differing_tensors
        self._link.notify(
            "snapshot-staged",
            {
                "attempt": filling.attempt_number,
                "version": str(filling.version),
                "slot": filling.slot_number,
                "division": declaration.division,
                "stall_s": stall_s,
                "lazy": filling.snapshot.is_deferred,
                "why": why,
                **(filling.samples.fields() if filling.samples is not None else {}),
            },
        )

    def _seal_arena(self, filling: Filling) -> None:
        terms, slot = self._link.terms, filling.slot
        assert terms is not None
        identity, place = Identity(Epoch.parse(terms.epoch), filling.version), slot.declaration_place
        values_blobs = filling.shared, filling.own, filling.about
        slot.arena.seal(identity, terms.rank, terms.world, filling.plan.staging.data_bytes, place, *values_blobs)

    def describe_replicas(self) -> list[str]:
        """The replicas that other ranks stage for this one, in words: the hashes of all ranks agreed."""
        if (declaration := self.staged_declaration) is None:
            return []
        entries, segments = declaration.layout.entries, declaration.staging.segments
        sizes = np.array([sum(b.size for b in e.boxes) * ITEMSIZE[e.dtype] for e in entries], np.int64)
        lengths = segments["length"].astype(np.float64)  # exact up to 2^53 bytes
        left = sizes - np.bincount(segments["entry"], weights=lengths, minlength=len(entries)).astype(np.int64)
        count, left_mib = int((left > 0).sum()), left.sum() / 2**20
        tensors = format_count(count, "tensor")
        return [f"replicas of {tensors} ({left_mib:.1f} MiB that other ranks stage)"] if count else []
