"""The handlers of messages of processes on this host: of trainers that enter a job, train and leave, and of tools
(`ckpt watch`, `ckpt prune`, `ckpt preempt`)."""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import Any

import msgpack

from ckpt.agent.commit.job_options import keep_from
from ckpt.agent.commit.store_client import PrunePass
from ckpt.agent.job.follower_job import FollowerJob
from ckpt.agent.job.job import Job
from ckpt.agent.job.job_context import Services
from ckpt.agent.job.memory_node_client import parse_addresses
from ckpt.agent.job.rank_messages import RANK_KINDS
from ckpt.agent.net.peer_network import link_bytes_s
from ckpt.agent.node.coordinator import Coordinator
from ckpt.agent.node.dispatch import Route, Sender
from ckpt.agent.node.lifetime import Lifetime
from ckpt.agent.node.node_context import NodeContext
from ckpt.agent.node.node_memory import NodeMemory
from ckpt.agent.node.node_notices import NodeNotices
from ckpt.agent.node.orphan_committer import OrphanCommitter
from ckpt.agent.node.startup import Startup, nodes_of
from ckpt.agent.runtime.event_loop import Peer
from ckpt.agent.runtime.workers import Lane, failure
from ckpt.agent.snapshots.inventory import parse_claim
from ckpt.agent.snapshots.remote_share import AnyPeer
from ckpt.errors import AgentError, RunInUse, Superseded
from ckpt.ipc.client import VERSION
from ckpt.ipc.messages import Message
from ckpt.ipc.notice_sources import Sources
from ckpt.storage.names import redact_url
from ckpt.types import Epoch, Identity


class ProcessHandlers:
    """Main thread only."""

    def __init__(
        self,
        context: NodeContext,
        memory: NodeMemory,
        notices: NodeNotices,
        coordinator: Coordinator,
        startup: Startup,
        orphans: OrphanCommitter,
        lifetime: Lifetime,
        services: Services,
    ) -> None:
        self._context, self._jobs, self._memory, self._notices = context, context.jobs, memory, notices
        self._coordinator, self._startup, self._orphans = coordinator, startup, orphans
        self._lifetime, self._services = lifetime, services
        self._unjoined_peers: list[Peer] = []  # ranks that told this agent to listen, and have joined no job yet

    def routes(self) -> list[Route]:
        return [
            Route("hello", Sender.NEWCOMER, self._on_hello),
            Route("status", Sender.PROCESS, self._context.send_status),
            Route("preempt", Sender.PROCESS, self._notices.preempt),
            Route("prune", Sender.PROCESS, self._prune),
            Route("is-stored", Sender.PROCESS, self._answer_stored),
            Route("listen", Sender.PROCESS, self._listen),
            Route("begin", Sender.PROCESS, self._on_begin),
            Route("join", Sender.TRAINER, self._join),
            Route("restored", Sender.PROCESS, self._startup.on_restored),
            *(Route(kind, Sender.RANK, self._on_rank_message) for kind in RANK_KINDS),
        ]

    @property
    def awaits_start(self) -> bool:
        """True if a rank of this node waits for a start."""
        return any(peer.is_open for peer in self._unjoined_peers)

    def _on_hello(self, peer: Peer, message: Message) -> None:
        version, role, network = int(message.fields["version"]), str(message.fields["role"]), self._context.network
        if version != VERSION:
            self._lifetime.refuse_version(version, role)
        peer.role = role
        body = {"version": VERSION, "incarnation": self._context.incarnation, "pid": os.getpid(), "secret": None}
        if role == "trainer":
            self._lifetime.has_served_trainer = True
            if network is not None and network.secret:
                body["secret"] = [str(self._memory.newest_epoch()), network.secret]
        peer.reply(int(message.fields["id"]), body)

    # -- ranks

    def _on_begin(self, peer: Peer, message: Message) -> None:
        self._orphans.end_attempt()
        self._startup.begin(peer, message)

    def _on_rank_message(self, peer: AnyPeer, message: Message) -> None:
        followed = self._jobs.followed_rank_of(peer)
        if followed is not None:
            assert isinstance(peer, Peer)  # a job is followed by its local ranks only
            followed[0].message(followed[1], peer, message)
            return
        job, rank = self._jobs.member_of(peer)
        job.message(rank, peer, message)

    def _listen(self, peer: Peer, message: Message) -> None:
        """A rank of a job of several nodes has this agent listen for the other nodes."""
        fields = message.fields
        network = self._context.open_network(str(fields["name"] or self._context.agent_name)[:100])
        addresses = network.listen(bytes(fields["secret"]), str(fields["address"]))
        self._unjoined_peers = [each for each in self._unjoined_peers if each.is_open and each is not peer] + [peer]
        told = {"name": network.agent_name, "addresses": [str(each) for each in addresses]}
        peer.reply(int(fields["id"]), {**told, "link_bytes_s": link_bytes_s(addresses[0])})

    def _join(self, peer: AnyPeer, message: Message) -> None:
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
        assert network is not None  # `_join` has checked that
        job = FollowerJob(self._services, network, epoch, nodes_of(message), self._memory.arenas_of)
        self._jobs.followed.append(job)
        return job

    # -- the store

    def _answer_stored(self, peer: Peer, message: Message) -> None:
        """Answers whether a checkpoint is in the store, whoever put it there. The rank need not have joined."""
        request_id, wanted = int(message.fields["id"]), Identity.parse(str(message.fields["identity"]))
        store = self._context.store

        def is_stored() -> bool:
            return any(ref.identity == wanted for ref in store.open_run(impatient=True).view().commits)

        def looked(done: Future[bool]) -> None:
            peer.reply(request_id, {"stored": not failure(done) and done.result()})

        self._context.workers.run(Lane.FRONT, is_stored, looked)

    def _prune(self, peer: Peer, message: Message) -> None:
        """Deletes old checkpoints, or tells which would be deleted. Errors: RunInUse; UsageError."""
        fields, job, store = message.fields, self._jobs.current, self._context.store
        request_id, rule = int(fields["id"]), keep_from(fields.get("keep") or {}, "keep")
        also = [Identity.parse(str(text)) for text in fields.get("also") or []]
        epoch = job.epoch if job is not None and store.is_claimed(job.epoch) else None
        what = PrunePass.ALL if fields["yes"] else PrunePass.REPORT
        if what is PrunePass.ALL:
            self._refuse_if_follower(job)

        def pruned(done: Future[dict[str, Any]]) -> None:
            error = done.exception()
            if error is not None:
                peer.refuse(request_id, error)
            else:
                # A blob, since the result grows with the run.
                peer.reply(request_id, {}, blobs=[msgpack.packb(done.result())])

        # A prune that only looks does not wait for a commit.
        lane = Lane.FRONT if what is PrunePass.REPORT else Lane.COMMIT
        self._context.workers.run(lane, lambda: store.prune(epoch, rule, also, what), pruned)

    def _refuse_if_follower(self, job: Job | None) -> None:
        """Errors: RunInUse if another node coordinates the newest job here: its agent decides what is deleted."""
        needed = [each for each in self._jobs.followed if each.is_needed]
        led = max(needed, key=lambda each: each.epoch, default=None)
        if led is not None and (job is None or led.epoch > job.epoch):
            raise RunInUse(
                f"{redact_url(self._context.url)} is in use: its epoch {led.epoch} is coordinated by agent "
                f"{led.coordinator.name}, which alone decides what goes. Run ckpt prune on that node"
            )
