"""What a job learns: robust costs, failure rates that follow changes, and what both come to."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.policy import Failure, FailureRate, Measurements, RobustMean
from ckpt.policy.failures import MEMORY, PRIORS

HOUR = 3600.0
VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=100)


def typical(values: list[float]) -> RobustMean:
    found = RobustMean()
    for value in values:
        found = found.with_value(value)
    return found


# -- costs


@given(VALUES)
def test_a_typical_value_lies_within_the_newest_and_has_an_error(values):
    found = typical(values)
    newest = values[-16:]
    assert (found.recent, found.values, found.count) == (tuple(newest), tuple(values[-64:]), len(values))
    assert min(newest) <= found.mean <= found.upper_value <= max(newest)
    assert found.error >= 0


@given(st.lists(st.floats(1, 2), min_size=2, max_size=30), st.floats(100, 1e6), st.data())
def test_one_wild_value_changes_little(values, wild, data):
    at = data.draw(st.integers(0, len(values)))
    assert typical([*values[:at], wild, *values[at:]]).mean <= 2


def test_the_error_is_how_much_the_mean_varies():
    rng = random.Random(4)
    many = [typical([rng.gauss(100, 10) for _ in range(16)]) for _ in range(2000)]
    varies = statistics.stdev(each.mean for each in many)
    assert statistics.fmean(each.error for each in many) == pytest.approx(varies, rel=0.1)
    assert typical([5.0]).error == 5


def test_the_error_of_the_high_value_is_how_much_that_varies():
    rng = random.Random(4)
    many = [dataclasses.replace(typical([rng.gauss(100, 10) for _ in range(64)]), window=64) for _ in range(1000)]
    varies = statistics.stdev(each.upper_value for each in many)
    assert statistics.fmean(each.upper_error for each in many) == pytest.approx(varies, rel=0.15)


def test_in_the_long_run_four_times_as_many_count():
    known = Measurements()
    for seconds in [1.0] * 40 + [9.0] * 24:
        known = known.with_commit(seconds, 1e9)
    assert (known.commit.mean, known.with_long_window().commit.mean) == (
        pytest.approx(9),
        pytest.approx((32 + 16 * 9) / 48),
    )
    assert known.with_long_window().commit.error < 1
    assert known.with_long_window().process == known.process
    assert known.with_long_window().with_commit(1, 1).commit.window == 64


@given(st.floats(0, 0.6))
def test_the_slowdown_is_what_steps_take_longer_beside_a_commit(part):
    known = Measurements()
    for _ in range(2):
        known = known.with_steps(10, 5.0).with_steps_beside_commit(10, 5.0 / (1 - part))
    assert known.slowdown == pytest.approx(max(0.01, part))


def test_a_slowdown_below_the_noise_is_taken_from_the_prior():
    rng = random.Random(5)
    known = Measurements().with_steps(1, 1.0)
    assert (known.slowdown, known.slowdown_error) == (0.05, 0.05)
    found = []
    for _ in range(500):
        known = known.with_steps(1, rng.gauss(1, 0.5) ** 2).with_steps_beside_commit(1, rng.gauss(1.02, 0.5) ** 2)
        found.append(known.slowdown)
    assert 0.02 < statistics.fmean(found) < 0.08
    assert max(found) < 0.2


# -- failures


def rates(seed: int, mtbfs_s: list[float], rate: FailureRate) -> list[FailureRate]:
    rng = random.Random(seed)
    found = []
    for mtbf_s in mtbfs_s:
        rate = rate.with_exposure(rng.expovariate(1 / mtbf_s)).with_failure()
        found.append(rate)
    return found


@pytest.mark.parametrize("wrong", [0.01, 0.25, 1, 4, 100])
def test_a_constant_rate_is_learnt_from_any_prior(wrong):
    ends = [rates(seed, [HOUR] * 40, FailureRate.prior(wrong * HOUR))[-1].current_rate for seed in range(100)]
    assert statistics.median(end.mtbf_s for end in ends) == pytest.approx(HOUR, rel=0.1)
    assert statistics.fmean(abs(math.log(end.mtbf_s / HOUR)) for end in ends) < 0.3


@pytest.mark.parametrize(("times", "within"), [(4, 20), (0.25, 20), (50, 8), (0.02, 8)])
def test_a_change_of_the_rate_is_followed_the_sooner_the_larger_it_is(times, within):
    after = HOUR / times
    ends = [
        rates(seed, [HOUR] * 60 + [after] * within, PRIORS[Failure.PROCESS])[-1].current_rate for seed in range(100)
    ]
    assert statistics.fmean(abs(math.log2(end.mtbf_s / after)) for end in ends) < 0.9


def test_a_long_quiet_time_is_forgotten_after_a_few_failures():
    rate = FailureRate.prior(24 * HOUR).with_exposure(2400 * HOUR).with_failure()
    found = []
    for _ in range(6):
        rate = rate.with_exposure(HOUR).with_failure()
        found.append(rate.current_rate.mtbf_s / HOUR)
    assert found[-1] < 2
    assert found[0] > 100  # one is no proof


@pytest.mark.parametrize(("shape", "most"), [(1.0, 2), (0.6, 40)])
def test_what_clusters_is_seldom_taken_for_a_change(shape, most):
    rng = random.Random(6)
    rate, changes = PRIORS[Failure.PROCESS], 0
    for _ in range(2000):
        before = rate
        rate = rate.with_exposure(rng.weibullvariate(HOUR, shape)).with_failure()
        changes += rate.rate_at_failure.prior_failures > before.rate_at_failure.prior_failures
    assert changes <= most


@given(st.lists(st.floats(0, 1e9), max_size=60))
def test_knowledge_of_failures_stays_small_and_finite(gaps):
    rate = PRIORS[Failure.NODE]
    for gap_s in gaps:
        rate = rate.with_exposure(gap_s).with_failure()
    assert len(rate.gaps_s) <= MEMORY
    assert 0 < rate.rate_at_failure.failures <= MEMORY or not gaps
    assert 0 < rate.current_rate.mean < math.inf
    assert (rate.failure_count, rate.since_failure_s) == (len(gaps), 0)
    assert rate.total_exposure_s == pytest.approx(math.fsum(gaps))


def test_two_failures_at_once_are_no_change_of_the_rate():
    rate = PRIORS[Failure.PROCESS].with_exposure(24 * HOUR).with_failure().with_exposure(1.0).with_failure()
    assert rate.current_rate.mtbf_s > 8 * HOUR


def test_time_without_failures_counts_at_once():
    rate = PRIORS[Failure.PROCESS].with_exposure(HOUR).with_failure()
    assert rate.with_exposure(100 * HOUR).current_rate.mean < rate.current_rate.mean / 4
    assert rate.with_exposure(HOUR).with_exposure(HOUR) == rate.with_exposure(2 * HOUR)


# -- both


def test_exposure_of_nodes_is_counted_in_node_seconds():
    known = Measurements().with_uptime(10.0, nodes=8)
    assert [known.rate_of(each).since_failure_s for each in Failure] == [10, 80, 80, 10]
    alone, many = known.level_costs(1, True), known.level_costs(8, True)
    assert many.peer_rate == pytest.approx(8 * alone.peer_rate)
    assert (many.local_rate, many.store_rate) == (alone.local_rate, alone.store_rate)


def test_a_failure_counts_for_the_level_that_it_is_recovered_from():
    known = Measurements().with_failure(Failure.NODE).with_failure(Failure.JOB)
    alone, peers = known.level_costs(1, False), known.level_costs(1, True)
    assert alone.peer_rate == 0
    assert alone.store_rate == pytest.approx(peers.store_rate + peers.peer_rate)


def test_recoveries_are_part_of_what_is_measured():
    known = (
        Measurements()
        .with_recovery("local", 3.0)
        .with_recovery("peer", 20.0)
        .with_recovery("store", 90.0)
        .with_replication(4.0)
    )
    found = known.level_costs(2, True)
    assert (found.local_recovery_s, found.peer_recovery_s, found.store_recovery_s) == (3, 20, 90)
    assert found.replication_s == 4
