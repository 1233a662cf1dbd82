"""The collector of a checkpoint in memory: finds out where its frames lie, and has lost parts rebuilt from parity.

It runs before a restore session, and before an orphan commit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ckpt.agent.replication.rebuild import NodeByRank, Rebuild
from ckpt.agent.replication.replica_service import ReplicaService
from ckpt.agent.restore.partial_match import AskingForPart
from ckpt.agent.runtime.workers import Workers
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.agent.snapshots.manifest_gather import FramePlaces, GatheredManifest, ManifestGather
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
    """Collects checkpoints that the nodes hold, one at a time. Each `then` is called once, with the result and "", or
    None and the error. Main thread only."""

    def __init__(
        self,
        network: PeerNetwork | None,
        workers: Workers,
        service: ReplicaService,
        arenas_of: Callable[[Identity], Mapping[int, Arena]],
        inventory: Inventory,
        nodes: Sequence[NodeAt],
        others: Sequence[NodeAt],
        guard: Callable[[Callable[[], None]], None],
        urgent: bool = False,
    ) -> None:
        """`inventory`: what all nodes hold; rebuilds and damage update it. `nodes`: those that may rebuild, this
        one first; () if it is the only one. `others`: nodes that only hold replicas. `guard`: runs a continuation while
        its result is still wanted. `urgent`: a start waits."""
        self._network, self._workers, self._service, self._arenas_of = network, workers, service, arenas_of
        self._inventory, self._nodes, self._memory_nodes = inventory, list(nodes), list(others)
        self._guard, self._urgent = guard, urgent
        self._me = network.agent_name if network is not None else ""

    def collect_whole(self, identity: Identity, then: Callable[[GatheredManifest | None, str], None]) -> None:
        """Collects the whole checkpoint. Ranks that no node holds, or that turn out damaged, are rebuilt first."""
        missing = self._inventory.missing_ranks(identity)
        if not missing:
            self._gather(identity, then)
            return

        def made(error: str) -> None:
            if error:
                then(None, error)
            else:
                self.collect_whole(identity, then)

        self.rebuild(identity, missing, {}, made)

    def collect_part(
        self,
        identity: Identity,
        manifest: Manifest,
        leave: Mapping[str, int],
        later: Callable[[float, Callable[[], None]], None],
        moves: Callable[[], object],
        then: Callable[[FramePlaces | None, str], None],
    ) -> None:
        """Finds frames in memory of a checkpoint that the store has, too. `manifest`: of its record. Lost ranks are
        rebuilt, as far as possible. Ranks not rebuilt in time, or that do not fit in memory, are read from the store.
        `leave`: by node, bytes that the job needs, see Rebuild. `moves`: returns a new value after any progress."""

        def ask(error: str) -> None:
            if error:
                log.warning("%s, and is read from the store", error)
            holders = {rank: names for rank, names in self._inventory.holders_by_rank(identity).items() if names}
            services, arenas = (self._network, self._workers), self._arenas_of(identity)
            ended = lambda places, error: self._guard(lambda: then(places, error))  # noqa: E731
            AskingForPart(*services, identity, manifest, holders, arenas, later, ended).begin()

        sizes = self._inventory.rebuildable_ranks(identity)
        if not sizes or identity in self._inventory.unusable_checkpoints:  # Refuted: rebuilds were tried already.
            ask("")
            return
        rebuilding = self.rebuild(identity, sizes, leave, ask)
        most_bytes = max(max(sizes.values()), sum(sizes.values()) // max(1, len(self._nodes)))
        looks = int(most_bytes / REBUILD_BYTES_S_MIN / CHECK_S)

        def look(left: int, before: object) -> None:
            now = moves()
            if not left or now == before:
                rebuilding.give_up("it takes too long" if now != before else f"nothing has moved for {CHECK_S:g} s")
            elif not rebuilding.is_over:
                later(CHECK_S, lambda: look(left - 1, now))

        first = moves()
        later(CHECK_S, lambda: look(looks, first))

    def rebuild(
        self, identity: Identity, ranks: Collection[int], leave: Mapping[str, int], then: Callable[[str], None]
    ) -> Rebuild:
        """Has these ranks' snapshots rebuilt, which no node holds. `leave`: see `collect_part`. `then` hears "", or why
        some failed, after the inventory was updated."""
        inventory, me = self._inventory, self._me

        def made(found: NodeByRank, error: str) -> None:
            for rank, name in found.items():
                inventory.add_rebuilt(identity, rank, "" if name == me else name)
            then(error)

        holders = {rank: [name or me for name in names] for rank, names in inventory.holders_by_rank(identity).items()}
        unfit = {rank: [name or me for name in inventory.damaged_holders.get((identity, rank), ())] for rank in ranks}
        names = [node.name for node in self._nodes] or [me]
        at = {rank: [name for name in names if name not in unfit[rank]] for rank in ranks}
        ended = lambda found, error: self._guard(lambda: made(found, error))  # noqa: E731
        givers = [*self._nodes, *self._memory_nodes] if self._nodes else []
        what = self._service, givers, identity, holders, at, ended, me, leave
        rebuilding = Rebuild(*what, urgent=self._urgent)
        rebuilding.begin()
        return rebuilding

    # -- inside

    def _gather(self, identity: Identity, then: Callable[[GatheredManifest | None, str], None]) -> None:
        inventory, arenas = self._inventory, self._arenas_of(identity)

        def gathered(found: GatheredManifest | None, error: str) -> None:
            lacking = gathering.missing_rank
            if found is None and lacking is not None:
                inventory.mark_damaged(identity, lacking)
                if identity in inventory.complete_checkpoints():
                    log.warning("%s: %s; it is made again from parity", identity, error)
                    self.collect_whole(identity, then)
                    return
            then(found, error)

        ended = lambda found, error: self._guard(lambda: gathered(found, error))  # noqa: E731
        gathering = ManifestGather(
            self._network, self._workers, identity, inventory.holders_by_rank(identity), arenas, ended
        )
        gathering.begin()
