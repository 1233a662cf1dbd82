"""The manifest of a checkpoint in the memory of several nodes, and the place of each of its frames.

Asks the holders for the descriptions of their snapshots, and puts these together. Frames stay where they are.
"""

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
from ckpt.agent.snapshots.inventory import order_holders
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint, StagedPart, StagedReader, assemble_checkpoint
from ckpt.agent.snapshots.remote_share import decode_parts, encode_parts
from ckpt.errors import AgentError
from ckpt.format.manifest import Manifest
from ckpt.ipc.arena import Arena
from ckpt.ipc.bounded_msgpack import unpack_bounded
from ckpt.ipc.messages import Message
from ckpt.types import Identity

if TYPE_CHECKING:
    from ckpt.agent.net.peer_network import PeerNetwork

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class FramePlaces:
    """The places of a checkpoint's frames in memory. `ranks`, `offsets`: by frame, the rank of its arena, and the bytes
    of that memfd; rank -1: no node holds the frame. `sizes`: of the arenas, by rank. `holders`: the nodes with each
    rank's arena, in the order in which to ask them; "" is this node."""

    identity: Identity
    ranks: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    arena_sizes: dict[int, int]
    holders: dict[int, list[str]]

    @property
    def missing_frames(self) -> npt.NDArray[np.int64]:
        """The frames that no node holds."""
        return np.flatnonzero(self.ranks < 0)

    def numbers(self, rank: int) -> npt.NDArray[np.int64]:
        """The numbers of the frames in that rank's arena, in the order of a transfer."""
        return np.flatnonzero(self.ranks == rank)

    def frames(self, rank: int, manifest: Manifest) -> Frames:
        """The frames in that rank's arena, for a transfer. Errors: AgentError if they do not fit into the arena."""
        numbers = self.numbers(rank)
        return place_frames(manifest, numbers, self.offsets[numbers], self.arena_sizes[rank])

    def translate_holders(self, me: str, other: str) -> FramePlaces:
        """These places as node `me` sees them, as told by node `other`. Each node gets another order of holders, to
        spread the load of frames that all need."""
        names, turn = {"": other, me: ""}, zlib.crc32(me.encode())
        holders = {
            rank: order_holders([names.get(each, each) for each in held], turn + rank)
            for rank, held in self.holders.items()
        }
        return replace(self, holders=holders)

    def fields(self) -> dict[str, Any]:
        """The message fields that go with `blobs`."""
        return {"holders": len(self.holders)}

    def blobs(self) -> list[bytes]:
        """The message blobs that `parse` takes."""
        about: bytes = msgpack.packb([list(self.arena_sizes.items()), list(self.holders.items())])
        return [self.ranks.astype("<i4").tobytes(), self.offsets.astype("<i8").tobytes(), about]

    @staticmethod
    def parse(identity: Identity, blobs: list[bytes], manifest: Manifest) -> FramePlaces:
        """The places in another node's message. Errors: AgentError, ValueError, TypeError, LookupError."""
        ranks = np.frombuffer(blobs[0], "<i4").astype(np.int64)
        offsets = np.frombuffer(blobs[1], "<i8").astype(np.int64)
        told_sizes, told_holders = unpack_bounded(blobs[2], "where frames lie")
        sizes = {int(rank): int(size) for rank, size in told_sizes}
        holders = {int(rank): [str(name) for name in names] for rank, names in told_holders}
        held = set(np.unique(ranks).tolist()) - {-1}
        if not len(ranks) == len(offsets) == len(manifest.frames) or not held <= sizes.keys():
            raise AgentError(f"where the frames of {identity} lie was told wrong")
        return FramePlaces(identity, ranks, offsets, sizes, holders)


@dataclass(frozen=True, slots=True)
class GatheredManifest:
    """A checkpoint gathered from several nodes. `checkpoint`: its manifest, with the arenas on this node."""

    checkpoint: MemoryCheckpoint
    places: FramePlaces

    @property
    def is_local(self) -> bool:
        """Whether all arenas are on this node."""
        return len(self.checkpoint.arenas) == len(self.places.holders)


T = TypeVar("T")


class ManifestRequest(Generic[T]):
    """Requests the descriptions of one checkpoint's snapshots from their holders: for each rank from the first holder,
    after a failure from the next one. `holders`: by rank; `world`: number of ranks. `arenas`: those on this node, by
    rank. `then` is called once on the main thread, with the result and "", or with None and an error."""

    # Whether the hashes in the arenas suffice; see StagedReader.sealed.
    trusts_sealed_hashes = False

    def __init__(
        self,
        network: PeerNetwork | None,
        workers: Workers,
        identity: Identity,
        world: int,
        holders: Mapping[int, Sequence[str]],
        arenas: Mapping[int, Arena],
        then: Callable[[T | None, str], None],
    ) -> None:
        self._network, self._workers, self._on_done = network, workers, then
        self._identity, self._world, self._arenas = identity, world, dict(arenas)
        # By rank: the holders that have not failed, and the holders not asked yet.
        self._holders = {rank: list(names) for rank, names in holders.items()}
        self._untried_holders = {
            rank: [*([""] if rank in arenas else []), *(name for name in names if name)]
            for rank, names in holders.items()
        }
        self._parts: list[StagedPart] = []
        self._sizes = {rank: arena.size_bytes for rank, arena in arenas.items()}
        self.pending_ranks = set(holders)  # ranks not described yet
        self._is_assembling = False
        self._is_done = False

    def begin(self) -> None:
        """Sends the first requests."""
        self._request_next_holder(list(self._holders), "nobody holds it")

    def _handle_missing_rank(self, rank: int, why: str) -> None:
        """No holder could describe that rank's snapshot. `why`: the last error."""
        raise NotImplementedError

    def _make_result(self) -> T:
        """Makes the result from all parts; runs on a worker thread. Errors: CkptError."""
        raise NotImplementedError

    def _request_next_holder(self, ranks: Sequence[int], why: str) -> None:
        """Asks the next holder of each rank. `why`: the error of the former one."""
        asked: dict[str, list[int]] = {}
        for rank in ranks:
            if not self._untried_holders[rank]:
                self._handle_missing_rank(rank, why)
                if self._is_done:
                    return
                continue
            asked.setdefault(self._untried_holders[rank].pop(0), []).append(rank)
        for name, theirs in asked.items():
            self._request_parts(name, theirs)

    def _request_parts(self, name: str, ranks: list[int]) -> None:
        if not name:
            arenas = {rank: self._arenas[rank] for rank in ranks}
            read = read_sealed_parts if self.trusts_sealed_hashes else hash_parts
            work = lambda: read(self._identity, self._world, arenas)  # noqa: E731
            self._workers.run(Lane.FRONT, work, lambda done: self._handle_local_parts(ranks, done))
        elif self._network is None:
            self._retry_elsewhere(name, ranks, f"there is no way to agent {name}")
        else:
            fields = {"t": "describe-snapshots", "identity": str(self._identity), "ranks": ranks, "world": self._world}
            fields["sealed"] = self.trusts_sealed_hashes
            heard = lambda answer, error: self._handle_answer(name, ranks, answer, error)  # noqa: E731
            self._network.request(name, fields, (), heard)

    def _handle_local_parts(self, ranks: list[int], done: Future[list[StagedPart]]) -> None:
        if error := failure(done):
            self._retry_elsewhere("", ranks, error)
        else:
            self._add_parts(done.result())

    def _handle_answer(self, name: str, ranks: list[int], answer: Message | None, error: str) -> None:
        if self._is_assembling:
            return  # the answer is late: all parts are there
        try:
            if answer is None:
                raise AgentError(error)
            parts = decode_parts(answer.blobs[0], {})
            sizes = {int(rank): int(size) for rank, size in answer.fields["sizes"]}
            if sorted(part.declaration.rank for part in parts) != sorted(ranks) or sizes.keys() != set(ranks):
                raise AgentError("it has told of other ranks than it was asked for")
        # A malformed answer may raise anything, and a start waits for the result.
        except Exception as exc:
            self._retry_elsewhere(name, ranks, f"agent {name} does not give {self._identity}: {exc!s:.500}")
            return
        self._sizes |= sizes
        self._add_parts(parts)

    def _retry_elsewhere(self, name: str, ranks: list[int], error: str) -> None:
        """Asks the holder again for each rank alone, since only one may be damaged; then asks the next holder."""
        if self._is_done or self._is_assembling:
            return
        if len(ranks) > 1:
            for rank in ranks:
                self._request_parts(name, [rank])
            return
        log.warning("rank %d of %s: %s", ranks[0], self._identity, error)
        if not name:
            del self._arenas[ranks[0]]
        self._holders[ranks[0]] = [each for each in self._holders[ranks[0]] if each != name]
        self._request_next_holder(ranks, error)

    def _add_parts(self, parts: list[StagedPart]) -> None:
        if self._is_assembling:
            return
        self.pending_ranks -= {part.declaration.rank for part in parts}
        self._parts += parts
        self._assemble_if_complete()

    def _assemble_if_complete(self) -> None:
        if not self.pending_ranks and not self._is_done and not self._is_assembling:
            self._is_assembling = True
            self._workers.run(Lane.FRONT, self._make_result, self._finish)

    def _finish(self, done: Future[T]) -> None:
        if error := failure(done):
            self._fail(error)
        elif not self._is_done:
            self._is_done = True
            self._on_done(done.result(), "")

    def _fail(self, error: str) -> None:
        if not self._is_done:
            self._is_done = True
            self._on_done(None, error)


class ManifestGather(ManifestRequest[GatheredManifest]):
    """Gathers the manifest of a checkpoint whose ranks all have a holder. `lacking`: the first rank that no holder
    could describe; the gather fails then."""

    def __init__(
        self,
        network: PeerNetwork | None,
        workers: Workers,
        identity: Identity,
        holders: Mapping[int, Sequence[str]],
        arenas: Mapping[int, Arena],
        then: Callable[[GatheredManifest | None, str], None],
    ) -> None:
        super().__init__(network, workers, identity, len(holders), holders, arenas, then)
        self.missing_rank: int | None = None

    def _handle_missing_rank(self, rank: int, why: str) -> None:
        self.missing_rank = rank if self.missing_rank is None else self.missing_rank
        self._fail(why)

    def _make_result(self) -> GatheredManifest:
        """Errors: CkptError if the parts do not belong together, or a frame does not fit into its arena."""
        made = assemble_checkpoint(self._identity, self._parts, self._arenas)
        places = FramePlaces(self._identity, made.ranks, made.offsets, self._sizes, self._holders)
        for rank in self._sizes:
            places.frames(rank, made.manifest)
        return GatheredManifest(made, places)


def hash_parts(identity: Identity, world: int, arenas: Mapping[int, Arena]) -> list[StagedPart]:
    """Describes these arenas by hashing them again; the hashes must match those in the arenas. Runs on a worker thread.
    Errors: DamagedData."""
    return StagedReader().read(identity, world, arenas, keep_hashes=False)


def read_sealed_parts(identity: Identity, world: int, arenas: Mapping[int, Arena]) -> list[StagedPart]:
    """Describes these arenas by the hashes in them, unverified. Runs on a worker thread. Errors: DamagedData."""
    return StagedReader().read_sealed(identity, world, arenas)


def encode_local_parts(identity: Identity, world: int, arenas: Mapping[int, Arena], sealed: bool = False) -> bytes:
    """As `hash_parts`, or `read_sealed_parts` if `sealed`, encoded for another node. Errors: DamagedData."""
    reader = StagedReader()
    told = (
        reader.read_sealed(identity, world, arenas)
        if sealed
        else reader.read(identity, world, arenas, keep_hashes=False)
    )
    return encode_parts(told, {}, reader.encoded_declarations())


def place_frames(manifest: Manifest, frames: npt.ArrayLike, offsets: npt.ArrayLike, room_bytes: int) -> Frames:
    """Frames of a manifest at these offsets of a memory of `room_bytes`. Errors: AgentError if they do not fit."""
    columns = manifest.frames[np.asarray(frames)]
    hashes = np.stack([columns["hash_hi"], columns["hash_lo"]], axis=1)
    return Frames.from_columns(np.asarray(offsets), columns["length"], hashes, room_bytes)
