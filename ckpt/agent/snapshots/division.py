"""From what the ranks say they hold to who stages what, and how large each rank's arenas have to be. Pure, and slow
enough (about a second for large states) to run on a thread."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from ckpt.agent.snapshots.replica_check import SharedBoxes, places_of
from ckpt.errors import CkptError, DamagedData
from ckpt.format.declaration import bytes_max, decode_layout, encode_layout, encode_share
from ckpt.gc_pause import no_collecting
from ckpt.ipc.arena import arena_bytes
from ckpt.layout.division import Hashes, Key, agree, divide, division_id, owned, with_holes
from ckpt.layout.layout import Layout, Share
from ckpt.layout.staging import frame_bytes_for, stage
from ckpt.types import ITEMSIZE


@dataclass(frozen=True, slots=True)
class RankContents:
    """What one rank says of itself. `tick`: the one its hashes are of. `hashes`: empty where nothing was hashed."""

    coordinate: str
    layout: Layout
    hashes: Hashes
    tick: str
    values_bytes: int


@dataclass(frozen=True, slots=True)
class Division:
    """`layouts`, `shares`, `arena_bytes`: by rank; the layouts with owners where ranks disagreed. `plans`: layout and
    share of each rank, encoded for it. `agreed`, `differing`: what the last hashes of one tick said; they hold until
    all ranks have hashed the same tick again. `places`: which of their boxes are one."""

    id: str
    frame_bytes: int
    layouts: tuple[Layout, ...]
    shares: tuple[Share, ...]
    arena_bytes: tuple[int, ...]
    agreed: frozenset[Key]
    differing: frozenset[str]
    plans: tuple[tuple[bytes, bytes], ...]
    places: SharedBoxes


_LAYOUTS: weakref.WeakValueDictionary[bytes, Layout] = weakref.WeakValueDictionary()


@no_collecting()
def layout_from(blob: bytes | memoryview) -> Layout:
    """Decodes it; to the object that exists already where equal bytes were decoded before, as replicated ranks send
    them. Errors: DamagedData."""
    key = hashlib.blake2b(blob, digest_size=32).digest()
    found = _LAYOUTS.get(key)
    if found is None:
        found = _LAYOUTS[key] = decode_layout(blob)
    return found


@no_collecting()
def make_division(
    ranks: Sequence[RankContents], before: Division | None, distrusted: Collection[str] = frozenset()
) -> Division:
    """Hashes are compared only where all ranks took them at the same tick: those of two ticks say nothing.
    `distrusted`: tensors that were seen to differ since.

    Errors: CkptError where what a rank says contradicts itself, and for tensors that the ranks do not hold whole."""
    if len({rank.tick for rank in ranks}) == 1:
        agreed, tensors = agree([rank.layout for rank in ranks], [rank.hashes for rank in ranks])
        differing = frozenset(name for name, owner in tensors if not owner)
    else:
        agreed = _still_agreed([rank.layout for rank in ranks], before) if before is not None else set()
        differing = before.differing if before is not None else frozenset()
    differing |= frozenset(distrusted)
    layouts = [owned(rank.layout, differing, rank.coordinate) for rank in ranks]
    if holes := with_holes(layouts):
        more = f" and {len(holes) - 5} more" if len(holes) > 5 else ""
        raise CkptError(
            f"no rank holds some part of {', '.join(holes[:5])}{more}: give every part of its global shape to some "
            "rank (ckpt.Shard(tensor, global_shape, offset)), or say a smaller one; of a DTensor, all ranks of its "
            "mesh belong to process_group="
        )
    distinct = {id(layout): layout for layout in layouts}  # equal ones are one object, and are worked on once
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
        places_of([rank.layout for rank in ranks], differing),
    )


def _still_agreed(layouts: Sequence[Layout], before: Division) -> set[Key]:
    """What was found equal on ranks that are still the only ones to hold it: a rank that holds it newly has shown
    nothing yet."""
    then, now = _holders(before.layouts), _holders(layouts)
    return {key for key in before.agreed if then.get(key) == now.get(key)}


def _holders(layouts: Sequence[Layout]) -> dict[Key, set[int]]:
    found: dict[Key, set[int]] = {}
    for rank, layout in enumerate(layouts):
        for entry in layout.entries:
            for box in entry.boxes:
                found.setdefault((entry.name, entry.owner, box), set()).add(rank)
    return found


def hashes_from(blob: bytes) -> Hashes:
    """Errors: DamagedData."""
    if len(blob) % 16:
        raise DamagedData(f"hashes of {len(blob)} bytes: not a whole number of them")
    return np.frombuffer(blob, dtype="<u8").reshape(-1, 2).astype(np.uint64)
