"""The interval where failures are predicted: the tables, brute force, simulated announcements."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.policy import predicted_waste, with_predictions, young

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


@given(CASES)
def test_no_interval_wastes_less(case):
    c, m, _, cp, _, precision = case
    found = with_predictions(*case)
    beta = cp / precision
    grid = np.concatenate([np.geomspace(found.interval_s / 50, found.interval_s * 50, 400), [beta, young(c, m)]])
    least = min(predicted_waste(t, *case) for t in grid.tolist() if t > 0)
    assert found.waste <= least * (1 + 1e-9)
    assert found.waste == predicted_waste(found.interval_s, *case)


def test_a_predictor_that_is_mostly_wrong_changes_nothing():
    """Acting above beta = 1000 s would pay less than it costs; the interval is not stretched to it."""
    found = with_predictions(10, M, R, 10, 0.5, 0.01)
    assert (found.interval_s, found.act_above_s) == (young(10, M), math.inf)
    assert found.waste == with_predictions(10, M, R, 10, 0.0, 1.0).waste
    assert found.waste < predicted_waste(1000, 10, M, R, 10, 0.5, 0.01)
