"""The placement of copies: decides which nodes keep copies of which node's state, within the memory that they lend.

The groups (placement/groups.py) propose holders; then free memory decides. Guarantees of `place_replicas`:
- Each state gets a first copy before any gets a second, and so on.
- A copy is left out only if no further node has room for it. (A better packing may exist: packing states of different
  sizes is hard, and only one other copy is moved out of the way at a time.)
- All copies of a state lie in its owner's domain, at any level, only if no node outside has room.
- A memory-only node with room for all states keeps a copy of each; as many nodes do so as there are copies. If all
  nodes that train are lost, such a node can restore and commit the whole checkpoint, which scattered copies could not.
  A node that shares a domain with a node that trains does this only if no node outside that domain lends memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt.placement.groups import Ids, PlacementNode, count_levels, group_nodes, send_s, shared_domain_pairs


def place_replicas(
    nodes: Mapping[str, PlacementNode], room: dict[str, int], further: int, before: Sequence[Ids]
) -> tuple[list[Ids], dict[str, list[str]]]:
    """(the groups, each in the order of its ring; by node that trains, the holders of its copies, at most `further`).

    `nodes`: by id, sorted, at least one. `room`: free bytes of each node for one generation; placed copies are
    subtracted from it. `before`: the current groups.
    """
    wanted = min(further, len(nodes) - 1)
    plan = _Copies(nodes, room, wanted)
    whole = plan.choose_full_holders()
    rest = [node for id, node in nodes.items() if id not in whole]
    copies = min(wanted - len(whole), len(rest) - 1) + 1
    count = len(rest) // copies
    sizes = [copies] * (count - 1) + [len(rest) - copies * (count - 1)]
    groups = [plan.order_ring(group, copies) for group in group_nodes(rest, sizes, before)]
    # Each state gets a first copy before any gets a second.
    for further_on in range(1, copies):
        for group in groups:
            for i, owner in enumerate(group):
                if owner in plan.holders:
                    plan.add_if_room(owner, group[(i + further_on) % len(group)])
        plan.add_replicas(len(whole) + further_on)
    plan.balance_replicas()
    return [*groups, *((id,) for id in whole)], plan.holders


class _Copies:
    """The placement under way: the holders of each state, and the room that is left."""

    def __init__(self, nodes: Mapping[str, PlacementNode], room: dict[str, int], wanted: int) -> None:
        self.nodes = nodes
        self.room = room
        self.replicas_wanted = wanted
        self.depth = count_levels(nodes.values())
        self.holders: dict[str, list[str]] = {node.id: [] for node in nodes.values() if node.has_state}
        self.full_holders: list[str] = []  # memory-only nodes that keep a copy of every state

    def choose_full_holders(self) -> list[str]:
        """Chooses the memory-only nodes that keep a copy of every state."""
        needed = sum(self.nodes[owner].state_bytes for owner in self.holders)
        stable = [node for node in self.nodes.values() if not node.has_state and self.room[node.id] >= needed > 0]
        for node in sorted(stable, key=lambda node: node.id):
            if len(self.full_holders) < self.replicas_wanted and self._shares_no_domain(node):
                self.full_holders.append(node.id)
                for owner in self.holders:
                    self.add_if_room(owner, node.id)
        return self.full_holders

    def _shares_no_domain(self, node: PlacementNode) -> bool:
        """Whether the node shares no domain with a node that trains, except a domain outside which no node lends."""
        return all(
            node.domain(level) != self.nodes[owner].domain(level)
            or not any(self.nodes[id].domain(level) != node.domain(level) and self.room[id] for id in self.nodes)
            for level in range(self.depth)
            for owner in self.holders
        )

    def order_ring(self, group: Ids, copies: int) -> Ids:
        """The members, ordered so that any `copies` neighbours, which hold one state, share few domains."""
        if len(group) <= copies:
            return group
        left, ring = list(group), list[str]()
        while left:
            # Near its end the ring has its beginning as a neighbour.
            closing = ring[: max(copies - len(left), 0)]
            near = [self.nodes[id] for id in (*(ring[1 - copies :] if copies > 1 else ()), *closing)]
            tops = [self.nodes[id].domain(0) for id in left]
            costs = [
                (shared_domain_pairs([*near, self.nodes[id]], self.depth), -tops.count(top), id)
                for id, top in zip(left, tops, strict=True)
            ]
            ring.append(min(costs)[2])
            left.remove(ring[-1])
        return tuple(ring)

    def balance_replicas(self) -> None:
        """Adds missing copies, and moves copies out of the owner's domain, until neither is possible.

        It ends: the number of copies never falls. While it stays the same, copies get spread more evenly, and after
        that each move leaves fewer domains exposed."""
        more = True
        while more:
            more = sum(self.add_replicas(count) for count in range(1, self.replicas_wanted + 1)) > 0
            moved = 1
            while moved:
                moved = sum(self._move_outside(owner, at) for at in range(self.depth) for owner in self.holders)
                more = more or moved > 0

    def add_replicas(self, count: int) -> int:
        """Adds one copy to each state that has fewer than `count`, if possible. Returns how many were added."""
        # The largest state comes first, since room for it is hardest to find.
        by_size = sorted(self.holders, key=lambda id: -self.nodes[id].state_bytes)
        return sum(len(self.holders[owner]) < count and self._add_replica(owner) for owner in by_size)

    def add_if_room(self, owner: str, holder: str) -> bool:
        if self.room[holder] < self.nodes[owner].state_bytes or holder in self.holders[owner]:
            return False
        self.room[holder] -= self.nodes[owner].state_bytes
        self.holders[owner].append(holder)
        return True

    def _add_replica(self, owner: str) -> bool:
        """Adds one copy of the owner's state: on a node with room, else in place of a copy of another state.

        The other copy moves to another node. If it cannot, it is dropped, but only if its state has at least two copies
        more than the owner's."""
        size, count = self.nodes[owner].state_bytes, len(self.holders[owner])
        if free := self._nodes_with_room(owner):
            return self.add_if_room(owner, self._best_holder(owner, free))
        # A quick test with the largest room: looking at each node would take a minute for hundreds of nodes.
        most = max(self.room.values())
        for elsewhere in (True, False):
            for other, held in self.holders.items():
                instead = self._nodes_with_room(other) if elsewhere and self.nodes[other].state_bytes <= most else []
                for holder in held if instead or not (elsewhere or len(held) < count + 2) else ():
                    if holder in self.full_holders:
                        continue
                    fits = self.room[holder] + self.nodes[other].state_bytes >= size
                    if fits and holder != owner and holder not in self.holders[owner]:
                        self._drop_replica(other, holder)
                        if instead:
                            self.add_if_room(other, self._best_holder(other, instead))
                        return self.add_if_room(owner, holder)
        return False

    def _move_outside(self, owner: str, level: int) -> bool:
        """Moves one copy out of the owner's domain if all lie in it and a node outside has room. Whether it did."""
        domain, held = self.nodes[owner].domain(level), self.holders[owner]
        if not held or any(self.nodes[id].domain(level) != domain for id in held):
            return False
        outside = [id for id in self._nodes_with_room(owner) if self.nodes[id].domain(level) != domain]
        if not outside:
            return False
        self._drop_replica(owner, held[-1])
        return self.add_if_room(owner, self._best_holder(owner, outside))

    def _nodes_with_room(self, owner: str) -> list[str]:
        taken = {owner, *self.holders[owner]}
        return [id for id, room in self.room.items() if id not in taken and room >= self.nodes[owner].state_bytes]

    def _best_holder(self, owner: str, among: Sequence[str]) -> str:
        """The best new holder: by domains shared with the owner and the holders, then seconds, and room left."""

        def strain(id: str) -> tuple[tuple[int, ...], float, int, str]:
            node = self.nodes[id]
            near = [self.nodes[other] for other in (owner, *self.holders[owner], id)]
            return shared_domain_pairs(near, self.depth), send_s(self.nodes[owner], node), -self.room[id], id

        return min(among, key=strain)

    def _drop_replica(self, owner: str, holder: str) -> None:
        self.holders[owner].remove(holder)
        self.room[holder] += self.nodes[owner].state_bytes
