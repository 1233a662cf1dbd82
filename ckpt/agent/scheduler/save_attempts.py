"""The save attempts of one job: how one begins, is staged by all ranks, and is assembled, withdrawn or abandoned. Pure.

- An attempt is complete only when every rank staged it for the same version, slot and division, and it was assembled.
- A version that one rank missed, or can no longer stage, is abandoned for all ranks at once. A rank that asks later is
  told so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckpt.agent.preemption.exit_vote import ExitVote
from ckpt.agent.preemption.preemption import Preemption
from ckpt.agent.scheduler.slot_allocator import SlotAllocator
from ckpt.agent.state.actions import Assemble, Emit, SetWord
from ckpt.agent.state.job_facts import MISSING_ANSWER_S, JobFacts, SnapshotClock
from ckpt.agent.state.rank_presence import Presence
from ckpt.agent.state.slots import AttemptTimes, SaveAttempt, SaveReason, Slot, SlotState
from ckpt.ipc.control_page import ATTEMPT_MAX, GRADIENTS_WAIT, MID_STEP, ControlWord, WordKind
from ckpt.policy.adaptive import format_duration
from ckpt.types import Version

# A silent rank this many steps past a version has staged it or never will.
LOST_STEPS = 3
ABANDONED_MAX = 64  # numbers kept


@dataclass(eq=False)
class SaveAttempts:
    """The save attempts of one job."""

    _facts: JobFacts
    _clock: SnapshotClock
    _preemption: Preemption
    _vote: ExitVote
    _allocator: SlotAllocator
    _next_number: int
    _abandoned: deque[int] = field(default_factory=lambda: deque(maxlen=ABANDONED_MAX))
    _has_reported_first: bool = False  # the event that the first checkpoint is complete was emitted

    # -- facts

    def record_staging(
        self, rank: int, number: int, version: Version, slot: int, division: str, stall_s: float
    ) -> None:
        """The rank has staged its snapshot for that save attempt. `stall_s`: the pause of its training."""
        attempt = self._facts.slots.attempt_of(number, SlotState.GRANTED)
        if attempt is None:
            # The attempt was withdrawn while this rank staged: only this rank expects a result.
            if number in self._abandoned:
                self._facts.levels.report(version, "local", False, "it was given up meanwhile")
            return
        if (attempt.version, attempt.slot, attempt.division) != (version, slot, division):
            attempt.miss(f"rank {rank} staged {version} in slot {slot} under another plan")
        attempt.staged_ranks.setdefault(rank, stall_s)

    def record_miss(self, rank: int, number: int, why: str, updates: tuple[int, int] = (0, 0)) -> None:
        """The rank cannot stage that save attempt. `why`: "late", GRADIENTS_WAIT, MID_STEP, or a text. `updates`: a
        step with an optimizer update, and the steps from one update to the next; 0: unknown."""
        attempt, timing = self._facts.slots.attempt_of(number, SlotState.GRANTED), self._facts.step_timing
        if attempt is None:
            return
        if why == "late":
            self._facts.save_estimate.record_late()
        elif why == GRADIENTS_WAIT:
            timing.update_cycle = updates
        elif why == MID_STEP:
            timing.unpollable_step = attempt.version.step + 1
        if why in ("late", MID_STEP) and attempt.version.sub:
            timing.record_missed_poll(attempt.version.step + 1)
        attempt.miss(f"rank {rank} missed it ({why})")

    def record_disconnect(self, rank: int) -> None:
        """The rank's connection ended: what it has not staged it may have answered there."""
        for attempt in self._facts.slots.open_attempts:
            if rank not in attempt.staged_ranks:
                attempt.miss(f"the connection of rank {rank} was lost")

    def record_assembly(self, slot: int, number: int, error: str) -> None:
        """Outcome of `Assemble`. `error`: "" if the checkpoint is complete."""
        facts, attempt = self._facts, self._facts.slots[slot].attempt
        if attempt is None or attempt.state is not SlotState.STAGED or attempt.number != number:
            return
        if error:
            attempt.state, attempt.miss_reason = SlotState.GRANTED, error
            return
        attempt.state = SlotState.COMPLETE
        facts.save_estimate.record_completion()
        facts.step_timing.record_completion()
        self._clock.record_completion()
        facts.levels.report(attempt.version, "local", True, "")
        if self._clock.commit_interval_s and not self._has_reported_first:
            self._has_reported_first = True
            step, next_s = attempt.version.step, self._clock.interval_s
            text = f"ckpt: step {step} is the first checkpoint; the next one is due {format_duration(next_s)} later"
            facts.actions.append(Emit("policy.first", text, False, {"step": step, "next_s": next_s}))

    # -- decisions

    def open(self, slot: Slot, why: SaveReason, version: Version, now_s: float) -> SaveAttempt:
        """Begins an attempt at that version in a free slot."""
        number, arenas = self._next_number, self._facts.arenas
        self._next_number = number % ATTEMPT_MAX + 1
        # Forget what was reported of a failed attempt at this version.
        self._facts.levels.forget(version)
        size = sum(arenas.needed_bytes)
        slot.attempt = SaveAttempt(number, slot.number, why, version, arenas.division, AttemptTimes(now_s), size)
        return slot.attempt

    def announce(self, attempt: SaveAttempt) -> None:
        """Publishes the attempt's control word."""
        attempt.is_announced = True
        kind = WordKind.HOLD if attempt.reason is SaveReason.HOLD else WordKind.TAKE
        word = ControlWord(attempt.number, attempt.slot, kind, attempt.version.step, attempt.version.sub)
        self._facts.actions.append(SetWord(attempt.slot, word))

    def assemble_staged(self) -> None:
        """Has each attempt assembled that all ranks have staged."""
        for attempt in self._facts.slots.open_attempts:
            if len(attempt.staged_ranks) == self._facts.world:
                attempt.state = SlotState.STAGED
                self._clear_control_word(attempt)
                self._facts.actions.append(Assemble(attempt.slot, attempt.number, attempt.version))

    def abandon_hopeless(self, now_s: float, steps: Sequence[int]) -> None:
        """Abandons each attempt that a rank missed, or can no longer stage."""
        for attempt in self._facts.slots.open_attempts:
            why = attempt.miss_reason or self._why_hopeless(attempt, now_s, steps)
            if why:
                self._abandon(attempt, why, now_s)

    def _why_hopeless(self, attempt: SaveAttempt, now_s: float, steps: Sequence[int]) -> str:
        """Why the attempt cannot become complete any more; "": it can."""
        facts, is_late = self._facts, now_s - attempt.times.opened_s >= MISSING_ANSWER_S
        if facts.superseded_by:
            return f"a newer start, {facts.superseded_by}, owns the run"
        if not (facts.any_gone or is_late):
            return ""
        waiting = [rank for rank in range(facts.world) if rank not in attempt.staged_ranks]
        gone = next((rank for rank in waiting if facts.rank_states[rank].presence is not Presence.HERE), None)
        if gone is not None:
            return f"{facts.describe_absence(gone)} before it had staged it"
        silent = [rank for rank in waiting if is_late and steps[rank] >= attempt.version.step + LOST_STEPS]
        return f"rank {silent[0]} has passed that step without an answer" if silent else ""

    def judge_holds(self, now_s: float) -> None:
        """Decides for each open hold whether the ranks leave or go on. In this order:

        - A rank is dead, the ranks were told to end, or another start owns the run: leave, since the job cannot go on.
        - The notice was withdrawn, or the deadline passed: go on; the staging continues.
        - All ranks held and staged it: leave.
        - All held but not all staged: go on, and abandon it."""
        for attempt in self._facts.slots.attempts():
            if not attempt.is_verdict_pending:
                continue
            all_held = self._vote.holding_ranks == self._facts.world
            all_staged = len(attempt.staged_ranks) == self._facts.world
            if self._vote.must_leave or not self._preemption.is_time_to_leave:
                self._vote.set_verdict(attempt, self._vote.must_leave, now_s)
            elif all_held:
                self._vote.set_verdict(attempt, all_staged, now_s)
                if not all_staged:
                    self._abandon(attempt, "not every rank had staged it", now_s)

    def withdraw(self, now_s: float, which: Callable[[SaveAttempt], bool]) -> bool:
        """Withdraws announced appointments that no rank has staged, so nothing is lost. Returns False if there are
        none."""
        found = [
            each
            for each in self._facts.slots.open_attempts
            if each.is_announced and not each.staged_ranks and which(each)
        ]
        for attempt in found:
            self._drop(attempt, now_s)
        return bool(found)

    def _abandon(self, attempt: SaveAttempt, why: str, now_s: float) -> None:
        message = f"the snapshot at {attempt.version} was given up: {why}"
        is_awaited = bool(attempt.staged_ranks) or attempt.is_explicit
        # Else no rank had reached it: nothing is lost.
        if is_awaited or attempt.miss_reason:
            self._facts.actions.append(Emit("save.abandoned", message, attempt.is_explicit))
        # Else no rank waits for it, except one that is just staging it.
        if is_awaited:
            self._facts.levels.report(attempt.version, "local", False, why)
        if attempt.is_explicit:
            self._facts.last_error = message
        self._drop(attempt, now_s)

    def _drop(self, attempt: SaveAttempt, now_s: float) -> None:
        self._clear_control_word(attempt)
        self._abandoned.append(attempt.number)
        if attempt.is_verdict_pending:
            self._vote.set_verdict(attempt, self._vote.must_leave, now_s)
        self._clock.record_drop(attempt)
        self._allocator.free(attempt)

    def _clear_control_word(self, attempt: SaveAttempt) -> None:
        if attempt.is_announced:
            attempt.is_announced = False
            self._facts.actions.append(SetWord(attempt.slot, None))

    def check(self) -> None:
        """Asserts the invariants of attempts between two decisions."""
        announced = [attempt.version for attempt in self._facts.slots.attempts() if attempt.is_announced]
        assert len(announced) <= 1, f"{announced} are appointed at once"
        for attempt in self._facts.slots.attempts():
            assert attempt.number not in self._abandoned, f"{attempt.version} was abandoned, and lies in a slot"
            is_whole = len(attempt.staged_ranks) == self._facts.world
            assert attempt.state is not SlotState.GRANTED or not is_whole, f"{attempt.version} is not assembled"
