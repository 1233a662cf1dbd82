"""How ranks enter their jobs on this node: they have the agent listen, join, bring their arenas after an agent's death,
and fetch what they restore."""

from __future__ import annotations

from ckpt.agent.job.follower_job import FollowerJob
from ckpt.agent.job.job import Job
from ckpt.agent.job.job_context import Services
from ckpt.agent.job.memory_node_client import parse_addresses
from ckpt.agent.node.coordinator import Coordinator
from ckpt.agent.node.node_context import NodeContext
from ckpt.agent.node.node_memory import NodeMemory
from ckpt.agent.node.node_notices import NodeNotices
from ckpt.agent.node.startup import Startup, nodes_of
from ckpt.agent.restore.restore_session import decode_request
from ckpt.agent.runtime.event_loop import Peer
from ckpt.agent.snapshots.inventory import parse_claim
from ckpt.agent.snapshots.remote_share import AnyPeer
from ckpt.errors import AgentError, Superseded
from ckpt.ipc.messages import Message
from ckpt.ipc.notice_sources import Sources
from ckpt.storage.names import redact_url
from ckpt.types import Epoch, Identity


class RankEntry:
    """Main thread only."""

    def __init__(
        self,
        context: NodeContext,
        memory: NodeMemory,
        notices: NodeNotices,
        coordinator: Coordinator,
        startup: Startup,
        services: Services,
    ) -> None:
        self._context, self._jobs, self._memory, self._notices = context, context.jobs, memory, notices
        self._coordinator, self._startup, self._services = coordinator, startup, services
        self._unjoined_peers: list[Peer] = []  # ranks that told this agent to listen, and have joined no job yet

    @property
    def awaits_start(self) -> bool:
        """True if a rank of this node waits for a start."""
        return any(peer.is_open for peer in self._unjoined_peers)

    def listen(self, peer: Peer, message: Message) -> None:
        """A rank of a job of several nodes has this agent listen for the other nodes."""
        from ckpt.agent.net.peer_network import link_bytes_s

        fields = message.fields
        network = self._context.open_network(str(fields["name"] or self._context.agent_name)[:100])
        addresses = network.listen(bytes(fields["secret"]), str(fields["address"]))
        self._unjoined_peers = [each for each in self._unjoined_peers if each.is_open and each is not peer] + [peer]
        told = {"name": network.agent_name, "addresses": [str(each) for each in addresses]}
        peer.reply(int(fields["id"]), {**told, "link_bytes_s": link_bytes_s(addresses[0])})

    def join(self, peer: AnyPeer, message: Message) -> None:
        """A rank joins its job, which is coordinated here or on another node. Errors: AgentError if no start of its
        epoch is under way; Superseded; UsageError."""
        fields, network = message.fields, self._context.network
        epoch, coordinator = Epoch.parse(str(fields["epoch"])), fields.get("coordinator")
        if isinstance(peer, Peer) and network is not None and coordinator and coordinator != network.agent_name:
            self._join_followed_job(epoch, peer, message)
        else:
            self._join_coordinated_job(epoch, peer, message)
        self._unjoined_peers = [each for each in self._unjoined_peers if each is not peer]
        if isinstance(peer, Peer):
            self._notices.hand_to_rank(peer)

    def _join_coordinated_job(self, epoch: Epoch, peer: AnyPeer, message: Message) -> None:
        fields = message.fields
        is_first = isinstance(peer, Peer) and self._jobs.current is None
        handed = self._notices.take_handed(message) if is_first else []
        try:
            job = self._jobs.job_of(epoch)
            if job is None:
                if not fields["resume"]:
                    raise AgentError(f"no start of {epoch} is under way here")
                job = self._resume_job(peer, epoch, message)
            del message.blobs[2:]  # the node list
            job.join(peer, message)
        finally:
            self._notices.repeat(handed if self._jobs.current is not None else [])
        # Without a claim the job is only about to begin; `Startup` then asks the memory-only nodes.
        if int(fields["rank"]) == 0 and job.claim is not None:
            self._coordinator.borrow_memory(job, parse_addresses(fields.get("peers")))

    def _resume_job(self, peer: AnyPeer, epoch: Epoch, message: Message) -> Job:
        """Makes the job of a trainer whose agent died; the trainer brings its arenas. Errors: Superseded."""
        if self._jobs.start is not None or self._jobs.current is not None:
            url = redact_url(self._context.url)
            raise Superseded(f"a newer start owns {url}; {epoch} was superseded")
        claim = parse_claim(epoch, message.fields)
        # If this trainer dies before it has joined, the job ends with it.
        peer.watch_death()
        nodes = nodes_of(message)
        job = self._startup.make_job(epoch, int(message.fields["world"]), claim.launch, peer, nodes)
        for node in nodes[1:]:
            self._coordinator.reconnect_node(node.name)
        self._context.store.claims.own_epochs.add(epoch)
        job.take_over(claim)
        return job

    def _join_followed_job(self, epoch: Epoch, peer: Peer, message: Message) -> None:
        fields = message.fields
        job = self._jobs.followed_job_of(epoch)
        if job is None:
            handed = self._notices.take_handed(message)
            job = self._follow(epoch, message)
            # Before the join: if that is refused, the rank comes again, and hands over nothing then.
            self._notices.repeat(handed)
        job.join(peer, message)
        if int(fields["rank"]) == job.lowest_rank:
            self._notices.listeners.listen_to(Sources.parse(fields.get("notice_sources")))

    def _follow(self, epoch: Epoch, message: Message) -> FollowerJob:
        """Makes the followed job of that epoch. Errors: Superseded; UsageError."""
        newer = [each.epoch for each in self._jobs.followed if each.epoch > epoch]
        if newer:
            raise Superseded(f"{epoch} was superseded by {newer[0]}")
        network = self._context.network
        self._context.adopt_environment(message.fields)
        assert network is not None  # `join` has checked that
        job = FollowerJob(self._services, network, epoch, nodes_of(message), self._memory.arenas_of)
        self._jobs.followed.append(job)
        return job

    def fetch(self, peer: AnyPeer, message: Message) -> None:
        """A rank of this node fetches frames. Errors: AgentError."""
        if not isinstance(peer, Peer):
            raise AgentError("a rank of another node fetches from the agent of that node")
        followed = self._jobs.followed_rank_of(peer)
        if followed is not None:
            followed[0].message(followed[1], peer, message)
            return
        job, _ = self._jobs.member_of(peer)
        identity = Identity.parse(str(message.fields["identity"]))
        if job.restore is None or job.restore.identity != identity:
            raise AgentError(f"{identity} is not being restored now")
        frames, whole = decode_request(message)
        peer.reply(int(message.fields["id"]), {})
        job.restore.request(peer, frames, whole)
