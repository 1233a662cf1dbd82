"""The state of one start of a run, from rank 0's request to begin until all ranks have restored."""

from __future__ import annotations

import time
from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.agent.job.job import Job
from ckpt.agent.runtime.event_loop import Peer
from ckpt.agent.snapshots.candidates import Candidate
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.agent.snapshots.manifest_gather import FramePlaces, GatheredManifest
from ckpt.format.manifest import Manifest, Record
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.ipc.addresses import Address
    from ckpt.ipc.node_list import NodeAt
    from ckpt.store.run import RunView


@dataclass(slots=True)
class Start:
    """A start under way. `request_id`: the request that waits for a candidate; None: none waits now.

    `nodes`: the nodes of the ranks, if there are several nodes or memory-only nodes are named. `memory_node_addresses`:
    the addresses of the memory-only nodes. `pending_nodes`: nodes that have not answered the survey. `inventory`: what
    the nodes and this one hold. `gathered_manifests`: checkpoints put together from several nodes; `gather_errors`:
    those that could not be, and why. `is_store_listed`: the listing of the store has ended; `run_view`: that listing,
    None if the store did not answer. `job`: set once the epoch has begun. `is_resolving`: a candidate is being gathered
    or its manifest read. `has_any_checkpoint`, `newest_step`: of the branch history, struck candidates included.
    `stored_identities`: what the store has of it, newest first. `steps_lost`: steps to redo after the chosen
    checkpoint; None: unknown. `has_reported_loss`: `restore.lost` was emitted. `previous_nodes`: nodes of earlier
    starts that have no rank in this one and were surveyed. `location_blobs`: by checkpoint, the blobs that tell nodes
    where its frames are. `partial_places`: the frames that memory has of a candidate that is read from the store."""

    peer: Peer
    request_id: int | None
    launch: str
    world: int
    take_over: bool
    nodes: tuple[NodeAt, ...] = ()
    memory_node_addresses: tuple[Address, ...] = ()
    pending_nodes: set[str] = field(default_factory=set)
    inventory: Inventory = field(default_factory=Inventory)
    gathered_manifests: dict[Identity, GatheredManifest] = field(default_factory=dict)
    gather_errors: dict[Identity, str] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)
    is_store_listed: bool = False
    run_view: RunView | None = None
    job: Job | None = None
    is_resolving: bool = False
    has_any_checkpoint: bool = False
    newest_step: int = 0
    steps_lost: int | None = None
    chosen_candidate: Candidate | None = None
    stored_identities: tuple[Identity, ...] = ()
    has_reported_loss: bool = False
    has_surveyed_previous: bool = False
    previous_nodes: list[NodeAt] = field(default_factory=list)
    location_blobs: dict[Identity, list[bytes]] = field(default_factory=dict)
    partial_places: FramePlaces | None = None

    def newest_stored(self, struck: Container[Identity]) -> Identity | None:
        """The newest checkpoint in the store that is not struck and not newer than the chosen one; None: none."""
        if self.chosen_candidate is None:
            return None
        newest = self.chosen_candidate.identity
        return next((each for each in self.stored_identities if each <= newest and each not in struck), None)

    def find_places(self, identity: Identity) -> FramePlaces | None:
        """The frames that memory has of that checkpoint, or of a part of it; None: none."""
        if identity in self.gathered_manifests:
            return self.gathered_manifests[identity].places
        return (
            self.partial_places
            if self.partial_places is not None and self.partial_places.identity == identity
            else None
        )


@dataclass(frozen=True, slots=True)
class ResolvedStart:
    """A candidate that can be restored, and its manifest. `record`: its record in the store; None if the candidate is
    in memory."""

    candidate: Candidate
    manifest: Manifest
    encoded_manifest: bytes
    metrics: dict[str, float]
    record: Record | None = None
