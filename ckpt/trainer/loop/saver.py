"""The saver of one rank: takes its snapshots, at appointments, explicit saves and the exit.

The stager (stager.py) waits for copies in the background, seals the arena and reports. So training stands still only
for what must be copied at the boundary. Every save attempt is answered once, by `snapshot-staged`, which has a reason
if the attempt failed.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from dataclasses import dataclass
from typing import Any

import xxhash

from ckpt.errors import NotStaged, SaveFailed, Superseded, UsageError, is_injected
from ckpt.events import Events
from ckpt.format import values
from ckpt.ipc.messages import Message
from ckpt.settings import Settings
from ckpt.threads import Tasks
from ckpt.trainer.link.levels import Level, check_timeout
from ckpt.trainer.link.link import Link
from ckpt.trainer.link.slots import Plan, RankSlot
from ckpt.trainer.loop.due_saves import SavePatience
from ckpt.trainer.loop.offered_state import OfferedState
from ckpt.trainer.loop.run_report import RunReport
from ckpt.trainer.loop.stager import Filling, Stager
from ckpt.trainer.loop.unsaved_optimizers import AttributeWatch
from ckpt.trainer.snapshot.snapshot import Snapshotter
from ckpt.trainer.state import names, state_nodes
from ckpt.trainer.state.state_walk import StateWalker, Walk
from ckpt.types import Version


@dataclass(frozen=True, slots=True)
class _Taken:
    """The newest snapshot that was taken here. `digests`: of its shared and own values."""

    version: Version
    slot_number: int
    slot: RankSlot
    plan: Plan
    digests: tuple[bytes, bytes]


class Saver:
    """Owns the link, the offered state and the stager of one rank. Only the training thread calls its methods, unless
    they say otherwise.

    `link.terms` is set once the epoch is known; before that nothing can be appointed. `requested_version`: the newest
    version for which a save was asked. `newest_taken`: the newest version that was taken here, whatever became of
    it."""

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
        self.offered = OfferedState(walker, lambda offer: self.link.offer(offer), events, replicated)
        self.receipt = receipt
        self.link = Link(url, settings, events, tasks, self._bind, snapshotter.bindings.unbind, self.wait_for_copies)
        self.link.handlers["hold-awaited"] = self._on_hold_awaited
        self.snapshotter = snapshotter
        self.requested_version: Version | None = None
        self.training_thread = threading.current_thread()
        self.is_forked = False
        self._stager = Stager(self.link, events, receipt)
        self._patience = SavePatience()
        self._last_taken: _Taken | None = None
        self._attributes = AttributeWatch(events)
        self._first_steps = 2  # of which the boundary is still to come
        self._tasks = tasks

    def begin(self) -> None:
        self._stager.begin(self._tasks)

    @property
    def walk(self) -> Walk:
        return self.offered.walk

    @property
    def newest_taken(self) -> Version | None:
        return self._last_taken.version if self._last_taken is not None else None

    def save(self, why: str, version: Version, metrics: dict[str, float], until_s: float) -> Version:
        """Asks for a slot together with all ranks, and takes the snapshot. Returns the version that holds the state: at
        the exit it may be an earlier one of the same step, if no rank's state has changed since. `why`: "save", "due"
        (the policy names that step) or "exit". `until_s`: on the monotonic clock. Errors: CkptError."""
        link, self.requested_version = self.link, version
        try:
            # An earlier snapshot is reported first: the agent may give its slot to this one.
            self.wait_for_copies(max(1.0, until_s - time.monotonic()))
            self.offered.offer_changes(version)
            same = self._find_same_version(version) if why == "exit" else None
        except BaseException as exc:
            # At Ctrl-C too: else the other ranks would wait for this one.
            link.report_unsavable(version, str(exc) or "interrupted")
            raise
        fields = {"version": str(version), "why": why, "values_bytes": 0}
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
                return self._patience.request_save(lambda: self.link.connection.start_request("save", fields), until_s)
            return self.link.request("save", fields, max(1.0, until_s - time.monotonic())).fields
        finally:
            self.receipt.waited_s += time.perf_counter() - began_s

    def _find_same_version(self, version: Version) -> Version | None:
        """The newest version of that step that was taken here, if the state still equals its arena byte for byte: the
        tensors that this rank has staged, and all values. None: there is no such version, or something has changed."""
        kept, walk = self._last_taken, self.walk
        if kept is None or kept.version.step != version.step:
            return None
        if self.link.slots.by_number.get(kept.slot_number) is not kept.slot or not kept.slot.hold(version):
            return None
        try:
            if not self.snapshotter.bindings.is_bound(kept.slot_number, walk, kept.plan.staging):
                return None
            encoded = state_nodes.encode_trees(*self.offered.walker.values(walk), walk.scan.constants)
            same = _digests(*encoded) == kept.digests and self.snapshotter.is_unchanged(kept.slot_number)
            return kept.version if same else None
        except Exception as exc:
            # An object of the user's has failed in its state_dict(): the snapshot will report it.
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
            why = self._stager.report_not_staged(version, exc)
        if why:
            self.report_missed(attempt, version, why)
        return why

    def _take_into_slot(self, attempt: int, number: int, version: Version, metrics: dict[str, float]) -> str:
        started_s = time.perf_counter()
        if self.offered.offer_for_snapshot(version):
            return "layout"
        slot, filling, is_under_way = self.link.slots.by_number.get(number), None, False
        if slot is None:
            return "not granted"
        try:
            if not slot.hold(version) or slot.plan is None or slot.plan.offered_layout is not self.walk.layout:
                return "not granted"
            filling = self._fill_arena(attempt, number, slot, slot.plan, version, metrics, started_s)
            if filling is None:
                self.link.offer(self.offered.make_offer(version))
                return "values"
            self._stager.expect(filling)
            # Ctrl-C can come before this line, and then only after the stager has the filling.
            is_under_way = True
            self._stager.put(filling)
            digests = _digests(filling.shared, filling.own)
            self._last_taken = _Taken(version, number, slot, filling.plan, digests)
        finally:
            # Once under way, the stager lets go of the slot.
            if not is_under_way:
                if filling is not None:
                    self._stager.drop(filling)
                # After a Ctrl-C behind the snapshot nothing may write into the arena any more.
                self.snapshotter.poll()
                slot.release(version)
        self.link.levels.expect(version)
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
    ) -> Filling | None:
        """Fills the arena of the slot. Returns None if the values have become too large for the arena."""
        assert self.link.terms is not None
        walk = self.walk
        if not self.snapshotter.bindings.is_bound(number, walk, plan.staging):
            self._bind(number, plan, slot.arena.data(0, plan.staging.data_bytes))
        shared, own = state_nodes.encode_trees(*self.offered.walker.values(walk), walk.scan.constants)
        about = values.encode({"metrics": metrics, "ancestors": self.link.terms.ancestors})
        room = slot.arena.values_room(slot.declaration_place, len(plan.staging.frames))
        if len(shared) + len(own) + len(about) + 256 > room:
            return None
        samples = None
        if self.offered.may_have_replicas:
            # A checksum scatters the choice: saved steps have common factors.
            turn = zlib.crc32(str(version).encode())
            samples = self.offered.samples(plan.declaration.layout).take(turn)
        slot.arena.begin_fill()
        stood_s = time.perf_counter() - started_s
        with self.link.training_paused():
            snapshot = self.snapshotter.take(number)
        stalls_s = self.receipt.stalls_s
        # The stall as known by now; the stager completes it.
        stalls_s.append(time.perf_counter() - started_s)
        nth = len(stalls_s) - 1
        return Filling(attempt, number, slot, plan, version, nth, stood_s, snapshot, shared, own, about, samples)

    def _on_hold_awaited(self, message: Message) -> None:
        """Other ranks hold at an appointment. If this rank is past it and has not seen it, it answers that it is
        late."""
        if (missed := self.link.view.find_missed(int(message.fields["word"]))) is not None:
            self.report_missed(missed.attempt_number, Version(missed.step), "late")

    def report_missed(self, attempt: int, version: Version, why: str, updates: tuple[int, int] | None = None) -> None:
        """Answers an appointment that is not kept. `updates`: if the snapshot has to wait for a step with an update:
        the newest such step, and the number of steps from one to the next. Any thread."""
        self._stager.report_missed(attempt, version, why, updates)

    def note_boundary(self, step: int) -> None:
        """Notes that `step` has ended: copies that ran under the step are checked and finished. Errors: UsageError if
        one of the first steps has made the state one that cannot be saved."""
        self.snapshotter.note_boundary()
        # In the first step an optimizer's state appears, and tensors that began alike on all ranks may differ. The walk
        # after the second one says which optimizers are not saved. All ranks ask their objects at the same boundaries.
        if self._first_steps:
            if self._first_steps == 2:
                self.offered.mark_hashes_stale()
            self._first_steps -= 1
            try:
                self.offered.offer_changes(Version(step))
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
        self._stager.wait_until_idle(timeout_s)

    def fill_report(self, receipt: RunReport) -> None:
        """Puts into the report what was verified in this run, and what was not and why."""
        trust = self.snapshotter.trust
        hashed = ["the hashes of all frames read"] if receipt.read_bytes else []
        receipt.proven = [*hashed, *trust.proven(), *self._stager.describe_replicas()]
        tensors = {
            "saved per rank: not the same on all ranks that hold it": sorted(self._stager.differing_tensors),
            "found in other memory at each snapshot, and read anew": self.offered.moving_names(),
        }
        found = (f"{names.shorten_names(held)} {why}" for why, held in tensors.items() if held)
        receipt.fallbacks = [*trust.fallbacks(), *found, *receipt.told.fallback_messages]

    def close(self) -> None:
        """Lets running copies into the arenas finish, then ends the stager, the copies and the link. May be called
        again, if Ctrl-C has ended the first call."""
        # A stack: if Ctrl-C ends one wait, the next parts are ended all the same.
        with contextlib.ExitStack() as ends:
            ends.callback(self.link.close)
            ends.callback(self.snapshotter.close)
            ends.callback(self._stager.end)
            self.wait_for_copies()

    def abandon_in_child(self) -> None:
        """In a forked child: lets go of what belongs to the parent."""
        self.is_forked = True
        self.snapshotter.abandon_in_child()
        self.link.abandon_in_child()

    def _bind(self, number: int, plan: Plan, data: memoryview) -> None:
        """Prepares copies of the state, as it lies now, into a slot. If the structure has changed the plan is out of
        date, and nothing is bound. Since the state may also move, the training thread checks before each snapshot."""
        walk = self.walk
        if walk.layout is plan.offered_layout:
            self.snapshotter.bindings.bind(number, walk, plan.staging, data)
            if self.offered.may_have_replicas:
                # Prepared here, and not while training stands still.
                self.offered.samples(plan.declaration.layout)


def _digests(shared: bytes, own: bytes) -> tuple[bytes, bytes]:
    return xxhash.xxh3_128_digest(shared), xxhash.xxh3_128_digest(own)
