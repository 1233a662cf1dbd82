"""Which checkpoint may be given up for which: the one rule that everything follows by which memory is freed. Pure.

An older checkpoint goes once a newer one is known that is at least as safe. What is in the store needs no memory; what
other nodes keep as a whole goes for nothing that they keep a part of, or that lies on one node each and is gone with
any of them. This is said of a job's own checkpoints by `Facts.safety`, and of what earlier starts have left by `Begun`:
of these only what was said to be safe is taken to be more than lies on one node each, as what a start went on from is
at least. So is what a node has all of itself, and it needs nothing older: whatever is lost without it, it has that.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ckpt.types import Epoch, Identity


class Safety(enum.IntEnum):
    """Of a checkpoint, the least first."""

    NOTHING = 0  # it is not complete
    HERE = 1  # each node has what its own ranks staged
    PART = 2  # other nodes keep some of it, or may have lost some
    WHOLE = 3  # they keep each node's part
    STORE = 4


def may_go(older: Safety, newer: Safety) -> bool:
    """Whether a checkpoint as safe as that may be given up, where a newer one is so safe."""
    return older is Safety.STORE or newer >= older


@dataclass(frozen=True, slots=True)
class Begun:
    """The newest start that has begun, and what it went on from. `safe`: the newest checkpoint that this node was told
    to be safe in other nodes' memory, or has all of itself."""

    epoch: Epoch
    parent: Identity | None
    safe: Identity | None = None

    def outdates(self, identity: Identity) -> bool:
        """Whether it is of an earlier start, and may go for what this one went on from, which was complete then. Of one
        that began afresh that is not known."""
        if self.parent is None or identity.epoch >= self.epoch or identity == self.parent:
            return False
        return may_go(Safety.WHOLE if identity == self.safe else Safety.HERE, Safety.HERE)

    def outdates_all_of(self, epoch: Epoch) -> bool:
        """The same of all that an earlier start may have left."""
        needed = {each.epoch for each in (self.parent, self.safe) if each is not None}
        return self.parent is not None and epoch < self.epoch and epoch not in needed
