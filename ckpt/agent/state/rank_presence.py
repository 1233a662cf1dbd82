"""The ranks of a job as its state machine knows them, and what is asked of all of them at once: pure.

That is asked whenever anything happens, and a job may have thousands of ranks: so the answer is kept until one of them
has changed.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

AGAIN: Final = object()  # as `Member.leave`: it had asked to, and came back by another connection; it asks there again


class Presence(enum.Enum):
    HERE = "here"
    LEFT = "left"
    DEAD = "dead"


@dataclass(slots=True)
class RankState:
    rank: int
    presence: Presence = Presence.HERE
    joined: bool = False
    lost_s: float | None = None  # since when its connection is gone though its process lives
    away: bool = False  # it counts as left because it was lost for long; it may still come back
    leave: Any = None  # a request that waits for what is under way
    broke: bool = False  # it left by an exception: the others wait for it in vain
    insists: bool = False  # where its connection breaks while it waits to leave, it comes back and asks again
    members: RankStates | None = None  # of which it is one

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name != "members" and (members := getattr(self, "members", None)) is not None:
            members.changed()


@dataclass(frozen=True, slots=True)
class Seen:
    """Of all ranks together. `lost`: whose connection is gone; `leaving`: who waits to leave; `any_left`: whether one
    came to its end, and was not only lost for long; `all_gone`: whether every one that ever came is not here any more,
    and one did."""

    lost: tuple[RankState, ...]
    leaving: tuple[RankState, ...]
    all_joined: bool
    any_gone: bool
    any_left: bool
    gone: RankState | None  # the first that is dead, or left by an exception
    any_dead: bool
    all_gone: bool


class RankStates(Sequence[RankState]):
    """By rank."""

    def __init__(self, world: int) -> None:
        self._each = [RankState(rank, members=self) for rank in range(world)]
        self._seen: Seen | None = None

    def __getitem__(self, rank: Any) -> Any:
        return self._each[rank]

    def __len__(self) -> int:
        return len(self._each)

    def changed(self) -> None:
        self._seen = None

    @property
    def seen(self) -> Seen:
        """As they are now."""
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
