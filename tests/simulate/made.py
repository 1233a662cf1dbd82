"""Traces and scenarios for the tests of the engine, made here so that no generator is needed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ckpt.policy import Every
from ckpt.simulate.engine import SimulatedJob
from ckpt.simulate.outcome import RunOutcome
from ckpt.simulate.scenario import LocalLevel, PeerLevel, Scenario, StoreLevel
from ckpt.simulate.trace import EventKind, Trace, TraceEvent

HOUR = 3600.0
FAST = 1e30  # bytes per second: takes no time
STATE = 1e9

ADD, REMOVE, CRASH = EventKind.ADD, EventKind.REMOVE, EventKind.CRASH
Happening = tuple[float, EventKind, str]


def trace(nodes: int, *happenings: Happening, span_s: float = 10_000.0, pools: int = 1) -> Trace:
    """Nodes n0, n1, ... from the beginning, each in the next of the pools, and what happens then."""
    first = [TraceEvent(0.0, ADD, f"n{i}", f"pool {i % pools}") for i in range(nodes)]
    then = [TraceEvent(time_s, kind, node, "pool 0") for time_s, kind, node in happenings]
    return Trace("made", span_s, (*first, *sorted(then, key=lambda each: each.time_s)))


def scenario(**changes: Any) -> Scenario:
    """A small job with round numbers: a step takes 1 s, a snapshot every 100 steps stalls 2 s, each is committed within
    40 s. Replication takes 5 s. A recovery takes 10 s of detection and 20 s of gang start, and 3, 5 or 8 s of restore
    from this host, a peer or the store."""
    nodes = changes.get("nodes", 4)
    share = STATE / nodes
    made: dict[str, Any] = {
        "nodes": nodes,
        "nodes_min": 1,
        "step_s": 1.0,
        "state_bytes": STATE,
        "detect_s": 10.0,
        "gang_start_s": 20.0,
        "local": LocalLevel(stall_s=2.0, restore_bytes_s=share / 3),
        "peers": PeerLevel(link_bytes_s=share / 5),
        "store": StoreLevel(write_bytes_s=share / 40, read_bytes_s=share / 8, slowdown=0.0),
        "policy": Every(steps=100),
    }
    return Scenario(**(made | changes))


def run(made: Scenario, on: Trace, seed: int = 0, jumps: bool = True) -> RunOutcome:
    return SimulatedJob(made, on, seed, jumps).run()


def poisson_crashes(seed: int, span_s: float, mtbf_s: float, nodes: int = 2) -> Trace:
    rng, found, now_s = random.Random(f"crashes {seed}"), list[Happening](), 0.0
    while (now_s := now_s + rng.expovariate(1 / mtbf_s)) < span_s:
        found.append((now_s, CRASH, f"n{rng.randrange(nodes)}"))
    return trace(nodes, *found, span_s=span_s)


def classes_of_failures(
    seed: int, failures: int, memory_h: float, store_h: float, memory_s: float, store_s: float, nodes: int = 4
) -> Trace:
    """Exponential failures, none of which strikes in recovery: half of those that memory survives are crashes, half
    losses of one node; the others take all nodes. A lost node is replaced at once. Rates per hour; seconds of a
    recovery."""
    rng, found, now_s = random.Random(f"classes {seed}"), list[Happening](), memory_s
    live, made = [f"n{i}" for i in range(nodes)], nodes
    for _ in range(failures):
        now_s += rng.expovariate((memory_h + store_h) / HOUR)
        if rng.random() < store_h / (memory_h + store_h):
            gone = list(range(nodes))
        else:
            gone = [rng.randrange(nodes)] if rng.random() < 0.5 else []
            if not gone:
                found.append((now_s, CRASH, rng.choice(live)))
        for i in gone:
            found.append((now_s, REMOVE, live[i]))
            live[i], made = f"n{made}", made + 1
            found.append((now_s, ADD, live[i]))
        now_s += store_s if len(gone) == nodes else memory_s
    return trace(nodes, *found, span_s=now_s)


def announced_losses(seed: int, failures: int, mtbf_s: float, recovery_s: float, nodes: int = 2) -> Trace:
    """Exponential losses of one node, which is replaced at once. None strikes in recovery."""
    rng, found, now_s = random.Random(f"losses {seed}"), list[Happening](), recovery_s
    live, made = [f"n{i}" for i in range(nodes)], nodes
    for _ in range(failures):
        now_s += rng.expovariate(1 / mtbf_s)
        i = rng.randrange(nodes)
        found.append((now_s, REMOVE, live[i]))
        live[i], made = f"n{made}", made + 1
        found.append((now_s, ADD, live[i]))
        now_s += recovery_s
    return trace(nodes, *found, span_s=now_s)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    mean = sum(values) / len(values)
    return mean, (sum((each - mean) ** 2 for each in values) / (len(values) - 1) / len(values)) ** 0.5
