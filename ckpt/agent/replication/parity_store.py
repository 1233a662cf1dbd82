"""The parity that a node keeps of others' snapshots. Main thread only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from ckpt.ipc.arena import Arena, created_bytes
from ckpt.types import Epoch, Identity

if TYPE_CHECKING:
    from ckpt.agent.runtime.workers import Workers
    from ckpt.agent.snapshots.described import ParityChunk, ParityChunkName


class ParityStore:
    """`kept`: what is whole and right. Memory that is being filled counts, too. `goes`: told of each that was kept,
    before its memory may be used for something else. That is arenas', which take pages as they are filled, and are
    closed, by threads: the main thread would be silent for half a second for each GiB that is zeroed."""

    def __init__(self, bulk: Workers, goes: Callable[[ParityChunkName], None] = lambda name: None) -> None:
        self._bulk, self._goes = bulk, goes
        self.kept: dict[ParityChunkName, ParityChunk] = {}
        self._coming: dict[ParityChunkName, Arena] = {}
        self._unwanted: set[ParityChunkName] = set()  # of these
        self._spare: list[Arena] = []
        self._instead: dict[
            Identity, frozenset[ParityChunkName]
        ] = {}  # of what is kept of these, once they are safe by it
        self.since: Epoch | None = None  # of epochs before it nothing is kept any more

    @property
    def bytes(self) -> int:
        return self.used_bytes + _bytes(self._spare)

    @property
    def used_bytes(self) -> int:
        """Without what is only warm."""
        return self._kept_bytes + _bytes(self._coming.values())

    @property
    def to_take_bytes(self) -> int:
        """By what is on its way, beside what it has taken."""
        return sum(arena.to_take_bytes for arena in self._coming.values())

    def bytes_of(self, epoch: Epoch) -> int:
        """Of what is kept and on its way of its checkpoints, and of what is warm for them."""
        arenas = {name: chunk.arena for name, chunk in self.kept.items()} | self._coming
        return _bytes([*(arena for name, arena in arenas.items() if name.identity.epoch == epoch), *self._spare])

    @property
    def identities(self) -> set[Identity]:
        return {name.identity for name in self.kept}

    def is_coming(self, name: ParityChunkName) -> bool:
        return name in self._coming

    def begin(self, name: ParityChunkName) -> Arena:
        """Memory for it, with anything in it: some whose pages are warm, if there is. Errors: OSError."""
        found = self._warm(name.striped.length)
        if found is not None:
            self._spare.remove(found)
        self._coming[name] = Arena.create(name.striped.length) if found is None else found
        return self._coming[name]

    def is_warm(self, length: int) -> bool:
        """Whether what is begun with that length takes no further memory."""
        return self._warm(length) is not None

    def drop_spare(self) -> bool:
        """Gives back some of what is only warm; whether there was any."""
        return bool(self.cool(1))

    def end(self, names: Iterable[ParityChunkName], made: Collection[ParityChunk]) -> str:
        """Of what was begun under these names this much is whole. Returns why some of that is not kept; "": it is."""
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
        """Of these nothing is kept any more, nor what of them is still on its way."""
        self._unwanted.update(name for name in self._coming if goes(name.identity))
        self._instead = {identity: names for identity, names in self._instead.items() if not goes(identity)}
        self._forget([name for name in self.kept if goes(name.identity)])

    def only(self, identity: Identity, names: Collection[ParityChunkName]) -> None:
        """Of that checkpoint nothing but these is wanted any more: the rest came of an attempt that failed."""
        self._instead.pop(identity, None)
        self._forget([name for name in self.kept if name.identity == identity and name not in names])

    def replace(self, identity: Identity, names: Collection[ParityChunkName]) -> None:
        """The same once these are where they should be: until then it is the rest that makes it safe."""
        self._instead[identity] = frozenset(names)

    def replaced(self, identity: Identity) -> None:
        """They are."""
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
        """Gives back memory that is only warm, about so many bytes of it; how many it was."""
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
        """Its pages stay warm for the next generation: as much as one takes, and the newest, since sizes change."""
        self._spare.append(arena)
        while _bytes(self._spare) > self._kept_bytes:
            self.cool(1)


def _bytes(arenas: Iterable[Arena]) -> int:
    return sum(arena.bytes for arena in arenas)
