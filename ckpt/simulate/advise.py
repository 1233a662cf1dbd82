"""Advice: what a run's own measurements say of other settings.

The run's records hold its costs (`about["costs"]`) and its failure rates (`about["learnt"]`). From these a scenario and
traces are made: nodes lost at the measured rate, all of them at once at the rate of such losses, and trainer crashes.
Every setting runs through the same traces. A setting of ckpt.Adaptive is taken with the intervals that it would choose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt.errors import UsageError
from ckpt.placement.placement import ONE_REPLICA, Parity, Replicas
from ckpt.policy.adaptive import Adaptive
from ckpt.policy.failures import Failure
from ckpt.policy.history import recall
from ckpt.policy.interval_solver import decide
from ckpt.policy.known import Measurements
from ckpt.policy.save_options import Every
from ckpt.simulate.engine import simulate
from ckpt.simulate.generators import Fleet, bulk
from ckpt.simulate.outcome import RunOutcome
from ckpt.simulate.scenario import LocalLevel, PeerLevel, Scenario, StoreLevel
from ckpt.simulate.trace import Trace

HOUR_S = 3600.0
MONTH_H = 730.0
SEEDS = (0, 1, 2)
# A commit whose time is not measured is taken to go at this speed, for each node.
WRITE_BYTES_S = 500e6
RESTART_S = 90.0  # from a failure until training goes on, restore excluded, if none was measured
MEASURED_MAX = 1e15
COSTS = (
    *("stall_s", "commit_s", "commit_bytes", "replication_s", "step_s", "step_beside_commit_s"),
    *("local_recovery_s", "peer_recovery_s", "store_recovery_s", "nodes", "local_s", "snapshots"),
    *("every_steps", "every_s", "replicas", "data", "parity"),
)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a run measured. `costs`: by the names COSTS, without those that were not measured. `learnt`: its failures.
    `state_bytes`: of one checkpoint; `stored_bytes`: what the newest one wrote."""

    costs: Mapping[str, float]
    learnt: Measurements
    state_bytes: float
    stored_bytes: float

    @property
    def nodes(self) -> int:
        return max(1, int(self.costs.get("nodes", 1)))

    @property
    def step_s(self) -> float:
        return self.costs["step_s"]


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to run the job. `change`: what to change in the script; "" for the present way."""

    change: str
    policy: Every | Adaptive
    peers: Replicas | Parity | None


@dataclass(frozen=True, slots=True)
class Advice:
    """What a setting comes to, as the mean of the traces. `overhead`: wall time / useful time - 1. `saved_h`: hours of
    wall time that it saves in a month against the present one; `saved_usd`: the same in USD, its store traffic
    included, None without a price of nodes. `store_gb_h`: GB (10^9 bytes) written to the store per hour."""

    setting: Setting
    overhead: float
    saved_h: float
    saved_usd: float | None
    store_gb_h: float


def facts_of(about: Mapping[str, Any], state_bytes: int, stored_bytes: int) -> RunFacts:
    """The facts in the record of a checkpoint. Errors: UsageError if it lacks what the simulation needs."""
    given = about.get("costs")
    if not isinstance(given, dict):
        raise UsageError("the newest checkpoint holds no measured costs; it was saved by an older version of ckpt")
    costs = {
        name: float(value)
        for name in COSTS
        if isinstance(value := given.get(name), int | float)
        and not isinstance(value, bool)
        and 0 <= value <= MEASURED_MAX
    }
    missing = [name for name in ("step_s", "stall_s") if not costs.get(name)]
    if missing or costs.get("nodes", 1) < 1:
        raise UsageError(
            f"the run has not measured {' and '.join(missing) or 'its nodes'} yet; ask again after its next checkpoints"
        )
    return RunFacts(costs, recall(about.get("learnt")).measurements, float(state_bytes), float(stored_bytes))


def present_setting(facts: RunFacts) -> Setting:
    """How the run saves now."""
    costs = facts.costs
    policy: Every | Adaptive = Adaptive()
    if costs.get("every_steps", 0) >= 1:
        policy = Every(steps=int(costs["every_steps"]))
    elif costs.get("every_s", 0) > 0:
        policy = Every(seconds=costs["every_s"])
    peers: Replicas | Parity | None = None
    if facts.nodes > 1 and costs.get("replicas", 0) >= 1:
        peers = Replicas(int(costs["replicas"]))
    elif facts.nodes > 1 and costs.get("data", 0) >= 1 and costs.get("parity", 0) >= 1:
        peers = Parity(int(costs["data"]), int(costs["parity"]))
    return Setting("", policy, peers)


def other_settings(facts: RunFacts) -> Iterator[Setting]:
    """The settings worth a try: one change each, and then both."""
    now = present_setting(facts)
    if not isinstance(now.policy, Adaptive):
        yield replace(now, change="policy=ckpt.Adaptive()", policy=Adaptive())
    if facts.nodes > 1:
        for text, peers in (("ckpt.Replicas(1)", ONE_REPLICA), ("ckpt.Replicas(2)", Replicas(2))):
            if peers != now.peers and (peers.n < facts.nodes):
                yield Setting(f"peers={text}", now.policy, peers)
                if not isinstance(now.policy, Adaptive):
                    yield Setting(f"policy=ckpt.Adaptive(), peers={text}", Adaptive(), peers)


def advise(facts: RunFacts, node_usd_hour: float | None = None, hours: float = MONTH_H) -> list[Advice]:
    """The present setting first, then the others, the one that saves most first."""
    traces = [_make_trace(facts, seed, hours) for seed in SEEDS]
    now = present_setting(facts)
    found = []
    for setting in (now, *other_settings(facts)):
        scenario = make_scenario(facts, setting, node_usd_hour)
        found.append((setting, [simulate(scenario, trace, seed) for seed, trace in zip(SEEDS, traces, strict=True)]))
    advice = [_compare(setting, outcomes, found[0][1], node_usd_hour) for setting, outcomes in found]
    return [advice[0], *sorted(advice[1:], key=lambda each: -each.saved_h)]


def _compare(
    setting: Setting, outcomes: Sequence[RunOutcome], now: Sequence[RunOutcome], node_usd_hour: float | None
) -> Advice:
    overhead, before = _overhead(outcomes), _overhead(now)
    # Useful hours of a month as it is; the other setting makes them in less time.
    useful_h = MONTH_H / (1 + before)
    saved_h = useful_h * (before - overhead)
    saved_usd = None
    if node_usd_hour is not None:
        nodes = math.fsum(each.node_hours for each in now) / math.fsum(each.wall_s / HOUR_S for each in now)
        store = [math.fsum(each.store_usd / each.useful_s for each in runs) / len(runs) for runs in (now, outcomes)]
        saved_usd = saved_h * nodes * node_usd_hour + (store[0] - store[1]) * useful_h * HOUR_S
    traffic = math.fsum(each.store_bytes_in for each in outcomes) / math.fsum(each.wall_s for each in outcomes)
    return Advice(setting, overhead, saved_h, saved_usd, traffic * HOUR_S / 1e9)


def _overhead(outcomes: Sequence[RunOutcome]) -> float:
    useful_s = math.fsum(each.useful_s for each in outcomes)
    return math.fsum(each.wall_s for each in outcomes) / useful_s - 1 if useful_s else math.inf


def make_scenario(facts: RunFacts, setting: Setting, node_usd_hour: float | None) -> Scenario:
    """The scenario of a run with that setting."""
    costs, nodes = facts.costs, facts.nodes
    policy, commit_every = _fixed(facts, setting)
    stored = facts.stored_bytes or facts.state_bytes
    commit_s = costs.get("commit_s") or stored / nodes / WRITE_BYTES_S
    slowdown = max(0.0, 1 - facts.step_s / costs["step_beside_commit_s"]) if costs.get("step_beside_commit_s") else 0.0
    peers = None
    if setting.peers is not None:
        made = PeerLevel(setting.peers)
        if costs.get("replication_s"):
            known = present_setting(facts).peers
            sent = PeerLevel(known).copies if known is not None else 1
            made = PeerLevel(setting.peers, sent * facts.state_bytes / nodes / costs["replication_s"])
        peers = made
    return Scenario(
        nodes=nodes,
        nodes_min=1,
        step_s=facts.step_s,
        state_bytes=facts.state_bytes,
        detect_s=0.0,
        gang_start_s=costs.get("local_recovery_s", RESTART_S),
        local=LocalLevel(stall_s=costs["stall_s"]),
        peers=peers,
        store=StoreLevel(
            write_bytes_s=stored / nodes / max(commit_s, 1e-3),
            ratio=stored / facts.state_bytes,
            slowdown=min(slowdown, 0.5),
        ),
        policy=policy,
        commit_every=commit_every,
        node_usd_hour=node_usd_hour,
    )


def _fixed(facts: RunFacts, setting: Setting) -> tuple[Every, int]:
    """The policy with fixed intervals: those that ckpt.Adaptive chooses by what was measured."""
    if isinstance(setting.policy, Every):
        return setting.policy, 1
    known, costs = facts.learnt, facts.costs
    known = known.with_stall(costs["stall_s"]).with_stall(costs["stall_s"])
    known = known.with_steps(1, facts.step_s)
    if costs.get("commit_s"):
        known = known.with_commit(costs["commit_s"], costs.get("commit_bytes", facts.stored_bytes))
    if costs.get("step_beside_commit_s"):
        known = known.with_steps_beside_commit(1, costs["step_beside_commit_s"])
    if costs.get("replication_s") and setting.peers is not None:
        known = known.with_replication(costs["replication_s"])
    chosen = decide(known, setting.policy, facts.nodes, setting.peers is not None)
    return Every(seconds=chosen.local_s), chosen.snapshots


def _make_trace(facts: RunFacts, seed: int, hours: float) -> Trace:
    """Nodes lost one by one and all at once, and crashes, at the rates that the run learnt."""

    def rate(failure: Failure) -> float:
        return facts.learnt.rate_of(failure).current_rate.mean

    per_node_s = rate(Failure.NODE) + rate(Failure.PREEMPTION)
    fleet = Fleet(facts.nodes, hours, seed, crashes=rate(Failure.PROCESS) * HOUR_S / facts.nodes)
    return bulk(
        fleet,
        mtbf_h=1 / (per_node_s * HOUR_S),
        pools=1,
        bulk_mtbf_h=1 / (rate(Failure.JOB) * HOUR_S),
        share=1.0,
    )
