"""The manifest and the record of a checkpoint. Pure values; no torch.

A manifest lists tensors, the boxes that cover them, and the frames that hold the boxes' bytes. It does not say where
the bytes lie. The agent builds it from the ranks' declarations. A record is a manifest with the places of its frames in
packs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from ckpt.layout.layout import Array
from ckpt.types import Box, Identity


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor, or a blob of values.

    `owner`: "" for a tensor of the whole job; else the coordinate of the rank that alone has it. `values`: True for a
    blob of non-tensor values (dtype uint8, one dimension). Its name is "values" (owner "": the same on every rank; else
    a rank's differing copy) or "rank-values" (the owner is always a coordinate)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    owner: str = ""
    values: bool = False


VALUES = "values"
RANK_VALUES = "rank-values"

FRAME = np.dtype(
    [
        ("hash_hi", "<u8"),  # xxh3-128 of the raw bytes
        ("hash_lo", "<u8"),
        ("length", "<u4"),  # raw bytes
        ("dtype", "u1"),  # types.DTYPE_CODE of its elements
    ]
)
# Bytes [start, start + length) of a box, row-major, are bytes [offset, offset + length) of a frame.
EXTENT = np.dtype([("box", "<u4"), ("start", "<u8"), ("length", "<u4"), ("frame", "<u4"), ("offset", "<u4")])


class BoxRows(Sequence[tuple[int, Box]]):
    """The boxes of a manifest that was read from bytes; equal to a tuple of the same boxes.

    They are made when one is first asked for: a record may list millions, and most readers need none. `tensors`: the
    index into the manifest's tensors, by box. `make`: makes the boxes."""

    def __init__(self, tensors: npt.NDArray[np.int64], make: Callable[[], list[Box]]) -> None:
        self.tensors = tensors
        self._make = make
        self._all: tuple[tuple[int, Box], ...] | None = None

    def __len__(self) -> int:
        return len(self.tensors)

    @overload
    def __getitem__(self, at: int) -> tuple[int, Box]: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[tuple[int, Box], ...]: ...
    def __getitem__(self, at: int | slice) -> tuple[int, Box] | tuple[tuple[int, Box], ...]:
        return self._every()[at]

    def __iter__(self) -> Iterator[tuple[int, Box]]:
        return iter(self._every())

    def __eq__(self, other: object) -> bool:
        return self._every() == (other._every() if isinstance(other, BoxRows) else other)

    __hash__ = None  # type: ignore[assignment]

    def _every(self) -> tuple[tuple[int, Box], ...]:
        if self._all is None:
            self._all = tuple(zip(self.tensors.tolist(), self._make(), strict=True))
        return self._all


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of.

    `tensors`: sorted by (values, name, owner). `boxes`: (index into tensors, Box); a tensor's boxes do not overlap and
    cover it. `frames`: array of FRAME. `extents`: array of EXTENT sorted by (box, start), which cover every box exactly
    once. `coordinates`: of every rank, by rank. An empty tensor has a box and no extent."""

    tensors: tuple[TensorSpec, ...]
    boxes: Sequence[tuple[int, Box]]
    frames: Array
    extents: Array
    coordinates: tuple[str, ...]

    @property
    def tensor_by_box(self) -> list[int]:
        """The index into tensors of each box. Makes no boxes."""
        return self.boxes.tensors.tolist() if isinstance(self.boxes, BoxRows) else [number for number, _ in self.boxes]


class Codec:
    """Codec numbers of the durable format: append only."""

    RAW = 0
    ZSTD = 1
    PLANES = 2


TIME_S_MAX = 2**33  # Unix time; no clock shows so late a time

# The place of a frame in the store: bytes [offset, offset + length) of pack `pack`, encoded by `codec`.
PLACE = np.dtype([("pack", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("codec", "u1")])


@dataclass(frozen=True, slots=True)
class Record:
    """One commit: all that a restore needs.

    `writer`: the name of the writer that put it. `packs`: keys below the URL and their sizes, also packs of other
    checkpoints that hold unchanged frames. `places`: array of PLACE, one per frame of the manifest. `metrics`: numbers
    that the user gave. `about`: small facts for people (host, world size, versions, launch id)."""

    identity: Identity
    writer: str
    manifest: Manifest
    packs: tuple[tuple[str, int], ...]
    places: Array
    metrics: dict[str, float] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def taken_s(self) -> float | None:
        """The approximate time of the snapshot, as the record states it (Unix seconds); None if it states no possible
        time."""
        found = self.about.get("time_s")
        return float(found) if isinstance(found, int | float) and 0 < found < TIME_S_MAX else None
