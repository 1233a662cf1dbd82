"""What holds for every trace, and the lives in one."""

from __future__ import annotations

from ckpt.simulate.trace import EventKind, Trace


def check_trace(trace: Trace) -> None:
    """Asserts what the docstring of Trace says."""
    times_s = [event.time_s for event in trace.events]
    assert times_s == sorted(times_s)
    assert all(0 <= time_s <= trace.span_s for time_s in times_s)
    kinds: dict[str, list[EventKind]] = {}
    for event in trace.events:
        kinds.setdefault(event.node, []).append(event.kind)
    for node, course in kinds.items():
        assert course[0] is EventKind.ADD, node
        assert EventKind.ADD not in course[1:], node
        assert EventKind.REMOVE not in course[:-1], node


def losses(trace: Trace) -> list[float]:
    """When nodes were lost, in seconds."""
    return [event.time_s for event in trace.events if event.kind is EventKind.REMOVE]


def counts(trace: Trace) -> dict[float, int]:
    """The number of nodes after each time."""
    found: dict[float, int] = {}
    up = 0
    for event in trace.events:
        up += (event.kind is EventKind.ADD) - (event.kind is EventKind.REMOVE)
        found[event.time_s] = up
    return found


def lives_s(trace: Trace) -> list[tuple[float, float | None]]:
    """When each node came, and how long it was up; None: until the end of the trace."""
    removed = {event.node: event.time_s for event in trace.events if event.kind is EventKind.REMOVE}
    return [
        (event.time_s, removed[event.node] - event.time_s if event.node in removed else None)
        for event in trace.events
        if event.kind is EventKind.ADD
    ]
