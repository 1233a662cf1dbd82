"""The candidates of a start that are in memory: their gathering, the serving of their frames, and where these are.

The nodes that serve are those of the start, and the holders without ranks: memory-only nodes and nodes of earlier
starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgpack

from ckpt.agent.job.job import Job
from ckpt.agent.job.memory_node_client import MemoryNodeClients
from ckpt.agent.node.node_context import NodeContext
from ckpt.agent.node.node_memory import START_READER, NodeMemory
from ckpt.agent.node.startup_state import ResolvedStart, Start
from ckpt.agent.replication.replication_manager import SLOTS_MIN
from ckpt.agent.restore.collect import CheckpointCollector
from ckpt.agent.restore.peer_source import PeerSource
from ckpt.agent.restore.restore_session import RestoreSession
from ckpt.agent.restore.shared_read import SharedRead
from ckpt.agent.restore.sources import open_session
from ckpt.agent.runtime.coroutines import EXPECTED
from ckpt.agent.runtime.memory_plan import needed_bytes, slots_for
from ckpt.agent.runtime.workers import error_text
from ckpt.agent.snapshots.manifest_gather import FramePlaces
from ckpt.agent.snapshots.memory_checkpoint import LocalMemory, Memory
from ckpt.errors import AgentError
from ckpt.ipc.messages import Message
from ckpt.types import OWN_NODE, Identity

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel
    from ckpt.format.manifest import Manifest
    from ckpt.ipc.node_list import NodeAt
    from ckpt.store.reader import FrameReader

log = logging.getLogger("ckpt")


class CandidateService:
    """Main thread only. On the coordinator of a start."""

    def __init__(self, context: NodeContext, memory: NodeMemory, memory_nodes: MemoryNodeClients) -> None:
        self._context, self._jobs, self._memory, self._memory_nodes = context, context.jobs, memory, memory_nodes
        self._lease: tuple[Job, int] | None = None  # job and slot of the candidate being restored from memory

    # -- before a candidate is offered

    async def gather(self, start: Start, identity: Identity) -> None:
        """Puts together a checkpoint that lies on several nodes. If that fails, it is no candidate in memory any
        more."""
        try:
            start.choice.gathered_manifests[identity] = await self._make_collector(start).collect_whole(identity)
        except EXPECTED as exc:
            log.warning("%s cannot be had from memory: %s", identity, error_text(exc))
            start.choice.gather_errors[identity] = error_text(exc)
            start.inventory.mark_unusable(identity)
        start.progress.advance()

    async def find_frames(self, start: Start, chosen: ResolvedStart, moves: Callable[[], object]) -> FramePlaces | None:
        """The frames of a store candidate that memory has, or will have soon; None: none. The other frames are read
        from the store. `moves`: a value that changes with any progress."""
        identity, manifest = chosen.candidate.identity, chosen.manifest
        network = self._context.network
        ranks = {node.name: len(node.ranks) for node in start.nodes}
        ranks = ranks or {network.agent_name if network is not None else "": start.world}
        slots = {name: _slot_bytes(manifest, count, start.world) for name, count in ranks.items()}
        leave = {name: needed_bytes(slot_bytes, SLOTS_MIN) for name, slot_bytes in slots.items()}
        later = self._context.server.call_later
        try:
            return await self._make_collector(start).collect_part(identity, manifest, leave, later, moves)
        except EXPECTED as exc:
            log.info("%s is read from the store, nothing of it from memory: %s", identity, error_text(exc))
            return None

    def _make_collector(self, start: Start) -> CheckpointCollector:
        memory, context = self._memory, self._context
        services = context.network, context.workers, memory.replica_service, memory.arenas_of, start.inventory
        return CheckpointCollector(*services, start.nodes, self._holders_without_ranks(start), urgent=True)

    def _holders_without_ranks(self, start: Start | None) -> list[NodeAt]:
        former = start.previous_nodes if start is not None else ()
        connected = [node for node in former if self._context.channel(node.name) is not None]
        return [*self._memory_nodes.nodes(), *connected]

    # -- while it is restored

    def open_session(self, start: Start, job: Job, chosen: ResolvedStart) -> RestoreSession:
        """Opens the restore of the chosen candidate. Its slot here is leased, and its holders serve their frames, until
        `end_session`."""
        identity, records, store = chosen.candidate.identity, chosen.candidate.records, self._context.store
        where = self._jobs.find_checkpoint(identity)
        if where is not None:
            where[0].scheduler.slots.take_lease(where[1])
            self._lease = where[0], where[1]
        gathered, places = start.choice.gathered_manifests.get(identity), start.choice.find_places(identity)
        memory: Memory | None = gathered.checkpoint if gathered is not None else where[2] if where is not None else None
        if memory is None and places is not None:
            memory = LocalMemory(self._memory.arenas_of(identity), places.ranks, places.offsets)

        def open_reader() -> FrameReader:
            return store.open_reader(records, chosen.record)

        session = open_session(
            identity,
            chosen.manifest,
            job.ranks.local_rank_count,
            memory,
            open_reader if records else None,
            self._context.workers,
            self._context.server,
            peers=self._open_peer_source(start, places, chosen.manifest) if places is not None else None,
            fan=self._open_shared_read(start, job, chosen, places, open_reader) if records else None,
            folder=store.folder,
        )
        session.record = chosen.record
        return session

    def end_sessions(self) -> None:
        """Ends the restore of the candidate: releases its slot, and ends the serving of its frames."""
        if self._lease is not None:
            self._lease[0].scheduler.slots.release_lease(self._lease[1])
            self._lease = None
        for job in self._jobs.coordinated():
            if job.restore is not None:
                job.restore.close()
                self._end_serving(job.restore.identity)
                job.restore = None

    def _open_peer_source(self, start: Start, places: FramePlaces, manifest: Manifest) -> PeerSource | None:
        """Has the holders serve their frames; returns the source of the frames that this node lacks."""
        network = self._context.network
        if network is None or not start.nodes:
            return None
        for rank, names in places.holders.items():
            frames = places.frames(rank, manifest)
            for name in names:
                if not name:
                    self._memory.serve_frames(places.identity, rank, frames, START_READER)
                    continue
                fields = {"t": "publish", "identity": str(places.identity), "ranks": [rank]}
                network.notify(name, fields, [frames.encode()])
        return PeerSource(places, network, [*start.nodes, *self._holders_without_ranks(start)])

    def _open_shared_read(
        self,
        start: Start,
        job: Job,
        chosen: ResolvedStart,
        places: FramePlaces | None,
        open_reader: Callable[[], FrameReader],
    ) -> SharedRead | None:
        """This node's part in the shared read: the nodes divide the frames that memory lacks, and each reads its part
        from the store; None for a job of one node."""
        if self._context.network is None or len(start.nodes) < 2:
            return None
        slot_bytes = _slot_bytes(chosen.manifest, job.ranks.local_rank_count, job.context.world)
        slots = slots_for(job.scheduler.clock.policy)
        room = lambda: job.local_share.restore_budget_bytes(slot_bytes, slots, job.context.options.limits.memory)  # noqa: E731
        only = places.missing_frames if places is not None else None
        about = job.epoch, chosen.manifest, start.nodes
        return SharedRead(*about, self._context.network, open_reader, room, self._context.emit_event, only)

    def _end_serving(self, identity: Identity) -> None:
        """Has the holders end the serving of that checkpoint."""
        job = self._jobs.current
        nodes = [*(job.nodes[1:] if job is not None else ()), *self._holders_without_ranks(self._jobs.start)]
        names = [OWN_NODE, *(node.name for node in nodes)]
        self._memory.replica_service.end_offers(identity, names, START_READER)

    # -- what other nodes of the start are told

    def send_places(self, job: Job, channel: Channel, message: Message) -> None:
        """Tells a node the manifest of the candidate, and where its frames are. Errors: AgentError."""
        identity = Identity.parse(str(message.fields["identity"]))
        start = self._jobs.start
        chosen = start.choice.chosen if start is not None else None
        if start is None or chosen is None or job.restore is None or job.restore.identity != identity:
            raise AgentError(f"{identity} is not being restored now")
        records = [[ref.writer, ref.size] for ref in chosen.records]
        found = start.choice.find_places(identity)
        where = found.fields() if found is not None else {}
        # Encoded once for all nodes.
        if identity not in start.choice.location_blobs:
            from ckpt.format.record import encode_manifest

            places = [*found.blobs(), self.encode_holders(start, found)] if found is not None else []
            start.choice.location_blobs = {identity: [encode_manifest(job.restore.manifest), *places]}
        channel.reply(int(message.fields["id"]), {"records": records, **where}, start.choice.location_blobs[identity])

    def encode_holders(self, start: Start, places: FramePlaces) -> bytes:
        """A blob: names and addresses of the holders that have no rank in the job."""
        names = {name for held in places.holders.values() for name in held}
        givers = [node for node in self._holders_without_ranks(start) if node.name in names]
        told: bytes = msgpack.packb([[node.name, [str(address) for address in node.addresses]] for node in givers])
        return told


def _slot_bytes(manifest: Manifest, ranks: int, world: int) -> int:
    """About the bytes of one snapshot on a node that has `ranks` of the job's `world` ranks."""
    return int(manifest.frames["length"].sum()) * ranks // world
