"""The division of a job: which rank stages which part of the state, and how large each rank's arenas are.

Pure. It takes about a second for large states, so the agent runs it on a worker thread.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from ckpt.agent.snapshots.replica_check import SharedBoxes, find_shared_boxes
from ckpt.errors import CkptError, DamagedData
from ckpt.format.declaration import bytes_max, decode_layout, encode_layout, encode_share
from ckpt.gc_pause import pause_gc
from ckpt.ipc.arena import arena_bytes
from ckpt.layout.division import Hashes, Key, divide, division_id, find_agreed, incomplete_tensors, make_owned
from ckpt.layout.layout import Layout, Share
from ckpt.layout.staging import frame_bytes_for, stage
from ckpt.types import ITEMSIZE


@dataclass(frozen=True, slots=True)
class RankContents:
    """One rank's report of its state. `hashes`: of its tensors; empty if nothing was hashed. `version`: the version of
    the hashes. `values_bytes`: room for its plain values."""

    coordinate: str
    layout: Layout
    hashes: Hashes
    version: str
    values_bytes: int


@dataclass(frozen=True, slots=True)
class Division:
    """A division, by rank. `layouts`: with owners for tensors that differ between ranks. `encoded_plans`: each rank's
    layout and share, encoded to send. `agreed`, `differing`: the parts that were equal, and the tensors that differed,
    when all ranks last hashed one version. `shared_boxes`: which boxes of different ranks are the same box."""

    id: str
    frame_bytes: int
    layouts: tuple[Layout, ...]
    shares: tuple[Share, ...]
    arena_bytes: tuple[int, ...]
    agreed_parts: frozenset[Key]
    differing_tensors: frozenset[str]
    encoded_plans: tuple[tuple[bytes, bytes], ...]
    shared_boxes: SharedBoxes


_LAYOUTS: weakref.WeakValueDictionary[bytes, Layout] = weakref.WeakValueDictionary()


@pause_gc()
def parse_layout(blob: bytes | memoryview) -> Layout:
    """Decodes a layout. Equal bytes, as replicated ranks send them, give the same object. Errors: DamagedData."""
    key = hashlib.blake2b(blob, digest_size=32).digest()
    found = _LAYOUTS.get(key)
    if found is None:
        found = _LAYOUTS[key] = decode_layout(blob)
    return found


@pause_gc()
def make_division(
    ranks: Sequence[RankContents], before: Division | None, distrusted: Collection[str] = frozenset()
) -> Division:
    """Makes the division. `before`: the former one, whose comparison stays in force unless all ranks hashed the same
    version: hashes of two versions cannot be compared. `distrusted`: tensors seen to differ since then.

    Errors: CkptError if a rank's report contradicts itself, or no rank holds some part of a tensor."""
    if len({rank.version for rank in ranks}) == 1:
        agreed, tensors = find_agreed([rank.layout for rank in ranks], [rank.hashes for rank in ranks])
        differing = frozenset(name for name, owner in tensors if not owner)
    else:
        agreed = _still_agreed([rank.layout for rank in ranks], before) if before is not None else set()
        differing = before.differing_tensors if before is not None else frozenset()
    differing |= frozenset(distrusted)
    layouts = [make_owned(rank.layout, differing, rank.coordinate) for rank in ranks]
    if holes := incomplete_tensors(layouts):
        more = f" and {len(holes) - 5} more" if len(holes) > 5 else ""
        raise CkptError(
            f"no rank holds some part of {', '.join(holes[:5])}{more}: give every part of its global shape to some "
            "rank (ckpt.Shard(tensor, global_shape, offset)), or say a smaller one; of a DTensor, all ranks of its "
            "mesh belong to process_group="
        )
    # Equal layouts are one object, and are processed once.
    distinct = {id(layout): layout for layout in layouts}
    held = {key: sum(b.size * ITEMSIZE[e.dtype] for e in one.entries for b in e.boxes) for key, one in distinct.items()}
    frame_bytes = frame_bytes_for(sum(held[id(layout)] for layout in layouts))
    shares = divide(layouts, agreed, frame_bytes)
    name = division_id(layouts, shares)
    blobs = {key: encode_layout(layout) for key, layout in distinct.items()}
    sizes = []
    for rank, layout, share in zip(ranks, layouts, shares, strict=True):
        staging = stage(layout, share, frame_bytes)
        declared_bytes = bytes_max(len(blobs[id(layout)]), rank.coordinate, staging)
        sizes.append(arena_bytes(staging.data_bytes, len(staging.frames), declared_bytes, rank.values_bytes))
    return Division(
        name,
        frame_bytes,
        tuple(layouts),
        tuple(shares),
        tuple(sizes),
        frozenset(agreed),
        frozenset(differing),
        tuple((blobs[id(layout)], encode_share(share)) for layout, share in zip(layouts, shares, strict=True)),
        find_shared_boxes([rank.layout for rank in ranks], differing),
    )


def _still_agreed(layouts: Sequence[Layout], before: Division) -> set[Key]:
    """The parts that were found equal, and are still held by the same ranks. A new holder has proven nothing yet."""
    then, now = _holders(before.layouts), _holders(layouts)
    return {key for key in before.agreed_parts if then.get(key) == now.get(key)}


def _holders(layouts: Sequence[Layout]) -> dict[Key, set[int]]:
    found: dict[Key, set[int]] = {}
    for rank, layout in enumerate(layouts):
        for entry in layout.entries:
            for box in entry.boxes:
                found.setdefault((entry.name, entry.owner, box), set()).add(rank)
    return found


def parse_hashes(blob: bytes) -> Hashes:
    """Decodes hashes: (n, 2) uint64. Errors: DamagedData."""
    if len(blob) % 16:
        raise DamagedData(f"hashes of {len(blob)} bytes: not a whole number of them")
    return np.frombuffer(blob, dtype="<u8").reshape(-1, 2).astype(np.uint64)
