"""Descriptions of a node's memory for other nodes: one rank's snapshot, and a parity chunk of several snapshots."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgpack
import numpy as np

from ckpt.agent.net.transport import Frames
from ckpt.errors import AgentError, DamagedData
from ckpt.format.declaration import decode
from ckpt.format.frames import frame_hash
from ckpt.format.parity import Row
from ckpt.ipc.arena import DATA_OFFSET, PAGE, Arena
from ckpt.ipc.bounded_msgpack import unpack_bounded
from ckpt.placement.rebuild import Striped
from ckpt.types import Identity

ARENA_BYTES_MAX = 1 << 42
COPIES_MAX = 4096  # ranks of one checkpoint that one node keeps
PIECE_BYTES = 4 << 20  # frame size of what lies behind the data, and of parity


@dataclass(frozen=True, slots=True)
class DescribedSnapshot:
    """One rank's snapshot as described to another node. `arena_bytes`: bytes of the arena. `first_page`: its first
    page. `frames`: everything to copy, at its place in the arena."""

    rank: int
    arena_bytes: int
    first_page: bytes
    frames: Frames

    @property
    def staged_bytes(self) -> int:
        """The bytes of all frames."""
        return int(self.frames.lengths.sum())


def describe_snapshots(identity: Identity, arenas: Mapping[int, Arena]) -> list[DescribedSnapshot]:
    """Describes the arenas of these ranks; runs on a worker thread. Errors: DamagedData if an arena does not hold
    `identity`."""
    return [_describe_snapshot(identity, rank, arena) for rank, arena in sorted(arenas.items())]


def _describe_snapshot(identity: Identity, rank: int, arena: Arena) -> DescribedSnapshot:
    header, hashes = arena.header(), arena.hashes()
    if (header.identity, header.rank) != (identity, rank) or hashes is None:
        raise DamagedData(f"the arena of rank {rank} does not hold {identity} any more")
    staged = decode(bytes(arena.part(header.declaration)), f"the declaration of rank {rank}").staging.frames
    at, length = arena.tail()
    starts = np.arange(at, at + length, PIECE_BYTES, dtype=np.uint64)
    sizes = np.minimum(PIECE_BYTES, at + length - starts.astype(np.int64)).astype(np.uint64)
    pieces = [frame_hash(arena.part((a, n))) for a, n in zip(starts.tolist(), sizes.tolist(), strict=True)]
    offsets = np.concatenate([staged["offset"].astype(np.uint64) + DATA_OFFSET, starts])
    lengths = np.concatenate([staged["length"].astype(np.uint64), sizes])
    every = np.concatenate([hashes, np.array(pieces, np.uint64).reshape(-1, 2)])
    return DescribedSnapshot(
        rank, arena.size_bytes, arena.header_page(), Frames.from_columns(offsets, lengths, every, arena.size_bytes)
    )


def encode_described(found: Sequence[DescribedSnapshot]) -> bytes:
    packed: bytes = msgpack.packb(
        [[each.rank, each.arena_bytes, each.first_page, each.frames.encode()] for each in found]
    )
    return packed


def decode_described(blob: bytes) -> list[DescribedSnapshot]:
    """The inverse of `encode_described`. Errors: AgentError if malformed."""
    try:
        rows = unpack_bounded(blob, "what a node says of its snapshots")
        if not isinstance(rows, list) or len(rows) > COPIES_MAX:
            raise AgentError("a node describes more snapshots than there can be")
        return [_decode_snapshot(*row) for row in rows]
    except (ValueError, TypeError, OverflowError) as exc:
        raise AgentError(f"a node describes its snapshots wrong: {exc}") from exc


def _decode_snapshot(rank: int, size: int, page: bytes, frames: bytes) -> DescribedSnapshot:
    found = DescribedSnapshot(int(rank), int(size), bytes(page), Frames.decode(frames, int(size)))
    if found.rank < 0 or not PAGE <= found.arena_bytes <= ARENA_BYTES_MAX or len(found.first_page) != PAGE:
        raise AgentError(f"the snapshot of rank {rank} is described wrong")
    if len(found.frames) and int(found.frames.offsets.min()) < PAGE:
        raise AgentError(f"the snapshot of rank {rank} is described wrong")
    return found


@dataclass(frozen=True, slots=True)
class ParityChunkName:
    """The name of a parity chunk: one row of one stripe of a checkpoint."""

    identity: Identity
    row: Row
    stripe: Striped

    @property
    def transfer_name(self) -> str:
        about = msgpack.packb([int(self.row), self.stripe.length, self.stripe.source_rows()])
        return f"parity/{self.identity}/{hashlib.blake2b(about, digest_size=16).hexdigest()}"


@dataclass(frozen=True, slots=True)
class ParityChunk:
    """A parity chunk in memory; immutable. `frames`: its bytes as frames. `snapshots`: by rank, the snapshots it was
    made of. `world`: ranks of the checkpoint."""

    name: ParityChunkName
    world: int
    arena: Arena
    frames: Frames
    snapshots: Mapping[int, DescribedSnapshot]

    @property
    def data(self) -> memoryview:
        return self.arena.part((0, self.name.stripe.length))


def parse_row(number: int) -> Row:
    """The parity row of that number. Errors: AgentError if there is none."""
    if number not in (Row.P, Row.Q):
        raise AgentError(f"parity {number!r:.20}: 0 or 1")
    return Row(number)


def chunk_frames(data: memoryview, length: int) -> Frames:
    """The first `length` bytes of a parity chunk as hashed frames."""
    starts = np.arange(0, length, PIECE_BYTES, dtype=np.uint64)
    sizes = np.minimum(PIECE_BYTES, length - starts.astype(np.int64)).astype(np.uint64)
    hashes = [frame_hash(data[a : a + n]) for a, n in zip(starts.tolist(), sizes.tolist(), strict=True)]
    return Frames.from_columns(starts, sizes, np.array(hashes, np.uint64).reshape(-1, 2), length)
