"""Replication of one checkpoint as parity: the coordinator has each holder make and keep its parity chunks.

It works as replication by copies (see Replication), in other steps. Each node with ranks describes its snapshots. Once
a holder's sources are all described, it is sent its chunks to keep; it makes them from those nodes' bytes, and answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ckpt.agent.replication.parity_service import ParityService, Where
from ckpt.agent.replication.replica_store import ReplicaStore, decode_described, encode_described
from ckpt.agent.replication.replicate import Replication
from ckpt.agent.snapshots.described import DescribedSnapshot, ParityChunkName
from ckpt.errors import CkptError
from ckpt.format.parity import Row
from ckpt.placement.parity_placement import ParityGroup
from ckpt.placement.rebuild import stripes_of
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.ipc.arena import Arena
    from ckpt.ipc.node_list import NodeAt


class ParityEncoding(Replication):
    """The parity form of Replication. `groups`: the parity groups of the placement, planned for at least the bytes that
    the nodes staged. Other parameters: see Replication."""

    replica_kind = "parity"

    def __init__(
        self,
        network: PeerNetwork,
        copies: ReplicaStore,
        parities: ParityService,
        nodes: Sequence[NodeAt],
        groups: Sequence[ParityGroup],
        identity: Identity,
        safe: Identity | None,
        own: Mapping[int, Arena],
        then: Callable[[str], bool | None],
        needed: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        ranks = {node.name: node.ranks for node in nodes}
        self._groups = [group for group in groups if group.stripes]
        # A holder waits for all members of its groups: their staged bytes determine the sources of each stripe.
        self._pending_sources: dict[str, set[str]] = {}
        for group in self._groups:
            for holder in _holder_nodes(group):
                self._pending_sources.setdefault(holder, set()).update(_source_nodes(group))
        wanted = {
            name: (ranks[name], sorted(holder for holder, givers in self._pending_sources.items() if name in givers))
            for name in sorted(set().union(*self._pending_sources.values()))
        }
        super().__init__(network, copies, nodes, wanted, identity, safe, own, then, needed)
        self._parity_service = parities
        self._snapshots_by_source: dict[str, list[DescribedSnapshot]] = {}
        self._errors_by_holder: dict[str, str] = {}  # holders with a source that could not be described -> why

    def _request_replica(self, source: str, holder: str, blob: bytes) -> None:
        self._snapshots_by_source.setdefault(source, decode_described(blob))
        self._note_described(source, holder)

    def _end_transfer(self, source: str, holder: str, error: str) -> None:
        """The source could not be described: the holder fails."""
        self._errors_by_holder.setdefault(holder, error)
        self._note_described(source, holder)

    def _note_described(self, source: str, holder: str) -> None:
        waiting = self._pending_sources[holder]
        waiting.discard(source)
        if waiting:
            return
        groups = [group for group in self._groups if holder in _holder_nodes(group)]
        givers = sorted(set().union(*map(_source_nodes, groups)))

        def ended(_: object, error: str) -> None:
            for giver in givers:
                super(ParityEncoding, self)._end_transfer(giver, holder, error)

        if holder in self._errors_by_holder:
            ended(None, self._errors_by_holder[holder])
            return
        try:
            chunks = [(holder, name, None) for group in groups for name in self._chunks(group, holder)]
        except CkptError as exc:
            ended(None, str(exc))
            return
        described = [each for giver in givers for each in self._snapshots_by_source[giver]]
        where = Where(
            {giver: self._nodes[giver].addresses for giver in givers},
            {each.rank: giver for giver in givers for each in self._snapshots_by_source[giver]},
            chunks,
        )
        fields = {
            "t": "encode-parity",
            "identity": str(self._identity),
            "world": sum(len(node.ranks) for node in self._nodes.values()),
            "replicated": str(self._replicated) if self._replicated is not None else None,
            "needed_ranks": self._needed_ranks_at(holder),
        }
        self._parity_service.send_request(holder, fields, [where.encode(), encode_described(described)], ended)

    def _chunks(self, group: ParityGroup, holder: str) -> list[ParityChunkName]:
        """The chunks of a group that `holder` is to keep. Errors: UsageError."""
        sizes = [
            [(each.rank, each.staged_bytes) for each in self._snapshots_by_source.get(name, ())]
            for name in group.members
        ]
        return [
            ParityChunkName(self._identity, Row(row), striped)
            for striped, holders in stripes_of(group.stripes, sizes)
            for row, index in enumerate(holders)
            if group.members[index] == holder
        ]


def _holder_nodes(group: ParityGroup) -> set[str]:
    return {group.members[index] for stripe in group.stripes for index in stripe.holders}


def _source_nodes(group: ParityGroup) -> set[str]:
    return {group.members[part.member] for stripe in group.stripes for part in stripe.parts}
