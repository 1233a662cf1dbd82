"""The presence of a job's ranks: which are here, have left or are dead, and a summary of all of them. Pure.

Every decision reads the summary, and a job may have thousands of ranks: it is cached until a rank changes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

# Value of `RankState.leave`: the rank asked to leave, then came back on a new connection, where it will ask again.
AGAIN: Final = object()


class Presence(enum.Enum):
    """Whether a rank takes part. A rank that has not joined yet counts as HERE."""

    HERE = "here"
    LEFT = "left"
    DEAD = "dead"


@dataclass(slots=True)
class RankState:
    """What is known of one rank. Setting an attribute invalidates the summary of all ranks."""

    rank: int
    presence: Presence = Presence.HERE
    joined: bool = False
    lost_s: float | None = None  # when its connection ended, if its process lives
    away: bool = False  # LEFT only because its connection was lost for long: it may come back
    leave: Any = None  # its request to leave, not answered yet
    broke: bool = False  # it left by an exception: the others wait in vain
    insists: bool = False  # if its connection breaks while it waits to leave, it comes back and asks again
    members: RankStates | None = None  # the collection it belongs to

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name != "members" and (members := getattr(self, "members", None)) is not None:
            members.changed()


@dataclass(frozen=True, slots=True)
class Seen:
    """The summary of all ranks. `lost`: ranks without a connection. `leaving`: ranks that wait to leave. `any_gone`:
    some rank is not here. `any_left`: some rank left, and is not merely away. `all_gone`: some rank came, and every
    rank that came is gone."""

    lost: tuple[RankState, ...]
    leaving: tuple[RankState, ...]
    all_joined: bool
    any_gone: bool
    any_left: bool
    gone: RankState | None  # the first rank that is dead, or left by an exception
    any_dead: bool
    all_gone: bool


class RankStates:
    """The states of all ranks of a job, by rank."""

    def __init__(self, world: int) -> None:
        self._each = [RankState(rank, members=self) for rank in range(world)]
        self._seen: Seen | None = None

    def __getitem__(self, rank: int) -> RankState:
        return self._each[rank]

    def __iter__(self) -> Iterator[RankState]:
        return iter(self._each)

    def __len__(self) -> int:
        return len(self._each)

    def changed(self) -> None:
        self._seen = None

    @property
    def seen(self) -> Seen:
        """The present summary, cached until a rank changes."""
        if self._seen is None:
            self._seen = _seen(self._each)
        return self._seen


def _seen(members: Sequence[RankState]) -> Seen:
    away = [m for m in members if m.presence is not Presence.HERE]
    came = [m for m in members if m.joined or m.presence is not Presence.HERE]
    return Seen(
        lost=tuple(m for m in members if m.lost_s is not None),
        leaving=tuple(m for m in members if m.leave is not None),
        all_joined=all(m.joined for m in members),
        any_gone=bool(away),
        any_left=any(m.presence is Presence.LEFT and not m.away for m in away),
        gone=next((m for m in members if m.presence is Presence.DEAD or m.broke), None),
        any_dead=any(m.presence is Presence.DEAD for m in away),
        all_gone=bool(came) and len(came) == len(away),
    )
