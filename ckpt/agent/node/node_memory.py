"""The memory of this node: its jobs, arenas and replicas, and when each is freed.

One job is current. Former jobs are kept while they have something to finish or to hand on. A former job is dropped when
a newer checkpoint is complete, or when memory runs out and the job does not hold the only checkpoint left.
"""

from __future__ import annotations

import math
import re
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ckpt.agent.adaptive.alarms import Alarms
from ckpt.agent.adaptive.history import LearntHistory
from ckpt.agent.commit.store_client import StoreClient
from ckpt.agent.job.follower_job import FollowerJob
from ckpt.agent.job.job import Job
from ckpt.agent.job.job_context import Services, tell
from ckpt.agent.node.inventory_lease import InventoryLease
from ckpt.agent.node.startup_state import Start
from ckpt.agent.observability.status import Status
from ckpt.agent.preemption.deadline_strategy import When
from ckpt.agent.preemption.notice_listener import NoticeListeners
from ckpt.agent.replication.parity_service import ParityService
from ckpt.agent.replication.replica_store import ReplicaStore
from ckpt.agent.replication.replication_manager import SLOTS_MIN
from ckpt.agent.runtime import memory_plan
from ckpt.agent.runtime.event_loop import EventLoop
from ckpt.agent.runtime.memory_plan import MemoryUse
from ckpt.agent.runtime.workers import Workers
from ckpt.agent.snapshots.candidates import Remembered
from ckpt.agent.snapshots.inventory import Inventory, sealed, whose
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
from ckpt.agent.state import memory_pressure
from ckpt.agent.state.retention_rule import Begun
from ckpt.events import Event, Events
from ckpt.ipc.arena import Arena
from ckpt.preemption.notice import Word
from ckpt.settings import Settings
from ckpt.types import HERE, Epoch, Identity, counted

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.store.lineage import Claim


class NodeMemory:
    """The part of the agent that owns the jobs, replicas and parity of this node. Main thread only. `current`: the job
    that trains here and is coordinated here; `former`: those before it, oldest first. `followings`: the jobs with ranks
    here that other nodes coordinate. `fence`: the inventory lease. `newest_elsewhere`: the newest epoch that another
    node knows to have a complete checkpoint. `network`: None in a job of one node."""

    def __init__(self, url: str, settings: Settings, server: EventLoop) -> None:
        self.url = url
        self.incarnation = secrets.token_hex(8)
        self.current: Job | None = None
        self.former: list[Job] = []
        self._relieved_s = self._replanned_s = -math.inf
        self.followings: list[FollowerJob] = []
        self.network: PeerNetwork | None = None
        self.newest_elsewhere = Epoch(0, "0" * 16)
        self._settings = settings
        self._server = server
        self._bulk = Workers(server.post)
        self.copies = ReplicaStore(self._bulk, server.post)
        self.fence = InventoryLease()
        self.copies.bound(self._room)
        self.copies.may_go = self._may_go
        self.copies.check = lambda epoch: self.fence.check(HERE, epoch, time.monotonic())
        own = self._arenas_of, lambda: self.network, self._bulk.free_bytes
        self.parities = ParityService(self._bulk, server.post, self.copies, *own)
        self._events = Events(lambda event: server.post(lambda: self._event(event)))
        self._store = StoreClient(url, settings, self._events, owner_of(socket.gethostname()))
        self._listening = NoticeListeners(server.post, self._heard, self._events)
        self.showing = Status(url, settings, server, self.status, self._event)
        self.foreseeing = Alarms(settings, url, server, self._events)
        self._relearning = LearntHistory(self._bulk, self._store, self.foreseeing, self._events)
        self._services = Services(
            server,
            self._bulk,
            self._store,
            settings.heartbeat_s,
            self._taken,
            self._listening,
            server.path.with_suffix(".outcome.json"),
            self.copies,
            lambda: self.network,
            self.showing.account,
            self.showing.told,
            self.foreseeing.numbers,
            self.parities,
        )
        self._start: Start | None = None

    def status(self) -> dict[str, Any]:
        raise NotImplementedError

    def _jobs(self) -> list[Job]:
        """The jobs coordinated here, oldest first."""
        return [*self.former, *([self.current] if self.current is not None else [])]

    def _job_of(self, epoch: Epoch) -> Job | None:
        return next((each for each in self._jobs() if each.epoch == epoch), None)

    def _remembered(self, start: Start) -> list[Remembered]:
        """The epochs that got beyond their start, here or on the surveyed nodes, with their complete checkpoints in
        memory. Without refused epochs: another job has the run, and their checkpoints are on no branch history."""
        alone = [] if start.nodes else [job for job in self.former if not job.nodes]
        whole = [Remembered(job.claim, job.held()) for job in alone if job.claim is not None]
        refused = self._store.claims.refused
        return [each for each in (*whole, *start.inventory.remembered()) if each.epoch not in refused]

    def _inventory(self, whole: bool) -> Inventory:
        """What this node's memory holds. `whole`: also the jobs of this node alone."""
        found = Inventory()
        for job in self._jobs():
            if whole or job.nodes:
                found.add_epoch(job.claim, job.epoch, job.ranks.ended())
                found.add_arenas(job.own.all_arenas())
        for each in self.followings:
            found.add_epoch(each.claim, each.epoch, each.ranks.ended())
            found.add_arenas(each.ranks.all_arenas())
        found.add_arenas(self.copies.arenas())
        found.add_chunks(self.copies.chunks.kept.values())
        for identity in self.copies.identities:
            # The step 0: a holder of a replica has not seen how far that run came.
            found.add_epoch(None, identity.epoch, 0)
        elsewhere = (each for each in (self.fence.floor, self.newest_elsewhere) if each.number)
        # The store may not know these epochs; the next start's epoch has to exceed them all.
        for epoch in (*self._store.claims.begun, *elsewhere):
            found.add_epoch(None, epoch, 0)
        return found

    def _arenas_of(self, identity: Identity, hashed: bool = True) -> dict[int, Arena]:
        """The arenas on this node that hold a snapshot of that checkpoint, by rank. `hashed`: only hashed ones, which
        proves that the coordinator saw all ranks stage it."""
        found: dict[int, Arena] = {}
        shares = [*(job.own for job in self._jobs()), *(each.ranks for each in self.followings)]
        arenas = [arena for share in shares for arena in share.all_arenas()]
        for arena in [*arenas, *self.copies.arenas()]:
            held = sealed(arena) if hashed else whose(arena)
            if held is not None and held[0][0] == identity:
                found.setdefault(held[0][1], arena)
        return found

    def _slot_of(self, identity: Identity) -> tuple[Job, int, MemoryCheckpoint] | None:
        """The former job of this node alone that has that checkpoint, with its slot; None: none has."""
        for job in self.former:
            found = job.checkpoint(identity) if not job.nodes else None
            if found is not None:
                return job, found[0], found[1]
        return None

    def _in_memory(self, identity: Identity) -> MemoryCheckpoint | None:
        found = self._slot_of(identity)
        return found[2] if found is not None else None

    def _taken(self, epoch: Epoch) -> MemoryUse:
        """The memory taken by everything but the slots of that epoch's job."""
        others = [job.ranks.arena_bytes for job in self._jobs() if job.epoch != epoch]
        others += [each.ranks.arena_bytes for each in self.followings if each.epoch != epoch]
        lent_bytes = self.copies.bytes_of(epoch)
        return MemoryUse(sum(others) + self.copies.bytes - lent_bytes, lent_bytes - self.copies.to_take_bytes)

    def _freeze(self, by: str, left: bool = False) -> None:
        """Agent `by` surveys this node: nothing listed is dropped until the outcome. `left` and errors: see
        InventoryLease.asked."""
        self.fence.asked(by, self._newest_epoch(), left)

    def _newest_epoch(self) -> Epoch:
        """The newest epoch that is known here."""
        known = [*self._inventory(whole=True).steps, *(job.epoch for job in self._jobs())]
        return max(known, default=self.fence.floor)

    def _drop_former(self) -> None:
        """Drops each idle former job that a newer complete checkpoint supersedes, or that has no checkpoint and is
        closed in the store."""
        if self.fence.stands(time.monotonic()):
            return
        newer = self.current is not None and self.current.group.outdoes_former
        if newer and self.current is not None and not self.current.told_newer:
            self.current.told_newer = True
            self.current.plan_soon()
            # Peers keep no replicas of the restored checkpoint any more.
            self.current.parent_is_safe(False)
            self._tell_others_to_forget(self.current)
        for job in list(self.former):
            outdone = newer or job.epoch < self.newest_elsewhere
            nothing = not (job.checkpoints or job.holds_unread)
            if job.is_idle and (outdone or (nothing and job.group.closed_in_store)):
                self.former.remove(job)
                job.drop()

    def _room(self) -> int:
        """The bytes that replicas may take on this node now: those they have, and what is free beyond the reserve. A
        user's memory limit lowers this to what remains beside the newest job's slots. These are at least SLOTS_MIN, if
        so many are planned, and all that exist: a surplus slot is freed once it holds nothing needed."""
        reserve_bytes = memory_pressure.reserve_bytes(memory_plan.total_bytes())
        rooms = [self.copies.taken_bytes + max(0, self._bulk.free_bytes() - reserve_bytes)]
        shares = [(job.epoch, job.own) for job in self._jobs()] + [(each.epoch, each.ranks) for each in self.followings]
        newest = max(shares, key=lambda each: each[0], default=None)
        if newest is not None and (plan := newest[1].limited) is not None:
            # The plan counts the replicas of other epochs as taken.
            others_bytes = self.copies.bytes - self.copies.bytes_of(newest[0])
            slots = max(min(SLOTS_MIN, plan.slots), len(newest[1].arenas))
            rooms.append(others_bytes + plan.left_bytes(slots))
        return min(rooms)

    def _begun(self) -> Begun | None:
        """The newest start that this node has a part in, and what it restored. None: there is none, or the inventory
        lease refuses its drops."""
        found = [self.current, *self.followings]
        return self._begun_with([each.claim for each in found if each is not None and each.claim is not None])

    def _begun_with(self, claims: Sequence[Claim]) -> Begun | None:
        claim = max(claims, key=lambda claim: claim.epoch, default=None)
        if claim is None or self.fence.refusal(HERE, claim.epoch, time.monotonic()):
            return None
        held, parent, told = self._inventory(whole=False), claim.parent, self.copies.told_safe
        safe = [each for each in held.worlds if parent is not None and each <= parent and not held.missing(each)]
        return Begun(claim.epoch, parent, max([*safe, *([told] if told is not None else [])], default=None))

    def _may_go(self) -> Callable[[Identity], bool]:
        """A predicate: which checkpoints may be evicted to make room for newer ones."""
        begun = self._begun()
        return begun.outdates if begun is not None else lambda identity: False

    def _tend_memory(self, now_s: float) -> float | None:
        """Gives memory back when the machine runs out of it: warm pages, then replicas, then former jobs. Returns when
        to look again; None: nothing is held."""
        if not self._jobs() and not self.followings and not self.copies.bytes:
            return None
        if now_s < self._relieved_s + memory_pressure.PERIOD_S:
            return self._relieved_s + memory_pressure.PERIOD_S
        self._relieved_s = now_s
        free_bytes = self._bulk.free_bytes()
        missing = memory_pressure.missing_bytes(free_bytes, memory_plan.total_bytes())
        freed, gone = self.copies.cool(missing) if missing else 0, 0
        if freed < missing and not self.fence.stands(now_s):
            for give_back in (self._give_back_copies, self._give_back_starts):
                more, count = give_back(missing - freed)
                freed, gone = freed + more, gone + count
        if freed:
            what = f", {counted(gone, 'older checkpoint')} among them" if gone else ""
            text = f"memory runs out here, {free_bytes >> 20:,} MiB are left: {freed >> 20:,} MiB are given back{what}"
            self._event(Event("memory.released", text, bool(gone), {"free_bytes": free_bytes, "freed_bytes": freed}))
        return now_s + memory_pressure.PERIOD_S

    def _tend_room(self, now_s: float) -> float | None:
        """Frees superseded checkpoints of earlier starts that leave a job too little memory, then plans the job's
        memory anew. Returns when to look again; None: no job lacks memory."""
        job, newest = self.current, max(self.followings, key=lambda each: each.epoch, default=None)
        cramped = (job is not None and job.is_cramped) or (newest is not None and newest.ranks.is_cramped)
        if not cramped:
            return None
        if now_s < self._replanned_s + memory_pressure.PERIOD_S:
            return self._replanned_s + memory_pressure.PERIOD_S
        begun = self._begun()
        if begun is None:
            return None
        self._replanned_s = now_s
        for former in self._jobs():
            if former.epoch < begun.epoch:
                former.give_back(begun.outdates)
        for each in self.followings:
            if each.epoch < begun.epoch and not each.has_ranks:
                each.ranks.give_back(lambda identity: begun.outdates(identity) and not self._is_read(identity))
        if job is not None and job.is_cramped:
            job.plan_again()
        return now_s + memory_pressure.PERIOD_S

    def _is_read(self, identity: Identity) -> bool:
        """Whether peers read, or may read, replicas of that checkpoint from here."""
        return self.copies.is_offered(identity)

    def _give_back_copies(self, missing: int) -> tuple[int, int]:
        """Evicts replicas and parity of superseded checkpoints, the oldest first, until `missing` bytes are free.
        Returns the bytes freed, and of how many checkpoints."""
        begun, freed, gone = self._begun(), 0, 0
        for identity in sorted(self.copies.identities):
            if freed < missing and begun is not None and begun.outdates(identity):
                before = self.copies.bytes
                self.copies.forget(identity.__eq__)
                self.copies.cool(missing - freed)
                freed, gone = freed + before - self.copies.bytes, gone + 1
        return freed, gone

    def _give_back_starts(self, missing: int) -> tuple[int, int]:
        """Drops what earlier starts left here; parameter and result as `_give_back_copies`."""
        jobs = {job.epoch: job for job in self.former}
        followings = {each.epoch: each for each in self.followings}
        held = [
            memory_pressure.StartMemory(job.epoch, job.own.arena_bytes, job.has_complete, job.is_idle)
            for job in self.former
        ]
        held += [
            memory_pressure.StartMemory(each.epoch, each.ranks.arena_bytes, False, each.is_idle)
            for each in self.followings
        ]
        held.sort(key=lambda each: each.epoch)
        epochs = memory_pressure.which_go(held, missing, self._begun())
        for epoch in epochs:
            if epoch in jobs:
                self.former.remove(jobs[epoch])
                jobs[epoch].drop()
            else:
                followings[epoch].over = True  # dropped, with its replicas, by `_tend_followings`
        return sum(each.bytes for each in held if each.epoch in epochs), len(epochs)

    def _event(self, event: Event) -> None:
        if self.current is not None:
            self.current.emit(event.name, event.message, event.loud, event.data)
        elif self._start is not None:
            tell(self._start.peer, event)

    def _heard(self, word: Word, when: When = When.IN_TIME) -> None:
        """A notice, or its withdrawal, was heard on this node. `when`: how a job answers a certain one."""
        if self.current is not None:
            self.current.hear(word, when)

    def _tell_others_to_forget(self, job: Job) -> None:
        """Tells the other nodes that a checkpoint of `job` is complete: they may drop those of former epochs."""
        raise NotImplementedError


def owner_of(host: str) -> str:
    """The host's name in the characters that a key may have (types.PATH_NAME)."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", host)[:40].lstrip(".") or "node"
