"""A follower job: a job that another node's agent coordinates, as this node has it. It has the ranks here and their
memory.

It forwards the ranks' messages to the coordinator, and the coordinator's answers to the ranks. It handles here what
cannot leave this host: descriptors, arenas, the control page, and the death of a process. If the connection to the
coordinator breaks, the ranks' connections are closed too. The ranks then join again, as after an agent's death, so
there is one way to recover. Everything runs on the agent's main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.agent.commit.job_options import options_from, policy_from
from ckpt.agent.job.coordinator_link import RankRelay, ShareServer
from ckpt.agent.job.follower_restore import FollowerRestore
from ckpt.agent.job.job_context import Services
from ckpt.agent.net.channel import Channel
from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.preemption.notice_relay import ExitTiming, RelayedNotice
from ckpt.agent.runtime.event_loop import Peer
from ckpt.agent.runtime.memory_plan import SLOTS, slots_for
from ckpt.agent.snapshots.inventory import parse_claim
from ckpt.agent.snapshots.local_share import LocalShare
from ckpt.agent.snapshots.remote_share import AnyPeer
from ckpt.errors import AgentError, NoCoordinator
from ckpt.ipc.arena import Arena
from ckpt.ipc.control_page import WordKind
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NodeAt
from ckpt.preemption.notice import NoticeChange
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.store.lineage import Claim


class FollowerJob:
    """One epoch. `coordinator`: the coordinator's node. `local_share`: the local ranks' memory. `restore`: what they
    restore. `terms`: the coordinator's claim and options, once it has begun. `is_over`: this object may be
    dropped."""

    def __init__(
        self,
        services: Services,
        network: PeerNetwork,
        epoch: Epoch,
        nodes: tuple[NodeAt, ...],
        arenas_of: Callable[[Identity], Mapping[int, Arena]],
    ) -> None:
        """`nodes`: the job's nodes. `arenas_of`: this node's arenas with snapshots of a checkpoint, by rank."""
        self.epoch, self.nodes, self.coordinator = epoch, nodes, nodes[0]
        self.is_over = False
        self.terms: CommitTerms | None = None
        world, workers = sum(len(node.ranks) for node in nodes), services.workers
        self.local_share = LocalShare(world, workers, lambda: services.memory_use(epoch))
        self.relay = RankRelay(self.local_share, self.tell_coordinator, self._send_notices)
        self._network, self._call_later = network, services.server.call_later
        self._ranks = next((frozenset(node.ranks) for node in nodes if node.name == network.agent_name), frozenset())
        self._limits: tuple[int, int | None] = SLOTS, None  # the slots that the policy needs, the user's memory limit
        room = lambda slot_bytes: self.local_share.restore_budget_bytes(slot_bytes, *self._limits)  # noqa: E731
        emit = self.relay.connections.send_event
        self.restore = FollowerRestore(services, network, epoch, nodes, arenas_of, room, emit)
        self._standing_notices = RelayedNotice()
        for notice, when in services.notice_listeners.list_notices():
            self._standing_notices.record_notice(notice, when)
        self._handlers: dict[str, Callable[[Channel, Message], None]] = {
            "to-rank": self.relay.to_rank,
            "job-state": self._on_job_state,
            **ShareServer(self.local_share, self._ranks, self.tell_coordinator, self._call_later).handlers,
        }
        self.relay.report_steps(self._call_later)

    # -- what the node asks

    @property
    def claim(self) -> Claim | None:
        return self.terms.claim if self.terms is not None else None

    @property
    def is_needed(self) -> bool:
        """True if a rank here is connected, or the coordinator is."""
        return not self.is_over and (self._is_coordinator_connected or self.has_ranks)

    @property
    def has_ranks(self) -> bool:
        """True if some rank of the job is connected here."""
        return self.relay.has_ranks

    @property
    def is_idle(self) -> bool:
        return not self.has_ranks

    @property
    def is_leaving(self) -> bool:
        """True if the ranks were told to leave, or a hold is appointed."""
        page = self.local_share.control_page
        return bool(page.leave_attempt()) or any(word.kind is WordKind.HOLD for word in page.appointments())

    @property
    def is_training(self) -> bool:
        """True if a rank here has entered a step."""
        return any(map(self.local_share.control_page.entered_step, self._ranks))

    @property
    def lowest_rank(self) -> int:
        """The lowest of this node's ranks. Its environment sets the sources of notices here."""
        return min(self._ranks)

    def rank_of(self, peer: AnyPeer) -> int | None:
        return self.relay.connections.rank_of(peer)

    def status(self) -> dict[str, Any]:
        ranks, page = sorted(self.relay.connections.by_rank), self.local_share.control_page
        return {
            "epoch": str(self.epoch),
            "launch": self.claim.launch if self.claim is not None else None,
            "coordinator": self.coordinator.name,
            "connected": self._is_coordinator_connected,
            "ranks": ranks,
            "steps": {str(rank): page.entered_step(rank) for rank in ranks},
            "arena_bytes": self.local_share.arena_bytes,
        }

    def on_notice(self, word: NoticeChange, when: ExitTiming = ExitTiming.IN_TIME) -> None:
        """Passes a notice for this node, or its withdrawal, to the coordinator, which decides what follows."""
        self._standing_notices.record_notice(word, when)
        self._send_notices()

    def _send_notices(self) -> None:
        self.tell_coordinator({"t": "node-report", "notices": self._standing_notices.notice_fields()})

    def drop(self) -> None:
        """Frees the memory, and stops watching the ranks' processes."""
        self.is_over = True
        self.restore.close()
        self.local_share.drop()
        self.relay.close()

    # -- what the ranks say

    def join(self, peer: Peer, message: Message) -> None:
        """A rank joins, or joins again. Errors: AgentError; NoCoordinator if the coordinator is not connected;
        UsageError."""
        fields = message.fields
        rank = int(fields["rank"])
        if rank not in self._ranks:
            raise AgentError(f"rank {rank} is not one of this node's in {self.epoch}")
        if not self._is_coordinator_connected:
            raise NoCoordinator(
                f"the agent of rank 0's node, which coordinates {self.epoch}, is not connected to that of this node now"
            )
        peer.watch_death()
        options = options_from(fields["options"])
        self._limits = slots_for(policy_from(fields["options"])), options.limits.memory
        if rank == self.lowest_rank:
            self._network.set_rate_limit(options.limits.peer_bandwidth)
        if fields["resume"] and self.terms is None:  # a former agent received the terms
            self.terms = CommitTerms(parse_claim(self.epoch, fields), options.codec, options.limits.bandwidth)
        self.relay.join(rank, peer, message)

    def message(self, rank: int, peer: Peer, message: Message) -> None:
        if message.kind == "fetch":
            self.restore.fetch(peer, message)
        elif message.kind == "frames-received":
            if self.restore.session is not None:
                self.restore.session.handle_received(peer, message.fields)
        else:
            self.relay.forward(rank, message)

    def peer_disconnected(self, peer: AnyPeer, how: str = "ended") -> None:
        """A rank's connection has ended, or its process has "died"."""
        rank = self.rank_of(peer)
        if rank is not None:
            if self.restore.session is not None:
                self.restore.session.drop_request(peer)
            self.relay.report_gone(rank, how)

    def peer_died(self, peer: AnyPeer) -> None:
        self.peer_disconnected(peer, "died")

    # -- what the coordinator says

    @property
    def _is_coordinator_connected(self) -> bool:
        return self._network.channel(self.coordinator.name) is not None

    def tell_coordinator(self, fields: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Sends a message to the coordinator; it is lost if the coordinator is not connected."""
        self._network.notify(self.coordinator.name, {**fields, "epoch": str(self.epoch)}, blobs)

    def on_coordinator_lost(self) -> None:
        """The coordinator's connection is gone: withdraws all appointments and disconnects the ranks, so open attempts
        are missed."""
        self.local_share.clear_appointments()
        self.relay.disconnect_all()

    def on_coordinator_message(self, channel: Channel, message: Message) -> None:
        """Handles a message of the coordinator. Errors: AgentError, or any exception that a malformed message causes;
        the caller reports both to the coordinator."""
        self._handlers[message.kind](channel, message)

    def _on_job_state(self, channel: Channel, message: Message) -> None:
        """The coordinator has claimed the epoch, and says how its checkpoints are committed."""
        terms = CommitTerms.decode(message.blobs[0])
        if terms.claim.epoch != self.epoch:
            raise AgentError(f"the claim of {terms.claim.epoch} was told for {self.epoch}")
        self.terms = terms
        self.restore.end()  # all ranks have restored

    def end(self) -> None:
        """The coordinator says that the epoch is over."""
        self.is_over = True
        self.relay.disconnect_all()  # no agent will answer their requests
