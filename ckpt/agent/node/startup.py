"""The start under way on the node of rank 0: decides which start owns the run, and which checkpoint it restores.

A start moves the current job aside: that job's live trainers are superseded at once, and nothing more is decided for
them. Then the nodes are surveyed and the store is listed, a candidate is chosen from the store and from memory, and the
ranks fetch it. A candidate that fails on any rank is struck out for all ranks, and the next one is chosen.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping
from concurrent.futures import Future
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
from ckpt.agent.runtime.event_loop import Peer
from ckpt.agent.snapshots import candidates
from ckpt.agent.snapshots.candidates import Candidate
from ckpt.agent.snapshots.inventory import ancestor_fields
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
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
    from ckpt.store.lineage import Claim

log = logging.getLogger("ckpt")

STAGED_WAIT_S = 5.0  # how long a start waits until the last staged snapshot is hashed
LISTED_MAX = 200  # struck identities in an answer


class Startup:
    """The part of the agent that runs the start under way. Main thread only, but for `_resolve_candidate`. `survey`:
    asks the nodes and the store. `candidates`: those in memory. `struck`: candidates that failed to restore, with the
    reasons."""

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
        self._report_progress(start, self._progress_key(start))
        self.survey.begin(start)

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
            self._strike(start, identity, str(fields["why"])[:2000], int(fields["id"]))
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
            self._history.fill_cost_model(job.cost_model, parent.epoch, record, start.survey.run_view, start.nodes)
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

    def _report_progress(self, start: Start, before: tuple[int, ...]) -> None:
        """Reports progress every REPORT_INTERVAL_S to the trainer that waits for a candidate, so that it goes on
        waiting (see net/progress.py)."""
        if self._jobs.start is not start:
            return
        now = self._progress_key(start)
        if now != before and start.request_id is not None:
            start.peer.send({"t": "progress", "id": start.request_id})
        self._context.server.call_later(REPORT_INTERVAL_S, lambda: self._report_progress(start, now))

    def _progress_key(self, start: Start) -> tuple[int, ...]:
        """A value that changes whenever the start, or any work that it may wait for, makes progress."""
        network = self._context.network
        heard = network.progress.count if network is not None else 0
        return (*start.progress_key(), len(self.struck), self._memory.replicas.progress.count, heard)

    # -- the choice of a candidate

    def advance(self) -> None:
        """Chooses a candidate, once the store is listed, the nodes have answered, and staged snapshots are hashed."""
        start = self._jobs.start
        if start is None or not start.is_ready:
            return
        if not start.survey.has_surveyed_previous:
            self._jobs.guard_start(start, lambda: self.survey.survey_previous_nodes(start))
            if self._jobs.start is not start or start.survey.pending_nodes:
                return
        sound = [job for job in self._jobs.former if not job.context.internal_error]
        staged = any(job.scheduler.slots.attempts(SlotState.STAGED) for job in sound)
        if staged and time.monotonic() < start.began_s + STAGED_WAIT_S:
            return
        self._jobs.guard_start(start, lambda: self._choose_candidate(start))

    def _strike(self, start: Start, identity: Identity, why: str, request_id: int) -> None:
        """Strikes out the candidate for all ranks, since it failed on one of them; the next one is chosen then."""
        self.struck[identity] = why
        self.candidates.end_sessions()
        start.request_id = request_id

    def _choose_candidate(self, start: Start) -> None:
        """Chooses the newest candidate that is not struck out. One that lies on several nodes is gathered first."""
        found = candidates.find_candidates(start.survey.run_view, self._memory.known_epochs(start))
        # Remembered, since a checkpoint that cannot be gathered is no candidate any more.
        start.choice.has_any_checkpoint = start.choice.has_any_checkpoint or bool(found)
        start.choice.newest_step = found[0].identity.version.step if found else start.choice.newest_step
        start.choice.stored_identities = tuple(each.identity for each in found if each.records)
        held: list[tuple[Candidate, MemoryCheckpoint | None]] = []
        for each in (each for each in found if each.identity not in self.struck):
            # A start of several nodes gathers it even from one node: the other nodes ask where its frames are.
            here = self._jobs.find_checkpoint(each.identity) if not start.nodes else None
            checkpoint = here[2] if here is not None else None
            if each.in_memory and checkpoint is None:
                if each.identity not in start.choice.gathered_manifests:
                    if held:
                        break  # gathered only once the newer ones have failed
                    start.choice.is_resolving = True
                    self.candidates.gather(start, each.identity)
                    return
                checkpoint = start.choice.gathered_manifests[each.identity].checkpoint
            held.append((each, checkpoint))
        start.choice.is_resolving = True
        then = lambda done: self._on_candidate_resolved(start, done)  # noqa: E731
        self._context.run_for_start(start, lambda: self._resolve_candidate(held), then)

    def _resolve_candidate(
        self, held: list[tuple[Candidate, MemoryCheckpoint | None]]
    ) -> tuple[ResolvedStart | None, dict[Identity, str]]:
        """The first candidate whose manifest can be read, and why each candidate before it cannot. On a thread.

        Errors: NewerFormat if a newer ckpt saved it: restoring an older one would fork the branch history."""
        from ckpt.format.record import encode_manifest

        damaged: dict[Identity, str] = {}
        for candidate, checkpoint in held:
            if checkpoint is not None:
                manifest = checkpoint.manifest
                return ResolvedStart(candidate, manifest, encode_manifest(manifest), checkpoint.metrics), damaged
            try:
                record = self._context.store.open_reader(candidate.records).record
            except NewerFormat as exc:
                url = redact_url(self._context.url)
                raise NewerFormat(
                    f"step {candidate.identity.version.step}, the newest of {url} that is left, was saved by a newer "
                    f"ckpt ({exc}). An older checkpoint is not taken instead. Install that ckpt here as well, or go "
                    f"back on purpose: ckpt branch {url} --at STEP"
                ) from exc
            except (DamagedData, NotFound) as exc:
                damaged[candidate.identity] = str(exc)
                continue
            encoded = encode_manifest(record.manifest)
            return ResolvedStart(candidate, record.manifest, encoded, record.metrics, record), damaged
        return None, damaged

    def _on_candidate_resolved(
        self, start: Start, done: Future[tuple[ResolvedStart | None, dict[Identity, str]]]
    ) -> None:
        start.choice.is_resolving = False
        error = done.exception()
        if error is not None:
            self._jobs.fail_start(start, error)
            return
        chosen, damaged = done.result()
        self.struck.update(damaged)
        if chosen is None and damaged:
            return  # older candidates may be left; they are looked at next
        # A run that had a checkpoint never begins afresh.
        if chosen is None and start.choice.has_any_checkpoint and start.job is None:
            failed = {**start.choice.gather_errors, **self.struck}
            text = "; ".join(f"step {identity.version.step}: {why}" for identity, why in list(failed.items())[-3:])
            url = self._context.url
            why = f"no checkpoint of {redact_url(url)} can be restored: {text}. {unrestorable_hint(url)}"
            self._jobs.fail_start(start, NoCheckpoint(why))
            return
        start.choice.partial_places = None
        if (
            chosen is None
            or chosen.record is None
            or chosen.candidate.identity not in start.survey.inventory.world_sizes
        ):
            self._offer_candidate(start, chosen, damaged)
            return
        start.choice.is_resolving = True
        then = lambda: self._offer_candidate(start, chosen, damaged)  # noqa: E731
        self.candidates.find_frames(start, chosen, lambda: self._progress_key(start), then)

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
        begun = {*claims.own_epochs, *start.survey.inventory.steps, self._memory.newest_epoch()}
        epoch = candidates.choose_epoch(start.survey.run_view, self._memory.known_epochs(start), begun)
        claims.record_start(epoch, start.survey.run_view, start.take_over)
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
        ended = dict(start.survey.inventory.steps)
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
        known |= start.survey.inventory.claims
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
