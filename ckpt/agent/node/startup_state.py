"""A start of a run, from a trainer's wish to begin until it has restored."""

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
    """A start under way, from begin to restored. `request_id`: of who waits for a candidate; None: nobody does now.
    `nodes`: where the ranks are, if on several, or if memory-only nodes are named: `lenders`, where those
    listen; `silent`: those that have not said yet what they hold; `inventory`:
    what they and this node do; `gathered`: what was put together of that; `failed`: what could not be, and why.
    `listed`: whether the store was asked what it holds; `view`: what it said, None where it did not answer. `job`: once
    its epoch is begun. `told_of_loss`: of a newer checkpoint than what was chosen.
    `former`: nodes of earlier starts that have no part in this one and were asked what they hold.
    `told`: the blobs of the answer to where the candidate's frames are. `part`: where memory has some of a candidate
    that is read from the store."""

    peer: Peer
    request_id: int | None
    launch: str
    world: int
    take_over: bool
    nodes: tuple[NodeAt, ...] = ()
    lenders: tuple[Address, ...] = ()
    silent: set[str] = field(default_factory=set)
    inventory: Inventory = field(default_factory=Inventory)
    gathered: dict[Identity, GatheredManifest] = field(default_factory=dict)
    failed: dict[Identity, str] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)
    listed: bool = False
    view: RunView | None = None
    job: Job | None = None
    resolving: bool = False
    has_any: bool = False  # whether there is a checkpoint on the line, be it struck out
    newest_step: int = 0  # of the line, be it struck out
    steps_lost: int | None = None  # by going on from what was chosen, or from the beginning; None: nobody knows
    chosen: Candidate | None = None
    stored: tuple[Identity, ...] = ()  # what the store has of the line, newest first
    told_of_loss: bool = False
    asked_former: bool = False
    former: list[NodeAt] = field(default_factory=list)
    told: dict[Identity, list[bytes]] = field(default_factory=dict)
    part: FramePlaces | None = None

    def newest_stored(self, struck: Container[Identity]) -> Identity | None:
        """What a start would find in the store, which has it at or before what was chosen."""
        if self.chosen is None:
            return None
        newest = self.chosen.identity
        return next((each for each in self.stored if each <= newest and each not in struck), None)

    def places(self, identity: Identity) -> FramePlaces | None:
        """Where memory has it, or a part of it."""
        if identity in self.gathered:
            return self.gathered[identity].places
        return self.part if self.part is not None and self.part.identity == identity else None


@dataclass(frozen=True, slots=True)
class ResolvedStart:
    """A candidate that can be restored, and its manifest. `record`: which the store has of it; None where memory has
    the candidate."""

    candidate: Candidate
    manifest: Manifest
    encoded: bytes
    metrics: dict[str, float]
    record: Record | None = None
