"""The start under way on the node of rank 0: decides which start owns the run, and which checkpoint it restores.

A start moves the current job aside: that job's live trainers are superseded at once, and nothing more is decided for
them. Then the store is listed on a thread, a candidate is chosen from the store and from memory, and the ranks fetch
it. A candidate that fails on any rank is struck out for all ranks, and the next one is chosen.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt.agent.job.job import Job
from ckpt.agent.job.job_context import send_event
from ckpt.agent.net.progress import REPORT_INTERVAL_S
from ckpt.agent.node.cluster_startup import ClusterStartup
from ckpt.agent.node.startup_state import ResolvedStart, Start
from ckpt.agent.restore.restore_session import decode_request
from ckpt.agent.restore.sources import open_session
from ckpt.agent.runtime.event_loop import EventLoop, Peer
from ckpt.agent.runtime.workers import Lane
from ckpt.agent.snapshots import candidates
from ckpt.agent.snapshots.candidates import Candidate
from ckpt.agent.snapshots.inventory import ancestor_fields, parse_claim
from ckpt.agent.snapshots.memory_checkpoint import LocalMemory, Memory, MemoryCheckpoint
from ckpt.agent.snapshots.remote_share import AnyPeer, RemoteShare
from ckpt.agent.state.job_facts import SlotState
from ckpt.errors import (
    AgentError,
    DamagedData,
    NewerFormat,
    NoCheckpoint,
    NotFound,
    StorageError,
    Superseded,
    UsageError,
)
from ckpt.events import Event
from ckpt.ipc.control_page import WORLD_MAX
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NodeAt, parse_nodes
from ckpt.settings import Settings, adopt_store_environment
from ckpt.storage.failure import unrestorable_hint
from ckpt.storage.names import redact_url
from ckpt.types import OWN_NODE, Epoch, Identity

if TYPE_CHECKING:
    from ckpt.ipc.addresses import Address
    from ckpt.store.lineage import Claim
    from ckpt.store.run import RunView

T = TypeVar("T")

log = logging.getLogger("ckpt")

STAGED_WAIT_S = 5.0  # how long a start waits until the last staged snapshot is hashed
LISTED_MAX = 200  # struck identities in an answer


class Startup(ClusterStartup):
    """The part of the agent that runs the start under way. Main thread only, but for `_list_store` and
    `_resolve_candidate`."""

    def __init__(self, url: str, settings: Settings, server: EventLoop) -> None:
        super().__init__(url, settings, server)
        self._unjoined_peers: list[Peer] = []  # ranks that told this agent to listen, and have joined no job yet
        self._restore_lease: tuple[Job, int] | None = None  # job and slot of the candidate being restored from memory
        self._superseded_launches: dict[str, str] = {}  # launches that were superseded here, and by what

    # -- a start

    def _begin(self, peer: Peer, message: Message) -> None:
        """Begins a start; the one under way fails. Errors: UsageError; AgentError; Superseded."""
        fields = message.fields
        launch, world, take_over = str(fields["launch"])[:200], int(fields["world"]), bool(fields["take_over"])
        request_id = int(fields["id"])
        if not 0 < world <= WORLD_MAX:
            raise UsageError(f"world is {world}: a job has 1 to {WORLD_MAX} ranks")
        nodes = self._parse_nodes(message)
        if nodes and (self.network is None or nodes[0].name != self.network.agent_name):
            raise AgentError("rank 0 is on another node than this agent, or has not told it to listen")
        self._refuse_superseded(launch, take_over)
        if self._start is not None:
            self._fail_start(self._start, Superseded(f"launch {launch!r} began meanwhile"))
        self._end_restore()
        peer.watch_death()
        self._adopt_environment(fields)
        if self.current_job is not None:
            self._supersede_current_job(self.current_job, launch)
        start = self._start = Start(
            peer, request_id, launch, world, take_over, nodes, self._parse_memory_nodes(message)
        )
        self._report_progress(start, self._progress_key(start))
        if nodes:
            self._grant_inventory_lease(OWN_NODE)
        start.inventory = self._inventory(whole=bool(nodes))
        self._survey_nodes(start)
        memory = any(each.claim is not None for each in self._known_epochs(start))
        self._run_for_start(
            start, lambda: self._list_store(start, memory), lambda done: self._on_store_listed(start, memory, done)
        )

    def _adopt_environment(self, fields: dict[str, Any]) -> None:
        """Reopens the store if the newest start has other store settings in its environment."""
        if "store_env" in fields and adopt_store_environment(dict(fields["store_env"])):
            self._store.reopen()

    def _report_progress(self, start: Start, before: tuple[int, ...]) -> None:
        """Reports progress every REPORT_INTERVAL_S to the trainer that waits for a candidate, so that it goes on
        waiting (see net/progress.py)."""
        if self._start is not start:
            return
        now = self._progress_key(start)
        if now != before and start.request_id is not None:
            start.peer.send({"t": "progress", "id": start.request_id})
        self._server.call_later(REPORT_INTERVAL_S, lambda: self._report_progress(start, now))

    def _parse_nodes(self, message: Message) -> tuple[NodeAt, ...]:
        """The nodes of the job's ranks; () for a job of one node. Errors: UsageError."""
        if not message.fields.get("coordinator"):
            return ()
        return parse_nodes(message.blobs[-1], int(message.fields["world"]))

    def _parse_memory_nodes(self, message: Message) -> tuple[Address, ...]:
        """The addresses of the memory-only nodes that the job names. Errors: UsageError."""
        if not message.fields.get("peers"):
            return ()
        from ckpt.agent.job.memory_node_client import parse_addresses

        return parse_addresses(message.fields["peers"])

    def _refuse_superseded(self, launch: str, take_over: bool) -> None:
        if launch in self._superseded_launches and not take_over:
            raise Superseded(
                f"launch {launch!r} was superseded by {self._superseded_launches[launch]} on this machine; it begins "
                "again only "
                "with take_over=True"
            )

    def _run_for_start(self, start: Start, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        """Runs `work` on a thread, then `then` on the main thread if that start is still under way."""
        self._workers.run(Lane.FRONT, work, lambda done: self._guard_start(start, lambda: then(done)))

    def _supersede_current_job(self, job: Job, launch: str) -> None:
        """Makes the current job a former one; `launch` supersedes its live trainers."""
        if not job.scheduler.all_gone:
            if job.launch != launch:
                self._superseded_launches[job.launch] = f"launch {launch!r}"
            job.supersede(f"launch {launch!r}, begun on this machine")
        self.former_jobs.append(job)
        self.current_job = None

    def _list_store(self, start: Start, memory: bool) -> RunView:
        """Lists the store, after it has made sure that no other agent's job uses the run. On a thread. `memory`: a
        checkpoint may be in memory, so the store is retried only briefly. Errors: RunInUse; StorageError."""
        run = self._store.open_run(impatient=memory)
        view = run.view()
        if view.newest_epoch in self._store.claims.own_epochs:
            return view  # this agent began that epoch
        before = (view.newest_epoch, view.closed_epochs)
        run.check_not_in_use(view, start.launch, self._settings.heartbeat_s, take_over=start.take_over)
        if view.newest_epoch is not None:
            self._store.claims.replaceable_epochs.add(view.newest_epoch)
        return view if view.newest_epoch is None or view.newest_epoch in before[1] else run.view()

    def _on_store_listed(self, start: Start, memory: bool, done: Future[RunView]) -> None:
        error = done.exception()
        if error is None:
            start.run_view = done.result()
        elif not (isinstance(error, StorageError) and memory):
            self._fail_start(start, error)
            return
        else:
            log.warning("the store does not answer; the start uses this node's memory alone: %s", error)
        start.is_store_listed = True

    def _advance_start(self) -> None:
        """Chooses a candidate, once the store is listed, the nodes have answered, and staged snapshots are hashed."""
        start = self._start
        if (
            start is None
            or not start.is_store_listed
            or start.pending_nodes
            or start.is_resolving
            or start.request_id is None
        ):
            return
        if not start.has_surveyed_previous:
            self._guard_start(start, lambda: self._survey_previous_nodes(start))
            if self._start is not start or start.pending_nodes:
                return
        sound = [job for job in self.former_jobs if not job.internal_error]
        staged = any(job.scheduler.attempts(SlotState.STAGED) for job in sound)
        if staged and time.monotonic() < start.began_s + STAGED_WAIT_S:
            return
        self._guard_start(start, lambda: self._choose_candidate(start))

    def _choose_candidate(self, start: Start) -> None:
        """Chooses the newest candidate that is not struck out. One that lies on several nodes is gathered first."""
        found = candidates.find_candidates(start.run_view, self._known_epochs(start))
        # Remembered, since a checkpoint that cannot be gathered is no candidate any more.
        start.has_any_checkpoint = start.has_any_checkpoint or bool(found)
        start.newest_step = found[0].identity.version.step if found else start.newest_step
        start.stored_identities = tuple(each.identity for each in found if each.records)
        held: list[tuple[Candidate, MemoryCheckpoint | None]] = []
        for each in (each for each in found if each.identity not in self._struck_candidates):
            # A start of several nodes gathers it even from one node: the other nodes ask where its frames are.
            checkpoint = self._local_checkpoint(each.identity) if not start.nodes else None
            if each.in_memory and checkpoint is None:
                if each.identity not in start.gathered_manifests:
                    if held:
                        break  # gathered only once the newer ones have failed
                    start.is_resolving = True
                    self._gather_candidate(start, each.identity)
                    return
                checkpoint = start.gathered_manifests[each.identity].checkpoint
            held.append((each, checkpoint))
        start.is_resolving = True
        self._run_for_start(
            start, lambda: self._resolve_candidate(held), lambda done: self._on_candidate_resolved(start, done)
        )

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
                record = self._store.open_reader(candidate.records).record
            except NewerFormat as exc:
                raise NewerFormat(
                    f"step {candidate.identity.version.step}, the newest of {redact_url(self.url)} that is left, was "
                    "saved by "
                    f"a newer ckpt ({exc}). An older checkpoint is not taken instead. Install that ckpt here as well, "
                    f"or go back on purpose: ckpt branch {redact_url(self.url)} --at STEP"
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
        start.is_resolving = False
        error = done.exception()
        if error is not None:
            self._fail_start(start, error)
            return
        chosen, damaged = done.result()
        self._struck_candidates.update(damaged)
        if chosen is None and damaged:
            return  # older candidates may be left; they are looked at next
        # A run that had a checkpoint never begins afresh.
        if chosen is None and start.has_any_checkpoint and start.job is None:
            failed = {**start.gather_errors, **self._struck_candidates}
            text = "; ".join(f"step {identity.version.step}: {why}" for identity, why in list(failed.items())[-3:])
            why = f"no checkpoint of {redact_url(self.url)} can be restored: {text}. {unrestorable_hint(self.url)}"
            self._fail_start(start, NoCheckpoint(why))
            return
        start.partial_places = None
        if chosen is None or chosen.record is None or chosen.candidate.identity not in start.inventory.world_sizes:
            self._offer_candidate(start, chosen, damaged)
            return
        start.is_resolving = True
        self._find_frames_in_memory(start, chosen, lambda: self._offer_candidate(start, chosen, damaged))

    def _new_job(self, start: Start) -> Job:
        claims = self._store.claims
        # The inventory may be old by now, hence the newest epoch too.
        begun = {*claims.own_epochs, *start.inventory.steps, self._newest_epoch()}
        epoch = candidates.choose_epoch(start.run_view, self._known_epochs(start), begun)
        claims.record_start(epoch, start.run_view, start.take_over)
        others = self._make_remote_shares(epoch, start.world, start.nodes)
        self.current_job = Job(self._services, epoch, start.world, start.launch, start.peer, start.nodes, others)
        return self.current_job

    def _make_remote_shares(self, epoch: Epoch, world: int, nodes: tuple[NodeAt, ...]) -> list[RemoteShare]:
        """The local ranks of every node but the first, which is this one."""
        network = self.network
        if network is None:
            return []
        return [RemoteShare(network, each.name, epoch, world, each.ranks) for each in nodes[1:]]

    def _offer_candidate(self, start: Start, chosen: ResolvedStart | None, damaged: dict[Identity, str]) -> None:
        """Answers the waiting trainer with the chosen candidate, or with none. Begins the epoch at the first answer."""
        assert start.request_id is not None
        job = start.job = start.job or self._new_job(start)
        start.chosen_candidate = chosen.candidate if chosen is not None else None
        start.steps_lost = self._steps_lost(start)
        body: dict[str, Any] = {
            "epoch": str(job.epoch),
            "parent": None,
            "ancestors": [],
            "candidate": None,
            "struck": [str(identity) for identity in self._struck_candidates][-LISTED_MAX:],
            "steps_lost": start.steps_lost,
        }
        self._report_lost_parts(start, chosen)
        for identity, why in damaged.items():
            text = f"step {identity.version.step} cannot be read and is passed over: {why}"
            job.emit("restore.skipped", text, True, {"identity": str(identity)})
        if chosen is None:
            self._send_candidate(start, body, [])
            return
        identity = chosen.candidate.identity
        where = self._find_local_checkpoint(identity)
        if where is not None:
            where[0].scheduler.take_lease(where[1])
            self._restore_lease = where[0], where[1]
        records = chosen.candidate.records
        gathered, places = start.gathered_manifests.get(identity), start.find_places(identity)
        memory: Memory | None = gathered.checkpoint if gathered is not None else self._local_checkpoint(identity)
        if memory is None and places is not None:
            memory = LocalMemory(self._arenas_of(identity), places.ranks, places.offsets)
        fan = self._open_shared_read(start, job, chosen, places) if records else None
        job.restore = open_session(
            identity,
            chosen.manifest,
            job.ranks.local_rank_count,
            memory,
            (lambda: self._store.open_reader(records)) if records else None,
            self._workers,
            self._server.call_later,
            self._server.post,
            peers=self._open_peer_source(start, places, chosen.manifest) if places is not None else None,
            fan=fan,
            folder=self._store.folder,
        )
        job.restore.record = chosen.record
        body |= {
            "parent": str(identity),
            "ancestors": ancestor_fields(self._make_claim(job, identity, start)),
            "candidate": {
                "identity": str(identity),
                "level": self._level_of(start, identity),
                "stored": bool(records),
                "step": identity.version.step,
                "metrics": chosen.metrics,
            },
        }
        self._send_candidate(start, body, [chosen.encoded_manifest])

    def _steps_lost(self, start: Start) -> int | None:
        """How many steps the former run had ended beyond the chosen checkpoint; None if no living node knows. Steps
        that still earlier runs had ended do not count: the former start lost them."""
        ended = dict(start.inventory.steps)
        # The account outlives a job that has left nothing in memory.
        account = self.status_view.account.newest_ended_step
        for epoch, step in [
            *((job.epoch, job.local_share.ended_step()) for job in self.former_jobs),
            *([account] if account else []),
        ]:
            ended[epoch] = max(step, ended.get(epoch, 0))
        # An epoch reached at least the newest step that is held of it.
        held = {identity.epoch: identity.version.step for identity in sorted(start.inventory.world_sizes)}
        chosen = start.chosen_candidate.identity if start.chosen_candidate is not None else None
        begun = {epoch for steps in (ended, held) for epoch, step in steps.items() if step}
        newest = max((epoch for epoch in begun if chosen is None or epoch >= chosen.epoch), default=None)
        known, least = (ended.get(newest, 0), held.get(newest, 0)) if newest is not None else (0, 0)
        lost = max(known, least, start.newest_step) - (chosen.version.step if chosen is not None else 0)
        return max(0, lost) if known or lost > 0 else None

    def _level_of(self, start: Start, identity: Identity) -> str:
        """The level that the candidate is restored from: "local", "peer" or "store"."""
        gathered = start.gathered_manifests.get(identity)
        if self._find_local_checkpoint(identity) is not None or (
            gathered is not None and gathered.is_local and len(start.nodes) == 1
        ):
            return "local"
        return "peer" if gathered is not None else "store"

    def _report_lost_parts(self, start: Start, chosen: ResolvedStart | None) -> None:
        """Emits `restore.lost`, once, if a checkpoint newer than the chosen one lost a part together with a node."""
        found = start.inventory.incomplete_checkpoints()
        # What memory lacks of the chosen checkpoint itself is in the store.
        if not found or start.has_reported_loss or (chosen is not None and max(found) <= chosen.candidate.identity):
            return
        start.has_reported_loss = True
        identity = max(found)
        ranks = found[identity]
        what = (
            f"step {identity.version.step} was in memory, and the part of ranks {ranks[:8]} is on no node that is left"
        )
        then = (
            f"going on from step {chosen.candidate.identity.version.step}" if chosen is not None else "beginning afresh"
        )
        hint = "ckpt.Replicas(n) keeps copies on n other nodes"
        facts = {"identity": str(identity), "ranks": ranks[:100]}
        event = Event("restore.lost", f"ckpt: {what}: {then} ({hint})", True, facts)
        log.warning("%s", event.message, extra={"told": True})
        self.status_view.record_event(event)
        send_event(start.peer, event)

    def _send_candidate(self, start: Start, body: dict[str, Any], blobs: list[bytes]) -> None:
        assert start.request_id is not None
        start.peer.reply(start.request_id, body, blobs=blobs)
        # Cleared only after the reply was sent: until then the waiting trainer can still be told of an error.
        start.request_id = None

    def _strike_candidate(self, peer: Peer, message: Message) -> None:
        """Strikes out the candidate for all ranks, since it failed on one of them; the next one is chosen then."""
        fields = message.fields
        start = self._require_start(peer, str(fields["epoch"]))
        identity, request_id = Identity.parse(str(fields["identity"])), int(fields["id"])
        self._struck_candidates[identity] = str(fields["why"])[:2000]
        self._end_restore()
        start.request_id = request_id

    def _finish_start(self, peer: Peer, message: Message) -> None:
        """Ends the start: all ranks have restored the candidate, or begin afresh. The job begins to train."""
        fields = message.fields
        start = self._require_start(peer, str(fields["epoch"]))
        job = start.job
        assert job is not None
        parent = Identity.parse(str(fields["identity"])) if fields["identity"] is not None else None
        if parent is not None and (start.chosen_candidate is None or parent != start.chosen_candidate.identity):
            raise AgentError(f"{parent} was not the candidate of this start")
        record = job.restore.record if job.restore is not None else None
        self._store.record_restore(parent, record)
        self._end_restore()
        self._start = None
        former = next((each for each in self.former_jobs if parent is not None and each.epoch == parent.epoch), None)
        if former is not None:
            job.scheduler.inherit_timing(former.scheduler)
        if job.cost_model is not None and parent is not None:
            self._learnt_history.fill_cost_model(job.cost_model, parent.epoch, record, start.run_view, start.nodes)
        claim = self._make_claim(job, parent, start)
        job.begin_training(claim, resumed=False)
        self._announce_claim(job)
        peer.reply(int(fields["id"]), {})
        self._rereplicate_restored(start)

    def _require_start(self, peer: Peer, epoch: str) -> Start:
        """The start under way, if `peer` began it and it has begun `epoch`. Errors: Superseded."""
        start = self._start
        if start is None or start.job is None or start.peer is not peer or str(start.job.epoch) != epoch:
            raise Superseded(f"the start of {epoch} is not the one under way; a newer one began")
        return start

    def _end_restore(self) -> None:
        """Ends the restore of the candidate: releases its slot, and ends the serving of its frames."""
        if self._restore_lease is not None:
            self._restore_lease[0].scheduler.release_lease(self._restore_lease[1])
            self._restore_lease = None
        for job in self._jobs():
            if job.restore is not None:
                job.restore.close()
                self._end_serving(job.restore.identity)
                job.restore = None

    def _make_claim(self, job: Job, parent: Identity | None, start: Start) -> Claim:
        """The claim of the job's epoch, which goes on from `parent`, with the ancestors that the store lacks."""
        from ckpt.store.lineage import AGENT_ADDRESSES_MAX, AGENTS_MAX, ANCESTORS_MAX, Claim

        known = {each.epoch: each.claim for each in self._jobs() if each.claim is not None} | start.inventory.claims
        ancestors = candidates.unclaimed_ancestors(parent, known.values(), self._store.is_claimed)
        host = socket.gethostname()[:200]
        told = ancestors[:ANCESTORS_MAX]
        run = self.network.secret_id if self.network is not None and job.nodes else ""
        agents = tuple((node.name, tuple(map(str, node.addresses[:AGENT_ADDRESSES_MAX]))) for node in job.nodes)
        return Claim(job.epoch, parent, told, start.launch, host, time.time(), run, agents[:AGENTS_MAX])

    def _give_up_start(self, peer: AnyPeer) -> None:
        """Gives the start up if `peer` began it: that trainer is gone, so entering has failed for all ranks."""
        if self._start is not None and self._start.peer is peer:
            self._end_restore()
            self._start = None

    # -- joining and fetching

    def _join(self, peer: AnyPeer, message: Message) -> None:
        """A rank joins its job. Errors: AgentError if no start of its epoch is under way; Superseded."""
        fields = message.fields
        epoch = Epoch.parse(str(fields["epoch"]))
        job = self._job_of(epoch)
        if job is None:
            if not fields["resume"]:
                raise AgentError(f"no start of {epoch} is under way here")
            job = self._resume_job(peer, epoch, message)
        del message.blobs[2:]  # the node list
        job.join(peer, message)
        self._unjoined_peers = [each for each in self._unjoined_peers if each is not peer]
        # Without a claim the job is only about to begin; `_finish_start` then leads the memory-only nodes.
        if int(fields["rank"]) == 0 and job.claim is not None:
            self._borrow_memory(job, self._parse_memory_nodes(message))

    def _resume_job(self, peer: AnyPeer, epoch: Epoch, message: Message) -> Job:
        """Makes the job of a trainer whose agent died; the trainer brings its arenas. Errors: Superseded."""
        if self._start is not None or self.current_job is not None:
            raise Superseded(f"a newer start owns {redact_url(self.url)}; {epoch} was superseded")
        claim = parse_claim(epoch, message.fields)
        # If this trainer dies before it has joined, the job ends with it.
        peer.watch_death()
        world, nodes = int(message.fields["world"]), self._parse_nodes(message)
        others = self._make_remote_shares(epoch, world, nodes)
        job = self.current_job = Job(self._services, epoch, world, claim.launch, peer, nodes, others)
        for node in nodes[1:]:
            self._reconnect_node(node.name)
        self._store.claims.own_epochs.add(epoch)
        job.take_over(claim)
        return job

    def _fetch(self, peer: Peer, message: Message) -> None:
        job, _ = self._require_member(peer)
        identity = Identity.parse(str(message.fields["identity"]))
        if job.restore is None or job.restore.identity != identity:
            raise AgentError(f"{identity} is not being restored now")
        frames, whole = decode_request(message)
        peer.reply(int(message.fields["id"]), {})
        job.restore.request(peer, frames, whole)

    def _require_member(self, peer: AnyPeer) -> tuple[Job, int]:
        """The job and the rank of that connection. Errors: AgentError."""
        for job in self._jobs():
            rank = job.rank_of(peer)
            if rank is not None:
                return job, rank
        raise AgentError("this connection has joined no job")
