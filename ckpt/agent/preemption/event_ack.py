"""The choice of a cloud's planned event to acknowledge: the event may begin at once, since nothing is lost by it. Pure.

An acknowledgement can only shorten the time left, for every machine that the event names. So it comes last: the ranks
have left by a notice, their last snapshot is committed, and each rank was told so. The event must still stand and lie
ahead. One node that heard the event acknowledges it, once, and only if the user allows it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ckpt.agent.preemption.notice_relay import StandingNotice

SOURCES = frozenset({"azure"})  # notice sources that take an acknowledgement


@dataclass(frozen=True, slots=True, order=True)
class PlannedEvent:
    """The name of an event: its source, and the source's key for it."""

    source: str
    key: str


def next_event(
    standing: Iterable[StandingNotice], done: Collection[PlannedEvent], now_s: float
) -> tuple[PlannedEvent, str] | None:
    """The event to acknowledge next, and the node that does it: the coordinator's ("") if it heard the event, else the
    one with the lowest agent name. `done`: events already tried. None: no event is left."""
    found: dict[PlannedEvent, set[str]] = {}
    for each in standing:
        if each.source in SOURCES and each.certain and each.deadline_s > now_s:
            for node in each.nodes:
                found.setdefault(PlannedEvent(each.source, each.source_key), set()).add(node)
    left = sorted((planned, min(nodes)) for planned, nodes in found.items() if planned not in done)
    return left[0] if left else None
