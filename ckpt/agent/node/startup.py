"""Which start owns the run, and what it goes on from.

A start moves the current job aside: trainers of it that still live are superseded at once, and nothing more is decided
for them. Then the store is listed, a candidate is chosen from it and from this node's memory, and the ranks fetch it;
one that fails on any of them is struck out for all, and the next is chosen.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt.agent.job.job import Job
from ckpt.agent.job.job_context import tell
from ckpt.agent.net.progress import SAY_S
from ckpt.agent.node.node_memory import NodeMemory
from ckpt.agent.node.startup_state import ResolvedStart, Start
from ckpt.agent.restore.restore_session import RestoreSession, frames_asked
from ckpt.agent.runtime.event_loop import EventLoop, Peer
from ckpt.agent.runtime.workers import Lane
from ckpt.agent.snapshots import candidates
from ckpt.agent.snapshots.candidates import Candidate
from ckpt.agent.snapshots.inventory import claim_told, texts
from ckpt.agent.snapshots.memory_checkpoint import Memory, MemoryCheckpoint, Near
from ckpt.agent.snapshots.remote_share import AnyPeer, RemoteShare
from ckpt.agent.state.job_facts import State
from ckpt.errors import (
    AgentError,
    CkptError,
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
from ckpt.settings import Settings, adopt_store_environment
from ckpt.storage.failure import none_restorable
from ckpt.storage.names import shown
from ckpt.types import HERE, Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.restore.peer_source import PeerSource
    from ckpt.agent.restore.shared_read import SharedRead
    from ckpt.agent.snapshots.manifest_gather import FramePlaces
    from ckpt.format.manifest import Manifest
    from ckpt.ipc.addresses import Address
    from ckpt.ipc.node_list import NodeAt
    from ckpt.store.lineage import Claim
    from ckpt.store.run import RunView

T = TypeVar("T")

log = logging.getLogger("ckpt")

STAGED_S = 5.0  # how long a start waits for what was staged last to be put together
LISTED_MAX = 200  # names of one kind in an answer


class Startup(NodeMemory):
    """The start that is under way. Everything runs on the agent's main thread."""

    def __init__(self, url: str, settings: Settings, server: EventLoop) -> None:
        super().__init__(url, settings, server)
        self._awaiting: list[Peer] = []  # ranks that have this agent listen, and have joined nothing yet
        self._struck: dict[Identity, str] = {}
        self._lease: tuple[Job, int] | None = None  # of the candidate that is being restored from memory
        self._refused: dict[str, str] = {}  # launches that were superseded here, and by what

    # -- a start

    def _begin(self, peer: Peer, message: Message) -> None:
        fields = message.fields
        launch, world, take_over = str(fields["launch"])[:200], int(fields["world"]), bool(fields["take_over"])
        request_id = int(fields["id"])
        if not 0 < world <= WORLD_MAX:
            raise UsageError(f"world is {world}: one node has 1 to {WORLD_MAX} ranks")
        nodes = self._nodes_of(message)
        if nodes and (self.network is None or nodes[0].name != self.network.me):
            raise AgentError("rank 0 is on another node than this agent, or has not told it to listen")
        self._refuse_superseded(launch, take_over)
        if self._start is not None:
            self._fail_start(self._start, Superseded(f"launch {launch!r} began meanwhile"))
        self._end_restore()
        peer.watch_death()
        self._adopt_environment(fields)
        if self.current is not None:
            self._move_aside(self.current, launch)
        start = self._start = Start(peer, request_id, launch, world, take_over, nodes, self._lenders_of(message))
        self._tell_of_moves(start, self._moves_of(start))
        if nodes:
            self._freeze(HERE)
        start.inventory = self._inventory(whole=bool(nodes))
        self._call_others(start)
        memory = any(each.claim is not None for each in self._remembered(start))
        self._for(start, lambda: self._look(start, memory), lambda done: self._looked(start, memory, done))

    def _adopt_environment(self, fields: dict[str, Any]) -> None:
        """What leads to the store is what the newest start has."""
        if "store_env" in fields and adopt_store_environment(dict(fields["store_env"])):
            self._store.reopen()

    def _moves_of(self, start: Start) -> tuple[int, ...]:
        """Another one whenever the start has got further, or something has that it may wait for."""
        heard = self.network.progress.count if self.network is not None else 0
        known = len(start.silent), len(start.gathered), len(start.failed), len(self._struck)
        return (*known, start.listed, start.asked_former, start.resolving, self.copies.progress.count, heard)

    def _tell_of_moves(self, start: Start, before: tuple[int, ...]) -> None:
        """Who waits for its candidate waits as long as it gets further (see agent.moving)."""
        if self._start is not start:
            return
        now = self._moves_of(start)
        if now != before and start.request_id is not None:
            start.peer.send({"t": "moving", "id": start.request_id})
        self._server.later(SAY_S, lambda: self._tell_of_moves(start, now))

    def _nodes_of(self, message: Message) -> tuple[NodeAt, ...]:
        """Where the ranks of the job are, if on several nodes. Errors: UsageError."""
        if not message.fields.get("leader"):
            return ()
        from ckpt.ipc.node_list import nodes_from

        nodes = nodes_from(message.blobs[-1], int(message.fields["world"]))
        self._server.called.learn(nodes)
        return nodes

    def _lenders_of(self, message: Message) -> tuple[Address, ...]:
        """The memory-only nodes that the job names. Errors: UsageError."""
        if not message.fields.get("peers"):
            return ()
        from ckpt.agent.job.memory_node_client import addresses_from

        return addresses_from(message.fields["peers"])

    def _refuse_superseded(self, launch: str, take_over: bool) -> None:
        if launch in self._refused and not take_over:
            raise Superseded(
                f"launch {launch!r} was superseded by {self._refused[launch]} on this machine; it begins again only "
                "with take_over=True"
            )

    def _for(self, start: Start, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        """Runs `work` on a thread and `then` after it, while that start is still the one under way."""
        self._bulk.run(Lane.FRONT, work, lambda done: self._guard_start(start, lambda: then(done)))

    def _guard_start(self, start: Start, what: Callable[[], None]) -> None:
        """What goes wrong in it is told to whoever waits for it, and ends no other job."""
        if self._start is not start:
            return
        try:
            what()
        except Exception as exc:
            self._fail_start(start, exc)

    def _move_aside(self, job: Job, launch: str) -> None:
        if not job.group.all_gone:
            if job.launch != launch:
                self._refused[job.launch] = f"launch {launch!r}"
            job.supersede(f"launch {launch!r}, begun on this machine")
        self.former.append(job)
        self.current = None

    def _look(self, start: Start, memory: bool) -> RunView:
        """On a thread: the store's listing, once nobody else is at work there."""
        run = self._store.run(impatient=memory)
        view = run.view()
        if view.newest_epoch in self._store.claims.begun:
            return view  # ours: we know who is at work in it
        before = (view.newest_epoch, view.closed)
        run.watch_other(view, start.launch, self._settings.heartbeat_s, take_over=start.take_over)
        if view.newest_epoch is not None:
            self._store.claims.passed.add(view.newest_epoch)
        return view if view.newest_epoch is None or view.newest_epoch in before[1] else run.view()

    def _looked(self, start: Start, memory: bool, done: Future[RunView]) -> None:
        error = done.exception()
        if error is None:
            start.view = done.result()
        elif not (isinstance(error, StorageError) and memory):
            self._fail_start(start, error)
            return
        else:
            log.warning("the store does not answer; this node's memory has to do: %s", error)
        start.listed = True

    def _answer_start(self) -> None:
        """Once the store is listed and what was staged last is put together, the epoch begins."""
        start = self._start
        if start is None or not start.listed or start.silent or start.resolving or start.request_id is None:
            return
        if not start.asked_former:
            self._guard_start(start, lambda: self._ask_former(start))
            if self._start is not start or start.silent:
                return
        staged = any(slot.state is State.STAGED for job in self.former if not job.failed for slot in job.group.slots)
        if staged and time.monotonic() < start.began_s + STAGED_S:
            return
        self._guard_start(start, lambda: self._choose(start))

    def _ask_former(self, start: Start) -> None:
        start.asked_former = True  # there is nobody to be asked where there is no network

    def _choose(self, start: Start) -> None:
        """The newest that is not struck out. One of which each rank is held by some node is put together first."""
        found = candidates.candidates(start.view, self._remembered(start))
        start.has_any = start.has_any or bool(found)  # one that cannot be put together is no candidate any more
        start.newest_step = found[0].identity.tick.step if found else start.newest_step
        start.stored = tuple(each.identity for each in found if each.records)
        held: list[tuple[Candidate, MemoryCheckpoint | None]] = []
        for each in (each for each in found if each.identity not in self._struck):
            checkpoint = self._in_memory(each.identity) if not start.nodes else None  # other nodes ask where it lies
            if each.in_memory and checkpoint is None:
                if each.identity not in start.gathered:
                    if held:
                        break  # it is its turn when those before it have failed
                    start.resolving = True
                    self._gather(start, each.identity)
                    return
                checkpoint = start.gathered[each.identity].checkpoint
            held.append((each, checkpoint))
        start.resolving = True
        self._for(start, lambda: self._resolve(held), lambda done: self._resolved(start, done))

    def _resolve(
        self, held: list[tuple[Candidate, MemoryCheckpoint | None]]
    ) -> tuple[ResolvedStart | None, dict[Identity, str]]:
        """On a thread: the first candidate whose manifest can be read, and those before it that cannot.

        Errors: NewerFormat: going on from an older one would make a branch of what a newer ckpt has saved."""
        from ckpt.format.record import encode_manifest

        damaged: dict[Identity, str] = {}
        for candidate, checkpoint in held:
            if checkpoint is not None:
                manifest = checkpoint.manifest
                return ResolvedStart(candidate, manifest, encode_manifest(manifest), checkpoint.metrics), damaged
            try:
                record = self._store.reader(candidate.records).record
            except NewerFormat as exc:
                raise NewerFormat(
                    f"step {candidate.identity.tick.step}, the newest of {shown(self.url)} that is left, was saved by "
                    f"a newer ckpt ({exc}); what is older is not gone on from instead. Install that ckpt here, too, or "
                    f"go back on purpose: ckpt branch {shown(self.url)} --at STEP"
                ) from exc
            except (DamagedData, NotFound) as exc:
                damaged[candidate.identity] = str(exc)
                continue
            encoded = encode_manifest(record.manifest)
            return ResolvedStart(candidate, record.manifest, encoded, record.metrics, record), damaged
        return None, damaged

    def _resolved(self, start: Start, done: Future[tuple[ResolvedStart | None, dict[Identity, str]]]) -> None:
        start.resolving = False
        error = done.exception()
        if error is not None:
            self._fail_start(start, error)
            return
        chosen, damaged = done.result()
        self._struck.update(damaged)
        if chosen is None and damaged:
            return  # there may be others; they are looked at next
        if chosen is None and start.has_any and start.job is None:  # never fresh where there was something
            failed = {**start.failed, **self._struck}
            text = "; ".join(f"step {identity.tick.step}: {why}" for identity, why in list(failed.items())[-3:])
            why = f"no checkpoint of {shown(self.url)} can be restored: {text}. {none_restorable(self.url)}"
            self._fail_start(start, NoCheckpoint(why))
            return
        start.part = None
        if chosen is None or chosen.record is None or chosen.candidate.identity not in start.inventory.worlds:
            self._offer_candidate(start, chosen, damaged)
            return
        start.resolving = True
        self._find_part(start, chosen, lambda: self._offer_candidate(start, chosen, damaged))

    def _new_job(self, start: Start) -> Job:
        claims = self._store.claims
        begun = {*claims.begun, *start.inventory.steps, self._newest_epoch()}  # the latter: since it was asked
        epoch = candidates.begin(start.view, self._remembered(start), begun)
        claims.began(epoch, start.view, start.take_over)
        others = self._remote_ranks(epoch, start.world, start.nodes)
        self.current = Job(self._services, epoch, start.world, start.launch, start.peer, start.nodes, others)
        return self.current

    def _remote_ranks(self, epoch: Epoch, world: int, nodes: tuple[NodeAt, ...]) -> list[RemoteShare]:
        """The shares of all nodes but the first, which is this one."""
        network, called = self.network, self._server.called
        if network is None:
            return []
        return [RemoteShare(network, each.name, epoch, world, each.ranks, called) for each in nodes[1:]]

    def _offer_candidate(self, start: Start, chosen: ResolvedStart | None, damaged: dict[Identity, str]) -> None:
        assert start.request_id is not None
        job = start.job = start.job or self._new_job(start)
        start.chosen = chosen.candidate if chosen is not None else None
        start.steps_lost = self._steps_lost(start)
        body: dict[str, Any] = {
            "epoch": str(job.epoch),
            "parent": None,
            "ancestors": [],
            "candidate": None,
            "struck": [str(identity) for identity in self._struck][-LISTED_MAX:],
            "steps_lost": start.steps_lost,
        }
        self._tell_of_lost_parts(start, chosen)
        for identity, why in damaged.items():
            text = f"step {identity.tick.step} cannot be read and is passed over: {why}"
            job.emit("restore.skipped", text, True, {"identity": str(identity)})
        if chosen is None:
            self._answer(start, body, [])
            return
        identity = chosen.candidate.identity
        where = self._slot_of(identity)
        if where is not None:
            where[0].group.lease(where[1])
            self._lease = where[0], where[1]
        records = chosen.candidate.records
        gathered, places = start.gathered.get(identity), start.places(identity)
        memory: Memory | None = gathered.checkpoint if gathered is not None else self._in_memory(identity)
        if memory is None and places is not None:
            memory = Near(self._arenas_of(identity), places.ranks, places.offsets)
        fan = self._fan_out(start, job, chosen, places) if records else None
        job.restore = RestoreSession(
            identity,
            chosen.manifest,
            job.ranks.count,
            memory,
            (lambda: self._store.reader(records)) if records else None,
            self._bulk,
            self._server.later,
            self._server.post,
            peers=self._serve_others(start, places, chosen.manifest) if places is not None else None,
            fan=fan,
            folder=self._store.folder,
        )
        job.restore.record = chosen.record
        body |= {
            "parent": str(identity),
            "ancestors": texts(self._claim(job, identity, start)),
            "candidate": {
                "identity": str(identity),
                "level": self._level_of(start, identity),
                "stored": bool(records),
                "step": identity.tick.step,
                "metrics": chosen.metrics,
            },
        }
        self._answer(start, body, [chosen.encoded])

    def _steps_lost(self, start: Start) -> int | None:
        """How many steps the former run had ended beyond what is gone on from, as far as anybody who is left knows.
        What the runs before it had ended was lost by its start."""
        ended = dict(start.inventory.steps)
        account = self.showing.account.ended  # it outlives a job that has left nothing in memory
        for epoch, step in [*((job.epoch, job.ranks.ended()) for job in self.former), *([account] if account else [])]:
            ended[epoch] = max(step, ended.get(epoch, 0))
        held = {identity.epoch: identity.tick.step for identity in sorted(start.inventory.worlds)}  # so far at least
        chosen = start.chosen.identity if start.chosen is not None else None
        begun = {epoch for steps in (ended, held) for epoch, step in steps.items() if step}
        newest = max((epoch for epoch in begun if chosen is None or epoch >= chosen.epoch), default=None)
        known, least = (ended.get(newest, 0), held.get(newest, 0)) if newest is not None else (0, 0)
        lost = max(known, least, start.newest_step) - (chosen.tick.step if chosen is not None else 0)
        return max(0, lost) if known or lost > 0 else None

    def _level_of(self, start: Start, identity: Identity) -> str:
        """Where a candidate is to be had from: in a job of several nodes, from the memory of all of them."""
        gathered = start.gathered.get(identity)
        if self._slot_of(identity) is not None or (gathered is not None and gathered.is_here and len(start.nodes) == 1):
            return "local"
        return "peer" if gathered is not None else "store"

    def _tell_of_lost_parts(self, start: Start, chosen: ResolvedStart | None) -> None:
        """A newer checkpoint than the one that is gone on from lay in memory, and a part of it has gone with a node."""
        found = start.inventory.incomplete()
        if not found or start.told_of_loss or (chosen is not None and max(found) <= chosen.candidate.identity):
            return  # of the chosen one itself the store has what memory lacks
        start.told_of_loss = True
        identity = max(found)
        ranks = found[identity]
        what = f"step {identity.tick.step} was in memory, and the part of ranks {ranks[:8]} is on no node that is left"
        then = f"going on from step {chosen.candidate.identity.tick.step}" if chosen is not None else "beginning afresh"
        hint = "ckpt.Replicas(n) keeps copies on n other nodes"
        facts = {"identity": str(identity), "ranks": ranks[:100]}
        event = Event("restore.lost", f"ckpt: {what}: {then} ({hint})", True, facts)
        log.warning("%s", event.message, extra={"told": True})
        self.showing.told(event)
        tell(start.peer, event)

    def _answer(self, start: Start, body: dict[str, Any], blobs: list[bytes]) -> None:
        assert start.request_id is not None
        start.peer.reply(start.request_id, body, blobs=blobs)
        start.request_id = None  # only now: until it is sent, whoever waits can still be told of an error

    def _next(self, peer: Peer, message: Message) -> None:
        """The candidate failed on some rank: it is struck out for all, and remembered."""
        fields = message.fields
        start = self._started(peer, str(fields["epoch"]))
        identity, request_id = Identity.parse(str(fields["identity"])), int(fields["id"])
        self._struck[identity] = str(fields["why"])[:2000]
        self._end_restore()
        start.request_id = request_id

    def _restored(self, peer: Peer, message: Message) -> None:
        fields = message.fields
        start = self._started(peer, str(fields["epoch"]))
        job = start.job
        assert job is not None
        parent = Identity.parse(str(fields["identity"])) if fields["identity"] is not None else None
        if parent is not None and (start.chosen is None or parent != start.chosen.identity):
            raise AgentError(f"{parent} was not the candidate of this start")
        record = job.restore.record if job.restore is not None else None
        self._store.restored(parent, record)
        self._end_restore()
        self._start = None
        former = next((each for each in self.former if parent is not None and each.epoch == parent.epoch), None)
        if former is not None:
            job.group.goes_on(former.group)
        if job.learning is not None and parent is not None:
            self._relearning.goes_on(job.learning, parent.epoch, record, start.view, start.nodes)
        claim = self._claim(job, parent, start)
        job.begin_training(claim, resumed=False)
        self._tell_others_of_claim(job)
        peer.reply(int(fields["id"]), {})

    def _started(self, peer: Peer, epoch: str) -> Start:
        start = self._start
        if start is None or start.job is None or start.peer is not peer or str(start.job.epoch) != epoch:
            raise Superseded(f"the start of {epoch} is not the one under way; a newer one began")
        return start

    def _fail_start(self, start: Start, error: BaseException) -> None:
        """Nothing can be begun, and that is told. An epoch that was begun has no trainers then, and ends."""
        if not isinstance(error, CkptError):
            log.error("a start of launch %r failed in the agent", start.launch, exc_info=error)
        request_id, start.request_id = start.request_id, None
        if request_id is not None:
            start.peer.refuse(request_id, error)
        if start.job is None:
            self._start = None

    def _end_restore(self) -> None:
        """What was frozen for a candidate is free again."""
        if self._lease is not None:
            self._lease[0].group.release(self._lease[1])
            self._lease = None
        for job in self._jobs():
            if job.restore is not None:
                job.restore.close()
                self._end_serving(job.restore.identity)
                job.restore = None

    def _claim(self, job: Job, parent: Identity | None, start: Start) -> Claim:
        from ckpt.store.lineage import AGENT_ADDRESSES_MAX, AGENTS_MAX, ANCESTORS_MAX, Claim

        known = {each.epoch: each.claim for each in self._jobs() if each.claim is not None} | start.inventory.claims
        ancestors = candidates.unclaimed(parent, known.values(), self._store.is_claimed)
        host = socket.gethostname()[:200]
        told = ancestors[:ANCESTORS_MAX]
        run = self.network.run if self.network is not None and job.nodes else ""
        agents = tuple((node.name, tuple(map(str, node.addresses[:AGENT_ADDRESSES_MAX]))) for node in job.nodes)
        return Claim(job.epoch, parent, told, start.launch, host, time.time(), run, agents[:AGENTS_MAX])

    def _give_up_start(self, peer: AnyPeer) -> None:
        """Who began it is gone: entering has failed there, and so for all."""
        if self._start is not None and self._start.peer is peer:
            self._end_restore()
            self._start = None

    # -- joining and fetching

    def _join(self, peer: AnyPeer, message: Message) -> None:
        fields = message.fields
        epoch = Epoch.parse(str(fields["epoch"]))
        job = self._job_of(epoch)
        if job is None:
            if not fields["resume"]:
                raise AgentError(f"no start of {epoch} is under way here")
            job = self._resume(peer, epoch, message)
        del message.blobs[2:]  # where the nodes are
        job.join(peer, message)
        self._awaiting = [each for each in self._awaiting if each is not peer]
        if int(fields["rank"]) == 0 and job.claim is not None:  # else it is only about to begin
            self._lead_lenders(job, self._lenders_of(message))

    def _resume(self, peer: AnyPeer, epoch: Epoch, message: Message) -> Job:
        """A trainer whose agent died brings its arenas."""
        if self._start is not None or self.current is not None:
            raise Superseded(f"a newer start owns {shown(self.url)}; {epoch} was superseded")
        claim = claim_told(epoch, message.fields)
        peer.watch_death()  # if it comes no further than this, the job ends with it
        world, nodes = int(message.fields["world"]), self._nodes_of(message)
        others = self._remote_ranks(epoch, world, nodes)
        job = self.current = Job(self._services, epoch, world, claim.launch, peer, nodes, others)
        for node in nodes[1:]:
            self._call_again(node.name)
        self._store.claims.begun.add(epoch)
        job.recover_from_trainers()
        job.begin_training(claim, resumed=True)
        return job

    def _fetch(self, peer: Peer, message: Message) -> None:
        job, _ = self._member(peer)
        identity = Identity.parse(str(message.fields["identity"]))
        if job.restore is None or job.restore.identity != identity:
            raise AgentError(f"{identity} is not being restored now")
        frames, whole = frames_asked(message)
        peer.reply(int(message.fields["id"]), {})
        job.restore.request(peer, frames, whole)

    def _member(self, peer: AnyPeer) -> tuple[Job, int]:
        for job in self._jobs():
            rank = job.rank_of(peer)
            if rank is not None:
                return job, rank
        raise AgentError("this connection has joined no job")

    # -- the other nodes' part: see Others

    def _call_others(self, start: Start) -> None:
        """Tells the other nodes of it; they say what they hold."""
        raise NotImplementedError

    def _call_again(self, name: str) -> None:
        """Connects to a node of the current job, until there is a connection or no need for one."""
        raise NotImplementedError

    def _gather(self, start: Start, identity: Identity) -> None:
        """Puts a checkpoint together that lies on several nodes, and then chooses again."""
        raise NotImplementedError

    def _find_part(self, start: Start, chosen: ResolvedStart, then: Callable[[], None]) -> None:
        """What memory has of a candidate from the store, or can have of it soon, need not be read from there."""
        raise NotImplementedError

    def _serve_others(self, start: Start, places: FramePlaces, manifest: Manifest) -> PeerSource | None:
        """The nodes give each other what they hold of it; and what this one gets of it."""
        raise NotImplementedError

    def _fan_out(self, start: Start, job: Job, chosen: ResolvedStart, places: FramePlaces | None) -> SharedRead | None:
        """The nodes share the reading of the store, but for what memory has; what this one has to do with it."""
        raise NotImplementedError

    def _end_serving(self, identity: Identity) -> None:
        """And do not any more."""
        raise NotImplementedError

    def _tell_others_of_claim(self, job: Job) -> None:
        raise NotImplementedError

    def _lead_lenders(self, job: Job, named: Sequence[Address]) -> None:
        """The memory-only nodes that a job names are its from here on."""
        raise NotImplementedError
