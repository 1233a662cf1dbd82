"""The parity store of one node: the parity chunks that it keeps of other nodes' snapshots. Main thread only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from ckpt.ipc.arena import Arena, created_bytes
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.runtime.workers import Workers
    from ckpt.agent.snapshots.described import ParityChunk, ParityChunkName


class ParityStore:
    """`chunks_by_name`: the complete, verified chunks. Chunks that are being filled count in the byte totals. `goes`:
    called for each kept chunk before its memory is reused. Arenas are filled and closed by worker threads: zeroing 1
    GiB would block the main thread for half a second."""

    def __init__(self, workers: Workers, goes: Callable[[ParityChunkName], None] = lambda name: None) -> None:
        self._workers, self._on_evicted = workers, goes
        self.chunks_by_name: dict[ParityChunkName, ParityChunk] = {}
        self._incoming: dict[ParityChunkName, Arena] = {}
        self._evicted_incoming: set[ParityChunkName] = set()  # chunks in `_incoming` that were evicted meanwhile
        self._spare_arenas: list[Arena] = []  # free arenas with warm pages
        # By checkpoint, the chunks that replace its other chunks, at `evict_replaced`.
        self._replacements: dict[Identity, frozenset[ParityChunkName]] = {}
        self.oldest_epoch: Epoch | None = None  # earlier epochs are not kept any more

    @property
    def bytes(self) -> int:
        """Bytes of all arenas: kept, being filled, and spare."""
        return self.used_bytes + _bytes(self._spare_arenas)

    @property
    def used_bytes(self) -> int:
        """`bytes` without the spare arenas."""
        return self._kept_bytes + _bytes(self._incoming.values())

    @property
    def unallocated_bytes(self) -> int:
        """Bytes that chunks being filled will still allocate."""
        return sum(arena.untouched_bytes for arena in self._incoming.values())

    def bytes_of(self, epoch: Epoch) -> int:
        """Bytes kept and being filled of that epoch's checkpoints, with all spare memory."""
        arenas = {name: chunk.arena for name, chunk in self.chunks_by_name.items()} | self._incoming
        return _bytes([*(arena for name, arena in arenas.items() if name.identity.epoch == epoch), *self._spare_arenas])

    @property
    def identities(self) -> set[Identity]:
        return {name.identity for name in self.chunks_by_name}

    def is_incoming(self, name: ParityChunkName) -> bool:
        return name in self._incoming

    def begin_chunk(self, name: ParityChunkName) -> Arena:
        """An arena for that chunk, with arbitrary contents; a spare one if possible. Errors: OSError."""
        found = self._find_spare(name.stripe.length)
        if found is not None:
            self._spare_arenas.remove(found)
        self._incoming[name] = Arena.create(name.stripe.length) if found is None else found
        return self._incoming[name]

    def has_spare(self, length: int) -> bool:
        """Whether a spare arena serves for a chunk of that length."""
        return self._find_spare(length) is not None

    def close_one_spare(self) -> bool:
        """Closes a spare arena. Returns whether there was one."""
        return bool(self.close_spares(1))

    def end_chunks(self, names: Iterable[ParityChunkName], made: Collection[ParityChunk]) -> str:
        """Ends chunks that were begun; `made` are complete. Returns why some of `made` are not kept; "" if all are."""
        unwanted = {c.name for c in made if c.name in self._evicted_incoming or self.is_outdated(c.name.identity)}
        self.chunks_by_name.update((chunk.name, chunk) for chunk in made if chunk.name not in unwanted)
        for name in names:
            arena = self._incoming.pop(name)
            self._evicted_incoming.discard(name)
            if name not in self.chunks_by_name:
                self._recycle_arena(arena)
        return f"nobody goes on from {next(iter(unwanted)).identity} any more" if unwanted else ""

    def is_outdated(self, identity: Identity) -> bool:
        return self.oldest_epoch is not None and identity.epoch < self.oldest_epoch

    def evict(self, goes: Callable[[Identity], bool]) -> None:
        """Evicts these checkpoints' chunks, also those that are still being filled."""
        self._evicted_incoming.update(name for name in self._incoming if goes(name.identity))
        self._replacements = {identity: names for identity, names in self._replacements.items() if not goes(identity)}
        self._evict_chunks([name for name in self.chunks_by_name if goes(name.identity)])

    def evict_other_chunks(self, identity: Identity, names: Collection[ParityChunkName]) -> None:
        """Evicts all other chunks of that checkpoint: they came of a failed attempt."""
        self._replacements.pop(identity, None)
        self._evict_chunks([name for name in self.chunks_by_name if name.identity == identity and name not in names])

    def plan_replacement(self, identity: Identity, names: Collection[ParityChunkName]) -> None:
        """As `evict_other_chunks`, but at `evict_replaced`: until then the other chunks are what replicates the
        checkpoint."""
        self._replacements[identity] = frozenset(names)

    def evict_replaced(self, identity: Identity) -> None:
        """The checkpoint is replicated by the chunks named in `plan_replacement`: evicts its others."""
        names = self._replacements.pop(identity, None)
        if names is not None:
            self.evict_other_chunks(identity, names)

    def _evict_chunks(self, names: Iterable[ParityChunkName]) -> None:
        for name in names:
            self._on_evicted(name)
            self._recycle_arena(self.chunks_by_name.pop(name).arena)

    def chunks_of(self, identity: Identity) -> list[ParityChunk]:
        return [chunk for name, chunk in self.chunks_by_name.items() if name.identity == identity]

    def close_spares(self, missing: int) -> int:
        """Closes spare arenas until about `missing` bytes are free. Returns the bytes freed."""
        freed = 0
        while self._spare_arenas and freed < missing:
            freed += self._spare_arenas[0].size_bytes
            self._workers.close_arenas([self._spare_arenas.pop(0)])
        return freed

    def close(self) -> None:
        self._workers.close_arenas(
            [*(chunk.arena for chunk in self.chunks_by_name.values()), *self._incoming.values(), *self._spare_arenas]
        )
        self.chunks_by_name.clear()
        self._spare_arenas.clear()

    @property
    def _kept_bytes(self) -> int:
        return _bytes(chunk.arena for chunk in self.chunks_by_name.values())

    def _find_spare(self, length: int) -> Arena | None:
        return next((each for each in self._spare_arenas if each.size_bytes == created_bytes(length)), None)

    def _recycle_arena(self, arena: Arena) -> None:
        """Keeps the arena as a warm spare. Closes the oldest spares beyond the bytes of the chunks that are kept."""
        self._spare_arenas.append(arena)
        while _bytes(self._spare_arenas) > self._kept_bytes:
            self.close_spares(1)


def _bytes(arenas: Iterable[Arena]) -> int:
    return sum(arena.size_bytes for arena in arenas)
