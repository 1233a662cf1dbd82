"""Generators of traces: a fleet whose nodes are lost by a known law and replaced.

Each takes a `Fleet` and the law's own parameters, and gives the same trace for the same seed. All nodes are new at time
0. A lost node is replaced after a delay of provisioning, drawn from an exponential distribution. So the fleet holds its
number of nodes, but for those on their way. Nodes are named in the order in which they come.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random

from ckpt.errors import UsageError
from ckpt.policy.interval import not_negative, positive, within
from ckpt.simulate.trace import EventKind, Trace, TraceEvent

HOUR_S = 3600.0
NODES_MAX = 100_000
HOURS_MAX = 10 * 365.25 * 24  # ten years
EVENTS_MAX = 1_000_000  # also those that come to nothing: the end of a node that a bulk loss took before

# The life in seconds of a node that comes at that time.
DrawLife = Callable[[Random, float], float]


@dataclass(frozen=True, slots=True)
class Fleet:
    """What all generators need. `nodes`: the number wanted. `hours`: the length of the trace. `provision_s`: the mean
    seconds until a lost node is replaced. `crashes`: trainer crashes per node-hour. The crashes do not change the
    losses of the same seed. Errors: UsageError."""

    nodes: int
    hours: float
    seed: int = 0
    provision_s: float = 120.0
    crashes: float = 0.0

    def __post_init__(self) -> None:
        if self.nodes != int(within("nodes", self.nodes, 1, NODES_MAX)):
            raise UsageError(f"nodes={self.nodes}: a whole number")
        within("hours", positive("hours", self.hours), 0, HOURS_MAX)
        not_negative("provision_s", self.provision_s)
        not_negative("crashes", self.crashes)


def exponential(fleet: Fleet, *, mtbf_h: float = 24.0) -> Trace:
    """Nodes are lost at a constant rate, independently. `mtbf_h`: the mean hours that a node is up."""
    scale_s = HOUR_S * positive("mtbf_h", mtbf_h)
    return _generate("exponential", fleet, lambda rng, _: rng.expovariate(1 / scale_s))


def weibull(fleet: Fleet, *, mtbf_h: float = 24.0, shape: float = 0.7) -> Trace:
    """Up-times follow a Weibull distribution (Weibull 1951), independently. `mtbf_h`: their mean in hours; `shape`: .1
    to 10, below 1 if most nodes are lost young."""
    mean_s = HOUR_S * positive("mtbf_h", mtbf_h)
    scale_s = mean_s / math.gamma(1 + 1 / within("shape", shape, 0.1, 10))
    return _generate("weibull", fleet, lambda rng, _: rng.weibullvariate(scale_s, shape))


def bathtub(
    fleet: Fleet, *, early: float = 0.45, tau1_h: float = 1.0, tau2_h: float = 0.8, limit_h: float = 24.0
) -> Trace:
    """Up-times of virtual machines with a limit of life, such as Google's preemptible ones: many are lost in the first
    hours, few then, and the rest at the limit.

    F(t) = A (1 - e^(-t / tau1) + e^((t - b) / tau2)) up to the limit, where all that are left are lost (Kadupitiya,
    Jadhao, Sharma 2020, "Modeling the temporally constrained preemptions of transient cloud VMs", HPDC). `early`: A, 0
    to .5; `tau1_h`, `tau2_h`: hours; `limit_h`: b, which is also the limit. That paper fits A of about .4 to .5, tau1
    of about an hour, tau2 of about .8 h and b of about 24 h.
    """
    within("early", early, 0, 0.5)
    positive("tau1_h", tau1_h)
    positive("tau2_h", tau2_h)
    positive("limit_h", limit_h)

    def draw(rng: Random, _: float) -> float:
        p, low, high = rng.random(), 0.0, limit_h
        # For a p that the law does not reach before the limit, the upper bound stays there.
        while high - low > 1e-9 * limit_h:
            middle = (low + high) / 2
            is_below = bathtub_cdf(middle, early, tau1_h, tau2_h, limit_h) < p
            low, high = (middle, high) if is_below else (low, middle)
        return HOUR_S * high

    return _generate("bathtub", fleet, draw)


def bathtub_cdf(uptime_h: float, early: float, tau1_h: float, tau2_h: float, limit_h: float) -> float:
    """F of `bathtub`, for up-times up to the limit: at the limit, the part of the nodes that are lost before it."""
    return early * (-math.expm1(-uptime_h / tau1_h) + math.exp((uptime_h - limit_h) / tau2_h))


def bulk(fleet: Fleet, *, mtbf_h: float = 48.0, pools: int = 4, bulk_mtbf_h: float = 24.0, share: float = 0.5) -> Trace:
    """Nodes are lost at a constant rate, and pools lose many nodes at one instant. Nodes take turns to belong to one of
    so many `pools`, and are replaced in their pool. Each pool has a bulk loss every `bulk_mtbf_h` hours on average, at
    a constant rate. It takes the `share` of the pool's nodes, rounded, at least one. `mtbf_h`: as in `exponential`."""
    scale_s = HOUR_S * positive("mtbf_h", mtbf_h)
    if pools != int(within("pools", pools, 1, fleet.nodes)):
        raise UsageError(f"pools={pools}: a whole number")
    positive("bulk_mtbf_h", bulk_mtbf_h)
    positive("share", within("share", share, 0, 1))
    return _generate(
        "bulk", fleet, lambda rng, _: rng.expovariate(1 / scale_s), _Bulk(pools, HOUR_S * bulk_mtbf_h, share)
    )


def diurnal(fleet: Fleet, *, mtbf_h: float = 24.0, amplitude: float = 0.8, peak_h: float = 15.0) -> Trace:
    """Nodes are lost at a rate that changes with the hour of the day, independently. The trace begins at hour 0.

    The rate is (1 + amplitude cos(2 pi (hour - peak_h) / 24)) / mtbf_h. `amplitude`: 0 to 1; `peak_h`: the hour of the
    highest rate, 0 to 24. Lives are drawn by thinning (Lewis, Shedler 1979).
    """
    scale_s = HOUR_S * positive("mtbf_h", mtbf_h)
    within("amplitude", amplitude, 0, 1)
    within("peak_h", peak_h, 0, 24)
    highest = (1 + amplitude) / scale_s

    def draw(rng: Random, came_s: float) -> float:
        at_s = came_s
        while True:
            at_s += rng.expovariate(highest)
            rate = (1 + amplitude * math.cos(2 * math.pi * (at_s / HOUR_S - peak_h) / 24)) / scale_s
            if rng.random() * highest < rate:
                return at_s - came_s

    return _generate("diurnal", fleet, draw)


GENERATORS: Mapping[str, Callable[..., Trace]] = {
    "exponential": exponential,
    "weibull": weibull,
    "bathtub": bathtub,
    "bulk": bulk,
    "diurnal": diurnal,
}


@dataclass(frozen=True, slots=True)
class _Bulk:
    pools: int
    mtbf_s: float
    share: float


def _generate(name: str, fleet: Fleet, draw_life: DrawLife, bulk_losses: _Bulk | None = None) -> Trace:
    span_s = HOUR_S * fleet.hours
    return Trace(name, span_s, tuple(_Course(fleet, draw_life, bulk_losses).events(span_s)))


class _Course:
    """The fleet over time: a queue of what happens next."""

    def __init__(self, fleet: Fleet, draw_life: DrawLife, bulk_losses: _Bulk | None) -> None:
        self._fleet = fleet
        self._draw_life = draw_life
        self._bulk = bulk_losses
        self._rng = Random(fleet.seed)
        self._crash_rng = Random(f"crashes {fleet.seed}")
        self._pools: list[dict[str, None]] = [{} for _ in range(bulk_losses.pools if bulk_losses else 1)]
        self._queue: list[tuple[float, int, EventKind | None, int, str]] = []  # time, order, what, pool, node
        self._queued = self._added = 0

    def events(self, span_s: float) -> Iterator[TraceEvent]:
        """The events in order, before the end of the span."""
        for i in range(self._fleet.nodes):
            self._put(0.0, EventKind.ADD, i % len(self._pools))
        if self._bulk:
            for pool in range(len(self._pools)):
                self._put_bulk(0.0, pool)
        while self._queue and self._queue[0][0] < span_s:
            now_s, _, kind, pool, node = heapq.heappop(self._queue)
            match kind:
                case EventKind.ADD:
                    yield self._add(now_s, pool)
                case EventKind.REMOVE if node in self._pools[pool]:
                    yield self._remove(now_s, pool, node)
                case EventKind.CRASH if node in self._pools[pool]:
                    self._put_crash(now_s, pool, node)
                    yield self._event(now_s, kind, pool, node)
                case None:
                    self._put_bulk(now_s, pool)
                    for each in self._chosen(pool):
                        yield self._remove(now_s, pool, each)

    def _add(self, now_s: float, pool: int) -> TraceEvent:
        self._added += 1
        node = f"node-{self._added}"
        self._pools[pool][node] = None
        self._put(now_s + self._draw_life(self._rng, now_s), EventKind.REMOVE, pool, node)
        if self._fleet.crashes:
            self._put_crash(now_s, pool, node)
        return self._event(now_s, EventKind.ADD, pool, node)

    def _remove(self, now_s: float, pool: int, node: str) -> TraceEvent:
        del self._pools[pool][node]
        delay_s = self._rng.expovariate(1 / self._fleet.provision_s) if self._fleet.provision_s else 0.0
        self._put(now_s + delay_s, EventKind.ADD, pool)
        return self._event(now_s, EventKind.REMOVE, pool, node)

    def _chosen(self, pool: int) -> list[str]:
        """The nodes that a bulk loss of this pool takes."""
        nodes = list(self._pools[pool])
        assert self._bulk
        return self._rng.sample(nodes, min(len(nodes), max(1, round(self._bulk.share * len(nodes)))))

    def _put(self, at_s: float, kind: EventKind | None, pool: int, node: str = "") -> None:
        # What was queued first comes first, of one instant.
        self._queued += 1
        if self._queued > EVENTS_MAX:
            raise UsageError(
                f"more than {EVENTS_MAX} events: give fewer nodes or hours, or longer times between losses"
            )
        heapq.heappush(self._queue, (at_s, self._queued, kind, pool, node))

    def _put_bulk(self, now_s: float, pool: int) -> None:
        assert self._bulk
        self._put(now_s + self._rng.expovariate(1 / self._bulk.mtbf_s), None, pool)

    def _put_crash(self, now_s: float, pool: int, node: str) -> None:
        self._put(now_s + self._crash_rng.expovariate(self._fleet.crashes / HOUR_S), EventKind.CRASH, pool, node)

    def _event(self, now_s: float, kind: EventKind, pool: int, node: str) -> TraceEvent:
        return TraceEvent(now_s, kind, node, f"pool-{pool + 1}" if self._bulk else "")
