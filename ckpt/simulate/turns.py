"""What has added up in a simulated run, and what two turns of training are compared by."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields

from ckpt.simulate.memory import Home, SavedState
from ckpt.simulate.saves import Observation

# Decimals of a second in which two turns agree.
SAME = 6


@dataclass(slots=True)
class Books:
    """What has added up so far. `useful_s`: of the present branch."""

    useful_s: float = 0.0
    stalled_s: float = 0.0
    snapshots: int = 0
    commits: int = 0
    replications: int = 0
    bytes_in: float = 0.0
    puts: int = 0


BOOKS = tuple(each.name for each in fields(Books))
TurnState = tuple[Hashable, ...]  # relative to the turn's beginning


@dataclass(frozen=True, slots=True)
class TurnBegin:
    """What had added up at the beginning of a turn. `seen`: how often each measurement had been made."""

    time_s: float
    steps: int
    ordinal: int
    books: Books
    seen: dict[Observation, int]


def relative_to(useful_s: float, ordinal: int, home: Home | None, saved: SavedState | None) -> Hashable:
    """A saved state as seen from the present; None: there is none."""
    if saved is None:
        return None
    age = round(useful_s - saved.useful_s, SAME), ordinal - saved.ordinal
    return age, saved.home is home, saved.is_replicated
