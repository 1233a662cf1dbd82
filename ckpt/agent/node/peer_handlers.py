"""The handlers of messages from agents of other nodes, and of the ranks whose job has several nodes.

The senders are coordinators of jobs with ranks here, and nodes with ranks of a job that is coordinated here. Each
message is checked against net/permissions.py before it is handled. Nothing here happens in a job of one node."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from ckpt.agent.commit.distributed_write import write_part
from ckpt.agent.commit.store_client import options_from
from ckpt.agent.job.follower_job import FollowerJob, answer_request
from ckpt.agent.job.job import Job
from ckpt.agent.net.permissions import EPOCH_KINDS, Sender, epoch_of, required_sender
from ckpt.agent.net.progress import Progress, ProgressReport
from ckpt.agent.net.transport import Frames
from ckpt.agent.node.cluster_startup import RECONNECT_S, START_READER
from ckpt.agent.node.inventory_lease import EPOCH_GAP_MAX
from ckpt.agent.node.startup import Startup
from ckpt.agent.preemption.notice_relay import (
    OPERATOR,
    ExitTiming,
    RelayedNotice,
    is_operator_key,
    parse_relayed_notices,
    parse_returned_notices,
)
from ckpt.agent.restore.shared_read import shared_read_of
from ckpt.agent.runtime.connections import deliver
from ckpt.agent.runtime.event_loop import EventLoop, Peer
from ckpt.agent.runtime.workers import Lane, failure
from ckpt.agent.snapshots.manifest_gather import encode_local_parts
from ckpt.agent.snapshots.remote_share import AnyPeer, RemotePeer, WriteRequest
from ckpt.errors import AgentError, Superseded
from ckpt.ipc.arena import Arena
from ckpt.ipc.messages import Message
from ckpt.ipc.notice_sources import Sources
from ckpt.preemption.notice import Notice, NoticeChange, Withdrawn
from ckpt.settings import Settings
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.store.packs import Written

log = logging.getLogger("ckpt")


RANKS_NOTICES_MAX = 16  # notices in one message to a rank


class PeerHandlers(Startup):
    """The part of the agent that handles peers' messages (see above). Main thread only."""

    def __init__(self, url: str, settings: Settings, server: EventLoop) -> None:
        super().__init__(url, settings, server)
        self._write_progress = Progress()  # of the parts that this node writes for commits of other nodes
        self._pending_writes: list[tuple[str, Identity, threading.Event]] = []  # these: who commits what; set to cancel
        self._standing_notices = RelayedNotice()  # the notices that stand on this node

    # -- what this node's ranks say

    def _listen(self, peer: Peer, message: Message) -> None:
        """A rank of a job of several nodes has this agent listen for the other nodes."""
        from ckpt.agent.net.peer_network import link_bytes_s

        fields = message.fields
        network = self._open_network(str(fields["name"] or self.agent_name)[:100])
        addresses = network.listen(bytes(fields["secret"]), str(fields["address"]))
        self._unjoined_peers = [each for each in self._unjoined_peers if each.is_open and each is not peer] + [peer]
        told = {"name": network.agent_name, "addresses": [str(each) for each in addresses]}
        peer.reply(int(fields["id"]), {**told, "link_bytes_s": link_bytes_s(addresses[0])})

    def _open_network(self, name: str) -> PeerNetwork:
        """The network of this agent. The first call makes it, and names this agent in it."""
        from ckpt.agent.net.peer_network import PeerNetwork

        if self.network is None:
            self.network = PeerNetwork(self._server, self._workers, name, self)
        return self.network

    def _has_remote_coordinator(self, message: Message) -> bool:
        """Whether the job that a rank joins is coordinated on another node."""
        coordinator = message.fields.get("coordinator")
        return bool(coordinator) and self.network is not None and coordinator != self.network.agent_name

    def _join_followed_job(self, peer: Peer, message: Message) -> None:
        """A rank joins a job that is coordinated on another node. Errors: AgentError; Superseded."""
        fields, network = message.fields, self.network
        epoch, world = Epoch.parse(str(fields["epoch"])), int(fields["world"])
        if network is None:
            raise AgentError(f"this agent was not told to listen for the coordinator of {epoch}")
        found = self._followed_job_of(epoch)
        handed = self._take_handed_notices(message) if found is None else []
        if found is None:
            newer = [each.epoch for each in self.followed_jobs if each.epoch > epoch]
            if newer:
                raise Superseded(f"{epoch} was superseded by {newer[0]}")
            self._adopt_environment(fields)
            nodes = self._parse_nodes(message)
            services = self._server, self._workers, self._store, self._memory_use
            standing = self._notice_listeners.list_notices()
            found = FollowerJob(epoch, world, nodes, network, *services, self._arenas_of, standing)
            self.followed_jobs.append(found)
            # Before the join: if that is refused, the rank comes again, and hands over nothing then.
            self._repeat_notices(handed)
        found.join(peer, message)
        self._unjoined_peers = [each for each in self._unjoined_peers if each is not peer]
        if int(fields["rank"]) == found.lowest_rank:
            self._notice_listeners.listen_to(Sources.parse(fields.get("notice_sources")))
        self._send_standing_notices(peer)

    def _join(self, peer: AnyPeer, message: Message) -> None:
        handed = self._take_handed_notices(message) if isinstance(peer, Peer) and self.current_job is None else []
        try:
            super()._join(peer, message)
        finally:
            self._repeat_notices(handed if self.current_job is not None else [])
        if isinstance(peer, Peer):
            self._send_standing_notices(peer)

    def _take_handed_notices(self, message: Message) -> list[tuple[Notice, ExitTiming]]:
        """The notices that stood on this node when its former agent died, as a rank hands them over."""
        handed = (
            parse_returned_notices(message.fields.get("standing_notices") or []) if message.fields["resume"] else []
        )
        for notice, when in handed:
            self._notice_listeners.restore_notice(notice, when)
        return handed

    def _repeat_notices(self, handed: Sequence[tuple[Notice, ExitTiming]]) -> None:
        for notice, when in handed:
            self._on_notice(notice, when)

    def _send_standing_notices(self, peer: Peer) -> None:
        """Tells a rank the standing notices, which it hands to the next agent if this one dies."""
        if told := self._standing_notices.notice_fields():
            peer.send({"t": "standing-notices", "notices": told[-RANKS_NOTICES_MAX:]})

    def _on_notice(self, word: NoticeChange, when: ExitTiming = ExitTiming.IN_TIME) -> None:
        self._standing_notices.record_notice(word, when)
        body = {"t": "standing-notices", "notices": self._standing_notices.notice_fields()[-RANKS_NOTICES_MAX:]}
        for peer in self._server.peers:
            if peer.role == "trainer":
                peer.send(body)
        super()._on_notice(word, when)
        for each in self.followed_jobs:
            each.on_notice(word, when)

    def _withdraw_operator_notice(self, source: str) -> None:
        """Withdraws an operator's notice from `source`, whichever node it came by."""
        self._on_notice(Withdrawn(source, OPERATOR))
        for each in self.followed_jobs:
            each.withdraw_operator_notice(source)
        job = self.current_job
        if job is not None:
            for name in [name for name in job.scheduler.notices if name[0] == source and is_operator_key(name[1])]:
                job.on_notice(Withdrawn(*name))
            for node in job.nodes[1:]:
                job.share_of(node.name).notify({"t": "notice-withdrawn", "source": source})

    def _followed_rank_of(self, peer: AnyPeer) -> tuple[FollowerJob, int] | None:
        """The followed job and the rank of that connection; None if it joined none."""
        for each in self.followed_jobs:
            rank = each.rank_of(peer)
            if rank is not None:
                return each, rank
        return None

    def _followed_job_of(self, epoch: Epoch) -> FollowerJob | None:
        return next((each for each in self.followed_jobs if each.epoch == epoch), None)

    @property
    def _has_needed_followed_job(self) -> bool:
        """Whether a followed job keeps this agent alive. Only the newest epoch does so by its mere connection: the
        coordinator of an older one may follow a newer job led from here, and the two agents would keep each other
        alive for ever."""
        epochs = [job.epoch for job in self._jobs()] + [each.epoch for each in self.followed_jobs]
        newest = max(epochs, default=None)
        return any(each.is_needed and (each.epoch == newest or not each.is_idle) for each in self.followed_jobs)

    def _drop_ended_followed_jobs(self) -> None:
        for each in list(self.followed_jobs):
            if each.is_over:
                self.followed_jobs.remove(each)
                each.drop()
                self.replicas.evict(lambda identity, epoch=each.epoch: identity.epoch == epoch)  # type: ignore[misc]

    # -- what other agents say

    def peer_message(self, channel: Channel, message: Message) -> None:
        """Handles a message from another agent. Errors: AgentError; whatever a malformed message leads to."""
        fields = message.fields
        self.inventory_lease.on_holder_connected(channel.peer)
        self._check_sender(channel.peer, fields)
        match message.kind:
            case "start":
                self._on_remote_start(channel, fields)
            case "survey":
                request_id = int(fields["id"])
                if fields.get("lease", True):
                    self._grant_inventory_lease(channel.peer, bool(fields.get("for_orphans")))
                self._send_inventory(channel, request_id)
            case "start-outcome":
                self._on_start_outcome(channel.peer, fields)
            case "describe-snapshots":
                self._send_declarations(channel, fields)
            case "serve-frames":
                rank, identity = int(fields["rank"]), Identity.parse(str(fields["identity"]))
                arena = self._arenas_of(identity).get(rank)
                frames = Frames.decode(message.blobs[0], arena.size_bytes if arena is not None else 0)
                self._serve_frames(identity, rank, frames, _reader_name(channel, {"reader": START_READER}))
            case "write-frames":
                self._write_commit_part(channel, message)
            case "cancel-write":
                told = channel.peer, Identity.parse(str(fields["identity"]))
                for _, _, cancel in [each for each in self._pending_writes if each[:2] == told]:
                    cancel.set()
            case "replicated":
                self.replicas.evict_older_than(Identity.parse(str(fields["identity"])))
            case "forget-replicas":
                self.replicas.evict_epoch(Epoch.parse(str(fields["epoch"])))
            case "replicate" | "publish-snapshots" | "publish-parity" | "rebuild":
                self._on_replica_request(channel, message)
            case "withdraw-published":
                self.replica_service.withdraw(Identity.parse(str(fields["identity"])), _reader_name(channel, fields))
            case "borrow-memory":
                raise AgentError("this agent lends no memory; it is that of a job's node")
            case "read-frames" | "frames-read":
                self._on_shared_read(channel, message)
            case "drop-older-epochs":
                self._drop_older_epochs(Epoch.parse(str(fields["epoch"])))
            case "node-disconnected":
                self._on_source_lost(str(fields["name"]))
            case _:
                self._on_job_message(channel, message)

    def _on_job_message(self, channel: Channel, message: Message) -> None:
        """A message about a job with ranks on both nodes: from one of its nodes, or from its coordinator."""
        fields = message.fields
        epoch = Epoch.parse(str(fields["epoch"]))
        if required_sender(fields) is Sender.FOLLOWER:
            job = self._job_of(epoch)
            if job is None:
                raise AgentError(f"{epoch} is not coordinated here")
            self._on_follower_message(job, channel, message)
            return
        if message.kind == "node-failed":
            self.alarms.signal_reader.record_failure(time.monotonic())
            return
        followed_job = self._followed_job_of(epoch)
        assert followed_job is not None  # `_check_sender` has found it
        why = self.inventory_lease.refusal(channel.peer, epoch)
        if why and message.kind == "to-rank" and followed_job.decline_staging(fields, why):
            return
        match message.kind:
            case "acknowledge-event":
                self._acknowledge_notice(channel, fields, why)
            case "leave-ordered":
                self._notice_listeners.record_exit(str(fields["source"]), str(fields["key"]))
            case "notice-withdrawn":
                self._on_notice(Withdrawn(str(fields["source"])[:200], OPERATOR))
            case _:
                followed_job.on_coordinator_message(channel, message)

    def _acknowledge_notice(self, channel: Channel, fields: dict[str, Any], why_not: str) -> None:
        """Acknowledges a planned event of this machine: the job has left and its checkpoint is stored."""
        request_id = int(fields["id"])
        if why_not:
            raise AgentError(why_not)

        source, key = str(fields["source"]), str(fields["key"])
        self._notice_listeners.acknowledge_event(
            source, key, lambda error: answer_request(channel, request_id, {}, error)
        )

    # -- permissions and leases

    def _check_sender(self, name: str, fields: dict[str, Any]) -> None:
        """Errors: AgentError if agent `name` may not send that message; whatever a malformed message leads to."""
        match required_sender(fields):
            case Sender.START_PENDING if not any(peer.is_open for peer in self._unjoined_peers):
                raise AgentError("no rank of this node waits for a start")
            case Sender.SURVEYOR if not self.inventory_lease.has_lease(name):
                raise AgentError(f"no start of agent {name} has asked what lies here")
            case Sender.COORDINATOR_OR_SURVEYOR if not (
                self._is_coordinator(name) or self.inventory_lease.has_lease(name)
            ):
                raise AgentError(f"agent {name} coordinates nothing that this node has a part in")
            case Sender.COORDINATOR | Sender.EVICTING_COORDINATOR as who:
                epoch = epoch_of(fields)
                if not self._is_coordinator(name, epoch):
                    raise AgentError(f"this node has no part in {epoch}, or agent {name} does not coordinate it")
                if fields["t"] in EPOCH_KINDS:
                    self.inventory_lease.on_epoch_begun(name, epoch)
                if who is Sender.EVICTING_COORDINATOR:
                    self.inventory_lease.check(name, epoch)

    def _is_coordinator(self, name: str, epoch: Epoch | None = None) -> bool:
        """Whether agent `name` coordinates `epoch` (None: any epoch) with ranks on this node."""
        return any(each.coordinator.name == name and epoch in (each.epoch, None) for each in self.followed_jobs)

    def _send_inventory(self, channel: Channel, request_id: int) -> None:
        """Answers a survey with this node's inventory. With a lease it stays as listed until the outcome."""
        packed: bytes = msgpack.packb(self._inventory(whole=True).fields())
        channel.reply(request_id, {}, [packed])

    def _on_start_outcome(self, name: str, fields: dict[str, Any]) -> None:
        """Ends the lease of agent `name`: its start has begun an epoch, or came to nothing. Errors: AgentError for an
        epoch number that no start can have reached: it would leave no larger numbers for later starts."""
        if fields["epoch"] is None:
            self.inventory_lease.end_lease(name)
            return
        epoch, known = Epoch.parse(str(fields["epoch"])), self._newest_epoch()
        if epoch.number > known.number + EPOCH_GAP_MAX:
            raise AgentError(f"it is not believed that {epoch} has begun: the newest that is known here is {known}")
        if (
            self.inventory_lease.on_epoch_begun(name, epoch)
            and self.current_job is not None
            and self.current_job.epoch < epoch
        ):
            self.current_job.supersede(f"{epoch}, begun on other nodes")

    def _on_replica_request(self, channel: Channel, message: Message) -> None:
        """A peer asks for this node's work on replicas; see ReplicaService."""
        request_id = int(message.fields["id"])

        moving = ProgressReport(channel, request_id, self.replicas.progress, self._server.call_later)

        def done(blobs: list[bytes], error: str) -> None:
            moving.end()
            if message.kind == "replicate":
                error = error or self._late_refusal(channel.peer, message.fields)
            answer_request(channel, request_id, {}, error, blobs)

        try:
            fields = {**message.fields, "reader": _reader_name(channel, message.fields)}
            self.replica_service.serve_request(fields, message.blobs, done)
        except BaseException:
            moving.end()  # the request is refused
            raise

    def _late_refusal(self, name: str, fields: dict[str, Any]) -> str:
        """Why a replica that has just arrived does not count; "" if it does. One that arrived during a survey was not
        listed, so no peer may drop older replicas for it."""
        again = bool(fields.get("rereplication"))
        return "" if again else self.inventory_lease.refusal(name, epoch_of(fields))

    def _is_read_by_peers(self, identity: Identity) -> bool:
        committed = [each.pending_commit for each in self.followed_jobs] + [each for _, each, _ in self._pending_writes]
        return super()._is_read_by_peers(identity) or identity in committed

    def _require_arenas(self, identity: Identity, ranks: Sequence[int], hashed: bool = True) -> dict[int, Arena]:
        """The arenas of these ranks' snapshots. Errors: AgentError if this node does not hold one of them."""
        found = self._arenas_of(identity, hashed)
        if not set(ranks) <= found.keys():
            raise AgentError(f"not all of the ranks {list(ranks)[:8]} of {identity} are held here")
        return {rank: found[rank] for rank in ranks}

    def _write_commit_part(self, channel: Channel, message: Message) -> None:
        """Writes this node's part of a commit that another node makes. The snapshots are leased meanwhile."""
        fields = message.fields
        request_id, identity = int(fields["id"]), Identity.parse(str(fields["identity"]))
        options = options_from({"keep": {}, "limits": {"bandwidth": fields["bandwidth"]}, "codec": fields["codec"]})
        wanted = WriteRequest.decode(identity, message.blobs[0], options.codec, options.limits.bandwidth)
        arenas = self._require_arenas(identity, np.unique(wanted.ranks).tolist())

        moving = ProgressReport(channel, request_id, self._write_progress, self._server.call_later)
        under_way = channel.peer, identity, threading.Event()

        def written(done: Future[Written]) -> None:
            moving.end()
            self._pending_writes.remove(under_way)
            self.replicas.release(identity)
            if error := failure(done):
                channel.refuse(request_id, AgentError(error))
            else:
                packs: bytes = msgpack.packb(done.result().packs)
                channel.reply(request_id, {}, [done.result().places.tobytes(), packs])

        # Leased, since a newer checkpoint may be replicated meanwhile and evict this one.
        self.replicas.lease(identity)
        self._pending_writes.append(under_way)
        write = functools.partial(write_part, self._store, wanted, arenas, self._write_progress.advance, under_way[2])
        self._workers.run(Lane.COMMIT, write, written)

    def _on_follower_message(self, job: Job, channel: Channel, message: Message) -> None:
        """A message from a node with ranks of `job`, which is coordinated here."""
        fields = message.fields
        share = job.share_of(channel.peer)
        if message.kind == "locate-candidate":
            self._send_candidate_places(job, channel, fields)
        elif message.kind == "signals":
            self.alarms.on_peer_signals(job, channel.peer, fields)
        elif message.kind == "node-notices":
            for word, when in parse_relayed_notices(channel.peer, fields["notices"], job.notice_left_s()):
                job.on_notice(word, when, channel.peer)
        elif message.kind == "withdraw-notice":
            self._withdraw_operator_notice(str(fields["source"])[:200])
        elif message.kind == "arenas-lost":
            job.scheduler.record_lost_arenas(int(fields["slot"]))
        elif message.kind == "rank-steps":
            share.record_steps({int(rank): (int(step), int(polls)) for rank, step, polls in fields["steps"]})
        elif message.kind == "rank-disconnected":
            peer = share.connection(int(fields["rank"]), int(fields["connection_number"]))
            if peer is not None:
                peer.is_open = False
                (self.peer_died if fields["cause"] == "died" else self.peer_disconnected)(peer)
        else:
            peer = share.ensure_connection(int(fields["rank"]), int(fields["connection_number"]), int(fields["pid"]))
            self._deliver_rank_message(peer, Message(dict(fields["message"]), [], message.blobs))

    def _deliver_rank_message(self, peer: RemotePeer, message: Message) -> None:
        """Handles a remote rank's message as a local rank's. An error is answered to the rank or closes its connection,
        never the connection to its node."""
        if not deliver(self.message, peer, message, f"rank {peer.rank}"):
            peer.disconnect()

    def _on_remote_start(self, channel: Channel, fields: dict[str, Any]) -> None:
        """A start that another node coordinates: ends the start and the job under way here, and answers its survey."""
        launch, take_over, request_id = str(fields["launch"])[:200], bool(fields["take_over"]), int(fields["id"])
        self._refuse_superseded(launch, take_over)
        if self._start is not None:
            self._fail_start(self._start, Superseded(f"launch {launch!r} began meanwhile on another node"))
            self._end_restore()
            self._start = None
        if self.current_job is not None:
            self._supersede_current_job(self.current_job, launch)
        for each in self.followed_jobs:
            each.end_uncoordinated_restore()
        self._grant_inventory_lease(channel.peer)
        self._send_inventory(channel, request_id)

    def _send_declarations(self, channel: Channel, fields: dict[str, Any]) -> None:
        """Answers with the declarations and hashes of the snapshots that are held here, without their data."""
        request_id, world = int(fields["id"]), int(fields["world"])
        identity, ranks = Identity.parse(str(fields["identity"])), [int(rank) for rank in fields["ranks"]]
        sealed = bool(fields.get("sealed"))
        # A dead coordinator may not have asked for hashes yet; its successor appoints nothing meanwhile.
        arenas = self._require_arenas(identity, ranks, hashed=not self._is_coordinator(channel.peer, identity.epoch))

        def read(done: Future[bytes]) -> None:
            if error := failure(done):
                channel.refuse(request_id, AgentError(error))
            else:
                sizes = [[rank, arena.size_bytes] for rank, arena in arenas.items()]
                channel.reply(request_id, {"sizes": sizes}, [done.result()])

        self._workers.run(Lane.FRONT, lambda: encode_local_parts(identity, world, arenas, sealed), read)

    def _send_candidate_places(self, job: Job, channel: Channel, fields: dict[str, Any]) -> None:
        """Tells a node the manifest of the candidate, and where its frames are. Errors: AgentError."""
        identity = Identity.parse(str(fields["identity"]))
        start = self._start
        if job.restore is None or job.restore.identity != identity or start is None or start.chosen_candidate is None:
            raise AgentError(f"{identity} is not being restored now")
        records = [[ref.writer, ref.size] for ref in start.chosen_candidate.records]
        found = start.find_places(identity)
        where = found.fields() if found is not None else {}
        # Encoded once for all nodes.
        if identity not in start.location_blobs:
            from ckpt.format.record import encode_manifest

            places = [*found.blobs(), self._encode_holders(start, found)] if found is not None else []
            start.location_blobs = {identity: [encode_manifest(job.restore.manifest), *places]}
        channel.reply(int(fields["id"]), {"records": records, **where}, start.location_blobs[identity])

    def _on_shared_read(self, channel: Channel, message: Message) -> None:
        """A message of the shared read of the store: a node asks for frames read here, or brings frames it read."""
        epoch = Epoch.parse(str(message.fields["epoch"]))
        identity = Identity.parse(str(message.fields["identity"]))
        followed_job, job = self._followed_job_of(epoch), self._job_of(epoch)
        fan = followed_job.find_shared_read(identity, channel.peer) if followed_job is not None else None
        if job is not None:
            job.share_of(channel.peer)
            fan = shared_read_of(job.restore if job.restore is not None and job.restore.identity == identity else None)
        if message.kind == "frames-read":
            if fan is not None:
                fan.handle_frames_read(channel, message)
        # This node has not come so far yet; the other node asks again.
        elif fan is None:
            channel.reply(int(message.fields["id"]), {"ready": False})
        else:
            fan.handle_read_frames(channel, message)

    def peer_closed(self, channel: Channel) -> None:
        """A connection to another agent has ended: its ranks are gone, and no frames are awaited from it."""
        if self.memory_nodes.on_disconnect(channel.peer) and self.current_job is not None:
            self.current_job.on_holder_lost(channel.peer)
        if self.network is None or self.network.channel(channel.peer) is None:
            self.inventory_lease.on_holder_lost(channel.peer)
        self._on_source_lost(channel.peer)
        for followed_job in self.followed_jobs:
            if followed_job.coordinator.name == channel.peer:
                followed_job.on_coordinator_lost()
        for job in self._jobs():
            share = job.find_share(channel.peer)
            if share is not None:
                for peer in share.close():
                    self.peer_disconnected(peer)
                job.on_holder_lost(channel.peer)
        if self.current_job is not None:
            self._announce_absence(self.current_job, channel.peer)
        self._server.call_later(RECONNECT_S, lambda: self._reconnect_node(channel.peer))

    def _on_source_lost(self, name: str) -> None:
        """Ends the wait for frames from that node that are on other nodes, or can be fetched later."""
        self.replicas.handle_disconnect(name)
        for job in self._jobs():
            if job.restore is not None:
                job.restore.handle_disconnect(name)
        for each in self.followed_jobs:
            each.on_source_lost(name)

    def _announce_absence(self, job: Job, name: str) -> None:
        """Tells the other nodes that node `name` is gone: they may have no connection to it that would show this."""
        fields = {"t": "node-disconnected", "epoch": str(job.epoch), "name": name}
        for node in job.nodes[1:]:
            share = job.find_share(node.name)
            if self.network is not None and share is not None and share.peers:
                self.network.notify(node.name, fields)
        self.memory_nodes.broadcast_hint(fields)

    # -- a rank's connection, here or on another node

    def message(self, peer: AnyPeer, message: Message) -> None:
        """Handles a message of a trainer or a tool; see Agent."""
        raise NotImplementedError

    def peer_disconnected(self, peer: AnyPeer) -> None:
        for job in self._jobs():
            job.peer_disconnected(peer)
        for followed_job in self.followed_jobs:
            followed_job.peer_disconnected(peer)
        self._give_up_start(peer)

    def peer_died(self, peer: AnyPeer) -> None:
        for job in self._jobs():
            job.peer_died(peer)
        for followed_job in self.followed_jobs:
            followed_job.peer_died(peer)
        self._give_up_start(peer)


def _reader_name(channel: Channel, fields: dict[str, Any]) -> str:
    """The reader's name with its agent's before it, so that an agent ends only its own readings."""
    return f"{channel.peer}/{fields.get('reader', '')}"
