"""The handlers of peers' messages about the snapshots and replicas here: what a node reads, keeps, writes and drops for
others. The same on a node with ranks and on a memory-only node."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from ckpt.agent.commit.distributed_write import write_part
from ckpt.agent.commit.job_options import options_from
from ckpt.agent.net.progress import Answer, Progress, serve_request
from ckpt.agent.net.transport import Frames
from ckpt.agent.node.dispatch import Permissions, Route, Sender, epoch_of
from ckpt.agent.node.node_context import NodeContext
from ckpt.agent.node.node_memory import START_READER, NodeMemory
from ckpt.agent.runtime.coroutines import work_on
from ckpt.agent.runtime.workers import Lane
from ckpt.agent.snapshots.manifest_gather import encode_local_parts
from ckpt.agent.snapshots.remote_share import WriteRequest
from ckpt.errors import AgentError
from ckpt.ipc.messages import Message
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel


class SnapshotHandlers:
    """Main thread only."""

    def __init__(self, context: NodeContext, memory: NodeMemory, permissions: Permissions) -> None:
        self._context, self._memory, self._permissions = context, memory, permissions
        self._write_progress = Progress()  # of the parts that this node writes for commits of other nodes
        self._writes: list[tuple[str, Identity, threading.Event]] = []  # these: who commits what; set to cancel

    def routes(self) -> list[Route]:
        later = self._context.server.call_later
        describe = functools.partial(serve_request, self._describe, Progress(), later)
        write = functools.partial(serve_request, self._write_frames, self._write_progress, later)
        return [
            Route("describe-snapshots", Sender.ANYONE, describe),
            Route("write-frames", Sender.COORDINATOR_OR_SURVEYOR, write),
            Route("publish", Sender.COORDINATOR_OR_SURVEYOR, self._publish),
            Route("withdraw", Sender.OWNER, self._withdraw),
            Route("replicate", Sender.EVICTING_COORDINATOR, self.serve_request),
            Route("evict", Sender.EVICTING_COORDINATOR, self._evict),
        ]

    def is_written(self, identity: Identity) -> bool:
        """Whether this node writes a part of that checkpoint for another node's commit."""
        return any(each == identity for _, each, _ in self._writes)

    def send_inventory(self, channel: Channel, message: Message) -> None:
        """Answers a survey with this node's inventory. With a lease it stays as listed until the outcome."""
        channel.reply(int(message.fields["id"]), {}, [self.encode_inventory()])

    def encode_inventory(self) -> bytes:
        packed: bytes = msgpack.packb(self._memory.inventory(whole=True).fields())
        return packed

    # -- reading

    async def _describe(self, channel: Channel, message: Message) -> Answer:
        """Answers with the declarations and hashes of the snapshots that are held here, without their data."""
        fields = message.fields
        world, sealed = int(fields["world"]), bool(fields.get("sealed"))
        identity, ranks = Identity.parse(str(fields["identity"])), [int(rank) for rank in fields["ranks"]]
        # A dead coordinator may not have asked for hashes yet; its successor appoints nothing meanwhile.
        hashed = not self._permissions.is_coordinator(channel.peer, identity.epoch)
        arenas = self._memory.require_arenas(identity, ranks, hashed)
        encode = functools.partial(encode_local_parts, identity, world, arenas, sealed)
        encoded = await work_on(self._context.workers, Lane.FRONT, encode)
        return {"sizes": [[rank, arena.size_bytes] for rank, arena in arenas.items()]}, [encoded]

    def _publish(self, channel: Channel, message: Message) -> None:
        """Lets other nodes fetch snapshots or parity. With frames: those of one rank, which a start has described, are
        served until its outcome; that is not answered."""
        if not message.blobs:
            self.serve_request(channel, message)
            return
        (rank,) = [int(rank) for rank in message.fields["ranks"]]
        identity = Identity.parse(str(message.fields["identity"]))
        arena = self._memory.arenas_of(identity).get(rank)
        frames = Frames.decode(message.blobs[0], arena.size_bytes if arena is not None else 0)
        self._memory.serve_frames(identity, rank, frames, _reader_name(channel, {"reader": START_READER}))

    def _withdraw(self, channel: Channel, message: Message) -> None:
        """That agent needs something of a checkpoint no more: the part of its commit, or what a reader fetches."""
        identity = Identity.parse(str(message.fields["identity"]))
        if message.fields.get("writes"):
            for _, _, cancel in [each for each in self._writes if each[:2] == (channel.peer, identity)]:
                cancel.set()
        else:
            self._memory.replica_service.withdraw(identity, _reader_name(channel, message.fields))

    # -- replicas

    def serve_request(self, channel: Channel, message: Message) -> None:
        """A peer asks for this node's work on replicas; see ReplicaService."""
        progress, later = self._memory.replicas.progress, self._context.server.call_later
        serve_request(self._work_on_replicas, progress, later, channel, message)

    async def _work_on_replicas(self, channel: Channel, message: Message) -> Answer:
        fields = {**message.fields, "reader": _reader_name(channel, message.fields)}
        blobs = await self._memory.replica_service.serve(fields, message.blobs)
        if message.kind == "replicate" and not fields.get("rereplication"):
            # One that arrived during a survey was not listed, so no peer may drop older replicas for it.
            self._memory.inventory_lease.check(channel.peer, epoch_of(fields))
        return {}, blobs

    def _evict(self, channel: Channel, message: Message) -> None:
        """The coordinator needs something no more. "older": what is older than a checkpoint that is replicated;
        "older-epochs": than an epoch; "epoch": the replicas of an epoch; "job": the job is over. Errors: AgentError."""
        match message.fields["what"]:
            case "older":
                self._memory.replicas.evict_older_than(Identity.parse(str(message.fields["identity"])))
            case "epoch":
                self._memory.replicas.evict_epoch(epoch_of(message.fields))
            case "older-epochs":
                self._memory.drop_older_epochs(epoch_of(message.fields))
            case "job":
                self._memory.end_job(epoch_of(message.fields))
            case what:
                raise AgentError(f"there is nothing to evict that is called {what!r:.100}")

    # -- parts of other nodes' commits

    async def _write_frames(self, channel: Channel, message: Message) -> Answer:
        """Writes this node's part of a commit that another node makes. The snapshots are leased meanwhile."""
        fields, replicas, store = message.fields, self._memory.replicas, self._context.store
        identity = Identity.parse(str(fields["identity"]))
        options = options_from({"keep": {}, "limits": {"bandwidth": fields["bandwidth"]}, "codec": fields["codec"]})
        wanted = WriteRequest.decode(identity, message.blobs[0], options.codec, options.limits.bandwidth)
        arenas = self._memory.require_arenas(identity, np.unique(wanted.ranks).tolist())
        under_way = channel.peer, identity, threading.Event()
        self._writes.append(under_way)
        write = functools.partial(write_part, store, wanted, arenas, self._write_progress.advance, under_way[2])
        writing = work_on(self._context.workers, Lane.COMMIT, write)
        writing.when_settled(lambda: self._writes.remove(under_way))
        replicas.arenas.lease_until(identity, writing)
        written = await writing
        return {}, [written.places.tobytes(), msgpack.packb(written.packs)]


def _reader_name(channel: Channel, fields: dict[str, Any]) -> str:
    """The reader's name with its agent's before it, so that an agent ends only its own readings."""
    return f"{channel.peer}/{fields.get('reader', '')}"
