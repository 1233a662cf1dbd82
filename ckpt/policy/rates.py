"""Failure rates with their uncertainty, and the test whether they justify a new interval.

A rate is a Gamma distribution (shape in failures, the other parameter in seconds of exposure), the conjugate prior of
Poisson counts. So all observations are two numbers, which add up and outlive the job. There is one rate per class of
failures. The caller defines the exposure: node-seconds for losses of single nodes. The loss of many nodes at once is
one failure of its class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ckpt.errors import UsageError
from ckpt.policy.interval import not_negative, positive, within

# Above it a quantile uses the approximation of Wilson and Hilferty 1931, which is as exact there and needs no long sum.
SHAPE_MAX = 1e5


@dataclass(frozen=True, slots=True)
class GammaRate:
    """A failure rate per second of exposure: Gamma(a + n, b + t) after n failures in t seconds, for a prior of a
    failures in b seconds (both more than 0; Gelman et al., Bayesian Data Analysis, 3rd ed. 2013, section 2.6). n may be
    a fraction, since old failures are discounted. Errors: UsageError."""

    prior_failures: float
    prior_exposure_s: float
    failures: float = 0.0
    exposure_s: float = 0.0

    def __post_init__(self) -> None:
        positive("prior_failures", self.prior_failures)
        positive("prior_exposure_s", self.prior_exposure_s)
        not_negative("failures", self.failures)
        not_negative("exposure_s", self.exposure_s)

    def with_observations(self, failures: float, exposure_s: float) -> GammaRate:
        """The rate after this many more failures in this many more seconds of exposure."""
        not_negative("failures", failures)
        not_negative("exposure_s", exposure_s)
        return replace(self, failures=self.failures + failures, exposure_s=self.exposure_s + exposure_s)

    def discounted(self, keep: float) -> GammaRate:
        """The rate with the part `keep` (0 to 1) of the observations. Failures and exposure shrink alike, so the mean
        hardly changes and becomes less certain. The prior is unchanged."""
        within("keep", keep, 0, 1)
        return replace(self, failures=self.failures * keep, exposure_s=self.exposure_s * keep)

    @property
    def shape(self) -> float:
        """a + n: the number of failures that the estimate is worth."""
        return self.prior_failures + self.failures

    @property
    def total_s(self) -> float:
        """b + t, seconds."""
        return self.prior_exposure_s + self.exposure_s

    @property
    def mean(self) -> float:
        """Failures per second: the input of the formulas for intervals."""
        return self.shape / self.total_s

    @property
    def deviation(self) -> float:
        """The standard deviation of the rate, per second."""
        return math.sqrt(self.shape) / self.total_s

    @property
    def mtbf_s(self) -> float:
        """1 / mean."""
        return self.total_s / self.shape

    def quantile(self, p: float) -> float:
        """The rate per second below which the true one lies with probability p, 0 < p < 1. The relative error is about
        1e-8.
        Errors: UsageError."""
        if not 0 < p < 1:
            raise UsageError(f"p={p}: give a probability in (0, 1)")
        return _gamma_quantile(self.shape, p) / self.total_s


def _gamma_quantile(a: float, p: float) -> float:
    """x with P(a, x) = p, by bisection of log x, from bounds that enclose it."""
    if a > SHAPE_MAX:
        # Imported here: a slow import for a rare case.
        from statistics import NormalDist

        return a * float(1 - 1 / (9 * a) + NormalDist().inv_cdf(p) / (3 * math.sqrt(a))) ** 3
    # P(a, x) <= x^a / Gamma(a + 1), which is also its limit for small x.
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
    """The regularised lower incomplete gamma function P(a, x): by its series below a + 1 (DLMF 8.11.4), above it as one
    minus the continued fraction of Q (DLMF 8.9.2), evaluated by Lentz 1976."""
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
    """The answer of `reconsider`. Overheads are wall time / useful time, to first order."""

    interval_s: float  # the interval to use from now on
    is_changed: bool
    gain: float  # the overhead that the proposed interval saves, by the estimates
    noise: float  # the possible error of the gain


def reconsider(
    current_s: float,
    proposed_s: float,
    stall_s: float,
    rate: float,
    stall_error_s: float = 0.0,
    rate_error: float = 0.0,
    deviations: float = 1.0,
) -> Change:
    """Whether to change from one interval to another: only if the gain exceeds the noise of the estimates.

    `rate`: failures per second whose lost work this interval bounds. `rate_error`: its standard deviation (for a sum of
    rates, the root of the sum of the squares). `stall_error_s`: the standard deviation of the stall. `deviations`: the
    noise, in standard deviations of the gain. With the overhead C/tau + rate tau/2 (Young 1974) the gain is linear in
    both estimates: C (1/tau0 - 1/tau1) + rate (tau0 - tau1)/2. So its standard deviation follows directly.

    Estimates that ask for a change never ask to undo it. With an exact stall, Young's interval replaces the current one
    only if they differ by more than the part 1/sqrt(n), n = (rate / rate_error)^2: the shape of a GammaRate. So with
    few failures changes are rare, and later ever smaller ones are made. Errors: UsageError.
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
    changed = bool(gain > noise)  # also for numbers of numpy
    return Change(proposed_s if changed else current_s, changed, gain, noise)
