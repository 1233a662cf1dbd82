"""The request for the manifest of a checkpoint in memory: asks the holders of its snapshots to describe them.

For each rank the first holder is asked, after a failure the next one. Frames stay where they are. Main thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.runtime.coroutines import gather, run_on
from ckpt.agent.runtime.workers import Lane, Workers, error_text
from ckpt.agent.snapshots.manifest_gather import FramePlaces, GatheredManifest, read_parts
from ckpt.agent.snapshots.memory_checkpoint import StagedPart, assemble_checkpoint
from ckpt.agent.snapshots.remote_share import decode_parts
from ckpt.errors import AgentError
from ckpt.ipc.arena import Arena
from ckpt.types import Identity

log = logging.getLogger("ckpt")


class RankMissing(AgentError):
    """No holder describes the snapshot of `rank`."""

    def __init__(self, why: str, rank: int = 0) -> None:
        super().__init__(why)
        self.rank = rank


class ManifestRequest:
    """`holders`: by rank; `world`: number of ranks. `arenas`: those on this node, by rank. `is_partial`: ranks that no
    holder describes are left out, and the hashes in the arenas are taken as they are, unverified. `parts`: the
    descriptions so far. `arena_sizes`: by rank. `holders`: those that have not failed."""

    def __init__(
        self,
        network: PeerNetwork | None,
        workers: Workers,
        identity: Identity,
        world: int,
        holders: Mapping[int, Sequence[str]],
        arenas: Mapping[int, Arena],
        is_partial: bool = False,
    ) -> None:
        self.parts: list[StagedPart] = []
        self.arenas = dict(arenas)
        self.arena_sizes = {rank: arena.size_bytes for rank, arena in arenas.items()}
        self.holders = {rank: list(names) for rank, names in holders.items()}
        self._network, self._workers = network, workers
        self._identity, self._world, self._is_partial = identity, world, is_partial
        self._untried_holders = {
            rank: [*([""] if rank in arenas else []), *(name for name in names if name)]
            for rank, names in holders.items()
        }

    async def run(self) -> None:
        """Asks for all ranks. Errors: RankMissing, unless the request is partial."""
        await self._ask_next_holders(list(self.holders), "nobody holds it")

    async def _ask_next_holders(self, ranks: Sequence[int], why: str) -> None:
        """Asks the next holder of each rank. `why`: the error of the former one."""
        asked: dict[str, list[int]] = {}
        for rank in ranks:
            if self._untried_holders[rank]:
                asked.setdefault(self._untried_holders[rank].pop(0), []).append(rank)
            elif self._is_partial:
                log.info("rank %d of %s is read from the store: %s", rank, self._identity, why)
            else:
                raise RankMissing(why, rank)
        await gather(self._ask(name, theirs) for name, theirs in asked.items())

    async def _ask(self, name: str, ranks: list[int]) -> None:
        try:
            self.parts += await (self._ask_node(name, ranks) if name else self._read_here(ranks))
        except Exception as exc:  # A malformed answer can raise anything, and a start waits for the result.
            if len(ranks) > 1:  # Only one of the snapshots may be damaged.
                await gather(self._ask(name, [rank]) for rank in ranks)
                return
            error = f"agent {name} does not give {self._identity}: {exc!s:.500}" if name else error_text(exc)
            log.warning("rank %d of %s: %s", ranks[0], self._identity, error)
            if not name:
                del self.arenas[ranks[0]]
            self.holders[ranks[0]] = [each for each in self.holders[ranks[0]] if each != name]
            await self._ask_next_holders(ranks, error)

    async def _read_here(self, ranks: Sequence[int]) -> list[StagedPart]:
        about = self._identity, self._world, {rank: self.arenas[rank] for rank in ranks}, self._is_partial
        return (await run_on(self._workers, Lane.FRONT, lambda: read_parts(*about)))[0]

    async def _ask_node(self, name: str, ranks: Sequence[int]) -> list[StagedPart]:
        if self._network is None:
            raise AgentError("there is no way to it")
        fields = {"t": "describe-snapshots", "identity": str(self._identity), "ranks": ranks, "world": self._world}
        answer = await self._network.request(name, {**fields, "sealed": self._is_partial})
        parts = decode_parts(answer.blobs[0], {})
        sizes = {int(rank): int(size) for rank, size in answer.fields["sizes"]}
        if sorted(part.declaration.rank for part in parts) != sorted(ranks) or sizes.keys() != set(ranks):
            raise AgentError("it has told of other ranks than it was asked for")
        self.arena_sizes |= sizes
        return parts


async def gather_manifest(
    network: PeerNetwork | None,
    workers: Workers,
    identity: Identity,
    holders: Mapping[int, Sequence[str]],
    arenas: Mapping[int, Arena],
) -> GatheredManifest:
    """Gathers the manifest of a checkpoint whose ranks all have a holder. Errors: RankMissing; CkptError if the parts
    do not belong together, or a frame does not fit into its arena."""
    asked = ManifestRequest(network, workers, identity, len(holders), holders, arenas)
    await asked.run()

    def assemble() -> GatheredManifest:
        made = assemble_checkpoint(identity, asked.parts, asked.arenas)
        places = FramePlaces(identity, made.ranks, made.offsets, asked.arena_sizes, asked.holders)
        for rank in asked.arena_sizes:
            places.frames(rank, made.manifest)
        return GatheredManifest(made, places)

    return await run_on(workers, Lane.FRONT, assemble)
