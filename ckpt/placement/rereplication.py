"""Which plain copies make up for holders that were lost: one pure function.

After nodes have gone, some ranks' snapshots of a checkpoint lie on fewer nodes than was asked for. Guarantees of
`reprotect`, for any holders and nodes:
- it copies only from a node that has the snapshot to one that has not, and each snapshot to each node at most once;
- no node is given more than it lends;
- where everyone lends enough, each snapshot that somebody has is in the end on copies + 1 nodes, or on all that train
  and those that have it;
- deterministic, whatever the order of what is given.
Who keeps it is left to `placement.place`, so that what is lost together stays apart here too: what is short of copies
counts as the state of the node that gives it, which is, of those that have it, one that has failed in that least often,
and of these the one with the least to give so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt.placement.groups import PlacementNode
from ckpt.placement.placement import Replicas, place

NONE_FAILED: Mapping[tuple[int, str], int] = {}


@dataclass(frozen=True, slots=True)
class Copy:
    """`holder` fetches the snapshots of these ranks from `source`."""

    source: str
    holder: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reprotection:
    """`short`: ranks that stay on fewer nodes than could be, for want of memory."""

    copies: tuple[Copy, ...]
    short: tuple[int, ...]


def reprotect(
    holders: Mapping[int, Sequence[str]],
    sizes: Mapping[int, int],
    nodes: Sequence[PlacementNode],
    copies: int,
    failed: Mapping[tuple[int, str], int] = NONE_FAILED,
) -> Reprotection:
    """`holders`: by rank, which nodes have its snapshot; those that are not among `nodes` are gone. `sizes`: of the
    snapshots, bytes. `nodes`: what each lends counts for this alone, and its own state not at all; those that do not
    train are asked for what they have and lend nothing. `copies`: how many further ones each snapshot is to have.
    `failed`: by rank and node that has its snapshot, how often that did not give it.

    Errors: UsageError where two nodes have one id, or copies is less than 1."""
    ids = {node.id for node in nodes}
    held = {rank: sorted(ids.intersection(names)) for rank, names in sorted(holders.items())}
    train = {node.id for node in nodes if node.trains}
    wanted = {rank: min(copies + 1, len(train.union(names))) for rank, names in held.items()}
    lacking = {rank: wanted[rank] - len(names) for rank, names in held.items() if 0 < len(names) < wanted[rank]}
    gives = dict.fromkeys(sorted(ids), 0)
    source: dict[int, str] = {}
    for rank in lacking:
        source[rank] = min(held[rank], key=lambda name: (failed.get((rank, name), 0), gives[name], name))
        gives[source[rank]] += sizes[rank]
    placed = place([replace(node, bytes=gives[node.id], trains=True) for node in nodes], Replicas(copies), None, 1)
    keeps = {kept.node: kept.holders for kept in placed.kept}
    ranks: dict[tuple[str, str], list[int]] = {}
    short = []
    for rank, count in lacking.items():
        to = [name for name in keeps[source[rank]] if name not in held[rank]][:count]
        for name in to:
            ranks.setdefault((source[rank], name), []).append(rank)
        if len(to) < count:
            short.append(rank)
    made = [Copy(*between, tuple(theirs)) for between, theirs in sorted(ranks.items())]
    return Reprotection(tuple(made), tuple(short))
