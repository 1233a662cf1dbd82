"""The handlers of messages from agents of other nodes, on a node with ranks: surveys, and jobs of several nodes.
snapshot_handlers.py has what memory-only nodes handle too. Nothing here happens in a job of one node."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from ckpt.agent.adaptive.alarms import Alarms
from ckpt.agent.job.follower_job import FollowerJob
from ckpt.agent.job.job import Job
from ckpt.agent.net.progress import Answer, Progress, serve_request
from ckpt.agent.node.dispatch import Route, Sender, epoch_of
from ckpt.agent.node.inventory_lease import EPOCH_GAP_MAX
from ckpt.agent.node.node_context import NodeContext
from ckpt.agent.node.node_memory import NodeMemory
from ckpt.agent.node.node_notices import NodeNotices
from ckpt.agent.node.orphan_committer import OrphanCommitter
from ckpt.agent.node.snapshot_handlers import SnapshotHandlers
from ckpt.agent.node.startup import Startup
from ckpt.agent.preemption.notice_relay import OPERATOR, parse_relayed_notices
from ckpt.agent.restore.shared_read import shared_read_of
from ckpt.agent.runtime.connections import deliver
from ckpt.agent.snapshots.remote_share import AnyPeer, RemoteShare
from ckpt.errors import AgentError
from ckpt.ipc.messages import Message
from ckpt.preemption.notice import Withdrawn
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel


class RankHandler(Protocol):
    """Handles the messages and the end of a rank's connection, here and on other nodes."""

    def message(self, peer: AnyPeer, message: Message) -> None: ...

    def peer_disconnected(self, peer: AnyPeer) -> None: ...

    def peer_died(self, peer: AnyPeer) -> None: ...


class PeerHandlers:
    """Main thread only."""

    def __init__(
        self,
        context: NodeContext,
        memory: NodeMemory,
        notices: NodeNotices,
        startup: Startup,
        orphans: OrphanCommitter,
        snapshots: SnapshotHandlers,
        alarms: Alarms,
        ranks: RankHandler,
    ) -> None:
        self._context, self._jobs, self._memory, self._notices = context, context.jobs, memory, notices
        self._startup, self._orphans, self._snapshots = startup, orphans, snapshots
        self._alarms, self._ranks = alarms, ranks

    def routes(self) -> list[Route]:
        coordinator, evicting = Sender.COORDINATOR, Sender.EVICTING_COORDINATOR
        return [
            *self._snapshots.routes(),
            Route("survey", Sender.ANYONE, self._on_survey),
            Route("start-outcome", Sender.SURVEYOR, self._on_start_outcome),
            Route("rebuild", Sender.COORDINATOR_OR_SURVEYOR, self._snapshots.serve_request),
            Route("read-frames", Sender.OWNER, self._on_shared_read),
            Route("frames-read", Sender.OWNER, self._on_shared_read),
            Route("node-lost", coordinator, self._on_node_lost),
            Route("notice-answered", coordinator, self._on_notice_answered),
            Route("withdraw-notice", Sender.JOB_NODE, self._withdraw_notice),
            Route("to-rank", coordinator, self._on_message_to_rank),
            Route("job-state", coordinator, self._on_coordinator_message),
            Route("plan-memory", coordinator, self._on_coordinator_message),
            Route("hash-snapshots", coordinator, self._on_coordinator_message),
            Route("control-word", evicting, self._on_coordinator_message),
            Route("offer-slot", evicting, self._on_coordinator_message),
            Route("make-arenas", evicting, self._on_coordinator_message),
            Route("from-rank", Sender.FOLLOWER, self._on_rank_message),
            Route("node-report", Sender.FOLLOWER, self._on_node_report),
            Route("locate-candidate", Sender.FOLLOWER, self._locate_candidate),
        ]

    # -- starts

    def _on_survey(self, channel: Channel, message: Message) -> None:
        """Answers with this node's inventory. For a start with ranks here, ends the start and the job under way."""
        fields = message.fields
        if "launch" in fields:
            launch, take_over = str(fields["launch"])[:200], bool(fields["take_over"])
            self._startup.check_launch(launch, take_over)
            self._startup.make_way(launch, f"launch {launch!r} began meanwhile on another node")
            for each in self._jobs.followed:
                each.restore.end_uncoordinated()
        if fields.get("lease", True):
            self._orphans.grant_lease(channel.peer, bool(fields.get("for_orphans")))
        self._snapshots.send_inventory(channel, message)

    def _on_start_outcome(self, channel: Channel, message: Message) -> None:
        """Ends the lease of that agent: its start has begun an epoch, or came to nothing. Errors: AgentError for an
        epoch number that no start can have reached: it would leave no larger numbers for later starts."""
        name, fields, lease = channel.peer, message.fields, self._memory.inventory_lease
        if fields["epoch"] is None:
            lease.end_lease(name)
        else:
            epoch, known = Epoch.parse(str(fields["epoch"])), self._memory.newest_epoch()
            if epoch.number > known.number + EPOCH_GAP_MAX:
                raise AgentError(f"it is not believed that {epoch} has begun: the newest that is known here is {known}")
            job = self._jobs.current
            if lease.on_epoch_begun(name, epoch) and job is not None and job.epoch < epoch:
                job.scheduler.supersede(f"{epoch}, begun on other nodes")
        if fields.get("settled") is not None:
            settled, turns = Epoch.parse(str(fields["settled"])), self._orphans.turns
            turns.is_settled = turns.is_settled or all(each.epoch <= settled for each in self._jobs.followed)

    def _on_shared_read(self, channel: Channel, message: Message) -> None:
        """A message of the shared read of the store: a node asks for frames read here, or brings frames it read."""
        epoch = Epoch.parse(str(message.fields["epoch"]))
        identity = Identity.parse(str(message.fields["identity"]))
        followed_job, job = self._jobs.followed_job_of(epoch), self._jobs.job_of(epoch)
        fan = followed_job.restore.shared_read(identity, channel.peer) if followed_job is not None else None
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

    # -- the coordinator of a job with ranks here

    def _on_message_to_rank(self, channel: Channel, message: Message) -> None:
        why = self._memory.inventory_lease.refusal(channel.peer, epoch_of(message.fields))
        job = self._require_followed(message)
        if not (why and job.relay.decline_staging(message.fields, why)):
            job.on_coordinator_message(channel, message)

    def _on_coordinator_message(self, channel: Channel, message: Message) -> None:
        self._require_followed(message).on_coordinator_message(channel, message)

    def _require_followed(self, message: Message) -> FollowerJob:
        job = self._jobs.followed_job_of(epoch_of(message.fields))
        assert job is not None  # the sender is its coordinator, see Permissions
        return job

    def _on_node_lost(self, channel: Channel, message: Message) -> None:
        """A node is disconnected from the coordinator, or is this one and taken to have failed."""
        name, network = str(message.fields["name"]), self._context.network
        if network is not None and name == network.agent_name:
            self._alarms.signal_reader.record_failure(time.monotonic())
        else:
            self.on_source_lost(name)

    def _on_notice_answered(self, channel: Channel, message: Message) -> None:
        """The ranks were told to leave by a notice of this machine. A request: they have left, and their checkpoint is
        stored, so that the planned event may begin."""
        if "id" in message.fields:
            serve_request(self._acknowledge_event, Progress(), self._context.server.call_later, channel, message)
        else:
            self._notices.listeners.record_exit(str(message.fields["source"]), str(message.fields["key"]))

    async def _acknowledge_event(self, channel: Channel, message: Message) -> Answer:
        fields = message.fields
        self._memory.inventory_lease.check(channel.peer, epoch_of(fields))
        await self._notices.listeners.acknowledge_event(str(fields["source"]), str(fields["key"]))
        return {}, ()

    def _withdraw_notice(self, channel: Channel, message: Message) -> None:
        """An operator takes a notice back: a node tells the coordinator, and the coordinator each node."""
        source = str(message.fields["source"])[:200]
        if self._jobs.job_of(epoch_of(message.fields)) is not None:
            self._notices.withdraw_operator_notice(source)
        else:
            self._notices.on_notice(Withdrawn(source, OPERATOR))

    # -- lost connections

    def on_source_lost(self, name: str) -> None:
        """Ends the wait for frames from that node that are on other nodes, or can be fetched later."""
        self._memory.replicas.handle_disconnect(name)
        for job in self._jobs.coordinated():
            if job.restore is not None:
                job.restore.handle_disconnect(name)
        for each in self._jobs.followed:
            if each.restore.session is not None:
                each.restore.session.handle_disconnect(name)

    # -- the other nodes of a job that is coordinated here

    def _job_of(self, channel: Channel, fields: dict[str, Any]) -> tuple[Job, RemoteShare]:
        job = self._jobs.job_of(epoch_of(fields))
        assert job is not None  # the sender is one of its nodes, see Permissions
        return job, job.share_of(channel.peer)

    def _on_rank_message(self, channel: Channel, message: Message) -> None:
        """Handles a remote rank's message, or the end of its connection, as a local rank's. An error is answered to the
        rank or closes its connection, never the connection to its node."""
        fields = message.fields
        rank, number, body = int(fields["rank"]), int(fields["connection_number"]), fields["message"]
        _, share = self._job_of(channel, fields)
        if body is not None:
            peer = share.ensure_connection(rank, number, int(fields["pid"]))
            if not deliver(self._ranks.message, peer, Message(dict(body), [], message.blobs), f"rank {rank}"):
                peer.disconnect()
        elif (gone := share.connection(rank, number)) is not None:
            gone.is_open = False
            died = fields["cause"] == "died"
            (self._ranks.peer_died if died else self._ranks.peer_disconnected)(gone)

    def _on_node_report(self, channel: Channel, message: Message) -> None:
        """What a node tells of itself: where its ranks are, its notices, its alarms, and a slot that it lacks."""
        fields = message.fields
        job, share = self._job_of(channel, fields)
        if "steps" in fields:
            share.record_steps({int(rank): (int(step), int(polls)) for rank, step, polls in fields["steps"]})
        if "lost_slot" in fields:
            job.scheduler.arenas.record_lost_arenas(int(fields["lost_slot"]))
        if "sources" in fields:
            self._alarms.on_peer_signals(job, channel.peer, fields)
        if "notices" in fields:
            for word, when in parse_relayed_notices(channel.peer, fields["notices"], job.notices.left_s()):
                job.notices.handle(word, when, channel.peer)

    def _locate_candidate(self, channel: Channel, message: Message) -> None:
        self._startup.candidates.send_places(self._job_of(channel, message.fields)[0], channel, message)
