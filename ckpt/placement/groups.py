"""The grouping of nodes: forms groups of given sizes, and puts nodes that may be lost together into different groups.

The goals, most important first:
1. As few pairs of nodes as possible share a failure domain within a group; the widest domains count first.
2. Memory-only nodes are in different groups.
3. There are as few different combinations of domains as possible. Whole domains are paired, since the loss of two
   domains costs something only if some group combines them (Cidon et al. 2013, USENIX ATC, "Copysets: reducing the
   frequency of data loss in cloud storage"; here the sets are of domains).
4. The longest time that a member needs to send its bytes to another is least, then the sum of these times.

Nodes sorted by domain and dealt to the groups in turn are optimal for goal 1. The s nodes of a domain are neighbours in
this order. So each of G groups of equal size gets at most ceil(s / G) of them. This holds at every level at once. With
equal domains, whole domains are paired. The rest (unequal sizes, links) is improved by swaps of two nodes, until
no swap helps or EXCHANGES_MAX were tried.

With `before` the result is stable: a group whose nodes are all still there stays. There are two exceptions: the group
sizes have to change, or a new arrangement fits newcomers better by goals 1 and 2. The result does not depend on the
order of the nodes: ties go by id.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ckpt.errors import UsageError

EXCHANGES_MAX = 8_000  # tried swaps, 1 to 150 us each
_BETTER = 1 - 1e-9  # an improvement must exceed rounding errors

Ids = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlacementNode:
    """A node as placement sees it.

    `id`: unique. `state_bytes`: its own state in one checkpoint. `lend_bytes`: memory for replicas of others' state,
    all generations together. `domains`: its failure domains, widest first (site, rack); each node is also a domain of
    its own. `link_bytes_s`: speed of its link each way; 0: unknown, no limit is assumed. `has_state`: False for a
    memory-only node, which has no state. Errors: UsageError if a value is out of range."""

    id: str
    state_bytes: int = 0
    lend_bytes: int = 0
    domains: Ids = ()
    link_bytes_s: float = 0.0
    has_state: bool = True

    def __post_init__(self) -> None:
        if not self.id or not all(self.domains) or "\0" in "".join((self.id, *self.domains)):
            raise UsageError(
                f"node {self.id!r} in {self.domains}: give an id and names of domains, not empty and without NUL"
            )
        if self.state_bytes < 0 or self.lend_bytes < 0 or (self.state_bytes and not self.has_state):
            raise UsageError(
                f"node {self.id}: state_bytes={self.state_bytes} and lend_bytes={self.lend_bytes} must be at least 0; "
                "a memory-only node has no state"
            )
        if not self.link_bytes_s >= 0:
            raise UsageError(f"node {self.id}: link_bytes_s={self.link_bytes_s} must be at least 0")

    def domain(self, level: int) -> Ids:
        """Its domain at a level, as a path; the node itself at levels below its narrowest domain."""
        return self.domains[: level + 1] if level < len(self.domains) else (*self.domains, "\0" + self.id)


def count_levels(nodes: Iterable[PlacementNode]) -> int:
    """The number of levels of domains, without the level of single nodes."""
    return max((len(node.domains) for node in nodes), default=0)


def shared_domain_pairs(nodes: Sequence[PlacementNode], depth: int) -> tuple[int, ...]:
    """The number of pairs of these nodes that share a domain, for each level, widest first."""
    return _equal_label_pairs([[node.domain(level) for level in range(depth)] for node in nodes])


def send_s(sender: PlacementNode, receiver: PlacementNode, nbytes: int | None = None) -> float:
    """The seconds to send `nbytes` (by default the sender's state) over the slower of both links; 0 if neither is
    known."""
    speeds = [node.link_bytes_s for node in (sender, receiver) if node.link_bytes_s]
    return (sender.state_bytes if nbytes is None else nbytes) / min(speeds) if speeds else 0.0


def group_nodes(nodes: Sequence[PlacementNode], sizes: Sequence[int], before: Sequence[Ids] = ()) -> list[Ids]:
    """All nodes in groups of these sizes; members and groups are sorted. `before`: the current groups. Errors:
    UsageError if the sizes do not add up to the number of nodes, or two nodes have one id."""
    if sum(sizes) != len(nodes) or any(size < 1 for size in sizes):
        raise UsageError(f"groups of {list(sizes)} nodes do not add up to {len(nodes)} nodes")
    if not nodes:
        return []
    field = _Field(nodes)
    sizes = sorted(sizes, reverse=True)
    best = field.improve_groups(field.deal_nodes(sizes))
    if before:
        kept = field.improve_groups(field.repair_groups(before, sizes), safety_only=True)
        if field.cost(kept)[0] <= field.cost(best)[0]:
            best = kept
    return sorted(tuple(sorted(group)) for group in best)


# Goals 1 and 2; combinations; longest seconds; sum of seconds.
Cost = tuple[tuple[int, ...], int, float, float]
Signature = tuple[tuple[Ids, ...], ...]


class _Field:
    """The nodes and the cost of groups of them. Groups are lists of ids here."""

    def __init__(self, nodes: Sequence[PlacementNode]) -> None:
        self.nodes = {node.id: node for node in sorted(nodes, key=lambda node: node.id)}
        if len(self.nodes) != len(nodes):
            raise UsageError("two nodes have the same id")
        self.depth = count_levels(nodes)
        # Nodes of one group should have different labels: a domain per level, then one label for all memory-only nodes.
        self.labels = {
            id: (*(node.domain(level) for level in range(self.depth)), (id,) if node.has_state else ("\0",))
            for id, node in self.nodes.items()
        }
        self.has_link_speeds = any(node.link_bytes_s for node in nodes)

    def deal_nodes(self, sizes: Sequence[int]) -> list[list[str]]:
        """The groups after dealing the nodes in turns, in an order in which the nodes of a domain are neighbours. A
        larger group gets more turns, spread as evenly as possible."""
        order = sorted(self.nodes, key=lambda id: (self.nodes[id].domains, id))
        turns = sorted(
            (Fraction(2 * (k * len(sizes) + g) + 1, 2 * len(sizes) * size), g)
            for g, size in enumerate(sizes)
            for k in range(size)
        )
        groups: list[list[str]] = [[] for _ in sizes]
        for id, (_, g) in zip(order, turns, strict=True):
            groups[g].append(id)
        return groups

    def repair_groups(self, before: Sequence[Ids], sizes: Sequence[int]) -> list[list[str]]:
        """The groups of `before` without the nodes that left. Newcomers, and nodes that no longer fit, fill the free
        places."""
        groups = sorted(
            (left for group in before if (left := [id for id in group if id in self.nodes])),
            key=lambda group: (-len(group), group),
        )
        groups = groups[: len(sizes)] + [[] for _ in range(len(sizes) - len(groups))]
        groups = [group[:size] for group, size in zip(groups, sizes, strict=True)]
        placed = set(itertools.chain(*groups))
        for id in self.nodes:
            if id not in placed:
                costs = [
                    (_equal_label_pairs([self.labels[other] for other in (*group, id)]), len(group) - size, g)
                    for g, (group, size) in enumerate(zip(groups, sizes, strict=True))
                    if len(group) < size
                ]
                groups[min(costs)[2]].append(id)
        return groups

    def improve_groups(self, groups: list[list[str]], safety_only: bool = False) -> list[list[str]]:
        """The groups after swaps of two nodes of two groups, as long as a swap lowers the cost. `safety_only`: only the
        cost of goals 1 and 2 counts. Changes `groups`."""
        signatures = Counter(map(self._signature, groups))
        tries = 0
        better = not self._is_settled(groups, safety_only)
        while better:
            better = False
            for a, b in itertools.combinations(range(len(groups)), 2):
                for i, j in itertools.product(range(len(groups[a])), range(len(groups[b]))):
                    tries += 1
                    if tries > EXCHANGES_MAX:
                        return groups
                    pair = groups[a], groups[b]
                    safety = self._safety_change(pair, i, j)
                    if safety > 0 or (safety == 0 and safety_only):
                        continue
                    swapped = _swapped(*pair, i, j)
                    if safety == 0 and not self._is_better(swapped, pair, signatures):
                        continue
                    signatures.subtract(map(self._signature, pair))
                    signatures.update(map(self._signature, swapped))
                    groups[a], groups[b] = swapped
                    better = True
        return groups

    def cost(self, groups: Sequence[Sequence[str]]) -> Cost:
        pairs = [_equal_label_pairs([self.labels[id] for id in group]) for group in groups]
        combinations = len(set(map(self._signature, groups)))
        return tuple(map(sum, zip(*pairs, strict=True))), combinations, *self._group_times(groups)

    def _group_times(self, groups: Sequence[Sequence[str]]) -> tuple[float, float]:
        times = [self._times(group) for group in groups]
        return max(longest for longest, _ in times), sum(total for _, total in times)

    def _is_settled(self, groups: Sequence[Sequence[str]], safety_only: bool) -> bool:
        """Whether no swap can help: only goals 1 and 2 matter, and the groups are as good as an even spread."""
        if not safety_only and self.has_link_speeds:
            return False

        def least(nodes: int) -> int:
            each, more = divmod(nodes, len(groups))
            return len(groups) * each * (each - 1) // 2 + more * each

        alike = [Counter(labels) for labels in zip(*self.labels.values(), strict=True)]
        return self.cost(groups)[0] == tuple(sum(map(least, counts.values())) for counts in alike)

    def _safety_change(self, pair: tuple[list[str], list[str]], i: int, j: int) -> int:
        """How a swap of the i-th node of one group and the j-th of the other changes the number of pairs with equal
        labels: the first change that is not 0, in order of importance; 0 if there is none."""
        one, other = pair
        leaves, comes = self.labels[one[i]], self.labels[other[j]]
        for level, (x, y) in enumerate(zip(leaves, comes, strict=True)):
            if x != y:
                here = [self.labels[id][level] for id in one]
                there = [self.labels[id][level] for id in other]
                change = here.count(y) - (here.count(x) - 1) + there.count(x) - (there.count(y) - 1)
                if change:
                    return change
        return 0

    def _is_better(
        self,
        then: tuple[list[str], list[str]],
        now: tuple[list[str], list[str]],
        signatures: Counter[Signature],
    ) -> bool:
        """Whether the two groups `then` are better than `now` by goals 3 and 4, if they are equal by goals 1 and 2."""
        changed: Counter[Signature] = Counter(map(self._signature, then))
        changed.subtract(map(self._signature, now))
        combinations = sum((signatures[key] + more > 0) - (signatures[key] > 0) for key, more in changed.items())
        if combinations:
            return combinations < 0
        return _is_less(self._group_times(then), self._group_times(now))

    def _signature(self, group: Sequence[str]) -> Signature:
        """The combination of domains in a group, at each level."""
        return tuple(tuple(sorted(self.labels[id][level] for id in group)) for level in range(self.depth))

    def _times(self, group: Sequence[str]) -> tuple[float, float]:
        if not self.has_link_speeds:
            return 0.0, 0.0
        times = [send_s(self.nodes[a], self.nodes[b]) for a, b in itertools.permutations(group, 2)]
        return max(times, default=0.0), sum(times)


def _swapped(one: Sequence[str], other: Sequence[str], i: int, j: int) -> tuple[list[str], list[str]]:
    return [*one[:i], other[j], *one[i + 1 :]], [*other[:j], one[i], *other[j + 1 :]]


def _is_less(then: Sequence[float], now: Sequence[float]) -> bool:
    """Whether `then` is lexicographically less than `now`, by more than rounding errors; so swaps come to an end."""
    for a, b in zip(then, now, strict=True):
        if a < b * _BETTER:
            return True
        if a * _BETTER > b:
            return False
    return False


def _equal_label_pairs(labels: Sequence[Sequence[Ids]]) -> tuple[int, ...]:
    """The number of pairs with equal labels, for each level."""
    columns = zip(*labels, strict=True)
    return tuple(sum(n * (n - 1) // 2 for n in Counter(column).values()) for column in columns)
