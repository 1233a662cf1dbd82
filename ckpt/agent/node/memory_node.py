"""The agent of a memory-only node: it keeps replicas for the jobs of one run, serves them, and commits orphaned ones.

It has no trainers, and serves until a signal asks it to end. memory_lease.py decides to whom it lends. If the job's
coordinator is lost, it commits as a node of that job does (orphan_committer.py). Main thread only.
"""

from __future__ import annotations

import logging
import math
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.agent.commit.commit_turns import CommitTurns
from ckpt.agent.node.agent import Agent
from ckpt.agent.node.memory_lease import MemoryLease
from ckpt.agent.node.orphan_committer import UncoordinatedJob
from ckpt.agent.runtime.event_loop import EventLoop, Peer
from ckpt.agent.runtime.workers import Lane, failure
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.agent.state.retention_rule import NewestStart
from ckpt.errors import AgentError
from ckpt.ipc.addresses import Address
from ckpt.ipc.messages import Message
from ckpt.settings import Settings
from ckpt.storage.names import redact_url
from ckpt.types import Epoch

if TYPE_CHECKING:
    from ckpt.agent.net.channel import Channel
    from ckpt.store.run import RunView

log = logging.getLogger("ckpt")

# Messages handled as on any other node; `PeerHandlers._check_sender` checks the sender by `_is_coordinator`.
COMMON_MESSAGES = (
    "describe-snapshots",
    "serve-frames",
    "replicate",
    "replicated",
    "write-frames",
    "cancel-write",
    "publish-snapshots",
    "withdraw-published",
    "publish-parity",
    "forget-replicas",
    "drop-older-epochs",
    "node-disconnected",
)


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


class MemoryNode(Agent):
    """The agent of a memory-only node. `addresses`: where it listens."""

    def __init__(self, url: str, settings: Settings, server: EventLoop, lend: MemoryNodeOptions) -> None:
        """Errors: AgentError if it cannot listen on that address; UsageError."""
        super().__init__(url, settings, server)
        self._options = lend
        self._memory_lease = MemoryLease()
        self._turns = CommitTurns(math.inf, lend.commit_after_s)
        self._is_ending = False  # asked to end: one last commit was begun, or is not needed
        self.addresses: list[Address] = self._open_network(self.agent_name).listen(lend.secret, lend.listen)
        self._workers.run(Lane.FRONT, lambda: self._store.open_run(impatient=True).view(), self._on_store_checked)

    # -- what it lends

    def _replica_bytes_max(self) -> int:
        """The bytes that replicas may take now: what was lent, and no more than this machine has free."""
        return min(self._options.memory_bytes, self.replicas.allocated_bytes + self._workers.free_bytes())

    def _retention_rule(self) -> NewestStart | None:
        claim = self._memory_lease.claim
        return self._retention_rule_for([claim] if claim is not None else [])

    def _answer_lease_request(self, channel: Channel, request_id: int, busy: str, blobs: list[bytes]) -> None:
        from ckpt.agent.net.peer_network import link_bytes_s

        body: dict[str, Any] = {
            "name": self.agent_name,
            "lent_bytes": self._replica_bytes_max(),
            "domains": list(self._options.domains),
        }
        body |= {"link_bytes_s": link_bytes_s(self.addresses[0])}
        channel.reply(request_id, {"busy": busy} if busy else body, [] if busy else blobs)

    def _inventory(self, whole: bool) -> Inventory:
        found = super()._inventory(whole)
        for epoch, terms in self._memory_lease.terms.items():
            found.add_epoch(terms.claim, epoch, 0)
        return found

    # -- what coordinators say

    def peer_message(self, channel: Channel, message: Message) -> None:
        fields = message.fields
        match message.kind:
            case "start":
                self._check_url(fields)
                busy = self._memory_lease.lease_for_start(
                    channel.peer, str(fields["launch"])[:200], bool(fields["take_over"])
                )
                if not busy:
                    self._grant_inventory_lease(channel.peer)
                packed: bytes = msgpack.packb(self._inventory(whole=True).fields())
                self._answer_lease_request(channel, int(fields["id"]), busy, [packed])
            case "borrow-memory":
                self._check_url(fields)
                self._on_borrow_memory(channel, message)
            case "start-outcome":
                self._check_sender(channel.peer, fields)
                if fields["epoch"] is None:
                    self.inventory_lease.end_lease(channel.peer)
                    self._memory_lease.on_coordinator_lost(channel.peer)
            case "job-idle":
                self._memory_lease.on_coordinator_lost(channel.peer)
            case "epoch-ended":
                self._drop_epoch_replicas(channel, Epoch.parse(str(fields["epoch"])))
            case "survey" if not fields.get("lease", True):
                super().peer_message(channel, message)
            case _ if message.kind in COMMON_MESSAGES:
                super().peer_message(channel, message)
            case _:
                raise AgentError(f"a memory-only node does not know the message {message.kind!r:.100}")

    def _check_url(self, fields: dict[str, Any]) -> None:
        """Errors: AgentError if the job is of another run than this node serves. Such a job could restore this run's
        replicas, have them dropped, and be committed into this run."""
        url = str(fields["url"])[:1000]
        if url != self.url[:1000]:
            raise AgentError(f"it was started for {redact_url(self.url)}, and lends to no job of {redact_url(url)}")

    def _is_coordinator(self, name: str, epoch: Epoch | None = None) -> bool:
        """Whether agent `name` coordinates the job that is lent to, and in that epoch if one is named."""
        return name == self._memory_lease.coordinator and epoch in (self._memory_lease.epoch, None)

    def _on_borrow_memory(self, channel: Channel, message: Message) -> None:
        terms = CommitTerms.decode(message.blobs[0])
        epoch = terms.claim.epoch
        if epoch >= max(self._memory_lease.terms, default=epoch):  # else it is refused
            self._end_commit_attempt()
        waits = (
            not self._memory_lease.is_connected
            and self.inventory_lease.is_held
            and self.inventory_lease.refusal(channel.peer, epoch)
        )
        busy = self._memory_lease.launch or "another one" if waits else self._memory_lease.borrow(channel.peer, terms)
        if not busy:
            self.inventory_lease.on_epoch_begun(channel.peer, epoch)
            self._memory_lease.drop_old_terms({identity.epoch for identity in self.replicas.identities})
        self._answer_lease_request(channel, int(message.fields["id"]), busy, [])

    def _drop_epoch_replicas(self, channel: Channel, epoch: Epoch) -> None:
        """Forgets the replicas of that epoch and of older ones: the job has ended, and its state is in the store."""
        if channel.peer == self._memory_lease.coordinator and epoch == self._memory_lease.epoch:
            self.replicas.evict(lambda identity: identity.epoch <= epoch)

    def peer_closed(self, channel: Channel) -> None:
        if self.network is not None and self.network.channel(channel.peer) is None:
            self._memory_lease.on_coordinator_lost(channel.peer)
        super().peer_closed(channel)

    # -- orphan commits

    def _find_uncoordinated_job(self) -> UncoordinatedJob | None:
        terms = self._memory_lease.terms
        if self._memory_lease.is_connected or not self.replicas.identities or not terms:
            return None
        return UncoordinatedJob(max(terms), (), 0, terms)

    def _schedule_orphan_commit(self, now_s: float) -> float | None:
        """As on any other node. Once this node is asked to end, it tries once more, at once."""
        if not self._server.is_end_requested:
            return super()._schedule_orphan_commit(now_s)
        if self._commit_attempt is None and not self._is_ending:
            self._is_ending, job = True, self._find_uncoordinated_job()
            if job is not None and not self._turns.is_settled:
                self._begin_commit_attempt(job)
        return None

    def _on_store_checked(self, done: Future[RunView]) -> None:
        """Warns at the start if the store cannot be read from here: later it would be too late to mend this machine."""
        if error := failure(done):
            text = "the store cannot be read from here now, and what is kept here could not be committed"
            log.warning("%s (see `ckpt doctor %s`): %s", text, redact_url(self.url), error)

    # -- the rest

    def _hello(self, peer: Peer, message: Message) -> None:
        if message.fields["role"] == "trainer":
            raise AgentError(
                f"the agent of {redact_url(self.url)} on this machine lends its memory (`ckpt agent`) and serves no "
                "trainer"
                ": start the job on another machine, or with another CKPT_RUNTIME_DIR (the folder of agents' sockets)"
            )
        super()._hello(peer, message)

    def _on_tool_message(self, peer: Peer, message: Message) -> None:
        if message.kind == "prune":
            raise AgentError(
                f"the agent of {redact_url(self.url)} on this machine lends its memory (`ckpt agent`) and deletes "
                "nothing: "
                "prune on another machine, or with another CKPT_RUNTIME_DIR (the folder of agents' sockets)"
            )
        super()._on_tool_message(peer, message)

    def status(self) -> dict[str, Any]:
        loan = self._memory_lease
        held, attempt = self._inventory(whole=True), self._commit_attempt
        lending = {
            "at": [str(each) for each in self.addresses],
            "memory_bytes": self._options.memory_bytes,
            "used_bytes": self.replicas.bytes,
            "launch": loan.launch or None,
            "connected": loan.is_connected,
            "keeps": [str(each) for each in sorted(self.replicas.identities)],
            "whole": [str(each) for each in sorted(held.world_sizes) if not held.missing_ranks(each)],
            "committing": str(attempt.identity) if attempt is not None and attempt.identity is not None else None,
            "error": self._commit_error or None,
        }
        return {**super().status(), "lending": lending}

    def _end_due_s(self, now_s: float) -> float | None:
        """The end comes when a signal asked for it and the last commit has been tried."""
        return now_s if self._is_ending and self._commit_attempt is None else None

    def _reconnect_node(self, name: str) -> None:
        """Nothing: coordinators connect to a memory-only node, never the other way round."""
