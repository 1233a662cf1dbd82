"""What a step takes, and how long the ranks are in the one that they are in: known here, and nowhere else. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckpt.ipc.control_page import SUB_MAX
from ckpt.types import Tick

STEP_S = 1.0  # a step, before one was measured
PACE_S = 1.0  # a pace is measured over at least so long
LONG = 3  # a step that has taken so many times as long as usual may take any time: an evaluation is in it
LONG_S = 0.01  # and no step is long that takes less
DOUBTS_MAX = 10  # times that it is doubted: a step that takes a thousand times as long is one of which nothing is known
TOLD_S = 1.0  # where ranks of other nodes are is known so much later


class StepTiming:
    """Of one job. Whatever is asked is as it was when the ranks were looked at last: `see`."""

    def __init__(self) -> None:
        self.step, self.poll = 0, 0  # that the foremost rank has come to
        self.entered_s = -math.inf  # when the first rank came to that step
        self.is_shown = False  # whether a rank shows when that was; else it is when it was seen here
        self.amid_step = 0  # in that one they poll where nothing can be taken
        self.updates = (0, 0)  # a step with an optimizer's update, and from one to the next; 0: unknown, or each
        self.measured_s: float | None = None  # what a step took of late
        self.polls_per_s = 0.0  # of the foremost rank, in that step
        self._polls_from = (0.0, 0)  # they are counted from there on
        self._in_vain, self._vain_step = 0, 0  # in so many steps in a row, and in that one last, polls came to nothing
        self._polled = 0  # how often all ranks have in that step, since the last save
        self._present_s = 0.0
        self._from: tuple[float, int] | None = None  # the pace is measured from there on
        self._was_long = False

    def see(
        self,
        now_s: float,
        steps: Sequence[int],
        polls: Sequence[int],
        since_s: Sequence[float | None],
        saved: Tick | None,
    ) -> None:
        """As `Group.decide` is told. `saved`: the newest save that all ranks asked for, which counts with the polls."""
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
        self.polls_per_s = max(0, poll - before) / max(now_s - from_s, PACE_S)  # the rank that was foremost may be lost
        self._measure(step)

    def missed_poll(self, step: int) -> None:
        """What was appointed at a poll of that step came to nothing: it ended sooner, say."""
        self._in_vain, self._vain_step = min(self._in_vain + (step != self._vain_step), DOUBTS_MAX), step

    def with_update(self, tick: Tick) -> Tick:
        """That end of a step, or the next one that has an update, where ranks said that others cannot be saved."""
        last, every = self.updates
        return tick if every <= 1 else Tick(tick.step + (last - tick.step) % every)

    def completed(self) -> None:
        """What was appointed became complete, wherever that was."""
        self._in_vain = max(0, self._in_vain - 1)

    def _measure(self, step: int) -> None:
        if self._from is None or step < self._from[1]:
            self._from = (self.entered_s, step) if step else None
        elif step > self._from[1] and self.entered_s - self._from[0] >= PACE_S:
            took_s = (self.entered_s - self._from[0]) / (step - self._from[1])
            self._was_long = took_s > LONG * self.usual_s and self.measured_s is not None and not self._was_long
            if not self._was_long:  # once it was an evaluation, twice they are slower
                self.measured_s = took_s
            self._from = (self.entered_s, step)

    @property
    def usual_s(self) -> float:
        return STEP_S if self.measured_s is None else self.measured_s

    @property
    def step_s(self) -> float:
        """From one boundary to the next it takes about so long: the present step counts where it takes longer than
        usual, and where all ranks poll in it what lies between two polls does."""
        return max(self.usual_s, self._present_s / (1 + self._polled))

    @property
    def is_long(self) -> bool:
        """Whether the step that the ranks are in takes clearly longer than usual; than such took in whose polls nothing
        could be had of late."""
        return self._present_s > max(LONG * self.usual_s, LONG_S) * (1 << self._doubts)

    @property
    def all_poll(self) -> bool:
        """Whether all ranks poll within one step, and something can be taken there as far as they said."""
        return self._polled > 0 and self.poll < SUB_MAX // 2

    @property
    def is_poll_next(self) -> bool:
        """Whether they come to a poll sooner than to the end of a step, as far as is known."""
        return self.all_poll and not self._doubts

    @property
    def _doubts(self) -> int:
        return self._in_vain if self.step != self._vain_step else 0
