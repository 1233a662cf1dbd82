"""The manifest of a checkpoint in the memory of several nodes, and the place of each of its frames.

The descriptions of the snapshots come from their holders (restore/manifest_request.py). Frames stay where they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from ckpt.agent.net.transport import Frames
from ckpt.agent.snapshots.inventory import order_holders
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint, StagedPart, StagedReader
from ckpt.agent.snapshots.remote_share import encode_parts
from ckpt.errors import AgentError
from ckpt.format.manifest import Manifest
from ckpt.ipc.arena import Arena
from ckpt.ipc.bounded_msgpack import unpack_bounded
from ckpt.types import Identity


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


def read_parts(
    identity: Identity, world: int, arenas: Mapping[int, Arena], sealed: bool
) -> tuple[list[StagedPart], StagedReader]:
    """Describes these arenas: by the hashes in them, unverified, if `sealed`; else by hashing them again, and the
    hashes must match those in the arenas. Runs on a worker thread. Errors: DamagedData."""
    reader = StagedReader()
    if sealed:
        return reader.read_sealed(identity, world, arenas), reader
    return reader.read(identity, world, arenas, keep_hashes=False), reader


def encode_local_parts(identity: Identity, world: int, arenas: Mapping[int, Arena], sealed: bool) -> bytes:
    """As `read_parts`, encoded for another node. Errors: DamagedData."""
    parts, reader = read_parts(identity, world, arenas, sealed)
    return encode_parts(parts, {}, reader.encoded_declarations())


def place_frames(manifest: Manifest, frames: npt.ArrayLike, offsets: npt.ArrayLike, room_bytes: int) -> Frames:
    """Frames of a manifest at these offsets of a memory of `room_bytes`. Errors: AgentError if they do not fit."""
    columns = manifest.frames[np.asarray(frames)]
    hashes = np.stack([columns["hash_hi"], columns["hash_lo"]], axis=1)
    return Frames.from_columns(np.asarray(offsets), columns["length"], hashes, room_bytes)
