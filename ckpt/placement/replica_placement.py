"""Who keeps copies of whose state, within what each node lends.

Groups (placement/groups.py) say what is best; then room decides. At the end, for `place_copies`:
- a first copy of each state comes before a second of any, and so on;
- no copy is left out while a node that does not keep that state yet has room for it (it may exist all the same: packing
  states of different sizes at best is hard, and only one other copy is moved out of the way at a time);
- all copies of a state lie in its owner's domain, at any level, only where no node outside has room;
- a memory-only node that has room for the states of all keeps a copy of each, as many such nodes as there are copies:
  when every node that trains is lost it can bring all back, and commit it, where parts here and there could not. But
  one in a domain of a node that trains does so only where nobody outside that domain lends.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from ckpt.placement.groups import Ids, PlacementNode, grouped, levels, send_s, shared


def place_copies(
    nodes: Mapping[str, PlacementNode], room: dict[str, int], further: int, before: Sequence[Ids]
) -> tuple[list[Ids], dict[str, list[str]]]:
    """(the groups, each in the order of its ring; the holders of each node that trains), at most `further` each.

    `nodes` by id, sorted, at least one. `room`: bytes that each node has left for one generation; what is placed is
    taken from it.
    """
    wanted = min(further, len(nodes) - 1)
    plan = _Copies(nodes, room, wanted)
    whole = plan.keep_whole()
    rest = [node for id, node in nodes.items() if id not in whole]
    copies = min(wanted - len(whole), len(rest) - 1) + 1
    count = len(rest) // copies
    sizes = [copies] * (count - 1) + [len(rest) - copies * (count - 1)]
    groups = [plan.ring(group, copies) for group in grouped(rest, sizes, copies - 1, before)]
    for further_on in range(1, copies):  # a first copy of each before a second of any
        for group in groups:
            for i, owner in enumerate(group):
                if owner in plan.holders:
                    plan.keep_if_room(owner, group[(i + further_on) % len(group)])
        plan.fill(len(whole) + further_on)
    plan.settle()
    return [*groups, *((id,) for id in whole)], plan.holders


class _Copies:
    def __init__(self, nodes: Mapping[str, PlacementNode], room: dict[str, int], wanted: int) -> None:
        self.nodes = nodes
        self.room = room
        self.wanted = wanted
        self.depth = levels(nodes.values())
        self.usual = statistics.fmean([n.risk for n in nodes.values() if n.risk is not None] or [0.0])
        self.holders: dict[str, list[str]] = {node.id: [] for node in nodes.values() if node.trains}
        self.whole: list[str] = []  # memory-only nodes that keep a copy of each state

    def keep_whole(self) -> list[str]:
        """Those that do: the least likely to be lost first."""
        needed = sum(self.nodes[owner].bytes for owner in self.holders)
        stable = [node for node in self.nodes.values() if not node.trains and self.room[node.id] >= needed > 0]
        for node in sorted(stable, key=lambda node: (self.usual if node.risk is None else node.risk, node.id)):
            if len(self.whole) < self.wanted and self._is_apart(node):
                self.whole.append(node.id)
                for owner in self.holders:
                    self.keep_if_room(owner, node.id)
        return self.whole

    def _is_apart(self, node: PlacementNode) -> bool:
        """Whether it lies outside the domains of all that train, at each level, as far as anybody who lends does."""
        return all(
            node.domain(level) != self.nodes[owner].domain(level)
            or not any(self.nodes[id].domain(level) != node.domain(level) and self.room[id] for id in self.nodes)
            for level in range(self.depth)
            for owner in self.holders
        )

    def ring(self, group: Ids, copies: int) -> Ids:
        """The members in an order in which neighbours, as many as one state lies on, share few domains."""
        if len(group) <= copies:
            return group
        left, ring = list(group), list[str]()
        while left:
            closing = ring[: max(copies - len(left), 0)]  # the ring's beginning, as its end comes near
            near = [self.nodes[id] for id in (*(ring[1 - copies :] if copies > 1 else ()), *closing)]
            tops = [self.nodes[id].domain(0) for id in left]
            costs = [
                (shared([*near, self.nodes[id]], self.depth), -tops.count(top), id)
                for id, top in zip(left, tops, strict=True)
            ]
            ring.append(min(costs)[2])
            left.remove(ring[-1])
        return tuple(ring)

    def settle(self) -> None:
        """Copies that are missing, and copies that should lie elsewhere, until neither can be helped. Comes to an end:
        the number of copies only grows, between two that come in they are spread more evenly, and then each move leaves
        fewer domains exposed."""
        more = True
        while more:
            more = sum(self.fill(count) for count in range(1, self.wanted + 1)) > 0
            moved = 1
            while moved:
                moved = sum(self._one_outside(owner, at) for at in range(self.depth) for owner in self.holders)
                more = more or moved > 0

    def fill(self, count: int) -> int:
        """One more copy of each state that has less than so many, where one can be had; how many came."""
        by_size = sorted(self.holders, key=lambda id: -self.nodes[id].bytes)  # the largest is hardest to find room for
        return sum(len(self.holders[owner]) < count and self._one_more(owner) for owner in by_size)

    def keep_if_room(self, owner: str, holder: str) -> bool:
        if self.room[holder] < self.nodes[owner].bytes or holder in self.holders[owner]:
            return False
        self.room[holder] -= self.nodes[owner].bytes
        self.holders[owner].append(holder)
        return True

    def _one_more(self, owner: str) -> bool:
        """One more copy where one is missing: on a node with room, else where a copy of another state can make room, by
        lying elsewhere, or not at all where of that one there are two more."""
        size, count = self.nodes[owner].bytes, len(self.holders[owner])
        if free := self._with_room(owner):
            return self.keep_if_room(owner, self._best(owner, free))
        most = max(self.room.values())  # not one by one: of hundreds of nodes that takes a minute
        for elsewhere in (True, False):
            for other, held in self.holders.items():
                instead = self._with_room(other) if elsewhere and self.nodes[other].bytes <= most else []
                for holder in held if instead or not (elsewhere or len(held) < count + 2) else ():
                    if holder in self.whole:
                        continue
                    fits = self.room[holder] + self.nodes[other].bytes >= size
                    if fits and holder != owner and holder not in self.holders[owner]:
                        self._drop(other, holder)
                        if instead:
                            self.keep_if_room(other, self._best(other, instead))
                        return self.keep_if_room(owner, holder)
        return False

    def _one_outside(self, owner: str, level: int) -> bool:
        """Where all copies lie in the owner's domain, one moves out, if a node outside has room."""
        domain, held = self.nodes[owner].domain(level), self.holders[owner]
        if not held or any(self.nodes[id].domain(level) != domain for id in held):
            return False
        outside = [id for id in self._with_room(owner) if self.nodes[id].domain(level) != domain]
        if not outside:
            return False
        self._drop(owner, held[-1])
        return self.keep_if_room(owner, self._best(owner, outside))

    def _with_room(self, owner: str) -> list[str]:
        taken = {owner, *self.holders[owner]}
        return [id for id, room in self.room.items() if id not in taken and room >= self.nodes[owner].bytes]

    def _best(self, owner: str, among: Sequence[str]) -> str:
        """By domains shared with who has it already, risk, seconds, room left."""

        def strain(id: str) -> tuple[tuple[int, ...], float, float, int, str]:
            node = self.nodes[id]
            near = [self.nodes[other] for other in (owner, *self.holders[owner], id)]
            risk = self.usual if node.risk is None else node.risk
            return shared(near, self.depth), risk, send_s(self.nodes[owner], node), -self.room[id], id

        return min(among, key=strain)

    def _drop(self, owner: str, holder: str) -> None:
        self.holders[owner].remove(holder)
        self.room[holder] += self.nodes[owner].bytes
