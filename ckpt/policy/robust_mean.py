"""A robust mean: the usual value of a few measurements of which some are outliers.

It is a trimmed mean over a short window. A plain mean would follow the one stall in a hundred that has an outside
cause. A median would jump between two kinds of stalls (deferred, copied at the boundary), while the cost lies in
between. Dropping an eighth at either end ignores rare values and weighs the others. The window forgets the costs of a
state that has grown since.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from ckpt.policy.interval import not_negative

# Half a window outvotes the values before: within 80 minutes at a commit every ten minutes.
WINDOW = 16
LONG = 64  # half the error, and a better estimate of the error
# Standard deviations for a value that is checked without end: three occur by chance after a hundred checks.
CHECK_DEVIATIONS = 4.0


@dataclass(frozen=True)  # no slots, because of the cached properties
class RobustMean:
    """Measurements of one kind, each 0 or more. `values`: the newest 64, oldest first. `count`: how many there ever
    were. `window`: how many of the newest the statistics use. Errors: UsageError."""

    values: tuple[float, ...] = ()
    count: int = 0
    window: int = WINDOW

    def with_value(self, value: float) -> RobustMean:
        """The value after one more measurement."""
        not_negative("value", value)
        return RobustMean((*self.values, float(value))[-LONG:], self.count + 1, self.window)

    @property
    def recent(self) -> tuple[float, ...]:
        """The values in the window."""
        return self.values[-self.window :]

    @cached_property
    def _ordered(self) -> list[float]:
        return sorted(self.recent)

    @cached_property
    def mean(self) -> float | None:
        """The mean of the middle three quarters; None without measurements. Of three or more values at least one is
        left out at either end."""
        n = len(self._ordered)
        if not n:
            return None
        cut = max(1, n // 8) if n >= 3 else 0
        kept = self._ordered[cut : n - cut]
        # Rounding must not leave the range of the values.
        return min(max(math.fsum(each / len(kept) for each in kept), kept[0]), kept[-1])

    @cached_property
    def error(self) -> float:
        """The standard deviation of `mean` (Tukey and McLaughlin 1963): that of the values with the outer eighths
        pulled in, over (1 - 2 x 1/8) sqrt(n). Of four or more values at least one is pulled in at either end. A single
        value may be wrong by all of it."""
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
    def upper_value(self) -> float:
        """A value that seven of eight measurements do not exceed, used to check promises; 0 without measurements."""
        return self._ordered[-1 - len(self._ordered) // 8] if self._ordered else 0.0

    @property
    def upper_error(self) -> float:
        """The standard deviation of `high` for normal values: sqrt(p (1 - p)) / density(p) is 1.6 for p = 7/8, that of
        the mean 1 (Cramer 1946, section 28.5)."""
        return 1.6 * self.error


def stable_mean(measured: RobustMean) -> RobustMean:
    """The long-run measurements, unless the newest ones clearly differ."""
    long_run = replace(measured, window=LONG)
    off = abs((measured.mean or 0.0) - (long_run.mean or 0.0))
    return long_run if off <= CHECK_DEVIATIONS * math.hypot(measured.error, long_run.error) else measured
