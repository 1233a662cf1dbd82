"""Which checkpoint may be given up for which: the one rule that everything follows by which memory is freed. Pure.

An older checkpoint goes once it is in the store, which needs no memory, or a newer one outlives the loss of every node
that it outlives. A job knows that of its own checkpoints: by who keeps copies of them (`Kept`), and whose agents are
lost since (`left_of`). Of what earlier starts have left `Begun` says it: of these only what was said to be safe is
taken to be more than lies on one node each, as what a start went on from is at least. So is what a node has all of
itself, and it needs nothing older: whatever is lost without it, it has that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from ckpt.placement.placement import Kept
from ckpt.types import Epoch, Identity


def left_of(kept: Iterable[Kept], gone: Collection[str]) -> tuple[Kept, ...]:
    """What is there of it for certain, once the agents of the nodes `gone` are lost, and what they kept for others with
    them. Where it is not known who keeps it each of them did."""

    def left(each: Kept) -> Kept:
        holders = tuple(name for name in each.holders if name not in gone)
        lost = len(each.holders) - len(holders) if each.holders else len({*gone} - {each.node})
        return replace(each, losses=max(0, each.losses - lost), holders=holders)

    return tuple(map(left, kept))


def outlived(kept: Iterable[Kept]) -> frozenset[str]:
    """The nodes of which any one may be lost."""
    return frozenset(each.node for each in kept if each.losses)


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
        if self.parent is None or identity.epoch >= self.epoch:
            return False
        return identity not in (self.parent, self.safe)

    def outdates_all_of(self, epoch: Epoch) -> bool:
        """The same of all that an earlier start may have left."""
        needed = {each.epoch for each in (self.parent, self.safe) if each is not None}
        return self.parent is not None and epoch < self.epoch and epoch not in needed
