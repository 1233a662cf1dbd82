"""What something usually takes, from few measurements of which some are wrong.

A trimmed mean over a short window. A plain mean follows the one stall in a hundred that came from elsewhere. A median
jumps from one to the other where there are two kinds of stalls (copied late, copied at the boundary), while the cost
lies in between. Dropping an eighth at either end ignores what is rare and weighs what is not; and a window forgets by
itself what a state was like before it grew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckpt.policy.interval import not_negative

WINDOW = 16  # half of it outvotes what was before: at a commit every ten minutes, within 80 minutes


@dataclass(frozen=True, slots=True)
class Typical:
    """Measurements of one kind, each 0 or more. `values`: the newest 16, oldest first. `seen`: how many there ever
    were. Errors: UsageError."""

    values: tuple[float, ...] = ()
    seen: int = 0

    def observed(self, value: float) -> Typical:
        """After one measurement more."""
        not_negative("value", value)
        return Typical((*self.values, float(value))[-WINDOW:], self.seen + 1)

    @property
    def mean(self) -> float | None:
        """Of the middle three quarters, of three or more values at least one at either end left out; None: nothing
        was measured."""
        n = len(self.values)
        if not n:
            return None
        cut = max(1, n // 8) if n >= 3 else 0
        kept = sorted(self.values)[cut : n - cut]
        return min(max(math.fsum(each / len(kept) for each in kept), kept[0]), kept[-1])  # rounding stays within

    @property
    def error(self) -> float:
        """The standard deviation of `mean`: that of the values with the outer eighths pulled in, over (1 - 2 x 1/8)
        sqrt(n) (Tukey and McLaughlin 1963). A single value may be wrong by all of it."""
        n = len(self.values)
        if n < 2:
            return math.fsum(self.values)
        cut = n // 8
        low, high = self.low, self.high
        pulled = [min(max(each, low), high) for each in self.values]
        middle = math.fsum(each / n for each in pulled)
        spread = math.hypot(*(each - middle for each in pulled)) / math.sqrt(n - 1)
        return spread / ((1 - 2 * cut / n) * math.sqrt(n))

    @property
    def low(self) -> float:
        """A value that seven of eight are not below; 0 where there is none."""
        return sorted(self.values)[len(self.values) // 8] if self.values else 0.0

    @property
    def high(self) -> float:
        """A value that seven of eight are not above: what a promise is held against. 0 where there is none."""
        return sorted(self.values)[-1 - len(self.values) // 8] if self.values else 0.0
