"""The placement of parity: decides which nodes form parity groups, within the memory that they lend.

The groups (placement/groups.py) have data + parity nodes. If the number of nodes does not divide, groups are shorter,
down to parity + 1 nodes. A short group needs more memory, parity / (nodes - parity) of a state at each node, and
survives more. If that memory is not lent, the groups are longer. If a group still cannot keep its parity, these steps
follow until it can:
1. Other nodes with room join as helpers. A memory-only node may help several groups.
2. The group keeps one parity instead of two.
3. The group keeps none.
A checkpoint is lost with any node whose state has no parity. So if some group would have none, no group gets more than
one parity. If this does not suffice, all groups become as long as necessary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt.placement.groups import Ids, PlacementNode, count_levels, group_nodes, shared_domain_pairs
from ckpt.placement.stripes import Stripe, plan_stripes


@dataclass(frozen=True, slots=True)
class ParityGroup:
    """A group of nodes. With parity, any `parity` of its members may be lost.

    `stripes`: the parity that each member keeps, by index into `members`, for the planned sizes. `rebuild.stripes_of`
    fits them to the sizes of a checkpoint. `helpers`: members that only keep parity; their own state is in another
    group."""

    members: Ids
    parity: int = 0
    stripes: tuple[Stripe, ...] = ()
    helpers: Ids = ()

    @property
    def home_members(self) -> Ids:
        """The members whose own state is in this group."""
        return tuple(id for id in self.members if id not in self.helpers)


def place_parity(
    nodes: Mapping[str, PlacementNode], room: dict[str, int], data: int, parity: int, before: Sequence[Ids]
) -> list[ParityGroup]:
    """The parity groups. Every node is in one group, and may be a helper in others. `nodes`: by id, sorted. `room`:
    free bytes of each node for one generation; placed parity is subtracted from it. `before`: the current groups."""
    best: tuple[int, list[ParityGroup], dict[str, int]] | None = None
    for in_group, kept in _fallback_options(data + parity, parity, len(nodes)):
        left = dict(room)
        found = _place_groups(nodes, left, in_group - kept, kept, before)
        bare = sum(nodes[id].state_bytes > 0 for group in found if not group.parity for id in group.home_members)
        if best is None or bare < best[0]:
            best = bare, found, left
        if not bare:
            break
    assert best is not None
    room.update(best[2])
    return best[1]


def _fallback_options(whole: int, parity: int, count: int) -> Iterator[tuple[int, int]]:
    """The options to try, as (nodes of a group, parity): as requested, then with less parity, then longer groups."""
    yield from ((whole, kept) for kept in range(parity, 0, -1))
    while whole < count:
        whole = min(2 * whole, count)
        yield whole, 1


def _place_groups(
    nodes: Mapping[str, PlacementNode], room: dict[str, int], data: int, parity: int, before: Sequence[Ids]
) -> list[ParityGroup]:
    """The groups with as much parity as possible, from one size of groups. Takes the memory from `room`."""
    whole = data + parity
    parity = min(parity, len(nodes) - 1)
    if parity < 1:
        return [ParityGroup((id,)) for id in nodes]
    short = min(-(-len(nodes) // whole), len(nodes) // (parity + 1))
    attempts = []
    for count in range(short, max(len(nodes) // whole, 1) - 1, -1):
        each, more = divmod(len(nodes), count)
        members = group_nodes(list(nodes.values()), [each + (g < more) for g in range(count)], before)
        attempts.append([_with_stripes(nodes, room, group, (), parity) for group in members])
    found = next((groups for groups in attempts if all(group.parity for group in groups)), attempts[0])
    for group in found:
        _reserve_room(room, group)
    return [group if group.parity else _with_helpers(nodes, room, group, parity) for group in found]


def _with_stripes(
    nodes: Mapping[str, PlacementNode], room: Mapping[str, int], members: Ids, helpers: Ids, parity: int
) -> ParityGroup:
    """The group with `parity`, or without any if the room does not suffice."""
    sizes = [0 if id in helpers else nodes[id].state_bytes for id in members]
    found = plan_stripes(sizes, [room[id] for id in members], parity)
    return ParityGroup(members) if found is None else ParityGroup(members, parity, found, helpers)


def _with_helpers(
    nodes: Mapping[str, PlacementNode], room: dict[str, int], group: ParityGroup, parity: int
) -> ParityGroup:
    """The group with helpers, or with less parity. Takes the memory from `room`."""
    depth = count_levels(nodes.values())
    every = tuple(id for id, left in room.items() if left and id not in group.members)
    for fewer in range(parity, 0, -1):
        # A quick test with all helpers at once: adding them one by one would take minutes for a hundred nodes.
        if not _with_stripes(nodes, room, (*group.members, *every), every, fewer).parity:
            continue
        members, helpers = group.members, Ids()
        found = _with_stripes(nodes, room, members, helpers, fewer)
        while not found.parity:
            free = [id for id, left in room.items() if left and id not in members]
            if not free:
                break
            near = [nodes[id] for id in members]
            best = min((shared_domain_pairs([*near, nodes[id]], depth), -room[id], id) for id in free)[2]
            members, helpers = (*members, best), (*helpers, best)
            found = _with_stripes(nodes, room, members, helpers, fewer)
        if found.parity:
            _reserve_room(room, found)
            return found
    return group


def _reserve_room(room: dict[str, int], group: ParityGroup) -> None:
    for stripe in group.stripes:
        for holder in stripe.holders:
            room[group.members[holder]] -= stripe.length
