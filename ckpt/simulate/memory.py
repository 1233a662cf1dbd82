"""What memory holds in a simulated run, and what of it survives the loss of nodes.

A home is the set of nodes of one start, with the placement of their replicas. A saved state belongs to the home it was
taken on, until it is replicated on a later one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ckpt.placement.groups import PlacementNode
from ckpt.placement.placement import Parity, Placement, Replicas, place

STATE_BYTES, LENT_BYTES = 1 << 30, 1 << 50


@dataclass(slots=True, eq=False)
class Home:
    """The nodes of one start, by their id in the placement. `gone`: ids of those that were lost since."""

    ids: dict[str, str]
    placement: Placement | None  # None: there are no replicas
    gone: set[str] = field(default_factory=set)
    _replicas_survive: bool = True

    def lose(self, nodes: Iterable[str]) -> bool:
        """These nodes are gone. Whether any was of this home."""
        gone = {self.ids[node] for node in nodes if node in self.ids}
        if gone:
            self.gone |= gone
            self._replicas_survive = self.placement is not None and not self.placement.lost_nodes(self.gone)
        return bool(gone)

    def survives(self, is_replicated: bool) -> bool:
        return not self.gone or (is_replicated and self._replicas_survive)


def make_home(pools: dict[str, str], option: Replicas | Parity | None) -> Home:
    """The home of these nodes; by node the pool it is in. Nodes of one pool may be lost together."""
    members: dict[str, list[str]] = {}
    for node, pool in pools.items():
        members.setdefault(pool, []).append(node)
    by_size = sorted(members.values(), key=len)
    ids = {node: f"{i}.{j}" for i, nodes in enumerate(by_size) for j, node in enumerate(nodes)}
    sizes = tuple(len(nodes) for nodes in by_size)
    return Home(ids, None if option is None or len(ids) < 2 else _place(sizes, option))


@lru_cache(maxsize=4096)
def _place(sizes: Sequence[int], option: Replicas | Parity) -> Placement:
    """Nodes of a pool are alike, so the sizes of the pools say all. Memory suffices for whatever is asked."""
    nodes = [
        PlacementNode(f"{i}.{j}", STATE_BYTES, LENT_BYTES, (f"pool {i}",) if len(sizes) > 1 else ())
        for i, size in enumerate(sizes)
        for j in range(size)
    ]
    return place(nodes, option)


@dataclass(slots=True, eq=False)
class SavedState:
    """The state after a step, in memory or in the store. `ordinal`: its number among the snapshots of its branch.
    `useful_s`: seconds of training of the branch up to it. `home` None: it is only in the store."""

    steps: int
    useful_s: float
    ordinal: int
    home: Home | None
    is_replicated: bool = False

    @property
    def survives(self) -> bool:
        return self.home is not None and self.home.survives(self.is_replicated)


def lose_nodes(states: Collection[SavedState | None], home: Home | None, nodes: Collection[str]) -> bool:
    """The nodes are gone from every home that a state, or the job, is on. Whether any was."""
    homes = {id(each): each for each in (home, *(state.home for state in states if state is not None)) if each}
    return sum(each.lose(nodes) for each in homes.values()) > 0
