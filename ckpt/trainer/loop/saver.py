"""The saver of one rank: takes its snapshots, at appointments, explicit saves and the exit.

A thread of its own, the stager, waits for copies in the background, seals the arena and reports. So training stands
still only for what must be copied at the boundary. Every save attempt is answered once: `snapshot-staged` or
`snapshot-missed`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import zlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash

from ckpt.errors import CkptError, NotStaged, SaveFailed, Superseded, UsageError, is_injected
from ckpt.events import Events
from ckpt.format import values
from ckpt.layout.layout import Declaration, Layout
from ckpt.settings import Settings
from ckpt.threads import Condition, Tasks
from ckpt.trainer.link.levels import Level, check_timeout
from ckpt.trainer.link.link import Link
from ckpt.trainer.link.slots import Plan, RankSlot, StateOffer, encode_hashes
from ckpt.trainer.loop.due_saves import SavePatience
from ckpt.trainer.loop.optimizer_attributes import AttributeWatch
from ckpt.trainer.loop.run_report import RunReport
from ckpt.trainer.snapshot.samples import Samples, TakenSamples
from ckpt.trainer.snapshot.snapshot import Snapshot, Snapshotter
from ckpt.trainer.state import names, state_nodes
from ckpt.trainer.state.state_walk import StateWalker, Walk, hash_walk
from ckpt.types import ITEMSIZE, Epoch, Identity, Version, format_count

MOVES_MIN = 2  # a tensor that has moved so often is reported as a new one at each step
UNSETTLED_MAX = 3  # a warning after so many missed appointments in a row, each with another structure


@dataclass(frozen=True, slots=True)
class _Filling:
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


class Saver:
    """Owns the link, the walk and the stager thread of one rank. Only the training thread calls its methods, unless
    they say otherwise.

    `link.terms` is set once the epoch is known; before that nothing can be appointed. `checked_step`: the step after
    which `walk` was last seen to match the state. `requested_version`: the newest version for which a save was asked.
    `newest_taken`: the newest version that was taken here, whatever became of it."""

    def __init__(
        self,
        url: str,
        settings: Settings,
        walker: StateWalker,
        snapshotter: Snapshotter,
        tasks: Tasks,
        events: Events,
        receipt: RunReport,
        replicated: bool,
    ) -> None:
        self.walker = walker
        self.walk: Walk = walker.walk()
        self.checked_step = -1
        self.events = events
        self.receipt = receipt
        self.link = Link(url, settings, events, tasks, self._bind, snapshotter.bindings.unbind, self.wait_for_copies)
        self.link.on_late = self.report_late
        self.snapshotter = snapshotter
        self._may_have_replicas = replicated
        self._staged_declaration: Declaration | None = None  # of the newest snapshot
        self._differing_tensors: frozenset[str] = frozenset()  # replicas that have differed between ranks
        self._fillings: queue.SimpleQueue[_Filling | None] = queue.SimpleQueue()
        self._snapshots_changed = Condition()
        self._open_snapshots: set[Snapshot] = set()  # snapshots that the stager has not finished
        self.requested_version: Version | None = None
        self.newest_taken: Version | None = None
        self._patience = SavePatience()
        self._last_filling: _Filling | None = None  # the filling of `newest_taken`, without its values
        self._is_walk_offered = True  # whether the agent knows the present walk, or will learn it at the join
        self._attributes = AttributeWatch(events)
        self._first_steps = 2  # of which the boundary is still to come
        self._has_stale_hashes = False  # whether the replica hashes that the agent has may be out of date
        self._samples: Samples | None = None  # for the present walk and plan
        self._move_counts: Counter[str] = Counter()  # how often each tensor was found in other memory
        self._unsettled_misses = 0  # missed appointments in a row, since the structure had changed
        self.training_thread = threading.current_thread()
        self.is_forked = False
        self._tasks = tasks

    def begin(self) -> None:
        self._tasks.start("stager", self._run_stager)

    def make_offer(self, version: Version, positions: bool = True) -> StateOffer:
        """The present walk, as it is described to the agent. It has hashes only if other ranks may hold replicas.
        `positions`: whether loaders are asked for theirs, which is forbidden before they are restored."""
        shared, own = self.walker.values(self.walk, positions)
        size = sum(map(len, state_nodes.encode_trees(shared, own, self.walk.scan.constants)))
        hashes = encode_hashes(hash_walk(self.walk)) if self._may_have_replicas else b""
        return StateOffer(self.walk.layout, hashes, version, size)

    def mark_hashes_stale(self) -> None:
        """Has replicas hashed anew before the next snapshot: tensors that were equal on all ranks may differ from now
        on. That is so after a restore, and after the first step."""
        self._has_stale_hashes = self._may_have_replicas

    def offer_changes(self, version: Version) -> bool:
        """Tells the agent of a changed structure, or of doubted replicas. Returns whether there was anything to tell.
        Tensors of the same names and shapes in other memory need no message: the next snapshot reads them there.

        Errors: SaveFailed if the state cannot be saved as it is now."""
        try:
            if self.walker.has_changed(self.walk):
                self._adopt_walk(self.walker.walk())
            self.checked_step = version.step
            if self._is_walk_offered and not self._has_stale_hashes:
                return False
            self._is_walk_offered = False
            self.link.offer(self.make_offer(version))
        except UsageError as exc:
            raise SaveFailed(f"the state has become one that cannot be saved: {exc}") from exc
        except Exception as exc:
            # An object of the user's has failed in its state_dict().
            if is_injected(exc):
                raise
            raise SaveFailed(f"the state could not be read: {type(exc).__name__}: {exc}") from exc
        self._is_walk_offered, self._has_stale_hashes = True, False
        return True

    def save(self, why: str, version: Version, metrics: dict[str, float], until_s: float) -> Version:
        """Asks for a slot together with all ranks, and takes the snapshot. Returns the version that holds the state: at
        the exit it may be an earlier one of the same step, if no rank's state has changed since. `why`: "save", "due"
        (the policy names that step) or "exit". `until_s`: on the monotonic clock. Errors: CkptError."""
        link, self.requested_version = self.link, version
        try:
            # An earlier snapshot is reported first: the agent may give its slot to this one.
            self.wait_for_copies(max(1.0, until_s - time.monotonic()))
            self.offer_changes(version)
            same = self._find_same_version(version) if why == "exit" else None
        except BaseException as exc:
            # At Ctrl-C too: else the other ranks would wait for this one.
            link.report_unsavable(version, str(exc) or "interrupted")
            raise
        fields = {"version": str(version), "why": why, "metrics": metrics, "values_bytes": 0}
        link.levels.forget_failures(version)
        if same is not None:
            fields["unchanged_since"] = str(same)
            link.levels.forget_failures(same)
        try:
            answer = self._request_save(fields, until_s)
            # `saved`: all ranks have staged this very version already (by an appointment), or the same state before.
            held = Version.parse(str(answer["version"])) if answer["saved"] else version
            link.levels.expect(held)
            missed = "" if answer["saved"] else self.take(int(answer["attempt"]), int(answer["slot"]), version, metrics)
        except BaseException as exc:
            # Other ranks may ask only now, and another agent. At the exit all ranks ask again.
            if why != "exit" and not isinstance(exc, Superseded):
                link.report_unsavable(version, str(exc) or "interrupted")
            raise
        if missed:
            raise NotStaged(f"step {version.step} was not staged: {missed}")
        return held

    def _request_save(self, fields: dict[str, Any], until_s: float) -> dict[str, Any]:
        """The agent's answer. The report gets the time of the wait. Errors: CkptError."""
        began_s = time.perf_counter()
        try:
            if fields["why"] == "due":
                return self._patience.request_save(lambda: self.link.start_request("save", fields), until_s)
            return self.link.request("save", fields, max(1.0, until_s - time.monotonic())).fields
        finally:
            self.receipt.waited_s += time.perf_counter() - began_s

    def has_moved(self, version: Version, until_s: float) -> bool:
        """Whether a snapshot of exactly that version was taken here and the state has changed since. If that is not
        known by `until_s`, on the monotonic clock, it counts as changed."""
        if self._last_filling is None or self._last_filling.version != version:
            return False
        try:
            self.wait_for_copies(max(1.0, until_s - time.monotonic()))
            return self.walker.has_changed(self.walk) or self._find_same_version(version) is None
        except Exception as exc:
            # An object of the user's has failed in its state_dict(): the snapshot will report it.
            if is_injected(exc):
                raise
            return True

    def _find_same_version(self, version: Version) -> Version | None:
        """The newest version of that step that was taken here, if the state still equals its arena byte for byte: the
        tensors that this rank has staged, and all values. None: there is no such version, or something has changed."""
        kept = self._last_filling
        if kept is None or kept.version.step != version.step:
            return None
        if self.link.slots.by_number.get(kept.slot_number) is not kept.slot or not kept.slot.hold(version):
            return None
        try:
            if not self.snapshotter.bindings.is_bound(kept.slot_number, self.walk, kept.plan.staging):
                return None
            encoded = state_nodes.encode_trees(*self.walker.values(self.walk), self.walk.scan.constants)
            same = _digests(*encoded) == (kept.shared, kept.own) and self.snapshotter.is_unchanged(kept.slot_number)
            return kept.version if same else None
        except Exception as exc:
            # As in `has_moved`.
            if is_injected(exc):
                raise
            return None
        finally:
            kept.slot.release(version)

    def wait(self, version: Version, level: Level, timeout_s: float | None, why: str = "save") -> None:
        """Waits until that version has reached `level`. Any thread may call it. `why`: as for `save`. Errors:
        SaveFailed; UsageError."""
        check_timeout(timeout_s)
        began_s = time.monotonic()
        # No other thread could end copies that run under the step.
        if threading.current_thread() is self.training_thread:
            self.wait_for_copies(timeout_s)
        if level == "store":
            self.link.announce_wait(version, why)
        left_s = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began_s))
        self.link.levels.wait(version, level, left_s)

    def take(self, attempt: int, number: int, version: Version, metrics: dict[str, float] | None = None) -> str:
        """Takes the snapshot of `version` into slot `number`, for save attempt `attempt`. Returns why it was not taken;
        "" if it was."""
        try:
            why = self._take_into_slot(attempt, number, version, metrics or {})
        except BaseException as exc:
            # The other ranks must not wait for this one.
            if is_injected(exc):
                self.report_missed(attempt, version, "interrupted")
                raise
            # A save that fails never fails training.
            why = self._report_not_staged(version, exc)
        if why:
            self.report_missed(attempt, version, why)
        return why

    def _take_into_slot(self, attempt: int, number: int, version: Version, metrics: dict[str, float]) -> str:
        started_s = time.perf_counter()
        before = self.walk.layout
        if self.offer_changes(version):
            self._note_unsettled(before)
            return "layout"
        self._unsettled_misses = 0
        slot, filling, is_under_way = self.link.slots.by_number.get(number), None, False
        if slot is None:
            return "not granted"
        try:
            if not slot.hold(version) or slot.plan is None or slot.plan.offered_layout is not self.walk.layout:
                return "not granted"
            filling = self._fill_arena(attempt, number, slot, slot.plan, version, metrics, started_s)
            if filling is None:
                self.link.offer(self.make_offer(version))
                return "values"
            self._open_snapshots.add(filling.snapshot)
            # Ctrl-C can come before this line, and then only after the stager has the filling.
            is_under_way = True
            self._fillings.put(filling)
            shared, own = _digests(filling.shared, filling.own)
            self._last_filling = replace(filling, shared=shared, own=own, about=b"", samples=None)
        finally:
            # Once under way, the stager lets go of the slot.
            if not is_under_way:
                if filling is not None:
                    self._open_snapshots.discard(filling.snapshot)
                # After a Ctrl-C behind the snapshot nothing may write into the arena any more.
                self.snapshotter.poll()
                slot.release(version)
        self.link.levels.expect(version)
        self.newest_taken = version
        return ""

    def _fill_arena(
        self,
        attempt: int,
        number: int,
        slot: RankSlot,
        plan: Plan,
        version: Version,
        metrics: dict[str, float],
        started_s: float,
    ) -> _Filling | None:
        """Fills the arena of the slot. Returns None if the values have become too large for the arena."""
        assert self.link.terms is not None
        if not self.snapshotter.bindings.is_bound(number, self.walk, plan.staging):
            self._bind(number, plan, slot.arena.data(0, plan.staging.data_bytes))
        shared, own = state_nodes.encode_trees(*self.walker.values(self.walk), self.walk.scan.constants)
        about = values.encode({"metrics": metrics, "ancestors": self.link.terms.ancestors})
        room = slot.arena.values_room(slot.declaration_place, len(plan.staging.frames))
        if len(shared) + len(own) + len(about) + 256 > room:
            return None
        samples = None
        if self._may_have_replicas:
            # A checksum scatters the choice: saved steps have common factors.
            turn = zlib.crc32(str(version).encode())
            samples = self._get_samples(self.walk, plan.declaration.layout).take(turn)
        slot.arena.begin_fill()
        stood_s = time.perf_counter() - started_s
        with self.link.training_paused():
            snapshot = self.snapshotter.take(number)
        stalls_s = self.receipt.stalls_s
        # The stall as known by now; the stager completes it.
        stalls_s.append(time.perf_counter() - started_s)
        nth = len(stalls_s) - 1
        return _Filling(attempt, number, slot, plan, version, nth, stood_s, snapshot, shared, own, about, samples)

    def report_late(self, attempt: int, step: int) -> None:
        """Answers an appointment whose version has passed."""
        self.report_missed(attempt, Version(step), "late")

    def report_missed(self, attempt: int, version: Version, why: str, updates: tuple[int, int] | None = None) -> None:
        """Answers an appointment that is not kept. `updates`: if the snapshot has to wait for a step with an update:
        the newest such step, and the number of steps from one to the next."""
        self.receipt.missed_snapshots += 1
        about = {"attempt": attempt, "version": str(version), "why": why[:500]}
        self.link.notify("snapshot-missed", about if updates is None else {**about, "updates": updates})

    def note_boundary(self, step: int) -> None:
        """Notes that `step` has ended: copies that ran under the step are checked and finished. Errors: UsageError if
        one of the first steps has made the state one that cannot be saved."""
        self.snapshotter.note_boundary()
        # In the first step an optimizer's state appears, and tensors that began alike on all ranks may differ. The walk
        # after the second one says which optimizers are not saved. All ranks ask their objects at the same boundaries.
        if self._first_steps:
            if self._first_steps == 2:
                self.mark_hashes_stale()
            self._first_steps -= 1
            try:
                self.offer_changes(Version(step))
            except SaveFailed as exc:
                # The run has hardly begun, and no save of it could succeed. Any other failure is left to the next
                # snapshot, which reports it.
                if isinstance(exc.__cause__, UsageError):
                    raise UsageError(f"after step {step} {exc}") from None
            self._attributes.look(self.walk.scan.views.values())

    def wait_for_copies(self, timeout_s: float | None = None) -> None:
        """Waits until no snapshot is being copied into an arena. On the training thread it ends the copy itself; on
        another thread it waits until the training thread comes to its next boundary. Errors: SaveFailed after
        timeout_s."""
        if threading.current_thread() is self.training_thread:
            self.snapshotter.poll()
        with self._snapshots_changed:
            if not self._snapshots_changed.wait_for(lambda: not self._open_snapshots, timeout_s):
                raise SaveFailed(f"the copy of an earlier snapshot did not end within {timeout_s:.4g} s")

    def fill_report(self, receipt: RunReport) -> None:
        """Puts into the report what was verified in this run, and what was not and why."""
        trust, declaration = self.snapshotter.trust, self._staged_declaration
        hashed = ["the hashes of all frames read"] if receipt.read_bytes else []
        receipt.proven = [*hashed, *trust.proven(), *(_describe_replicas(declaration) if declaration else ())]
        tensors = {
            "saved per rank: not the same on all ranks that hold it": sorted(self._differing_tensors),
            "found in other memory at each snapshot, and read anew": sorted(
                name for name, count in self._move_counts.items() if count >= MOVES_MIN
            ),
        }
        found = (f"{names.shorten_names(held)} {why}" for why, held in tensors.items() if held)
        receipt.fallbacks = [*trust.fallbacks(), *found, *receipt.fallback_messages]

    def close(self) -> None:
        """Lets running copies into the arenas finish, then ends the stager, the copies and the link. May be called
        again, if Ctrl-C has ended the first call."""
        # A stack: if Ctrl-C ends one wait, the next parts are ended all the same.
        with contextlib.ExitStack() as ends:
            ends.callback(self.link.close)
            ends.callback(self.snapshotter.close)
            ends.callback(self._fillings.put, None)
            self.wait_for_copies()

    def abandon_in_child(self) -> None:
        """In a forked child: lets go of what belongs to the parent."""
        self.is_forked = True
        self.link.abandon_in_child()

    # -- inside

    def _adopt_walk(self, walk: Walk) -> None:
        """Takes over a new walk: the state has another structure, or lies in other memory. With the same structure the
        granted slots stay valid; else the state has to be offered anew. It also is if a tensor that other ranks may
        hold too has moved for the first time: it may differ from now on (`load_state_dict` on one rank only)."""
        before = self.walk
        moved = _find_moved(before, walk)
        alike = walk.layout == before.layout and walk.may_have_replicas == before.may_have_replicas
        entries = zip(walk.layout.entries, walk.may_have_replicas, strict=True)
        shared = {entry.name for entry, replica in entries if replica}
        if not alike or (self._may_have_replicas and not moved & shared <= self._move_counts.keys()):
            self._is_walk_offered = False
        self.walk = replace(walk, layout=before.layout) if alike else walk
        self._move_counts.update(moved)

    def _note_unsettled(self, before: Layout) -> None:
        """Counts appointments in a row that were missed since the structure had changed, and warns once. `before`: the
        structure at the former appointment."""
        self._unsettled_misses = self._unsettled_misses + 1 if self.walk.layout is not before else 0
        if self._unsettled_misses == UNSETTLED_MAX:
            changed = names.shorten_names(sorted({e.name for e in set(self.walk.layout.entries) ^ set(before.entries)}))
            text = f"ckpt: no checkpoint is taken while the structure of the state changes each time ({changed}). Keep "
            text += "the shapes and the number of its tensors, or call ck.save(), which waits"
            self.events.emit("state.unsettled", text, loud=True)

    def _bind(self, number: int, plan: Plan, data: memoryview) -> None:
        """Prepares copies of the state, as it lies now, into a slot. If the structure has changed the plan is out of
        date, and nothing is bound. Since the state may also move, the training thread checks before each snapshot."""
        walk = self.walk
        if walk.layout is plan.offered_layout:
            self.snapshotter.bindings.bind(number, walk, plan.staging, data)
            if self._may_have_replicas:
                # Prepared here, and not while training stands still.
                self._get_samples(walk, plan.declaration.layout)

    def _get_samples(self, walk: Walk, layout: Layout) -> Samples:
        """A few elements of the tensors that other ranks should hold alike; the same elements on all ranks."""
        known = self._samples
        if known is None or known.walk is not walk or known.layout is not layout:
            known = self._samples = Samples(walk, layout)
        return known

    def _run_stager(self) -> None:
        while (filling := self._fillings.get()) is not None:
            try:
                self._finish_filling(filling)
            except Exception as exc:
                # This thread goes on, and the save attempt is answered.
                why = self._report_not_staged(filling.version, exc)
                self.report_missed(filling.attempt_number, filling.version, why)
            finally:
                with self._snapshots_changed:
                    self._open_snapshots.discard(filling.snapshot)
                    self._snapshots_changed.notify_all()

    def _finish_filling(self, filling: _Filling) -> None:
        try:
            filling.snapshot.wait()
            stall_s = filling.stall_before_copy_s + filling.snapshot.stall_s
            self.receipt.stalls_s[filling.stall_index] = stall_s
            why = filling.snapshot.abandon_reason or self._seal_arena(filling)
        finally:
            # Before the report: the agent may appoint the slot again at once.
            filling.slot.release(filling.version)
        if why:
            self.receipt.missed_snapshots += 1
            self.link.levels.record(filling.version, "local", False, why)
        else:
            self.receipt.snapshot_count += 1
            values_bytes = len(filling.shared) + len(filling.own) + len(filling.about)
            self.receipt.staged_bytes += filling.plan.staging.data_bytes + values_bytes
            self._staged_declaration = filling.plan.declaration
            self._differing_tensors |= filling.plan.differing_tensors
        self.link.notify(
            "snapshot-staged",
            {
                "attempt": filling.attempt_number,
                "version": str(filling.version),
                "slot": filling.slot_number,
                "division": filling.plan.declaration.division,
                "stall_s": stall_s,
                "lazy": filling.snapshot.is_deferred,
                "why": why,
                **(filling.samples.fields() if filling.samples is not None else {}),
            },
        )

    def _seal_arena(self, filling: _Filling) -> str:
        """Seals the arena of a copied snapshot. Returns why that failed, or ""."""
        terms, slot = self.link.terms, filling.slot
        assert terms is not None
        identity, place = Identity(Epoch.parse(terms.epoch), filling.version), slot.declaration_place
        values_blobs = filling.shared, filling.own, filling.about
        try:
            slot.arena.seal(identity, terms.rank, terms.world, filling.plan.staging.data_bytes, place, *values_blobs)
        except CkptError as exc:
            return self._report_not_staged(filling.version, exc)
        return ""

    def _report_not_staged(self, version: Version, error: BaseException) -> str:
        """Emits an event that the step was not staged. Returns the reason in words."""
        why = str(error) if isinstance(error, CkptError) else f"{type(error).__name__}: {error}"
        self.events.emit("snapshot.failed", f"ckpt: step {version.step} was not staged: {why}", loud=True)
        return why


def _describe_replicas(declaration: Declaration) -> list[str]:
    """The replicas that other ranks stage for this one, in words: the hashes of all ranks agreed."""
    entries, segments = declaration.layout.entries, declaration.staging.segments
    sizes = np.array([sum(b.size for b in e.boxes) * ITEMSIZE[e.dtype] for e in entries], np.int64)
    lengths = segments["length"].astype(np.float64)  # exact up to 2^53 bytes
    left = sizes - np.bincount(segments["entry"], weights=lengths, minlength=len(entries)).astype(np.int64)
    count, left_mib = int((left > 0).sum()), left.sum() / 2**20
    tensors = format_count(count, "tensor")
    return [f"replicas of {tensors} ({left_mib:.1f} MiB that other ranks stage)"] if count else []


def _digests(shared: bytes, own: bytes) -> tuple[bytes, bytes]:
    return xxhash.xxh3_128_digest(shared), xxhash.xxh3_128_digest(own)


def _find_moved(before: Walk, now: Walk) -> set[str]:
    """The names of tensors that exist in both walks, in different memory. Both walks keep their tensors alive, so that
    equal addresses mean the same memory."""
    places = dict(zip((entry.name for entry in before.layout.entries), before.tensors, strict=True))
    names_now = (entry.name for entry in now.layout.entries)
    pairs = ((name, places.get(name), live) for name, live in zip(names_now, now.tensors, strict=True))
    return {name for name, old, new in pairs if old is not None and _addresses(old) != _addresses(new)}


def _addresses(tensors: Collection[torch.Tensor]) -> list[int]:
    return [torch.Tensor.data_ptr(tensor) for tensor in tensors]
