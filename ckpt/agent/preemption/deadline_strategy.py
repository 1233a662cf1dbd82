"""What a job does about the end of its machines: which of the ways to save what it has fits into the time left. Pure.

What is left is compared with what was measured, as docs/guides/notices.md says; for a state that has grown since then
that is more by as much. Copying comes before committing only where the commit may not fit: the nodes that stay then
commit what the others have staged.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ckpt.placement.placement import Kept

SLACK = 1.5  # times the seconds that saving took so far
PAST_S = 10.0  # a deadline that has passed when it is told may come at any moment: so long it is taken to be ahead
OUTLIVES_S = 60.0  # a machine may be there so long after it was to go, and its notice with it


class Course(enum.Enum):
    STAY = "stay"  # nothing stands, or there is time
    HOLD = "hold"  # the last appointment is due: to be made, or kept; it is committed
    COPY = "copy"  # the same, but first it goes to the memory of nodes that stay, and those commit it
    PUSH = "push"  # what is complete goes where it can, nothing newer is taken
    OVER = "over"  # the deadline has passed, and the machine is still here: training goes on


class When(enum.Enum):
    """How a job answers a certain notice."""

    AT_ONCE = "at once"  # it is a request to go now
    IN_TIME = "in time"  # no earlier than it has to
    # A start has left by it, and a launcher started the job again all the same; or its time has come before, and the
    # machine is still here.
    NOT_AGAIN = "not again"


@dataclass(frozen=True, slots=True)
class SaveTiming:
    """Saving a state that takes so many bytes of memory took so many seconds."""

    seconds: float
    bytes: int

    def seconds_of(self, count: int) -> float:
        """As much more for a larger one; no less for a smaller one, since not all of it goes with the bytes."""
        return self.seconds * max(1.0, count / self.bytes) if self.bytes else self.seconds

    @staticmethod
    def learnt(took_s: float, count: int, before: SaveTiming | None) -> SaveTiming:
        """A slow one is remembered for longer than a quick one."""
        before_s = before.seconds_of(count) if before is not None else 0.0
        return SaveTiming(max(took_s, 0.5 * (took_s + before_s)), count)


def choose(left_s: float, commit_s: float, copy_s: float | None, pushes: bool) -> Course:
    """Once it is time to leave: HOLD, COPY or PUSH.

    `commit_s`, `copy_s`: from now until a snapshot that is appointed now is in the store; in the memory of nodes that
    stay, None where there are none, or that was never measured. `pushes`: whether a complete one is there that is not
    in the store yet, and goes with the machine."""
    if copy_s is not None and copy_s <= left_s < SLACK * commit_s and copy_s < commit_s:
        return Course.COPY
    return Course.PUSH if pushes and left_s < commit_s else Course.HOLD


def outlasts(kept: Sequence[Kept], doomed: Collection[str]) -> bool:
    """Whether what other nodes keep is still whole when those nodes are gone. `kept`: of each node. False where nothing
    is kept."""

    def stays(each: Kept) -> bool:
        if each.node not in doomed or any(holder not in doomed for holder in each.holders):
            return True
        return not each.holders and each.losses >= len(doomed)

    return bool(kept) and all(map(stays, kept))
