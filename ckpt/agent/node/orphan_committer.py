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
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt.agent.commit.commit_turns import TURNS, CommitTurns
from ckpt.agent.commit.distributed_write import DistributedWrite, OnWritten, write_part
from ckpt.agent.commit.orphan_commit import OrphanVerdict, commit_orphan, judge
from ckpt.agent.commit.store_client import JobOptions
from ckpt.agent.node.peer_handlers import PeerHandlers
from ckpt.agent.replication.survey import survey_nodes
from ckpt.agent.restore.collect import CheckpointCollector
from ckpt.agent.runtime.event_loop import EventLoop, Peer
from ckpt.agent.runtime.workers import Lane, failure
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.agent.snapshots.manifest_gather import GatheredManifest
from ckpt.agent.snapshots.remote_share import RemoteShare, WriteRequest
from ckpt.errors import AgentError, Superseded
from ckpt.events import Event
from ckpt.policy.save_options import Limits
from ckpt.settings import Settings
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.commit.commit_terms import CommitTerms
    from ckpt.agent.job.follower_job import FollowerJob
    from ckpt.agent.job.job import Job
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
    from ckpt.ipc.messages import Message
    from ckpt.ipc.node_list import NodeAt
    from ckpt.store.commit import Committed
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


class OrphanCommitter(PeerHandlers):
    """The part of the agent that commits orphaned checkpoints (see above). Main thread only."""

    def __init__(self, url: str, settings: Settings, server: EventLoop) -> None:
        super().__init__(url, settings, server)
        self._turns = CommitTurns(settings.linger_s)
        self._commit_attempt: _Attempt | None = None
        self._commit_error = ""  # of the last attempt

    def _begin(self, peer: Peer, message: Message) -> None:
        self._end_commit_attempt()
        super()._begin(peer, message)

    def _grant_inventory_lease(self, by: str, for_orphans: bool = False) -> None:
        """As `NodeMemory._grant_inventory_lease`. An attempt from here gives way to another agent's survey. Errors:
        AgentError if agent `by` has to give way itself, or if a job coordinated here still needs this node."""
        other = self.network is None or by != self.network.agent_name
        # Of two nodes that survey each other, the one with the lower name goes on.
        if for_orphans and other and self._commit_attempt is not None and by > self._commit_attempt.network.agent_name:
            raise AgentError("this node is already committing it")
        # Such a job could take no snapshot until the outcome.
        if for_orphans and other and any(job.is_needed for job in self._jobs()):
            raise AgentError("a job that is coordinated here goes on")
        super()._grant_inventory_lease(by, for_orphans)
        if other:
            self._end_commit_attempt()

    def _on_start_outcome(self, name: str, fields: dict[str, Any]) -> None:
        super()._on_start_outcome(name, fields)
        if fields.get("settled") is not None:
            settled = Epoch.parse(str(fields["settled"]))
            self._turns.is_settled = self._turns.is_settled or all(each.epoch <= settled for each in self.followed_jobs)

    def _find_uncoordinated_job(self) -> UncoordinatedJob | None:
        """The orphaned job whose checkpoints lie here; None: there is none, or a job needs this node."""
        jobs, newest = self._jobs(), max(self.followed_jobs, key=lambda each: each.epoch, default=None)
        needed = any(job.is_needed for job in jobs) or self._has_needed_followed_job
        if newest is None or needed or self._start is not None or self.network is None:
            return None
        # Jobs coordinated here count too. One newer than `newest` that has a checkpoint rules a commit out.
        known: list[FollowerJob | Job] = [*self.followed_jobs, *jobs]
        terms = {each.epoch: each.terms for each in known if each.terms is not None}
        if any(job.epoch > newest.epoch and job.checkpoints for job in jobs):
            terms = {}
        me = self.network.agent_name
        turn = next((n for n, node in enumerate(newest.nodes[1:]) if node.name == me), TURNS)
        return UncoordinatedJob(newest.epoch, newest.nodes, turn, terms)

    def _schedule_orphan_commit(self, now_s: float) -> float | None:
        """Begins this node's attempt in its turn, and ends it when a job needs the node. Returns when to look again."""
        job, attempt = self._find_uncoordinated_job(), self._commit_attempt
        if attempt is not None and (job is None or job.epoch != attempt.job.epoch):
            self._end_commit_attempt()
        if job is None:
            self._turns.restart_turns()
            return None
        due_s = self._turns.due_s(job.turn, now_s)
        held = self._commit_attempt is not None or self.inventory_lease.is_held
        if held or not job.terms or self._server.is_end_requested:
            return None
        if due_s is None or now_s < due_s:
            return due_s
        self._begin_commit_attempt(job)
        return None

    def _begin_commit_attempt(self, job: UncoordinatedJob) -> None:
        assert self.network is not None  # else there is no orphaned job
        attempt = self._commit_attempt = _Attempt(job, self.network, self._inventory(whole=True))
        self._commit_error = ""
        if not self.inventory_lease.is_held:
            self._grant_inventory_lease(self.network.agent_name, for_orphans=True)
        self._guard_commit_attempt(attempt, lambda: self._survey_other_nodes(attempt))

    def _end_commit_attempt(self, settled: Epoch | None = None) -> None:
        """Ends the attempt and tells its outcome to the surveyed nodes. `settled`: nothing is left to commit up to this
        epoch; None: the attempt came to nothing."""
        attempt, self._commit_attempt = self._commit_attempt, None
        if attempt is None:
            return
        attempt.cancel.set()
        self._turns.is_settled = settled is not None
        self._turns.record_attempt(time.monotonic())
        self.inventory_lease.end_lease(attempt.network.agent_name)
        for node in attempt.job.nodes:
            done = str(settled) if settled is not None and node in attempt.answered_nodes else None
            attempt.network.notify(node.name, {"t": "start-outcome", "epoch": None, "settled": done})

    def _guard_commit_attempt(self, attempt: _Attempt, what: Callable[[], None]) -> None:
        """Runs `what` if the attempt is still under way. An error in `what` ends the attempt and nothing else."""
        if self._commit_attempt is not attempt:
            return
        try:
            what()
        except Exception as exc:
            log.exception("what %s has left in memory is not committed from here", attempt.job.epoch)
            self._fail_commit_attempt(attempt, str(exc))

    def _fail_commit_attempt(self, attempt: _Attempt, why: str, settled: Epoch | None = None) -> None:
        log.warning("what %s has left in memory is not committed from here: %s", attempt.job.epoch, why)
        self._commit_error = why if settled is None else ""
        self._end_commit_attempt(settled)

    def _survey_other_nodes(self, attempt: _Attempt) -> None:
        def surveyed(found: Mapping[str, Inventory], silent: Sequence[str]) -> None:
            for node in [node for node in nodes if node.name in found]:
                attempt.inventory.merge(found[node.name], node.name)
                attempt.answered_nodes.append(node)
            self._choose_orphan(attempt)

        network, nodes = attempt.network, attempt.job.nodes
        others = [node for node in nodes[1:] if node.name != network.agent_name]
        # The former coordinator's agent may be connected: it may have followed a newer start that was led from here.
        others += [node for node in nodes[:1] if network.channel(node.name) is not None]
        guard = functools.partial(self._guard_commit_attempt, attempt)
        survey_nodes(network, others, surveyed, {"for_orphans": True}, guard, self._server.call_later)

    def _choose_orphan(self, attempt: _Attempt) -> None:
        """Chooses the newest checkpoint that memory can give, and commits it if the run still needs it."""
        terms = attempt.job.terms
        identity = max((each for each in attempt.inventory.complete_checkpoints() if each.epoch in terms), default=None)
        if identity is None:
            # A memory-only node surveys nobody: what it lacks comes only with a coordinator.
            lacks = not attempt.job.nodes and attempt.identity is None
            settled = attempt.job.epoch if lacks else attempt.settled
            self._fail_commit_attempt(attempt, "no checkpoint is whole on the nodes that answer", settled)
            return
        attempt.identity, claim = identity, terms[identity.epoch].claim

        def judged(done: Future[OrphanVerdict]) -> None:
            if error := failure(done):
                self._fail_commit_attempt(attempt, error)
                return
            verdict = done.result()
            if verdict in (OrphanVerdict.COMMIT, OrphanVerdict.CLAIM):
                self._collect_orphan(attempt, identity)
                return
            attempt.settled = attempt.settled or identity.epoch
            why = f"step {identity.version.step} is {verdict.value}"
            if verdict is OrphanVerdict.DONE:
                self._fail_commit_attempt(attempt, why, attempt.settled)
            else:
                self._choose_older_orphan(attempt, identity, why)

        self._workers.run(
            Lane.STORE,
            lambda: judge(self._store.open_run().view(), claim, identity),
            lambda done: self._guard_commit_attempt(attempt, lambda: judged(done)),
        )

    def _choose_older_orphan(self, attempt: _Attempt, identity: Identity, why: str) -> None:
        log.warning("%s in memory is not committed from here: %s", identity, why)
        attempt.inventory.mark_unusable(identity)
        self._choose_orphan(attempt)

    def _collect_orphan(self, attempt: _Attempt, identity: Identity) -> None:
        def collected(found: GatheredManifest | None, error: str) -> None:
            if found is not None:
                self._commit_orphan(attempt, found)
            else:
                self._choose_older_orphan(attempt, identity, f"it cannot be had: {error}")

        mine = [node for node in attempt.job.nodes if node.name == attempt.network.agent_name]
        services = attempt.network, self._workers, self.replica_service, self._arenas_of, attempt.inventory
        guard = lambda what: self._guard_commit_attempt(attempt, what)  # noqa: E731
        CheckpointCollector(*services, [*mine, *attempt.answered_nodes], (), guard).collect_whole(identity, collected)

    def _commit_orphan(self, attempt: _Attempt, found: GatheredManifest) -> None:
        checkpoint, identity = found.checkpoint, found.checkpoint.identity
        terms, step = attempt.job.terms[identity.epoch], identity.version.step
        text = f"nobody coordinates {identity.epoch} any more: step {step}, which the nodes that are left have"
        log.warning("%s in memory, is committed from here", text)

        def ended(done: Future[Committed]) -> None:
            self.replicas.release(identity)
            self._guard_commit_attempt(attempt, lambda: self._on_orphan_committed(attempt, identity, done))

        parts = self._plan_orphan_write(attempt, found, terms)
        self.replicas.lease(identity)
        self._workers.run(
            Lane.COMMIT,
            lambda: commit_orphan(self._store, checkpoint, terms, attempt.cancel, parts),
            ended,
        )

    def _plan_orphan_write(self, attempt: _Attempt, found: GatheredManifest, terms: CommitTerms) -> DistributedWrite:
        checkpoint, network = found.checkpoint, attempt.network
        ranks, rest = assign_writers(found.places.holders)

        def write(name: str, wanted: WriteRequest, cancel: threading.Event, then: OnWritten) -> None:
            if not name:
                self._write_own_part(checkpoint, wanted, cancel, then)
                return
            node = RemoteShare(network, name, checkpoint.identity.epoch, len(found.places.holders), ())
            node.write_frames(wanted, then)

        options = JobOptions(codec=terms.codec, limits=Limits(bandwidth=terms.bandwidth))
        server, margin_s = self._server, self._settings.heartbeat_s
        what = checkpoint, options, ranks, rest.__getitem__, write
        return DistributedWrite(*what, server.post, server.call_later, margin_s)

    def _write_own_part(
        self, checkpoint: MemoryCheckpoint, wanted: WriteRequest, cancel: threading.Event, then: OnWritten
    ) -> None:
        def written(done: Future[Written]) -> None:
            then(None if failure(done) else done.result(), failure(done))

        self._workers.run(Lane.PART, lambda: write_part(self._store, wanted, checkpoint.arenas, cancel=cancel), written)

    def _on_orphan_committed(self, attempt: _Attempt, identity: Identity, done: Future[Committed]) -> None:
        if error := failure(done):
            self._fail_commit_attempt(
                attempt, error, identity.epoch if isinstance(done.exception(), Superseded) else None
            )
            return
        text = f"step {identity.version.step} is committed by a node that is left of the job that saved it"
        log.warning("%s", text)
        self._emit_event(Event("commit.orphan", text, True, {"identity": str(identity)}))
        self._end_commit_attempt(attempt.settled or identity.epoch)


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
