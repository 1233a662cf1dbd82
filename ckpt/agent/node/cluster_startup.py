"""The coordinator's part in a start of several nodes, or with memory-only ones: the survey of the nodes, the gathering
of candidates, the serving of their frames, and what the other nodes are told afterwards.

The coordinator is the agent of rank 0's node. Nothing here happens in a job of one node without memory-only nodes.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgpack

from ckpt.agent.job.job import Job
from ckpt.agent.job.memory_node_client import MemoryNodeClients
from ckpt.agent.net.transport import Frames
from ckpt.agent.node.inventory_lease import LEASE_TIMEOUT_S, Frozen
from ckpt.agent.node.node_memory import NodeMemory
from ckpt.agent.node.previous_nodes import survey_previous_nodes
from ckpt.agent.node.startup_state import ResolvedStart, Start
from ckpt.agent.replication.replication_manager import SLOTS_MIN
from ckpt.agent.replication.rereplicate import Rereplication
from ckpt.agent.restore.collect import CheckpointCollector
from ckpt.agent.restore.peer_source import PeerSource, offer_name
from ckpt.agent.restore.shared_read import SharedRead
from ckpt.agent.runtime.event_loop import EventLoop
from ckpt.agent.runtime.memory_plan import needed_bytes, slots_for
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.agent.snapshots.manifest_gather import FramePlaces, GatheredManifest
from ckpt.agent.state.job_facts import WorkState
from ckpt.errors import AgentError, CkptError
from ckpt.ipc.messages import Message
from ckpt.settings import Settings
from ckpt.types import OWN_NODE, Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel
    from ckpt.format.manifest import Manifest
    from ckpt.ipc.addresses import Address
    from ckpt.ipc.node_list import NodeAt

log = logging.getLogger("ckpt")

RECONNECT_S = 1.0  # pause before a broken connection to a node of a running job is dialled again
CONNECT_TRIES_MAX = 3  # connections tried to tell a node of a start
START_READER = "start"  # the reader of frames that a start has served (see ReplicaStore.offer)


class ClusterStartup(NodeMemory):
    """The part of the agent that coordinates starts of several nodes (see above). Main thread only. `memory_nodes`: the
    memory-only nodes of the current job."""

    def __init__(self, url: str, settings: Settings, server: EventLoop) -> None:
        super().__init__(url, settings, server)
        self._frozen_timer = Frozen()
        # Candidates that failed to restore, and why.
        self._struck_candidates: dict[Identity, str] = {}
        self._surveying_start: Start | None = None  # the start that surveyed nodes and owes them its outcome
        self.memory_nodes = MemoryNodeClients(
            url, lambda: self.network, server.call_later, self._emit_event, self._on_memory_nodes_changed
        )
        self._services.memory_nodes = self.memory_nodes.reachable_nodes
        self._services.awaits_memory_nodes = lambda: self.memory_nodes.has_pending_nodes

    def _guard_start(self, start: Start, what: Callable[[], None]) -> None:
        """Runs `what` if that start is still under way. An error in `what` fails the start, and ends no other job."""
        if self._start is not start:
            return
        try:
            what()
        except Exception as exc:
            self._fail_start(start, exc)

    def _fail_start(self, start: Start, error: BaseException) -> None:
        """Refuses the waiting request with `error`. An epoch that has begun gets no trainers then, and ends."""
        if not isinstance(error, CkptError):
            log.error("a start of launch %r failed in the agent", start.launch, exc_info=error)
        request_id, start.request_id = start.request_id, None
        if request_id is not None:
            start.peer.refuse(request_id, error)
        if start.job is None:
            self._start = None

    def _progress_key(self, start: Start) -> tuple[int, ...]:
        """A value that changes whenever the start, or any work that it may wait for, makes progress."""
        heard = self.network.progress.count if self.network is not None else 0
        known = (
            len(start.pending_nodes),
            len(start.gathered_manifests),
            len(start.gather_errors),
            len(self._struck_candidates),
        )
        return (
            *known,
            start.is_store_listed,
            start.has_surveyed_previous,
            start.is_resolving,
            self.replicas.progress.count,
            heard,
        )

    # -- a start that is coordinated here

    def _survey_nodes(self, start: Start) -> None:
        """Tells the other nodes of the start, and asks each for its inventory."""
        for node in start.nodes[1:]:
            self._survey_node(start, node)
        self._survey_memory_nodes(start)

    def _survey_memory_nodes(self, start: Start) -> None:
        """Surveys the memory-only nodes. The start does without those that do not answer."""

        def answered(address: Address, answer: Message | None, error: str) -> None:
            try:
                if answer is not None:
                    start.inventory.merge(Inventory.unpack(answer.blobs[0]), str(answer.fields["name"]))
            # A malformed answer can raise anything, and the start waits for this one.
            except Exception as exc:
                log.warning("what the memory-only node at %s says it holds cannot be read: %r", address, exc)
            start.pending_nodes.discard(str(address))

        start.pending_nodes.update(map(str, start.memory_node_addresses))
        then = lambda *found: self._guard_start(start, lambda: answered(*found))  # noqa: E731
        self.memory_nodes.survey_nodes(start.memory_node_addresses, start.launch, start.take_over, then)

    def _update_inventory_lease(self, now_s: float) -> float | None:
        """Tells surveyed nodes the outcome of a start that ended, and ends what expired leases had served. Returns when
        to look again."""
        start = self._surveying_start
        if start is not self._start:
            claim = start.job.claim if start is not None and start.job is not None else None
            if start is not None:
                self._announce_outcome(start, claim.epoch if claim is not None else None)
            self._surveying_start = self._start if self._start is not None and self._start.nodes else None
        if self.replicas.readers or self.followed_jobs:
            self._end_expired_serving()
        for job in self._jobs():
            job.scheduler.is_frozen = bool(job.nodes and self.inventory_lease.refusal(OWN_NODE, job.epoch))
        return self._report_if_frozen(now_s)

    def _report_if_frozen(self, now_s: float) -> float | None:
        """Emits `job.frozen` if the current job has taken no snapshot for long. Returns when to look again."""
        job = self.current_job
        if job is None or job.scheduler.all_gone or job.scheduler.superseded_by:
            self._frozen_timer.is_warning_due(None, now_s)
            return None
        cut_off = [f"node {each['node']}" for each in job.disconnected_ranks() if each["node"]]
        kind = "frozen" if job.scheduler.is_frozen else "cut off" if cut_off else ""
        if not self._frozen_timer.is_warning_due((job.epoch, kind) if kind else None, now_s):
            return self._frozen_timer.warning_due_s
        text = f"no snapshot of this job has been taken for {LEASE_TIMEOUT_S:.0f} s"
        if kind == "frozen":
            text += ", and none is dropped from memory"
            why = self.inventory_lease.refusal(OWN_NODE, job.epoch)
            then = (
                f"it goes on once that start has restored or failed, or its agent was gone for {LEASE_TIMEOUT_S:.0f} s"
            )
            if job.epoch < self.inventory_lease.epoch_floor:
                then = "start the job again"
        else:
            why = f"cut off from the agent of rank 0's node: {', '.join(cut_off)}"
            then = "training goes on, and saving goes on once it is connected; run ckpt watch there to see if it hangs"
        job.emit("job.frozen", f"{text}: {why}; {then}", True, {"reason": why})
        return None

    def _announce_outcome(self, start: Start, epoch: Epoch | None) -> None:
        """Tells the surveyed nodes which epoch the start has begun; None: it came to nothing."""
        if epoch is not None:
            self.inventory_lease.on_epoch_begun(OWN_NODE, epoch)
        elif self._start is None:
            self.inventory_lease.end_lease(OWN_NODE)
        fields = {"t": "start-outcome", "epoch": str(epoch) if epoch is not None else None}
        # Nodes that a newer start has surveyed again hear only the newer outcome.
        again = {node.name for node in self._start.nodes} if self._start is not None else set()
        for node in [*start.nodes[1:], *start.previous_nodes]:
            if self.network is not None and node.name not in again:
                self.network.notify(node.name, fields)
        # Memory-only nodes learn of a begun epoch when it borrows from them.
        if epoch is None and self._start is None:
            self.memory_nodes.broadcast_hint(fields)

    def _survey_previous_nodes(self, start: Start) -> None:
        """Asks agents of earlier starts what they hold. Without a network there are none to ask."""
        start.has_surveyed_previous = True
        if self.network is not None and start.nodes:
            survey_previous_nodes(
                self.network, start, lambda what: self._guard_start(start, what), self._server.call_later
            )

    def _release_idle_memory_nodes(self) -> None:
        """Ends the borrowing of a job whose ranks are all gone: the memory-only nodes may lend to another job."""
        if self.memory_nodes.is_borrowing and self.current_job is not None and self.current_job.scheduler.all_gone:
            self.memory_nodes.broadcast_hint({"t": "job-idle"})
            self.memory_nodes.stop_borrowing()

    def _drop_lent_replicas(self) -> None:
        """Has the memory-only nodes drop the replicas of a job that has ended and whose newest checkpoint is stored."""
        job = self.current_job
        if job is not None and job.is_finished and job.scheduler.newest_commit_state is WorkState.DONE:
            self.memory_nodes.broadcast_hint({"t": "epoch-ended", "epoch": str(job.epoch)})

    def _on_memory_nodes_changed(self) -> None:
        """The set of memory-only nodes changed: plans the placement of replicas anew."""
        if self.current_job is not None:
            self.current_job.replan_placement()
            if self.current_job.rereplication is not None:
                self.current_job.rereplication.survey_again()

    def _borrow_memory(self, job: Job, named: Sequence[Address]) -> None:
        """Asks the memory-only nodes that a job names to lend it their memory from now on."""
        if named and job.terms is not None:
            self.memory_nodes.begin_borrowing(job.terms, named)

    def _survey_node(self, start: Start, node: NodeAt) -> None:
        """Tells one node of the start and adds its inventory. The start fails if that node does not take part."""
        network = self.network
        assert network is not None
        start.pending_nodes.add(node.name)
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
            network.request(
                node.name, fields, (), lambda *found: self._guard_start(start, lambda: answered(asked, *found))
            )

        def answered(asked: Channel | None, answer: Message | None, error: str) -> None:
            # The connection ended, as when both nodes dial each other at once: the start was not refused.
            if answer is None and network.channel(node.name) is not asked and next(tries) < CONNECT_TRIES_MAX:
                connect()
                return
            if answer is None:
                raise AgentError(f"agent {node.name} does not take part: {error}")
            start.inventory.merge(Inventory.unpack(answer.blobs[0]), node.name)
            start.pending_nodes.discard(node.name)

        connect()

    def _gather_candidate(self, start: Start, identity: Identity) -> None:
        """Puts together a checkpoint that lies on several nodes; a candidate is chosen again after that."""

        def collected(found: GatheredManifest | None, error: str) -> None:
            start.is_resolving = False
            if found is not None:
                start.gathered_manifests[identity] = found
                return
            log.warning("%s cannot be had from memory: %s", identity, error)
            start.gather_errors[identity] = error
            start.inventory.mark_unusable(identity)

        self._make_collector(start).collect_whole(identity, collected)

    def _find_frames_in_memory(self, start: Start, chosen: ResolvedStart, then: Callable[[], None]) -> None:
        """Finds the frames of a store candidate that memory has, or will have soon; sets `start.partial_places`, then
        calls `then`. The other frames are read from the store."""
        identity, manifest = chosen.candidate.identity, chosen.manifest

        def found(places: FramePlaces | None, error: str) -> None:
            start.is_resolving, start.partial_places = False, places
            if places is None:
                log.info("%s is read from the store, and nothing of it is taken from memory: %s", identity, error)
            then()

        ranks = {node.name: len(node.ranks) for node in start.nodes}
        ranks = ranks or {self.network.agent_name if self.network is not None else "": start.world}
        slots = {name: _slot_bytes(manifest, count, start.world) for name, count in ranks.items()}
        leave = {name: needed_bytes(slot_bytes, SLOTS_MIN) for name, slot_bytes in slots.items()}
        moves = lambda: self._progress_key(start)  # noqa: E731
        self._make_collector(start).collect_part(identity, manifest, leave, self._server.call_later, moves, found)

    def _make_collector(self, start: Start) -> CheckpointCollector:
        services = self.network, self._workers, self.replica_service, self._arenas_of, start.inventory
        guard = lambda what: self._guard_start(start, what)  # noqa: E731
        return CheckpointCollector(*services, start.nodes, self._holders_without_ranks(start), guard, urgent=True)

    def _holders_without_ranks(self, start: Start | None) -> list[NodeAt]:
        """The holders without ranks of this job: memory-only nodes, and connected nodes of earlier starts."""
        network, former = self.network, start.previous_nodes if start is not None else ()
        connected = [node for node in former if network is not None and network.channel(node.name) is not None]
        return [*self.memory_nodes.nodes(), *connected]

    def _open_peer_source(self, start: Start, places: FramePlaces, manifest: Manifest) -> PeerSource | None:
        """Has the holders serve their frames; returns the source of the frames that this node lacks."""
        network = self.network
        if network is None or not start.nodes:
            return None
        for rank, names in places.holders.items():
            frames = places.frames(rank, manifest)
            for name in names:
                if not name:
                    self._serve_frames(places.identity, rank, frames, START_READER)
                    continue
                fields = {"t": "serve-frames", "identity": str(places.identity), "rank": rank}
                network.notify(name, fields, [frames.encode()])
        nodes = [*start.nodes, *self._holders_without_ranks(start)]
        return PeerSource(places, network, nodes)

    def _open_shared_read(
        self, start: Start, job: Job, chosen: ResolvedStart, places: FramePlaces | None
    ) -> SharedRead | None:
        """This node's part in the shared read: the nodes divide the frames that memory lacks, and each reads its part
        from the store; None for a job of one node."""
        if self.network is None or len(start.nodes) < 2:
            return None
        identity, records = chosen.candidate.identity, chosen.candidate.records
        read = lambda: self._store.open_reader(records)  # noqa: E731
        room = _restore_bytes_for(job, chosen.manifest)
        only = places.missing_frames if places is not None else None
        about = identity, job.epoch, chosen.manifest, start.nodes
        return SharedRead(*about, self.network, read, room, self._emit_event, only)

    def _serve_frames(self, identity: Identity, rank: int, frames: Frames, reader: str) -> None:
        """Serves these frames to every node of the run, until `reader` withdraws them. Errors: AgentError if this node
        does not hold that rank's snapshot."""
        arena = self._arenas_of(identity).get(rank)
        if arena is None or self.network is None:
            raise AgentError(f"rank {rank} of {identity} is not held here")
        served = frames.with_offsets(frames.offsets, arena.size_bytes)
        self.replicas.offer(self.network.transport, offer_name(identity, rank), arena.view, served, reader, urgent=True)

    def _end_expired_serving(self) -> None:
        """Ends what is served, and read from the store, for starts whose outcome is known or whose lease has expired
        (see InventoryLease)."""
        for reader in self.replicas.readers:
            name, slash, use = reader.rpartition("/")
            if slash and use == START_READER and not self.inventory_lease.has_lease(name):
                self.replicas.withdraw(None, reader)
        for each in self.followed_jobs:
            if not self.inventory_lease.has_lease(each.coordinator.name):
                each.end_uncoordinated_restore()

    def _end_serving(self, identity: Identity) -> None:
        """Has the holders end the serving of that checkpoint."""
        job = self.current_job
        nodes = [*(job.nodes[1:] if job is not None else ()), *self._holders_without_ranks(self._start)]
        self.replica_service.end_offers(identity, [OWN_NODE, *(node.name for node in nodes)], START_READER)

    def _announce_claim(self, job: Job) -> None:
        terms = job.terms
        assert terms is not None  # the job has begun
        fields, blobs = {"t": "epoch-claimed", "epoch": str(job.epoch)}, [terms.encode()]
        for node in job.nodes[1:]:
            if self.network is not None:
                self.network.notify(node.name, fields, blobs)
        self._borrow_memory(job, self.memory_nodes.addresses)

    def _announce_complete_checkpoint(self, job: Job) -> None:
        self._drop_older_epochs(job.epoch)
        for node in job.nodes[1:]:
            if self.network is not None:
                self.network.notify(node.name, {"t": "drop-older-epochs", "epoch": str(job.epoch)})
        # Else the replicas of former epochs may be all that survives this node.
        if job.scheduler.replicated is not None or job.scheduler.committed_version is not None:
            self.memory_nodes.broadcast_hint({"t": "drop-older-epochs", "epoch": str(job.epoch)})

    def _drop_older_epochs(self, before: Epoch) -> None:
        """Epoch `before` has a complete checkpoint: drops the replicas and followed jobs of older epochs."""
        self.newest_remote_epoch = max(self.newest_remote_epoch, before)
        self.replicas.evict_epochs_before(before)
        for each in self.followed_jobs:
            each.is_over = each.is_over or each.epoch < before

    # -- re-replication of the restored checkpoint

    def _rereplicate_restored(self, start: Start) -> None:
        """Lets the checkpoint that all ranks have restored be replicated again."""
        job = self.current_job
        identity = job.claim.parent if job is not None and job.claim is not None else None
        if job is not None and identity is not None:
            # Where it is not whole in memory, replicas would save only a few reads of the store.
            is_whole = identity in start.gathered_manifests or self._local_checkpoint(identity) is not None
            job.needs_rereplication = is_whole and len(job.nodes) > 1

    def _advance_rereplication(self) -> None:
        """Re-replicates the restored checkpoint once the job's memory plan is known, until the job has a checkpoint of
        its own that supersedes it."""
        for job in self._jobs():
            group, replication_manager = job.scheduler, job.replication_manager
            losses = (
                replication_manager.losses_to_survive if replication_manager is not None and job.plan is not None else 0
            )
            if job is not self.current_job or group.supersedes_former or group.all_gone or group.superseded_by:
                if job.rereplication is not None:
                    job.rereplication.end()
                job.rereplication = None
            elif losses:
                self._set_up_rereplication(job)
                if job.rereplication is not None and job.rereplication.is_due:
                    job.rereplication.begin_attempt(job.spare_bytes_by_node(), losses)

    def _set_up_rereplication(self, job: Job) -> None:
        """Sets up the re-replication of the restored checkpoint. Waits until the memory-only nodes are known, and, if
        this agent took the job over from a dead one, the job's own replicated checkpoints."""
        network, identity, group = self.network, job.claim.parent if job.claim is not None else None, job.scheduler
        if not job.needs_rereplication or self.memory_nodes.has_pending_nodes:
            return
        if group.newest is not None and group.is_survey_pending:
            return
        job.needs_rereplication = False
        if identity is None or network is None:
            return

        def rebuild(held: Inventory, then: Callable[[str], None]) -> None:
            def rebuilt(error: str) -> None:
                self.replicas.release(identity)
                then(error)

            # Leased, since a newer checkpoint may be replicated meanwhile and evict this one.
            self.replicas.lease(identity)
            services = network, self._workers, self.replica_service, self._arenas_of, held
            collector = CheckpointCollector(*services, job.nodes, self.memory_nodes.nodes(), job.guard)
            collector.rebuild(identity, held.missing_ranks(identity), {}, rebuilt)

        job.rereplication = Rereplication(
            *(network, self.replicas, self.replica_service, identity),
            nodes=lambda: [*job.nodes, *self.memory_nodes.nodes()],
            own=lambda: self._inventory(whole=True),
            rebuild=rebuild,
            guard=job.guard,
            later=self._server.call_later,
            emit=job.emit,
            report=job.report_parent_replication,
        )

    def _encode_holders(self, start: Start, places: FramePlaces) -> bytes:
        """A blob: names and addresses of the holders that have no rank in the job."""
        names = {name for held in places.holders.values() for name in held}
        givers = [node for node in self._holders_without_ranks(start) if node.name in names]
        told: bytes = msgpack.packb([[node.name, [str(address) for address in node.addresses]] for node in givers])
        return told

    def _reconnect_node(self, name: str) -> None:
        """Reconnects to a node of the current job, if the job still needs the agent."""
        network, job = self.network, self.current_job
        if network is None or job is None or not job.is_needed or network.channel(name) is not None:
            return
        node: NodeAt | None = next((each for each in job.nodes if each.name == name), None)
        if node is not None:

            def retry(error: str) -> None:
                if error:
                    self._server.call_later(RECONNECT_S, lambda: self._reconnect_node(name))

            network.connect(node, retry)


def _restore_bytes_for(job: Job, manifest: Manifest) -> Callable[[], int]:
    """A function: the bytes that a start may take on this node until all ranks have restored."""
    slot_bytes = _slot_bytes(manifest, job.ranks.local_rank_count, job.world)
    slots = slots_for(job.scheduler.policy)
    return lambda: job.local_share.restore_budget_bytes(slot_bytes, slots, job.options.limits.memory)


def _slot_bytes(manifest: Manifest, ranks: int, world: int) -> int:
    """About the bytes of one snapshot on a node that has `ranks` of the job's `world` ranks."""
    return int(manifest.frames["length"].sum()) * ranks // world
