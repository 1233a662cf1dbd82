"""What nodes hold of a run in memory: sealed arenas, each one rank's snapshot, and what is known of their epochs.

A checkpoint can be had from memory when somebody holds each of its ranks. An arena says by itself whose it is; that its
frames are hashed says that its coordinator saw all ranks stage that tick. The rest is asked for when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt.agent.arena import Arena
from ckpt.agent.candidates import Remembered
from ckpt.errors import AgentError, DamagedData
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.store.lineage import Claim

ARENAS_MAX = 1 << 16  # that one node may say it holds
EPOCHS_MAX = 64

Key = tuple[Identity, int]  # whose snapshot: the checkpoint, and the rank


def sealed(arena: Arena) -> tuple[Key, int] | None:
    """Whose snapshot lies in it, whole, and the world that it is of; None: nothing that is certain."""
    try:
        header = arena.header()
    except DamagedData:
        return None
    return ((header.identity, header.rank), header.world) if arena.hashes() is not None else None


@dataclass(slots=True)
class Inventory:
    """What one node holds, or several together. `claims`: of epochs that got beyond their start. `steps`: how far each
    epoch is known to have come. `worlds`: by checkpoint. `holders`: who has which snapshot; "" is this node."""

    claims: dict[Epoch, Claim] = field(default_factory=dict)
    steps: dict[Epoch, int] = field(default_factory=dict)
    worlds: dict[Identity, int] = field(default_factory=dict)
    holders: dict[Key, list[str]] = field(default_factory=dict)

    def add_epoch(self, claim: Claim | None, epoch: Epoch, step: int) -> None:
        if claim is not None:
            self.claims[epoch] = claim
        self.steps[epoch] = max(step, self.steps.get(epoch, 0))

    def add_arenas(self, arenas: Iterable[Arena], node: str = "") -> None:
        for arena in arenas:
            found = sealed(arena)
            if found is not None:
                self._add(*found, node)

    def add(self, other: Inventory, node: str) -> None:
        """What a node has said of itself."""
        self.claims |= other.claims
        for epoch, step in other.steps.items():
            self.steps[epoch] = max(step, self.steps.get(epoch, 0))
        for key in other.holders:
            self._add(key, other.worlds[key[0]], node)

    def _add(self, key: Key, world: int, node: str) -> None:
        known = self.worlds.setdefault(key[0], world)
        if known == world and key[1] < world and node not in self.holders.setdefault(key, []):
            self.holders[key].append(node)

    def complete(self) -> list[Identity]:
        """The checkpoints of which somebody holds each rank."""
        return sorted(i for i, world in self.worlds.items() if all((i, rank) in self.holders for rank in range(world)))

    def remembered(self) -> list[Remembered]:
        """As candidates for a start."""
        complete = self.complete()
        return [Remembered(c, tuple(i for i in complete if i.epoch == epoch)) for epoch, c in self.claims.items()]

    def by_rank(self, identity: Identity) -> dict[int, list[str]]:
        """Who holds each rank of it, the nearest first."""
        ranks = range(self.worlds[identity])
        return {rank: sorted(self.holders.get((identity, rank), [])) for rank in ranks}

    def forget(self, identity: Identity) -> None:
        """It was not what it was said to be."""
        world = self.worlds.pop(identity, 0)
        for rank in range(world):
            self.holders.pop((identity, rank), None)

    # -- in a message

    def fields(self) -> dict[str, Any]:
        """What this node itself holds."""
        epochs = sorted({*self.claims, *self.steps})[-EPOCHS_MAX:]
        return {
            "epochs": [[str(epoch), self.steps.get(epoch, 0), _told(self.claims.get(epoch))] for epoch in epochs],
            "arenas": [[str(identity), rank, self.worlds[identity]] for identity, rank in sorted(self.holders)],
        }

    @staticmethod
    def parse(fields: Mapping[str, Any]) -> Inventory:
        """Errors: AgentError, UsageError, ValueError, TypeError, LookupError."""
        from ckpt.agent.recovery import claim_told

        found = Inventory()
        if len(fields["epochs"]) > EPOCHS_MAX or len(fields["arenas"]) > ARENAS_MAX:
            raise AgentError("a node says that it holds more than it can")
        for text, step, told in fields["epochs"]:
            epoch = Epoch.parse(str(text))
            found.add_epoch(claim_told(epoch, told) if told is not None else None, epoch, int(step))
        for text, rank, world in fields["arenas"]:
            if not 0 <= int(rank) < int(world):
                raise AgentError(f"a node says that it holds rank {rank} of {world}")
            found._add((Identity.parse(str(text)), int(rank)), int(world), "")
        return found


def _told(claim: Claim | None) -> dict[str, Any] | None:
    """What `claim_told` takes."""
    if claim is None:
        return None
    return {"parent": str(claim.parent) if claim.parent else None, "ancestors": texts(claim), "launch": claim.launch}


def texts(claim: Claim) -> list[list[str | None]]:
    """The ancestors of an epoch, for a message."""
    return [[str(each.epoch), str(each.parent) if each.parent else None] for each in claim.ancestors]
