"""The inventory of a run in memory: which nodes hold which snapshots and parity chunks, and what they know of epochs.

A checkpoint is available from memory if some node holds each rank's snapshot, or parity can rebuild the missing ones.
An arena's header names its identity and rank. Frame hashes in an arena prove that the coordinator saw all ranks stage
that version; such an arena is called sealed. Manifests are requested only when needed; see restore/manifest_request.py.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt.agent.snapshots.candidates import MemoryEpoch
from ckpt.agent.snapshots.described import ARENA_BYTES_MAX
from ckpt.errors import AgentError, DamagedData
from ckpt.format.parity import Row
from ckpt.ipc.arena import Arena
from ckpt.ipc.bounded_msgpack import unpack_bounded
from ckpt.ipc.control_page import WORLD_MAX
from ckpt.placement.rebuild import Striped, protected_ranks, rebuildable_ranks
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.snapshots.described import ParityChunk
    from ckpt.store.lineage import Claim

ARENAS_MAX = 1 << 16  # that one node may list
EPOCHS_MAX = 64

Key = tuple[Identity, int]  # a snapshot: its checkpoint and rank


def find_snapshot(arena: Arena) -> tuple[Key, int] | None:
    """The complete snapshot in an arena, and its world size; None: there is none. The other ranks need not have staged
    that version."""
    try:
        header = arena.header()
    except DamagedData:
        return None
    return (header.identity, header.rank), header.world


def find_sealed_snapshot(arena: Arena) -> tuple[Key, int] | None:
    """As `find_snapshot`, only if all ranks were seen to stage that version."""
    found = find_snapshot(arena)
    return found if found is not None and arena.hashes() is not None else None


@dataclass(slots=True)
class Inventory:
    """What one node or several nodes hold. Nodes go by agent name; "" is this node.

    `claims`: of epochs that got beyond their start. `steps`: the newest known step of each epoch. `world_sizes`: world
    size by checkpoint. `holders`: the nodes with each snapshot. `arena_bytes`: of each snapshot. `parity_holders`: by
    checkpoint and stripe, the nodes with each row. `snapshot_bytes`: staged bytes of the snapshots that parity covers.
    `damaged_holders`: the nodes with a damaged copy of a snapshot. `unusable_checkpoints`: those that could not be put
    together. `announced_replicated`: the newest checkpoint that the node was told is replicated."""

    claims: dict[Epoch, Claim] = field(default_factory=dict)
    steps: dict[Epoch, int] = field(default_factory=dict)
    world_sizes: dict[Identity, int] = field(default_factory=dict)
    holders: dict[Key, list[str]] = field(default_factory=dict)
    arena_bytes: dict[Key, int] = field(default_factory=dict)
    parity_holders: dict[Identity, dict[Striped, dict[int, set[str]]]] = field(default_factory=dict)
    snapshot_bytes: dict[Key, int] = field(default_factory=dict)
    damaged_holders: dict[Key, set[str]] = field(default_factory=dict)
    unusable_checkpoints: set[Identity] = field(default_factory=set)
    announced_replicated: Identity | None = None

    def add_epoch(self, claim: Claim | None, epoch: Epoch, step: int) -> None:
        """Adds an epoch that is known to have come to `step`."""
        if claim is not None:
            self.claims[epoch] = claim
        self.steps[epoch] = max(step, self.steps.get(epoch, 0))

    def add_arenas(self, arenas: Iterable[Arena], node: str = "") -> None:
        """Adds the snapshots of the sealed arenas among these."""
        for arena in arenas:
            found = find_sealed_snapshot(arena)
            if found is not None:
                self._add_snapshot(*found, node, arena.size_bytes)

    def merge(self, other: Inventory, node: str) -> None:
        """Adds what another node reported of itself, but for `announced_replicated`."""
        self.claims |= other.claims
        for epoch, step in other.steps.items():
            self.steps[epoch] = max(step, self.steps.get(epoch, 0))
        for key in other.holders:
            self._add_snapshot(key, other.world_sizes[key[0]], node, other.arena_bytes.get(key, 0))
        for identity, stripes in other.parity_holders.items():
            for striped, rows in stripes.items():
                sizes = {rank: other.snapshot_bytes[identity, rank] for rank in striped.ranks}
                self._add_parity(identity, other.world_sizes[identity], striped, rows, sizes, node)

    def add_local_snapshots(self, identity: Identity, world: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._add_snapshot((identity, rank), world, "")

    def _add_snapshot(self, key: Key, world: int, node: str, size: int = 0) -> None:
        if world > WORLD_MAX:
            return  # a false report: no job has so many ranks
        known = self.world_sizes.setdefault(key[0], world)
        if known == world and key[1] < world and node not in self.holders.setdefault(key, []):
            self.holders[key].append(node)
            self.arena_bytes[key] = max(size, self.arena_bytes.get(key, 0))

    def add_chunks(self, chunks: Iterable[ParityChunk]) -> None:
        for chunk in chunks:
            name = chunk.name
            sizes = {rank: each.staged_bytes for rank, each in chunk.snapshots.items()}
            self._add_parity(name.identity, chunk.world, name.stripe, {int(name.row)}, sizes)

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
        known = self.world_sizes.setdefault(identity, world)
        if known == world and max(striped.ranks) < world:
            held = self.parity_holders.setdefault(identity, {}).setdefault(striped, {})
            for row in rows:
                held.setdefault(int(row), set()).add(node)
            for rank, size in sizes.items():
                self.snapshot_bytes.setdefault((identity, rank), size)

    def missing_ranks(self, identity: Identity) -> list[int]:
        return [rank for rank in range(self.world_sizes[identity]) if not self.holders.get((identity, rank))]

    def complete_checkpoints(self) -> list[Identity]:
        """The checkpoints available from memory: each rank is held, or can be rebuilt from parity."""
        return sorted(identity for identity in self.world_sizes if self._is_available(identity))

    def _is_available(self, identity: Identity) -> bool:
        missing = self.missing_ranks(identity)
        return identity not in self.unusable_checkpoints and (
            not missing or len(self.rebuildable_ranks(identity)) == len(missing)
        )

    def rebuildable_ranks(self, identity: Identity) -> dict[int, int]:
        """The missing ranks that parity can rebuild, with the bytes that each staged."""
        missing = self.missing_ranks(identity)
        sizes = {
            rank: self.snapshot_bytes[identity, rank] for rank in missing if (identity, rank) in self.snapshot_bytes
        }
        return {
            rank: sizes[rank]
            for rank in sorted(rebuildable_ranks(missing, sizes, self.parity_holders.get(identity, {})))
        }

    def parity_protected_ranks(self, identity: Identity, losses: int) -> frozenset[int]:
        """The ranks whose snapshots survive the loss of any `losses` nodes by parity alone."""
        ranks = range(self.world_sizes.get(identity, 0))
        holders = {rank: self.holders.get((identity, rank), []) for rank in ranks}
        sizes = {rank: self.snapshot_bytes[identity, rank] for rank in ranks if (identity, rank) in self.snapshot_bytes}
        return protected_ranks(holders, sizes, self.parity_holders.get(identity, {}), losses)

    def filter_epoch(self, epoch: Epoch) -> Inventory:
        """The part of this inventory about that epoch's checkpoints."""
        found = Inventory()
        found.world_sizes = {identity: world for identity, world in self.world_sizes.items() if identity.epoch == epoch}
        found.holders = {key: list(names) for key, names in self.holders.items() if key[0].epoch == epoch}
        found.parity_holders = {
            identity: rows for identity, rows in self.parity_holders.items() if identity.epoch == epoch
        }
        found.snapshot_bytes = {key: size for key, size in self.snapshot_bytes.items() if key[0].epoch == epoch}
        told = self.announced_replicated
        found.announced_replicated = told if told is not None and told.epoch == epoch else None
        return found

    def mark_damaged(self, identity: Identity, rank: int) -> None:
        """Marks that snapshot as damaged on all of its present holders."""
        self.damaged_holders.setdefault((identity, rank), set()).update(self.holders.pop((identity, rank), []))

    def add_rebuilt(self, identity: Identity, rank: int, node: str) -> None:
        self._add_snapshot((identity, rank), self.world_sizes[identity], node)

    def epochs_in_memory(self) -> list[MemoryEpoch]:
        """The epochs and complete checkpoints, as input of `candidates`."""
        held: dict[Epoch, list[Identity]] = {epoch: [] for epoch in self.claims}
        for identity in self.complete_checkpoints():
            held.setdefault(identity.epoch, []).append(identity)
        return [MemoryEpoch(self.claims.get(epoch), tuple(theirs)) for epoch, theirs in held.items()]

    def incomplete_checkpoints(self) -> dict[Identity, list[int]]:
        """The checkpoints that are only partly available, with the ranks that no node holds."""
        partly = sorted(self.world_sizes.keys() - self.complete_checkpoints())
        return {identity: missing for identity in partly if (missing := self.missing_ranks(identity))}

    def holders_by_rank(self, identity: Identity) -> dict[int, list[str]]:
        """The holders of each rank's snapshot, this node first. The order of the others varies by rank, so that they
        share the load."""
        ranks = range(self.world_sizes[identity])
        return {rank: order_holders(self.holders.get((identity, rank), []), rank) for rank in ranks}

    def mark_unusable(self, identity: Identity) -> None:
        """Marks a checkpoint as unusable as a whole. Its frames may still serve a restore of the same identity from the
        store."""
        self.unusable_checkpoints.add(identity)

    # -- messages

    def fields(self) -> dict[str, Any]:
        """This inventory as message fields, without the holders: all of it must be on this node."""
        epochs = sorted({*self.claims, *self.steps})[-EPOCHS_MAX:]
        return {
            "epochs": [
                [str(epoch), self.steps.get(epoch, 0), _claim_fields(self.claims.get(epoch))] for epoch in epochs
            ],
            "arenas": [
                [str(key[0]), key[1], self.world_sizes[key[0]], self.arena_bytes.get(key, 0)]
                for key in sorted(self.holders)
            ],
            "parities": [
                [
                    str(identity),
                    self.world_sizes[identity],
                    sorted(rows),
                    striped.length,
                    striped.source_rows(),
                    [[rank, self.snapshot_bytes[identity, rank]] for rank in sorted(striped.ranks)],
                ]
                for identity, stripes in self.parity_holders.items()
                for striped, rows in stripes.items()
            ],
            "replicated": str(self.announced_replicated) if self.announced_replicated is not None else None,
        }

    @staticmethod
    def unpack(blob: bytes) -> Inventory:
        """The inventory in packed `fields` from another agent. Errors: as `parse`."""
        return Inventory.parse(unpack_bounded(blob, "what a node says it holds"))

    @staticmethod
    def parse(fields: Mapping[str, Any]) -> Inventory:
        """The inventory in another agent's `fields`, with holder "".
        Errors: AgentError, UsageError, ValueError, TypeError, LookupError."""
        found = Inventory()
        told_parities = fields.get("parities", [])
        if max(len(fields["arenas"]), len(told_parities)) > ARENAS_MAX or len(fields["epochs"]) > EPOCHS_MAX:
            raise AgentError("a node says that it holds more than it can")
        for text, step, told in fields["epochs"]:
            epoch = Epoch.parse(str(text))
            found.add_epoch(parse_claim(epoch, told) if told is not None else None, epoch, int(step))
        for text, rank, world, size in fields["arenas"]:
            if not 0 <= int(rank) < int(world) <= WORLD_MAX or not 0 <= int(size) <= ARENA_BYTES_MAX:
                raise AgentError(f"a node says that it holds rank {rank} of {world}, of {size} bytes")
            found._add_snapshot((Identity.parse(str(text)), int(rank)), int(world), "", int(size))
        for text, world, rows, length, sources, sizes in told_parities:
            striped, told_sizes = Striped.from_rows(length, sources), {int(rank): int(size) for rank, size in sizes}
            if not striped.ranks <= told_sizes.keys() or not set(rows) <= set(Row) or int(world) > WORLD_MAX:
                raise AgentError("a node says of its parity what cannot be")
            found._add_parity(Identity.parse(str(text)), int(world), striped, rows, told_sizes)
        told = fields["replicated"]
        found.announced_replicated = Identity.parse(str(told)) if told is not None else None
        return found


def order_holders(holders: Iterable[str], turn: int) -> list[str]:
    """The order in which to ask holders: this node first, if it is one, then the others by name, rotated by `turn`."""
    names = sorted(holders)
    others = [name for name in names if name]
    first = turn % len(others) if others else 0
    return [*names[: len(names) - len(others)], *others[first:], *others[:first]]


def _claim_fields(claim: Claim | None) -> dict[str, Any] | None:
    """A claim as message fields; `parse_claim` parses them."""
    if claim is None:
        return None
    return {
        "parent": str(claim.parent) if claim.parent else None,
        "ancestors": ancestor_fields(claim),
        "launch": claim.launch,
    }


def ancestor_fields(claim: Claim) -> list[list[str | None]]:
    return [[str(each.epoch), str(each.parent) if each.parent else None] for each in claim.ancestors]


def parse_claim(epoch: Epoch, fields: Mapping[str, Any]) -> Claim:
    """The claim in message fields of a joining rank or another agent. Errors: UsageError, ValueError, TypeError."""
    from ckpt.store.lineage import Ancestor, Claim

    def identity(text: Any) -> Identity | None:
        return None if text is None else Identity.parse(str(text))

    ancestors = tuple(Ancestor(Epoch.parse(str(each)), identity(parent)) for each, parent in fields["ancestors"])
    launch, host = str(fields["launch"])[:200], socket.gethostname()[:200]
    return Claim(epoch, identity(fields["parent"]), ancestors, launch, host, time.time())
