"""How likely the state outlives the loss of nodes, exactly, in two ways: what placements are held against.

With k of N nodes lost at random, each set of k equally likely, independent groups survive with probability
[x^k] prod_g W_g(x) / C(N, k), where W_g(x) counts the ways to lose i nodes of group g without losing state: the
generating polynomial of the numbers of ways (Wilf 1990, "generatingfunctionology", on products of series). A group
that survives any r of n losses has W(x) = sum_{i <= r} C(n, i) x^i. Where groups share nodes, or whole domains are
lost, enumeration says it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction

from ckpt.errors import UsageError

ENUMERATED_MAX = 20  # units; 2 ** 20 sets

Ways = Sequence[int]  # [i]: how many sets of i nodes may be lost


def group_ways(nodes: int, survives: int) -> list[int]:
    """Of a group of which any `survives` nodes may be lost: m copies: m - 1; XOR: 1; two parities: 2."""
    return [math.comb(nodes, i) if i <= survives else 0 for i in range(nodes + 1)]


def ring_ways(nodes: int, copies: int) -> list[int]:
    """Of a ring in which each node's state lies on itself and the next `copies` - 1 nodes: no `copies` neighbours
    may be lost. By enumeration (the rings of the mixed strategy have below 2 * `copies` nodes)."""
    _few(nodes)
    ways = [0] * (nodes + 1)
    for lost in itertools.product((False, True), repeat=nodes):
        ways[sum(lost)] += not any(all(lost[(i + j) % nodes] for j in range(min(copies, nodes))) for i in range(nodes))
    return ways


def mixed_ways(nodes: int, copies: int) -> list[list[int]]:
    """Of copies under any node count, by the mixed strategy of Gemini (Wang et al. 2023, SOSP, "GEMINI: Fast Failure
    Recovery in Distributed Training with In-Memory Checkpoints"): floor(N / m) - 1 groups of m, and a ring of the
    rest, which is a group of m where m divides N."""
    groups = max(nodes // copies - 1, 0)
    return [group_ways(copies, copies - 1)] * groups + [ring_ways(nodes - groups * copies, copies)]


def survival(groups: Sequence[Ways], lost: int) -> Fraction:
    """The probability that all groups survive when `lost` of their nodes are lost at random.

    Errors: UsageError where there are not so many nodes."""
    nodes = sum(len(ways) - 1 for ways in groups)
    if not 0 <= lost <= nodes:
        raise UsageError(f"{lost} of {nodes} nodes cannot be lost")
    product = [1] + [0] * lost
    for ways in groups:
        product = [sum(product[k - i] * ways[i] for i in range(min(k, len(ways) - 1) + 1)) for k in range(lost + 1)]
    return Fraction(product[lost], math.comb(nodes, lost))


def survival_enumerated(
    survives: Callable[[Collection[str]], bool], units: Sequence[Collection[str]], lost: int
) -> Fraction:
    """The same for anything, by asking `survives` about every set of `lost` units; a unit is what is lost at once:
    one node, or all nodes of a domain."""
    sets = list(itertools.combinations(units, lost))
    return Fraction(sum(survives(frozenset(itertools.chain(*chosen))) for chosen in sets), len(sets))


def pairs_mttdl_s(nodes: int, failures_per_s: float, protect_s: float) -> float:
    """The mean seconds until pairs lose state: 1 / (N lambda^2 T), to first order in lambda T (Patterson, Gibson, Katz
    1988, "A case for redundant arrays of inexpensive disks", for groups of two). `failures_per_s`: of one
    node. `protect_s`: from a failure until the second copy is there again."""
    return 1 / (nodes * failures_per_s**2 * protect_s)


def _few(count: int) -> None:
    if count > ENUMERATED_MAX:
        raise UsageError(f"{count} nodes are too many to enumerate; at most {ENUMERATED_MAX}")
