"""The agent of a memory-only node: it keeps replicas for the jobs of one run, serves them, and commits orphaned ones.

It has no trainers, and serves until a signal asks it to end. `MemoryLease` decides to whom it lends. If the job's
coordinator is lost, it commits as a node of that job does (orphan_committer.py). Coordinators connect to it, never the
other way round. Main thread only.
"""

from __future__ import annotations

import logging
import math
import os
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.agent.commit.commit_turns import CommitTurns
from ckpt.agent.net.peer_network import PeerNetwork, link_bytes_s
from ckpt.agent.node.dispatch import Dispatch, Permissions, Route, Sender
from ckpt.agent.node.inventory_lease import MemoryLease
from ckpt.agent.node.lifetime import describe_versions
from ckpt.agent.node.node_context import MakeNetwork, NodeContext
from ckpt.agent.node.node_memory import MemoryRelief, NodeMemory
from ckpt.agent.node.orphan_committer import OrphanCommitter, UncoordinatedJob
from ckpt.agent.node.snapshot_handlers import SnapshotHandlers
from ckpt.agent.runtime.event_loop import EventLoop, Peer
from ckpt.agent.runtime.workers import Lane, failure
from ckpt.agent.snapshots.remote_share import AnyPeer
from ckpt.errors import AgentError
from ckpt.ipc.addresses import Address
from ckpt.ipc.client import VERSION
from ckpt.ipc.messages import Message
from ckpt.settings import Settings
from ckpt.storage.names import redact_url

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel
    from ckpt.store.run import RunView

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class MemoryNodeOptions:
    """What a memory-only node is started with. `listen`: the address to listen on. `memory_bytes`: the most memory that
    replicas may take. `domains`: the failure domains of this node, widest first. `commit_after_s`: this node commits
    once no coordinator was connected for so long."""

    secret: bytes
    listen: str
    memory_bytes: int
    domains: tuple[str, ...] = ()
    commit_after_s: float = 30.0


class MemoryNode:
    """The agent of a memory-only node. `addresses`: where it listens."""

    def __init__(
        self,
        url: str,
        settings: Settings,
        server: EventLoop,
        options: MemoryNodeOptions,
        make_network: MakeNetwork = PeerNetwork,
    ) -> None:
        """Errors: AgentError if it cannot listen on that address; UsageError."""
        self.context = context = NodeContext(url, settings, server, self.status, self, make_network)
        self.lease = MemoryLease(options.memory_bytes)
        self.memory = NodeMemory(context, self.lease)
        turns = CommitTurns(math.inf, options.commit_after_s)
        self.orphans = OrphanCommitter(context, self.memory, turns, self._find_uncoordinated_job)
        permissions = Permissions(
            context.jobs, self.memory.inventory_lease, self.lease.is_coordinator, awaits_start=lambda: True
        )
        self.snapshots = SnapshotHandlers(context, self.memory, permissions)
        self.relief = MemoryRelief(context, self.memory, self.snapshots.is_written)
        self.dispatch = Dispatch(permissions, [*self.snapshots.routes(), *self._routes()])
        self._domains = options.domains
        self._is_ending = False  # asked to end: one last commit was begun, or is not needed
        self.addresses: list[Address] = context.open_network(context.agent_name).listen(options.secret, options.listen)
        context.workers.run(Lane.FRONT, lambda: context.store.open_run(impatient=True).view(), self._on_store_checked)

    def _routes(self) -> list[Route]:
        return [
            Route("hello", Sender.NEWCOMER, self._on_hello),
            Route("status", Sender.PROCESS, self.context.send_status),
            Route("prune", Sender.PROCESS, self._refuse_prune),
            Route("preempt", Sender.PROCESS, self._refuse_preempt),
            Route("survey", Sender.ANYONE, self._on_survey),
            Route("start-outcome", Sender.SURVEYOR, self._on_start_outcome),
            Route("borrow-memory", Sender.ANYONE, self._on_borrow_memory),
            Route("node-lost", Sender.COORDINATOR, self._on_node_lost),
        ]

    def close(self) -> None:
        self.orphans.end_attempt()
        self.memory.replicas.close()
        self.context.close()

    # -- what the event loop calls

    def message(self, peer: AnyPeer, message: Message) -> None:
        """Handles a message of a tool. Errors: see Dispatch.handle."""
        self.dispatch.handle(peer, message)

    def peer_disconnected(self, peer: AnyPeer) -> None:
        """Nothing: no tool is waited for."""

    def peer_died(self, peer: AnyPeer) -> None:
        """Nothing: no tool is waited for."""

    def process_suspended(self, for_s: float) -> None:
        log.warning("this agent did not run for %.0f s: it was stopped, or its machine had no time for it", for_s)

    def settle(self) -> float | None:
        """Does what follows from the newest messages and the time. Returns when to call again (monotonic seconds)."""
        now_s = time.monotonic()
        self.memory.end_expired_serving()
        times = [self._schedule_orphan_commit(now_s), self.relief.relieve_pressure(now_s)]
        self.context.status_view.update(None, False)
        if self.can_exit():
            times.append(now_s)
        return min((each for each in times if each is not None), default=None)

    def can_exit(self) -> bool:
        """The end comes when a signal asked for it and the last commit has been tried."""
        network = self.context.network
        if not self._is_ending or self.orphans.is_busy:
            return False
        return network is None or not network.has_waiting_bytes

    def _schedule_orphan_commit(self, now_s: float) -> float | None:
        """As on any other node. Once this node is asked to end, it tries once more, at once."""
        if not self.context.server.is_end_requested:
            return self.orphans.schedule(now_s)
        if not self.orphans.is_busy and not self._is_ending:
            self._is_ending = True
            self.orphans.try_last()
        return None

    def _find_uncoordinated_job(self) -> UncoordinatedJob | None:
        terms = self.lease.terms
        if self.lease.is_connected or not self.memory.replicas.kept.identities or not terms:
            return None
        return UncoordinatedJob(max(terms), (), 0, terms)

    def _on_store_checked(self, done: Future[RunView]) -> None:
        """Warns at the start if the store cannot be read from here: later it would be too late to mend this machine."""
        if error := failure(done):
            text = "the store cannot be read from here now, and what is kept here could not be committed"
            log.warning("%s (see `ckpt doctor %s`): %s", text, redact_url(self.context.url), error)

    # -- what coordinators say

    def peer_message(self, channel: Channel, message: Message) -> None:
        """Handles a message from another agent. Errors: see Dispatch.handle."""
        self.memory.inventory_lease.on_holder_connected(channel.peer)
        self.dispatch.handle(channel, message)

    def peer_closed(self, channel: Channel) -> None:
        if self.context.channel(channel.peer) is None:
            self.lease.on_coordinator_lost(channel.peer)
            self.memory.inventory_lease.on_holder_lost(channel.peer)
        self.memory.replicas.handle_disconnect(channel.peer)

    def _on_survey(self, channel: Channel, message: Message) -> None:
        """Only a start of a job that names this node gets a lease."""
        fields = message.fields
        if not fields.get("lease", True):
            self.snapshots.send_inventory(channel, message)
            return
        self._check_url(fields)
        busy = self.lease.lease_for_start(channel.peer, str(fields["launch"])[:200], bool(fields["take_over"]))
        if not busy:
            self.orphans.grant_lease(channel.peer)
        self._answer_borrower(channel, int(fields["id"]), busy, [self.snapshots.encode_inventory()])

    def _on_start_outcome(self, channel: Channel, message: Message) -> None:
        """A start came to nothing, or no rank of its job is left: another job may borrow."""
        if message.fields["epoch"] is None:
            self.memory.inventory_lease.end_lease(channel.peer)
            self.lease.on_coordinator_lost(channel.peer)

    def _on_borrow_memory(self, channel: Channel, message: Message) -> None:
        self._check_url(message.fields)
        terms, lease, fence = CommitTerms.decode(message.blobs[0]), self.lease, self.memory.inventory_lease
        epoch = terms.claim.epoch
        if epoch >= max(lease.terms, default=epoch):  # else it is refused
            self.orphans.end_attempt()
        waits = not lease.is_connected and fence.is_held and fence.refusal(channel.peer, epoch)
        busy = lease.launch or "another one" if waits else lease.borrow(channel.peer, terms)
        if not busy:
            fence.on_epoch_begun(channel.peer, epoch)
            lease.drop_old_terms({identity.epoch for identity in self.memory.replicas.kept.identities})
        self._answer_borrower(channel, int(message.fields["id"]), busy, [])

    def _on_node_lost(self, channel: Channel, message: Message) -> None:
        self.memory.replicas.handle_disconnect(str(message.fields["name"]))

    def _check_url(self, fields: dict[str, Any]) -> None:
        """Errors: AgentError if the job is of another run than this node serves. Such a job could restore this run's
        replicas, have them dropped, and be committed into this run."""
        url, own = str(fields["url"])[:1000], self.context.url
        if url != own[:1000]:
            raise AgentError(f"it was started for {redact_url(own)}, and lends to no job of {redact_url(url)}")

    def _answer_borrower(self, channel: Channel, request_id: int, busy: str, blobs: list[bytes]) -> None:
        if busy:
            channel.reply(request_id, {"busy": busy})
            return
        body: dict[str, Any] = {"name": self.context.agent_name, "lent_bytes": self.memory.replica_bytes_max()}
        body |= {"domains": list(self._domains), "link_bytes_s": link_bytes_s(self.addresses[0])}
        channel.reply(request_id, body, blobs)

    # -- what tools say

    def _on_hello(self, peer: Peer, message: Message) -> None:
        role, version = str(message.fields["role"]), int(message.fields["version"])
        if role == "trainer":
            raise AgentError(
                f"{self._describe()} and serves no trainer: start the job on another machine, or with another "
                "CKPT_RUNTIME_DIR (the folder of agents' sockets)"
            )
        if version != VERSION:
            raise AgentError(f"{describe_versions(self.context.url, version)}. End that agent, and start it again")
        peer.role = role
        body = {"version": VERSION, "incarnation": self.context.incarnation, "pid": os.getpid(), "secret": None}
        peer.reply(int(message.fields["id"]), body)

    def _refuse_prune(self, peer: Peer, message: Message) -> None:
        raise AgentError(
            f"{self._describe()} and deletes nothing: prune on another machine, or with another CKPT_RUNTIME_DIR (the "
            "folder of agents' sockets)"
        )

    def _refuse_preempt(self, peer: Peer, message: Message) -> None:
        raise AgentError(f"no job is running on {redact_url(self.context.url)}")

    def _describe(self) -> str:
        return f"the agent of {redact_url(self.context.url)} on this machine lends its memory (`ckpt agent`)"

    def status(self) -> dict[str, Any]:
        """What `ckpt watch` and the metrics page show."""
        lease, held, replicas = self.lease, self.memory.inventory(whole=True), self.memory.replicas
        committing = self.orphans.committing
        lending = {
            "at": [str(each) for each in self.addresses],
            "memory_bytes": lease.memory_bytes,
            "used_bytes": replicas.arenas.bytes,
            "launch": lease.launch or None,
            "connected": lease.is_connected,
            "keeps": [str(each) for each in sorted(replicas.kept.identities)],
            "whole": [str(each) for each in sorted(held.world_sizes) if not held.missing_ranks(each)],
            "committing": str(committing) if committing is not None else None,
            "error": self.orphans.error or None,
        }
        return {**self.memory.status_fields(), "job": None, "lending": lending}
