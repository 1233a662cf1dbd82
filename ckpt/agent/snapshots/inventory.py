"""What nodes hold of a run in memory: sealed arenas, each one rank's snapshot, parities of them, and what is known of
their epochs.

A checkpoint can be had from memory when somebody holds each of its ranks, or when those that nobody holds can be made
again from parity. An arena says by itself whose it is; that its
frames are hashed says that its coordinator saw all ranks stage that tick. The rest is asked for when it is needed.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt.agent.snapshots.candidates import Remembered
from ckpt.errors import AgentError, DamagedData
from ckpt.format.parity import Row
from ckpt.ipc.arena import Arena
from ckpt.ipc.bounded_msgpack import unpacked
from ckpt.ipc.control_page import WORLD_MAX
from ckpt.placement.rebuild import Striped, protected, rebuildable
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.snapshots.described import ParityChunk
    from ckpt.store.lineage import Claim

ARENAS_MAX = 1 << 16  # that one node may say it holds
EPOCHS_MAX = 64

Key = tuple[Identity, int]  # whose snapshot: the checkpoint, and the rank


def whose(arena: Arena) -> tuple[Key, int] | None:
    """Whose snapshot lies in it, whole, and the world that it is of; None: there is none. Whether the other ranks have
    staged the same is not known by it."""
    try:
        header = arena.header()
    except DamagedData:
        return None
    return (header.identity, header.rank), header.world


def sealed(arena: Arena) -> tuple[Key, int] | None:
    """The same, of a checkpoint that all ranks were seen to stage."""
    found = whose(arena)
    return found if found is not None and arena.hashes() is not None else None


@dataclass(slots=True)
class Inventory:
    """What one node holds, or several together. `claims`: of epochs that got beyond their start. `steps`: how far each
    epoch is known to have come. `worlds`: by checkpoint. `holders`: who has which snapshot; "" is this node.
    `parities`: which of them are held of a stripe, and by whom. `sizes`: bytes of the snapshots that they are of.
    `unfit`: who has which snapshot damaged. `refuted`: checkpoints that could not be put together as a whole."""

    claims: dict[Epoch, Claim] = field(default_factory=dict)
    steps: dict[Epoch, int] = field(default_factory=dict)
    worlds: dict[Identity, int] = field(default_factory=dict)
    holders: dict[Key, list[str]] = field(default_factory=dict)
    parities: dict[Identity, dict[Striped, dict[int, set[str]]]] = field(default_factory=dict)
    sizes: dict[Key, int] = field(default_factory=dict)
    unfit: dict[Key, set[str]] = field(default_factory=dict)
    refuted: set[Identity] = field(default_factory=set)

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
        for identity, stripes in other.parities.items():
            for striped, rows in stripes.items():
                sizes = {rank: other.sizes[identity, rank] for rank in striped.ranks}
                self._add_parity(identity, other.worlds[identity], striped, rows, sizes, node)

    def hold(self, identity: Identity, world: int, ranks: Iterable[int]) -> None:
        """This node has their snapshots."""
        for rank in ranks:
            self._add((identity, rank), world, "")

    def _add(self, key: Key, world: int, node: str) -> None:
        if world > WORLD_MAX:
            return  # no job has so many: whoever says so has it wrong
        known = self.worlds.setdefault(key[0], world)
        if known == world and key[1] < world and node not in self.holders.setdefault(key, []):
            self.holders[key].append(node)

    def add_chunks(self, chunks: Iterable[ParityChunk]) -> None:
        for chunk in chunks:
            name = chunk.name
            sizes = {rank: each.staged_bytes for rank, each in chunk.snapshots.items()}
            self._add_parity(name.identity, chunk.world, name.striped, {int(name.row)}, sizes)

    def _add_parity(
        self,
        identity: Identity,
        world: int,
        striped: Striped,
        rows: Iterable[int],
        sizes: Mapping[int, int],
        node: str = "",
    ) -> None:
        if world > WORLD_MAX:
            return
        known = self.worlds.setdefault(identity, world)
        if known == world and max(striped.ranks) < world:
            held = self.parities.setdefault(identity, {}).setdefault(striped, {})
            for row in rows:
                held.setdefault(int(row), set()).add(node)
            for rank, size in sizes.items():
                self.sizes.setdefault((identity, rank), size)

    def missing(self, identity: Identity) -> list[int]:
        """The ranks of it that nobody holds."""
        return [rank for rank in range(self.worlds[identity]) if not self.holders.get((identity, rank))]

    def complete(self) -> list[Identity]:
        """The checkpoints of which somebody holds each rank, or that can be made complete."""
        return sorted(identity for identity in self.worlds if self._can_be_had(identity))

    def _can_be_had(self, identity: Identity) -> bool:
        missing = self.missing(identity)
        return identity not in self.refuted and (not missing or len(self.makeable(identity)) == len(missing))

    def makeable(self, identity: Identity) -> dict[int, int]:
        """The ranks of it that nobody holds and that can be made again from parity, with the bytes that each staged."""
        missing = self.missing(identity)
        sizes = {rank: self.sizes[identity, rank] for rank in missing if (identity, rank) in self.sizes}
        return {rank: sizes[rank] for rank in sorted(rebuildable(missing, sizes, self.parities.get(identity, {})))}

    def protected(self, identity: Identity, losses: int) -> frozenset[int]:
        """Ranks of it whose snapshots any so many nodes may be lost of, by parity alone."""
        ranks = range(self.worlds.get(identity, 0))
        holders = {rank: self.holders.get((identity, rank), []) for rank in ranks}
        sizes = {rank: self.sizes[identity, rank] for rank in ranks if (identity, rank) in self.sizes}
        return protected(holders, sizes, self.parities.get(identity, {}), losses)

    def of_epoch(self, epoch: Epoch) -> Inventory:
        """What it says of that epoch's checkpoints."""
        found = Inventory()
        found.worlds = {identity: world for identity, world in self.worlds.items() if identity.epoch == epoch}
        found.holders = {key: list(names) for key, names in self.holders.items() if key[0].epoch == epoch}
        found.parities = {identity: rows for identity, rows in self.parities.items() if identity.epoch == epoch}
        found.sizes = {key: size for key, size in self.sizes.items() if key[0].epoch == epoch}
        return found

    def without(self, identity: Identity, rank: int) -> None:
        """Nobody of those who hold that rank of it has it in one piece."""
        self.unfit.setdefault((identity, rank), set()).update(self.holders.pop((identity, rank), []))

    def made(self, identity: Identity, rank: int, node: str) -> None:
        """It was made again there."""
        self._add((identity, rank), self.worlds[identity], node)

    def remembered(self) -> list[Remembered]:
        """As candidates for a start."""
        held: dict[Epoch, list[Identity]] = {epoch: [] for epoch in self.claims}
        for identity in self.complete():
            held.setdefault(identity.epoch, []).append(identity)
        return [Remembered(self.claims.get(epoch), tuple(theirs)) for epoch, theirs in held.items()]

    def incomplete(self) -> dict[Identity, list[int]]:
        """The checkpoints of which somebody holds a part and nobody can have the rest: which ranks' that is."""
        partly = sorted(self.worlds.keys() - self.complete())
        return {identity: missing for identity in partly if (missing := self.missing(identity))}

    def by_rank(self, identity: Identity) -> dict[int, list[str]]:
        """Who holds each rank of it, the nearest first; of the others another one first for each rank, so that not one
        of them has to give all."""
        ranks = range(self.worlds[identity])
        return {rank: spread(self.holders.get((identity, rank), []), rank) for rank in ranks}

    def refute(self, identity: Identity) -> None:
        """As a whole it was not what it was said to be. What is held of it may still be a part of what the store
        has."""
        self.refuted.add(identity)

    # -- in a message

    def fields(self) -> dict[str, Any]:
        """What this node itself holds."""
        epochs = sorted({*self.claims, *self.steps})[-EPOCHS_MAX:]
        return {
            "epochs": [[str(epoch), self.steps.get(epoch, 0), _told(self.claims.get(epoch))] for epoch in epochs],
            "arenas": [[str(identity), rank, self.worlds[identity]] for identity, rank in sorted(self.holders)],
            "parities": [
                [
                    str(identity),
                    self.worlds[identity],
                    sorted(rows),
                    striped.length,
                    striped.rows(),
                    [[rank, self.sizes[identity, rank]] for rank in sorted(striped.ranks)],
                ]
                for identity, stripes in self.parities.items()
                for striped, rows in stripes.items()
            ],
        }

    @staticmethod
    def unpack(blob: bytes) -> Inventory:
        """What another node's agent has packed of its `fields`. Errors: as `parse`."""
        return Inventory.parse(unpacked(blob, "what a node says it holds"))

    @staticmethod
    def parse(fields: Mapping[str, Any]) -> Inventory:
        """Errors: AgentError, UsageError, ValueError, TypeError, LookupError."""
        from ckpt.agent.snapshots.inventory import claim_told

        found = Inventory()
        told_parities = fields.get("parities", [])
        if max(len(fields["arenas"]), len(told_parities)) > ARENAS_MAX or len(fields["epochs"]) > EPOCHS_MAX:
            raise AgentError("a node says that it holds more than it can")
        for text, step, told in fields["epochs"]:
            epoch = Epoch.parse(str(text))
            found.add_epoch(claim_told(epoch, told) if told is not None else None, epoch, int(step))
        for text, rank, world in fields["arenas"]:
            if not 0 <= int(rank) < int(world) <= WORLD_MAX:
                raise AgentError(f"a node says that it holds rank {rank} of {world}")
            found._add((Identity.parse(str(text)), int(rank)), int(world), "")
        for text, world, rows, length, sources, sizes in told_parities:
            striped, told_sizes = Striped.of(length, sources), {int(rank): int(size) for rank, size in sizes}
            if not striped.ranks <= told_sizes.keys() or not set(rows) <= set(Row) or int(world) > WORLD_MAX:
                raise AgentError("a node says of its parity what cannot be")
            found._add_parity(Identity.parse(str(text)), int(world), striped, rows, told_sizes)
        return found


def spread(holders: Iterable[str], turn: int) -> list[str]:
    """The order in which they are asked: this node, if it is one of them, then the others, by name, from the `turn`th
    on."""
    names = sorted(holders)
    others = [name for name in names if name]
    first = turn % len(others) if others else 0
    return [*names[: len(names) - len(others)], *others[first:], *others[:first]]


def _told(claim: Claim | None) -> dict[str, Any] | None:
    """What `claim_told` takes."""
    if claim is None:
        return None
    return {"parent": str(claim.parent) if claim.parent else None, "ancestors": texts(claim), "launch": claim.launch}


def texts(claim: Claim) -> list[list[str | None]]:
    """The ancestors of an epoch, for a message."""
    return [[str(each.epoch), str(each.parent) if each.parent else None] for each in claim.ancestors]


def claim_told(epoch: Epoch, fields: Mapping[str, Any]) -> Claim:
    """What a rank that joins says of its epoch. Errors: UsageError, ValueError, TypeError."""
    from ckpt.store.lineage import Ancestor, Claim

    def identity(text: Any) -> Identity | None:
        return None if text is None else Identity.parse(str(text))

    ancestors = tuple(Ancestor(Epoch.parse(str(each)), identity(parent)) for each, parent in fields["ancestors"])
    launch, host = str(fields["launch"])[:200], socket.gethostname()[:200]
    return Claim(epoch, identity(fields["parent"]), ancestors, launch, host, time.time())
