"""Has a signal left what is usual for it? One-sided CUSUM on standardised residuals.

With z the residual of a reading in standard deviations of what is usual, S = max(0, S + z - k) grows where readings lie
more than k deviations too high, and S > h is the alarm (Page 1954, "Continuous inspection schemes", Biometrika). How
long it runs to an alarm on average (ARL) where nothing happened, and where the mean has moved, is tabulated
(Montgomery, Introduction to Statistical Quality Control: k = .5, h = 5 gives 930 and 10.4 two-sided, so 465 to a false
one on one side).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

Z_MAX = 8.0  # one wild reading is no alarm where h is more than that
LEARNT_MIN = 30  # readings before it says anything
MEMORY = 2880  # readings that the usual is an average of: what is usual moves along within 4 hours of 5 s
RELEARN = 360  # readings of one alarm, after which what was unusual is the usual: half an hour of 5 s


def grown(total: float, z: float, k: float) -> float:
    """S after a residual of z."""
    return max(0.0, total + z - k)


@dataclass(frozen=True, slots=True)
class Usual:
    """Mean and variance of what was read, in one pass (Welford 1962); beyond MEMORY readings the old ones fade."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def observed(self, value: float) -> Usual:
        n = min(self.count + 1, MEMORY)
        before = value - self.mean
        mean = self.mean + before / n
        return Usual(self.count + 1, mean, self.variance + (before * (value - mean) - self.variance) / n)

    @property
    def deviation(self) -> float:
        return math.sqrt(max(0.0, self.variance))


@dataclass(frozen=True, slots=True)
class Cusum:
    """Of one signal. `k`, `h`: in standard deviations. `least`: what is a deviation at least, in the signal's unit: of
    a counter of errors that was always 0 the deviation is 0. Values; `observed` returns the next one.

    Learning stops while the alarm stands, so that what is unusual does not become the usual by lasting. It ends when S
    has come back to 0, S being capped at 2h; or when it lasted RELEARN readings: then all is learnt anew."""

    k: float = 0.5
    h: float = 5.0
    least: float = 1e-9
    usual: Usual = Usual()
    sum: float = 0.0
    alarm: bool = False
    lasted: int = 0

    def residual(self, value: float) -> float:
        """In deviations of what is usual, cut off at Z_MAX either way; 0 as long as little is learnt."""
        if self.usual.count < LEARNT_MIN:
            return 0.0
        z = (value - self.usual.mean) / max(self.least, self.usual.deviation)
        return max(-Z_MAX, min(Z_MAX, z))

    def observed(self, value: float) -> Cusum:
        if not math.isfinite(value):
            return self
        if self.lasted >= RELEARN:
            return replace(self, usual=Usual().observed(value), sum=0.0, alarm=False, lasted=0)
        total = min(grown(self.sum, self.residual(value), self.k), 2 * self.h)
        alarm = total > 0 if self.alarm else total > self.h
        usual = self.usual if alarm else self.usual.observed(value)
        return replace(self, usual=usual, sum=total, alarm=alarm, lasted=self.lasted + 1 if alarm else 0)
