"""The step timing of one job: how long a step takes, and how long the present one has lasted. Pure.

No other module measures steps. All seconds are on the clock of `Scheduler.decide`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckpt.ipc.control_page import SUB_MAX
from ckpt.types import Tick

STEP_S = 1.0  # assumed step time before one was measured
PACE_S = 1.0  # the step time is measured over at least so long
# A step that has taken so many times the usual time may take any time (it contains an evaluation, say).
LONG = 3
LONG_S = 0.01  # a shorter step is never long
# Cap on the doublings of LONG: a step of thousands of usual step times is long in any case.
DOUBTS_MAX = 10
TOLD_S = 1.0  # delay after which the place of ranks on other nodes is known


class StepTiming:
    """The step times of one job. All answers are as of the last `see`."""

    def __init__(self) -> None:
        self.step, self.poll = 0, 0  # where the foremost rank is
        self.entered_s = -math.inf  # when the first rank entered that step
        # Whether a rank published `entered_s`. Else it is the time at which this agent saw the step.
        self.is_shown = False
        self.amid_step = 0  # the step in whose polls no snapshot can be taken
        # A step with an optimizer update, and the steps from one update to the next. 0: unknown, or each step.
        self.updates = (0, 0)
        self.measured_s: float | None = None  # recent step time
        self.polls_per_s = 0.0  # of the foremost rank, in the present step
        self._polls_from = (0.0, 0)  # (time, poll) from which polls are counted
        # The number of steps in which appointments at polls failed, less successes since; and the last such step.
        self._in_vain, self._vain_step = 0, 0
        self._polled = 0  # polls of all ranks in the present step, without saves
        self._present_s = 0.0  # duration of the present step so far
        self._from: tuple[float, int] | None = None  # (time, step) from which the step time is measured
        self._was_long = False

    def see(
        self,
        now_s: float,
        steps: Sequence[int],
        polls: Sequence[int],
        since_s: Sequence[float | None],
        saved: Tick | None,
    ) -> None:
        """Records where the ranks are; see `Scheduler.decide` for the parameters. `saved`: the newest save of all
        ranks; the ranks count it among their polls."""
        step, poll = max(zip(steps, polls or [0] * len(steps), strict=True), default=(0, 0))
        if step != self.step:
            self.entered_s, self._polls_from = now_s, (now_s, poll)
        self.step, self.poll = step, poll
        shown = [s for at, s in zip(steps, since_s, strict=False) if at == step and s is not None and s <= now_s]
        self.is_shown = bool(shown)
        self.entered_s = min(shown, default=self.entered_s)
        saves = saved.sub if saved is not None and saved.step == step - 1 else 0
        at_once = len(set(steps)) == 1 and step != self.amid_step
        self._polled = max(0, min(polls, default=0) - saves) if at_once else 0
        self._present_s = now_s - self.entered_s if step else 0.0
        from_s, before = self._polls_from
        # The difference may be negative: the rank that was foremost may be lost.
        self.polls_per_s = max(0, poll - before) / max(now_s - from_s, PACE_S)
        self._measure(step)

    def missed_poll(self, step: int) -> None:
        """An appointment at a poll of that step failed; the step ended before that poll, say."""
        self._in_vain, self._vain_step = min(self._in_vain + (step != self._vain_step), DOUBTS_MAX), step

    def with_update(self, tick: Tick) -> Tick:
        """That version, or the next one whose step has an optimizer update if ranks can save only there."""
        last, every = self.updates
        return tick if every <= 1 else Tick(tick.step + (last - tick.step) % every)

    def completed(self) -> None:
        """A snapshot became complete, at a poll or at the end of a step."""
        self._in_vain = max(0, self._in_vain - 1)

    def _measure(self, step: int) -> None:
        if self._from is None or step < self._from[1]:
            self._from = (self.entered_s, step) if step else None
        elif step > self._from[1] and self.entered_s - self._from[0] >= PACE_S:
            took_s = (self.entered_s - self._from[0]) / (step - self._from[1])
            self._was_long = took_s > LONG * self.usual_s and self.measured_s is not None and not self._was_long
            # One long measurement is taken for an evaluation, two in a row for slower steps.
            if not self._was_long:
                self.measured_s = took_s
            self._from = (self.entered_s, step)

    @property
    def usual_s(self) -> float:
        """The usual time of a step."""
        return STEP_S if self.measured_s is None else self.measured_s

    @property
    def step_s(self) -> float:
        """The expected time from one boundary to the next: the usual step time, or that of the present step if longer.
        If all ranks poll in the present step, its time between two polls counts."""
        return max(self.usual_s, self._present_s / (1 + self._polled))

    @property
    def is_long(self) -> bool:
        """Whether the present step takes clearly longer than usual. The limit doubles with each recent step in whose
        polls appointments failed."""
        return self._present_s > max(LONG * self.usual_s, LONG_S) * (1 << self._doubts)

    @property
    def all_poll(self) -> bool:
        """Whether all ranks poll in one step, and have not reported that no snapshot can be taken there."""
        return self._polled > 0 and self.poll < SUB_MAX // 2

    @property
    def is_poll_next(self) -> bool:
        """Whether the ranks are expected at a poll before they end the step."""
        return self.all_poll and not self._doubts

    @property
    def _doubts(self) -> int:
        return self._in_vain if self.step != self._vain_step else 0
