"""A trace: when the nodes of a cloud come and go, and when a trainer on one of them fails."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EventKind(StrEnum):
    """What happens to one node."""

    ADD = "add"  # the node can be used from now on
    REMOVE = "remove"  # it is gone, with its memory
    CRASH = "crash"  # a trainer on it fails; the node and its memory stay


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One node event, `time_s` seconds after the trace's beginning. `pool`: the zone or capacity pool of the node, ""
    if the trace does not say. Events of one instant that a cloud reported together have the same `time_s`."""

    time_s: float
    kind: EventKind
    node: str
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Node events in order of time over `span_s` seconds.

    A node name is used for one life: ADD, then any number of CRASH, then at most one REMOVE. Nodes that are there at
    the beginning have an ADD at 0. `price_node_hour`: USD for a node and hour, the mean over the span; None: unknown.
    """

    name: str
    span_s: float
    events: tuple[TraceEvent, ...]
    price_node_hour: float | None = None
