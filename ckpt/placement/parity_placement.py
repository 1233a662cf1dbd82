"""Which nodes keep parity together, within what each node lends.

Groups (placement/groups.py) of data + parity nodes, as many as need be. Where the numbers do not divide, groups are
shorter, as if members without data were missing, down to parity + 1 nodes: that takes more memory, parity / (nodes -
parity) of a state at each, and survives more. Where that memory is not lent, the groups are longer. A group that cannot
keep its parity even so is widened by other nodes with room as helpers (a memory-only node may help several), then keeps
one parity in place of two, then none. A checkpoint of which a single state has none is lost with its node: so where
some would have none, no group has more than one, and where that does not suffice either they are as long as it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt.placement.groups import Ids, PlacementNode, grouped, levels, shared
from ckpt.placement.stripes import Stripe, stripes


@dataclass(frozen=True, slots=True)
class ParityGroup:
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
    nodes: Mapping[str, PlacementNode], room: dict[str, int], data: int, parity: int, before: Sequence[Ids]
) -> list[ParityGroup]:
    """Every node in one group, and some as helpers in others. `nodes` by id, sorted. `room`: bytes that each node has
    left for one generation; what is placed is taken from it."""
    best: tuple[int, list[ParityGroup], dict[str, int]] | None = None
    for in_group, kept in _milder(data + parity, parity, len(nodes)):
        left = dict(room)
        found = _placed(nodes, left, in_group - kept, kept, before)
        bare = sum(nodes[id].bytes > 0 for group in found if not group.parity for id in group.home)
        if best is None or bare < best[0]:
            best = bare, found, left
        if not bare:
            break
    assert best is not None
    room.update(best[2])
    return best[1]


def _milder(whole: int, parity: int, count: int) -> Iterator[tuple[int, int]]:
    """How many nodes a group has, and how much parity: as asked for, then with less of it, then longer."""
    yield from ((whole, kept) for kept in range(parity, 0, -1))
    while whole < count:
        whole = min(2 * whole, count)
        yield whole, 1


def _placed(
    nodes: Mapping[str, PlacementNode], room: dict[str, int], data: int, parity: int, before: Sequence[Ids]
) -> list[ParityGroup]:
    """As much parity as can be of the groups one after the other."""
    whole = data + parity
    parity = min(parity, len(nodes) - 1)
    if parity < 1:
        return [ParityGroup((id,)) for id in nodes]
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


def _striped(
    nodes: Mapping[str, PlacementNode], room: Mapping[str, int], members: Ids, helpers: Ids, parity: int
) -> ParityGroup:
    """With as much parity as that, or none."""
    sizes = [0 if id in helpers else nodes[id].bytes for id in members]
    found = stripes(sizes, [room[id] for id in members], parity)
    return ParityGroup(members) if found is None else ParityGroup(members, parity, found, helpers)


def _helped(nodes: Mapping[str, PlacementNode], room: dict[str, int], group: ParityGroup, parity: int) -> ParityGroup:
    """With helpers, or less parity; taken from the room."""
    depth = levels(nodes.values())
    every = tuple(id for id, left in room.items() if left and id not in group.members)
    for fewer in range(parity, 0, -1):
        if not _striped(nodes, room, (*group.members, *every), every, fewer).parity:
            continue  # not one by one: of a hundred nodes that takes minutes
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


def _take(room: dict[str, int], group: ParityGroup) -> None:
    for stripe in group.stripes:
        for holder in stripe.holders:
            room[group.members[holder]] -= stripe.length
