"""The start under way on the node of rank 0: decides which start owns the run, and which checkpoint it restores.

A start moves the current job aside: that job's live trainers are superseded at once, and nothing more is decided for
them. Then the nodes are surveyed and the store is listed, a candidate is chosen from the store and from memory, and the
ranks fetch it. A candidate that fails on any rank is struck out for all ranks, and the next one is chosen.
"""

from __future__ import annotations

import functools
import logging
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpt.agent.adaptive.history import LearntHistory
from ckpt.agent.job.job import Job
from ckpt.agent.job.job_context import Services, send_event
from ckpt.agent.job.memory_node_client import parse_addresses
from ckpt.agent.net.progress import REPORT_INTERVAL_S
from ckpt.agent.node.candidate_service import CandidateService
from ckpt.agent.node.coordinator import Coordinator
from ckpt.agent.node.node_context import NodeContext
from ckpt.agent.node.node_memory import NodeMemory
from ckpt.agent.node.start_survey import StartSurvey
from ckpt.agent.node.startup_state import ResolvedStart, Start
from ckpt.agent.runtime.coroutines import Coro, sleep, spawn, work_on
from ckpt.agent.runtime.event_loop import Peer
from ckpt.agent.runtime.workers import Lane
from ckpt.agent.snapshots import candidates
from ckpt.agent.snapshots.candidates import Candidate
from ckpt.agent.snapshots.inventory import ancestor_fields
from ckpt.agent.snapshots.remote_share import AnyPeer, RemoteShare
from ckpt.agent.state.slots import SlotState
from ckpt.errors import (
    AgentError,
    DamagedData,
    NewerFormat,
    NoCheckpoint,
    NotFound,
    Superseded,
    UsageError,
)
from ckpt.ipc.control_page import WORLD_MAX
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NodeAt, parse_nodes
from ckpt.storage.failure import unrestorable_hint
from ckpt.storage.names import redact_url
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.format.manifest import Record
    from ckpt.store.lineage import Claim

log = logging.getLogger("ckpt")

STAGED_WAIT_S = 5.0  # how long a start waits until the last staged snapshot is hashed
STAGED_CHECK_S = 0.01  # between two looks whether it is
LISTED_MAX = 200  # struck identities in an answer


class Startup:
    """The part of the agent that runs the start under way. Main thread only. `survey`: asks the nodes and the store.
    `candidates`: those in memory. `struck`: candidates that failed to restore, with the reasons."""

    def __init__(
        self,
        context: NodeContext,
        memory: NodeMemory,
        coordinator: Coordinator,
        services: Services,
        history: LearntHistory,
    ) -> None:
        self.survey = StartSurvey(context, memory, coordinator.memory_nodes)
        self.candidates = CandidateService(context, memory, coordinator.memory_nodes)
        self.struck: dict[Identity, str] = {}
        self._context, self._jobs, self._memory, self._coordinator = context, context.jobs, memory, coordinator
        self._services, self._history = services, history
        self._superseded_launches: dict[str, str] = {}  # launches that were superseded here, and by what

    # -- the beginning and the end

    def begin(self, peer: Peer, message: Message) -> None:
        """Begins a start; the one under way fails. Errors: UsageError; AgentError; Superseded."""
        fields, network = message.fields, self._context.network
        launch, world, take_over = str(fields["launch"])[:200], int(fields["world"]), bool(fields["take_over"])
        request_id = int(fields["id"])
        if not 0 < world <= WORLD_MAX:
            raise UsageError(f"world is {world}: a job has 1 to {WORLD_MAX} ranks")
        nodes = nodes_of(message)
        memory_nodes = parse_addresses(fields.get("peers"))
        if nodes and (network is None or nodes[0].name != network.agent_name):
            raise AgentError("rank 0 is on another node than this agent, or has not told it to listen")
        self.check_launch(launch, take_over)
        peer.watch_death()
        self._context.adopt_environment(fields)
        self.make_way(launch, f"launch {launch!r} began meanwhile")
        start = self._jobs.start = Start(peer, request_id, launch, world, take_over, nodes, memory_nodes)
        self._spawn(start, self.report_progress(start))
        self._spawn(start, self._survey_and_offer(start))

    def check_launch(self, launch: str, take_over: bool) -> None:
        """Errors: Superseded if that launch was superseded here, and does not take over."""
        if launch in self._superseded_launches and not take_over:
            raise Superseded(
                f"launch {launch!r} was superseded by {self._superseded_launches[launch]} on this machine; it begins "
                "again only with take_over=True"
            )

    def make_way(self, launch: str, why: str) -> None:
        """A start begins, here or on another node: ends the start and the job under way here."""
        if self._jobs.start is not None:
            self._jobs.fail_start(self._jobs.start, Superseded(why))
        self.candidates.end_sessions()
        self._jobs.start = None
        job = self._jobs.current
        if job is not None:
            if not job.scheduler.facts.all_gone:
                if job.context.launch != launch:
                    self._superseded_launches[job.context.launch] = f"launch {launch!r}"
                job.scheduler.supersede(f"launch {launch!r}, begun on this machine")
            self._jobs.retire_current()

    def on_restored(self, peer: Peer, message: Message) -> None:
        """The ranks have restored the candidate, or begin afresh, or it failed on one of them. Errors: AgentError;
        Superseded."""
        fields = message.fields
        start, job = self._require_start(peer, str(fields["epoch"]))
        identity = Identity.parse(str(fields["identity"])) if fields["identity"] is not None else None
        if identity is not None and fields.get("why"):
            if start.request_id is not None:
                raise AgentError("a candidate is being chosen already")
            self.struck[identity], start.request_id = str(fields["why"])[:2000], int(fields["id"])
            self.candidates.end_sessions()
            self._spawn(start, self._offer_next(start))
        else:
            self._finish(start, job, identity, int(fields["id"]))

    def _finish(self, start: Start, job: Job, parent: Identity | None, request_id: int) -> None:
        """Ends the start: the job begins to train."""
        if parent is not None and parent != start.choice.identity:
            raise AgentError(f"{parent} was not the candidate of this start")
        restore = job.restore
        level = self._level_of(start, restore.identity) if restore is not None else "none"
        record = restore.record if restore is not None else None
        self._context.store.record_restore(parent, record)
        self.candidates.end_sessions()
        self._jobs.start = None
        former = next((each for each in self._jobs.former if parent is not None and each.epoch == parent.epoch), None)
        if former is not None:
            job.scheduler.facts.save_estimate.inherit(former.scheduler.facts.save_estimate)
        if job.cost_model is not None and parent is not None:
            self._history.fill_cost_model(job.cost_model, parent.epoch, record, start.run_view, start.nodes)
        job.begin_training(self._make_claim(job, parent, start), resumed=False)
        self._coordinator.announce_claim(job)
        start.peer.reply(request_id, {})
        self._coordinator.rereplicate_restored(start)
        stored = start.choice.newest_stored(self.struck)
        self._context.status_view.on_restored(job, level, restore, start.choice.steps_lost, stored)

    def give_up(self, peer: AnyPeer) -> None:
        """Gives the start up if `peer` began it: that trainer is gone, so entering has failed for all ranks."""
        if self._jobs.start is not None and self._jobs.start.peer is peer:
            self.candidates.end_sessions()
            self._jobs.start = None

    def _require_start(self, peer: Peer, epoch: str) -> tuple[Start, Job]:
        """The start under way and its job, if `peer` began it and it has begun `epoch`. Errors: Superseded."""
        start = self._jobs.start
        if start is None or start.job is None or start.peer is not peer or str(start.job.epoch) != epoch:
            raise Superseded(f"the start of {epoch} is not the one under way; a newer one began")
        return start, start.job

    # -- progress

    async def report_progress(self, start: Start) -> None:
        """Reports progress every REPORT_INTERVAL_S to the trainer that waits for a candidate, so that it goes on
        waiting (see net/progress.py)."""
        while True:
            before = self._progress_key(start)
            await sleep(self._context.server.call_later, REPORT_INTERVAL_S)
            if self._progress_key(start) != before and start.request_id is not None:
                start.peer.send({"t": "progress", "id": start.request_id})

    def _progress_key(self, start: Start) -> tuple[int, ...]:
        """A value that changes whenever the start, or any work that it may wait for, makes progress."""
        network = self._context.network
        heard = network.progress.count if network is not None else 0
        return start.progress.count, len(self.struck), self._memory.replicas.progress.count, heard

    # -- the choice of a candidate

    def _spawn(self, start: Start, coroutine: Coro[None]) -> None:
        """Runs a coroutine as long as that start is under way. An error in it fails the start."""
        spawn(coroutine, functools.partial(self._jobs.guard_start, start))

    async def _survey_and_offer(self, start: Start) -> None:
        await self.survey.run(start)
        await self._offer_next(start)

    async def _offer_next(self, start: Start) -> None:
        """Answers the waiting trainer with the newest candidate that can be read, or with none. Errors: NoCheckpoint:
        a run that had a checkpoint never begins afresh; CkptError."""
        await self._hash_staged(start)
        damaged: dict[Identity, str] = {}
        chosen = await self._choose_candidate(start, damaged)
        if chosen is None and start.choice.has_any_checkpoint and start.job is None:
            failed = {**start.choice.gather_errors, **self.struck}
            text = "; ".join(f"step {identity.version.step}: {why}" for identity, why in list(failed.items())[-3:])
            url = self._context.url
            raise NoCheckpoint(f"no checkpoint of {redact_url(url)} can be restored: {text}. {unrestorable_hint(url)}")
        places = None
        if (
            chosen is not None
            and chosen.record is not None
            and chosen.candidate.identity in start.inventory.world_sizes
        ):
            places = await self.candidates.find_frames(start, chosen, lambda: self._progress_key(start))
        start.choice.partial_places = places
        self._offer_candidate(start, chosen, damaged)

    async def _hash_staged(self, start: Start) -> None:
        """Waits until the former jobs' staged snapshots are hashed, at most until STAGED_WAIT_S after the start."""
        while time.monotonic() < start.began_s + STAGED_WAIT_S:
            sound = [job for job in self._jobs.former if not job.context.internal_error]
            if not any(job.scheduler.slots.attempts(SlotState.STAGED) for job in sound):
                return
            await sleep(self._context.server.call_later, STAGED_CHECK_S)

    async def _choose_candidate(self, start: Start, damaged: dict[Identity, str]) -> ResolvedStart | None:
        """The newest candidate that can be read and is not struck out; None: none is left. One that lies on several
        nodes is gathered first. `damaged`: see `_read_record`."""
        from ckpt.format.record import encode_manifest

        while (candidate := self._newest_candidate(start)) is not None:
            identity = candidate.identity
            # A start of several nodes gathers it even from one node: the other nodes ask where its frames are.
            here = self._jobs.find_checkpoint(identity) if not start.nodes else None
            checkpoint = here[2] if here is not None else None
            if candidate.in_memory and checkpoint is None:
                if identity not in start.choice.gathered_manifests:
                    await self.candidates.gather(start, identity)
                    continue
                checkpoint = start.choice.gathered_manifests[identity].checkpoint
            record = await self._read_record(candidate, damaged) if checkpoint is None else None
            found = record if checkpoint is None else checkpoint
            if found is not None:
                encode = functools.partial(encode_manifest, found.manifest)
                encoded = await work_on(self._context.workers, Lane.FRONT, encode)
                return ResolvedStart(candidate, found.manifest, encoded, found.metrics, record)
        return None

    def _newest_candidate(self, start: Start) -> Candidate | None:
        """The newest candidate that is not struck out."""
        found = candidates.find_candidates(start.run_view, self._memory.known_epochs(start))
        # Remembered, since a checkpoint that cannot be gathered is no candidate any more.
        start.choice.has_any_checkpoint = start.choice.has_any_checkpoint or bool(found)
        start.choice.newest_step = found[0].identity.version.step if found else start.choice.newest_step
        start.choice.stored_identities = tuple(each.identity for each in found if each.records)
        return next((each for each in found if each.identity not in self.struck), None)

    async def _read_record(self, candidate: Candidate, damaged: dict[Identity, str]) -> Record | None:
        """The candidate's record in the store; None: it cannot be read. Then it is struck out, and `damaged` gets the
        reason. Errors: NewerFormat if a newer ckpt saved it: restoring an older one would fork the branch history;
        StorageError."""
        workers, store = self._context.workers, self._context.store
        try:
            return await work_on(workers, Lane.FRONT, lambda: store.open_reader(candidate.records).record)
        except NewerFormat as exc:
            url = redact_url(self._context.url)
            raise NewerFormat(
                f"step {candidate.identity.version.step}, the newest of {url} that is left, was saved by a newer "
                f"ckpt ({exc}). An older checkpoint is not taken instead. Install that ckpt here as well, or go "
                f"back on purpose: ckpt branch {url} --at STEP"
            ) from exc
        except (DamagedData, NotFound) as exc:
            damaged[candidate.identity] = self.struck[candidate.identity] = str(exc)
            return None

    # -- the answer

    def _offer_candidate(self, start: Start, chosen: ResolvedStart | None, damaged: Mapping[Identity, str]) -> None:
        """Answers the waiting trainer with the chosen candidate, or with none. Begins the epoch at the first answer."""
        assert start.request_id is not None
        job = start.job = start.job or self._new_job(start)
        start.choice.chosen = chosen.candidate if chosen is not None else None
        start.count_steps_lost(self._ended_steps(start))
        body: dict[str, Any] = {
            "epoch": str(job.epoch),
            "parent": None,
            "ancestors": [],
            "candidate": None,
            "struck": [str(identity) for identity in self.struck][-LISTED_MAX:],
            "steps_lost": start.choice.steps_lost,
        }
        if (lost := start.lost_parts_event()) is not None:
            log.warning("%s", lost.message, extra={"told": True})
            self._context.status_view.record_event(lost)
            send_event(start.peer, lost)
        for identity, why in damaged.items():
            text = f"step {identity.version.step} cannot be read and is passed over: {why}"
            job.context.emit("restore.skipped", text, True, {"identity": str(identity)})
        if chosen is not None:
            identity = chosen.candidate.identity
            job.restore = self.candidates.open_session(start, job, chosen)
            body |= {
                "parent": str(identity),
                "ancestors": ancestor_fields(self._make_claim(job, identity, start)),
                "candidate": {
                    "identity": str(identity),
                    "level": self._level_of(start, identity),
                    "stored": bool(chosen.candidate.records),
                    "step": identity.version.step,
                    "metrics": chosen.metrics,
                },
            }
        start.peer.reply(start.request_id, body, blobs=[chosen.encoded_manifest] if chosen is not None else [])
        # Cleared only after the reply was sent: until then the waiting trainer can still be told of an error.
        start.request_id = None

    def _new_job(self, start: Start) -> Job:
        claims = self._context.store.claims
        # The inventory may be old by now, hence the newest epoch too.
        begun = {*claims.own_epochs, *start.inventory.steps, self._memory.newest_epoch()}
        epoch = candidates.choose_epoch(start.run_view, self._memory.known_epochs(start), begun)
        claims.record_start(epoch, start.run_view, start.take_over)
        return self.make_job(epoch, start.world, start.launch, start.peer, start.nodes)

    def make_job(self, epoch: Epoch, world: int, launch: str, first: AnyPeer, nodes: tuple[NodeAt, ...]) -> Job:
        """The new current job. `first`: the connection that began it. `nodes`: this node is the first one."""
        network = self._context.network
        others = [
            RemoteShare(network, each.name, epoch, world, each.ranks) for each in nodes[1:] if network is not None
        ]
        self._jobs.current = Job(self._services, epoch, world, launch, first, nodes, others)
        return self._jobs.current

    def _ended_steps(self, start: Start) -> dict[Epoch, int]:
        """By epoch, the newest step that is known to have ended in it."""
        ended = dict(start.inventory.steps)
        # The account outlives a job that has left nothing in memory.
        account = self._context.status_view.account.newest_ended_step
        here = [(job.epoch, job.local_share.ended_step()) for job in self._jobs.former]
        for epoch, step in [*here, *([account] if account else [])]:
            ended[epoch] = max(step, ended.get(epoch, 0))
        return ended

    def _level_of(self, start: Start, identity: Identity) -> str:
        """The level that the candidate is restored from: "local", "peer" or "store"."""
        gathered = start.choice.gathered_manifests.get(identity)
        if self._jobs.find_checkpoint(identity) is not None or (
            gathered is not None and gathered.is_local and len(start.nodes) == 1
        ):
            return "local"
        return "peer" if gathered is not None else "store"

    def _make_claim(self, job: Job, parent: Identity | None, start: Start) -> Claim:
        """The claim of the job's epoch, which goes on from `parent`, with the ancestors that the store lacks."""
        from ckpt.store.lineage import AGENT_ADDRESSES_MAX, AGENTS_MAX, ANCESTORS_MAX, Claim

        known = {each.epoch: each.claim for each in self._jobs.coordinated() if each.claim is not None}
        known |= start.inventory.claims
        ancestors = candidates.unclaimed_ancestors(parent, known.values(), self._context.store.is_claimed)
        network, host = self._context.network, socket.gethostname()[:200]
        run = network.secret_id if network is not None and job.nodes else ""
        agents = tuple((node.name, tuple(map(str, node.addresses[:AGENT_ADDRESSES_MAX]))) for node in job.nodes)
        told = ancestors[:ANCESTORS_MAX]
        return Claim(job.epoch, parent, told, start.launch, host, time.time(), run, agents[:AGENTS_MAX])


def nodes_of(message: Message) -> tuple[NodeAt, ...]:
    """The nodes of the job's ranks, from a rank's message; () for a job of one node. Errors: UsageError."""
    if not message.fields.get("coordinator"):
        return ()
    return parse_nodes(message.blobs[-1], int(message.fields["world"]))
