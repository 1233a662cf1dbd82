"""Re-replication: the coordinator restores the replication target of the checkpoint that a job was restored from.

After nodes were lost, that checkpoint lies on fewer nodes than the user asked for. Until a newer checkpoint is
replicated, one more loss could destroy it. So its snapshots are copied at once to further nodes, by the plan of
placement/rereplication.py and the transfers of any copy. Nothing is evicted for it, and nothing waits for it. A source
that fails is asked again only if no other node has the snapshot. It counts as a holder no more once another source has
given the snapshot. Main thread only.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt.agent.replication.replica_store import ReplicaStore, decode_described, encode_described
from ckpt.agent.snapshots.described import DescribedSnapshot
from ckpt.errors import CkptError
from ckpt.ipc.messages import Message
from ckpt.placement.groups import PlacementNode
from ckpt.placement.rereplication import Copy, plan_rereplication
from ckpt.types import Identity, format_count

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.ipc.arena import Arena
    from ckpt.ipc.node_list import NodeAt

log = logging.getLogger("ckpt")

RETRY_S_MAX = 60.0
TRANSFERS_SHOWN = 64  # copies listed in an event

# (name, message, is_warning, data): see JobContext.emit.
Emit = Callable[[str, str, bool, dict[str, Any]], None]


def retry_delay_s(failures: int) -> float:
    """Seconds to wait before the next attempt, after so many failures."""
    return min(2.0 ** min(failures, 16), RETRY_S_MAX)


class Rereplication:
    """The re-replication of one checkpoint, `identity`. `nodes`: of the job, and memory-only ones. `holders`: rank ->
    nodes with its snapshot, of `sizes` bytes. `own(identity)`: its arenas on this node. `later(delay_s, what)`: a
    timer. `safe(is_safe)`: hears whether the checkpoint meets the replication target now."""

    def __init__(
        self,
        network: PeerNetwork,
        copies: ReplicaStore,
        nodes: Sequence[NodeAt],
        identity: Identity,
        holders: Mapping[int, Sequence[str]],
        sizes: Mapping[int, int],
        own: Callable[[Identity], Mapping[int, Arena]],
        later: Callable[[float, Callable[[], None]], None],
        emit: Emit,
        safe: Callable[[bool], None],
    ) -> None:
        self.identity = identity
        self._report_replicated = safe
        self._network, self._replicas, self._arenas_of, self._call_later, self._emit = network, copies, own, later, emit
        self._nodes = {node.name: node for node in nodes}
        self._holders = {rank: set(names) for rank, names in holders.items()}
        self._sizes = dict(sizes)
        self._pending_transfers: set[Copy] = set()  # copies under way
        self._failures_by_source: Counter[tuple[int, str]] = Counter()  # (rank, source) -> failed copies
        self._short_ranks: tuple[int, ...] = ()  # ranks reported to lack memory for copies
        self._finished_transfers: list[Copy] = []
        self._errors: list[str] = []
        self._is_settled = self._is_ended = False
        self._began_s = self._next_attempt_s = time.monotonic()
        self._failed_attempts = 0

    @property
    def is_due(self) -> bool:
        """Whether `begin_attempt` is to be called now: at first, or again after a failure."""
        return not self._pending_transfers and not self._is_settled and time.monotonic() >= self._next_attempt_s

    def begin_attempt(self, lends: Mapping[str, int], copies: int) -> None:
        """Begins an attempt, when it is due. `lends`: node -> bytes lent. `copies`: how many beside the original."""
        nodes = [
            PlacementNode(name, lend_bytes=lends.get(name, 0), domains=at.domains, has_state=bool(at.ranks))
            for name, at in self._nodes.items()
        ]
        told = {rank: sorted(names) for rank, names in self._holders.items()}
        plan = plan_rereplication(told, self._sizes, nodes, copies, self._failures_by_source)
        if plan.short_ranks and plan.short_ranks != self._short_ranks:
            ranks = format_count(len(plan.short_ranks), "rank")
            text = f"{ranks} of step {self.identity.version.step} on fewer nodes than was asked for"
            self._emit(
                "replication.short", f"{text}: too little memory is left", True, {"ranks": list(plan.short_ranks[:100])}
            )
        self._short_ranks = plan.short_ranks
        self._report_replicated(not (plan.replicas or plan.short_ranks))
        if not plan.replicas:
            self._is_settled = True
            return
        self._pending_transfers, self._finished_transfers, self._errors = set(plan.replicas), [], []
        self._began_s = time.monotonic()
        by_source: dict[str, list[Copy]] = {}
        for copy in plan.replicas:
            by_source.setdefault(copy.source, []).append(copy)
        for source, theirs in by_source.items():
            self._publish(source, theirs)

    def drop_holder(self, name: str) -> None:
        """An agent has disconnected: its snapshots count as lost, and are copied anew."""
        if not self._is_ended and any(name in names for names in self._holders.values()):
            for names in self._holders.values():
                names.discard(name)
            self._is_settled = False

    def end(self) -> None:
        """Ends the re-replication; later answers are ignored."""
        if not self._is_ended:
            self._is_ended = self._is_settled = True
            if self._pending_transfers:
                self._withdraw()

    # -- inside

    def _publish(self, source: str, theirs: list[Copy]) -> None:
        ranks = sorted({rank for copy in theirs for rank in copy.ranks})
        if source == self._network.agent_name:
            arenas = {rank: arena for rank, arena in self._arenas_of(self.identity).items() if rank in ranks}
            then = lambda found, error: self._handle_published(theirs, ranks, found, error)  # noqa: E731
            self._replicas.publish(self._network.transport, self.identity, arenas, then)
            return

        def heard(answer: Message | None, error: str) -> None:
            found: list[DescribedSnapshot] = []
            if answer is not None:
                try:
                    found = decode_described(answer.blobs[0])
                except (CkptError, LookupError) as exc:
                    error = f"agent {source} describes its snapshots wrong: {exc}"
            self._handle_published(theirs, ranks, found, error)

        fields = {"t": "publish-snapshots", "identity": str(self.identity), "ranks": ranks}
        self._network.request(source, fields, (), heard)

    def _handle_published(
        self, theirs: list[Copy], ranks: list[int], found: list[DescribedSnapshot], error: str
    ) -> None:
        if self._is_ended:
            return
        if not error and sorted(each.rank for each in found) != ranks:
            error = "it describes snapshots of other ranks than it was asked for"
        for copy in theirs:
            if error:
                self._end_transfer(copy, f"agent {copy.source} does not give what is to be copied: {error}")
            else:
                self._request_replica(copy, [each for each in found if each.rank in copy.ranks])

    def _request_replica(self, copy: Copy, wanted: list[DescribedSnapshot]) -> None:
        node = self._nodes[copy.source]
        if copy.holder == self._network.agent_name:
            then = lambda error: self._end_transfer(copy, error)  # noqa: E731
            at = self._network.addresses(node)
            self._replicas.fetch_replicas(self._network.transport, self.identity, node.name, at, wanted, then)
            return
        fields = {
            "t": "replicate",
            "identity": str(self.identity),
            "rereplication": True,
            "source": node.name,
            "addresses": [str(address) for address in node.addresses],
        }
        blobs = [encode_described(wanted)]
        self._network.request(copy.holder, fields, blobs, lambda answer, error: self._end_transfer(copy, error))

    def _end_transfer(self, copy: Copy, error: str) -> None:
        if self._is_ended or copy not in self._pending_transfers:
            return
        self._pending_transfers.discard(copy)
        if error:
            self._errors.append(f"from {copy.source} to {copy.holder}: {error}")
            self._failures_by_source.update((rank, copy.source) for rank in copy.ranks)
        else:
            self._finished_transfers.append(copy)
            for rank in copy.ranks:
                failed = {name for name in self._nodes if self._failures_by_source.pop((rank, name), 0)}
                self._holders[rank] -= failed - {copy.source}
                self._holders[rank].add(copy.holder)
        if not self._pending_transfers:
            self._finish()

    def _finish(self) -> None:
        self._withdraw()
        step, seconds = self.identity.version.step, time.monotonic() - self._began_s
        count = sum(self._sizes[rank] for copy in self._finished_transfers for rank in copy.ranks)
        facts = {
            "identity": str(self.identity),
            "copies": [
                [copy.source, copy.holder, list(copy.ranks[:100])]
                for copy in self._finished_transfers[:TRANSFERS_SHOWN]
            ],
            "bytes": count,
            "seconds": seconds,
        }
        if self._errors:
            self._failed_attempts += 1
            again_s = retry_delay_s(self._failed_attempts)
            self._next_attempt_s = time.monotonic() + again_s
            self._call_later(again_s, lambda: None)  # wakes the event loop, which calls `begin_attempt`
            text = f"step {step} has lost copies, and not all are made again: {self._errors[0]}"
            self._emit("replication.failed", text, True, facts)
            return
        text = f"step {step} had lost copies: {count >> 20:,} MiB are in other nodes' memory again"
        self._emit("replica.restored", f"{text} after {seconds:.2f} s", False, facts)

    def _withdraw(self) -> None:
        self._replicas.withdraw(self._network.transport, self.identity)
        for name in self._nodes:
            if name != self._network.agent_name:
                self._network.notify(name, {"t": "withdraw-published", "identity": str(self.identity)})
