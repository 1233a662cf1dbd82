"""The orphan committer: decides when, and from which remaining nodes, an orphaned checkpoint of a job is committed.

A checkpoint is orphaned when its coordinator is lost, no rank trains on these nodes, and no start comes for it.
Checkpoints of earlier starts count too. The nodes take turns in the job's order (`CommitTurns`). The node whose turn it
is surveys the others, as a start does: until it tells them the outcome, none of them drops what it listed, and no other
node begins. Lost snapshots are rebuilt from parity, the holders write their frames, and one record is put if the run's
branch history still needs it (`orphan_commit.judge`). A start ends the attempt, since it may restore newer memory. A
memory-only node does the same with what it holds, and surveys nobody: it may lack access to the store.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.agent.commit.commit_turns import TURNS, CommitTurns
from ckpt.agent.commit.distributed_write import DistributedWrite, write_part
from ckpt.agent.commit.job_options import JobOptions
from ckpt.agent.commit.orphan_commit import OrphanVerdict, commit_orphan, judge
from ckpt.agent.commit.store_client import StoreClient
from ckpt.agent.node.node_context import NodeContext
from ckpt.agent.node.node_memory import NodeMemory
from ckpt.agent.replication.survey import survey
from ckpt.agent.restore.collect import CheckpointCollector
from ckpt.agent.runtime.coroutines import EXPECTED, Task, run_on, spawn
from ckpt.agent.runtime.workers import Lane, error_text
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.agent.snapshots.manifest_gather import GatheredManifest
from ckpt.agent.snapshots.remote_share import RemoteShare, WriteRequest
from ckpt.errors import AgentError, Superseded
from ckpt.events import Event
from ckpt.policy.save_options import Limits
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.commit.commit_terms import CommitTerms
    from ckpt.agent.job.follower_job import FollowerJob
    from ckpt.agent.job.job import Job
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.ipc.node_list import NodeAt
    from ckpt.store.packs import Written

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class UncoordinatedJob:
    """A job that no process here works for. `epoch`: of its newest start. `nodes`: in the job's order, its former
    coordinator first; () on a memory-only node, which commits what it holds by itself. `turn`: of this node, from 0.
    `terms`: by epoch, since the checkpoint may be of an earlier start."""

    epoch: Epoch
    nodes: Sequence[NodeAt]
    turn: int
    terms: Mapping[Epoch, CommitTerms]


@dataclass(slots=True)
class _Attempt:
    """One attempt to commit an orphaned checkpoint. `answered_nodes`: the other nodes that answered the survey.
    `identity`: what is being committed. `settled`: the epoch of a checkpoint that the run does not need; older ones are
    tried then."""

    job: UncoordinatedJob
    network: PeerNetwork
    inventory: Inventory
    answered_nodes: list[NodeAt] = field(default_factory=list)
    cancel: threading.Event = field(default_factory=threading.Event)
    identity: Identity | None = None
    settled: Epoch | None = None


class OrphanCommitter:
    """The orphaned checkpoints of one node. Main thread only. `turns`: the turns of this node. `find_job`: the orphaned
    job whose checkpoints lie here; None: there is none, or a job needs this node. `error`: of the last attempt."""

    def __init__(
        self,
        context: NodeContext,
        memory: NodeMemory,
        turns: CommitTurns,
        find_job: Callable[[], UncoordinatedJob | None],
    ) -> None:
        self.turns, self.error = turns, ""
        self._context, self._memory, self._find_job = context, memory, find_job
        self._attempt: _Attempt | None = None

    @property
    def is_busy(self) -> bool:
        """True while an attempt is under way."""
        return self._attempt is not None

    @property
    def committing(self) -> Identity | None:
        """The checkpoint that is being committed."""
        return self._attempt.identity if self._attempt is not None else None

    def grant_lease(self, by: str, for_orphans: bool = False) -> None:
        """Another agent surveys this node: takes an inventory lease, and an attempt from here gives way. Errors:
        AgentError if agent `by` has to give way itself, or if a job coordinated here still needs this node."""
        # Of two nodes that survey each other, the one with the lower name goes on.
        if for_orphans and self._attempt is not None and by > self._attempt.network.agent_name:
            raise AgentError("this node is already committing it")
        # Such a job could take no snapshot until the outcome.
        if for_orphans and any(job.is_needed for job in self._context.jobs.coordinated()):
            raise AgentError("a job that is coordinated here goes on")
        self._memory.grant_inventory_lease(by, for_orphans)
        self.end_attempt()

    def schedule(self, now_s: float) -> float | None:
        """Begins this node's attempt in its turn, and ends it when a job needs the node. Returns when to look again."""
        job, attempt = self._find_job(), self._attempt
        if attempt is not None and (job is None or job.epoch != attempt.job.epoch):
            self.end_attempt()
        if job is None:
            self.turns.restart_turns()
            return None
        due_s = self.turns.due_s(job.turn, now_s)
        held = self.is_busy or self._memory.inventory_lease.is_held
        if held or not job.terms or self._context.server.is_end_requested:
            return None
        if due_s is None or now_s < due_s:
            return due_s
        self._begin_attempt(job)
        return None

    def try_last(self) -> None:
        """Begins a last attempt at once, whosever turn it is: this node is asked to end."""
        job = self._find_job()
        if job is not None and not self.turns.is_settled:
            self._begin_attempt(job)

    def _begin_attempt(self, job: UncoordinatedJob) -> None:
        network = self._context.network
        assert network is not None  # else there is no orphaned job
        attempt = self._attempt = _Attempt(job, network, self._memory.inventory(whole=True))
        self.error = ""
        if not self._memory.inventory_lease.is_held:
            self._memory.grant_inventory_lease(network.agent_name, for_orphans=True)
        spawn(self._run(attempt), functools.partial(self._guard, attempt))

    def end_attempt(self, settled: Epoch | None = None) -> None:
        """Ends the attempt, if one is under way, and tells its outcome to the surveyed nodes. `settled`: nothing is
        left to commit up to this epoch; None: the attempt came to nothing."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        attempt.cancel.set()
        self.turns.is_settled = settled is not None
        self.turns.record_attempt(time.monotonic())
        self._memory.inventory_lease.end_lease(attempt.network.agent_name)
        for node in attempt.job.nodes:
            done = str(settled) if settled is not None and node in attempt.answered_nodes else None
            attempt.network.notify(node.name, {"t": "start-outcome", "epoch": None, "settled": done})

    def _guard(self, attempt: _Attempt, what: Callable[[], None]) -> None:
        """Runs `what` if the attempt is still under way. An error in `what` ends the attempt and nothing else."""
        if self._attempt is not attempt:
            return
        try:
            what()
        except Exception as exc:
            if not isinstance(exc, EXPECTED):
                log.error("committing what %s has left in memory failed in the agent", attempt.job.epoch, exc_info=exc)
            self._fail(attempt, error_text(exc))

    def _fail(self, attempt: _Attempt, why: str, settled: Epoch | None = None) -> None:
        log.warning("what %s has left in memory is not committed from here: %s", attempt.job.epoch, why)
        self.error = why if settled is None else ""
        self.end_attempt(settled)

    async def _run(self, attempt: _Attempt) -> None:
        """Commits the newest checkpoint that memory can give and that the run still needs. Errors: CkptError."""
        await self._survey_other_nodes(attempt)
        terms, store, found = attempt.job.terms, self._context.store, attempt.inventory
        while whole := [each for each in found.complete_checkpoints() if each.epoch in terms]:
            identity = max(whole)
            attempt.identity = identity
            judged = functools.partial(_judge_now, store, terms[identity.epoch], identity)
            verdict = await run_on(self._context.workers, Lane.STORE, judged)
            why = f"step {identity.version.step} is {verdict.value}"
            if verdict in (OrphanVerdict.COMMIT, OrphanVerdict.CLAIM):
                try:
                    gathered = await self._collect_orphan(attempt, identity)
                except EXPECTED as exc:
                    why = f"it cannot be had: {error_text(exc)}"
                else:
                    await self._commit_orphan(attempt, gathered)
                    return
            else:
                attempt.settled = attempt.settled or identity.epoch
                if verdict is OrphanVerdict.DONE:
                    self._fail(attempt, why, attempt.settled)
                    return
            log.warning("%s in memory is not committed from here: %s", identity, why)
            found.mark_unusable(identity)
        # A memory-only node surveys nobody: what it lacks comes only with a coordinator.
        lacks = not attempt.job.nodes and attempt.identity is None
        settled = attempt.job.epoch if lacks else attempt.settled
        self._fail(attempt, "no checkpoint is whole on the nodes that answer", settled)

    async def _survey_other_nodes(self, attempt: _Attempt) -> None:
        network, nodes = attempt.network, attempt.job.nodes
        others = [node for node in nodes[1:] if node.name != network.agent_name]
        # The former coordinator's agent may be connected: it may have followed a newer start that was led from here.
        others += [node for node in nodes[:1] if network.channel(node.name) is not None]
        found, _ = await survey(network, others, {"for_orphans": True}, self._context.server.call_later)
        for node in [node for node in nodes if node.name in found]:
            attempt.inventory.merge(found[node.name], node.name)
            attempt.answered_nodes.append(node)

    async def _collect_orphan(self, attempt: _Attempt, identity: Identity) -> GatheredManifest:
        mine = [node for node in attempt.job.nodes if node.name == attempt.network.agent_name]
        memory, workers = self._memory, self._context.workers
        services = attempt.network, workers, memory.replica_service, memory.arenas_of, attempt.inventory
        return await CheckpointCollector(*services, [*mine, *attempt.answered_nodes], ()).collect_whole(identity)

    async def _commit_orphan(self, attempt: _Attempt, found: GatheredManifest) -> None:
        checkpoint, identity = found.checkpoint, found.checkpoint.identity
        terms, step = attempt.job.terms[identity.epoch], identity.version.step
        text = f"nobody coordinates {identity.epoch} any more: step {step}, which the nodes that are left have"
        log.warning("%s in memory, is committed from here", text)
        parts = self._plan_orphan_write(attempt, found, terms)
        commit = functools.partial(commit_orphan, self._context.store, checkpoint, terms, attempt.cancel, parts)
        committing = Task(run_on(self._context.workers, Lane.COMMIT, commit))
        self._memory.replicas.arenas.lease_until(identity, committing)
        try:
            await committing
        except Superseded as exc:
            self._fail(attempt, str(exc), identity.epoch)
            return
        text = f"step {identity.version.step} is committed by a node that is left of the job that saved it"
        log.warning("%s", text)
        self._context.emit_event(Event("commit.orphan", text, True, {"identity": str(identity)}))
        self.end_attempt(attempt.settled or identity.epoch)

    def _plan_orphan_write(self, attempt: _Attempt, found: GatheredManifest, terms: CommitTerms) -> DistributedWrite:
        checkpoint, network = found.checkpoint, attempt.network
        ranks, rest = assign_writers(found.places.holders)

        async def write(name: str, wanted: WriteRequest, cancel: threading.Event) -> Written:
            if name:
                node = RemoteShare(network, name, checkpoint.identity.epoch, len(found.places.holders), ())
                return await node.write_frames(wanted)
            work = functools.partial(write_part, self._context.store, wanted, checkpoint.arenas, cancel=cancel)
            return await run_on(self._context.workers, Lane.PART, work)

        options = JobOptions(codec=terms.codec, limits=Limits(bandwidth=terms.bandwidth))
        server, margin_s = self._context.server, self._context.settings.heartbeat_s
        what = checkpoint, options, ranks, rest.__getitem__, write
        return DistributedWrite(*what, server.post, server.call_later, margin_s)


def _judge_now(store: StoreClient, terms: CommitTerms, identity: Identity) -> OrphanVerdict:
    """Runs on a worker thread. Errors: StorageError."""
    return judge(store.open_run().view(), terms.claim, identity)


def find_uncoordinated_job(context: NodeContext) -> UncoordinatedJob | None:
    """The orphaned job whose checkpoints lie on this node; None: there is none, or a job needs this node."""
    jobs, newest = context.jobs.coordinated(), context.jobs.newest_followed
    needed = any(job.is_needed for job in jobs) or context.jobs.has_needed_followed
    if newest is None or needed or context.jobs.start is not None or context.network is None:
        return None
    # Jobs coordinated here count too. One newer than `newest` that has a checkpoint rules a commit out.
    known: list[FollowerJob | Job] = [*context.jobs.followed, *jobs]
    terms = {each.epoch: each.terms for each in known if each.terms is not None}
    if any(job.epoch > newest.epoch and job.context.checkpoints for job in jobs):
        terms = {}
    me = context.network.agent_name
    turn = next((n for n, node in enumerate(newest.nodes[1:]) if node.name == me), TURNS)
    return UncoordinatedJob(newest.epoch, newest.nodes, turn, terms)


def assign_writers(holders: Mapping[int, Sequence[str]]) -> tuple[dict[str, frozenset[int]], dict[str, list[str]]]:
    """Two maps by node name: the ranks whose frames the node writes, and the other nodes that hold all of these ranks.
    `holders`: by rank, the nodes that hold its snapshot, preferred first; "" is this node, which writes all it holds.
    """
    ranks: dict[str, set[int]] = {}
    for rank, names in holders.items():
        ranks.setdefault("" if "" in names else names[0], set()).add(rank)
    rest = {
        name: [each for each in holders[min(theirs)] if each != name and all(each in holders[rank] for rank in theirs)]
        for name, theirs in ranks.items()
    }
    return {name: frozenset(theirs) for name, theirs in ranks.items()}, rest
