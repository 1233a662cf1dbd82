"""Replication of one checkpoint, as copies or as parity, run by the coordinator. Main thread only.

1. Each source describes its snapshots and offers them ("publish").
2. Once a holder's sources are described, the holder is told what to keep ("replicate"): copies of the snapshots, or
   parity chunks that it makes of them. It fetches the bytes from the sources, verifies them, and answers.
3. When all have answered, the caller decides whether the checkpoint counts as replicated: a holder may be lost by now.
4. If it does, the nodes hear that they may evict older checkpoints ("evict").

If any replica fails, the replication has failed. Replicas that did arrive are evicted once the next replication begins.
A re-replication (rereplicate.py) is the same with another plan, and evicts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.agent.replication.replica_service import ReplicaService, Where
from ckpt.agent.replication.replica_store import ReplicaStore
from ckpt.agent.runtime.coroutines import Task, gather
from ckpt.agent.snapshots.described import DescribedSnapshot, ParityChunkName, decode_described, encode_described
from ckpt.errors import AgentError, CkptError
from ckpt.format.parity import Row
from ckpt.placement.parity_placement import ParityGroup
from ckpt.placement.rebuild import stripes_of
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.ipc.node_list import NodeAt


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """What one holder is to keep: copies of one source's snapshots of these ranks, or the holder's parity chunks of
    `groups`, which are planned for at least the bytes that the sources staged."""

    holder: str
    ranks_by_source: Mapping[str, Sequence[int]]
    groups: Sequence[ParityGroup] = ()


def assign_parity(groups: Iterable[ParityGroup], ranks: Mapping[str, Sequence[int]]) -> list[Assignment]:
    """The assignments of a placement's parity groups. `ranks`: by node."""
    by_holder: dict[str, list[ParityGroup]] = {}
    for group in groups:
        for holder in sorted({group.members[index] for stripe in group.stripes for index in stripe.holders}):
            by_holder.setdefault(holder, []).append(group)
    return [
        Assignment(
            holder,
            # A holder waits for all members of its groups: their staged bytes determine the sources of each stripe.
            {
                group.members[part.member]: ranks.get(group.members[part.member], ())
                for group in theirs
                for stripe in group.stripes
                for part in stripe.parts
            },
            theirs,
        )
        for holder, theirs in by_holder.items()
    ]


async def replicate(
    store: ReplicaStore,
    service: ReplicaService,
    nodes: Sequence[NodeAt],
    identity: Identity,
    assignments: Iterable[Assignment],
    safe: Identity | None = None,
    needed: Mapping[str, Sequence[int]] | None = None,
) -> Sequence[NodeAt]:
    """Replicates a checkpoint, see `make_replicas`. Assignments without a rank, or with a source that is not among
    `nodes`, are left out. Returns the nodes for `evict_older`: () if nothing was to be made. Errors: AgentError."""
    names = {node.name for node in nodes}
    wanted = [
        each for each in assignments if any(each.ranks_by_source.values()) and each.ranks_by_source.keys() <= names
    ]
    errors = await make_replicas(service, nodes, identity, wanted, safe, needed)
    if errors:
        raise AgentError(next(iter(errors.values())))
    store.check_eviction(identity.epoch)  # fails while a start surveys this node; the caller tries again
    return nodes if wanted else ()


def evict_older(network: PeerNetwork, store: ReplicaStore, nodes: Sequence[NodeAt], identity: Identity) -> None:
    """Has `nodes`, this one among them, evict the checkpoints older than `identity`, which is replicated."""
    if nodes:
        store.evict_older_than(identity)
    for node in nodes:
        if node.name != network.agent_name:
            network.notify(node.name, {"t": "evict", "what": "older", "identity": str(identity)})


async def make_replicas(
    service: ReplicaService,
    nodes: Sequence[NodeAt],
    identity: Identity,
    assignments: Sequence[Assignment],
    safe: Identity | None = None,
    needed: Mapping[str, Sequence[int]] | None = None,
    evicts: bool = True,
) -> dict[Assignment, str]:
    """Makes the replicas. Returns the errors of the assignments that failed. Until then the sources leave their
    snapshots unchanged. `safe`: the newest replicated checkpoint. `needed`: node -> ranks of `safe` whose copies there
    must stay; None: unknown. `evicts`: older checkpoints may be evicted for it."""
    addresses = {node.name: node.addresses for node in nodes}
    errors: dict[Assignment, str] = {}
    refusals: dict[str, str] = {}  # by source

    async def publish(source: str, ranks: list[int]) -> list[DescribedSnapshot]:
        """Has the source offer these ranks' snapshots, and describe them."""
        try:
            blobs = await service.ask_for_offers(source, identity, {"t": "publish", "ranks": ranks}, "")
            if not blobs:
                raise AgentError("its answer has no description")
            found = decode_described(blobs[0])
            if sorted(each.rank for each in found) != ranks:
                raise AgentError("it describes snapshots of other ranks than it was asked for")
            return found
        except CkptError as exc:
            refusals[source] = f"agent {source} does not give what is to be copied: {exc}"
            return []

    async def make(each: Assignment) -> None:
        snapshots: dict[str, list[DescribedSnapshot]] = {}
        try:
            for source, ranks in each.ranks_by_source.items():
                snapshots[source] = [found for found in await published[source] if found.rank in ranks]
            # All have answered: no source publishes its snapshots after the end of the replication.
            if refused := [refusals[source] for source in snapshots if source in refusals]:
                raise AgentError(refused[0])
            every = [found for theirs in snapshots.values() for found in theirs]
            where = Where(
                {source: addresses[source] for source in snapshots},
                {found.rank: source for source, theirs in snapshots.items() for found in theirs},
                [
                    (each.holder, name, None)
                    for group in each.groups
                    for name in _chunks(identity, group, each.holder, snapshots)
                ],
            )
            fields = {
                "t": "replicate",
                "identity": str(identity),
                "source": next(iter(snapshots)) if not each.groups else None,
                "world": sum(len(node.ranks) for node in nodes),
                "rereplication": not evicts,
                "replicated": str(safe) if safe is not None else None,
                "needed_ranks": needed.get(each.holder, ()) if needed is not None else None,
            }
            await service.ask(each.holder, fields, [where.encode(), encode_described(every)])
        except CkptError as exc:
            errors[each] = f"{'parity' if each.groups else 'a copy'} at agent {each.holder}: {exc}"

    ranks_by_source: dict[str, set[int]] = {}
    for each in assignments:
        for source, ranks in each.ranks_by_source.items():
            ranks_by_source.setdefault(source, set()).update(ranks)
    published = {source: Task(publish(source, sorted(ranks))) for source, ranks in sorted(ranks_by_source.items())}
    try:
        await gather(map(make, assignments))
    finally:
        for task in published.values():
            task.cancel()
        service.end_offers(identity, list(published), "")
    return errors


def _chunks(
    identity: Identity, group: ParityGroup, holder: str, snapshots: Mapping[str, Sequence[DescribedSnapshot]]
) -> list[ParityChunkName]:
    """The chunks of a group that `holder` is to keep. Errors: UsageError."""
    sizes = [[(each.rank, each.staged_bytes) for each in snapshots.get(name, ())] for name in group.members]
    return [
        ParityChunkName(identity, Row(row), striped)
        for striped, holders in stripes_of(group.stripes, sizes)
        for row, index in enumerate(holders)
        if group.members[index] == holder
    ]
