"""The replicas of one job's checkpoints on other nodes: their placement, each replication, and what is lost of them."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from ckpt.agent.job.job_context import JobContext, JobPolicy
from ckpt.agent.replication.replication_manager import ReplicationManager
from ckpt.agent.replication.rereplicate import Rereplication
from ckpt.agent.runtime.coroutines import Task, sleep
from ckpt.agent.runtime.workers import error_text
from ckpt.agent.snapshots.inventory import find_sealed_snapshot
from ckpt.agent.state.replica_state import NO_PEER_MEMORY, NO_PEER_ROOM, SUPERSEDED
from ckpt.errors import AgentError
from ckpt.placement.placement import Kept, Parity, Replicas
from ckpt.types import Identity, Version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt.agent.replication.survey import SafeCheckpoint
    from ckpt.ipc.node_list import NodeAt

MEMORY_NODES_POLL_S = 0.2  # between checks whether all memory-only nodes have answered
# The placement has reported these, or nothing is lost.
QUIET_FAILURES = (NO_PEER_MEMORY, NO_PEER_ROOM, SUPERSEDED)


class JobReplication:
    """`manager`: None for a job of one node. `rereplication`: of the parent checkpoint, until this job has one that is
    replicated as well. `needs_rereplication`: the parent may be replicated again: it is whole in memory, or only other
    nodes know that. `has_announced_checkpoint`: other nodes know that this job has a complete checkpoint."""

    def __init__(self, context: JobContext, policy: JobPolicy) -> None:
        self.manager: ReplicationManager | None = None
        self.rereplication: Rereplication | None = None
        self.needs_rereplication = False
        self.has_announced_checkpoint = False
        self._context, self._policy = context, policy
        self._has_reported_placement = False
        self._rereplicating: Task[None] | None = None

    def set_option(self, option: Replicas | Parity | None) -> None:
        """Sets up replicas or parity on other nodes, if there are any."""
        context = self._context
        services, network = context.services, context.services.network()
        if not context.nodes or network is None or (self.manager is not None and self.manager.option == option):
            return
        own = services.replicas, services.replica_service
        self.manager = ReplicationManager(network, *own, context.nodes, option, services.memory_nodes)
        context.scheduler.replicas.is_survey_pending = context.is_taken_over and option is not None

    def place(self, sizes: dict[str, int], slots: int, used: int = 0) -> int:
        """Decides the placement of replicas; returns how many of `slots` remain beside them. `sizes`: bytes of one
        slot, by node. `used`: slots already in use, which stay."""
        manager, scheduler = self.manager, self._context.scheduler
        if manager is None:
            return slots
        before, model = manager.placement_fields(), self._policy.cost_model
        slots = manager.update_placement(sizes, self._context.shares.plans, used)
        scheduler.replicas.is_replication_on = manager.has_holders
        scheduler.replicas.placement = manager.holders_by_node
        scheduler.replicas.is_replication_wanted = manager.is_requested
        is_whole = scheduler.replicas.is_placement_complete
        if model.has_replicas != is_whole:
            model.has_replicas = is_whole
            self._policy.apply()
        if manager.placement_fields() != before or (manager.is_requested and not self._has_reported_placement):
            self._has_reported_placement = True
            loud = bool(manager.warnings) or not (is_whole or manager.is_alone)
            self._context.emit("replication.placed", manager.describe(), loud, manager.status_fields())
        return slots

    @property
    def is_incomplete(self) -> bool:
        """Whether the job has fewer replicas than it wants."""
        scheduler = self._context.scheduler
        is_kept = scheduler.replicas.is_placement_complete and not scheduler.replicas.is_replication_failing
        return self.manager is not None and self.manager.is_requested and not is_kept

    @property
    def losses_to_survive(self) -> int:
        """How many nodes the user wants each checkpoint to survive the loss of."""
        return self.manager.losses_to_survive if self.manager is not None else 0

    # -- one replication

    def replicate(self, slot: int, version: Version) -> None:
        """Replicates the checkpoint in that slot. First it is found out which version is replicated, if this is not
        known yet."""
        self._context.spawn(self._replicate(slot, version))

    async def _replicate(self, slot: int, version: Version) -> None:
        context, replicas = self._context, self._context.scheduler.replicas
        while replicas.is_survey_pending:
            if context.services.awaits_memory_nodes():
                await sleep(context.call_later, MEMORY_NODES_POLL_S)
            elif (found := await self._survey()) is not None:
                self._record_survey(found)
            else:
                self._on_ended(slot, version, "a node that may have copies has not said which", None)
                return
        began_s, why_not = time.monotonic(), replicas.why_not_replicated(version)
        if why_not is not None:
            self._on_ended(slot, version, why_not, None)
            return
        manager, identity = self.manager, Identity(context.epoch, version)
        assert manager is not None  # else nothing is replicated
        nodes: Sequence[NodeAt] = ()
        retained, error = self._identity(replicas.retained_version), ""
        try:
            nodes = await manager.replicate(identity, retained, replicas.retained_placement)
        except AgentError as exc:
            error = error_text(exc)
        if self._on_ended(slot, version, error, time.monotonic() - began_s):
            manager.evict_older(nodes, identity)

    def _identity(self, version: Version | None) -> Identity | None:
        return Identity(self._context.epoch, version) if version is not None else None

    async def _survey(self) -> SafeCheckpoint | None:
        """Asks the nodes which version is replicated; None if one does not answer."""
        context, manager = self._context, self.manager
        assert manager is not None  # else nothing is replicated
        arenas = context.shares.local_share.arenas
        inherited = (arenas.get(each, {}).values() for each in context.scheduler.slots.inherited_versions)
        sealed = map(find_sealed_snapshot, itertools.chain.from_iterable(inherited))
        held = {made.identity for made in context.checkpoints.values()}
        held.update(found[0][0] for found in sealed if found is not None)
        known = self._identity(context.scheduler.replicas.replicated_version)
        return await manager.find_replicated(context.epoch, known, held, context.world)

    def _record_survey(self, found: SafeCheckpoint) -> None:
        context, newest, whole = self._context, found.newest, found.fully_replicated
        kept = [
            Kept(node.name if number else "", max(0, min(found.survived_losses[rank] for rank in node.ranks)))
            for number, node in enumerate(context.nodes if newest is not None else ())
        ]
        is_so = context.scheduler.replicas.record_survey(
            newest.version if newest is not None else None, kept, whole == newest
        )
        self._mark_replicated()
        if is_so and whole is not None and context.scheduler.replicas.is_placement_complete:
            context.services.account.record_level("peer", context.epoch, whole.version)

    def _mark_replicated(self) -> None:
        """An agent that takes over keeps this checkpoint's slot rather than any other."""
        found = self._context.scheduler.replicas.replicated
        if found is not None:
            for arena in self._context.shares.local_share.arenas[found.slot].values():
                arena.mark_replicated()

    def _on_ended(self, slot: int, version: Version, error: str, seconds: float | None) -> bool:
        """Returns True if peers may drop older replicas now. `seconds`: how long it took; None: nothing was copied,
        since the version was replicated already or cannot be."""
        context, facts = self._context, {"identity": str(Identity(self._context.epoch, version))}
        why_not = context.scheduler.replicas.record_replication(slot, error, time.monotonic())
        self._mark_replicated()
        if why_not:
            text = f"step {version.step} is not in other nodes' memory: {why_not}"
            context.emit("replication.failed", text, why_not not in QUIET_FAILURES, facts)
            return context.scheduler.replicas.can_drop_older(why_not)
        if seconds is not None:
            self._policy.cost_model.record_replication(seconds)
        made = context.checkpoints.get(slot)
        count = int(made.manifest.frames["length"].sum()) if made is not None else 0
        context.services.account.record_level("peer", context.epoch, version, count)
        text = f"step {version.step} is in other nodes' memory after {seconds or 0.0:.2f} s"
        context.emit("replication.done", text, data={**facts, "seconds": seconds or 0.0})
        return True

    # -- what is lost

    def report_degraded(self, version: Version, why: str) -> None:
        """Reports that this version no longer meets the replication target, if it was reported as replicated."""
        account = self._context.services.account
        if account.newest_by_level.get("peer", (None, None))[0] == version:
            account.clear_replicated()
            self._emit_lost(version, why)

    def _emit_lost(self, version: Version, why: str, **more: str) -> None:
        text = f"step {version.step} has fewer copies in other nodes' memory than was asked for: {why}"
        self._context.emit(
            "replica.lost", text, True, {"identity": str(Identity(self._context.epoch, version)), **more}
        )

    def on_holder_lost(self, name: str) -> None:
        """The agent of that name is disconnected, and its replicas for this job may be lost. They are made anew as soon
        as possible. Until then, the affected versions do not count as replicated."""
        context, manager = self._context, self.manager
        if self.rereplication is not None:
            self.rereplication.survey_again()
        if manager is None:
            return
        versions, newest = context.scheduler.replicas.peer_versions, context.scheduler.replicas.replicated_version
        lost = [each for each in versions if manager.depends_on(name, Identity(context.epoch, each))]
        if lost:
            context.scheduler.replicas.record_lost_holder(name, lost)
        if newest is not None and newest in lost and context.services.account.clear_replicated() is not None:
            why = (
                f"agent {name} is gone or cut off, and its copies may be lost. They are made again as soon as possible"
            )
            self._emit_lost(newest, why, agent=name)

    def begin_rereplication(self, made: Rereplication) -> None:
        self.rereplication, self._rereplicating = made, self._context.spawn(made.run())

    def end_rereplication(self) -> None:
        if self._rereplicating is not None:
            self._rereplicating.cancel()
        self.rereplication = self._rereplicating = None

    def release_replicas(self) -> None:
        """Has all nodes drop their replicas of this job's checkpoints."""
        context, services = self._context, self._context.services
        network = services.network()
        assert network is not None  # else no replica was ever kept
        try:
            services.replicas.evict_epoch(context.epoch)
        except AgentError:  # a start surveys this node: its replicas stay
            return
        for node in (*context.nodes[1:], *(each.node for each in services.memory_nodes())):
            network.notify(node.name, {"t": "evict", "what": "epoch", "epoch": str(context.epoch)})

    def report_parent(self, is_safe: bool) -> None:
        """Shows whether the parent checkpoint meets the replication target."""
        account, claim = self._context.services.account, self._context.claim
        parent = claim.parent if claim is not None else None
        if parent is not None and is_safe:
            account.record_level("peer", parent.epoch, parent.version)
        elif parent is not None and account.newest_by_level.get("peer", (None, None))[0] == parent.version:
            account.clear_replicated()
