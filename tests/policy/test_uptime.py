"""Schedules for Weibull up-times: the tables, what they are defined by, and simulated lives."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import UsageError
from ckpt.policy import overhead, weibull_next, weibull_overhead, weibull_scale, weibull_survival, weibull_times, young
from tests.policy import simulated

MTBF, STALL, RECOVERY = 7200.0, 20.0, 60.0

# shape -> the first five times, the overhead of the schedule, of Young's constant interval (both once simulated)
TABLE = [
    (0.5, (194, 489, 839, 1231, 1658), 0.0763, 0.0812),
    (0.7, (314, 709, 1143, 1603, 2084), 0.0838, 0.0853),
    (1.5, (975, 1697, 2348, 2955, 3533), 0.0857, 0.0875),
]
SHAPES = st.floats(0.3, 4)
STALLS = st.floats(0.1, 300)


def constant(interval_s: float, stall_s: float = STALL):
    """Checkpoints begin after every `interval_s` of work."""
    return (j * (interval_s + stall_s) - stall_s for j in itertools.count(1))


@pytest.mark.parametrize(("shape", "times", "schedule", "youngs"), TABLE)
def test_the_tabulated_schedules_and_their_overheads_come_out(shape, times, schedule, youngs):
    got = list(itertools.islice(weibull_times(STALL, MTBF, shape), 5))
    assert got == pytest.approx(times, abs=0.51)
    found = weibull_overhead(weibull_times(STALL, MTBF, shape), STALL, MTBF, RECOVERY, shape)
    flat = weibull_overhead(constant(young(STALL, MTBF)), STALL, MTBF, RECOVERY, shape)
    assert (found, flat) == pytest.approx((schedule, youngs), abs=5e-4)


@pytest.mark.parametrize("shape", [0.5, 0.7, 1.0, 1.5])
def test_the_overhead_of_a_schedule_is_what_simulated_lives_cost(shape):
    rng = np.random.default_rng(5)
    for times in (weibull_times(STALL, MTBF, shape), constant(1500)):
        row = list(itertools.islice(times, 2000))
        found = simulated.uptimes(rng, row, STALL, MTBF, RECOVERY, shape)
        assert weibull_overhead(row, STALL, MTBF, RECOVERY, shape) == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("shape", [0.5, 0.7, 1.5, 3.0])
def test_no_constant_interval_and_no_stretched_schedule_is_better(shape):
    def cost(times):
        return weibull_overhead(times, STALL, MTBF, RECOVERY, shape)

    found = cost(weibull_times(STALL, MTBF, shape))
    assert found < min(cost(constant(t)) for t in np.geomspace(100, 3000, 40))
    for stretch in (0.6, 0.8, 1.25, 1.6):
        assert found < cost(t * stretch for t in weibull_times(STALL, MTBF, shape))


@given(stall=STALLS, shape=SHAPES, j=st.integers(1, 50))
def test_between_two_times_the_density_of_checkpoints_adds_up_to_one(stall, shape, j):
    times = [0.0, *itertools.islice(weibull_times(stall, MTBF, shape), j)]
    scale = weibull_scale(MTBF, shape)
    # Substituting t = scale v^(2/(k+1)) makes the integrand smooth at 0; 200 midpoints of v.
    low, high = (t / scale for t in times[-2:])
    half = (shape + 1) / 2
    v = low**half + (np.arange(200) + 0.5) / 200 * (high**half - low**half)
    x = v ** (1 / half)
    hazard = shape / scale * x ** (shape - 1)
    dt = scale * x / (half * v) * (high**half - low**half) / 200
    assert float((np.sqrt(hazard / (2 * stall)) * dt).sum()) == pytest.approx(1, rel=1e-6)


@given(stall=STALLS, shape=SHAPES)
def test_each_time_follows_from_the_one_before(stall, shape):
    at = 0.0
    for time_s in itertools.islice(weibull_times(stall, MTBF, shape), 20):
        at = weibull_next(at, stall, MTBF, shape)
        assert at == pytest.approx(time_s, rel=1e-9)


@given(stall=STALLS, shape=SHAPES, age=st.floats(0, 1e5), more=st.floats(1.01, 10))
def test_what_is_due_comes_later_the_dearer_and_keeps_to_the_unit(stall, shape, age, more):
    due = weibull_next(age, stall, MTBF, shape)
    assert due > age
    assert weibull_next(age, stall * more, MTBF, shape) > due
    assert weibull_next(age * more, stall * more, MTBF * more, shape) == pytest.approx(due * more, rel=1e-9)
    assert weibull_next(age + 1, stall, MTBF, shape) > due


def test_gaps_widen_where_the_young_fail_and_narrow_where_the_old_do():
    gaps = {k: np.diff(list(itertools.islice(weibull_times(STALL, MTBF, k), 30))) for k in (0.6, 1.0, 2.0)}
    assert (np.diff(gaps[0.6]) > 0).all()
    assert (np.diff(gaps[2.0]) < 0).all()
    assert gaps[1.0] == pytest.approx(np.full(29, young(STALL, MTBF)))


def test_the_exponential_case_is_the_model_of_one_level():
    interval = young(STALL, MTBF)
    found = weibull_overhead(constant(interval), STALL, MTBF, 0, 1.0)
    assert found == pytest.approx(overhead(interval, STALL, MTBF), rel=1e-9)


def test_the_scale_and_the_survival_belong_to_the_mean():
    assert weibull_scale(100, 1.0) == pytest.approx(100)
    for shape in (0.5, 1.5, 4.0):
        v = (np.arange(200_000) + 0.5) / 200_000  # the mean is the integral of the quantile function
        mean = weibull_scale(100, shape) * float(((-np.log(v)) ** (1 / shape)).mean())
        assert mean == pytest.approx(100, rel=1e-3)
        assert weibull_survival(weibull_scale(100, shape), 100, shape) == pytest.approx(math.exp(-1))
    assert weibull_survival(0, 100, 0.5) == 1
    assert weibull_survival(1e100, 1e-3, 10.0) == 0


def test_what_a_schedule_cannot_save_is_lost():
    assert weibull_overhead([], STALL, MTBF, RECOVERY, 0.7) == math.inf
    once = weibull_overhead([1000.0], STALL, MTBF, RECOVERY, 0.7)
    assert once == pytest.approx((MTBF + RECOVERY) / (1000 * weibull_survival(1020, MTBF, 0.7)) - 1)
    assert weibull_overhead([1000.0, 1010.0], STALL, MTBF, RECOVERY, 0.7) == once  # due while a stall lasts: skipped
    for row in ([10.0, 10.0], [-1.0], [math.nan], [20.0, 5.0]):
        with pytest.raises(UsageError, match="is not after"):
            weibull_overhead(row, STALL, MTBF, RECOVERY, 0.7)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_what_is_outside_its_domain_is_refused(bad):
    for call, name in [
        (lambda: weibull_scale(bad, 1), "mtbf_s"),
        (lambda: weibull_scale(1, bad), "shape"),
        (lambda: weibull_survival(bad, 1, 1), "uptime_s"),
        (lambda: weibull_next(bad, 1, 1, 1), "uptime_s"),
        (lambda: weibull_next(0, bad, 1, 1), "stall_s"),
        (lambda: weibull_times(bad, 1, 1), "stall_s"),
        (lambda: weibull_times(1, bad, 1), "mtbf_s"),
        (lambda: weibull_overhead([1.0], bad, 1, 1, 1), "stall_s"),
        (lambda: weibull_overhead([1.0], 1, 1, bad, 1), "recovery_s"),
    ]:
        with pytest.raises(UsageError, match=name):
            call()
    for call in (lambda: weibull_next(0, 0, 1, 1), lambda: weibull_next(1e100, 1, 1, 1)):
        with pytest.raises(UsageError, match="stall_s"):
            call()
