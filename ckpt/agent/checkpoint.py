"""A checkpoint in this node's memory: from what the ranks staged to a manifest whose frames lie in their arenas."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.agent.arena import DATA_AT, Arena, Header
from ckpt.errors import DamagedData
from ckpt.format import values
from ckpt.format.declaration import decode
from ckpt.format.frames import frame_hash, hash_bytes, hash_frames
from ckpt.format.manifest import Manifest
from ckpt.plan.assemble import DATA, SHARED, Blob, Staged, assemble
from ckpt.plan.layout import Array, Declaration
from ckpt.types import Identity

HASH_THREADS = 2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Complete. `arenas`: by rank. `ranks`, `offsets`, `lengths`: where each frame lies: bytes of the memfd of that
    rank's arena. `metrics`: what the user gave. `disagreed`: tensors that are stored per rank, since they differ."""

    identity: Identity
    manifest: Manifest
    arenas: tuple[Arena, ...]
    ranks: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    metrics: dict[str, float]
    disagreed: tuple[str, ...]

    def frame(self, number: int) -> memoryview:
        """Its raw bytes, in place: valid while somebody holds a lease on the slot."""
        arena = self.arenas[int(self.ranks[number])]
        return arena.part((int(self.offsets[number]), int(self.lengths[number])))


class Assembler:
    """Puts a job's rounds together, one at a time. Remembers the declarations, which only change with the division."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._declared: dict[int, tuple[bytes, Declaration]] = {}

    def assemble(self, identity: Identity, arenas: Sequence[Arena], keep_hashes: bool = True) -> Checkpoint:
        """Hashes what lies in the arenas and leaves the hashes there.

        keep_hashes=False: after a restart of the agent; hashes that its predecessor left must be right.
        Errors: Incomplete; DamagedData where an arena holds something else than `identity`, whole and unchanged."""
        with self._lock:
            return self._assemble(identity, arenas, keep_hashes)

    def _assemble(self, identity: Identity, arenas: Sequence[Arena], keep_hashes: bool) -> Checkpoint:
        headers = [self._header(identity, rank, len(arenas), arena) for rank, arena in enumerate(arenas)]
        staged = []
        for rank, (arena, header) in enumerate(zip(arenas, headers, strict=True)):
            declaration = self._declaration(rank, arena, header)
            hashes = hash_frames(arena.data(0, header.data_bytes), declaration.staging.frames, HASH_THREADS)
            before = None if keep_hashes else arena.hashes()
            if before is not None and not np.array_equal(before, hashes):
                raise DamagedData(f"the arena of rank {rank} has changed since {identity} was staged in it")
            arena.write_hashes(header, hashes)
            staged.append(Staged(declaration, hashes, _blob(arena, header.shared), _blob(arena, header.own)))

        def read(rank: int, offset: int, length: int) -> memoryview:
            return arenas[rank].data(offset, length)

        made = assemble(staged, read)
        ranks, offsets = _places(made.sources, headers, [each.declaration for each in staged])
        lengths = made.manifest.frames["length"].astype(np.int64)
        metrics = _metrics(arenas, headers)
        return Checkpoint(identity, made.manifest, tuple(arenas), ranks, offsets, lengths, metrics, made.disagreed)

    def _header(self, identity: Identity, rank: int, world: int, arena: Arena) -> Header:
        header = arena.header()
        if (header.identity, header.rank, header.world) != (identity, rank, world):
            raise DamagedData(
                f"the arena of rank {rank} holds {header.identity} of rank {header.rank} of {header.world}, "
                f"not {identity} of rank {rank} of {world}"
            )
        return header

    def _declaration(self, rank: int, arena: Arena, header: Header) -> Declaration:
        data = bytes(arena.part(header.declaration))
        known = self._declared.get(rank)
        if known is None or known[0] != data:
            known = self._declared[rank] = (data, decode(data, f"the declaration of rank {rank}"))
        if known[1].staging.data_bytes != header.data_bytes:
            raise DamagedData(f"the arena of rank {rank} contradicts its declaration")
        return known[1]


def _blob(arena: Arena, place: tuple[int, int]) -> Blob:
    return Blob(hash_bytes(*frame_hash(arena.part(place))), place[1])


def _places(
    sources: Array, headers: Sequence[Header], declarations: Sequence[Declaration]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    ranks = sources["rank"].astype(np.int64)
    offsets = np.zeros(len(sources), np.int64)
    for rank, (header, declaration) in enumerate(zip(headers, declarations, strict=True)):
        own = ranks == rank
        data = own & (sources["region"] == DATA)
        at = declaration.staging.frames["offset"].astype(np.int64)
        offsets[data] = DATA_AT + at[sources["frame"][data]]
        blobs = own & ~data
        offsets[blobs] = np.where(sources["region"][blobs] == SHARED, header.shared[0], header.own[0])
    return ranks, offsets


def _metrics(arenas: Sequence[Arena], headers: Sequence[Header]) -> dict[str, float]:
    """Of all ranks; where they differ, the lowest rank's."""
    merged: dict[str, float] = {}
    for arena, header in reversed(list(zip(arenas, headers, strict=True))):
        about: Any = values.decode(bytes(arena.part(header.about)))
        if not isinstance(about, dict) or not isinstance(about.get("metrics", {}), dict):
            raise DamagedData(f"an arena says of {header.identity} what cannot be read")
        try:
            merged.update({str(k): float(v) for k, v in about.get("metrics", {}).items()})
        except (TypeError, ValueError, OverflowError) as exc:
            raise DamagedData(f"an arena says of {header.identity} metrics that are no numbers: {exc}") from exc
    return merged
