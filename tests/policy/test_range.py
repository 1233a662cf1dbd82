"""At the edges of floats: each function gives a number that can be, or a UsageError; never another error, never nan."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from ckpt import policy
from ckpt.errors import UsageError
from ckpt.policy import GammaRate, LevelCosts

NUMBERS = (
    0.0,
    5e-324,
    1e-310,
    1e-100,
    1e-99,
    1e-20,
    1e-9,
    1.0,
    3.0,
    1e9,
    1e20,
    1e99,
    1e100,
    1.01e100,
    1.7e308,
    10**5000,
)
PARTS = (0.0, 5e-324, 1e-9, 0.5, 1 - 1e-16, 1.0)
COUNTS = (1, 2, 50, 10**18)

Draw = random.Random


def _n(draw: Draw) -> float:
    return draw.choice(NUMBERS)


def _measured(draw: Draw) -> LevelCosts:
    return LevelCosts(_n(draw), _n(draw), _n(draw), draw.choice(PARTS), *(_n(draw) for _ in range(7)))


def _gamma(draw: Draw) -> tuple[float, ...]:
    rate = GammaRate(_n(draw), _n(draw), _n(draw), _n(draw))
    return rate.mean, rate.deviation, rate.mtbf_s


def _predicted(draw: Draw) -> tuple[float, ...]:
    found = policy.with_predictions(*(_n(draw) for _ in range(4)), draw.choice(PARTS), draw.choice(PARTS))
    return found.interval_s, found.waste


def _change(draw: Draw) -> tuple[float, ...]:
    found = policy.reconsider(*(_n(draw) for _ in range(6)))
    return found.interval_s, abs(found.gain), found.noise


FINITE: dict[str, Callable[[Draw], tuple[float, ...]]] = {
    "young": lambda draw: (policy.young(_n(draw), _n(draw)),),
    "exact": lambda draw: (policy.exact(_n(draw), _n(draw)),),
    "gamma": _gamma,
    "reconsider": _change,
}
MAYBE_INFINITE: dict[str, Callable[[Draw], tuple[float, ...]]] = {
    "overhead": lambda draw: (policy.overhead(_n(draw), _n(draw), _n(draw), _n(draw)),),
    "with_predictions": _predicted,
    "overhead_of": lambda draw: (policy.overhead_of(_measured(draw), _n(draw), draw.choice(COUNTS)),),
}


@pytest.mark.parametrize("name", [*FINITE, *MAYBE_INFINITE])
def test_a_number_that_can_be_or_an_error_that_names_what_cannot(name: str) -> None:
    draw, answered = Draw(3), 0
    call = FINITE[name] if name in FINITE else MAYBE_INFINITE[name]
    for _ in range(6000):
        try:
            found = call(draw)
        except UsageError:
            continue
        answered += 1
        assert all(each >= 0 for each in found)
        assert name in MAYBE_INFINITE or all(math.isfinite(each) for each in found)
    assert answered > 10
