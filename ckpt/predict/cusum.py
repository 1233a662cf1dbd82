"""The change detector of one signal: a one-sided CUSUM on standardised residuals.

With z the residual of a reading, in standard deviations from its mean, S = max(0, S + z - k) grows while readings lie
more than k deviations too high. S > h is the alarm (Page 1954, "Continuous inspection schemes", Biometrika). The
average run length to an alarm (ARL), without and with a shift of the mean, is tabulated (Montgomery, Introduction to
Statistical Quality Control: k = .5, h = 5 gives 930 and 10.4 two-sided, so 465 to a false alarm on one side).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# The cut-off of a residual: one wild reading raises no alarm if h is larger.
Z_MAX = 8.0
LEARNT_MIN = 30  # readings before an alarm is possible
# Readings in the running average: 4 hours of 5 s.
MEMORY = 2880
# Readings of one alarm after which the baseline is learnt anew: half an hour of 5 s.
RELEARN = 360


def next_sum(total: float, z: float, k: float) -> float:
    """S after a residual of z."""
    return max(0.0, total + z - k)


@dataclass(frozen=True, slots=True)
class Usual:
    """The baseline: mean and variance of the readings, in one pass (Welford 1962). Beyond MEMORY readings the old ones
    fade."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def with_value(self, value: float) -> Usual:
        n = min(self.count + 1, MEMORY)
        before = value - self.mean
        mean = self.mean + before / n
        return Usual(self.count + 1, mean, self.variance + (before * (value - mean) - self.variance) / n)

    @property
    def deviation(self) -> float:
        return math.sqrt(max(0.0, self.variance))


@dataclass(frozen=True, slots=True)
class Cusum:
    """The detector's state, as a value; `observed` returns the next one.

    `k`, `h`: in standard deviations. `min_deviation`: the least deviation, in the signal's unit, since an error counter
    that was always 0 has a deviation of 0. `alarm_readings`: readings since the alarm began.

    The baseline is frozen while the alarm stands, so that an unusual level does not become usual by lasting. The alarm
    ends when S is back at 0 (S is capped at 2h), or after RELEARN readings: then the baseline is learnt anew.
    """

    k: float = 0.5
    h: float = 5.0
    min_deviation: float = 1e-9
    baseline: Usual = Usual()
    cumulative_sum: float = 0.0
    is_alarm: bool = False
    alarm_readings: int = 0

    def residual(self, value: float) -> float:
        """The residual in deviations of the baseline, cut off at Z_MAX either way; 0 before LEARNT_MIN readings."""
        if self.baseline.count < LEARNT_MIN:
            return 0.0
        z = (value - self.baseline.mean) / max(self.min_deviation, self.baseline.deviation)
        return max(-Z_MAX, min(Z_MAX, z))

    def with_reading(self, value: float) -> Cusum:
        """The state after one more reading. A reading that is not finite changes nothing."""
        if not math.isfinite(value):
            return self
        if self.alarm_readings >= RELEARN:
            return replace(
                self, baseline=Usual().with_value(value), cumulative_sum=0.0, is_alarm=False, alarm_readings=0
            )
        total = min(next_sum(self.cumulative_sum, self.residual(value), self.k), 2 * self.h)
        alarm = total > 0 if self.is_alarm else total > self.h
        usual = self.baseline if alarm else self.baseline.with_value(value)
        return replace(
            self,
            baseline=usual,
            cumulative_sum=total,
            is_alarm=alarm,
            alarm_readings=self.alarm_readings + 1 if alarm else 0,
        )
