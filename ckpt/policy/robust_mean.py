"""What something usually takes, from few measurements of which some are wrong.

A trimmed mean over a short window. A plain mean follows the one stall in a hundred that came from elsewhere. A median
jumps from one to the other where there are two kinds of stalls (copied late, copied at the boundary), while the cost
lies in between. Dropping an eighth at either end ignores what is rare and weighs what is not; and a window forgets by
itself what a state was like before it grew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from ckpt.policy.interval import not_negative

WINDOW = 16  # half of it outvotes what was before: at a commit every ten minutes, within 80 minutes
LONG = 64  # errors of half the size, and an error that is known better itself


@dataclass(frozen=True)  # without slots, for what is cached
class RobustMean:
    """Measurements of one kind, each 0 or more. `values`: the newest 64, oldest first. `seen`: how many there ever
    were. `window`: of how many of the newest the figures below are. Errors: UsageError."""

    values: tuple[float, ...] = ()
    seen: int = 0
    window: int = WINDOW

    def observed(self, value: float) -> RobustMean:
        """After one measurement more."""
        not_negative("value", value)
        return RobustMean((*self.values, float(value))[-LONG:], self.seen + 1, self.window)

    @property
    def recent(self) -> tuple[float, ...]:
        """The values in the window."""
        return self.values[-self.window :]

    @cached_property
    def _ordered(self) -> list[float]:
        return sorted(self.recent)

    @cached_property
    def mean(self) -> float | None:
        """Of the middle three quarters, of three or more values at least one at either end left out; None: nothing
        was measured."""
        n = len(self._ordered)
        if not n:
            return None
        cut = max(1, n // 8) if n >= 3 else 0
        kept = self._ordered[cut : n - cut]
        return min(max(math.fsum(each / len(kept) for each in kept), kept[0]), kept[-1])  # rounding stays within

    @cached_property
    def error(self) -> float:
        """The standard deviation of `mean`: that of the values with the outer eighths pulled in, of four or more at
        least one at either end, over (1 - 2 x 1/8) sqrt(n) (Tukey and McLaughlin 1963). A single value may be wrong by
        all of it."""
        recent = self.recent
        n = len(recent)
        if n < 2:
            return math.fsum(recent)
        cut = max(1, n // 8) if n >= 4 else 0
        low, high = self._ordered[cut], self._ordered[-1 - cut]
        pulled = [min(max(each, low), high) for each in recent]
        middle = math.fsum(each / n for each in pulled)
        spread = math.hypot(*(each - middle for each in pulled)) / math.sqrt(n - 1)
        return spread / ((1 - 2 * cut / n) * math.sqrt(n))

    @property
    def high(self) -> float:
        """A value that seven of eight are not above: what a promise is held against. 0 where there is none."""
        return self._ordered[-1 - len(self._ordered) // 8] if self._ordered else 0.0

    @property
    def high_error(self) -> float:
        """The standard deviation of `high`, as where values are normal: sqrt(p (1 - p)) / density(p) is 1.6 for
        p = 7/8, that of the mean 1 (Cramer 1946, section 28.5)."""
        return 1.6 * self.error
