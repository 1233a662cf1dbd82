"""The data types of this package: a rank's layout (which boxes of which tensors it holds) and its staging in an arena.

Pure values; no torch. The bytes of a box are those of a contiguous row-major tensor of the box's shape.
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

    `name`: canonical ("model.layers.0.weight", "optim.state.layers.0.weight.exp_avg"). `shape`: the global shape.
    `boxes`: the parts that this rank holds: one; several for strided shards; none if it holds nothing of the tensor.
    `owner`: "" for a tensor of the whole job. Else the coordinate of the rank that owns the tensor: other ranks may
    have a tensor of that name with other values.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    owner: str = ""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Layout:
    """All entries of one rank, sorted by (name, owner), each pair once. Ranks with equal layouts may share one object.
    Functions of many layouts then do their work once per object."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes [start, stop) of one box of one entry, which a rank stages. `entry`, `box`: indices into a Layout."""

    entry: int
    box: int
    start: int
    stop: int


# The parts that one rank stages, in canonical order. A division gives every rank one share.
Share = tuple[Part, ...]


# One run of a share in the arena's data region.
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
# One frame: the run [offset, offset + length) of the data region. It holds elements of one dtype only.
STAGED_FRAME = np.dtype([("offset", "<u8"), ("length", "<u4"), ("dtype", "u1")])


@dataclass(frozen=True, slots=True)
class Staging:
    """The placement of a rank's share in its arena's data region.

    `segments`: array of SEGMENT, each within one frame. `frames`: array of STAGED_FRAME, each at a multiple of 4096
    (large tensors) or 64 (packed small ones). `data_bytes`: size of the data region."""

    segments: Array
    frames: Array
    data_bytes: int


@dataclass(frozen=True, slots=True)
class Declaration:
    """The description of a rank's snapshot, stored in its arena. It suffices to restore from the arena alone.

    `division`: the id of the division that the rank's share came from (`division.division_id`). `coordinate`: the
    rank's mesh coordinate, such as "rank=3" or "dp=1,tp=0".
    """

    rank: int
    world: int
    coordinate: str
    division: str
    layout: Layout
    staging: Staging


def are_disjoint(boxes: Sequence[Box]) -> bool:
    """Whether no two boxes share an element. No box may be empty. Sweeps along the dimension with the most offsets."""
    if len(boxes) < 2:
        return True
    along = max(range(len(boxes[0].offset)), key=lambda d: len({box.offset[d] for box in boxes}))
    ordered = sorted(boxes, key=lambda box: box.offset[along])
    for i, box in enumerate(ordered):
        end = box.offset[along] + box.shape[along]
        # No slice: a tensor may be sharded over thousands of ranks, and the look mostly ends at the next box.
        for other in map(ordered.__getitem__, range(i + 1, len(ordered))):
            if other.offset[along] >= end:
                break
            if box.intersect(other) is not None:
                return False
    return True


def covers(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether the boxes cover the shape. They must lie within the shape and not overlap."""
    return sum(box.size for box in boxes) == Box.whole(shape).size
