"""The fit of a trace: how often its nodes are lost, how many together, and how soon they are back.

Losses of one moment are one bulk loss. All intervals are of 95 %. They treat bulk losses, not nodes, as independent.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from ckpt.errors import UsageError
from ckpt.policy.interval import not_negative
from ckpt.policy.rates import GammaRate
from ckpt.simulate.trace import EventKind, Trace, TraceEvent

HOUR_S = 3600.0
MOMENTS_MIN = 3
LIFE_S_MIN = 1.0  # a shorter life counts as this long: at 0 the likelihood of a Weibull shape below 1 is infinite
SHAPE_MIN, SHAPE_MAX = 0.01, 100.0
Z = 1.959963984540054  # the normal quantile of .975; its square is the chi-square quantile of .95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Fit:
    """What a trace says of its cloud. None: no event tells."""

    name: str
    span_h: float
    node_hours: float
    nodes_max: int  # at one time
    losses: int  # of nodes
    moments: int  # at which nodes were lost
    loss_rate: Estimate  # node losses per node-hour
    job_mtbf_h: Estimate  # hours between moments of loss, of a job on all nodes
    bulk_share: Estimate  # the part of the moments that took two nodes or more
    bulk_nodes: float | None  # nodes that such a moment took, the mean
    uptime_shape: Estimate | None  # the Weibull shape of up-times
    back_s: float | None  # seconds after a loss until the number of nodes is back, the mean
    never_back: int  # moments after which it was not back within the trace
    replaced_s: float | None  # seconds from the loss of a node to the next new node that takes its place, the mean
    crash_rate: Estimate  # trainer crashes per node-hour
    price_node_hour: float | None  # USD


def fit(trace: Trace, window_s: float = 0.0) -> Fit:
    """Estimates rates, shape and delays of a trace.

    `window_s`: losses up to so many seconds after the first of a moment belong to that moment. Nodes that are there at
    the beginning count as new. Formulas:

    - `loss_rate`: the sizes of the moments are weights of Poisson counts; interval of Fay, Feuer 1997 ("Confidence
      intervals for directly standardized rates"). It is exact (Garwood 1936) if every moment took one node.
    - `job_mtbf_h`, `crash_rate`: exact Poisson (Garwood 1936). The time counts while a node is up.
    - `bulk_share`: Wilson 1927.
    - `uptime_shape`: maximum likelihood with right-censored lives; interval by the profile likelihood (Cox, Oakes 1984,
      section 3.3), divided by the design effect sum(size^2) / sum(size), since nodes of one moment are not independent.
    - `replaced_s`: the node that was lost first is replaced first.

    Errors: UsageError if nodes were lost at fewer than three moments.
    """
    moments = _moments(trace, not_negative("window_s", window_s))
    if len(moments) < MOMENTS_MIN:
        raise UsageError(
            f"{trace.name}: too few losses to fit: {len(moments)}; at least {MOMENTS_MIN} at different times are needed"
        )
    usage = _usage(trace)
    if not usage.node_s:
        raise UsageError(f"{trace.name}: no node is up for any time")
    sizes = [len(moment) for moment in moments]
    bulk_sizes = [size for size in sizes if size > 1]
    job = _poisson_rate(len(moments), usage.any_up_s / HOUR_S)
    effect = sum(size * size for size in sizes) / sum(sizes)
    back_s, never_back = _recovery(trace, moments)
    return Fit(
        name=trace.name,
        span_h=trace.span_s / HOUR_S,
        node_hours=usage.node_s / HOUR_S,
        nodes_max=usage.nodes_max,
        losses=sum(sizes),
        moments=len(moments),
        loss_rate=_weighted_rate(sizes, usage.node_s / HOUR_S),
        job_mtbf_h=Estimate(1 / job.value, 1 / job.high, 1 / job.low),
        bulk_share=_wilson(len(bulk_sizes), len(sizes)),
        bulk_nodes=_mean(bulk_sizes),
        uptime_shape=_weibull_shape(*_lives(trace), effect),
        back_s=back_s,
        never_back=never_back,
        replaced_s=_mean(_replacements(trace)),
        crash_rate=_poisson_rate(sum(e.kind is EventKind.CRASH for e in trace.events), usage.node_s / HOUR_S),
        price_node_hour=trace.price_node_hour,
    )


def _moments(trace: Trace, window_s: float) -> list[list[TraceEvent]]:
    found: list[list[TraceEvent]] = []
    for event in trace.events:
        if event.kind is EventKind.REMOVE:
            if not found or event.time_s > found[-1][0].time_s + window_s:
                found.append([])
            found[-1].append(event)
    return found


@dataclass(slots=True)
class _Usage:
    node_s: float = 0.0
    any_up_s: float = 0.0  # at least one node is up
    nodes_max: int = 0


def _usage(trace: Trace) -> _Usage:
    found = _Usage()
    at_s, up = 0.0, 0
    for time_s, nodes in [*_counts(trace), (trace.span_s, 0)]:
        found.node_s += up * (time_s - at_s)
        found.any_up_s += (time_s - at_s) if up else 0.0
        found.nodes_max = max(found.nodes_max, nodes)
        at_s, up = time_s, nodes
    return found


def _counts(trace: Trace) -> list[tuple[float, int]]:
    """The number of nodes after each instant with events."""
    change = {EventKind.ADD: 1, EventKind.REMOVE: -1, EventKind.CRASH: 0}
    found: list[tuple[float, int]] = []
    up = 0
    for time_s, events in groupby(trace.events, key=lambda event: event.time_s):
        up += sum(change[event.kind] for event in events)
        found.append((time_s, up))
    return found


def _poisson_rate(events: int, exposure: float) -> Estimate:
    """Garwood 1936: the bounds are Gamma quantiles."""
    low = GammaRate(events, exposure).quantile(0.025) if events else 0.0
    return Estimate(events / exposure, low, GammaRate(events + 1, exposure).quantile(0.975))


def _weighted_rate(weights: Sequence[int], exposure: float) -> Estimate:
    """Fay, Feuer 1997: Gamma distributions with the mean and the variance of the weighted sum."""
    mean, variance, largest = sum(weights), sum(w * w for w in weights), max(weights)

    def bound(mean: float, variance: float, p: float) -> float:
        return GammaRate(mean * mean / variance, exposure * mean / variance).quantile(p)

    high = bound(mean + largest, variance + largest * largest, 0.975)
    return Estimate(mean / exposure, bound(mean, variance, 0.025), high)


def _wilson(successes: int, trials: int) -> Estimate:
    """Wilson 1927."""
    p, z2 = successes / trials, Z * Z / trials
    centre = (p + z2 / 2) / (1 + z2)
    half = math.sqrt(z2 * (p * (1 - p) + z2 / 4)) / (1 + z2)
    return Estimate(p, max(0.0, centre - half), min(1.0, centre + half))


def _lives(trace: Trace) -> tuple[list[float], list[float]]:
    """Seconds: the lives that ended, and those that the end of the trace cut off."""
    added: dict[str, float] = {}
    ended = []
    for event in trace.events:
        if event.kind is EventKind.ADD:
            added[event.node] = event.time_s
        elif event.kind is EventKind.REMOVE:
            ended.append(max(LIFE_S_MIN, event.time_s - added.pop(event.node)))
    return ended, [max(LIFE_S_MIN, trace.span_s - time_s) for time_s in added.values()]


def _weibull_shape(ended_s: list[float], cut_off_s: list[float], effect: float) -> Estimate | None:
    """The shape that is likeliest, with the scale that is likeliest for each shape. None if it has no maximum within
    .01 to 100: all lives are of one length."""
    longest = max((*ended_s, *cut_off_s))
    # In units of the longest life, so that no power overflows.
    log_all: NDArray[np.float64] = np.log(np.array([*ended_s, *cut_off_s]) / longest)
    count, log_sum = len(ended_s), float(log_all[: len(ended_s)].sum())

    def log_likelihood(shape: float) -> float:
        return count * math.log(shape / float(np.exp(shape * log_all).sum())) + (shape - 1) * log_sum

    def slope(shape: float) -> float:
        powers = np.exp(shape * log_all)
        return count / shape + log_sum - count * float((powers * log_all).sum() / powers.sum())

    if slope(SHAPE_MIN) < 0 or slope(SHAPE_MAX) > 0:
        return None
    best = _root(slope, SHAPE_MIN, SHAPE_MAX)
    least = log_likelihood(best) - effect * Z * Z / 2

    def above(shape: float) -> float:
        return log_likelihood(shape) - least

    low = SHAPE_MIN if above(SHAPE_MIN) > 0 else _root(lambda shape: -above(shape), SHAPE_MIN, best)
    high = SHAPE_MAX if above(SHAPE_MAX) > 0 else _root(above, best, SHAPE_MAX)
    return Estimate(best, low, high)


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Where a function falls through 0, by bisection of the logarithm; to a relative 1e-6."""
    while high > low * (1 + 1e-6):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high


def _recovery(trace: Trace, moments: list[list[TraceEvent]]) -> tuple[float | None, int]:
    """The mean seconds from a moment of loss until as many nodes are up as before it; how often they never are."""
    begins = {moment[0].time_s for moment in moments}
    waiting: list[tuple[int, float]] = []  # nodes before the loss, its time; the fewest nodes first
    waited_s = []
    before = 0
    for time_s, nodes in _counts(trace):
        if time_s in begins:
            heapq.heappush(waiting, (before, time_s))
        while waiting and waiting[0][0] <= nodes:
            waited_s.append(time_s - heapq.heappop(waiting)[1])
        before = nodes
    return _mean(waited_s), len(waiting)


def _replacements(trace: Trace) -> list[float]:
    """Seconds from each loss to the addition that replaces it: the earliest loss is replaced first."""
    lost_s: list[float] = []
    found: list[float] = []
    for event in trace.events:
        if event.kind is EventKind.REMOVE:
            lost_s.append(event.time_s)
        elif event.kind is EventKind.ADD and len(found) < len(lost_s):
            found.append(event.time_s - lost_s[len(found)])
    return found


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
