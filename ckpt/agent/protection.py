"""Which nodes of a job keep copies of whose snapshots, and having them do so: the coordinator's side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt.agent.copies import Copies
from ckpt.agent.memory import MemoryPlan
from ckpt.agent.replicating import Replication
from ckpt.plan.groups import Node
from ckpt.plan.placement import GENERATIONS, Placement, Replicas, place
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.agent.arena import Arena
    from ckpt.agent.lenders import Lent
    from ckpt.agent.network import Network, NodeAt

SLOTS_MIN = 2  # fewer would have snapshots wait for their copies


class Protection:
    """Of one job. `nodes`: its nodes, this one first. `lenders`: the memory-only nodes that are there."""

    def __init__(
        self,
        network: Network,
        copies: Copies,
        nodes: Sequence[NodeAt],
        option: Replicas | None,
        lenders: Callable[[], Sequence[Lent]] = tuple,
    ) -> None:
        self.option = option
        self.placement: Placement | None = None
        self.risks: dict[str, float] = {}  # by node: the probability of its failure, where any is predicted
        self._lenders = lenders
        self._network, self._copies, self._nodes = network, copies, tuple(nodes)

    @property
    def protects(self) -> bool:
        """Whether anything is kept by another node."""
        return self.placement is not None and any(kept.holders for kept in self.placement.kept)

    def place(self, sizes: Mapping[str, int], plans: Mapping[str, MemoryPlan], fixed: int | None = None) -> int:
        """Decides who keeps whose, and for how many slots that leaves room. A third slot gives way to copies.

        `sizes`: bytes of one slot's arenas, by node; `plans`: what each node has room for, of which the least slots
        are used by all; `fixed`: so many slots are in use already."""
        slots = fixed if fixed is not None else min(plan.slots for plan in plans.values())
        if self.option is None or slots < SLOTS_MIN:
            self.placement = None
            return slots
        before = self.placement
        lenders = [
            Node(each.node.name, lend_bytes=each.lend_bytes, domains=each.node.domains, trains=False)
            for each in self._lenders()
        ]
        for wanted in range(slots, SLOTS_MIN - 1 if fixed is None else slots - 1, -1):
            nodes = [
                Node(
                    node.name,
                    bytes=sizes[node.name],
                    lend_bytes=plans[node.name].left_bytes(wanted),
                    domains=node.domains,
                    risk=self.risks.get(node.name),
                )
                for node in self._nodes
            ]
            nodes += lenders
            self.placement = place(nodes, self.option, before)
            possible = min(self.option.n, len(nodes) - 1)
            if all(each.got >= possible for each in self.placement.shortfalls):
                return wanted  # no more memory would make it any safer
        return slots if not self.protects else SLOTS_MIN

    def holders(self) -> dict[str, list[str]]:
        """By node: who keeps copies of its snapshots; "" is this one."""
        me = self._network.me
        kept = self.placement.kept if self.placement is not None else ()
        return {each.node: ["" if name == me else name for name in each.holders] for each in kept}

    def table(self) -> dict[str, Any]:
        """What it takes, for people: who keeps whose, bytes in memory and on the network for each checkpoint."""
        placement = self.placement
        if placement is None:
            return {"copies": None if self.option is None else self.option.n, "nodes": [], "shortfalls": []}
        holders = {kept.node: list(kept.holders) for kept in placement.kept}
        return {
            "copies": self.option.n if self.option is not None else 0,
            "nodes": [
                {
                    "node": load.node,
                    "kept_by": holders.get(load.node, []),
                    "own_bytes": load.own_bytes,
                    "keeps_bytes": load.keeps_all_bytes,
                    "sends_bytes": load.sends_bytes,
                    "receives_bytes": load.receives_bytes,
                }
                for load in placement.loads
            ],
            "generations": GENERATIONS,
            "shortfalls": [f"{each.node}: {each.got} of {each.asked}: {each.why}" for each in placement.shortfalls],
            "exposed": list(placement.exposed),
            "notes": list(placement.notes),
        }

    def describe(self) -> str:
        """In one line."""
        placement = self.placement
        if placement is None or not self.protects:
            short = placement.shortfalls if placement is not None else ()
            why = short[0].why if short else "they were not asked for, or there is too little memory"
            return f"no node keeps copies of another's snapshots: {why}"
        most = max(load.keeps_all_bytes for load in placement.loads)
        least = min(kept.losses for kept in placement.kept)
        text = f"any {least} of {len(placement.kept)} nodes may be lost" if least else "not every node has one"
        return f"copies: {text}; each node keeps up to {most >> 20:,} MiB for others"

    def replicate(
        self, identity: Identity, safe: Identity | None, own: Mapping[int, Arena], then: Callable[[str], None]
    ) -> None:
        """`safe`: the newest that is safe until now. `then` hears "" once every copy is where it should be, and right;
        or what went wrong."""
        assert self.placement is not None
        ranks = {node.name: node.ranks for node in self._nodes}
        wanted = {kept.node: (ranks[kept.node], kept.holders) for kept in self.placement.kept}
        nodes = [*self._nodes, *(each.node for each in self._lenders())]
        Replication(self._network, self._copies, nodes, wanted, identity, safe, own, then).begin()
