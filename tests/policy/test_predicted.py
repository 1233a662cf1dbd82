"""The interval where failures are predicted: the tables, brute force, simulated announcements."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import UsageError
from ckpt.policy import predicted_waste, with_predictions, young
from tests.policy import simulated

M, R = 7200.0, 60.0

# stall, proactive stall, recall, precision -> interval, waste, and the waste as it was once simulated
TABLE = [
    ((10, 0, 0.0, 1.0), 379.5, 0.06104, 0.0596),
    ((10, 10, 0.85, 0.82), 979.4, 0.03018, 0.0289),
    ((10, 10, 0.7, 0.4), 691.8, 0.03959, 0.0375),
    ((10, 15, 0.95, 1.0), 1695.8, 0.02209, 0.0209),
]
CASES = st.tuples(  # stall, MTBF, recovery, proactive stall, recall, precision
    st.floats(0.1, 300),
    st.floats(1e3, 1e6),
    st.floats(0, 1e3),
    st.just(0.0) | st.floats(1e-3, 300),
    st.floats(0, 0.99),
    st.floats(0.01, 1),
)


@pytest.mark.parametrize(("case", "interval", "waste", "once"), TABLE)
def test_the_tabulated_values_come_out(case, interval, waste, once):
    c, cp, recall, precision = case
    found = with_predictions(c, M, R, cp, recall, precision)
    assert found.interval_s == pytest.approx(interval, abs=0.06)
    assert found.waste == pytest.approx(waste, abs=6e-6)
    assert found.waste == pytest.approx(once, rel=0.06)


@pytest.mark.parametrize("case", [case for case, *_ in TABLE])
def test_the_waste_is_near_what_simulated_announcements_leave(case):
    c, cp, recall, precision = case
    found = with_predictions(c, M, R, cp, recall, precision)
    rng = np.random.default_rng(6)
    simulation = simulated.predictions(rng, found.interval_s, found.act_above_s, (c, M, R, cp), recall, precision)
    # The first order counts each announcement apart: it is above the truth, by no more than its own size.
    assert simulation < found.waste < simulation * (1 + 2 * found.waste + 0.02)


@given(CASES)
def test_no_interval_wastes_less(case):
    c, m, _, cp, _, precision = case
    found = with_predictions(*case)
    beta = cp / precision
    grid = np.concatenate([np.geomspace(found.interval_s / 50, found.interval_s * 50, 400), [beta, young(c, m)]])
    least = min(predicted_waste(t, *case) for t in grid.tolist() if t > 0)
    assert found.waste <= least * (1 + 1e-9)
    assert found.waste == predicted_waste(found.interval_s, *case)


@given(CASES, st.floats(1.01, 10))
def test_a_better_predictor_never_wastes_more(case, more):
    c, m, r, cp, recall, precision = case
    waste = with_predictions(*case).waste
    assert with_predictions(c, m, r, cp, recall / more, precision).waste >= waste * (1 - 1e-9)
    assert with_predictions(c, m, r, cp, recall, precision / more).waste >= waste * (1 - 1e-9)
    assert with_predictions(c, m, r, cp * more, recall, precision).waste >= waste * (1 - 1e-9)
    assert with_predictions(c * more, m, r, cp, recall, precision).waste >= waste
    assert with_predictions(c, m * more, r, cp, recall, precision).waste <= waste


@given(CASES, st.floats(0.01, 100))
def test_the_unit_of_time_is_free(case, unit):
    c, m, r, cp, recall, precision = case
    found = with_predictions(*case)
    scaled = with_predictions(c * unit, m * unit, r * unit, cp * unit, recall, precision)
    assert scaled.waste == pytest.approx(found.waste, rel=1e-6)


def test_a_predictor_that_is_mostly_wrong_changes_nothing():
    """Acting above beta = 1000 s would pay less than it costs; the interval is not stretched to it."""
    found = with_predictions(10, M, R, 10, 0.5, 0.01)
    assert (found.interval_s, found.act_above_s) == (young(10, M), math.inf)
    assert found.waste == with_predictions(10, M, R, 10, 0.0, 1.0).waste
    assert found.waste < predicted_waste(1000, 10, M, R, 10, 0.5, 0.01)


def test_where_acting_begins_to_pay_the_two_rules_meet():
    beta = young(10, M)  # 2 M C = beta^2
    for recall in (0.1, 0.9):
        below = with_predictions(10, M, R, beta * (1 + 1e-9), recall, 1.0)
        above = with_predictions(10, M, R, beta * (1 - 1e-9), recall, 1.0)
        assert below.act_above_s == math.inf > above.act_above_s
        assert below.interval_s == pytest.approx(above.interval_s, rel=1e-6)
        assert below.waste == pytest.approx(above.waste, rel=1e-6)


def test_a_notice_is_worth_more_than_a_better_interval():
    without, with_notices = with_predictions(10, M, R, 0, 0, 1), with_predictions(10, M, R, 15, 0.95, 1)
    assert (without.waste, with_notices.waste) == pytest.approx((0.0610, 0.0221), abs=6e-5)


def test_what_is_outside_its_domain_is_refused_by_name():
    good = {"stall_s": 10, "mtbf_s": M, "recovery_s": R, "proactive_s": 10, "recall": 0.5, "precision": 0.5}
    for name, wrong in [
        *((name, bad) for name in good for bad in (-1.0, math.nan, math.inf)),
        ("stall_s", 0),
        ("mtbf_s", 0),
        ("recall", 1),
        ("precision", 0),
        ("precision", 1.01),
    ]:
        with pytest.raises(UsageError, match=name):
            with_predictions(**{**good, name: wrong})
        with pytest.raises(UsageError, match=name):
            predicted_waste(100, **{**good, name: wrong})
    with pytest.raises(UsageError, match="interval_s"):
        predicted_waste(0, **good)
