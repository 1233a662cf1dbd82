"""The presence of a job's ranks: which are here, have left or are dead, and a summary of all of them. Pure.

Every decision reads the summary, and a job may have thousands of ranks: it is cached until a rank changes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

# Value of `RankState.leave_request`: the rank asked to leave, then came back on a new connection, where it will ask
# again.
LEAVE_RETRY: Final = object()
# Time for a rank whose connection broke to rejoin: a new agent has to start and connect.
REJOIN_S = 60.0


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
    has_joined: bool = False
    disconnected_s: float | None = None  # when its connection ended, if its process lives
    is_away: bool = False  # LEFT only because its connection was lost for long: it may come back
    leave_request: Any = None  # its request to leave, not answered yet
    has_failed: bool = False  # it left by an exception: the others wait in vain
    can_retry_leave: bool = False  # if its connection breaks while it waits to leave, it comes back and asks again
    members: RankStates | None = None  # the collection it belongs to

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name != "members" and (members := getattr(self, "members", None)) is not None:
            members.invalidate_summary()


@dataclass(frozen=True, slots=True)
class RankSummary:
    """The summary of all ranks. `disconnected`: ranks without a connection. `waiting_to_leave`: ranks that wait to
    leave. `any_gone`: some rank is not here. `any_left`: some rank left, and is not merely away. `all_gone`: some rank
    came, and every rank that came is gone."""

    disconnected: tuple[RankState, ...]
    waiting_to_leave: tuple[RankState, ...]
    all_joined: bool
    any_gone: bool
    any_left: bool
    first_failed: RankState | None  # the first rank that is dead, or left by an exception
    any_dead: bool
    all_gone: bool


class RankStates:
    """The states of all ranks of a job, by rank."""

    def __init__(self, world: int) -> None:
        self._states = [RankState(rank, members=self) for rank in range(world)]
        self._summary: RankSummary | None = None

    def __getitem__(self, rank: int) -> RankState:
        return self._states[rank]

    def __iter__(self) -> Iterator[RankState]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def record_leave_request(self, rank: int, request: Any, in_order: bool = True, insists: bool = False) -> None:
        """The rank asks to leave. `in_order`: it ended its block or was told to leave; else by an exception. Only the
        first call for the rank counts for that. `insists`: if its connection breaks, it comes back for the answer."""
        member = self._states[rank]
        member.leave_request, member.can_retry_leave = request, insists
        if member.presence is Presence.HERE:
            member.presence, member.has_failed = Presence.LEFT, not in_order

    def record_death(self, rank: int) -> None:
        """The rank's process is dead."""
        member = self._states[rank]
        member.leave_request = None
        if member.presence is Presence.HERE or member.is_away:
            member.presence, member.is_away = Presence.DEAD, False

    def record_absences(self, now_s: float, wait_s: float) -> None:
        """Ranks whose connection ended `wait_s` ago or earlier count as away from now on. Each may come back."""
        for member in self.summary.disconnected:
            is_over = member.disconnected_s is not None and now_s >= member.disconnected_s + wait_s
            if is_over and member.presence is Presence.HERE:
                member.presence, member.is_away = Presence.LEFT, True

    def invalidate_summary(self) -> None:
        self._summary = None

    @property
    def summary(self) -> RankSummary:
        """The present summary, cached until a rank changes."""
        if self._summary is None:
            self._summary = _summarize(self._states)
        return self._summary


def _summarize(members: Sequence[RankState]) -> RankSummary:
    away = [m for m in members if m.presence is not Presence.HERE]
    came = [m for m in members if m.has_joined or m.presence is not Presence.HERE]
    return RankSummary(
        disconnected=tuple(m for m in members if m.disconnected_s is not None),
        waiting_to_leave=tuple(m for m in members if m.leave_request is not None),
        all_joined=all(m.has_joined for m in members),
        any_gone=bool(away),
        any_left=any(m.presence is Presence.LEFT and not m.is_away for m in away),
        first_failed=next((m for m in members if m.presence is Presence.DEAD or m.has_failed), None),
        any_dead=any(m.presence is Presence.DEAD for m in away),
        all_gone=bool(came) and len(came) == len(away),
    )
