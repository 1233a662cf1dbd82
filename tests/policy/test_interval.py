"""One level: the tables, and the exact optimum in 60 digits."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.policy import exact, overhead, young

# stall, MTBF, recovery -> Young, exact; the overhead at Young, exact
TABLE = [
    ((5, 1440, 10), (120.0, 116.6901), (0.095798, 0.095764)),
    ((300, 21600, 600), (3600.0, 3402.840), (0.220739, 0.220433)),
    ((60, 3600, 120), (657.267, 617.891), (0.248528, 0.248117)),
    ((10, 3600, 60), (268.328, 261.703), (0.096543, 0.096518)),
    ((2, 5760, 30), (151.789, 150.459), (0.032185, 0.032184)),
]


@pytest.mark.parametrize(("case", "intervals", "overheads"), TABLE)
def test_the_tabulated_values_come_out(case, intervals, overheads):
    c, m, r = case
    got = young(c, m), exact(c, m)
    assert got == pytest.approx(intervals, abs=6e-4)
    assert [overhead(each, c, m, r) for each in got] == pytest.approx(overheads, abs=6e-7)


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


def test_the_limits_are_those_of_theory():
    for c in (1e-3, 1e-5, 1e-7):
        assert exact(c, 1e4) == pytest.approx(young(c, 1e4), rel=math.sqrt(c / 1e4))
    assert exact(0, 100) == young(0, 100) == 0
    assert exact(1e5, 100) == 100
    assert overhead(1e-9, 0, 1e4) == pytest.approx(0, abs=1e-6)  # checkpoints without a cost, failures without a loss
    assert overhead(1e9, 1, 1) == overhead(1, 1, 1, 1e9) == math.inf
