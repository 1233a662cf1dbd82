"""The memory of this node: what its arenas and replicas hold, who may have something dropped, and what is freed.

A former job is dropped when a newer checkpoint is complete, or when memory runs out and the job does not hold the only
checkpoint left.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt.agent.net.transport import Frames
from ckpt.agent.node.inventory_lease import InventoryLease, MemoryLease
from ckpt.agent.node.node_context import NodeContext
from ckpt.agent.replication.replica_service import ReplicaService
from ckpt.agent.replication.replica_store import ReplicaStore
from ckpt.agent.replication.replication_manager import SLOTS_MIN
from ckpt.agent.restore.peer_source import offer_name
from ckpt.agent.runtime import memory_plan
from ckpt.agent.runtime.memory_plan import MemoryUse
from ckpt.agent.snapshots.candidates import MemoryEpoch
from ckpt.agent.snapshots.inventory import Inventory, find_sealed_snapshot, find_snapshot
from ckpt.agent.state import memory_pressure
from ckpt.agent.state.retention_rule import NewestStart
from ckpt.errors import AgentError
from ckpt.events import Event
from ckpt.ipc.arena import Arena
from ckpt.types import OWN_NODE, Epoch, Identity, format_count

if TYPE_CHECKING:
    from ckpt.agent.node.startup_state import Start

START_READER = "start"  # the reader of frames that a start has served (see ReplicaOffers.add)


class NodeMemory:
    """What one node holds. Main thread only. `inventory_lease`: decides who may have something dropped.
    `newest_remote_epoch`: the newest epoch that another node knows to have a complete checkpoint. `memory_lease`: of a
    memory-only node; None on a node with ranks."""

    def __init__(self, context: NodeContext, memory_lease: MemoryLease | None = None) -> None:
        server, workers = context.server, context.workers
        self.newest_remote_epoch = Epoch(0, "0" * 16)
        self.inventory_lease = InventoryLease(server.call_later)
        self.replicas = ReplicaStore(workers, server.post)
        self.replicas.arenas.set_limit(self.replica_bytes_max)
        self.replicas.get_eviction_rule = self.eviction_predicate
        self.replicas.check_eviction = lambda epoch: self.inventory_lease.check(OWN_NODE, epoch)
        own = self.arenas_of, lambda: context.network, workers.free_bytes
        self.replica_service = ReplicaService(workers, server.post, self.replicas, *own)
        self._context, self._jobs, self._memory_lease = context, context.jobs, memory_lease

    # -- what is here

    def inventory(self, whole: bool) -> Inventory:
        """What this node's memory holds. `whole`: also the jobs of this node alone."""
        found = Inventory()
        for each in self._jobs.all():
            if whole or each.nodes:
                found.add_epoch(each.claim, each.epoch, each.local_share.ended_step())
                found.add_arenas(each.local_share.all_arenas())
        found.merge(self.replicas.inventory(), "")
        for identity in self.replicas.kept.identities:
            # The step 0: a holder of a replica has not seen how far that run came.
            found.add_epoch(None, identity.epoch, 0)
        elsewhere = (each for each in (self.inventory_lease.epoch_floor, self.newest_remote_epoch) if each.number)
        # The store may not know these epochs; the next start's epoch has to exceed them all.
        for epoch in (*self._context.store.claims.own_epochs, *elsewhere):
            found.add_epoch(None, epoch, 0)
        for epoch, terms in self._memory_lease.terms.items() if self._memory_lease is not None else ():
            found.add_epoch(terms.claim, epoch, 0)
        found.announced_replicated = self.replicas.announced_replicated
        return found

    def known_epochs(self, start: Start) -> list[MemoryEpoch]:
        """The epochs that got beyond their start, here or on the surveyed nodes, with their complete checkpoints in
        memory. The claim of a refused epoch does not count, since another start has the run. Its checkpoints do: that
        start, or a later one, may have gone on from them, which its own claim says."""
        alone = [] if start.nodes else [job for job in self._jobs.former if not job.nodes]
        whole = [
            MemoryEpoch(job.claim, tuple(each.identity for each in job.context.checkpoints.values()))
            for job in alone
            if job.claim is not None
        ]
        refused = self._context.store.claims.refusal_reasons
        known = [*whole, *start.inventory.epochs_in_memory()]
        return [replace(each, claim=None) if each.epoch in refused else each for each in known]

    def newest_epoch(self) -> Epoch:
        """The newest epoch that is known here."""
        known = [*self.inventory(whole=True).steps, *(job.epoch for job in self._jobs.coordinated())]
        return max(known, default=self.inventory_lease.epoch_floor)

    def arenas_of(self, identity: Identity, hashed: bool = True) -> dict[int, Arena]:
        """The arenas on this node that hold a snapshot of that checkpoint, by rank. `hashed`: only hashed ones, which
        proves that the coordinator saw all ranks stage it."""
        found: dict[int, Arena] = {}
        arenas = [arena for _, share in self._jobs.shares() for arena in share.all_arenas()]
        for arena in [*arenas, *self.replicas.kept.arenas_by_key.values()]:
            held = find_sealed_snapshot(arena) if hashed else find_snapshot(arena)
            if held is not None and held[0][0] == identity:
                found.setdefault(held[0][1], arena)
        return found

    def require_arenas(self, identity: Identity, ranks: Sequence[int], hashed: bool = True) -> dict[int, Arena]:
        """The arenas of these ranks' snapshots. Errors: AgentError if this node does not hold one of them."""
        found = self.arenas_of(identity, hashed)
        if not set(ranks) <= found.keys():
            raise AgentError(f"not all of the ranks {list(ranks)[:8]} of {identity} are held here")
        return {rank: found[rank] for rank in ranks}

    def memory_use(self, epoch: Epoch) -> MemoryUse:
        """The memory taken by everything but the slots of that epoch's job."""
        others = [share.arena_bytes for each, share in self._jobs.shares() if each != epoch]
        lent, lent_bytes = self.replicas.arenas, self.replicas.arenas.bytes_of(epoch)
        return MemoryUse(sum(others) + lent.bytes - lent_bytes, lent_bytes - lent.unallocated_bytes)

    def replica_bytes_max(self) -> int:
        """The bytes that replicas may take on this node now.

        On a memory-only node: what was lent, and no more than this machine has free. Else those they have, and what is
        free beyond the reserve. A user's memory limit lowers this to what remains beside the newest job's slots. These
        are at least SLOTS_MIN, if so many are planned, and all that exist: a surplus slot is freed once it holds
        nothing needed."""
        allocated_bytes, free_bytes = self.replicas.arenas.allocated_bytes, self._context.workers.free_bytes()
        if self._memory_lease is not None:
            return min(self._memory_lease.memory_bytes, allocated_bytes + free_bytes)
        reserve_bytes = memory_pressure.reserve_bytes(memory_plan.total_bytes())
        rooms = [allocated_bytes + max(0, free_bytes - reserve_bytes)]
        newest = max(self._jobs.shares(), key=lambda each: each[0], default=None)
        if newest is not None and (plan := newest[1].limited_plan) is not None:
            # The plan counts the replicas of other epochs as taken.
            others_bytes = self.replicas.arenas.bytes - self.replicas.arenas.bytes_of(newest[0])
            slots = max(min(SLOTS_MIN, plan.slots), len(newest[1].arenas))
            rooms.append(others_bytes + plan.replica_bytes_max(slots))
        return min(rooms)

    def status_fields(self) -> dict[str, Any]:
        """What is shown of any agent."""
        context, network = self._context, self._context.network
        return {
            "url": context.url,
            "pid": os.getpid(),
            "incarnation": context.incarnation,
            "name": network.agent_name if network is not None else None,  # the agent's name in the network
            **context.status_view.facts(),
            "peer_bandwidth": network.rate_limit_bytes_s if network is not None else None,
            "store_requests": context.store.usage.requests(),
            "store_bytes": context.store.usage.bytes_moved(),
            "copies": self.replicas.kept.status_fields(),
        }

    # -- who may have what dropped

    def grant_inventory_lease(self, by: str, for_orphans: bool = False) -> None:
        """Agent `by` surveys this node: nothing listed is dropped until the outcome. `for_orphans` and errors: see
        InventoryLease.take_lease."""
        self.inventory_lease.take_lease(by, self.newest_epoch(), for_orphans)
        for each in self._jobs.followed:
            each.local_share.clear_appointments()

    def retention_rule(self) -> NewestStart | None:
        """The newest start that this node has a part in, and what it restored. None: there is none, or the inventory
        lease refuses its drops."""
        lent = self._memory_lease.claim if self._memory_lease is not None else None
        claims = [*self._jobs.begun_claims(), *([lent] if lent is not None else [])]
        claim = max(claims, key=lambda claim: claim.epoch, default=None)
        if claim is None or self.inventory_lease.refusal(OWN_NODE, claim.epoch):
            return None
        held, parent, told = self.inventory(whole=False), claim.parent, self.replicas.announced_replicated
        safe = [
            each for each in held.world_sizes if parent is not None and each <= parent and not held.missing_ranks(each)
        ]
        return NewestStart(claim.epoch, parent, max([*safe, *([told] if told is not None else [])], default=None))

    def eviction_predicate(self) -> Callable[[Identity], bool]:
        """A predicate: which checkpoints may be evicted to make room for newer ones."""
        begun = self.retention_rule()
        return begun.supersedes if begun is not None else lambda identity: False

    # -- what is dropped

    def drop_older_epochs(self, before: Epoch) -> None:
        """Epoch `before` has a complete checkpoint: drops the replicas and followed jobs of older epochs."""
        self.newest_remote_epoch = max(self.newest_remote_epoch, before)
        self.replicas.evict_epochs_before(before)
        for each in self._jobs.followed:
            each.is_over = each.is_over or each.epoch < before

    def end_job(self, epoch: Epoch) -> None:
        """The coordinator of `epoch` says that its job is over. A memory-only node is told so once the store has all
        that the job saved: replicas of that epoch and of older ones go."""
        job = self._jobs.followed_job_of(epoch)
        if job is not None:
            job.end()
        elif self._memory_lease is not None:
            self.replicas.evict(lambda identity: identity.epoch <= epoch)

    def drop_ended_followed_jobs(self) -> None:
        for job in [each for each in self._jobs.followed if each.is_over]:
            self._jobs.followed.remove(job)
            job.drop()
            self.replicas.evict(lambda identity, epoch=job.epoch: identity.epoch == epoch)  # type: ignore[misc]

    def drop_superseded_jobs(self) -> None:
        """Drops each idle former job that a newer complete checkpoint supersedes, or that has no checkpoint and is
        closed in the store."""
        if self.inventory_lease.is_held:
            return
        newer = self._jobs.current is not None and self._jobs.current.scheduler.replicas.supersedes_former
        for job in list(self._jobs.former):
            outdone = newer or job.epoch < self.newest_remote_epoch
            nothing = not (job.context.checkpoints or job.context.has_unread_arenas)
            if job.is_idle and (outdone or (nothing and job.scheduler.facts.is_closed_in_store)):
                self._jobs.former.remove(job)
                job.drop()

    # -- what is served

    def serve_frames(self, identity: Identity, rank: int, frames: Frames, reader: str) -> None:
        """Serves these frames to every node of the run, until `reader` withdraws them. Errors: AgentError if this node
        does not hold that rank's snapshot."""
        arena, network = self.arenas_of(identity).get(rank), self._context.network
        if arena is None or network is None:
            raise AgentError(f"rank {rank} of {identity} is not held here")
        served = frames.with_offsets(frames.offsets, arena.size_bytes)
        self.replicas.offers.add(network.transport, offer_name(identity, rank), arena.view, served, reader, urgent=True)

    def end_expired_serving(self) -> None:
        """Ends what is served, and read from the store, for starts whose outcome is known or whose lease has expired
        (see InventoryLease)."""
        for reader in self.replicas.offers.readers:
            name, slash, use = reader.rpartition("/")
            if slash and use == START_READER and not self.inventory_lease.has_lease(name):
                self.replicas.offers.withdraw(None, reader)
        for each in self._jobs.followed:
            if not self.inventory_lease.has_lease(each.coordinator.name):
                each.restore.end_uncoordinated()


class MemoryRelief:
    """What is given back when the machine runs out of memory, or a job has too few slots. Main thread only.
    `is_written`: whether peers have this node write a part of that checkpoint."""

    def __init__(self, context: NodeContext, memory: NodeMemory, is_written: Callable[[Identity], bool]) -> None:
        self._context, self._jobs, self._memory, self._is_written = context, context.jobs, memory, is_written
        self._last_relief_s = self._last_replan_s = -math.inf

    def relieve_pressure(self, now_s: float) -> float | None:
        """Gives memory back when the machine runs out of it: warm pages, then replicas, then former jobs. Returns when
        to look again; None: nothing is held."""
        arenas, workers = self._memory.replicas.arenas, self._context.workers
        if not self._jobs.shares() and not arenas.bytes:
            return None
        if now_s < self._last_relief_s + memory_pressure.PERIOD_S:
            return self._last_relief_s + memory_pressure.PERIOD_S
        self._last_relief_s = now_s
        free_bytes = workers.free_bytes()
        missing = memory_pressure.missing_bytes(free_bytes, memory_plan.total_bytes())
        freed, gone = arenas.close_spares(missing) if missing else 0, 0
        if freed < missing and not self._memory.inventory_lease.is_held:
            for give_back in (self._evict_superseded_replicas, self._drop_earlier_starts):
                more, count = give_back(missing - freed)
                freed, gone = freed + more, gone + count
        if freed:
            what = f", {format_count(gone, 'older checkpoint')} among them" if gone else ""
            text = f"memory runs out here, {free_bytes >> 20:,} MiB are left: {freed >> 20:,} MiB are given back{what}"
            facts = {"free_bytes": free_bytes, "freed_bytes": freed}
            self._context.emit_event(Event("memory.released", text, bool(gone), facts))
        return now_s + memory_pressure.PERIOD_S

    def replan_cramped_job(self, now_s: float) -> float | None:
        """Frees superseded checkpoints of earlier starts that leave a job too little memory, then plans the job's
        memory anew. Returns when to look again; None: no job lacks memory."""
        job, newest = self._jobs.current, self._jobs.newest_followed
        is_short = job is not None and job.memory.is_short
        if not is_short and not (newest is not None and newest.local_share.is_memory_short):
            return None
        if now_s < self._last_replan_s + memory_pressure.PERIOD_S:
            return self._last_replan_s + memory_pressure.PERIOD_S
        begun = self._memory.retention_rule()
        if begun is None:
            return None
        self._last_replan_s = now_s
        for former in self._jobs.coordinated():
            if former.epoch < begun.epoch:
                former.free_outdated_slots(begun.supersedes)
        for each in self._jobs.followed:
            if each.epoch < begun.epoch and not each.has_ranks:
                each.local_share.free_outdated_slots(
                    lambda identity: begun.supersedes(identity) and not self._is_read_by_peers(identity)
                )
        if job is not None and is_short:
            job.memory.replan()
        return now_s + memory_pressure.PERIOD_S

    def _is_read_by_peers(self, identity: Identity) -> bool:
        """Whether peers read, or may read, snapshots of that checkpoint from here."""
        return self._is_written(identity) or self._memory.replicas.offers.is_offered(identity)

    def _evict_superseded_replicas(self, missing: int) -> tuple[int, int]:
        """Evicts replicas and parity of superseded checkpoints, the oldest first, until `missing` bytes are free.
        Returns the bytes freed, and of how many checkpoints."""
        begun, replicas, freed, gone = self._memory.retention_rule(), self._memory.replicas, 0, 0
        for identity in sorted(replicas.kept.identities):
            if freed < missing and begun is not None and begun.supersedes(identity):
                before = replicas.arenas.bytes
                replicas.evict(identity.__eq__)
                replicas.arenas.close_spares(missing - freed)
                freed, gone = freed + before - replicas.arenas.bytes, gone + 1
        return freed, gone

    def _drop_earlier_starts(self, missing: int) -> tuple[int, int]:
        """Drops what earlier starts left here; parameter and result as `_evict_superseded_replicas`."""
        jobs = {job.epoch: job for job in self._jobs.former}
        followed = {each.epoch: each for each in self._jobs.followed}
        held = [
            memory_pressure.StartMemory(job.epoch, job.local_share.arena_bytes, job.context.has_complete, job.is_idle)
            for job in jobs.values()
        ]
        held += [
            memory_pressure.StartMemory(each.epoch, each.local_share.arena_bytes, False, each.is_idle)
            for each in followed.values()
        ]
        held.sort(key=lambda each: each.epoch)
        epochs = memory_pressure.choose_evictions(held, missing, self._memory.retention_rule())
        for epoch in epochs:
            if epoch in jobs:
                self._jobs.former.remove(jobs[epoch])
                jobs[epoch].drop()
            else:
                followed[epoch].is_over = True  # dropped, with its replicas, by `drop_ended_followed_jobs`
        return sum(each.held_bytes for each in held if each.epoch in epochs), len(epochs)
