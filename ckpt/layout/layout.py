"""A rank's layout: what it holds of the state. And what is derived from all ranks' layouts.

Pure values; no torch. A box's bytes are those of a contiguous row-major tensor of the box's shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckpt.types import Box

Array = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor as one rank holds it.

    `name`: canonical ("model.layers.0.weight", "optim.state.layers.0.weight.exp_avg").
    `shape`: the global shape. `boxes`: the parts this rank holds (one; several for strided shards; none for a rank
    that holds nothing of it). `owner`: "" for a tensor that belongs to the whole job; else the coordinate of the rank
    whose own it is (equal names with different values).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    owner: str = ""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Layout:
    """All entries of one rank, sorted by (name, owner), each pair once. Ranks whose layouts are equal may share one:
    what is derived from several layouts is then derived once for each object."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A byte range [start, stop) of one box of one entry (indices into a Layout) that a rank stages."""

    entry: int
    box: int
    start: int
    stop: int


Share = tuple[Part, ...]  # what one rank stages, in canonical order: one division gives every rank one


# How a rank's share lies in its arena's data region. Offsets are relative to the region's start.
SEGMENT = np.dtype(
    [
        ("entry", "<u4"),
        ("box", "<u4"),
        ("start", "<u8"),  # byte offset within the box
        ("length", "<u8"),
        ("offset", "<u8"),  # byte offset within the data region
        ("frame", "<u4"),
    ]
)
# A frame is the run of the data region [offset, offset + length); it holds elements of one dtype only.
STAGED_FRAME = np.dtype([("offset", "<u8"), ("length", "<u4"), ("dtype", "u1")])


@dataclass(frozen=True, slots=True)
class Staging:
    """`segments`: array of SEGMENT, each within one frame. `frames`: array of STAGED_FRAME, each starting at a
    multiple of 4096 (large tensors) or 64 (packed small ones). `data_bytes`: the size of the data region."""

    segments: Array
    frames: Array
    data_bytes: int


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a rank's arena says of itself: enough to restore from it with no other source.

    `division`: the hash that names the division its share came from. `coordinate`: the rank's mesh coordinate, such as
    "rank=3" or "dp=1,tp=0". `coordinates` of the whole group are known from all ranks' declarations.
    """

    rank: int
    world: int
    coordinate: str
    division: str
    layout: Layout
    staging: Staging


def are_apart(boxes: Sequence[Box]) -> bool:
    """Whether no two boxes (none empty) share an element. Sweeps along the dimension with the most offsets."""
    if len(boxes) < 2:
        return True
    along = max(range(len(boxes[0].offset)), key=lambda d: len({box.offset[d] for box in boxes}))
    ordered = sorted(boxes, key=lambda box: box.offset[along])
    for i, box in enumerate(ordered):
        end = box.offset[along] + box.shape[along]
        for other in ordered[i + 1 :]:
            if other.offset[along] >= end:
                break
            if box.intersect(other) is not None:
                return False
    return True


def covers(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether boxes that lie apart, within the shape, cover it."""
    return sum(box.size for box in boxes) == Box.whole(shape).size
