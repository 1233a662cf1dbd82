"""The memory of this node: its jobs, arenas and replicas, and when each is freed.

One job is current. Former jobs are kept while they have something to finish or to hand on. A former job is dropped when
a newer checkpoint is complete, or when memory runs out and the job does not hold the only checkpoint left.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt.agent.adaptive.alarms import Alarms
from ckpt.agent.adaptive.history import LearntHistory
from ckpt.agent.commit.store_client import StoreClient
from ckpt.agent.job.follower_job import FollowerJob
from ckpt.agent.job.job import Job
from ckpt.agent.job.job_context import Services, send_event
from ckpt.agent.node.inventory_lease import InventoryLease
from ckpt.agent.node.startup_state import Start
from ckpt.agent.observability.status import Status
from ckpt.agent.preemption.notice_listener import NoticeListeners
from ckpt.agent.preemption.notice_relay import ExitTiming
from ckpt.agent.replication.replica_service import ReplicaService
from ckpt.agent.replication.replica_store import ReplicaStore
from ckpt.agent.replication.replication_manager import SLOTS_MIN
from ckpt.agent.runtime import memory_plan
from ckpt.agent.runtime.event_loop import EventLoop
from ckpt.agent.runtime.memory_plan import MemoryUse
from ckpt.agent.runtime.workers import Workers
from ckpt.agent.snapshots.candidates import MemoryEpoch
from ckpt.agent.snapshots.inventory import Inventory, find_sealed_snapshot, find_snapshot
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
from ckpt.agent.state import memory_pressure
from ckpt.agent.state.retention_rule import NewestStart
from ckpt.events import Event, Events
from ckpt.ipc.arena import Arena
from ckpt.preemption.notice import NoticeChange
from ckpt.settings import Settings
from ckpt.types import OWN_NODE, Epoch, Identity, format_count

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.store.lineage import Claim


class NodeMemory:
    """The part of the agent that owns the jobs, replicas and parity of this node. Main thread only. `current_job`: the
    job that trains here and is coordinated here; `former`: those before it, oldest first. `followed_jobs`: the jobs
    with ranks here that other nodes coordinate. `inventory_lease`: the inventory lease. `newest_remote_epoch`: the
    newest epoch that another node knows to have a complete checkpoint. `network`: None in a job of one node."""

    def __init__(self, url: str, settings: Settings, server: EventLoop) -> None:
        self.url = url
        self.incarnation = secrets.token_hex(8)
        # The name of this agent among others, for people too. Containers may share the host's name and the process id.
        self.agent_name = f"{owner_of(socket.gethostname())}:{os.getpid()}-{self.incarnation[:6]}"
        self.current_job: Job | None = None
        self.former_jobs: list[Job] = []
        self._last_relief_s = self._last_replan_s = -math.inf
        self.followed_jobs: list[FollowerJob] = []
        self.network: PeerNetwork | None = None
        self.newest_remote_epoch = Epoch(0, "0" * 16)
        self._settings = settings
        self._server = server
        self._workers = Workers(server.post)
        self.replicas = ReplicaStore(self._workers, server.post)
        self.inventory_lease = InventoryLease(server.call_later)
        self.replicas.set_limit(self._replica_bytes_max)
        self.replicas.get_eviction_rule = self._eviction_predicate
        self.replicas.check_eviction = lambda epoch: self.inventory_lease.check(OWN_NODE, epoch)
        own = self._arenas_of, lambda: self.network, self._workers.free_bytes
        self.replica_service = ReplicaService(self._workers, server.post, self.replicas, *own)
        self._events = Events(lambda event: server.post(lambda: self._emit_event(event)))
        self._store = StoreClient(url, settings, self._events, owner_of(socket.gethostname()))
        self._notice_listeners = NoticeListeners(server.post, self._on_notice, self._events)
        self.status_view = Status(url, settings, server, self.status, self._emit_event)
        self.alarms = Alarms(settings, url, server, self._events)
        self._learnt_history = LearntHistory(self._workers, self._store, self.alarms, self._events)
        self._services = Services(
            server,
            self._workers,
            self._store,
            settings.heartbeat_s,
            self._memory_use,
            self._notice_listeners,
            server.path.with_suffix(".outcome.json"),
            self.replicas,
            lambda: self.network,
            self.status_view.account,
            self.status_view.record_event,
            self.alarms.scores_by_source,
            self.replica_service,
        )
        self._start: Start | None = None

    def status(self) -> dict[str, Any]:
        raise NotImplementedError

    def _jobs(self) -> list[Job]:
        """The jobs coordinated here, oldest first."""
        return [*self.former_jobs, *([self.current_job] if self.current_job is not None else [])]

    def _job_of(self, epoch: Epoch) -> Job | None:
        return next((each for each in self._jobs() if each.epoch == epoch), None)

    def _known_epochs(self, start: Start) -> list[MemoryEpoch]:
        """The epochs that got beyond their start, here or on the surveyed nodes, with their complete checkpoints in
        memory. The claim of a refused epoch does not count, since another start has the run. Its checkpoints do: that
        start, or a later one, may have gone on from them, which its own claim says."""
        alone = [] if start.nodes else [job for job in self.former_jobs if not job.nodes]
        whole = [MemoryEpoch(job.claim, job.checkpoint_identities()) for job in alone if job.claim is not None]
        refused = self._store.claims.refusal_reasons
        known = [*whole, *start.inventory.epochs_in_memory()]
        return [replace(each, claim=None) if each.epoch in refused else each for each in known]

    def _inventory(self, whole: bool) -> Inventory:
        """What this node's memory holds. `whole`: also the jobs of this node alone."""
        found = Inventory()
        for job in self._jobs():
            if whole or job.nodes:
                found.add_epoch(job.claim, job.epoch, job.local_share.ended_step())
                found.add_arenas(job.local_share.all_arenas())
        for each in self.followed_jobs:
            found.add_epoch(each.claim, each.epoch, each.local_share.ended_step())
            found.add_arenas(each.local_share.all_arenas())
        found.merge(self.replicas.inventory(), "")
        for identity in self.replicas.identities:
            # The step 0: a holder of a replica has not seen how far that run came.
            found.add_epoch(None, identity.epoch, 0)
        elsewhere = (each for each in (self.inventory_lease.epoch_floor, self.newest_remote_epoch) if each.number)
        # The store may not know these epochs; the next start's epoch has to exceed them all.
        for epoch in (*self._store.claims.own_epochs, *elsewhere):
            found.add_epoch(None, epoch, 0)
        found.announced_replicated = self.replicas.announced_replicated
        return found

    def _arenas_of(self, identity: Identity, hashed: bool = True) -> dict[int, Arena]:
        """The arenas on this node that hold a snapshot of that checkpoint, by rank. `hashed`: only hashed ones, which
        proves that the coordinator saw all ranks stage it."""
        found: dict[int, Arena] = {}
        shares = [*(job.local_share for job in self._jobs()), *(each.local_share for each in self.followed_jobs)]
        arenas = [arena for share in shares for arena in share.all_arenas()]
        for arena in [*arenas, *self.replicas.arenas()]:
            held = find_sealed_snapshot(arena) if hashed else find_snapshot(arena)
            if held is not None and held[0][0] == identity:
                found.setdefault(held[0][1], arena)
        return found

    def _find_local_checkpoint(self, identity: Identity) -> tuple[Job, int, MemoryCheckpoint] | None:
        """The former job of this node alone that has that checkpoint, with its slot; None: none has."""
        for job in self.former_jobs:
            found = job.find_checkpoint(identity) if not job.nodes else None
            if found is not None:
                return job, found[0], found[1]
        return None

    def _local_checkpoint(self, identity: Identity) -> MemoryCheckpoint | None:
        found = self._find_local_checkpoint(identity)
        return found[2] if found is not None else None

    def _memory_use(self, epoch: Epoch) -> MemoryUse:
        """The memory taken by everything but the slots of that epoch's job."""
        others = [job.local_share.arena_bytes for job in self._jobs() if job.epoch != epoch]
        others += [each.local_share.arena_bytes for each in self.followed_jobs if each.epoch != epoch]
        lent_bytes = self.replicas.bytes_of(epoch)
        return MemoryUse(sum(others) + self.replicas.bytes - lent_bytes, lent_bytes - self.replicas.unallocated_bytes)

    def _grant_inventory_lease(self, by: str, for_orphans: bool = False) -> None:
        """Agent `by` surveys this node: nothing listed is dropped until the outcome. `for_orphans` and errors: see
        InventoryLease.take_lease."""
        self.inventory_lease.take_lease(by, self._newest_epoch(), for_orphans)
        for each in self.followed_jobs:
            each.local_share.clear_appointments()

    def _newest_epoch(self) -> Epoch:
        """The newest epoch that is known here."""
        known = [*self._inventory(whole=True).steps, *(job.epoch for job in self._jobs())]
        return max(known, default=self.inventory_lease.epoch_floor)

    def _drop_superseded_jobs(self) -> None:
        """Drops each idle former job that a newer complete checkpoint supersedes, or that has no checkpoint and is
        closed in the store."""
        if self.inventory_lease.is_held:
            return
        newer = self.current_job is not None and self.current_job.scheduler.supersedes_former
        if newer and self.current_job is not None and not self.current_job.has_announced_checkpoint:
            self.current_job.has_announced_checkpoint = True
            self.current_job.request_replan()
            # Peers keep no replicas of the restored checkpoint any more.
            self.current_job.report_parent_replication(False)
            self._announce_complete_checkpoint(self.current_job)
        for job in list(self.former_jobs):
            outdone = newer or job.epoch < self.newest_remote_epoch
            nothing = not (job.checkpoints or job.has_unread_arenas)
            if job.is_idle and (outdone or (nothing and job.scheduler.is_closed_in_store)):
                self.former_jobs.remove(job)
                job.drop()

    def _replica_bytes_max(self) -> int:
        """The bytes that replicas may take on this node now: those they have, and what is free beyond the reserve. A
        user's memory limit lowers this to what remains beside the newest job's slots. These are at least SLOTS_MIN, if
        so many are planned, and all that exist: a surplus slot is freed once it holds nothing needed."""
        reserve_bytes = memory_pressure.reserve_bytes(memory_plan.total_bytes())
        rooms = [self.replicas.allocated_bytes + max(0, self._workers.free_bytes() - reserve_bytes)]
        shares = [(job.epoch, job.local_share) for job in self._jobs()] + [
            (each.epoch, each.local_share) for each in self.followed_jobs
        ]
        newest = max(shares, key=lambda each: each[0], default=None)
        if newest is not None and (plan := newest[1].limited_plan) is not None:
            # The plan counts the replicas of other epochs as taken.
            others_bytes = self.replicas.bytes - self.replicas.bytes_of(newest[0])
            slots = max(min(SLOTS_MIN, plan.slots), len(newest[1].arenas))
            rooms.append(others_bytes + plan.replica_bytes_max(slots))
        return min(rooms)

    def _retention_rule(self) -> NewestStart | None:
        """The newest start that this node has a part in, and what it restored. None: there is none, or the inventory
        lease refuses its drops."""
        found = [self.current_job, *self.followed_jobs]
        return self._retention_rule_for([each.claim for each in found if each is not None and each.claim is not None])

    def _retention_rule_for(self, claims: Sequence[Claim]) -> NewestStart | None:
        claim = max(claims, key=lambda claim: claim.epoch, default=None)
        if claim is None or self.inventory_lease.refusal(OWN_NODE, claim.epoch):
            return None
        held, parent, told = self._inventory(whole=False), claim.parent, self.replicas.announced_replicated
        safe = [
            each for each in held.world_sizes if parent is not None and each <= parent and not held.missing_ranks(each)
        ]
        return NewestStart(claim.epoch, parent, max([*safe, *([told] if told is not None else [])], default=None))

    def _eviction_predicate(self) -> Callable[[Identity], bool]:
        """A predicate: which checkpoints may be evicted to make room for newer ones."""
        begun = self._retention_rule()
        return begun.supersedes if begun is not None else lambda identity: False

    def _relieve_memory_pressure(self, now_s: float) -> float | None:
        """Gives memory back when the machine runs out of it: warm pages, then replicas, then former jobs. Returns when
        to look again; None: nothing is held."""
        if not self._jobs() and not self.followed_jobs and not self.replicas.bytes:
            return None
        if now_s < self._last_relief_s + memory_pressure.PERIOD_S:
            return self._last_relief_s + memory_pressure.PERIOD_S
        self._last_relief_s = now_s
        free_bytes = self._workers.free_bytes()
        missing = memory_pressure.missing_bytes(free_bytes, memory_plan.total_bytes())
        freed, gone = self.replicas.close_spares(missing) if missing else 0, 0
        if freed < missing and not self.inventory_lease.is_held:
            for give_back in (self._evict_superseded_replicas, self._drop_earlier_starts):
                more, count = give_back(missing - freed)
                freed, gone = freed + more, gone + count
        if freed:
            what = f", {format_count(gone, 'older checkpoint')} among them" if gone else ""
            text = f"memory runs out here, {free_bytes >> 20:,} MiB are left: {freed >> 20:,} MiB are given back{what}"
            self._emit_event(
                Event("memory.released", text, bool(gone), {"free_bytes": free_bytes, "freed_bytes": freed})
            )
        return now_s + memory_pressure.PERIOD_S

    def _replan_cramped_job(self, now_s: float) -> float | None:
        """Frees superseded checkpoints of earlier starts that leave a job too little memory, then plans the job's
        memory anew. Returns when to look again; None: no job lacks memory."""
        job, newest = self.current_job, max(self.followed_jobs, key=lambda each: each.epoch, default=None)
        cramped = (job is not None and job.is_short_of_memory) or (
            newest is not None and newest.local_share.is_memory_short
        )
        if not cramped:
            return None
        if now_s < self._last_replan_s + memory_pressure.PERIOD_S:
            return self._last_replan_s + memory_pressure.PERIOD_S
        begun = self._retention_rule()
        if begun is None:
            return None
        self._last_replan_s = now_s
        for former in self._jobs():
            if former.epoch < begun.epoch:
                former.free_outdated_slots(begun.supersedes)
        for each in self.followed_jobs:
            if each.epoch < begun.epoch and not each.has_ranks:
                each.local_share.free_outdated_slots(
                    lambda identity: begun.supersedes(identity) and not self._is_read_by_peers(identity)
                )
        if job is not None and job.is_short_of_memory:
            job.replan_memory()
        return now_s + memory_pressure.PERIOD_S

    def _is_read_by_peers(self, identity: Identity) -> bool:
        """Whether peers read, or may read, replicas of that checkpoint from here."""
        return self.replicas.is_offered(identity)

    def _evict_superseded_replicas(self, missing: int) -> tuple[int, int]:
        """Evicts replicas and parity of superseded checkpoints, the oldest first, until `missing` bytes are free.
        Returns the bytes freed, and of how many checkpoints."""
        begun, freed, gone = self._retention_rule(), 0, 0
        for identity in sorted(self.replicas.identities):
            if freed < missing and begun is not None and begun.supersedes(identity):
                before = self.replicas.bytes
                self.replicas.evict(identity.__eq__)
                self.replicas.close_spares(missing - freed)
                freed, gone = freed + before - self.replicas.bytes, gone + 1
        return freed, gone

    def _drop_earlier_starts(self, missing: int) -> tuple[int, int]:
        """Drops what earlier starts left here; parameter and result as `_evict_superseded_replicas`."""
        jobs = {job.epoch: job for job in self.former_jobs}
        followed_jobs = {each.epoch: each for each in self.followed_jobs}
        held = [
            memory_pressure.StartMemory(job.epoch, job.local_share.arena_bytes, job.has_complete, job.is_idle)
            for job in self.former_jobs
        ]
        held += [
            memory_pressure.StartMemory(each.epoch, each.local_share.arena_bytes, False, each.is_idle)
            for each in self.followed_jobs
        ]
        held.sort(key=lambda each: each.epoch)
        epochs = memory_pressure.choose_evictions(held, missing, self._retention_rule())
        for epoch in epochs:
            if epoch in jobs:
                self.former_jobs.remove(jobs[epoch])
                jobs[epoch].drop()
            else:
                followed_jobs[epoch].is_over = True  # dropped, with its replicas, by `_tend_followings`
        return sum(each.held_bytes for each in held if each.epoch in epochs), len(epochs)

    def _emit_event(self, event: Event) -> None:
        if self.current_job is not None:
            self.current_job.emit(event.name, event.message, event.loud, event.data)
        elif self._start is not None:
            send_event(self._start.peer, event)

    def _on_notice(self, word: NoticeChange, when: ExitTiming = ExitTiming.IN_TIME) -> None:
        """A notice, or its withdrawal, was heard on this node. `when`: how a job answers a certain one."""
        if self.current_job is not None:
            self.current_job.on_notice(word, when)

    def _announce_complete_checkpoint(self, job: Job) -> None:
        """Tells the other nodes that a checkpoint of `job` is complete: they may drop those of former epochs."""
        raise NotImplementedError


def owner_of(host: str) -> str:
    """The host's name in the characters that a key may have (types.PATH_NAME)."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", host)[:40].lstrip(".") or "node"
