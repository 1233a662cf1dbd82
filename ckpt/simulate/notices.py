"""The notices of a simulated run: which removals of a trace are announced, when, and which announcements are false."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ckpt.simulate.scenario import NoticeModel
from ckpt.simulate.trace import EventKind, Trace


@dataclass(frozen=True, slots=True, order=True)
class SimulatedNotice:
    """At `time_s` the cloud says that `node` goes at `deadline_s`. It may be wrong."""

    time_s: float
    node: str
    deadline_s: float


def draw_notices(model: NoticeModel, trace: Trace, seed: int) -> list[SimulatedNotice]:
    """All notices, in order of time. A lead is cut off at the node's beginning. The same seed gives the same leads and
    the same luck for each node, whatever the recall."""
    if not model.recall and not model.false_node_hour:
        return []
    found = []
    began_s: dict[str, float] = {}
    rng = random.Random(f"notices {seed}")

    def lead_s(rng: random.Random) -> float:
        return rng.expovariate(1 / model.lead_s) if model.exponential and model.lead_s else model.lead_s

    def false_alarms(node: str, until_s: float) -> None:
        own, now_s = random.Random(f"false {seed} {node}"), began_s[node]
        while model.false_node_hour and (now_s := now_s + own.expovariate(model.false_node_hour / 3600)) < until_s:
            found.append(SimulatedNotice(now_s, node, now_s + lead_s(own)))

    for event in trace.events:
        if event.kind is EventKind.ADD:
            began_s[event.node] = event.time_s
        elif event.kind is EventKind.REMOVE:
            luck, ahead_s = rng.random(), lead_s(rng)
            if luck < model.recall:
                at_s = max(began_s[event.node], event.time_s - ahead_s)
                found.append(SimulatedNotice(at_s, event.node, event.time_s))
            false_alarms(event.node, event.time_s)
            del began_s[event.node]
    for node in began_s:
        false_alarms(node, trace.span_s)
    return sorted(found)
