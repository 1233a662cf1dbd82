"""The coordinator's part in a start of several nodes, or with memory-only ones: the survey of the nodes, the gathering
of candidates, the serving of their frames, and what the other nodes are told afterwards.

The coordinator is the agent of rank 0's node. Nothing here happens in a job of one node without memory-only nodes.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgpack

from ckpt.agent.job.job import Job
from ckpt.agent.job.memory_node_client import MemoryNodeClients
from ckpt.agent.net.transport import Frames
from ckpt.agent.node.inventory_lease import BOUND_S, Frozen
from ckpt.agent.node.previous_nodes import ask_former
from ckpt.agent.node.startup import Startup
from ckpt.agent.node.startup_state import ResolvedStart, Start
from ckpt.agent.replication.replication_manager import SLOTS_MIN
from ckpt.agent.replication.rereplicate import Rereplication
from ckpt.agent.replication.restart_survey import RestartSurvey, together
from ckpt.agent.replication.survey import KeptReplica, ask_keeps
from ckpt.agent.restore.collect import CheckpointCollector
from ckpt.agent.restore.peer_source import PeerSource, name_of
from ckpt.agent.restore.shared_read import SharedRead
from ckpt.agent.runtime.event_loop import EventLoop, Peer
from ckpt.agent.runtime.memory_plan import needed_bytes, slots_for
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.agent.snapshots.manifest_gather import FramePlaces, GatheredManifest
from ckpt.agent.state.job_facts import Store
from ckpt.errors import AgentError
from ckpt.ipc.messages import Message
from ckpt.settings import Settings
from ckpt.types import HERE, Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.format.manifest import Manifest
    from ckpt.ipc.addresses import Address
    from ckpt.ipc.node_list import NodeAt

log = logging.getLogger("ckpt")

CALL_AGAIN_S = 1.0  # pause before a broken connection to a node of a running job is dialled again
CALLS_MAX = 3  # connections tried to tell a node of a start


class ClusterStartup(Startup):
    """The part of the agent that coordinates starts of several nodes (see above). Main thread only. `lenders`: the
    memory-only nodes of the current job."""

    def __init__(self, url: str, settings: Settings, server: EventLoop) -> None:
        super().__init__(url, settings, server)
        self._offered: dict[str, set[str]] = {}  # by transfer served from here: the agents that asked for the serving
        self._frozen = Frozen()
        self._asking: Start | None = None  # the start that surveyed nodes and owes them its outcome
        self.lenders = MemoryNodeClients(url, lambda: self.network, server.later, self._event, self._lenders_changed)
        self._services.lenders = self.lenders.there
        self._services.awaits_lenders = lambda: self.lenders.awaited

    # -- a start that is coordinated here

    def _call_others(self, start: Start) -> None:
        for node in start.nodes[1:]:
            self._call(start, node)
        self._call_lenders(start)

    def _call_lenders(self, start: Start) -> None:
        """Surveys the memory-only nodes. The start does without those that do not answer."""

        def answered(address: Address, answer: Message | None, error: str) -> None:
            try:
                if answer is not None:
                    start.inventory.add(Inventory.unpack(answer.blobs[0]), str(answer.fields["name"]))
            # A malformed answer can raise anything, and the start waits for this one.
            except Exception as exc:
                log.warning("what the memory-only node at %s says it holds cannot be read: %r", address, exc)
            start.silent.discard(str(address))

        start.silent.update(map(str, start.lenders))
        then = lambda *found: self._guard_start(start, lambda: answered(*found))  # noqa: E731
        self.lenders.begin(start.lenders, start.launch, start.take_over, then)

    def _tend_fence(self, now_s: float) -> float | None:
        """Tells surveyed nodes the outcome of a start that ended, and ends what expired leases had served. Returns when
        to look again."""
        start = self._asking
        if start is not self._start:
            claim = start.job.claim if start is not None and start.job is not None else None
            if start is not None:
                self._tell_outcome(start, claim.epoch if claim is not None else None)
            self._asking = self._start if self._start is not None and self._start.nodes else None
        if self._offered or self.followings:
            self._end_what_starts_left(now_s)
        for job in self._jobs():
            job.group.frozen = bool(job.nodes and self.fence.refusal(HERE, job.epoch, now_s))
        times = self.fence.until_s(), self._tell_if_frozen(now_s)
        return min((each for each in times if each is not None), default=None)

    def _tell_if_frozen(self, now_s: float) -> float | None:
        """Emits `job.frozen` if the current job has taken no snapshot for BOUND_S. Returns when to look again."""
        job = self.current
        if job is None or job.group.all_gone or job.group.superseded_by:
            self._frozen.is_late(None, now_s)
            return None
        cut_off = [f"node {each['node']}" for each in job.cut_off() if each["node"]]
        kind = "frozen" if job.group.frozen else "cut off" if cut_off else ""
        if not self._frozen.is_late((job.epoch, kind) if kind else None, now_s):
            return self._frozen.due_s
        text = f"no snapshot of this job has been taken for {BOUND_S:.0f} s"
        if kind == "frozen":
            text += ", and none is dropped from memory"
            why = self.fence.refusal(HERE, job.epoch, now_s)
            then = f"it goes on once that start has restored or failed, or its agent was gone for {BOUND_S:.0f} s"
            if job.epoch < self.fence.floor:
                then = "start the job again"
        else:
            why = f"cut off from the agent of rank 0's node: {', '.join(cut_off)}"
            then = "training goes on, and saving goes on once it is connected; run ckpt watch there to see if it hangs"
        job.emit("job.frozen", f"{text}: {why}; {then}", True, {"reason": why})
        return None

    def _tell_outcome(self, start: Start, epoch: Epoch | None) -> None:
        """Tells the surveyed nodes which epoch the start has begun; None: it came to nothing."""
        if epoch is not None:
            self.fence.begun(HERE, epoch)
        elif self._start is None:
            self.fence.over(HERE)
        fields = {"t": "outcome", "epoch": str(epoch) if epoch is not None else None}
        # Nodes that a newer start has surveyed again hear only the newer outcome.
        again = {node.name for node in self._start.nodes} if self._start is not None else set()
        for node in [*start.nodes[1:], *start.former]:
            if self.network is not None and node.name not in again:
                self.network.tell(node.name, fields)
        # Memory-only nodes learn of a begun epoch when it borrows from them.
        if epoch is None and self._start is None:
            self.lenders.say(fields)

    def _ask_former(self, start: Start) -> None:
        super()._ask_former(start)
        if self.network is not None and start.nodes:
            ask_former(self.network, start, lambda what: self._guard_start(start, what), self._server.later)

    def _tend_lenders(self) -> None:
        """Ends the borrowing of a job whose ranks are all gone: the memory-only nodes may lend to another job."""
        if self.lenders.lead and self.current is not None and self.current.group.all_gone:
            self.lenders.say({"t": "idle"})
            self.lenders.end()

    def _free_lenders(self) -> None:
        """Has the memory-only nodes drop the replicas of a job that has ended and whose newest checkpoint is stored."""
        job = self.current
        newest = job.group.newest if job is not None and job.came_to_its_end else None
        if job is not None and newest is not None and newest.round is not None and newest.round.store is Store.DONE:
            self.lenders.say({"t": "drop", "epoch": str(job.epoch)})

    def _lenders_changed(self) -> None:
        """The set of memory-only nodes changed: plans the placement of replicas anew."""
        self._server.called.learn(self.lenders.nodes())
        if self.current is not None:
            self.current.place_again()
            if self.current.refinding is not None:
                self.current.refinding.came()

    def _lead_lenders(self, job: Job, named: Sequence[Address]) -> None:
        if named and job.terms is not None:
            self.lenders.led(job.terms, named)

    def _call(self, start: Start, node: NodeAt) -> None:
        """Tells one node of the start and adds its inventory. The start fails if that node does not take part."""
        network = self.network
        assert network is not None
        start.silent.add(node.name)
        tries = itertools.count(1)

        def connect() -> None:
            network.connect(node, lambda error: self._guard_start(start, lambda: connected(error)))

        def connected(error: str) -> None:
            if error:
                raise AgentError(
                    f"agent {node.name} cannot be reached from the node of rank 0 ({error}): "
                    "let the nodes connect to each other, or name an address that they can with CKPT_LISTEN=HOST:PORT"
                )
            fields = {"t": "start", "launch": start.launch, "take_over": start.take_over}
            asked = network.channel(node.name)
            network.ask(node.name, fields, (), lambda *found: self._guard_start(start, lambda: answered(asked, *found)))

        def answered(asked: Channel | None, answer: Message | None, error: str) -> None:
            # The connection ended, as when both nodes dial each other at once: the start was not refused.
            if answer is None and network.channel(node.name) is not asked and next(tries) < CALLS_MAX:
                connect()
                return
            if answer is None:
                raise AgentError(f"agent {node.name} does not take part: {error}")
            start.inventory.add(Inventory.unpack(answer.blobs[0]), node.name)
            start.silent.discard(node.name)

        connect()

    def _gather(self, start: Start, identity: Identity) -> None:
        def collected(found: GatheredManifest | None, error: str) -> None:
            start.resolving = False
            if found is not None:
                start.gathered[identity] = found
                return
            log.warning("%s cannot be had from memory: %s", identity, error)
            start.failed[identity] = error
            start.inventory.refute(identity)

        self._server.called.learn(start.former)
        self._collecting(start).whole(identity, collected)

    def _find_part(self, start: Start, chosen: ResolvedStart, then: Callable[[], None]) -> None:
        identity, manifest = chosen.candidate.identity, chosen.manifest

        def found(places: FramePlaces | None, error: str) -> None:
            start.resolving, start.part = False, places
            if places is None:
                log.info("%s is read from the store, and nothing of it is taken from memory: %s", identity, error)
            then()

        ranks = {node.name: len(node.ranks) for node in start.nodes}
        ranks = ranks or {self.network.me if self.network is not None else "": start.world}
        slots = {name: _slot_bytes(manifest, count, start.world) for name, count in ranks.items()}
        leave = {name: needed_bytes(slot_bytes, SLOTS_MIN) for name, slot_bytes in slots.items()}
        moves = lambda: self._moves_of(start)  # noqa: E731
        self._collecting(start).part(identity, manifest, leave, self._server.later, moves, found)

    def _collecting(self, start: Start) -> CheckpointCollector:
        services = self.network, self._bulk, self.parities, self._arenas_of, start.inventory
        guard = lambda what: self._guard_start(start, what)  # noqa: E731
        return CheckpointCollector(*services, start.nodes, self._others_that_hold(start), guard, urgent=True)

    def _others_that_hold(self, start: Start | None) -> list[NodeAt]:
        """The holders without ranks of this job: memory-only nodes, and nodes of earlier starts."""
        return [*self.lenders.nodes(), *(start.former if start is not None else ())]

    def _serve_others(self, start: Start, places: FramePlaces, manifest: Manifest) -> PeerSource | None:
        network = self.network
        if network is None or not start.nodes:
            return None
        for rank, names in places.holders.items():
            frames = places.frames(rank, manifest)
            for name in names:
                if not name:
                    self._serve(places.identity, rank, frames, HERE)
                    continue
                fields = {"t": "serve", "identity": str(places.identity), "rank": rank}
                network.tell(name, fields, [frames.encode()])
        nodes = [*start.nodes, *self._others_that_hold(start)]
        return PeerSource(places, manifest, network, nodes, self._server.post)

    def _fan_out(self, start: Start, job: Job, chosen: ResolvedStart, places: FramePlaces | None) -> SharedRead | None:
        if self.network is None or len(start.nodes) < 2:
            return None
        identity, records = chosen.candidate.identity, chosen.candidate.records
        services = self.network, self._bulk, self._server.later, self._server.post
        read = lambda: self._store.reader(records)  # noqa: E731
        room = _room_for(job, chosen.manifest)
        only = places.lacking if places is not None else None
        return SharedRead(identity, job.epoch, chosen.manifest, start.nodes, *services, read, room, self._event, only)

    def _serve(self, identity: Identity, rank: int, frames: Frames, by: str) -> None:
        """Serves these frames to every node of the run, until agent `by` withdraws them. Errors: AgentError if this
        node does not hold that rank's snapshot."""
        arena, name = self._arenas_of(identity).get(rank), name_of(identity, rank)
        if arena is None or self.network is None:
            raise AgentError(f"rank {rank} of {identity} is not held here")
        if name not in self._offered:
            self.network.transport.offer(name, arena.view, frames.at(frames.offsets, arena.bytes), urgent=True)
        self._offered.setdefault(name, set()).add(by)

    def _withdraw_served(self, by: str, identity: Identity | None = None) -> None:
        """Ends the serving of that checkpoint for agent `by`; `identity` None: of all that was served for it."""
        served = f"{identity}/" if identity is not None else ""
        for name in [name for name in self._offered if name.startswith(served)]:
            self._offered[name].discard(by)
            if not self._offered[name] and self.network is not None:
                self.network.transport.withdraw(name)
                del self._offered[name]

    def _end_what_starts_left(self, now_s: float) -> None:
        """Ends what is served, and read from the store, for starts whose outcome is known or whose lease has expired
        (see InventoryLease)."""
        self.fence.stands(now_s)
        served = {by for every in self._offered.values() for by in every if by != HERE}
        for by in [by for by in served if not self.fence.has_asked(by)]:
            self._withdraw_served(by)
        for each in self.followings:
            if not self.fence.has_asked(each.leader.name):
                each.end_reading_unled()

    def _end_serving(self, identity: Identity) -> None:
        if self.network is None:
            return
        self._withdraw_served(HERE, identity)
        job = self.current
        for node in job.nodes[1:] if job is not None else ():
            self.network.tell(node.name, {"t": "unserve", "identity": str(identity)})
        for node in self._others_that_hold(self._start):
            self.network.tell(node.name, {"t": "unserve", "identity": str(identity)})

    def _tell_others_of_claim(self, job: Job) -> None:
        terms = job.terms
        assert terms is not None  # the job has begun
        fields, blobs = {"t": "claimed", "epoch": str(job.epoch)}, [terms.encode()]
        for node in job.nodes[1:]:
            if self.network is not None:
                self.network.tell(node.name, fields, blobs)
        self._lead_lenders(job, self.lenders.wanted)

    def _tell_others_to_forget(self, job: Job) -> None:
        self._forget(job.epoch)
        for node in job.nodes[1:]:
            if self.network is not None:
                self.network.tell(node.name, {"t": "forget", "epoch": str(job.epoch)})
        # Else the replicas of former epochs may be all that survives this node.
        if job.group.safe is not None or job.group.committed_tick is not None:
            self.lenders.say({"t": "forget", "epoch": str(job.epoch)})

    def _forget(self, before: Epoch) -> None:
        """Epoch `before` has a complete checkpoint: drops the replicas and followed jobs of older epochs."""
        self.newest_elsewhere = max(self.newest_elsewhere, before)
        self.copies.epochs_before(before)
        for each in self.followings:
            each.over = each.over or each.epoch < before

    # -- re-replication of the restored checkpoint

    def _restored(self, peer: Peer, message: Message) -> None:
        start = self._start
        super()._restored(peer, message)
        job, network = self.current, self.network
        identity = job.claim.parent if job is not None and job.claim is not None else None
        if start is None or job is None or identity is None or network is None or len(job.nodes) < 2:
            return
        if identity not in start.gathered and self._in_memory(identity) is None:
            # The checkpoint is not whole in memory: replicas would save only a few reads of the store.
            return
        if identity in start.gathered:
            places = start.gathered[identity].places
            self._reprotect(job, network, identity, places.sizes, places.holders, start.inventory)
            return
        sizes = {rank: arena.bytes for rank, arena in self._arenas_of(identity).items()}
        self._reprotect(job, network, identity, sizes, {rank: [""] for rank in sizes}, start.inventory)

    def _reprotect(
        self,
        job: Job,
        network: PeerNetwork,
        identity: Identity,
        sizes: Mapping[int, int],
        holders: Mapping[int, Sequence[str]],
        inventory: Inventory,
    ) -> None:
        """Sets up the re-replication of the restored checkpoint, for the ranks that parity does not protect. `sizes`,
        `holders`: as in FramePlaces. `inventory`: what all nodes hold together."""
        losses = job.protection.losses if job.protection is not None else 0
        intact = inventory.protected(identity, losses)
        named = {rank: [name or network.me for name in names] for rank, names in holders.items() if rank not in intact}
        services = network, self.copies, [*job.nodes, *self.lenders.nodes()], identity, named, sizes
        job.reprotecting = Rereplication(*services, self._arenas_of, self._server.later, job.emit, job.parent_is_safe)

    def _tend_protection(self) -> None:
        """Re-replicates the restored checkpoint once the job's memory plan is known, until the job has a checkpoint of
        its own that supersedes it."""
        for job in self._jobs():
            self._refind(job)
            group, protection = job.group, job.protection
            losses = protection.losses if protection is not None and job.plan is not None else 0
            if job is not self.current or group.outdoes_former or group.all_gone or group.superseded_by:
                for each in (job.refinding, job.reprotecting):
                    if each is not None:
                        each.end()
                job.refinding = job.reprotecting = None
            elif job.refinding is not None and job.refinding.is_due and losses:
                job.refinding.tend()
            elif job.reprotecting is not None and job.reprotecting.is_due and losses:
                job.reprotecting.tend(job.lends(), losses)

    def _refind(self, job: Job) -> None:
        """Sets up the survey for replicas of the restored checkpoint, if this agent took the job over from a dead one.
        Waits until the job's own replicated checkpoints and its memory-only nodes are known."""
        network, identity, group = self.network, job.claim.parent if job.claim is not None else None, job.group
        if not job.asks_for_former or job.plan is None or self.lenders.awaited:
            return
        if group.newest is not None and group.unsure:
            return
        job.asks_for_former = False
        if identity is None or network is None:
            return

        def ask(then: Callable[[Inventory, bool], None]) -> None:
            names = [node.name for node in (*job.nodes, *self.lenders.nodes())]
            own = KeptReplica.of(self._inventory(whole=True), None, identity.epoch)
            asked = lambda kept, silent: job.guard(lambda: then(together(kept, network.me), not silent))  # noqa: E731
            ask_keeps(network, names, own, identity.epoch, asked)

        def collect(inventory: Inventory, then: Callable[[FramePlaces | None, str], None]) -> None:
            def collected(found: GatheredManifest | None, error: str) -> None:
                self.copies.release(identity)
                then(found.places if found is not None else None, error)

            # Leased, since a newer checkpoint may be replicated meanwhile and evict this one.
            self.copies.lease(identity)
            services = network, self._bulk, self.parities, self._arenas_of, inventory
            CheckpointCollector(*services, job.nodes, self.lenders.nodes(), job.guard).whole(identity, collected)

        def found(places: FramePlaces, inventory: Inventory) -> None:
            job.refinding = None
            self._reprotect(job, network, identity, places.sizes, places.holders, inventory)

        job.refinding = RestartSurvey(identity, ask, collect, found, self._server.later)

    def _givers_told(self, start: Start, places: FramePlaces) -> bytes:
        """A blob: names and addresses of the holders that have no rank in the job."""
        names = {name for held in places.holders.values() for name in held}
        givers = [node for node in self._others_that_hold(start) if node.name in names]
        told: bytes = msgpack.packb([[node.name, [str(address) for address in node.addresses]] for node in givers])
        return told

    def _call_again(self, name: str) -> None:
        """Reconnects to a node of the current job, if the job still needs the agent."""
        network, job = self.network, self.current
        if network is None or job is None or not job.needed or network.channel(name) is not None:
            return
        node: NodeAt | None = next((each for each in job.nodes if each.name == name), None)
        if node is not None:
            again = lambda error: self._server.later(CALL_AGAIN_S, lambda: self._call_again(name)) if error else None  # noqa: E731
            network.connect(node, again)


def _room_for(job: Job, manifest: Manifest) -> Callable[[], int]:
    """A function: the bytes that a start may take on this node until all ranks have restored."""
    slot_bytes = _slot_bytes(manifest, job.ranks.count, job.world)
    slots = slots_for(job.group.policy)
    return lambda: job.own.for_a_while_bytes(slot_bytes, slots, job.options.limits.memory)


def _slot_bytes(manifest: Manifest, ranks: int, world: int) -> int:
    """About the bytes of one snapshot on a node that has `ranks` of the job's `world` ranks."""
    return int(manifest.frames["length"].sum()) * ranks // world
