"""What a job knows of its failure rates, and when that is enough to change an interval.

A rate is a Gamma distribution (shape in failures, the other parameter in seconds of exposure): the conjugate prior of
Poisson counts, so that what was seen is two numbers, which outlive the job and add up. There is one per class of
failures. What counts as exposure is the caller's: node-seconds for losses of single nodes; and a loss of many nodes
at once is one failure of its class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ckpt.errors import UsageError
from ckpt.policy.interval import not_negative, positive, within

SHAPE_MAX = 1e5  # above it a quantile is by Wilson and Hilferty 1931, which is as exact there, and no longer sum


@dataclass(frozen=True, slots=True)
class GammaRate:
    """A failure rate per second of exposure: Gamma(a + n, b + t) after n failures in t seconds, for a prior of a
    failures in b seconds (both more than 0; Gelman et al., Bayesian Data Analysis, 3rd ed. 2013, section 2.6).
    n may be a fraction, since what is old is discounted. Errors: UsageError.
    """

    prior_failures: float
    prior_exposure_s: float
    failures: float = 0.0
    exposure_s: float = 0.0

    def __post_init__(self) -> None:
        positive("prior_failures", self.prior_failures)
        positive("prior_exposure_s", self.prior_exposure_s)
        not_negative("failures", self.failures)
        not_negative("exposure_s", self.exposure_s)

    def observed(self, failures: float, exposure_s: float) -> GammaRate:
        """After so many failures more, in so many seconds of exposure more."""
        not_negative("failures", failures)
        not_negative("exposure_s", exposure_s)
        return replace(self, failures=self.failures + failures, exposure_s=self.exposure_s + exposure_s)

    def discounted(self, keep: float) -> GammaRate:
        """With the part `keep` (0 to 1) of what was seen: failures and exposure alike, so that the rate stays nearly
        as it is and becomes less sure. The prior stays."""
        within("keep", keep, 0, 1)
        return replace(self, failures=self.failures * keep, exposure_s=self.exposure_s * keep)

    @property
    def shape(self) -> float:
        """a + n: how many failures the knowledge is worth."""
        return self.prior_failures + self.failures

    @property
    def total_s(self) -> float:
        """b + t, seconds."""
        return self.prior_exposure_s + self.exposure_s

    @property
    def mean(self) -> float:
        """Failures per second: what the formulas for intervals are given."""
        return self.shape / self.total_s

    @property
    def deviation(self) -> float:
        """The standard deviation of the rate, per second."""
        return math.sqrt(self.shape) / self.total_s

    @property
    def mtbf_s(self) -> float:
        """1 / mean."""
        return self.total_s / self.shape

    def survival(self, exposure_s: float) -> float:
        """The probability of no failure in the next `exposure_s`: ((b + t) / (b + t + x))^(a + n), the mean of
        e^(-rate x) over the posterior (Gelman et al. 2013, section 2.6: the negative binomial at 0)."""
        return math.exp(-self.shape * math.log1p(not_negative("exposure_s", exposure_s) / self.total_s))

    def quantile(self, p: float) -> float:
        """The rate per second below which the true one lies with probability p, 0 < p < 1; to about 1e-8 of it."""
        if not 0 < p < 1:
            raise UsageError(f"p={p}: more than 0, less than 1")
        return _gamma_quantile(self.shape, p) / self.total_s


def _gamma_quantile(a: float, p: float) -> float:
    """x with P(a, x) = p, by bisection of log x, from bounds that enclose it."""
    if a > SHAPE_MAX:
        from statistics import NormalDist  # loads much, for a case that is rare

        return a * float(1 - 1 / (9 * a) + NormalDist().inv_cdf(p) / (3 * math.sqrt(a))) ** 3
    # P(a, x) <= x^a / Gamma(a + 1), which is also what it tends to where x is small, however small.
    low = (math.log(p) + math.lgamma(a + 1)) / a
    high = max(low, math.log(a)) + 1
    while _gamma_cdf(a, high) < p:
        high += 1
    while high - low > 1e-13 * max(1.0, abs(low)):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if _gamma_cdf(a, middle) < p else (low, middle)
    return math.exp(low)


def _gamma_cdf(a: float, log_x: float) -> float:
    """The regularised lower incomplete gamma function P(a, x): its series below a + 1 (DLMF 8.11.4), above it one
    minus the continued fraction of Q (DLMF 8.9.2), summed up as Lentz 1976 does."""
    x = math.exp(log_x)
    front = math.exp(a * log_x - x - math.lgamma(a + 1))
    if x < a + 1:
        total = term = 1.0
        n = a
        while term > total * 1e-17:
            n += 1
            term *= x / n
            total += term
        return min(1.0, front * total)
    tiny = 1e-300
    b = x + 1 - a
    c, d = 1 / tiny, 1 / b
    fraction = d
    for i in range(1, 100_000):
        numerator = -i * (i - a)
        b += 2
        d = 1 / (numerator * d + b or tiny)
        c = b + numerator / c or tiny
        fraction *= d * c
        if abs(d * c - 1) < 1e-16:
            break
    return 1 - front * a * fraction


@dataclass(frozen=True, slots=True)
class Change:
    """What `reconsider` says, and why: overheads are wall time / useful time, to first order."""

    interval_s: float  # the one to use from now on
    changed: bool
    gain: float  # the overhead that the proposed interval saves, by the estimates
    noise: float  # what that gain may be wrong by


def reconsider(
    current_s: float,
    proposed_s: float,
    stall_s: float,
    rate: float,
    stall_error_s: float = 0.0,
    rate_error: float = 0.0,
    deviations: float = 1.0,
) -> Change:
    """Whether to go from one interval to another: only where the gain is more than the noise of the estimates.

    `rate` (per second) is that of the failures whose lost work this interval bounds, `rate_error` its standard
    deviation (of a sum of rates, the root of the sum of the squares), `stall_error_s` that of the stall. With the
    overhead C/tau + rate tau/2 (Young 1974) the gain is linear in both estimates, C (1/tau0 - 1/tau1) +
    rate (tau0 - tau1)/2, so that its standard deviation follows at once; the noise is `deviations` of them.

    Where some estimates ask for a change, the same ask for none back. With an exact stall, one goes to Young's
    interval for the estimates only where it differs from the current one by more than the part 1/sqrt(n) of that,
    n = (rate / rate_error)^2 being what GammaRate calls shape: with few failures seldom, later for ever less.
    Errors: UsageError.
    """
    positive("current_s", current_s)
    positive("proposed_s", proposed_s)
    not_negative("stall_s", stall_s)
    not_negative("rate", rate)
    not_negative("stall_error_s", stall_error_s)
    not_negative("rate_error", rate_error)
    not_negative("deviations", deviations)
    by_stall = 1 / current_s - 1 / proposed_s
    by_rate = (current_s - proposed_s) / 2
    gain = stall_s * by_stall + rate * by_rate
    noise = deviations * math.hypot(stall_error_s * by_stall, rate_error * by_rate)
    changed = bool(gain > noise)  # also where numbers of numpy came in
    return Change(proposed_s if changed else current_s, changed, gain, noise)
