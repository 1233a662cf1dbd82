"""The fit finds what a trace was made with, and its intervals cover the truth about as often as they say."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest

from ckpt.errors import UsageError
from ckpt.simulate.fit import Estimate, Fit, fit
from ckpt.simulate.generators import Fleet, bulk, weibull
from ckpt.simulate.trace import EventKind, Trace, TraceEvent

SEEDS = 300


def of_counts(*counts: int, gap_s: float = 600, price: float | None = None) -> Trace:
    """A trace with these counts. The nodes that came first go first."""
    events = []
    up: list[str] = []
    added = 0
    for i, (before, after) in enumerate(pairwise((0, *counts))):
        for _ in range(before - after):
            events.append(TraceEvent(i * gap_s, EventKind.REMOVE, up.pop(0)))
        for _ in range(after - before):
            added += 1
            up.append(f"n{added}")
            events.append(TraceEvent(i * gap_s, EventKind.ADD, up[-1]))
    return Trace("counted", len(counts) * gap_s, tuple(events), price)


def near(found: Estimate | None, value: float, low: float, high: float) -> bool:
    assert found
    return (found.value, found.low, found.high) == pytest.approx((value, low, high), rel=1e-3)


def test_what_is_counted_is_counted_right() -> None:
    # Losses of 4, 4, 1 and 6 nodes; the last one is not made good.
    found = fit(of_counts(16, 12, 8, 16, 15, 15, 16, 10, price=1.5))
    assert (found.losses, found.moments, found.nodes_max) == (15, 4, 16)
    assert found.span_h == pytest.approx(8 / 6)
    assert found.node_hours == pytest.approx((16 + 12 + 8 + 16 + 15 + 15 + 16 + 10) / 6)
    assert found.bulk_nodes == pytest.approx(14 / 3)
    assert found.back_s == pytest.approx((1200 + 600 + 1200) / 3)
    assert found.never_back == 1
    # Eight of the first two losses come back at once, after 1200 and 600 s; one more after 1200 s.
    assert found.replaced_s == pytest.approx((4 * 1200 + 4 * 600 + 1200) / 9)
    assert found.price_node_hour == 1.5
    # Wilson's interval for 3 of 4.
    assert near(found.bulk_share, 0.75, 0.3006, 0.9544)
    # Garwood's for 4 events is 1.0899 to 10.2416.
    hours = 8 / 6
    assert near(found.job_mtbf_h, hours / 4, hours / 10.2416, hours / 1.0899)


def test_an_interval_of_single_losses_is_the_exact_one() -> None:
    # Garwood's for 10 events is 4.7954 to 18.3904; for 0 events 0 to 3.6889.
    found = fit(of_counts(*[5, 4] * 10))
    hours = 45 * 2 / 6
    assert found.losses == 10
    assert near(found.loss_rate, 10 / hours, 4.7954 / hours, 18.3904 / hours)
    assert near(found.crash_rate, 0, 0, 3.6889 / hours)
    assert found.bulk_nodes is None


def test_losses_within_the_window_are_one_moment() -> None:
    trace = of_counts(9, 8, 7, 6, 9, 9, 9, 8, 9, 9, 7)
    assert [fit(trace, window).moments for window in (0, 599, 600, 1200)] == [5, 5, 4, 3]
    assert [fit(trace, window).losses for window in (0, 1200)] == [6, 6]


def test_the_likeliest_shape_is_that_of_the_closed_form() -> None:
    """Of two lives of 1 and one of e in all, the slope 3/k + 1 - 3 e^k / (2 + e^k) is 0 at k = 1.9395."""
    lives = {"a": 3600.0, "b": 3600.0, "c": 3600 * math.e}
    ends = [TraceEvent(life_s + i, EventKind.REMOVE, node) for i, (node, life_s) in enumerate(lives.items())]
    begins = [TraceEvent(i, EventKind.ADD, node) for i, node in enumerate(lives)]
    found = fit(Trace("three", 3600 * math.e + 3, tuple(begins + ends)))
    assert found.uptime_shape
    k = found.uptime_shape.value
    assert 3 / k + 1 - 3 * math.exp(k) / (2 + math.exp(k)) == pytest.approx(0, abs=1e-4)


def test_lives_of_one_length_have_no_shape() -> None:
    events = [TraceEvent(100 * i + part, kind, f"n{i}") for i in range(5) for part, kind in ((0, ADD), (100, REMOVE))]
    events.sort(key=lambda event: event.time_s)
    assert fit(Trace("even", 500, tuple(events))).uptime_shape is None


ADD, REMOVE = EventKind.ADD, EventKind.REMOVE


def coverage(
    make: Callable[[int], Trace], find: Callable[[Fit], Estimate | None], truth: float
) -> tuple[float, float, float]:
    """The part of the seeds whose interval covers the truth; the parts whose interval is below and above it."""
    found = [find(fit(make(seed))) for seed in range(SEEDS)]
    below = sum(each is not None and each.high < truth for each in found) / SEEDS
    above = sum(each is not None and each.low > truth for each in found) / SEEDS
    return 1 - below - above, below, above


@pytest.mark.parametrize(
    ("make", "find", "truth", "most"),
    [
        (lambda seed: weibull(Fleet(6, 60, seed), mtbf_h=12, shape=0.6), lambda fit: fit.uptime_shape, 0.6, 0.99),
        # All pools are whole: single losses at 1/48, and 4 of 8 nodes each 24 hours. The interval is a cautious one.
        (
            lambda seed: bulk(Fleet(16, 150, seed, 0), pools=2, mtbf_h=48, bulk_mtbf_h=24, share=0.5),
            lambda fit: fit.loss_rate,
            1 / 48 + 0.5 / 24,
            1.0,
        ),
        (
            lambda seed: bulk(Fleet(16, 150, seed, 0), pools=2, mtbf_h=48, bulk_mtbf_h=24, share=0.5),
            lambda fit: fit.bulk_share,
            (2 / 24) / (2 / 24 + 16 / 48),
            0.99,
        ),
        # All nodes of a pool have lives that end together: without the design effect 59 of 100 would cover it.
        (
            lambda seed: bulk(Fleet(16, 150, seed, 0), pools=2, mtbf_h=48, bulk_mtbf_h=24, share=1),
            lambda fit: fit.uptime_shape,
            1,
            0.99,
        ),
    ],
    ids=["shape .6", "bulk rate", "bulk share", "bulk shape"],
)
def test_an_interval_covers_the_truth_in_95_of_100_traces(
    make: Callable[[int], Trace], find: Callable[[Fit], Estimate | None], truth: float, most: float
) -> None:
    covered, below, above = coverage(make, find, truth)
    assert 0.915 <= covered <= most, (covered, below, above)
    assert max(below, above) < 0.07, (covered, below, above)


@pytest.mark.parametrize("counts", [(0, 0), (4, 4), (4, 3, 3), (4, 0, 4, 0)])
def test_a_trace_of_too_few_losses_says_so(counts: tuple[int, ...]) -> None:
    moments = sum(after < before for before, after in pairwise(counts))
    with pytest.raises(UsageError, match=f"counted: too few losses to fit: {moments}; at least 3"):
        fit(of_counts(*counts))


def test_a_window_that_is_none_and_nodes_that_never_are_up_are_refused() -> None:
    with pytest.raises(UsageError, match="window_s=nan"):
        fit(of_counts(2, 1), math.nan)
    flashes = [TraceEvent(t, kind, f"n{t}") for t in range(3) for kind in (ADD, REMOVE)]
    with pytest.raises(UsageError, match="no node is up"):
        fit(Trace("flash", 3, tuple(flashes)))


def test_nodes_that_are_added_to_a_growing_fleet_replace_none() -> None:
    assert fit(of_counts(4, 3, 9, 8, 9, 8, 8, 9)).replaced_s == pytest.approx((600 + 600 + 1200) / 3)
