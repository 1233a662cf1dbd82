"""Resharding: finds the frames that hold the wanted boxes, and how to cut each frame.

A frame holds a run of a row-major box. If the wanted box has the same whole rows, the run lands in it as a run. This is
the usual case: the same sharding, or another one along the first dimension. Otherwise the run consists of at most
2 * ndim - 1 sub-boxes: the end of a row, whole rows and the beginning of a row, in each dimension. The part of a
sub-box that lies in the wanted box is a strided view of the frame. Only `apply_cuts` touches data bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import DamagedData, StateMismatch
from ckpt.format.manifest import Manifest
from ckpt.gc_pause import pause_gc
from ckpt.layout.assemble import part_owner
from ckpt.types import ITEMSIZE, Box


@dataclass(frozen=True, slots=True)
class Want:
    """A wanted box of one tensor. `shape`: the global shape. `owner`: "" for a tensor of the job, else a rank's
    coordinate."""

    name: str
    owner: str
    dtype: str
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True, slots=True)
class Cut:
    """A strided view of a frame that fills a part of a wanted box.

    `offset`: the view's first element, bytes into the frame. `shape`, `strides`: of the view, in elements. `want`:
    index into the wants. `box_offset`: where the view goes in the wanted box, in elements. `shape`, `strides` and
    `box_offset` have one number per dimension. For a run they have one number in all: the elements are contiguous in
    the frame, and in row-major order in the box.
    """

    frame: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    want: int
    box_offset: tuple[int, ...]


@pause_gc()
def plan_cuts(manifest: Manifest, wants: Sequence[Want]) -> list[Cut]:
    """The cuts that fill the wanted boxes exactly once, sorted by frame.

    A want's dtype is ignored: cuts count the checkpoint's elements. Errors: StateMismatch if a want is missing or has
    another global shape; DamagedData if the manifest's frames do not cover its tensors.
    """
    index = {(spec.name, spec.owner): place for place, spec in enumerate(manifest.tensors) if not spec.values}
    boxes_of: dict[int, list[int]] = {}
    for number, tensor in enumerate(manifest.tensor_by_box):
        boxes_of.setdefault(tensor, []).append(number)
    extents = _Extents(manifest)
    found: list[Cut] = []
    for w, want in enumerate(wants):
        place, shape = index.get((want.name, want.owner)), want.shape
        if place is None and want.owner:
            # The owner's part at the wanted box.
            place, shape = index.get((want.name, part_owner(want.owner, want.box))), want.box.shape
        if place is None or manifest.tensors[place].shape != shape:
            raise StateMismatch(f"the checkpoint has no {_label(want)} of shape {want.shape}")
        spec = manifest.tensors[place]
        wanted = want.box if spec.shape == want.shape else Box.whole(want.box.shape)
        if not wanted.within(spec.shape):
            raise StateMismatch(
                f"{want.box} does not lie within {_label(want)}, which has the shape {spec.shape} in the checkpoint"
            )
        filled = 0
        for number in boxes_of.get(place, ()):
            for cut in _cuts_of_box(extents, number, manifest.boxes[number][1], ITEMSIZE[spec.dtype], w, wanted):
                filled += math.prod(cut.shape)
                found.append(cut)
        if filled != wanted.size:
            raise DamagedData(f"the checkpoint's frames hold only {filled} of {wanted.size} elements of {_label(want)}")
    found.sort(key=lambda cut: cut.frame)
    return found


def whole_run(cuts_of_frame: Sequence[Cut], itemsize: int, frame_bytes: int) -> int | None:
    """The element of the wanted box (row-major) at which a frame begins, if all its bytes are one run of that box. None
    otherwise. Such a frame can be copied with one call, and hashed in place."""
    cut = cuts_of_frame[0]
    if len(cuts_of_frame) > 1 or cut.strides != (1,) or cut.offset or cut.shape[0] * itemsize != frame_bytes:
        return None
    return cut.box_offset[0]


class _Extents:
    """The manifest's extents as lists. `first`: the first extent of each box; at the end the number of extents."""

    def __init__(self, manifest: Manifest) -> None:
        extents = manifest.extents
        self.first: list[int] = np.searchsorted(extents["box"], np.arange(len(manifest.boxes) + 1)).tolist()
        self.start: list[int] = extents["start"].tolist()
        self.length: list[int] = extents["length"].tolist()
        self.frame: list[int] = extents["frame"].tolist()
        self.offset: list[int] = extents["offset"].tolist()


def _cuts_of_box(extents: _Extents, number: int, box: Box, itemsize: int, want: int, wanted: Box) -> Iterator[Cut]:
    if box.shape[1:] == wanted.shape[1:] and box.offset[1:] == wanted.offset[1:]:
        return _run_cuts(extents, number, box, itemsize, want, wanted)
    return _strided_cuts(extents, number, box, itemsize, want, wanted)


def _run_cuts(extents: _Extents, number: int, box: Box, itemsize: int, want: int, wanted: Box) -> Iterator[Cut]:
    """The cuts if both boxes have the same whole rows: runs."""
    row = math.prod(box.shape[1:])
    ahead = box.offset[0] - wanted.offset[0] if box.shape else 0
    rows, wanted_rows = (box.shape[0], wanted.shape[0]) if box.shape else (1, 1)
    first, stop = max(0, -ahead) * row, min(rows, wanted_rows - ahead) * row
    if first >= stop:
        return
    for i, start, end in _elements(extents, number, itemsize, first, stop - 1):
        a, b = max(start, first), min(end, stop)
        if a < b:
            offset = extents.offset[i] + (a - start) * itemsize
            yield Cut(extents.frame[i], offset, (b - a,), (1,), want, (a + ahead * row,))


def _strided_cuts(extents: _Extents, number: int, box: Box, itemsize: int, want: int, wanted: Box) -> Iterator[Cut]:
    common = box.intersect(wanted)
    if common is None:
        return
    low = tuple(c - o for c, o in zip(common.offset, box.offset, strict=True))
    high = tuple(a + n for a, n in zip(low, common.shape, strict=True))
    shift = tuple(o - w for o, w in zip(box.offset, wanted.offset, strict=True))
    strides = _row_major(box.shape)
    first = sum(a * s for a, s in zip(low, strides, strict=True))
    last = sum((b - 1) * s for b, s in zip(high, strides, strict=True))
    for i, start, end in _elements(extents, number, itemsize, first, last):
        for at, shape in _sub_boxes(box.shape, start, end):
            a = tuple(map(max, at, low))
            n = tuple(min(x + y, z) - o for x, y, z, o in zip(at, shape, high, a, strict=True))
            if all(m > 0 for m in n):
                element = sum(x * s for x, s in zip(a, strides, strict=True)) - start
                there = tuple(x + s for x, s in zip(a, shift, strict=True))
                yield Cut(extents.frame[i], extents.offset[i] + element * itemsize, n, strides, want, there)


def _elements(extents: _Extents, number: int, itemsize: int, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """The extents of a box that may hold its elements `first` to `last`: (extent, first element, end). Errors:
    DamagedData if an extent cuts an element."""
    begin, end = extents.first[number], extents.first[number + 1]
    if end - begin > 1:
        begin = max(begin, bisect_right(extents.start, first * itemsize, begin, end) - 1)
        end = bisect_left(extents.start, last * itemsize + 1, begin, end)
    for i in range(begin, end):
        start, rest = divmod(extents.start[i], itemsize)
        count, rest_of_length = divmod(extents.length[i], itemsize)
        if rest or rest_of_length:
            raise DamagedData(f"extent {i} of the checkpoint cuts an element of {itemsize} bytes")
        yield i, start, start + count


def split_dimensions(cut: Cut, shape: tuple[int, ...], itemsize: int) -> Iterator[Cut]:
    """The same cut as cuts with one number per dimension. They are needed if the box is not contiguous in memory.
    `shape`: of the wanted box."""
    if len(cut.box_offset) != 1 or len(shape) == 1:
        yield cut
        return
    offset, first = cut.offset, cut.box_offset[0]
    for at, part in _sub_boxes(shape, first, first + cut.shape[0]):
        yield Cut(cut.frame, offset, part, _row_major(part), cut.want, at)
        offset += math.prod(part) * itemsize


def _sub_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The elements [start, stop) of a row-major box as sub-boxes (offset, shape): in order, none empty."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = shape[1:]
    row = math.prod(inner)
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if head:
        end = min(stop - first * row, row)
        for offset, size in _sub_boxes(inner, head, end):
            yield (first, *offset), (1, *size)
        first += 1
    if last > first:
        yield (first,) + (0,) * len(inner), (last - first, *inner)
    if tail and last >= first:
        for offset, size in _sub_boxes(inner, 0, tail):
            yield (last, *offset), (1, *size)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)


def _label(want: Want) -> str:
    return f"{want.name} (owned by {want.owner})" if want.owner else want.name


def apply_cuts(cuts: Iterable[Cut], frame: int, data: npt.NDArray[np.uint8], outs: Sequence[npt.NDArray[Any]]) -> None:
    """Copies the cuts of frame number `frame` into `outs`. Cuts of other frames are skipped.

    `data`: the raw bytes of the frame, one dimension, contiguous. `outs`: an array for each want, of its box's shape.
    Its dtype may be any of the checkpoint's element size, such as uint16 for bfloat16. Errors: DamagedData if a cut
    reaches out of the frame.
    """
    for cut in cuts:
        if cut.frame == frame:
            for part in split_dimensions(cut, outs[cut.want].shape, outs[cut.want].itemsize):
                _apply(part, frame, data, outs[cut.want])


def _apply(cut: Cut, frame: int, data: npt.NDArray[np.uint8], out: npt.NDArray[Any]) -> None:
    strides = tuple(s * out.itemsize for s in cut.strides)
    end = cut.offset + sum((n - 1) * s for n, s in zip(cut.shape, strides, strict=True)) + out.itemsize
    if cut.offset < 0 or end > data.nbytes:
        raise DamagedData(f"frame {frame} has {data.nbytes} bytes; the checkpoint uses {end} bytes of it")
    view = np.ndarray(cut.shape, out.dtype, data.data, cut.offset, strides)
    out[tuple(slice(a, a + n) for a, n in zip(cut.box_offset, cut.shape, strict=True))] = view
