"""Which nodes keep which node's state in memory: the options, and the one pure function that answers.

Guarantees of `place`, for any number of nodes:
- each node's state survives the loss of any `losses` nodes, its own among them, as its `Kept` says; where that is
  less than was asked for, a Shortfall says so, with the reason;
- nobody keeps its own state for others, or more than it lends (in all generations at once);
- no copy is left out while some node has room for it; parity is left out only where its group, widened by every node
  with room, cannot keep it;
- what is lent goes evenly: a first copy of each state comes before a second of any, and one parity of all before two of
  some, for a checkpoint of which one state is kept by nobody is lost with its node (packing is hard: where states
  differ in size it may be missed);
- with copies, a memory-only node that lends enough keeps one of each state; where none does a note says so;
- what is lost together is apart as far as can be (placement/groups.py); with copies, one lies outside the owner's
  domain, at each level, wherever a node outside has room;
- deterministic, whatever the order of the nodes; with `before`, stable: a group whose nodes are all still there stays
  as it is, unless sizes have to change or all could be safer otherwise.

Copies: groups of m = n + 1 nodes in which everyone keeps everyone's state; where m does not divide the number of
nodes, the last group takes in the rest and is a ring, each state on its owner and the next n (the mixed strategy of
Gemini, Wang et al. 2023, SOSP). Memory-only nodes that keep a copy of everything are no part of these groups, and each
makes them smaller by one. Parity: groups of data + parity nodes that keep parity of each other's states
(placement/parity_placement.py, placement/stripes.py). Other memory-only nodes are members that have nothing to lose.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt.errors import UsageError
from ckpt.placement.groups import Ids, PlacementNode, levels, send_s
from ckpt.placement.parity_placement import ParityGroup, place_parity
from ckpt.placement.replica_placement import place_copies
from ckpt.placement.stripes import PARITY_MAX

GENERATIONS = 2  # one is kept until the next is complete in the whole group
NODES_MAX = 64  # of a group as it is asked for
_GENERATIONS_MAX = 16
SPARED_MAX = 3  # that are tried one after the other: each takes as long as `place`


@dataclass(frozen=True, slots=True)
class Replicas:
    """`n` further copies of each node's state, each on another node. Any n nodes may be lost. Errors: UsageError."""

    n: int = 1

    def __post_init__(self) -> None:
        _whole("ckpt.Replicas(n)", self.n, 1, NODES_MAX)


@dataclass(frozen=True, slots=True)
class Parity:
    """Groups of `data` + `parity` nodes keep parity of each other's state (1: XOR; 2: two parities), which takes
    `parity` / `data` of a state at each of them. Any `parity` nodes of a group may be lost. It saves memory against
    `parity` copies, not traffic. Errors: UsageError."""

    data: int
    parity: int = 1

    def __post_init__(self) -> None:
        _whole("ckpt.Parity(data=)", self.data, 1, NODES_MAX)
        _whole("ckpt.Parity(parity=)", self.parity, 1, PARITY_MAX)


@dataclass(frozen=True, slots=True)
class Kept:
    """One node's state: how many losses of any nodes, its own among them, it survives; and, with Replicas, the
    `holders` of its copies. Where it is striped, `Placement.groups` says."""

    node: str
    losses: int
    holders: Ids = ()


@dataclass(frozen=True, slots=True)
class Load:
    """A node's part in one checkpoint, bytes: its own state; what it keeps for others, of one generation and of all;
    what it lends; what it sends and receives. And the seconds that its link needs for that: None where neither its
    own speed nor that of whom it exchanges with is known."""

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
    """`node`'s state survives `got` losses where `asked` were asked for, and why."""

    node: str
    asked: int
    got: int
    why: str


@dataclass(frozen=True, slots=True)
class Placement:
    """`kept`, `loads`, `shortfalls`: sorted by node. `exposed`: domains ("site/rack") of several nodes whose loss at
    once, with nodes left elsewhere, would lose state. `notes`: where groups are not as asked for, for people."""

    option: Replicas | Parity
    kept: tuple[Kept, ...]
    groups: tuple[ParityGroup, ...]
    loads: tuple[Load, ...]
    shortfalls: tuple[Shortfall, ...]
    exposed: tuple[str, ...]
    notes: tuple[str, ...]

    def lost(self, gone: Collection[str]) -> frozenset[str]:
        """The nodes whose state is lost when these nodes are lost at once, exactly."""
        return _lost(self.kept, self.groups, gone)


def place(
    nodes: Sequence[PlacementNode],
    option: Replicas | Parity,
    before: Placement | None = None,
    generations: int = GENERATIONS,
) -> Placement:
    """Who keeps whose state. `before`: what was placed until now, under whichever option. `generations`: how many
    checkpoints of others a node keeps at once.

    Errors: UsageError where two nodes have one id."""
    return _place(nodes, option, before, generations, frozenset())


def _place(
    nodes: Sequence[PlacementNode],
    option: Replicas | Parity,
    before: Placement | None,
    generations: int,
    spared: Collection[str],
) -> Placement:
    """`spared`: those that keep nothing, whatever they lend."""
    _whole("generations", generations, 1, _GENERATIONS_MAX)
    by_id = {node.id: node for node in sorted(nodes, key=lambda node: node.id)}
    if len(by_id) != len(nodes):
        raise UsageError("two nodes have the same id")
    if not by_id:
        return Placement(option, (), (), (), (), (), ())
    lends = {id: 0 if id in spared else node.lend_bytes // generations for id, node in by_id.items()}
    room = dict(lends)
    old = [group.home for group in before.groups] if before else []
    if isinstance(option, Replicas):
        members, holders = place_copies(by_id, room, option.n, old)
        groups = [ParityGroup(ids) for ids in members]
        kept = [Kept(owner, len(held), tuple(held)) for owner, held in holders.items()]
        asked = option.n
    else:
        groups = place_parity(by_id, room, option.data, option.parity, old)
        losses = {owner: group.parity for group in groups for owner in group.home}
        kept = [Kept(id, losses[id]) for id, node in by_id.items() if node.trains]
        asked = option.parity
    return Placement(
        option,
        tuple(kept),
        tuple(groups),
        tuple(_loads(by_id, {id: lends[id] - left for id, left in room.items()}, generations, kept, groups)),
        tuple(_shortfalls(by_id, kept, asked)),
        tuple(_exposed(by_id, kept, groups)),
        (*_notes(option, groups), *(_partial(by_id, kept) if isinstance(option, Replicas) else ())),
    )


def place_sparing(
    nodes: Sequence[PlacementNode],
    option: Replicas | Parity,
    spared: Sequence[str],
    before: Placement | None = None,
    generations: int = GENERATIONS,
) -> Placement:
    """As `place`, but these nodes keep no copies, all or else as many of the first SPARED_MAX as can be, in that order:
    as long as each state survives as many losses, and no state is lost with a domain, or with these nodes at once, that
    would not be so otherwise. With parity it is `place`: there every member's own state is needed to make the others'
    again, whoever keeps the parity.

    Errors: UsageError, as `place`."""
    chosen = place(nodes, option, before, generations)
    if not spared or not isinstance(option, Replicas):
        return chosen
    together = [*(members for _, members in _lost_at_once(nodes)), spared]
    found = _place(nodes, option, before, generations, spared)
    if _is_as_safe(found, chosen, together):
        return found
    done: list[str] = []
    for id in spared[:SPARED_MAX] if len(spared) > 1 else ():
        found = _place(nodes, option, before, generations, [*done, id])
        if _is_as_safe(found, chosen, together):
            done.append(id)
            chosen = found
    return chosen


def _is_as_safe(one: Placement, other: Placement, together: Sequence[Collection[str]]) -> bool:
    """For each state. `together`: nodes that may be lost at once."""
    survives = all(a.losses >= b.losses for a, b in zip(one.kept, other.kept, strict=True))
    return survives and all(one.lost(gone) <= other.lost(gone) for gone in together)


def _lost(kept: Sequence[Kept], groups: Sequence[ParityGroup], gone: Collection[str]) -> frozenset[str]:
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
            safe.update(id for index, id in enumerate(group.members) if index not in bad and id in group.home)
    return frozenset(found - safe)


def _shortfalls(nodes: Mapping[str, PlacementNode], kept: Sequence[Kept], asked: int) -> Iterator[Shortfall]:
    possible = min(asked, len(nodes) - 1)
    for state in kept:
        if state.losses < possible:
            needed = nodes[state.node].bytes >> 20
            why = f"the nodes have too little memory for {needed:,} MiB of another's state beside their own: "
            why += "raise ckpt.Limits(memory=) if it is set, free or lend more, or ask for less"
            yield Shortfall(state.node, asked, state.losses, why)
        elif state.losses < asked:
            why = "there is no other node" if len(nodes) == 1 else f"there are only {len(nodes)} nodes"
            yield Shortfall(state.node, asked, state.losses, why)


def _notes(option: Replicas | Parity, groups: Sequence[ParityGroup]) -> Iterator[str]:
    for group in groups:
        names = ", ".join(group.members)
        if isinstance(option, Replicas):
            if len(group.members) > option.n + 1:
                yield f"a ring instead of groups of {option.n + 1}: {names}"
        elif group.parity:
            if group.helpers:
                yield f"for want of memory, parity of {', '.join(group.home)} also lies on {', '.join(group.helpers)}"
            elif len(group.members) != option.data + option.parity:
                what = f"{len(group.members) - group.parity} + {group.parity}"
                yield f"a group of {what} nodes, not {option.data} + {option.parity}: {names}"


def _partial(nodes: Mapping[str, PlacementNode], kept: Sequence[Kept]) -> Iterator[str]:
    """Memory-only nodes are there, and none of them keeps all."""
    stable = [node for node in nodes.values() if not node.trains]
    if len(kept) > 1 and stable and not any(all(node.id in state.holders for state in kept) for node in stable):
        needed, most = sum(nodes[state.node].bytes for state in kept), max(node.lend_bytes for node in stable)
        yield (
            f"no memory-only node keeps all {needed >> 20:,} MiB of state, so none can bring it back or commit it "
            f"alone: one has to lend {GENERATIONS} times that (at most {most >> 20:,} MiB are lent), and lie in no "
            "domain of the others"
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
        a, b = nodes[sender], nodes[receiver]
        if a.up_bytes_s is not None or b.down_bytes_s is not None:
            for id in (sender, receiver):
                longest[id] = max(longest.get(id, 0.0), send_s(a, b, nbytes))
    for id, node in nodes.items():
        times = [longest[id]] if id in longest else []
        times += [] if node.up_bytes_s is None else [sends[id] / node.up_bytes_s]
        times += [] if node.down_bytes_s is None else [receives[id] / node.down_bytes_s]
        yield Load(
            id,
            node.bytes,
            keeps[id],
            keeps[id] * generations,
            node.lend_bytes,
            sends[id],
            receives[id],
            max(times, default=None),
        )


def _flows(
    nodes: Mapping[str, PlacementNode], kept: Sequence[Kept], groups: Sequence[ParityGroup]
) -> Iterator[tuple[str, str, int]]:
    """Who sends whom how many bytes of its state in one checkpoint."""
    for state in kept:
        for holder in state.holders:
            yield state.node, holder, nodes[state.node].bytes
    for group in groups:
        for stripe in group.stripes:
            for part, index in itertools.product(stripe.parts, stripe.holders):
                yield group.members[part.member], group.members[index], part.stop - part.start


def _exposed(nodes: Mapping[str, PlacementNode], kept: Sequence[Kept], groups: Sequence[ParityGroup]) -> Iterator[str]:
    for name, members in _lost_at_once(nodes.values()):
        if _lost(kept, groups, members):
            yield name


def _lost_at_once(nodes: Collection[PlacementNode]) -> Iterator[tuple[str, list[str]]]:
    """The domains of several nodes, with nodes left elsewhere: what they are called, and who lies in them."""
    for level in range(levels(nodes)):
        domains: dict[Ids, list[str]] = {}
        for node in nodes:
            if level < len(node.domains):
                domains.setdefault(node.domain(level), []).append(node.id)
        for domain, members in sorted(domains.items()):
            if 1 < len(members) < len(nodes):
                yield "/".join(domain), members


def _whole(what: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UsageError(f"{what}: {value!r} is no whole number from {least} to {most}")


ONE_COPY = Replicas(1)  # the default, where there are several nodes
