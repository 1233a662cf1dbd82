"""One level: the tables, the exact optimum against brute force, and what must hold for any values."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import UsageError
from ckpt.policy import exact, overhead, young
from tests.policy import simulated

STALLS = st.floats(1e-6, 1e4)
MTBFS = st.floats(1.0, 1e7)

# stall, MTBF, recovery -> Young, exact; the overhead at Young, exact
TABLE = [
    ((5, 1440, 10), (120.0, 116.6901), (0.095798, 0.095764)),
    ((300, 21600, 600), (3600.0, 3402.840), (0.220739, 0.220433)),
    ((60, 3600, 120), (657.267, 617.891), (0.248528, 0.248117)),
    ((10, 3600, 60), (268.328, 261.703), (0.096543, 0.096518)),
    ((2, 5760, 30), (151.789, 150.459), (0.032185, 0.032184)),
]
CASES = [case for case, _, _ in TABLE]


@pytest.mark.parametrize(("case", "intervals", "overheads"), TABLE)
def test_the_tabulated_values_come_out(case, intervals, overheads):
    c, m, r = case
    got = young(c, m), exact(c, m)
    assert got == pytest.approx(intervals, abs=6e-4)
    assert [overhead(each, c, m, r) for each in got] == pytest.approx(overheads, abs=6e-7)


@pytest.mark.parametrize(("c", "m", "r"), [*CASES, (5000.0, 3600.0, 60.0), (1e-3, 3600.0, 0.0)])
def test_no_interval_on_a_fine_grid_beats_the_exact_one(c, m, r):
    grid = np.geomspace(exact(c, m) / 30, exact(c, m) * 30, 20_001)
    costs = m * math.exp(r / m) * np.expm1((grid + c) / m) / grid - 1
    assert grid[costs.argmin()] == pytest.approx(exact(c, m), rel=1e-3)
    assert overhead(exact(c, m), c, m, r) <= costs.min() * (1 + 1e-12)


@pytest.mark.parametrize(("c", "m", "r"), CASES)
def test_the_overhead_is_what_simulated_failures_cost(c, m, r):
    rng = np.random.default_rng(1)
    for interval in (exact(c, m), 2.5 * young(c, m)):
        assert simulated.one_level(rng, interval, c, m, r) == pytest.approx(overhead(interval, c, m, r), rel=0.02)


@given(c=st.floats(1e-12, 1e4), m=st.floats(1e-3, 1e9))
def test_the_exact_interval_solves_its_equation_to_the_last_digits(c, m):
    """e^((tau + C)/M) (1 - tau/M) = 1, in 60 digits: the sign changes within 1e-12 of the root."""
    with localcontext() as context:
        context.prec = 60

        def excess(tau: float) -> Decimal:
            x = Decimal(tau) / Decimal(m)
            return x + Decimal(c) / Decimal(m) + (1 - x).ln() if x < 1 else Decimal("-inf")

        tau = exact(c, m)
        assert excess(tau * (1 - 1e-12)) > 0
        assert excess(tau * (1 + 1e-12)) < 0 or tau == pytest.approx(m, rel=1e-12)


@given(c=STALLS, m=MTBFS, more=st.floats(1.001, 100))
def test_intervals_grow_with_the_cost_and_with_the_time_between_failures(c, m, more):
    for f in (young, exact):
        assert f(c, m * more) > f(c, m)
        assert f(c * more, m) >= f(c, m)  # equal only where the exact one has come to M
    assert overhead(100, c * more, m, 1.0) >= overhead(100, c, m, 1.0)
    assert overhead(100, c, m * more, 1.0) <= overhead(100, c, m, 1.0)


@given(c=STALLS, m=MTBFS, unit=st.floats(1e-3, 1e3))
def test_the_unit_of_time_is_free(c, m, unit):
    for f in (young, exact):
        assert f(c * unit, m * unit) == pytest.approx(f(c, m) * unit, rel=1e-9)
    scaled = overhead(9 * unit, c * unit, m * unit, 7 * unit)
    at_most = 1e300  # more overflows with one unit and not with another
    assert min(scaled, at_most) == pytest.approx(min(overhead(9, c, m, 7), at_most), rel=1e-6, abs=1e-9)


@given(c=STALLS, m=MTBFS)
def test_the_exact_interval_is_below_youngs_and_below_the_mtbf(c, m):
    assert exact(c, m) <= min(young(c, m), m)
    assert exact(c, m) >= young(c, m) - c * 0.7  # sqrt(2CM) - 2C/3 + ...: the next term is positive


def test_the_limits_are_those_of_theory():
    for c in (1e-3, 1e-5, 1e-7):
        assert exact(c, 1e4) == pytest.approx(young(c, 1e4), rel=math.sqrt(c / 1e4))
    assert exact(0, 100) == young(0, 100) == 0
    assert exact(1e5, 100) == 100
    assert overhead(1e-9, 0, 1e4) == pytest.approx(0, abs=1e-6)  # checkpoints without a cost, failures without a loss
    assert overhead(1e9, 1, 1) == overhead(1, 1, 1, 1e9) == math.inf


def test_the_branches_of_the_exact_solution_meet():
    for c in (1.0, -math.log1p(-0.25) - 0.25):
        below, above = exact(c * (1 - 1e-9), 1.0), exact(c * (1 + 1e-9), 1.0)
        assert 0 < above - below < 1e-8


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, -math.inf])
def test_what_is_no_time_is_refused_by_name(bad):
    for call, name in [
        (lambda: young(bad, 1), "stall_s"),
        (lambda: young(1, bad), "mtbf_s"),
        (lambda: exact(bad, 1), "stall_s"),
        (lambda: exact(1, bad), "mtbf_s"),
        (lambda: overhead(bad, 1, 1, 1), "interval_s"),
        (lambda: overhead(1, bad, 1, 1), "stall_s"),
        (lambda: overhead(1, 1, bad, 1), "mtbf_s"),
        (lambda: overhead(1, 1, 1, bad), "recovery_s"),
    ]:
        with pytest.raises(UsageError, match=name):
            call()


def test_zero_is_refused_where_it_would_divide():
    for call in (
        lambda: young(1, 0),
        lambda: exact(1, 0),
        lambda: overhead(0, 1, 1),
    ):
        with pytest.raises(UsageError):
            call()
