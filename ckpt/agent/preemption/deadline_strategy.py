"""The strategy before a deadline: which way of saving the last state fits into the time left. Pure.

The time left is compared with measured save times, scaled up for a state that has grown; see docs/guides/notices.md.
Replication comes before the commit only if the commit may not fit. The nodes that stay then commit for the others.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ckpt.placement.placement import Kept

SLACK = 1.5  # factor on measured save times
# A deadline that is past when first heard of may come at any moment: it is assumed to be so far ahead.
PAST_S = 10.0
# A machine and its notice may outlast the deadline by so long.
OUTLIVES_S = 60.0


class Course(enum.Enum):
    """What the job does about the standing notices."""

    STAY = "stay"  # there is no notice, or time is left
    HOLD = "hold"  # a last snapshot is due or appointed, and is committed
    REPLICATE = "copy"  # as HOLD, but nodes that stay get replicas first, and commit the snapshot
    COMMIT_NEWEST = "push"  # the newest complete checkpoint is saved; no newer one is taken
    DEADLINE_PASSED = "over"  # the deadline has passed and the machine is still here: training goes on


class ExitTiming(enum.Enum):
    """When a job leaves by a certain notice."""

    AT_ONCE = "at once"  # the notice is a request to leave now
    IN_TIME = "in time"  # the job leaves no earlier than it has to
    # The job does not leave: a launcher restarted it here after it had left by this notice, or the deadline has passed
    # and the machine is still here.
    NOT_AGAIN = "not again"


@dataclass(frozen=True, slots=True)
class SaveTiming:
    """A measured save: `seconds` for a state of `state_bytes` of memory."""

    seconds: float
    state_bytes: int

    def estimate_s(self, count: int) -> float:
        """The expected seconds for `count` bytes. A larger state takes proportionally longer. A smaller one takes as
        long, since part of the time does not depend on the size."""
        return self.seconds * max(1.0, count / self.state_bytes) if self.state_bytes else self.seconds

    @staticmethod
    def from_save(took_s: float, count: int, before: SaveTiming | None) -> SaveTiming:
        """The new estimate after a save of `count` bytes took `took_s`. It rises at once, and falls by half steps."""
        before_s = before.estimate_s(count) if before is not None else 0.0
        return SaveTiming(max(took_s, 0.5 * (took_s + before_s)), count)


def choose_course(left_s: float, commit_s: float, copy_s: float | None, pushes: bool) -> Course:
    """The course once it is time to leave: HOLD, COPY or PUSH.

    `commit_s`: seconds until a snapshot appointed now is committed. `copy_s`: seconds until nodes that stay have its
    replicas; None if no node stays, or nothing was measured. `pushes`: whether a complete checkpoint is not committed
    yet, and would be lost with the machine."""
    if copy_s is not None and copy_s <= left_s < SLACK * commit_s and copy_s < commit_s:
        return Course.REPLICATE
    return Course.COMMIT_NEWEST if pushes and left_s < commit_s else Course.HOLD


def survives_nodes(kept: Sequence[Kept], doomed: Collection[str]) -> bool:
    """Whether the replicas still cover every node's state when the `doomed` nodes are gone. `kept`: per node.
    False if there are no replicas."""

    def stays(each: Kept) -> bool:
        if each.node not in doomed or any(holder not in doomed for holder in each.holders):
            return True
        return not each.holders and each.losses_max >= len(doomed)

    return bool(kept) and all(map(stays, kept))
