"""Domains: what is outside is refused by name; at the edges of floats each function gives a number that can be, or a
UsageError; never another error, never nan."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import fields

import pytest

from ckpt import policy
from ckpt.errors import UsageError
from ckpt.policy import GammaRate, LevelCosts, Measurements

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


PREDICTION = {"stall_s": 1, "mtbf_s": 1, "recovery_s": 1, "proactive_s": 1, "recall": 0.5, "precision": 0.5}
MEASURED = Measurements()
# A function, arguments that it takes, and those that may not be 0.
DOMAINS: list[tuple[Callable[..., object], dict[str, float], set[str]]] = [
    (policy.young, {"stall_s": 1, "mtbf_s": 1}, {"mtbf_s"}),
    (policy.exact, {"stall_s": 1, "mtbf_s": 1}, {"mtbf_s"}),
    (policy.overhead, {"interval_s": 1, "stall_s": 1, "mtbf_s": 1, "recovery_s": 1}, {"interval_s", "mtbf_s"}),
    (LevelCosts, {each.name: 0.5 for each in fields(LevelCosts)}, set()),
    (lambda interval_s: policy.overhead_of(LevelCosts(1), interval_s, 1), {"interval_s": 1}, {"interval_s"}),
    (policy.with_predictions, PREDICTION, {"stall_s", "mtbf_s", "precision"}),
    (policy.predicted_waste, {"interval_s": 1, **PREDICTION}, {"interval_s", "stall_s", "mtbf_s", "precision"}),
    (
        policy.reconsider,
        {
            **dict.fromkeys(("current_s", "proposed_s", "stall_s", "rate"), 1),
            **dict.fromkeys(("stall_error_s", "rate_error", "deviations"), 1),
        },
        {"current_s", "proposed_s"},
    ),
    (
        GammaRate,
        dict.fromkeys(("prior_failures", "prior_exposure_s", "failures", "exposure_s"), 1),
        {"prior_failures", "prior_exposure_s"},
    ),
    (GammaRate(1, 1).with_observations, {"failures": 1, "exposure_s": 1}, set()),
    (GammaRate(1, 1).discounted, {"keep": 0.5}, set()),
    (GammaRate(1, 1).quantile, {"p": 0.5}, {"p"}),
    (MEASURED.with_stall(1).with_stall(1).with_stall, {"seconds": 1}, set()),
    (MEASURED.with_commit, {"seconds": 1, "count_bytes": 1}, set()),
    (MEASURED.with_steps, {"steps": 1, "seconds": 1}, {"steps"}),
    (MEASURED.with_uptime, {"seconds": 1, "nodes": 1}, {"nodes"}),
    (MEASURED.with_predictor, {"recall": 0.5, "precision": 0.5}, {"precision"}),
]
MOST = {"recall": 0.999, "precision": 1, "slowdown": 1, "p": 0.999, "keep": 1}
OTHERWISE_NAMED = {"seconds": "value|seconds|exposure_s", "nodes": "nodes|exposure_s"}


@pytest.mark.parametrize(("call", "good", "positive"), DOMAINS)
def test_what_is_outside_a_domain_is_refused_by_name(call, good, positive):
    call(**good)
    for name in good:
        beyond = [MOST[name] + 0.01] if name in MOST else []
        for bad in [-1.0, math.nan, math.inf, *[0] * (name in positive), *beyond]:
            with pytest.raises(UsageError, match=OTHERWISE_NAMED.get(name, name)):
                call(**{**good, name: bad})


def test_a_count_below_one_is_refused():
    for call in (lambda: policy.overhead_of(LevelCosts(1), 100, 0), lambda: MEASURED.level_costs(0, False)):
        with pytest.raises(UsageError):
            call()
