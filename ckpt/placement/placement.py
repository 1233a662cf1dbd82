"""The placement of replicas: decides which nodes keep copies or parity of which node's state in memory. Pure.

Guarantees of `place`, for any number of nodes:
- Each node's state survives the loss of any `losses` nodes, its own among them; its `Kept` names the number. If that is
  less than requested, a Shortfall names the reason.
- A node keeps no replica of its own state, and never more than it lends (over all generations).
- A copy is left out only if no node has room for it. Parity is left out only if its group, widened by every node with
  room, cannot keep it.
- Memory goes evenly: each state gets a first copy before any gets a second, and each group one parity before any gets
  two. A checkpoint is lost with a node whose state has no replica. (With states of different sizes an existing solution
  may be missed, since packing is hard.)
- With copies, a memory-only node that lends enough keeps a copy of each state. If none does, a note says so.
- Nodes that may be lost together are kept apart as far as possible (placement/groups.py). With copies, one copy lies
  outside the owner's domain, at each level, wherever a node outside has room.
- The result does not depend on the order of the nodes. With `before` it is stable: a group whose nodes are all still
  there stays, unless group sizes have to change or another grouping is safer.

Copies: in a group of m = n + 1 nodes every node keeps the state of every other. If m does not divide the number of
nodes, the last group takes the rest and is a ring: each state lies on its owner and the next n nodes (the mixed
strategy of Gemini, Wang et al. 2023, SOSP). Memory-only nodes that keep a copy of every state are outside these groups;
each of them makes the groups smaller by one. Parity: groups of data + parity nodes keep parity of each other's states
(placement/parity_placement.py, placement/stripes.py). All other memory-only nodes are members without state.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt.errors import UsageError
from ckpt.placement.groups import Ids, PlacementNode, count_levels, send_s
from ckpt.placement.parity_placement import ParityGroup, place_parity
from ckpt.placement.replica_placement import place_replicas
from ckpt.placement.stripes import PARITY_MAX

GENERATIONS = 2  # one generation is kept until the next is complete in the whole group
NODES_MAX = 64  # the largest n, data or parity that an option may have


@dataclass(frozen=True, slots=True)
class Replicas:
    """The option to keep `n` further copies of each node's state, each on another node. Any n nodes may be lost.
    Errors: UsageError if n is out of range."""

    n: int = 1

    def __post_init__(self) -> None:
        _whole("ckpt.Replicas(n)", self.n, 1, NODES_MAX)


@dataclass(frozen=True, slots=True)
class Parity:
    """The option to keep parity: groups of `data` + `parity` nodes keep parity of each other's state.

    `parity`: 1 (XOR) or 2. Any `parity` nodes of a group may be lost. Parity takes `parity` / `data` of a state at each
    node: less memory than `parity` copies, but as much traffic. Errors: UsageError if a number is out of range."""

    data: int
    parity: int = 1

    def __post_init__(self) -> None:
        _whole("ckpt.Parity(data=)", self.data, 1, NODES_MAX)
        _whole("ckpt.Parity(parity=)", self.parity, 1, PARITY_MAX)


@dataclass(frozen=True, slots=True)
class Kept:
    """The protection of one node's state. `losses_max`: the number of nodes that may be lost, whichever they are, its
    own among them. `holders`: with Replicas, the nodes that keep its copies. With Parity see `Placement.groups`."""

    node: str
    losses_max: int
    holders: Ids = ()


@dataclass(frozen=True, slots=True)
class Load:
    """A node's part in one checkpoint, in bytes.

    `own_bytes`: its state. `keeps_bytes`, `keeps_all_bytes`: replicas that it keeps for others, of one generation and
    of all. `seconds`: the time that its link needs to send and receive; None if no link speed is known."""

    node: str
    own_bytes: int
    keeps_bytes: int
    keeps_all_bytes: int
    lend_bytes: int
    sends_bytes: int
    receives_bytes: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The state of `node` survives only `achieved` losses instead of the `requested` ones. `reason`: for people."""

    node: str
    requested: int
    achieved: int
    reason: str


@dataclass(frozen=True, slots=True)
class Placement:
    """The result of `place`.

    `protected_states`, `loads`, `shortfalls`: sorted by node. `exposed_domains`: domains ("site/rack") of several, but
    not all, nodes whose loss at once would lose state. `notes`: where groups differ from the option, for people."""

    option: Replicas | Parity
    protected_states: tuple[Kept, ...]
    groups: tuple[ParityGroup, ...]
    loads: tuple[Load, ...]
    shortfalls: tuple[Shortfall, ...]
    exposed_domains: tuple[str, ...]
    notes: tuple[str, ...]

    def lost_nodes(self, gone: Collection[str]) -> frozenset[str]:
        """Exactly the nodes whose state is lost when the `gone` nodes are lost at once."""
        return _lost_nodes(self.protected_states, self.groups, gone)


def place(
    nodes: Sequence[PlacementNode],
    option: Replicas | Parity,
    before: Placement | None = None,
    generations: int = GENERATIONS,
) -> Placement:
    """The placement of all nodes' states.

    `before`: the current placement, which may have another option. `generations`: how many checkpoints of other nodes a
    node keeps at once. Errors: UsageError if two nodes have one id."""
    by_id = {node.id: node for node in sorted(nodes, key=lambda node: node.id)}
    if len(by_id) != len(nodes):
        raise UsageError("two nodes have the same id")
    if not by_id:
        return Placement(option, (), (), (), (), (), ())
    lends = {id: node.lend_bytes // generations for id, node in by_id.items()}
    room = dict(lends)
    old = [group.home_members for group in before.groups] if before else []
    if isinstance(option, Replicas):
        members, holders = place_replicas(by_id, room, option.n, old)
        groups = [ParityGroup(ids) for ids in members]
        kept = [Kept(owner, len(held), tuple(held)) for owner, held in holders.items()]
        asked = option.n
    else:
        groups = place_parity(by_id, room, option.data, option.parity, old)
        losses = {owner: group.parity for group in groups for owner in group.home_members}
        kept = [Kept(id, losses[id]) for id, node in by_id.items() if node.has_state]
        asked = option.parity
    return Placement(
        option,
        tuple(kept),
        tuple(groups),
        tuple(_loads(by_id, {id: lends[id] - left for id, left in room.items()}, generations, kept, groups)),
        tuple(_shortfalls(by_id, kept, asked)),
        tuple(_exposed(by_id, kept, groups)),
        (*_notes(option, groups), *(_memory_only_notes(by_id, kept) if isinstance(option, Replicas) else ())),
    )


def _lost_nodes(kept: Sequence[Kept], groups: Sequence[ParityGroup], gone: Collection[str]) -> frozenset[str]:
    gone = frozenset(gone)
    found = {state.node for state in kept if state.node in gone and gone.issuperset(state.holders)}
    safe: set[str] = set()
    for group in groups:
        if group.parity:
            away = {index for index, id in enumerate(group.members) if id in gone}
            bad = {
                part.member
                for stripe in group.stripes
                if len(away.intersection(stripe.holders)) + sum(p.member in away for p in stripe.parts) > group.parity
                for part in stripe.parts
            }
            safe.update(id for index, id in enumerate(group.members) if index not in bad and id in group.home_members)
    return frozenset(found - safe)


def _shortfalls(nodes: Mapping[str, PlacementNode], kept: Sequence[Kept], asked: int) -> Iterator[Shortfall]:
    possible = min(asked, len(nodes) - 1)
    for state in kept:
        if state.losses_max < possible:
            needed = nodes[state.node].state_bytes >> 20
            why = f"the nodes have too little memory for a replica of {needed:,} MiB beside their own state: "
            why += "raise ckpt.Limits(memory=) if it is set, free or lend more memory, or ask for fewer replicas"
            yield Shortfall(state.node, asked, state.losses_max, why)
        elif state.losses_max < asked:
            why = "there is no other node" if len(nodes) == 1 else f"there are only {len(nodes)} nodes"
            yield Shortfall(state.node, asked, state.losses_max, why)


def _notes(option: Replicas | Parity, groups: Sequence[ParityGroup]) -> Iterator[str]:
    for group in groups:
        names = ", ".join(group.members)
        if isinstance(option, Replicas):
            if len(group.members) > option.n + 1:
                yield f"these nodes form a ring instead of groups of {option.n + 1}: {names}"
        elif group.parity:
            if group.helpers:
                members, helpers = ", ".join(group.home_members), ", ".join(group.helpers)
                yield f"memory is short: parity of {members} also lies on {helpers}"
            elif len(group.members) != option.data + option.parity:
                what = f"{len(group.members) - group.parity} + {group.parity}"
                yield f"a group has {what} nodes instead of {option.data} + {option.parity}: {names}"


def _memory_only_notes(nodes: Mapping[str, PlacementNode], kept: Sequence[Kept]) -> Iterator[str]:
    """A note if there are memory-only nodes, but none of them keeps a copy of every state."""
    stable = [node for node in nodes.values() if not node.has_state]
    if len(kept) > 1 and stable and not any(all(node.id in state.holders for state in kept) for node in stable):
        needed, most = sum(nodes[state.node].state_bytes for state in kept), max(node.lend_bytes for node in stable)
        yield (
            f"no memory-only node keeps all {needed >> 20:,} MiB of state, so none can restore or commit it alone. Let "
            f"one lend {GENERATIONS} times as much, outside the failure domains of the others (the most that one lends "
            f"is {most >> 20:,} MiB)"
        )


def _loads(
    nodes: Mapping[str, PlacementNode],
    keeps: Mapping[str, int],
    generations: int,
    kept: Sequence[Kept],
    groups: Sequence[ParityGroup],
) -> Iterator[Load]:
    sends, receives = dict.fromkeys(nodes, 0), dict.fromkeys(nodes, 0)
    longest: dict[str, float] = {}
    for sender, receiver, nbytes in _flows(nodes, kept, groups):
        sends[sender] += nbytes
        receives[receiver] += nbytes
        for id in (sender, receiver):
            longest[id] = max(longest.get(id, 0.0), send_s(nodes[sender], nodes[receiver], nbytes))
    for id, node in nodes.items():
        own_s = max(sends[id], receives[id]) / node.link_bytes_s if node.link_bytes_s else 0.0
        yield Load(
            id,
            node.state_bytes,
            keeps[id],
            keeps[id] * generations,
            node.lend_bytes,
            sends[id],
            receives[id],
            max(longest.get(id, 0.0), own_s) or None,
        )


def _flows(
    nodes: Mapping[str, PlacementNode], kept: Sequence[Kept], groups: Sequence[ParityGroup]
) -> Iterator[tuple[str, str, int]]:
    """The transfers of one checkpoint: (sender, receiver, bytes)."""
    for state in kept:
        for holder in state.holders:
            yield state.node, holder, nodes[state.node].state_bytes
    for group in groups:
        for stripe in group.stripes:
            for part, index in itertools.product(stripe.parts, stripe.holders):
                yield group.members[part.member], group.members[index], part.stop - part.start


def _exposed(nodes: Mapping[str, PlacementNode], kept: Sequence[Kept], groups: Sequence[ParityGroup]) -> Iterator[str]:
    for level in range(count_levels(nodes.values())):
        domains: dict[Ids, list[str]] = {}
        for node in nodes.values():
            if level < len(node.domains):
                domains.setdefault(node.domain(level), []).append(node.id)
        for domain, members in sorted(domains.items()):
            if 1 < len(members) < len(nodes) and _lost_nodes(kept, groups, members):
                yield "/".join(domain)


def _whole(what: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UsageError(f"{what}: {value!r} is not a whole number from {least} to {most}")


ONE_REPLICA = Replicas(1)  # the default, where there are several nodes
