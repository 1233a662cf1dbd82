"""The retention rule: which older checkpoint a newer one supersedes. All code that frees memory follows it. Pure.

An older checkpoint may go once it is committed, or once a newer one survives the loss of every node that the older one
survives. Of its own checkpoints a job knows the holders (`Kept`) and the lost agents (`remaining_placement`). For
checkpoints of earlier starts `NewestStart` decides. It keeps two: the one that the present start continued from, and
the newest one known to be replicated or complete on this node. A node that holds a complete one needs no older one: no
loss of other nodes takes it away. The others are assumed to lie on one node each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from ckpt.placement.placement import Kept
from ckpt.types import Epoch, Identity


def remaining_placement(kept: Iterable[Kept], gone: Collection[str]) -> tuple[Kept, ...]:
    """The replication that certainly remains after the agents of the nodes `gone` are lost, with all their replicas.
    Where the holders of a state are unknown, every lost agent counts as one of them."""

    def left(each: Kept) -> Kept:
        holders = tuple(name for name in each.holders if name not in gone)
        lost = len(each.holders) - len(holders) if each.holders else len({*gone} - {each.node})
        return replace(each, losses_max=max(0, each.losses_max - lost), holders=holders)

    return tuple(map(left, kept)) if gone else tuple(kept)


def survives_nodes(kept: Collection[Kept], doomed: Collection[str]) -> bool:
    """Whether the replicas still cover every node's state when the `doomed` nodes are gone. `kept`: per node.
    False if there are no replicas."""

    def stays(each: Kept) -> bool:
        if each.node not in doomed or any(holder not in doomed for holder in each.holders):
            return True
        return not each.holders and each.losses_max >= len(doomed)

    return bool(kept) and all(map(stays, kept))


def surviving_nodes(kept: Iterable[Kept]) -> frozenset[str]:
    """The nodes whose state survives the loss of any one node."""
    return frozenset(each.node for each in kept if each.losses_max)


@dataclass(frozen=True, slots=True)
class NewestStart:
    """The newest start that has begun, and the checkpoint `parent` that it continued from (None: began afresh).
    `replicated`: the newest checkpoint that this node knows to be replicated, or holds completely."""

    epoch: Epoch
    parent: Identity | None
    replicated: Identity | None = None

    def supersedes(self, identity: Identity) -> bool:
        """Whether that checkpoint is of an earlier start and superseded by the one that this start continued from.
        False if this start began afresh, since nothing is known then."""
        if self.parent is None or identity.epoch >= self.epoch:
            return False
        return identity not in (self.parent, self.replicated)

    def supersedes_epoch(self, epoch: Epoch) -> bool:
        """Whether everything that `epoch`, an earlier start, may have left is superseded; see `supersedes`."""
        needed = {each.epoch for each in (self.parent, self.replicated) if each is not None}
        return self.parent is not None and epoch < self.epoch and epoch not in needed
