"""The timing of one job: how long steps take, how long the present one has lasted, and how long a save takes. Pure.

No other module measures steps. All seconds are on the clock of `Scheduler.decide`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.agent.state.arenas import Arenas
from ckpt.agent.state.slots import JobSlots, SaveAttempt, SlotState
from ckpt.ipc.control_page import SUB_MAX
from ckpt.policy.save_options import STEPS_APART, exit_lead_s
from ckpt.types import Version

STEP_S = 1.0  # assumed step time before one was measured
MEASURE_S_MIN = 1.0  # the step time is measured over at least so long
# A step that has taken so many times the usual time may take any time (it contains an evaluation, say).
LONG_FACTOR = 3
LONG_S_MIN = 0.01  # a shorter step is never long
# Cap on the doublings of LONG: a step of thousands of usual step times is long in any case.
DOUBTS_MAX = 10
REPORT_DELAY_S = 1.0  # delay after which the place of ranks on other nodes is known
LATENCY_S = 0.01  # of an announcement; doubled at each late rank, up to LATENCY_S_MAX
LATENCY_S_MAX = 2.5
# Assumed time for hashing and commit before one was measured: leave early rather than late.
SAVING_S = 60.0


class StepTiming:
    """The step times of one job. All answers are as of the last `record_progress`."""

    def __init__(self) -> None:
        self.step, self.poll = 0, 0  # where the foremost rank is
        self.entered_s = -math.inf  # when the first rank entered that step
        # Whether a rank published `entered_s`. Else it is the time at which this agent saw the step.
        self.is_entry_published = False
        self.unpollable_step = 0  # the step in whose polls no snapshot can be taken
        # A step with an optimizer update, and the steps from one update to the next. 0: unknown, or each step.
        self.update_cycle = (0, 0)
        self.measured_step_s: float | None = None  # recent step time
        self.polls_per_s = 0.0  # of the foremost rank, in the present step
        self._poll_origin = (0.0, 0)  # (time, poll) from which polls are counted
        # The number of steps in which appointments at polls failed, less successes since; and the last such step.
        self._failed_poll_steps, self._last_failed_step = 0, 0
        self._step_polls = 0  # polls of all ranks in the present step, without saves
        self._step_elapsed_s = 0.0  # duration of the present step so far
        self._measure_origin: tuple[float, int] | None = None  # (time, step) from which the step time is measured
        self._was_long = False

    def record_progress(
        self,
        now_s: float,
        steps: Sequence[int],
        polls: Sequence[int],
        since_s: Sequence[float | None],
        saved: Version | None,
    ) -> None:
        """Records where the ranks are; see `Scheduler.decide` for the parameters. `saved`: the newest save of all
        ranks; the ranks count it among their polls."""
        step, last = max(steps, default=0), min(steps, default=0)
        poll = max((n for at, n in zip(steps, polls, strict=True) if at == step), default=0) if any(polls) else 0
        if step != self.step:
            self.entered_s, self._poll_origin = now_s, (now_s, poll)
        self.step, self.poll = step, poll
        shown = [s for at, s in zip(steps, since_s, strict=False) if at == step and s is not None and s <= now_s]
        self.is_entry_published = bool(shown)
        self.entered_s = min(shown, default=self.entered_s)
        saves = saved.sub if saved is not None and saved.step == step - 1 else 0
        at_once = step == last and step != self.unpollable_step
        self._step_polls = max(0, min(polls, default=0) - saves) if at_once else 0
        self._step_elapsed_s = now_s - self.entered_s if step else 0.0
        from_s, before = self._poll_origin
        # The difference may be negative: the rank that was foremost may be lost.
        self.polls_per_s = max(0, poll - before) / max(now_s - from_s, MEASURE_S_MIN)
        self._measure(step)

    def record_missed_poll(self, step: int) -> None:
        """An appointment at a poll of that step failed; the step ended before that poll, say."""
        self._failed_poll_steps = min(self._failed_poll_steps + (step != self._last_failed_step), DOUBTS_MAX)
        self._last_failed_step = step

    def next_update_version(self, version: Version) -> Version:
        """That version, or the next one whose step has an optimizer update if ranks can save only there."""
        last, every = self.update_cycle
        return version if every <= 1 else Version(version.step + (last - version.step) % every)

    def record_completion(self) -> None:
        """A snapshot became complete, at a poll or at the end of a step."""
        self._failed_poll_steps = max(0, self._failed_poll_steps - 1)

    def _measure(self, step: int) -> None:
        if self._measure_origin is None or step < self._measure_origin[1]:
            self._measure_origin = (self.entered_s, step) if step else None
        elif step > self._measure_origin[1] and self.entered_s - self._measure_origin[0] >= MEASURE_S_MIN:
            took_s = (self.entered_s - self._measure_origin[0]) / (step - self._measure_origin[1])
            self._was_long = (
                took_s > LONG_FACTOR * self.usual_step_s and self.measured_step_s is not None and not self._was_long
            )
            # One long measurement is taken for an evaluation, two in a row for slower steps.
            if not self._was_long:
                self.measured_step_s = took_s
            self._measure_origin = (self.entered_s, step)

    @property
    def usual_step_s(self) -> float:
        """The usual time of a step."""
        return STEP_S if self.measured_step_s is None else self.measured_step_s

    @property
    def boundary_interval_s(self) -> float:
        """The expected time from one boundary to the next: the usual step time, or that of the present step if longer.
        If all ranks poll in the present step, its time between two polls counts."""
        return max(self.usual_step_s, self._step_elapsed_s / (1 + self._step_polls))

    @property
    def is_long(self) -> bool:
        """Whether the present step takes clearly longer than usual. The limit doubles with each recent step in whose
        polls appointments failed."""
        return self._step_elapsed_s > max(LONG_FACTOR * self.usual_step_s, LONG_S_MIN) * (1 << self._doubt_count)

    @property
    def all_poll(self) -> bool:
        """Whether all ranks poll in one step, and have not reported that no snapshot can be taken there."""
        return self._step_polls > 0 and self.poll < SUB_MAX // 2

    @property
    def is_poll_next(self) -> bool:
        """Whether the ranks are expected at a poll before they end the step."""
        return self.all_poll and not self._doubt_count

    @property
    def _doubt_count(self) -> int:
        return self._failed_poll_steps if self.step != self._last_failed_step else 0


@dataclass(frozen=True, slots=True)
class SaveTiming:
    """A measured save: `seconds` for a state of `state_bytes` of memory."""

    seconds: float
    state_bytes: int

    def estimate_s(self, count: int) -> float:
        """The expected seconds for `count` bytes. A larger state takes proportionally longer. A smaller one takes as
        long, since part of the time does not depend on the size."""
        return self.seconds * max(1.0, count / self.state_bytes) if self.state_bytes else self.seconds

    @staticmethod
    def from_save(took_s: float, count: int, before: SaveTiming | None) -> SaveTiming:
        """The new estimate after a save of `count` bytes took `took_s`. It rises at once, and falls by half steps."""
        before_s = before.estimate_s(count) if before is not None else 0.0
        return SaveTiming(max(took_s, 0.5 * (took_s + before_s)), count)


@dataclass(eq=False)
class SaveEstimate:
    """The measured saves of one job. `save`: from all staged to committed. `latency_s`: of an announcement."""

    _step_timing: StepTiming
    _arenas: Arenas
    save: SaveTiming | None = None
    latency_s: float = LATENCY_S
    _last_stall_s: float = 0.0

    def record_late(self) -> None:
        """An announcement came too late to a rank."""
        self.latency_s = min(2 * self.latency_s, LATENCY_S_MAX)

    def record_completion(self) -> None:
        """A snapshot became complete."""
        self.latency_s = max(self.latency_s / 2, LATENCY_S)

    def record_progress(self, slots: JobSlots, now_s: float) -> None:
        """Measures the stall and the hashing of attempts that are staged or complete by now."""
        for attempt in slots.attempts(SlotState.STAGED, SlotState.COMPLETE):
            times, is_complete = attempt.times, attempt.state is SlotState.COMPLETE
            if not is_complete and times.staged_s is None:
                times.staged_s = now_s
                self._last_stall_s = max(attempt.staged_ranks.values())
            elif is_complete and times.staged_s is not None and times.hashing_s is None:
                times.hashing_s = now_s - times.staged_s

    def record_commit(self, attempt: SaveAttempt, now_s: float) -> None:
        """The attempt is committed."""
        if attempt.times.commit_began_s is not None:
            took_s = now_s - attempt.times.commit_began_s + (attempt.times.hashing_s or 0.0)
            self.save = SaveTiming.from_save(took_s, attempt.memory_bytes, self.save)

    def inherit(self, former: SaveEstimate) -> None:
        """Takes the save time of the former start on this node, from which this one continues, until its own is
        measured."""
        self.save = self.save or former.save

    @property
    def saving_s(self) -> float | None:
        """Measured seconds from all staged to committed, scaled to the present state; None: not measured."""
        return self.save.estimate_s(sum(self._arenas.needed_bytes)) if self.save is not None else None

    def expected_save_s(self, saving_s: float | None = None) -> float:
        """Expected seconds from an appointment until the snapshot is saved, without a reserve. `saving_s`: from all
        staged to saved; None: to committed."""
        if saving_s is None:
            saving_s = SAVING_S if self.saving_s is None else self.saving_s
        return STEPS_APART * self._step_timing.boundary_interval_s + 2 * self.latency_s + self._last_stall_s + saving_s

    @property
    def lead_time_s(self) -> float:
        """Seconds before a deadline at which the last appointment has to be made."""
        return exit_lead_s(self.expected_save_s())
