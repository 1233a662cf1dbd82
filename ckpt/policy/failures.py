"""The failure rate of one class, estimated where the rate may change.

`rates.GammaRate` is right for a constant rate. FailureRate adds two things. Old failures fade: each new one takes a
part of the weight of all earlier ones. A change of the rate (a spot market turns, a bug is fixed, a prior was wrong)
discards the older failures at once. A likelihood ratio test of two rates against one detects the change. It needs no
units and no threshold per class.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

from ckpt.policy.interval import not_negative
from ckpt.policy.rates import GammaRate

DAY_S = 86_400.0
# The weight of an endless series of failures after fading, and how many failures the change test looks at.
MEMORY = 16
# The log likelihood ratio that counts as a change, plus 1 for each failure known before, up to CHANGE_KNOWN. A lower
# bar would often take a cluster of failures for a change.
CHANGE = 6.0
CHANGE_KNOWN = 6.0
# The weight, in failures, below which a prior fades no more, so that it never divides by zero.
PRIOR_MIN = 1e-6
SHORTEST_S = 1.0  # failures closer together give no rate
# Fewer failures show no change: where failures cluster, two soon come at once.
CHANGE_FAILURES = 3


class Failure(enum.Enum):
    """The class of a failure: what was lost, and so what is left to recover from. Only failures that lost work count,
    not a normal end and not a preemption before which everything was saved."""

    PROCESS = "process"  # a trainer died; this host's memory holds its snapshot
    NODE = "node"  # the memory of one host is lost
    PREEMPTION = "preemption"  # the same, because the provider took the host back
    JOB = "job"  # more is lost than memory survives: only the store is left

    @property
    def is_per_node(self) -> bool:
        """Whether exposure is counted in node-seconds."""
        return self in (Failure.NODE, Failure.PREEMPTION)


@dataclass(frozen=True, slots=True)
class FailureRate:
    """The failure rate of one class, per second of its exposure. Errors: UsageError for negative numbers.

    `rate_at_failure`: the estimate up to the newest failure. Its prior is the given one, or what the newest change
    left. `since_failure_s`: exposure since the newest failure. `gaps_s`: the exposure before each of the newest
    failures, oldest first, back to the newest change at most. `total_exposure_s`, `failure_count`: all exposure and
    failures so far; they only grow.
    """

    rate_at_failure: GammaRate
    since_failure_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    total_exposure_s: float = 0.0
    failure_count: int = 0

    @classmethod
    def prior(cls, exposure_s: float) -> FailureRate:
        """The prior that expects one failure per `exposure_s` and is worth one failure."""
        return cls(GammaRate(1.0, exposure_s))

    def with_exposure(self, exposure_s: float) -> FailureRate:
        """The rate after `exposure_s` more seconds without a failure."""
        not_negative("exposure_s", exposure_s)
        return replace(
            self, since_failure_s=self.since_failure_s + exposure_s, total_exposure_s=self.total_exposure_s + exposure_s
        )

    def with_failure(self) -> FailureRate:
        """The rate after a failure now."""
        gaps_s = (*self.gaps_s, self.since_failure_s)[-MEMORY:]
        faded = _fade_rate(self.rate_at_failure).with_observations(1, self.since_failure_s)
        newest = _count_changed(faded, gaps_s)
        if newest:
            gaps_s = gaps_s[-newest:]
            spent_s = math.fsum(gaps_s)
            faded = GammaRate(1.0, spent_s / newest, newest, spent_s)
        return replace(
            self, rate_at_failure=faded, since_failure_s=0.0, gaps_s=gaps_s, failure_count=self.failure_count + 1
        )

    @property
    def current_rate(self) -> GammaRate:
        """The estimate at this moment, which includes the time without a failure since the newest one."""
        return self.rate_at_failure.with_observations(0, self.since_failure_s)


def _fade_rate(known: GammaRate) -> GammaRate:
    """The estimate with less weight, the prior included. The weight of failures is bounded, so they could otherwise
    never outvote the prior."""
    keep = 1 - 1 / MEMORY
    if known.prior_failures * keep >= PRIOR_MIN:
        known = replace(
            known, prior_failures=known.prior_failures * keep, prior_exposure_s=known.prior_exposure_s * keep
        )
    return known.discounted(keep)


def _count_changed(known: GammaRate, gaps_s: tuple[float, ...]) -> int:
    """How many of the newest failures came at a rate of their own; 0 for none.

    The newest m failures came in x seconds of exposure, the earlier r in y. The prior and what has faded are counted in
    r and y as in `known`. The log likelihood ratio of two rates against one is m log(m/x) + r log(r/y) - (m+r)
    log((m+r)/(x+y)).
    """
    found, most = 0, 0.0
    weight, weighed, weighed_s, spent_s = 1.0, 0.0, 0.0, 0.0
    for m, gap_s in enumerate(reversed(gaps_s), 1):
        weighed, weighed_s, spent_s = weighed + weight, weighed_s + weight * gap_s, spent_s + gap_s
        weight *= 1 - 1 / MEMORY
        r, before_s = known.shape - weighed, known.total_s - weighed_s
        if m < CHANGE_FAILURES or r <= 0 or min(before_s / r, spent_s / m) < SHORTEST_S:
            continue
        ratio = _log_rate(m, spent_s) + _log_rate(r, before_s) - _log_rate(m + r, spent_s + before_s)
        beyond = ratio - CHANGE - min(r, CHANGE_KNOWN)
        if beyond > most:
            found, most = m, beyond
    return found


def _log_rate(failures: float, exposure_s: float) -> float:
    return failures * math.log(failures / exposure_s)


# The priors, each worth one failure. Nodes: more than 100 of 124 were replaced in two months of OPT-175B (Zhang et al.
# 2022), and 2048 had 419 failures in 54 days of Llama 3 (Llama team 2024): 70 to 260 days. The prior is more cautious.
# Preemptions get the same prior. The others are guesses of the same caution: a mistake ends a trainer once a day, and
# the whole site fails once a month.
PRIORS = {
    Failure.PROCESS: FailureRate.prior(DAY_S),
    Failure.NODE: FailureRate.prior(60 * DAY_S),
    Failure.PREEMPTION: FailureRate.prior(60 * DAY_S),
    Failure.JOB: FailureRate.prior(30 * DAY_S),
}
