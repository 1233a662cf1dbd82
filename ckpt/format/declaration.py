"""Declarations, layouts and shares as bytes and back: the description of an arena, and messages on the socket.

An arena outlives the trainer that wrote it, and a peer may have sent it. So a declaration is checked as strictly as a
record.
"""

from __future__ import annotations

from itertools import groupby, pairwise

import numpy as np

from ckpt.format.boxes import (
    ITEMSIZES,
    BoxColumns,
    Ragged,
    TensorColumns,
    check_frames,
    read_boxes,
    read_tensors,
    write_boxes,
    write_tensors,
)
from ckpt.format.columns import ColumnKind, ColumnReader, ColumnWriter, Ints
from ckpt.layout.layout import SEGMENT, STAGED_FRAME, Array, Declaration, Entry, Layout, Part, Share, Staging
from ckpt.types import FRAMES_MAX

SEGMENTS_MAX = 1 << 21
PARTS_MAX = 1 << 20
DATA_BYTES_MAX = 1 << 60
RANKS_MAX = 1 << 17
# Room for what a declaration has besides: a dozen more sections, three numbers, the name of a division.
_ABOUT_BYTES = 4096

_PART = np.dtype([("entry", "<u4"), ("box", "<u4"), ("start", "<u8"), ("stop", "<u8")])


def encode(declaration: Declaration) -> bytes:
    """The bytes of a declaration. Errors: UsageError if a name or the whole does not fit the format."""
    out = ColumnWriter(ColumnKind.DECLARATION)
    out.strings("about", [declaration.coordinate, declaration.division])
    out.array("numbers", [declaration.rank, declaration.world, declaration.staging.data_bytes], "<u8")
    _write_layout(out, declaration.layout)
    out.struct("segments", declaration.staging.segments, delta=("entry", "offset", "frame"))
    out.struct("frames", declaration.staging.frames, delta=("offset",))
    return out.finish()


def bytes_max(layout_bytes: int, coordinate: str, staging: Staging) -> int:
    """The most bytes that `encode` can return for a declaration whose layout alone encodes to `layout_bytes`. Assumes
    that the staging does not compress at all. Takes no time; encoding takes 2 us per tensor."""
    columns: int = staging.segments.nbytes + staging.frames.nbytes
    return layout_bytes + columns + len(coordinate.encode()) + _ABOUT_BYTES


def decode(data: bytes | memoryview, what: str = "a declaration") -> Declaration:
    """The declaration, checked: every segment lies in its box and in its frame, every frame in the data region.

    Errors: DamagedData that begins with `what`."""
    source = ColumnReader(ColumnKind.DECLARATION, data, what)
    coordinate, division = source.strings("about", 2)
    rank, world, data_bytes = source.ints("numbers", "<u8", 3, top=DATA_BYTES_MAX).tolist()
    if not rank < world <= RANKS_MAX:
        raise source.damaged(f"rank {rank} is not a rank of a world of {world} (at most {RANKS_MAX})")
    layout, tensors, boxes = _read_layout(source)
    frames = source.struct("frames", STAGED_FRAME, FRAMES_MAX)
    segments = source.struct("segments", SEGMENT, SEGMENTS_MAX)
    _check_frames(source, frames, data_bytes)
    _check_segments(source, segments, frames, tensors, boxes)
    return Declaration(rank, world, coordinate, division, layout, Staging(segments, frames, data_bytes))


def encode_layout(layout: Layout) -> bytes:
    """The bytes of a layout. Errors: UsageError if a name or the whole does not fit the format."""
    out = ColumnWriter(ColumnKind.LAYOUT)
    _write_layout(out, layout)
    return out.finish()


def decode_layout(data: bytes | memoryview) -> Layout:
    """The layout, checked. Errors: DamagedData."""
    return _read_layout(ColumnReader(ColumnKind.LAYOUT, data, "a layout"))[0]


def encode_share(share: Share) -> bytes:
    """The bytes of a share. Errors: UsageError if it does not fit the format."""
    out = ColumnWriter(ColumnKind.SHARE)
    rows = [(part.entry, part.box, part.start, part.stop) for part in share]
    out.struct("parts", np.array(rows, _PART), delta=("entry",))
    return out.finish()


def decode_share(data: bytes | memoryview) -> Share:
    """The share. Its indices refer to a layout that only the caller has; `layout.staging.stage` joins the two.
    Errors: DamagedData."""
    source = ColumnReader(ColumnKind.SHARE, data, "a share")
    parts = source.struct("parts", _PART, PARTS_MAX)
    if (parts["start"] > parts["stop"]).any() or (parts["stop"] > DATA_BYTES_MAX).any():
        raise source.damaged("a part ends before it begins, or beyond any box")
    return tuple(Part(*row) for row in parts.tolist())


def _write_layout(out: ColumnWriter, layout: Layout) -> None:
    write_tensors(out, layout.entries)
    pairs = [(index, box) for index, entry in enumerate(layout.entries) for box in entry.boxes]
    write_boxes(out, [index for index, _ in pairs], [box for _, box in pairs])


def _read_layout(source: ColumnReader) -> tuple[Layout, TensorColumns, BoxColumns]:
    tensors = read_tensors(source)
    boxes = read_boxes(source, tensors)
    if (np.diff(boxes.tensor) < 0).any():
        raise source.damaged("its boxes are not in the order of their entries")
    if any(a >= b for a, b in pairwise(zip(tensors.names, tensors.owners, strict=True))):
        raise source.damaged("its entries are not sorted, or one appears twice")
    pairs = zip(boxes.tensor.tolist(), boxes.boxes(), strict=True)
    held = {entry: tuple(box for _, box in group) for entry, group in groupby(pairs, key=lambda pair: pair[0])}
    columns = zip(tensors.names, tensors.dtypes(), tensors.shapes.tuples(), tensors.owners, strict=True)
    entries = tuple(
        Entry(name, dtype, shape, held.get(index, ()), owner)
        for index, (name, dtype, shape, owner) in enumerate(columns)
    )
    return Layout(entries), tensors, boxes


def _check_frames(source: ColumnReader, frames: Array, data_bytes: int) -> None:
    check_frames(source, frames)
    if not len(frames):
        return
    if frames["offset"].max() > data_bytes or (_ints(frames, "offset") + _ints(frames, "length") > data_bytes).any():
        raise source.damaged("a frame reaches out of the data region")


def _check_segments(
    source: ColumnReader, segments: Array, frames: Array, tensors: TensorColumns, boxes: BoxColumns
) -> None:
    if not len(segments):
        return
    entry, within, frame = (_ints(segments, field) for field in ("entry", "box", "frame"))
    held = np.bincount(boxes.tensor, minlength=len(tensors.names))
    if entry.max() >= len(tensors.names) or frame.max() >= len(frames) or (within >= held[entry]).any():
        raise source.damaged("a segment names an entry, a box or a frame that does not exist")
    if max(int(segments[field].max()) for field in ("start", "length", "offset")) > DATA_BYTES_MAX:
        raise source.damaged("a segment reaches out of its box")
    start, length, offset = (_ints(segments, field) for field in ("start", "length", "offset"))
    box = Ragged(held, held).starts()[entry] + within
    if (start + length > boxes.sizes[box]).any():
        raise source.damaged("a segment reaches out of its box")
    begin = _ints(frames, "offset")[frame]
    if (offset < begin).any() or (offset + length > begin + _ints(frames, "length")[frame]).any():
        raise source.damaged("a segment reaches out of its frame")
    dtype = tensors.codes[entry]
    if (frames["dtype"][frame] != dtype).any() or ((start | length | (offset - begin)) % ITEMSIZES[dtype]).any():
        raise source.damaged("a segment has another dtype than its frame, or begins within an element")


def _ints(array: Array, field: str) -> Ints:
    values: Ints = array[field].astype(np.int64)
    return values


# A sample of staged bytes, as the trainer sends it. `box`: its index in the order of (entry, box).
SAMPLE = np.dtype([("box", "<u4"), ("hash", "<u8")])
