"""A checkpoint in memory: a manifest made from the staged snapshots, whose frames lie in the ranks' arenas."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import DamagedData
from ckpt.format import values
from ckpt.format.declaration import decode
from ckpt.format.frames import frame_hash, hash_bytes, hash_frames
from ckpt.format.manifest import Manifest
from ckpt.ipc.arena import DATA_OFFSET, Arena, Header
from ckpt.layout.assemble import DATA, SHARED, Blob, Staged, assemble
from ckpt.layout.layout import Array, Declaration
from ckpt.types import Identity

HASH_THREADS = 2


@dataclass(frozen=True, slots=True)
class StagedPart:
    """The description of one rank's snapshot, without its bytes. `hashes`: of its data frames, (frames, 2) uint64 as
    (hi, lo). `shared`, `own`: its plain values. `at`: offsets of these two, in bytes of the memfd. `metrics`: the
    user's, on that rank."""

    declaration: Declaration
    hashes: npt.NDArray[np.uint64]
    shared_values: Blob
    own_values: Blob
    value_offsets: tuple[int, int]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class MemoryCheckpoint:
    """A complete checkpoint in memory. `arenas`: by rank, those on this node. `ranks`, `offsets`, `lengths`: the place
    of each frame: the rank of its arena, and bytes of that memfd. `metrics`: the user's; the lowest rank's value wins.
    `differing_tensors`: tensors stored per rank because the ranks differ."""

    identity: Identity
    manifest: Manifest
    arenas: Mapping[int, Arena]
    ranks: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    metrics: dict[str, float]
    differing_tensors: tuple[str, ...]

    def frame(self, number: int) -> memoryview:
        """The raw bytes of a frame on this node, not copied: valid while the caller holds a lease on the slot."""
        arena = self.arenas[int(self.ranks[number])]
        return arena.part((int(self.offsets[number]), int(self.lengths[number])))


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """The part of a checkpoint in this node's memory: arenas by rank, and for each frame its rank and its offset in
    that rank's arena, in bytes of the memfd."""

    arenas: Mapping[int, Arena]
    ranks: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]


Memory = LocalMemory | MemoryCheckpoint


class StagedReader:
    """Reads staged snapshots from arenas, one save attempt at a time. Thread-safe. Caches the declarations, which
    change only with the division. `moved`: called after each rank, to show progress."""

    def __init__(self, moved: Callable[[], None] = lambda: None) -> None:
        self._on_progress = moved
        self._lock = threading.Lock()
        self._declarations: dict[int, tuple[bytes, Declaration]] = {}

    def read(
        self, identity: Identity, world: int, arenas: Mapping[int, Arena], keep_hashes: bool = True
    ) -> list[StagedPart]:
        """Hashes the snapshots in these arenas, and writes the hashes there. `keep_hashes`: if False, hashes that the
        arenas have already must match.

        Errors: DamagedData if an arena does not hold `identity`, complete and unchanged."""
        with self._lock:
            headers = {rank: _header(identity, rank, world, arena) for rank, arena in arenas.items()}
            return [self._hash_part(rank, arenas[rank], header, keep_hashes) for rank, header in headers.items()]

    def read_sealed(self, identity: Identity, world: int, arenas: Mapping[int, Arena]) -> list[StagedPart]:
        """As `read`, with the hashes in the arenas. Frames are not hashed: their receiver has to verify them.

        Errors: DamagedData if an arena does not hold `identity`, or has no hashes."""
        with self._lock:
            headers = {rank: _header(identity, rank, world, arena) for rank, arena in arenas.items()}
            return [self._read_sealed_part(rank, arenas[rank], header) for rank, header in headers.items()]

    def encoded_declarations(self) -> dict[int, bytes]:
        """By rank: its encoded declaration, as last read."""
        with self._lock:
            return {rank: data for rank, (data, _) in self._declarations.items()}

    def _hash_part(self, rank: int, arena: Arena, header: Header, keep_hashes: bool) -> StagedPart:
        declaration = self._decode_declaration(rank, arena, header)
        hashes = hash_frames(arena.data(0, header.data_bytes), declaration.staging.frames, HASH_THREADS)
        before = None if keep_hashes else arena.hashes()
        if before is not None and not np.array_equal(before, hashes):
            raise DamagedData(f"the arena of rank {rank} has changed since {header.identity} was staged in it")
        if arena.header() != header:
            raise DamagedData(f"the arena of rank {rank} is filled anew")
        arena.write_hashes(header, hashes)
        self._on_progress()
        return _part(declaration, hashes, arena, header)

    def _read_sealed_part(self, rank: int, arena: Arena, header: Header) -> StagedPart:
        declaration, hashes = self._decode_declaration(rank, arena, header), arena.hashes()
        if hashes is None or len(hashes) != len(declaration.staging.frames):
            raise DamagedData(f"the arena of rank {rank} does not say what lies in it")
        return _part(declaration, hashes, arena, header)

    def _decode_declaration(self, rank: int, arena: Arena, header: Header) -> Declaration:
        data = bytes(arena.part(header.declaration))
        known = self._declarations.get(rank)
        if known is None or known[0] != data:
            known = self._declarations[rank] = (data, decode(data, f"the declaration of rank {rank}"))
        if known[1].staging.data_bytes != header.data_bytes:
            raise DamagedData(f"the arena of rank {rank} contradicts its declaration")
        return known[1]


def assemble_checkpoint(
    identity: Identity, parts: Sequence[StagedPart], arenas: Mapping[int, Arena]
) -> MemoryCheckpoint:
    """Puts the parts of all ranks together as one checkpoint. `arenas`: those on this node; if it has all, the bytes of
    differing frames can be compared. Errors: Incomplete; CkptError for parts that do not belong together."""
    parts = sorted(parts, key=lambda part: part.declaration.rank)
    staged = [Staged(part.declaration, part.hashes, part.shared_values, part.own_values) for part in parts]
    read = lambda rank, offset, length: arenas[rank].data(offset, length)  # noqa: E731
    made = assemble(staged, read if len(arenas) == len(parts) else None)
    ranks, offsets = _frame_places(made.sources, parts)
    lengths = made.manifest.frames["length"].astype(np.int64)
    metrics: dict[str, float] = {}
    for part in reversed(parts):
        metrics.update(part.metrics)
    return MemoryCheckpoint(
        identity, made.manifest, dict(arenas), ranks, offsets, lengths, metrics, made.differing_tensors
    )


def _header(identity: Identity, rank: int, world: int, arena: Arena) -> Header:
    header = arena.header()
    if (header.identity, header.rank, header.world) != (identity, rank, world):
        raise DamagedData(
            f"the arena of rank {rank} holds {header.identity} of rank {header.rank} of {header.world}, "
            f"not {identity} of rank {rank} of {world}"
        )
    return header


def _part(declaration: Declaration, hashes: npt.NDArray[np.uint64], arena: Arena, header: Header) -> StagedPart:
    shared, own = _blob(arena, header.shared), _blob(arena, header.own)
    return StagedPart(declaration, hashes, shared, own, (header.shared[0], header.own[0]), _metrics(arena, header))


def _blob(arena: Arena, place: tuple[int, int]) -> Blob:
    return Blob(hash_bytes(*frame_hash(arena.part(place))), place[1])


def _frame_places(sources: Array, parts: Sequence[StagedPart]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """By frame: the rank whose arena holds it, and its offset there. In one pass over all ranks' frames: a job may have
    thousands of ranks."""
    ranks, region = sources["rank"].astype(np.int64), sources["region"]
    staged = [part.declaration.staging.frames["offset"].astype(np.int64) for part in parts]
    first = np.cumsum([0, *map(len, staged)])
    values_at = np.array([part.value_offsets for part in parts], np.int64).reshape(-1, 2)
    offsets = np.where(region == SHARED, values_at[ranks, 0], values_at[ranks, 1])
    data = region == DATA
    at = first[ranks[data]] + sources["frame"][data]
    offsets[data] = DATA_OFFSET + np.concatenate([*staged, np.zeros(0, np.int64)])[at]
    return ranks, offsets


def _metrics(arena: Arena, header: Header) -> dict[str, float]:
    about: Any = values.decode(bytes(arena.part(header.about)))
    if not isinstance(about, dict) or not isinstance(about.get("metrics", {}), dict):
        raise DamagedData(f"an arena says of {header.identity} what cannot be read")
    try:
        return {str(k): float(v) for k, v in about.get("metrics", {}).items()}
    except (TypeError, ValueError, OverflowError) as exc:
        raise DamagedData(f"an arena says of {header.identity} metrics that are no numbers: {exc}") from exc
