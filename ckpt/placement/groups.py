"""Which nodes are put together, so that what is lost together is apart.

Groups of given sizes, of any nodes. In this order of importance:
1. the widest failure domains first, then the narrower ones: as few pairs of one domain in one group as can be;
2. memory-only nodes in different groups;
3. as few different combinations of domains as can be: whole domains are paired, since losing two domains costs
   something only where they are combined (Cidon et al. 2013, USENIX ATC, "Copysets: reducing the frequency of data
   loss in cloud storage"; here the sets are of domains);
4. the least probability that some group loses state: the riskiest nodes with the safest;
5. the least largest time that a member needs to send its bytes to another, then the least sum of those times.

Nodes sorted by domain and dealt to the groups in turn give the best of 1: G groups of equal sizes get at most
ceil(s / G) of the s nodes of a domain, which are neighbours, at every level at once; and with equal domains whole
ones are paired. What is left (sizes that differ, risks, links) is improved by swaps until no swap of two nodes helps,
or EXCHANGES_MAX were tried.

Stable: with the groups of `before`, a group whose nodes are all still there stays as it is, unless the sizes of the
groups have to change, or the newcomers cannot be fitted in as well (by 1 and 2) as a new arrangement would do.
Deterministic, whatever the order of the nodes: ties go by id.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ckpt.errors import UsageError

EXCHANGES_MAX = 8_000  # of 1 to 150 us each
_BETTER = 1 - 1e-9  # a float has to fall by more than rounding

Ids = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlacementNode:
    """A node as placement sees it. `id`: unique. `bytes`: its own state, of one checkpoint. `lend_bytes`: memory
    that others' state may take, all generations together. `domains`: the failure domains that it lies in, widest
    first (site, rack); a node is always one of its own. `risk`: the probability that it is lost while a checkpoint is
    the newest, None: not known, taken as the mean of those known. `up_bytes_s`, `down_bytes_s`: what its link
    carries, None: not known, taken as no limit. `trains`: False for a memory-only node, which has no state.

    Errors: UsageError."""

    id: str
    bytes: int = 0
    lend_bytes: int = 0
    domains: Ids = ()
    risk: float | None = None
    up_bytes_s: float | None = None
    down_bytes_s: float | None = None
    trains: bool = True

    def __post_init__(self) -> None:
        if not self.id or not all(self.domains) or "\0" in "".join((self.id, *self.domains)):
            raise UsageError(f"node {self.id!r} in {self.domains}: an id and names of domains, without NUL")
        if self.bytes < 0 or self.lend_bytes < 0 or (self.bytes and not self.trains):
            raise UsageError(
                f"node {self.id}: {self.bytes} bytes of state and {self.lend_bytes} lent, trains={self.trains}"
            )
        if self.risk is not None and not 0 <= self.risk <= 1:
            raise UsageError(f"node {self.id}: risk={self.risk} is no probability")
        if any(speed is not None and not speed > 0 for speed in (self.up_bytes_s, self.down_bytes_s)):
            raise UsageError(f"node {self.id}: a link of {self.up_bytes_s} up and {self.down_bytes_s} down")

    def domain(self, level: int) -> Ids:
        """Its domain at a level, as a path; below its narrowest one, the node itself."""
        return self.domains[: level + 1] if level < len(self.domains) else (*self.domains, "\0" + self.id)


def levels(nodes: Iterable[PlacementNode]) -> int:
    """How many levels of domains there are, nodes not counted."""
    return max((len(node.domains) for node in nodes), default=0)


def shared(nodes: Sequence[PlacementNode], depth: int) -> tuple[int, ...]:
    """For each level, widest first, how many pairs of these nodes lie in one domain."""
    return _pairs_alike([[node.domain(level) for level in range(depth)] for node in nodes])


def send_s(sender: PlacementNode, receiver: PlacementNode, nbytes: int | None = None) -> float:
    """Seconds to send `nbytes` (by default the sender's state) over both links, in seconds; 0 where neither is
    known."""
    speeds = [speed for speed in (sender.up_bytes_s, receiver.down_bytes_s) if speed is not None]
    return (sender.bytes if nbytes is None else nbytes) / min(speeds) if speeds else 0.0


def grouped(
    nodes: Sequence[PlacementNode], sizes: Sequence[int], survives: int, before: Sequence[Ids] = ()
) -> list[Ids]:
    """All nodes, in groups of these sizes, of which any `survives` nodes may be lost; members and groups sorted.

    Errors: UsageError where the sizes do not add up to the number of nodes."""
    if sum(sizes) != len(nodes) or any(size < 1 for size in sizes):
        raise UsageError(f"groups of {list(sizes)} do not hold {len(nodes)} nodes")
    if not nodes:
        return []
    field = _Field(nodes, survives)
    sizes = sorted(sizes, reverse=True)
    dealt = [field.dealt(order, sizes) for order in field.orders(len(sizes))]
    best = field.improved(min(dealt, key=lambda groups: (field.cost(groups), groups)))
    if before:
        kept = field.improved(field.repaired(before, sizes), safety_only=True)
        if field.cost(kept)[0] <= field.cost(best)[0]:
            best = kept
    return sorted(tuple(sorted(group)) for group in best)


Cost = tuple[tuple[int, ...], int, float, float, float]  # 1 and 2; combinations; risk; largest seconds; their sum
Signature = tuple[tuple[Ids, ...], ...]


class _Field:
    """The nodes, and what groups of them cost. Groups are lists of ids here."""

    def __init__(self, nodes: Sequence[PlacementNode], survives: int) -> None:
        self.nodes = {node.id: node for node in sorted(nodes, key=lambda node: node.id)}
        if len(self.nodes) != len(nodes):
            raise UsageError("two nodes have the same id")
        self.survives = survives
        self.depth = levels(nodes)
        # What should not meet in a group: at each level the same domain, and after that two memory-only nodes.
        self.labels = {
            id: (*(node.domain(level) for level in range(self.depth)), (id,) if node.trains else ("\0",))
            for id, node in self.nodes.items()
        }
        known = [node.risk for node in self.nodes.values() if node.risk is not None]
        usual = statistics.fmean(known) if known else 0.0
        self.risk = {node.id: usual if node.risk is None else node.risk for node in self.nodes.values()}
        self.unequal = len(set(self.risk.values())) > 1
        self.timed = any(node.up_bytes_s or node.down_bytes_s for node in nodes)

    def orders(self, rows_of: int) -> list[list[str]]:
        """Orders worth dealing from, each with the nodes of a domain next to each other: by name; with unequal risks
        also from the safest domain to the riskiest, and so with every other row turned round."""
        found = [sorted(self.nodes, key=lambda id: (self.nodes[id].domains, id))]
        if self.unequal:
            means = {
                (level, domain): statistics.fmean(self.risk[node.id] for node in members)
                for level in range(self.depth + 1)
                for domain, members in self._by_domain(level)
            }

            def risk_path(id: str) -> list[tuple[float, Ids]]:
                paths = [(level, self.nodes[id].domain(level)) for level in range(self.depth + 1)]
                return [(means[path], path[1]) for path in paths]

            rising = sorted(self.nodes, key=risk_path)
            rows = [rising[i : i + rows_of] for i in range(0, len(rising), rows_of)]
            turned = [row[::-1] if k % 2 else row for k, row in enumerate(rows)]
            found += [rising, list(itertools.chain(*turned))]
        return found

    def _by_domain(self, level: int) -> list[tuple[Ids, list[PlacementNode]]]:
        key = {node.id: node.domain(level) for node in self.nodes.values()}
        ordered = sorted(self.nodes.values(), key=lambda node: (key[node.id], node.id))
        return [(domain, list(members)) for domain, members in itertools.groupby(ordered, lambda node: key[node.id])]

    def dealt(self, order: Sequence[str], sizes: Sequence[int]) -> list[list[str]]:
        """In turns; a larger group takes part more often, as evenly as can be."""
        turns = sorted(
            (Fraction(2 * (k * len(sizes) + g) + 1, 2 * len(sizes) * size), g)
            for g, size in enumerate(sizes)
            for k in range(size)
        )
        groups: list[list[str]] = [[] for _ in sizes]
        for id, (_, g) in zip(order, turns, strict=True):
            groups[g].append(id)
        return groups

    def repaired(self, before: Sequence[Ids], sizes: Sequence[int]) -> list[list[str]]:
        """The groups of before without who has left; newcomers, and who has no place any more, fill what is free."""
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
                    (_pairs_alike([self.labels[other] for other in (*group, id)]), len(group) - size, g)
                    for g, (group, size) in enumerate(zip(groups, sizes, strict=True))
                    if len(group) < size
                ]
                groups[min(costs)[2]].append(id)
        return groups

    def improved(self, groups: list[list[str]], safety_only: bool = False) -> list[list[str]]:
        """Swaps of two nodes of two groups, as long as one makes the cost less (`safety_only`: of 1 and 2)."""
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
        pairs = [_pairs_alike([self.labels[id] for id in group]) for group in groups]
        combinations = len(set(map(self._signature, groups)))
        return tuple(map(sum, zip(*pairs, strict=True))), combinations, *self._risk_and_times(groups)

    def _risk_and_times(self, groups: Sequence[Sequence[str]]) -> tuple[float, float, float]:
        times = [self._times(group) for group in groups]
        return (
            sum(self._loss(group) for group in groups),
            max(longest for longest, _ in times),
            sum(total for _, total in times),
        )

    def _is_settled(self, groups: Sequence[Sequence[str]], safety_only: bool) -> bool:
        """Whether no swap can help: nothing but 1 and 2 matters, and they are as good as an even spread makes them."""
        if not safety_only and (self.unequal or self.timed):
            return False

        def least(nodes: int) -> int:
            each, more = divmod(nodes, len(groups))
            return len(groups) * each * (each - 1) // 2 + more * each

        alike = [Counter(labels) for labels in zip(*self.labels.values(), strict=True)]
        return self.cost(groups)[0] == tuple(sum(map(least, counts.values())) for counts in alike)

    def _safety_change(self, pair: tuple[list[str], list[str]], i: int, j: int) -> int:
        """What a swap of the i-th of one and the j-th of the other changes in the pairs that should not be: the first
        number that is not 0, in order of importance."""
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
        """Whether two groups are better so, where they are equally good by 1 and 2."""
        changed: Counter[Signature] = Counter(map(self._signature, then))
        changed.subtract(map(self._signature, now))
        combinations = sum((signatures[key] + more > 0) - (signatures[key] > 0) for key, more in changed.items())
        if combinations:
            return combinations < 0
        return _is_less(self._risk_and_times(then), self._risk_and_times(now))

    def _signature(self, group: Sequence[str]) -> Signature:
        """The domains that are combined in it, at each level."""
        return tuple(tuple(sorted(self.labels[id][level] for id in group)) for level in range(self.depth))

    def _loss(self, group: Sequence[str]) -> float:
        """Minus the logarithm of the probability that the group keeps its state: groups add up."""
        lost = more_lost([self.risk[id] for id in group], self.survives) if self.unequal else 0.0
        return -math.log1p(-lost) if lost < 1 else math.inf

    def _times(self, group: Sequence[str]) -> tuple[float, float]:
        if not self.timed:
            return 0.0, 0.0
        times = [send_s(self.nodes[a], self.nodes[b]) for a, b in itertools.permutations(group, 2)]
        return max(times, default=0.0), sum(times)


def more_lost(risks: Sequence[float], survives: int) -> float:
    """The probability that more than `survives` of the nodes are lost."""
    chances = [1.0]
    for risk in risks:
        chances = [a * (1 - risk) + b * risk for a, b in zip((*chances, 0.0), (0.0, *chances), strict=True)]
    return math.fsum(chances[survives + 1 :])


def _swapped(one: Sequence[str], other: Sequence[str], i: int, j: int) -> tuple[list[str], list[str]]:
    return [*one[:i], other[j], *one[i + 1 :]], [*other[:j], one[i], *other[j + 1 :]]


def _is_less(then: Sequence[float], now: Sequence[float]) -> bool:
    """Lexicographically, and by more than rounding, so that swaps come to an end."""
    for a, b in zip(then, now, strict=True):
        if a < b * _BETTER:
            return True
        if a * _BETTER > b:
            return False
    return False


def _pairs_alike(labels: Sequence[Sequence[Ids]]) -> tuple[int, ...]:
    """For each level, how many pairs have the same label."""
    columns = zip(*labels, strict=True)
    return tuple(sum(n * (n - 1) // 2 for n in Counter(column).values()) for column in columns)
