"""The state of one start of a run, from rank 0's request to begin until all ranks have restored."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.agent.job.job import Job
from ckpt.agent.net.progress import Progress
from ckpt.agent.runtime.event_loop import Peer
from ckpt.agent.snapshots.candidates import Candidate
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.agent.snapshots.manifest_gather import FramePlaces, GatheredManifest
from ckpt.events import Event
from ckpt.format.manifest import Manifest, Record
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.ipc.addresses import Address
    from ckpt.ipc.node_list import NodeAt
    from ckpt.store.run import RunView


@dataclass(slots=True)
class ChoiceState:
    """What a start chooses from. `gathered_manifests`: checkpoints put together from several nodes; `gather_errors`:
    those that could not be, and why. `has_any_checkpoint`, `newest_step`: of the branch history, struck candidates
    included. `stored_identities`: what
    the store has of it, newest first. `steps_lost`: steps to redo after the chosen checkpoint; None: unknown.
    `has_reported_loss`: `restore.lost` was emitted. `location_blobs`: by checkpoint, the blobs that tell nodes where
    its frames are. `partial_places`: the frames that memory has of a candidate that is read from the store."""

    gathered_manifests: dict[Identity, GatheredManifest] = field(default_factory=dict)
    gather_errors: dict[Identity, str] = field(default_factory=dict)
    has_any_checkpoint: bool = False
    newest_step: int = 0
    steps_lost: int | None = None
    chosen: Candidate | None = None
    stored_identities: tuple[Identity, ...] = ()
    has_reported_loss: bool = False
    location_blobs: dict[Identity, list[bytes]] = field(default_factory=dict)
    partial_places: FramePlaces | None = None

    @property
    def identity(self) -> Identity | None:
        """The chosen checkpoint; None: none is chosen."""
        return self.chosen.identity if self.chosen is not None else None

    def newest_stored(self, struck: Container[Identity]) -> Identity | None:
        """The newest checkpoint in the store that is not struck and not newer than the chosen one; None: none."""
        newest = self.identity
        if newest is None:
            return None
        return next((each for each in self.stored_identities if each <= newest and each not in struck), None)

    def find_places(self, identity: Identity) -> FramePlaces | None:
        """The frames that memory has of that checkpoint, or of a part of it; None: none."""
        if identity in self.gathered_manifests:
            return self.gathered_manifests[identity].places
        places = self.partial_places
        return places if places is not None and places.identity == identity else None


@dataclass(slots=True)
class Start:
    """A start under way. `request_id`: the request that waits for a candidate; None: none waits now. `nodes`: the nodes
    of the ranks, if there are several nodes or memory-only nodes are named. `memory_node_addresses`: the addresses of
    the memory-only nodes. `job`: set once the epoch has begun. `progress`: of the survey and the choice.

    What it has heard: `inventory`: what the nodes and this one hold. `run_view`: the listing of the store; None: it is
    not there yet, or the store did not answer. `previous_nodes`: nodes of earlier starts that have no rank in this one
    and were surveyed."""

    peer: Peer
    request_id: int | None
    launch: str
    world: int
    take_over: bool
    nodes: tuple[NodeAt, ...] = ()
    memory_node_addresses: tuple[Address, ...] = ()
    began_s: float = field(default_factory=time.monotonic)
    job: Job | None = None
    progress: Progress = field(default_factory=Progress)
    inventory: Inventory = field(default_factory=Inventory)
    run_view: RunView | None = None
    previous_nodes: list[NodeAt] = field(default_factory=list)
    choice: ChoiceState = field(default_factory=ChoiceState)

    def count_steps_lost(self, ended: Mapping[Epoch, int]) -> None:
        """Sets `choice.steps_lost`: how many steps the former run had ended beyond the chosen checkpoint; None if no
        living node knows. `ended`: by epoch, the newest ended step. Steps that still earlier runs had ended do not
        count: the former start lost them."""
        # An epoch reached at least the newest step that is held of it.
        held = {identity.epoch: identity.version.step for identity in sorted(self.inventory.world_sizes)}
        chosen = self.choice.identity
        begun = {epoch for steps in (ended, held) for epoch, step in steps.items() if step}
        newest = max((epoch for epoch in begun if chosen is None or epoch >= chosen.epoch), default=None)
        known, least = (ended.get(newest, 0), held.get(newest, 0)) if newest is not None else (0, 0)
        lost = max(known, least, self.choice.newest_step) - (chosen.version.step if chosen is not None else 0)
        self.choice.steps_lost = max(0, lost) if known or lost > 0 else None

    def lost_parts_event(self) -> Event | None:
        """The event `restore.lost`, once, if a checkpoint newer than the chosen one lost a part together with a node;
        else None."""
        found, chosen = self.inventory.incomplete_checkpoints(), self.choice.identity
        # What memory lacks of the chosen checkpoint itself is in the store.
        if not found or self.choice.has_reported_loss or (chosen is not None and max(found) <= chosen):
            return None
        self.choice.has_reported_loss = True
        identity = max(found)
        ranks, step = found[identity], identity.version.step
        what = f"step {step} was in memory, and the part of ranks {ranks[:8]} is on no node that is left"
        then = f"going on from step {chosen.version.step}" if chosen is not None else "beginning afresh"
        hint = "ckpt.Replicas(n) keeps copies on n other nodes"
        facts = {"identity": str(identity), "ranks": ranks[:100]}
        return Event("restore.lost", f"ckpt: {what}: {then} ({hint})", True, facts)


@dataclass(frozen=True, slots=True)
class ResolvedStart:
    """A candidate that can be restored, and its manifest. `record`: its record in the store; None if the candidate is
    in memory."""

    candidate: Candidate
    manifest: Manifest
    encoded_manifest: bytes
    metrics: dict[str, float]
    record: Record | None = None
