"""Each law gives the rates that its closed form has, and the same trace for the same seed.

Bounds are four standard errors, at fixed seeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from ckpt.errors import UsageError
from ckpt.simulate import generators
from ckpt.simulate.generators import GENERATORS, Fleet, bathtub, bathtub_cdf, bulk, diurnal, exponential, weibull
from ckpt.simulate.trace import EventKind, Trace
from tests.simulate.lives import check_trace, counts, lives_s, losses

FLEET = Fleet(20, 1000, seed=1, provision_s=0)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("seed", range(3))
def test_a_trace_is_in_order_and_the_same_for_its_seed(name: str, seed: int) -> None:
    fleet = Fleet(12, 100, seed, provision_s=600, crashes=0.05)
    made = GENERATORS[name](fleet)
    check_trace(made)
    assert made == GENERATORS[name](fleet)
    assert losses(made) != losses(GENERATORS[name](Fleet(12, 100, seed + 1, provision_s=600, crashes=0.05)))
    assert max(counts(made).values()) == 12
    assert made.span_s == 360_000


@pytest.mark.parametrize("name", GENERATORS)
def test_crashes_do_not_change_the_losses_and_have_their_rate(name: str) -> None:
    plain, crashing = (GENERATORS[name](Fleet(20, 500, 5, 600, crashes)) for crashes in (0, 0.1))
    assert plain.events == tuple(event for event in crashing.events if event.kind is not EventKind.CRASH)
    crashes = len(crashing.events) - len(plain.events)
    expected = 0.1 * node_hours(crashing)
    assert abs(crashes - expected) < 4 * math.sqrt(expected)


def node_hours(trace: Trace) -> float:
    return sum(trace.span_s - came_s if up_s is None else up_s for came_s, up_s in lives_s(trace)) / 3600


def test_a_constant_rate() -> None:
    expected = 20 * 1000 / 30
    assert abs(len(losses(exponential(FLEET, mtbf_h=30))) - expected) < 4 * math.sqrt(expected)


def renewals(mean_h: float, variance: float, hours: float) -> tuple[float, float]:
    """The expected number of renewals and its variance (Cox 1962, Renewal Theory, section 4.2), for long spans."""
    return hours / mean_h + (variance - mean_h**2) / (2 * mean_h**2), variance * hours / mean_h**3


@pytest.mark.parametrize("shape", [0.5, 0.7, 1.5])
def test_weibull_losses_are_those_of_a_renewal_process(shape: float) -> None:
    variance = 24**2 * (math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1)
    expected, spread = renewals(24, variance, 1000)
    found = len(losses(weibull(FLEET, mtbf_h=24, shape=shape)))
    assert abs(found - 20 * expected) < 4 * math.sqrt(20 * spread)
    assert abs(found - 20 * 1000 / 24) < 20 * 1000 / 24 / 3


@pytest.mark.parametrize(("early", "limit_h"), [(0.45, 24.0), (0.4, 24.0), (0.5, 12.0)])
def test_lives_with_a_limit_follow_their_law(early: float, limit_h: float) -> None:
    made = bathtub(FLEET, early=early, tau1_h=1.5, tau2_h=0.9, limit_h=limit_h)
    # Of the nodes whose whole life fits into the trace.
    lives = [up_s / 3600 for came_s, up_s in lives_s(made) if came_s < made.span_s - 3600 * limit_h and up_s]
    assert len(lives) > 1000
    for hours in (0.5, 1, 4, limit_h / 2, limit_h - 1, limit_h - 1e-3):
        expected = bathtub_cdf(hours, early, 1.5, 0.9, limit_h)
        found = sum(life <= hours for life in lives) / len(lives)
        assert abs(found - expected) < 4 * math.sqrt(expected * (1 - expected) / len(lives)), hours
    assert limit_h - 0.1 < max(lives) < limit_h + 1e-9


def test_bulk_losses_take_a_share_of_one_pool() -> None:
    made = bulk(FLEET, mtbf_h=100, pools=4, bulk_mtbf_h=20, share=0.6)
    sizes = Counter(losses(made))
    expected = 4 * 1000 / 20
    assert set(sizes.values()) == {1, 3}  # of 5 nodes
    assert abs(sum(size == 3 for size in sizes.values()) - expected) < 4 * math.sqrt(expected)
    single = 20 * 1000 / 100
    assert abs(sum(size == 1 for size in sizes.values()) - single) < 4 * math.sqrt(single)
    for time_s in (time_s for time_s, size in sizes.items() if size == 3):
        here = [event for event in made.events if event.time_s == time_s]
        assert len({event.pool for event in here}) == 1
        assert [event.kind for event in here] == [EventKind.REMOVE] * 3 + [EventKind.ADD] * 3


def test_the_rate_changes_with_the_hour() -> None:
    made = losses(diurnal(FLEET, mtbf_h=30, amplitude=0.7, peak_h=18))
    expected = 20 * 1000 / 30
    assert abs(len(made) - expected) < 4 * math.sqrt(expected)
    # The integral of the rate over the 12 hours around the peak.
    share = 0.5 + 0.7 / math.pi
    near = sum(12 <= time_s / 3600 % 24 < 24 for time_s in made) / len(made)
    assert abs(near - share) < 4 * math.sqrt(share * (1 - share) / len(made))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Fleet(0, 5), "nodes=0"),
        (lambda: Fleet(1.5, 5), "nodes=1.5"),  # type: ignore[arg-type]
        (lambda: Fleet(5, math.nan), "hours=nan"),
        (lambda: Fleet(5, 1e9), "hours=1000000000.0"),
        (lambda: Fleet(5, 5, provision_s=-1), "provision_s=-1"),
        (lambda: Fleet(5, 5, crashes=math.inf), "crashes=inf"),
        (lambda: exponential(FLEET, mtbf_h=0), "mtbf_h=0"),
        (lambda: weibull(FLEET, mtbf_h=-1), "mtbf_h=-1"),
        (lambda: weibull(FLEET, shape=11), "shape=11"),
        (lambda: bathtub(FLEET, early=0.6), "early=0.6"),
        (lambda: bathtub(FLEET, limit_h=0), "limit_h=0"),
        (lambda: bulk(FLEET, pools=21), "pools=21"),
        (lambda: bulk(FLEET, share=0), "share=0"),
        (lambda: bulk(FLEET, bulk_mtbf_h=math.nan), "bulk_mtbf_h=nan"),
        (lambda: diurnal(FLEET, amplitude=1.1), "amplitude=1.1"),
        (lambda: diurnal(FLEET, peak_h=25), "peak_h=25"),
    ],
)
def test_a_parameter_that_cannot_be_is_refused_by_name(build: Callable[[], Any], said: str) -> None:
    with pytest.raises(UsageError, match=f"^{said}"):
        build()


def test_a_trace_that_would_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "EVENTS_MAX", 2000)
    with pytest.raises(UsageError, match="more than 2000 events"):
        exponential(FLEET, mtbf_h=0.001)
    # Bulk losses of pools that have no node left.
    with pytest.raises(UsageError, match="more than 2000 events"):
        bulk(Fleet(2, 1000, provision_s=1e9), pools=2, bulk_mtbf_h=0.001)
