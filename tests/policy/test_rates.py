"""Failure rates as distributions, and when they are sure enough to change an interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckpt.policy import GammaRate, reconsider, young

HOUR = 3600.0
SECONDS = st.floats(1.0, 1e6)
COUNTS = st.floats(0, 1e3)
POSTERIORS = st.builds(GammaRate, st.floats(0.05, 100), SECONDS, COUNTS, SECONDS)


def test_the_tabulated_posterior_comes_out():
    rate = GammaRate(2, 8 * HOUR).with_observations(failures=5, exposure_s=10 * HOUR)
    assert rate.mean * HOUR == pytest.approx(0.38889, abs=6e-6)
    assert rate.mtbf_s / HOUR == pytest.approx(2.5714, abs=6e-5)
    assert [rate.quantile(p) * HOUR for p in (0.025, 0.975)] == pytest.approx([0.15635, 0.72553], abs=6e-6)


@pytest.mark.parametrize("shape", [1, 2, 7, 40, 400, 3000])
@pytest.mark.parametrize("p", [1e-6, 0.025, 0.5, 0.975, 1 - 1e-6])
def test_quantiles_are_those_of_poisson_counts(shape, p):
    """For a whole number of failures P(rate < x) is the probability that x seconds bring at least so many."""
    x = GammaRate(shape, 1.0).quantile(p)
    terms = [j * math.log(x) - x - math.lgamma(j + 1) for j in range(shape)]
    fewer = math.fsum(math.exp(term) for term in terms)
    assert 1 - fewer == pytest.approx(p, rel=1e-8, abs=1e-11)


@pytest.mark.parametrize("shape", [0.02, 0.3, 0.5, 2.5, 123.4, 5e5])
def test_quantiles_are_those_of_drawn_rates(shape):
    rate = GammaRate(shape, 50.0)
    drawn = np.random.default_rng(7).gamma(shape, 1 / 50.0, 200_000)
    for p in (0.1, 0.5, 0.9):
        assert (drawn < rate.quantile(p)).mean() == pytest.approx(p, abs=0.005)
    assert (rate.mean, rate.deviation) == pytest.approx((drawn.mean(), drawn.std()), rel=0.05)


def test_a_quantile_too_small_for_a_float_is_zero():
    assert GammaRate(1e-3, 1.0).quantile(0.01) == 0
    assert GammaRate(1e-3, 1.0).quantile(0.999) > 0


@given(POSTERIORS, st.floats(0, 1))
def test_discounting_forgets_what_was_seen_and_not_the_prior(rate, keep):
    less = rate.discounted(keep)
    assert (less.failures, less.exposure_s) == (rate.failures * keep, rate.exposure_s * keep)
    assert (less.prior_failures, less.prior_exposure_s) == (rate.prior_failures, rate.prior_exposure_s)
    assert less.deviation / less.mean >= rate.deviation / rate.mean * (1 - 1e-12)
    assert rate.discounted(1) == rate
    nothing = GammaRate(rate.prior_failures, rate.prior_exposure_s)
    low, high = sorted((nothing.mean, rate.mean))
    assert low * (1 - 1e-12) <= less.mean <= high * (1 + 1e-12)


# --- reconsider ---------------------------------------------------------------------------------------------------

ESTIMATES = st.fixed_dictionaries(
    {
        "stall_s": st.floats(0.01, 1e3),
        "rate": st.floats(1e-8, 1e-2),
        "stall_error_s": st.floats(0, 100),
        "rate_error": st.floats(0, 1e-2),
        "deviations": st.floats(0, 3),
    }
)


@given(SECONDS, SECONDS, ESTIMATES)
def test_no_estimates_ask_for_a_change_and_for_one_back(current, proposed, estimates):
    there, back = reconsider(current, proposed, **estimates), reconsider(proposed, current, **estimates)
    assert not (there.is_changed and back.is_changed)
    assert there.gain == pytest.approx(-back.gain, rel=1e-9, abs=1e-300)
    assert there.noise == pytest.approx(back.noise, rel=1e-9)
    assert there.interval_s == (proposed if there.is_changed else current)
    assert there.is_changed == (there.gain > there.noise)
    assert not reconsider(current, current, **estimates).is_changed


@given(SECONDS, SECONDS, ESTIMATES)
def test_the_gain_is_the_difference_of_the_two_overheads(current, proposed, estimates):
    c, rate = estimates["stall_s"], estimates["rate"]
    before, after = (c / t + rate * t / 2 for t in (current, proposed))
    found = reconsider(current, proposed, **estimates)
    assert found.gain == pytest.approx(before - after, rel=1e-6, abs=1e-9 * before)
    exact = reconsider(current, proposed, c, rate)
    assert (exact.noise, exact.is_changed) == (0, exact.gain > 0)


def test_the_noise_is_the_deviation_of_the_gain():
    rng = np.random.default_rng(8)
    stalls, rates = rng.normal(10, 1, 100_000), rng.normal(1e-3, 3e-4, 100_000)
    gains = stalls / 300 + rates * 150 - stalls / 141 - rates * 70.5
    found = reconsider(300, 141, 10, 1e-3, stall_error_s=1, rate_error=3e-4)
    assert (found.gain, found.noise) == pytest.approx((gains.mean(), gains.std()), rel=0.02)
    assert reconsider(300, 141, 10, 1e-3, 1, 3e-4, deviations=2).noise == pytest.approx(2 * found.noise)


@given(st.floats(0.1, 1e4), st.floats(0.01, 100), st.floats(1e-8, 1e-2), st.floats(0.05, 10))
def test_to_youngs_interval_one_goes_where_it_differs_by_more_than_the_failures_tell(n, stall, rate, ratio):
    proposed = young(stall, 1 / rate)
    current = proposed * ratio
    apart = abs(current - proposed) / current
    assume(abs(apart * math.sqrt(n) - 1) > 1e-6)
    found = reconsider(current, proposed, stall, rate, rate_error=rate / math.sqrt(n))
    assert found.is_changed == (apart > 1 / math.sqrt(n))


def test_the_two_ways_to_a_quantile_meet():
    for p in (1e-3, 0.3, 0.99):
        below, above = GammaRate(1e5, 1.0).quantile(p), GammaRate(1e5 * (1 + 1e-12), 1.0).quantile(p)
        assert below == pytest.approx(above, rel=2e-8)
    assert GammaRate(1e100, 1.0).quantile(0.1) == pytest.approx(1e100)
