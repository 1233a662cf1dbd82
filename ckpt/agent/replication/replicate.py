"""Replication of one checkpoint as copies, run by the coordinator. Main thread only.

1. Each node with ranks describes its snapshots and offers them ("publish-snapshots").
2. Each holder fetches its copies from there and verifies them ("replicate").
3. When all have answered, the caller says whether the checkpoint counts as replicated: a holder may be lost by now.
4. If it does, the nodes hear that they may evict older checkpoints ("replicated").

If any copy fails, the replication has failed. Copies that did arrive are evicted once the next replication begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ckpt.agent.replication.replica_store import ReplicaStore, decode_described, encode_described
from ckpt.agent.snapshots.described import DescribedSnapshot
from ckpt.errors import AgentError, CkptError
from ckpt.ipc.messages import Message
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.ipc.arena import Arena
    from ckpt.ipc.node_list import NodeAt


class Replication:
    """One replication. `wanted`: source node -> (ranks whose snapshots it gives, nodes that are to keep them). `own`:
    the arenas that this node gives. `safe`: the newest replicated checkpoint. `needed`: node -> ranks of `safe` whose
    copies there must stay; None: unknown. `then` is called once, with "" or the error; until then the sources leave
    their snapshots unchanged. It returns whether older checkpoints may be evicted; otherwise none is."""

    replica_kind = "a copy"

    def __init__(
        self,
        network: PeerNetwork,
        copies: ReplicaStore,
        nodes: Sequence[NodeAt],
        wanted: Mapping[str, tuple[Sequence[int], Sequence[str]]],
        identity: Identity,
        safe: Identity | None,
        own: Mapping[int, Arena],
        then: Callable[[str], bool | None],
        needed: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._replicated, self._needed_ranks = safe, needed
        self._network, self._replicas, self._on_done = network, copies, then
        self._nodes = {node.name: node for node in nodes}
        self._plan_by_source = {name: each for name, each in wanted.items() if all(each) and name in self._nodes}
        self._identity, self._own_arenas = identity, own
        self._pending_transfers = {
            (source, holder) for source, (_, holders) in self._plan_by_source.items() for holder in holders
        }
        self._errors: list[str] = []

    def begin(self) -> None:
        if not self._pending_transfers:
            self._on_done("")
        for source in self._plan_by_source:
            self._publish(source)

    def _publish(self, source: str) -> None:
        if source == self._network.agent_name:

            def published(found: list[DescribedSnapshot], error: str) -> None:
                self._handle_published(source, b"" if error else encode_described(found), error)

            self._replicas.publish(self._network.transport, self._identity, self._own_arenas, published)
            return

        def heard(answer: Message | None, error: str) -> None:
            if answer is not None and not answer.blobs:
                error = "its answer has no description"
            self._handle_published(source, b"" if answer is None or error else answer.blobs[0], error)

        fields = {
            "t": "publish-snapshots",
            "identity": str(self._identity),
            "ranks": list(self._plan_by_source[source][0]),
        }
        self._network.request(source, fields, (), heard)

    def _handle_published(self, source: str, blob: bytes, error: str) -> None:
        ranks, holders = self._plan_by_source[source]
        if not error:
            try:
                if sorted(each.rank for each in decode_described(blob)) != sorted(ranks):
                    raise AgentError("it describes snapshots of other ranks than it was asked for")
            except CkptError as exc:
                error = str(exc)
        for holder in holders:
            if error:
                self._end_transfer(source, holder, f"agent {source} does not give what is to be copied: {error}")
            else:
                self._request_replica(source, holder, blob)

    def _request_replica(self, source: str, holder: str, blob: bytes) -> None:
        node = self._nodes[source]
        if holder == self._network.agent_name:
            wanted, addresses = decode_described(blob), self._network.addresses(node)
            then = lambda error: self._end_transfer(source, holder, error)  # noqa: E731
            try:
                sizes = [each.arena_bytes for each in wanted]
                self._replicas.evict_superseded(self._identity, self._replicated, sizes, self._needed_ranks_at(holder))
            except AgentError as exc:
                self._end_transfer(source, holder, str(exc))
                return
            self._replicas.fetch_replicas(self._network.transport, self._identity, source, addresses, wanted, then)
            return
        fields = {
            "t": "replicate",
            "identity": str(self._identity),
            "replicated": str(self._replicated) if self._replicated is not None else None,
            "needed_ranks": self._needed_ranks_at(holder),
            "source": source,
            "addresses": [str(address) for address in node.addresses],
        }
        self._network.request(holder, fields, [blob], lambda answer, error: self._end_transfer(source, holder, error))

    def _needed_ranks_at(self, holder: str) -> Sequence[int] | None:
        return self._needed_ranks.get(holder, ()) if self._needed_ranks is not None else None

    def _end_transfer(self, source: str, holder: str, error: str) -> None:
        if (source, holder) not in self._pending_transfers:
            return
        self._pending_transfers.discard((source, holder))
        if error:
            self._errors.append(f"{self.replica_kind} at agent {holder}: {error}")
        if not self._pending_transfers:
            self._finish()

    def _finish(self) -> None:
        error = self._errors[0] if self._errors else ""
        identity = str(self._identity)
        self._replicas.withdraw(self._network.transport, self._identity)
        for source in self._plan_by_source:
            if source != self._network.agent_name:
                self._network.notify(source, {"t": "withdraw-published", "identity": identity})
        try:
            if not error:
                self._replicas.check_eviction(self._identity.epoch)
        except AgentError as exc:  # A start surveys this node: nothing is evicted, and the caller tries again.
            error = str(exc)
        if not self._on_done(error) or error:
            return
        self._replicas.evict_older_than(self._identity)
        for name in self._nodes:
            if name != self._network.agent_name:
                self._network.notify(name, {"t": "replicated", "identity": identity})
