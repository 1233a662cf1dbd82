"""The jobs that have a part on this node, and the start under way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckpt.agent.job.follower_job import FollowerJob
from ckpt.agent.job.job import Job
from ckpt.agent.snapshots.local_share import LocalShare
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
from ckpt.agent.snapshots.remote_share import AnyPeer
from ckpt.errors import AgentError, CkptError
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.node.startup_state import Start
    from ckpt.store.lineage import Claim

log = logging.getLogger("ckpt")


class NodeJobs:
    """The jobs of one agent. Main thread only.

    `current`: the job that trains here and is coordinated here. `former`: the coordinated jobs before it, oldest first;
    kept while they have something to finish or to hand on. `followed`: the jobs with ranks here that other nodes
    coordinate. `start`: the start under way."""

    def __init__(self) -> None:
        self.current: Job | None = None
        self.former: list[Job] = []
        self.followed: list[FollowerJob] = []
        self.start: Start | None = None

    # -- look-ups

    def coordinated(self) -> list[Job]:
        """The jobs coordinated here, oldest first."""
        return [*self.former, *([self.current] if self.current is not None else [])]

    def all(self) -> list[Job | FollowerJob]:
        """The jobs with a part on this node, wherever they are coordinated."""
        return [*self.coordinated(), *self.followed]

    def job_of(self, epoch: Epoch) -> Job | None:
        return next((each for each in self.coordinated() if each.epoch == epoch), None)

    def followed_job_of(self, epoch: Epoch) -> FollowerJob | None:
        return next((each for each in self.followed if each.epoch == epoch), None)

    @property
    def newest_followed(self) -> FollowerJob | None:
        return max(self.followed, key=lambda each: each.epoch, default=None)

    @property
    def has_needed_followed(self) -> bool:
        """Whether a followed job keeps this agent alive. Only the newest epoch does so by its mere connection: the
        coordinator of an older one may follow a newer job led from here, and the two agents would keep each other
        alive for ever."""
        newest = max((each.epoch for each in self.all()), default=None)
        return any(each.is_needed and (each.epoch == newest or not each.is_idle) for each in self.followed)

    def followed_rank_of(self, peer: AnyPeer) -> tuple[FollowerJob, int] | None:
        """The followed job and the rank of that connection; None if it joined none."""
        for each in self.followed:
            rank = each.rank_of(peer)
            if rank is not None:
                return each, rank
        return None

    def member_of(self, peer: AnyPeer) -> tuple[Job, int]:
        """The coordinated job and the rank of that connection. Errors: AgentError if it joined none."""
        for job in self.coordinated():
            rank = job.context.connections.rank_of(peer)
            if rank is not None:
                return job, rank
        raise AgentError("this connection has joined no job")

    def is_involved(self, peer: AnyPeer) -> bool:
        """Whether that connection began or joined a job."""
        return self.followed_rank_of(peer) is not None or any(job.involves(peer) for job in self.coordinated())

    def is_coordinator(self, name: str, epoch: Epoch | None = None) -> bool:
        """Whether agent `name` coordinates `epoch` (None: any epoch) with ranks on this node."""
        return any(each.coordinator.name == name and epoch in (each.epoch, None) for each in self.followed)

    def shares(self) -> list[tuple[Epoch, LocalShare]]:
        """The memory of the local ranks, by job."""
        return [(each.epoch, each.local_share) for each in self.all()]

    def begun_claims(self) -> list[Claim]:
        """The claims of the jobs that train here now."""
        found = [self.current, *self.followed]
        return [each.claim for each in found if each is not None and each.claim is not None]

    def find_checkpoint(self, identity: Identity) -> tuple[Job, int, MemoryCheckpoint] | None:
        """The former job of this node alone that has that checkpoint, with its slot; None: none has."""
        for job in self.former:
            found = job.context.find_checkpoint(identity) if not job.nodes else None
            if found is not None:
                return job, found[0], found[1]
        return None

    # -- changes

    def retire_current(self) -> None:
        """Makes the current job a former one."""
        if self.current is not None:
            self.former.append(self.current)
            self.current = None

    def peer_disconnected(self, peer: AnyPeer) -> None:
        for each in self.all():
            each.peer_disconnected(peer)

    def peer_died(self, peer: AnyPeer) -> None:
        for each in self.all():
            each.peer_died(peer)

    # -- the start under way

    def guard_start(self, start: Start, what: Callable[[], None]) -> None:
        """Runs `what` if that start is still under way. An error in `what` fails the start, and ends no other job."""
        if self.start is not start:
            return
        try:
            what()
        except Exception as exc:
            self.fail_start(start, exc)

    def fail_start(self, start: Start, error: BaseException) -> None:
        """Refuses the waiting request with `error`. An epoch that has begun gets no trainers then, and ends."""
        if not isinstance(error, CkptError):
            log.error("a start of launch %r failed in the agent", start.launch, exc_info=error)
        request_id, start.request_id = start.request_id, None
        if request_id is not None:
            start.peer.refuse(request_id, error)
        if start.job is None:
            self.start = None
