"""Which nodes keep parity together, within what each node lends.

Groups (plan/groups.py) of data + parity nodes, as many as need be. Where the numbers do not divide, groups are shorter,
as if members without data were missing, down to parity + 1 nodes: that takes more memory, parity / (nodes - parity)
of a state at each, and survives more. Where that memory is not lent, the groups are longer. A group that cannot keep
its parity even so is widened by other nodes with room as helpers (a memory-only node may help several), then keeps
one parity in place of two, then none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt.plan.groups import Ids, Node, grouped, levels, shared
from ckpt.plan.stripes import Stripe, stripes


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that were put together. With parity: of which any `parity` may be lost; `stripes` says who keeps what,
    by index into `members`, for the sizes that were given. A checkpoint's stripes are made anew from its own sizes,
    by plan.stripes. `helpers`: members that keep parity here, and whose own state is in another group."""

    members: Ids
    parity: int = 0
    stripes: tuple[Stripe, ...] = ()
    helpers: Ids = ()

    @property
    def home(self) -> Ids:
        """The members whose own state is in this group."""
        return tuple(id for id in self.members if id not in self.helpers)


def place_parity(
    nodes: Mapping[str, Node], room: dict[str, int], data: int, parity: int, before: Sequence[Ids]
) -> list[Group]:
    """Every node in one group, and some as helpers in others. `nodes` by id, sorted. `room`: bytes that each node has
    left for one generation; what is placed is taken from it."""
    whole = data + parity
    parity = min(parity, len(nodes) - 1)
    if parity < 1:
        return [Group((id,)) for id in nodes]
    short = min(-(-len(nodes) // whole), len(nodes) // (parity + 1))
    attempts = []
    for count in range(short, max(len(nodes) // whole, 1) - 1, -1):
        each, more = divmod(len(nodes), count)
        members = grouped(list(nodes.values()), [each + (g < more) for g in range(count)], parity, before)
        attempts.append([_striped(nodes, room, group, (), parity) for group in members])
    found = next((groups for groups in attempts if all(group.parity for group in groups)), attempts[0])
    for group in found:
        _take(room, group)
    return [group if group.parity else _helped(nodes, room, group, parity) for group in found]


def _striped(nodes: Mapping[str, Node], room: Mapping[str, int], members: Ids, helpers: Ids, parity: int) -> Group:
    """With as much parity as that, or none."""
    sizes = [0 if id in helpers else nodes[id].bytes for id in members]
    found = stripes(sizes, [room[id] for id in members], parity)
    return Group(members) if found is None else Group(members, parity, found, helpers)


def _helped(nodes: Mapping[str, Node], room: dict[str, int], group: Group, parity: int) -> Group:
    """With helpers, or less parity; taken from the room."""
    depth = levels(nodes.values())
    for fewer in range(parity, 0, -1):
        members, helpers = group.members, Ids()
        found = _striped(nodes, room, members, helpers, fewer)
        while not found.parity:
            free = [id for id, left in room.items() if left and id not in members]
            if not free:
                break
            near = [nodes[id] for id in members]
            best = min((shared([*near, nodes[id]], depth), -room[id], id) for id in free)[2]
            members, helpers = (*members, best), (*helpers, best)
            found = _striped(nodes, room, members, helpers, fewer)
        if found.parity:
            _take(room, found)
            return found
    return group


def _take(room: dict[str, int], group: Group) -> None:
    for stripe in group.stripes:
        for holder in stripe.holders:
            room[group.members[holder]] -= stripe.length
