"""Which planned event of a cloud may begin at once, since nothing is lost by it any more. Pure.

To say so can only shorten the time that is left, and counts for every machine that the event names. So it is said after
all else: the ranks have left by a notice, what they staged last is in the store, and each was told so; of an event that
still stands then and is still ahead; by one of the nodes that heard it; once; and only where the user lets it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt.agent.preemption.preemption import StandingNotice

SOURCES = frozenset({"azure"})  # that know such a word


@dataclass(frozen=True, slots=True, order=True)
class PlannedEvent:
    """An event, by the names that its source gives it."""

    source: str
    key: str


def next_of(
    standing: Iterable[StandingNotice], done: Collection[PlannedEvent], now_s: float
) -> tuple[PlannedEvent, str] | None:
    """What is to be acknowledged next, and by which node: the coordinator's own ("") where that heard it, else the one
    whose agent has the lowest name. `done`: what was tried before. None: nothing is left."""
    found: dict[PlannedEvent, set[str]] = {}
    for each in standing:
        if each.source in SOURCES and each.certain and each.deadline_s > now_s:
            for node in each.nodes:
                found.setdefault(PlannedEvent(each.source, each.bare_key), set()).add(node)
    left = sorted((planned, min(nodes)) for planned, nodes in found.items() if planned not in done)
    return left[0] if left else None
