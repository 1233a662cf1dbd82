"""One checkpoint's parity on its way into the memory of other nodes, as its coordinator arranges it.

As with copies (see Replication), but for what is kept: each node that has ranks describes what they have staged; once
all that a holder needs is described it is told which parities to keep, makes them from those nodes' bytes, and says so.
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
    """`groups`: as placed; what nodes have staged is no more than was planned there. The rest: see Replication."""

    what = "parity"

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
        # A holder waits for all of its groups: what a stripe is made of follows from what each member has staged.
        self._waiting: dict[str, set[str]] = {}
        for group in self._groups:
            for holder in _holders(group):
                self._waiting.setdefault(holder, set()).update(_givers(group))
        wanted = {
            name: (ranks[name], sorted(holder for holder, givers in self._waiting.items() if name in givers))
            for name in sorted(set().union(*self._waiting.values()))
        }
        super().__init__(network, copies, nodes, wanted, identity, safe, own, then, needed)
        self._parities = parities
        self._described: dict[str, list[DescribedSnapshot]] = {}
        self._failed: dict[str, str] = {}  # holders of which nothing is asked, and why

    def _keep(self, source: str, holder: str, blob: bytes) -> None:
        self._described.setdefault(source, decode_described(blob))
        self._heard(source, holder)

    def _ended(self, source: str, holder: str, error: str) -> None:
        """It could not be described."""
        self._failed.setdefault(holder, error)
        self._heard(source, holder)

    def _heard(self, source: str, holder: str) -> None:
        waiting = self._waiting[holder]
        waiting.discard(source)
        if waiting:
            return
        groups = [group for group in self._groups if holder in _holders(group)]
        givers = sorted(set().union(*map(_givers, groups)))

        def ended(_: object, error: str) -> None:
            for giver in givers:
                super(ParityEncoding, self)._ended(giver, holder, error)

        if holder in self._failed:
            ended(None, self._failed[holder])
            return
        try:
            chunks = [(holder, name, None) for group in groups for name in self._chunks(group, holder)]
        except CkptError as exc:
            ended(None, str(exc))
            return
        described = [each for giver in givers for each in self._described[giver]]
        where = Where(
            {giver: self._nodes[giver].addresses for giver in givers},
            {each.rank: giver for giver in givers for each in self._described[giver]},
            chunks,
        )
        fields = {
            "t": "stripe",
            "identity": str(self._identity),
            "world": sum(len(node.ranks) for node in self._nodes.values()),
            "safe": str(self._safe) if self._safe is not None else None,
            "needed": self._needed_at(holder),
        }
        self._parities.have(holder, fields, [where.encode(), encode_described(described)], ended)

    def _chunks(self, group: ParityGroup, holder: str) -> list[ParityChunkName]:
        """Which that node is to keep of a group's. Errors: UsageError."""
        sizes = [[(each.rank, each.staged_bytes) for each in self._described.get(name, ())] for name in group.members]
        return [
            ParityChunkName(self._identity, Row(row), striped)
            for striped, holders in stripes_of(group.stripes, sizes)
            for row, index in enumerate(holders)
            if group.members[index] == holder
        ]


def _holders(group: ParityGroup) -> set[str]:
    return {group.members[index] for stripe in group.stripes for index in stripe.holders}


def _givers(group: ParityGroup) -> set[str]:
    return {group.members[part.member] for stripe in group.stripes for part in stripe.parts}
