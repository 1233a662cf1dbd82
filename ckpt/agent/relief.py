"""Memory that is given back while the machine, or our control group, runs out of it. Pure.

What ckpt takes is planned before the first save (`memory.plan`), and other processes may grow after that. Then goes, in
this order and no more than is missing: pages that are only kept warm for the next copies; copies and parity of
checkpoints of earlier starts, the oldest first; and what earlier starts themselves have left here, the oldest first.
Of earlier starts nothing goes that the present one went on from, and of the others only what it did not go on from, or
what a newer start outdoes. A job's own slots stay, and so does the only complete checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.types import Epoch, Identity

PERIOD_S = 5.0  # between looks
RESERVE_PARTS = 50  # so much of the memory is left to others: less, and the kernel begins to look for whom to end


@dataclass(frozen=True, slots=True)
class Begun:
    """The newest start that has begun, and what it went on from."""

    epoch: Epoch
    parent: Identity | None

    def outdates(self, identity: Identity) -> bool:
        """Whether it is of an earlier start, and not what this one went on from: then that was complete. Of one that
        began afresh that is not known."""
        return self.parent is not None and identity.epoch < self.epoch and identity != self.parent


@dataclass(frozen=True, slots=True)
class Held:
    """What one start holds: so many bytes, `idle`: that nobody is at work on. `complete`: a checkpoint of it is whole,
    and on several nodes is as safe as was asked for, or in the store: what only lies here is gone with one of them."""

    epoch: Epoch
    bytes: int
    complete: bool
    idle: bool


def missing_bytes(free_bytes: int, total_bytes: int) -> int:
    """Until the reserve is there again."""
    return max(0, total_bytes // RESERVE_PARTS - free_bytes)


def which_go(held: Sequence[Held], missing: int, begun: Begun | None = None) -> list[Epoch]:
    """Of several starts, the newest last, which are given up to free so many bytes, or as many as there are. `begun`:
    the one that goes on now, where it is known."""
    gone: list[Epoch] = []
    parent = begun.parent if begun is not None else None
    for at, each in enumerate(held):
        if missing <= 0:
            break
        outdated = begun is not None and parent is not None and each.epoch < begun.epoch
        outdone = outdated or any(newer.complete for newer in held[at + 1 :])
        if each.idle and outdone and (parent is None or each.epoch != parent.epoch):
            gone.append(each.epoch)
            missing -= each.bytes
    return gone
