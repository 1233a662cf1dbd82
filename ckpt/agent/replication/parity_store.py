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
    """`kept`: the complete, verified chunks. Chunks that are being filled count in the byte totals. `goes`: called for
    each kept chunk before its memory is reused. Arenas are filled and closed by worker threads: zeroing 1 GiB would
    block the main thread for half a second."""

    def __init__(self, bulk: Workers, goes: Callable[[ParityChunkName], None] = lambda name: None) -> None:
        self._bulk, self._goes = bulk, goes
        self.kept: dict[ParityChunkName, ParityChunk] = {}
        self._coming: dict[ParityChunkName, Arena] = {}
        self._unwanted: set[ParityChunkName] = set()  # chunks in `_coming` that were evicted meanwhile
        self._spare: list[Arena] = []  # free arenas with warm pages
        # By checkpoint, the chunks that replace its other chunks, at `replaced`.
        self._instead: dict[Identity, frozenset[ParityChunkName]] = {}
        self.since: Epoch | None = None  # earlier epochs are not kept any more

    @property
    def bytes(self) -> int:
        """Bytes of all arenas: kept, being filled, and spare."""
        return self.used_bytes + _bytes(self._spare)

    @property
    def used_bytes(self) -> int:
        """`bytes` without the spare arenas."""
        return self._kept_bytes + _bytes(self._coming.values())

    @property
    def to_take_bytes(self) -> int:
        """Bytes that chunks being filled will still allocate."""
        return sum(arena.to_take_bytes for arena in self._coming.values())

    def bytes_of(self, epoch: Epoch) -> int:
        """Bytes kept and being filled of that epoch's checkpoints, with all spare memory."""
        arenas = {name: chunk.arena for name, chunk in self.kept.items()} | self._coming
        return _bytes([*(arena for name, arena in arenas.items() if name.identity.epoch == epoch), *self._spare])

    @property
    def identities(self) -> set[Identity]:
        return {name.identity for name in self.kept}

    def is_coming(self, name: ParityChunkName) -> bool:
        return name in self._coming

    def begin(self, name: ParityChunkName) -> Arena:
        """An arena for that chunk, with arbitrary contents; a spare one if possible. Errors: OSError."""
        found = self._warm(name.striped.length)
        if found is not None:
            self._spare.remove(found)
        self._coming[name] = Arena.create(name.striped.length) if found is None else found
        return self._coming[name]

    def is_warm(self, length: int) -> bool:
        """Whether a spare arena serves for a chunk of that length."""
        return self._warm(length) is not None

    def drop_spare(self) -> bool:
        """Closes a spare arena. Returns whether there was one."""
        return bool(self.cool(1))

    def end(self, names: Iterable[ParityChunkName], made: Collection[ParityChunk]) -> str:
        """Ends chunks that were begun; `made` are complete. Returns why some of `made` are not kept; "" if all are."""
        unwanted = {c.name for c in made if c.name in self._unwanted or self.is_outdated(c.name.identity)}
        self.kept.update((chunk.name, chunk) for chunk in made if chunk.name not in unwanted)
        for name in names:
            arena = self._coming.pop(name)
            self._unwanted.discard(name)
            if name not in self.kept:
                self._put_back(arena)
        return f"nobody goes on from {next(iter(unwanted)).identity} any more" if unwanted else ""

    def is_outdated(self, identity: Identity) -> bool:
        return self.since is not None and identity.epoch < self.since

    def forget(self, goes: Callable[[Identity], bool]) -> None:
        """Evicts these checkpoints' chunks, also those that are still being filled."""
        self._unwanted.update(name for name in self._coming if goes(name.identity))
        self._instead = {identity: names for identity, names in self._instead.items() if not goes(identity)}
        self._forget([name for name in self.kept if goes(name.identity)])

    def only(self, identity: Identity, names: Collection[ParityChunkName]) -> None:
        """Evicts all other chunks of that checkpoint: they came of a failed attempt."""
        self._instead.pop(identity, None)
        self._forget([name for name in self.kept if name.identity == identity and name not in names])

    def replace(self, identity: Identity, names: Collection[ParityChunkName]) -> None:
        """As `only`, but at `replaced`: until then the other chunks are what replicates the checkpoint."""
        self._instead[identity] = frozenset(names)

    def replaced(self, identity: Identity) -> None:
        """The checkpoint is replicated by the chunks named in `replace`: evicts its others."""
        names = self._instead.pop(identity, None)
        if names is not None:
            self.only(identity, names)

    def _forget(self, names: Iterable[ParityChunkName]) -> None:
        for name in names:
            self._goes(name)
            self._put_back(self.kept.pop(name).arena)

    def of(self, identity: Identity) -> list[ParityChunk]:
        return [chunk for name, chunk in self.kept.items() if name.identity == identity]

    def cool(self, missing: int) -> int:
        """Closes spare arenas until about `missing` bytes are free. Returns the bytes freed."""
        freed = 0
        while self._spare and freed < missing:
            freed += self._spare[0].bytes
            self._bulk.close_arenas([self._spare.pop(0)])
        return freed

    def close(self) -> None:
        self._bulk.close_arenas([*(chunk.arena for chunk in self.kept.values()), *self._coming.values(), *self._spare])
        self.kept.clear()
        self._spare.clear()

    @property
    def _kept_bytes(self) -> int:
        return _bytes(chunk.arena for chunk in self.kept.values())

    def _warm(self, length: int) -> Arena | None:
        return next((each for each in self._spare if each.bytes == created_bytes(length)), None)

    def _put_back(self, arena: Arena) -> None:
        """Keeps the arena as a warm spare. Closes the oldest spares beyond the bytes of the chunks that are kept."""
        self._spare.append(arena)
        while _bytes(self._spare) > self._kept_bytes:
            self.cool(1)


def _bytes(arenas: Iterable[Arena]) -> int:
    return sum(arena.bytes for arena in arenas)
