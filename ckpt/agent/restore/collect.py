"""The collector of a checkpoint in memory: finds out where its frames lie, and has lost parts rebuilt from parity.

It runs before a restore session, and before an orphan commit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from ckpt.agent.replication.rebuild import Rebuild
from ckpt.agent.replication.replica_service import ReplicaService
from ckpt.agent.restore.manifest_request import RankMissing, gather_manifest
from ckpt.agent.restore.partial_match import match_part
from ckpt.agent.runtime.coroutines import CallLater, race, sleep
from ckpt.agent.runtime.workers import Workers
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.agent.snapshots.manifest_gather import FramePlaces, GatheredManifest
from ckpt.errors import AgentError, CkptError
from ckpt.format.manifest import Manifest
from ckpt.ipc.arena import Arena
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork
    from ckpt.ipc.node_list import NodeAt

log = logging.getLogger("ckpt")

CHECK_S = 30.0  # within which a partial rebuild has to advance; nodes report progress more often (net/progress.py)
REBUILD_BYTES_S_MIN = 50 << 20  # the least rebuild rate of a node; most stores are faster than this


class CheckpointCollector:
    """Collects checkpoints that the nodes hold, one at a time. Main thread only."""

    def __init__(
        self,
        network: PeerNetwork | None,
        workers: Workers,
        service: ReplicaService,
        arenas_of: Callable[[Identity], Mapping[int, Arena]],
        inventory: Inventory,
        nodes: Sequence[NodeAt],
        others: Sequence[NodeAt],
        urgent: bool = False,
    ) -> None:
        """`inventory`: what all nodes hold; rebuilds and damage update it. `nodes`: those that may rebuild, this
        one first; () if it is the only one. `others`: nodes that only hold replicas. `urgent`: a start waits."""
        self._network, self._workers, self._service, self._arenas_of = network, workers, service, arenas_of
        self._inventory, self._nodes, self._memory_nodes = inventory, list(nodes), list(others)
        self._urgent = urgent
        self._me = network.agent_name if network is not None else ""

    async def collect_whole(self, identity: Identity) -> GatheredManifest:
        """Collects the whole checkpoint. Ranks that no node holds, or that turn out damaged, are rebuilt first. Errors:
        CkptError."""
        inventory = self._inventory
        while True:
            if missing := inventory.missing_ranks(identity):
                await self.rebuild(identity, missing, {})
            holders, arenas = inventory.holders_by_rank(identity), self._arenas_of(identity)
            try:
                return await gather_manifest(self._network, self._workers, identity, holders, arenas)
            except RankMissing as exc:
                inventory.mark_damaged(identity, exc.rank)
                if identity not in inventory.complete_checkpoints():
                    raise
                log.warning("%s: %s; it is made again from parity", identity, exc)

    async def collect_part(
        self,
        identity: Identity,
        manifest: Manifest,
        leave: Mapping[str, int],
        later: CallLater,
        moves: Callable[[], object],
    ) -> FramePlaces:
        """Finds frames in memory of a checkpoint that the store has, too. `manifest`: of its record. Lost ranks are
        rebuilt, as far as possible. Ranks not rebuilt in time, or that do not fit in memory, are read from the store.
        `leave`: by node, bytes that the job needs, see Rebuild. `moves`: returns a new value after any progress.
        Errors: CkptError."""
        sizes = self._inventory.rebuildable_ranks(identity)
        if sizes and identity not in self._inventory.unusable_checkpoints:  # Else rebuilds were tried already.
            most_bytes = max(max(sizes.values()), sum(sizes.values()) // max(1, len(self._nodes)))
            looks = int(most_bytes / REBUILD_BYTES_S_MIN / CHECK_S)
            try:
                await race(self.rebuild(identity, sizes, leave), _stall(moves, later, looks))
            except CkptError as exc:
                log.warning("%s is read from the store in part: %s", identity, exc)
        holders = {rank: names for rank, names in self._inventory.holders_by_rank(identity).items() if names}
        services, arenas = (self._network, self._workers), self._arenas_of(identity)
        return await match_part(*services, identity, manifest, holders, arenas, later)

    async def rebuild(self, identity: Identity, ranks: Collection[int], leave: Mapping[str, int]) -> None:
        """Has these ranks' snapshots rebuilt, which no node holds, and adds them to the inventory. `leave`: see
        `collect_part`. Errors: AgentError if one could not be rebuilt; the others are in the inventory then, too."""
        inventory, me = self._inventory, self._me
        holders = {rank: [name or me for name in names] for rank, names in inventory.holders_by_rank(identity).items()}
        unfit = {rank: [name or me for name in inventory.damaged_holders.get((identity, rank), ())] for rank in ranks}
        names = [node.name for node in self._nodes] or [me]
        at = {rank: [name for name in names if name not in unfit[rank]] for rank in ranks}
        givers = [*self._nodes, *self._memory_nodes] if self._nodes else []
        rebuilding = Rebuild(self._service, givers, identity, holders, at, me, leave, self._urgent)
        try:
            error = await rebuilding.run()
        finally:
            for rank, name in rebuilding.node_by_rank.items():
                inventory.add_rebuilt(identity, rank, "" if name == me else name)
        if error:
            raise AgentError(error)


async def _stall(moves: Callable[[], object], later: CallLater, looks: int) -> NoReturn:
    """The limit of a rebuild. Errors: AgentError once it stalls, or after so many looks."""
    before = moves()
    for _ in range(looks + 1):
        await sleep(later, CHECK_S)
        now = moves()
        if now == before:
            raise AgentError(f"nothing has moved for {CHECK_S:g} s")
        before = now
    raise AgentError("a rebuild takes too long")
