"""Replication of one checkpoint, as copies or as parity, run by the coordinator. Main thread only.

1. Each source describes its snapshots and offers them ("publish-snapshots").
2. Once a holder's sources are described, the holder is told what to keep ("replicate"): copies of the snapshots, or
   parity chunks that it makes of them. It fetches the bytes from the sources, verifies them, and answers.
3. When all have answered, the caller says whether the checkpoint counts as replicated: a holder may be lost by now.
4. If it does, the nodes hear that they may evict older checkpoints ("replicated").

If any replica fails, the replication has failed. Replicas that did arrive are evicted once the next replication begins.
A re-replication (rereplicate.py) is the same with another plan, and evicts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.agent.replication.replica_service import ReplicaService, Where
from ckpt.agent.replication.replica_store import ReplicaStore
from ckpt.agent.snapshots.described import DescribedSnapshot, ParityChunkName, decode_described, encode_described
from ckpt.errors import AgentError, CkptError
from ckpt.format.parity import Row
from ckpt.placement.parity_placement import ParityGroup
from ckpt.placement.rebuild import stripes_of
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.ipc.node_list import NodeAt


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """What one holder is to keep: copies of one source's snapshots of these ranks, or the holder's parity chunks of
    `groups`, which are planned for at least the bytes that the sources staged."""

    holder: str
    ranks_by_source: Mapping[str, Sequence[int]]
    groups: Sequence[ParityGroup] = ()


def assign_parity(groups: Iterable[ParityGroup], ranks: Mapping[str, Sequence[int]]) -> list[Assignment]:
    """The assignments of a placement's parity groups. `ranks`: by node."""
    by_holder: dict[str, list[ParityGroup]] = {}
    for group in groups:
        for holder in sorted({group.members[index] for stripe in group.stripes for index in stripe.holders}):
            by_holder.setdefault(holder, []).append(group)
    return [
        Assignment(
            holder,
            # A holder waits for all members of its groups: their staged bytes determine the sources of each stripe.
            {
                group.members[part.member]: ranks.get(group.members[part.member], ())
                for group in theirs
                for stripe in group.stripes
                for part in stripe.parts
            },
            theirs,
        )
        for holder, theirs in by_holder.items()
    ]


class Replication:
    """One replication. `assignments`: those without a source or a rank are left out. `safe`: the newest replicated
    checkpoint. `needed`: node -> ranks of `safe` whose copies there must stay; None: unknown. `evicts`: older
    checkpoints may be evicted for it. `then` is called once, with "" or the error; until then the sources leave their
    snapshots unchanged. It returns whether older checkpoints may be evicted now; otherwise none is. `errors`: of the
    assignments that failed."""

    def __init__(
        self,
        network: PeerNetwork,
        copies: ReplicaStore,
        service: ReplicaService,
        nodes: Sequence[NodeAt],
        identity: Identity,
        assignments: Iterable[Assignment],
        then: Callable[[str], bool | None],
        safe: Identity | None = None,
        needed: Mapping[str, Sequence[int]] | None = None,
        evicts: bool = True,
    ) -> None:
        self._network, self._replicas, self._service, self._on_done = network, copies, service, then
        self._nodes = {node.name: node for node in nodes}
        self._identity, self._replicated, self._needed_ranks, self._evicts = identity, safe, needed, evicts
        self._assignments = [
            each
            for each in assignments
            if any(each.ranks_by_source.values()) and {*each.ranks_by_source} <= {*self._nodes}
        ]
        self._pending = set(self._assignments)
        # By source: its snapshots, or why it does not give them.
        self._described: dict[str, list[DescribedSnapshot] | str] = {}
        self.errors: dict[Assignment, str] = {}

    def begin(self) -> None:
        if not self._pending:
            self._on_done("")
        for source in self._sources:
            wanted = [each.ranks_by_source.get(source, ()) for each in self._assignments]
            self._publish(source, sorted(set[int]().union(*wanted)))

    def withdraw(self) -> None:
        """Ends the offers of all sources."""
        self._service.end_offers(self._identity, self._sources, "")

    @property
    def _sources(self) -> list[str]:
        return sorted(set[str]().union(*(each.ranks_by_source for each in self._assignments)))

    def _publish(self, source: str, ranks: list[int]) -> None:
        def published(blobs: list[bytes], error: str) -> None:
            try:
                if error or not blobs:
                    raise AgentError(error or "its answer has no description")
                found = decode_described(blobs[0])
                if sorted(each.rank for each in found) != ranks:
                    raise AgentError("it describes snapshots of other ranks than it was asked for")
                self._described[source] = found
            except CkptError as exc:
                self._described[source] = f"agent {source} does not give what is to be copied: {exc}"
            for each in self._assignments:
                if source in each.ranks_by_source and each.ranks_by_source.keys() <= self._described.keys():
                    self._request_replica(each)

        fields = {"t": "publish-snapshots", "identity": str(self._identity), "ranks": ranks}
        self._service.send_request(source, fields, (), published)

    def _request_replica(self, wanted: Assignment) -> None:
        """Its sources have answered: asks the holder to keep its replicas."""
        rank_lists, snapshots, holder = wanted.ranks_by_source, dict[str, list[DescribedSnapshot]](), wanted.holder
        for source, ranks in rank_lists.items():
            found = self._described[source]
            if isinstance(found, str):
                self._end_assignment(wanted, found)
                return
            snapshots[source] = [each for each in found if each.rank in ranks]
        try:
            chunks = [name for group in wanted.groups for name in self._chunks(group, holder, snapshots)]
        except CkptError as exc:
            self._end_assignment(wanted, str(exc))
            return
        where = Where(
            {source: self._nodes[source].addresses for source in snapshots},
            {each.rank: source for source, theirs in snapshots.items() for each in theirs},
            [(holder, name, None) for name in chunks],
        )
        fields = {
            "t": "replicate",
            "identity": str(self._identity),
            "source": next(iter(snapshots)) if not wanted.groups else None,
            "world": sum(len(node.ranks) for node in self._nodes.values()),
            "rereplication": not self._evicts,
            "replicated": str(self._replicated) if self._replicated is not None else None,
            "needed_ranks": self._needed_ranks.get(holder, ()) if self._needed_ranks is not None else None,
        }
        blobs = [where.encode(), encode_described([each for theirs in snapshots.values() for each in theirs])]
        self._service.send_request(holder, fields, blobs, lambda _, error: self._end_assignment(wanted, error))

    def _chunks(
        self, group: ParityGroup, holder: str, snapshots: Mapping[str, Sequence[DescribedSnapshot]]
    ) -> list[ParityChunkName]:
        """The chunks of a group that `holder` is to keep. Errors: UsageError."""
        sizes = [[(each.rank, each.staged_bytes) for each in snapshots.get(name, ())] for name in group.members]
        return [
            ParityChunkName(self._identity, Row(row), striped)
            for striped, holders in stripes_of(group.stripes, sizes)
            for row, index in enumerate(holders)
            if group.members[index] == holder
        ]

    def _end_assignment(self, ended: Assignment, error: str) -> None:
        if ended not in self._pending:
            return
        self._pending.discard(ended)
        if error:
            self.errors[ended] = f"{'parity' if ended.groups else 'a copy'} at agent {ended.holder}: {error}"
        if not self._pending:
            self._finish()

    def _finish(self) -> None:
        error = next(iter(self.errors.values()), "")
        self.withdraw()
        try:
            if not error and self._evicts:
                self._replicas.check_eviction(self._identity.epoch)
        except AgentError as exc:  # A start surveys this node: nothing is evicted, and the caller tries again.
            error = str(exc)
        if not self._on_done(error) or error or not self._evicts:
            return
        self._replicas.evict_older_than(self._identity)
        for name in self._nodes:
            if name != self._network.agent_name:
                self._network.notify(name, {"t": "replicated", "identity": str(self._identity)})
