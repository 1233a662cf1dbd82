"""What a job knows of the failures of one class, where their rate may change.

`rates.GammaRate` is right where a rate stays what it is. Here two things are added. What is old fades: each failure
takes a part of the weight of all before it. And what has become untrue is forgotten at once: a spot market turns, a
bug is fixed, a prior was far off. Whether the newest failures came at another rate than all before them, the prior
included, is asked with the likelihood ratio of one rate against two, which knows no units and needs no threshold per
class.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

from ckpt.policy.interval import not_negative
from ckpt.policy.rates import GammaRate

DAY_S = 86_400.0
MEMORY = 16  # failures: what fading leaves of an endless row of them, and how many a change is looked for among
CHANGE = 6.0  # log likelihood ratio that is taken for a change of what little was known before ...
CHANGE_KNOWN = 6.0  # ... and 1 more for each failure that was, up to so many: else clusters are often taken for one
PRIOR_MIN = 1e-6  # failures that a prior is worth in the end: nothing, and no division by it
SHORTEST_S = 1.0  # what comes closer together is no rate of failures
CHANGE_FAILURES = 3  # fewer prove nothing: where failures cluster, two come at once soon enough


class Failure(enum.Enum):
    """What was lost, which says what is left to recover from. Only what threw work back counts: neither a normal end
    nor a preemption before which everything was saved."""

    PROCESS = "process"  # a trainer died, and this host's memory holds its snapshot
    NODE = "node"  # one host's memory is gone
    PREEMPTION = "preemption"  # the same, taken away by who lent it
    JOB = "job"  # more is gone than memory survives: only the store is left

    @property
    def per_node(self) -> bool:
        """Whether exposure is counted in node-seconds."""
        return self in (Failure.NODE, Failure.PREEMPTION)


@dataclass(frozen=True, slots=True)
class FailureRate:
    """The rate of failures of one class, per second of its exposure. Errors: UsageError.

    `settled`: what the failures so far say, exposure up to the newest of them; its prior is the one given, or what the
    newest change left. `open_s`: exposure since the newest failure. `gaps_s`: the exposure before each of the newest
    failures, oldest first, no further back than the newest change. `ever_s`, `seen`: all exposure and failures ever,
    which only grow.
    """

    settled: GammaRate
    open_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    ever_s: float = 0.0
    seen: int = 0

    @classmethod
    def prior(cls, exposure_s: float) -> FailureRate:
        """One failure in `exposure_s` is expected, and little is known."""
        return cls(GammaRate(1.0, exposure_s))

    def ran(self, exposure_s: float) -> FailureRate:
        """After so much exposure more without a failure."""
        not_negative("exposure_s", exposure_s)
        return replace(self, open_s=self.open_s + exposure_s, ever_s=self.ever_s + exposure_s)

    def failed(self) -> FailureRate:
        """After a failure, now."""
        gaps_s = (*self.gaps_s, self.open_s)[-MEMORY:]
        faded = _faded(self.settled).observed(1, self.open_s)
        newest = _change(faded, gaps_s)
        if newest:
            gaps_s = gaps_s[-newest:]
            spent_s = math.fsum(gaps_s)
            faded = GammaRate(1.0, spent_s / newest, newest, spent_s)
        return replace(self, settled=faded, open_s=0.0, gaps_s=gaps_s, seen=self.seen + 1)

    @property
    def now(self) -> GammaRate:
        """What is known at this moment: that nothing has failed since the newest failure counts as well."""
        return self.settled.observed(0, self.open_s)


def _faded(known: GammaRate) -> GammaRate:
    """With less of everything, the prior included: what was seen is bounded, and would never outvote it else."""
    keep = 1 - 1 / MEMORY
    if known.prior_failures * keep >= PRIOR_MIN:
        known = replace(
            known, prior_failures=known.prior_failures * keep, prior_exposure_s=known.prior_exposure_s * keep
        )
    return known.discounted(keep)


def _change(known: GammaRate, gaps_s: tuple[float, ...]) -> int:
    """How many of the newest failures came at a rate of their own; 0: none.

    For m failures in x seconds of exposure and r in y before them, the prior and what has faded counted in y and r as
    they count in `known`, the logarithm of the likelihood ratio of two rates against one is
    m log(m/x) + r log(r/y) - (m+r) log((m+r)/(x+y)).
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


# Before anything is seen, each worth one failure. Nodes: more than 100 of 124 were replaced in two months of OPT-175B
# (Zhang et al. 2022), and 2048 had 419 failures in 54 days of Llama 3 (Llama team 2024): 70 to 260 days; here the
# cautious end. That a lender takes one back is as rare until it happens. The others are guesses of the same caution:
# somebody's mistake ends a trainer once a day, and the whole site fails once a month.
PRIORS = {
    Failure.PROCESS: FailureRate.prior(DAY_S),
    Failure.NODE: FailureRate.prior(60 * DAY_S),
    Failure.PREEMPTION: FailureRate.prior(60 * DAY_S),
    Failure.JOB: FailureRate.prior(30 * DAY_S),
}
