"""The re-replication plan: decides which copies replace the ones on lost nodes. One pure function.

After a loss of nodes, some ranks' snapshots of a checkpoint lie on fewer nodes than requested. Guarantees of
`plan_rereplication`, for any holders and nodes:
- A snapshot is copied only from a node that has it to one that does not, and to each node at most once.
- No node gets more than it lends.
- If all nodes lend enough, each snapshot that some node has gets to copies + 1 nodes. With too few nodes it gets to all
  nodes that train or have it already.
- The result does not depend on the order of the arguments.
`placement.place` chooses the new holders, so that nodes that may be lost together stay apart. For this choice a
snapshot that lacks copies counts as the state of its source. The source is the holder that failed least often to give
the snapshot; among equals, the holder with the least bytes to give so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt.placement.groups import PlacementNode
from ckpt.placement.placement import Replicas, place

NO_FAILURES: Mapping[tuple[int, str], int] = {}


@dataclass(frozen=True, slots=True)
class Copy:
    """`holder` fetches the snapshots of these ranks from `source`."""

    source: str
    holder: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reprotection:
    """The plan: `replicas` to make. `short_ranks`: their snapshots get fewer copies than requested, for lack of
    memory."""

    replicas: tuple[Copy, ...]
    short_ranks: tuple[int, ...]


def plan_rereplication(
    holders: Mapping[int, Sequence[str]],
    sizes: Mapping[int, int],
    nodes: Sequence[PlacementNode],
    copies: int,
    failed: Mapping[tuple[int, str], int] = NO_FAILURES,
) -> Reprotection:
    """The plan that restores the requested number of copies.

    `holders`: by rank, the nodes that have its snapshot; nodes that are not in `nodes` are lost. `sizes`: bytes of each
    rank's snapshot. `nodes`: `lend_bytes` is memory for these copies alone; `state_bytes` is ignored. Nodes that do not
    train only give snapshots; the caller sets their `lend_bytes` to 0. `copies`: further copies of each snapshot.
    `failed`: by (rank, holder), how often the holder failed to give the snapshot.

    Errors: UsageError if two nodes have one id, or copies is less than 1."""
    ids = {node.id for node in nodes}
    held = {rank: sorted(ids.intersection(names)) for rank, names in sorted(holders.items())}
    train = {node.id for node in nodes if node.has_state}
    wanted = {rank: min(copies + 1, len(train.union(names))) for rank, names in held.items()}
    lacking = {rank: wanted[rank] - len(names) for rank, names in held.items() if 0 < len(names) < wanted[rank]}
    gives = dict.fromkeys(sorted(ids), 0)
    source: dict[int, str] = {}
    for rank in lacking:
        source[rank] = min(held[rank], key=lambda name: (failed.get((rank, name), 0), gives[name], name))
        gives[source[rank]] += sizes[rank]
    placed = place(
        [replace(node, state_bytes=gives[node.id], has_state=True) for node in nodes], Replicas(copies), None, 1
    )
    keeps = {kept.node: kept.holders for kept in placed.protected_states}
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
