"""A checkpoint that lies in the memory of several nodes: from what each of them holds to one manifest, and to where
each rank's frames are to be had."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt

from ckpt.agent.net.transport import Frames
from ckpt.agent.runtime.workers import Lane, Workers, failure
from ckpt.agent.snapshots.inventory import spread
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint, StagedPart, StagedReader, put_together
from ckpt.agent.snapshots.remote_share import decode_parts, encode_parts
from ckpt.errors import AgentError
from ckpt.format.manifest import Manifest
from ckpt.ipc.arena import Arena
from ckpt.ipc.bounded_msgpack import unpacked
from ckpt.ipc.messages import Message
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class FramePlaces:
    """Where the frames of a checkpoint lie in memory. `ranks`, `offsets`: by frame: bytes of the memfd of that rank's
    arena; rank -1: nobody holds that frame. `sizes`: of the arenas, by rank. `holders`: who has each rank's arena, the
    first to be asked first; "" is this node."""

    identity: Identity
    ranks: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sizes: dict[int, int]
    holders: dict[int, list[str]]

    @property
    def lacking(self) -> npt.NDArray[np.int64] | None:
        """The frames that nobody holds; None: there are none."""
        found = np.flatnonzero(self.ranks < 0)
        return found if len(found) else None

    def numbers(self, rank: int) -> npt.NDArray[np.int64]:
        """Of the frames that lie in that rank's arena, in the order in which a transfer counts them."""
        return np.flatnonzero(self.ranks == rank)

    def frames(self, rank: int, manifest: Manifest) -> Frames:
        """The same as a transfer has them, where they lie in the arena. Errors: AgentError."""
        numbers = self.numbers(rank)
        return placed(manifest, numbers, self.offsets[numbers], self.sizes[rank])

    def seen_by(self, me: str, other: str) -> FramePlaces:
        """The same for another node, `me`, told by `other`. What all nodes want they ask of different ones first."""
        names, turn = {"": other, me: ""}, zlib.crc32(me.encode())
        holders = {
            rank: spread([names.get(each, each) for each in held], turn + rank) for rank, held in self.holders.items()
        }
        return replace(self, holders=holders)

    def fields(self) -> dict[str, Any]:
        return {"holders": len(self.holders)}

    def blobs(self) -> list[bytes]:
        about: bytes = msgpack.packb([list(self.sizes.items()), list(self.holders.items())])
        return [self.ranks.astype("<i4").tobytes(), self.offsets.astype("<i8").tobytes(), about]

    @staticmethod
    def parse(identity: Identity, blobs: list[bytes], manifest: Manifest) -> FramePlaces:
        """Errors: AgentError, ValueError, TypeError, LookupError."""
        ranks = np.frombuffer(blobs[0], "<i4").astype(np.int64)
        offsets = np.frombuffer(blobs[1], "<i8").astype(np.int64)
        told_sizes, told_holders = unpacked(blobs[2], "where frames lie")
        sizes = {int(rank): int(size) for rank, size in told_sizes}
        holders = {int(rank): [str(name) for name in names] for rank, names in told_holders}
        held = set(np.unique(ranks).tolist()) - {-1}
        if not len(ranks) == len(offsets) == len(manifest.frames) or not held <= sizes.keys():
            raise AgentError(f"where the frames of {identity} lie was told wrong")
        return FramePlaces(identity, ranks, offsets, sizes, holders)


@dataclass(frozen=True, slots=True)
class GatheredManifest:
    """`checkpoint`: with the arenas that this node has."""

    checkpoint: MemoryCheckpoint
    places: FramePlaces

    @property
    def is_here(self) -> bool:
        """Whether all of it lies on this node."""
        return len(self.checkpoint.arenas) == len(self.places.holders)


T = TypeVar("T")


class ManifestRequest(Generic[T]):
    """Asks the holders of one identity what they know of its snapshots: for each rank the first, and where that cannot
    say it the next. `holders`: by rank, of a world of so many. `arenas`: those that this node has, by rank. `then`
    hears what was made of it, or None and why nothing was; once."""

    sealed = False  # whether what the arenas say of themselves will do: see Reader.sealed

    def __init__(
        self,
        network: PeerNetwork | None,
        bulk: Workers,
        identity: Identity,
        world: int,
        holders: Mapping[int, Sequence[str]],
        arenas: Mapping[int, Arena],
        then: Callable[[T | None, str], None],
    ) -> None:
        self._network, self._bulk, self._then = network, bulk, then
        self._identity, self._world, self._arenas = identity, world, dict(arenas)
        self._holders = {rank: list(names) for rank, names in holders.items()}  # but those that could not give it
        self._rest = {  # that have not been asked yet
            rank: [*([""] if rank in arenas else []), *(name for name in names if name)]
            for rank, names in holders.items()
        }
        self._parts: list[StagedPart] = []
        self._sizes = {rank: arena.bytes for rank, arena in arenas.items()}
        self.left = set(holders)  # ranks of which nothing is known yet
        self._making = False
        self._over = False

    def begin(self) -> None:
        self._ask_next(list(self._holders), "nobody holds it")

    def _lacks(self, rank: int, why: str) -> None:
        """Nobody gives what he holds of it."""
        raise NotImplementedError

    def _make(self) -> T:
        """On a thread: of all parts. Errors: CkptError."""
        raise NotImplementedError

    def _ask_next(self, ranks: Sequence[int], why: str) -> None:
        """`why`: what the one before said."""
        asked: dict[str, list[int]] = {}
        for rank in ranks:
            if not self._rest[rank]:
                self._lacks(rank, why)
                if self._over:
                    return
                continue
            asked.setdefault(self._rest[rank].pop(0), []).append(rank)
        for name, theirs in asked.items():
            self._ask(name, theirs)

    def _ask(self, name: str, ranks: list[int]) -> None:
        if not name:
            arenas = {rank: self._arenas[rank] for rank in ranks}
            read = sealed_parts if self.sealed else read_parts
            work = lambda: read(self._identity, self._world, arenas)  # noqa: E731
            self._bulk.run(Lane.FRONT, work, lambda done: self._read_here(ranks, done))
        elif self._network is None:
            self._refused(name, ranks, f"there is no way to agent {name}")
        else:
            fields = {"t": "parts", "identity": str(self._identity), "ranks": ranks, "world": self._world}
            fields["sealed"] = self.sealed
            heard = lambda answer, error: self._heard(name, ranks, answer, error)  # noqa: E731
            self._network.ask(name, fields, (), heard)

    def _read_here(self, ranks: list[int], done: Future[list[StagedPart]]) -> None:
        if error := failure(done):
            self._refused("", ranks, error)
        else:
            self._got(done.result())

    def _heard(self, name: str, ranks: list[int], answer: Message | None, error: str) -> None:
        if self._making:
            return  # too late
        try:
            if answer is None:
                raise AgentError(error)
            parts = decode_parts(answer.blobs[0], {})
            sizes = {int(rank): int(size) for rank, size in answer.fields["sizes"]}
            if sorted(part.declaration.rank for part in parts) != sorted(ranks) or sizes.keys() != set(ranks):
                raise AgentError("it has told of other ranks than it was asked for")
        except Exception as exc:  # whatever another agent may have sent: a start waits for this
            self._refused(name, ranks, f"agent {name} does not give {self._identity}: {exc!s:.500}")
            return
        self._sizes |= sizes
        self._got(parts)

    def _refused(self, name: str, ranks: list[int], error: str) -> None:
        """It may be one rank's part that is damaged there, and not those of the others."""
        if self._over or self._making:
            return
        if len(ranks) > 1:
            for rank in ranks:
                self._ask(name, [rank])
            return
        log.warning("rank %d of %s: %s", ranks[0], self._identity, error)
        if not name:
            del self._arenas[ranks[0]]
        self._holders[ranks[0]] = [each for each in self._holders[ranks[0]] if each != name]
        self._ask_next(ranks, error)

    def _got(self, parts: list[StagedPart]) -> None:
        if self._making:
            return
        self.left -= {part.declaration.rank for part in parts}
        self._parts += parts
        self._make_if_all()

    def _make_if_all(self) -> None:
        if not self.left and not self._over and not self._making:
            self._making = True
            self._bulk.run(Lane.FRONT, self._make, self._made)

    def _made(self, done: Future[T]) -> None:
        if error := failure(done):
            self._fail(error)
        elif not self._over:
            self._over = True
            self._then(done.result(), "")

    def _fail(self, error: str) -> None:
        if not self._over:
            self._over = True
            self._then(None, error)


class ManifestGather(ManifestRequest[GatheredManifest]):
    """Puts a checkpoint together of which each rank is held."""

    def __init__(
        self,
        network: PeerNetwork | None,
        bulk: Workers,
        identity: Identity,
        holders: Mapping[int, Sequence[str]],
        arenas: Mapping[int, Arena],
        then: Callable[[GatheredManifest | None, str], None],
    ) -> None:
        super().__init__(network, bulk, identity, len(holders), holders, arenas, then)
        self.lacking: int | None = None  # a rank that nobody who holds it could give

    def _lacks(self, rank: int, why: str) -> None:
        self.lacking = rank if self.lacking is None else self.lacking
        self._fail(why)

    def _make(self) -> GatheredManifest:
        """On a thread. Errors: CkptError where the parts do not belong together, or cannot lie where they are said
        to."""
        made = put_together(self._identity, self._parts, self._arenas)
        places = FramePlaces(self._identity, made.ranks, made.offsets, self._sizes, self._holders)
        for rank in self._sizes:
            places.frames(rank, made.manifest)
        return GatheredManifest(made, places)


def read_parts(identity: Identity, world: int, arenas: Mapping[int, Arena]) -> list[StagedPart]:
    """On a thread: hashes these arenas again, which must hold what their agent saw in them. Errors: DamagedData."""
    return StagedReader().read(identity, world, arenas, keep_hashes=False)


def sealed_parts(identity: Identity, world: int, arenas: Mapping[int, Arena]) -> list[StagedPart]:
    """On a thread: what these arenas say of themselves. Errors: DamagedData."""
    return StagedReader().sealed(identity, world, arenas)


def encoded_parts(identity: Identity, world: int, arenas: Mapping[int, Arena], sealed: bool = False) -> bytes:
    """The same for another node. Errors: DamagedData."""
    reader = StagedReader()
    told = reader.sealed(identity, world, arenas) if sealed else reader.read(identity, world, arenas, keep_hashes=False)
    return encode_parts(told, {}, reader.declared())


def placed(manifest: Manifest, frames: npt.ArrayLike, offsets: npt.ArrayLike, room_bytes: int) -> Frames:
    """These frames of it, at these offsets of a memory of so many bytes. Errors: AgentError."""
    columns = manifest.frames[np.asarray(frames)]
    hashes = np.stack([columns["hash_hi"], columns["hash_lo"]], axis=1)
    return Frames.placed(np.asarray(offsets), columns["length"], hashes, room_bytes)
