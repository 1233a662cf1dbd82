"""The commit record and the manifest as bytes and back, with everything checked.

Anyone may have written to the store that a record comes from. So each number is checked against the others before it is
used. After `decode` every box lies in its tensor, and the boxes cover it exactly once. Every byte of a box has exactly
one place in a frame, every frame one place in a pack, and every pack key is below `data/`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ckpt.errors import NewerFormat, UsageError
from ckpt.format.boxes import (
    ITEMSIZES,
    BoxColumns,
    TensorColumns,
    check_count,
    check_frames,
    is_covered_once,
    read_boxes,
    read_count,
    read_tensors,
    write_boxes,
    write_tensors,
)
from ckpt.format.columns import ColumnKind, ColumnReader, ColumnWriter, stored_bytes_max
from ckpt.format.manifest import (
    EXTENT,
    FRAME,
    PLACE,
    RANK_VALUES,
    VALUES,
    BoxRows,
    Codec,
    Manifest,
    Record,
    TensorSpec,
)
from ckpt.gc_pause import pause_gc
from ckpt.layout.layout import Array
from ckpt.types import FRAMES_MAX, PATH_NAME, Identity

RECORD_BYTES_MAX = stored_bytes_max(ColumnKind.RECORD)
EXTENTS_MAX = 1 << 21
RANKS_MAX = 1 << 17
PACK_BYTES_MAX = 1 << 60
METRICS_MAX = 1024
ABOUT_BYTES_MAX = 64 << 10

_IDENTITY = r"[0-9]{8}-[0-9a-f]{16}-[0-9]{12}\.[0-9]{4,9}"
_PART = r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}"
_PACK_KEY = re.compile(rf"data/{_IDENTITY}/{_PART}/(?={_PART}\Z)[A-Za-z0-9._-]+-[0-9]+\.pack")
_COMMIT_KEY = re.compile(rf"commits/({_IDENTITY})-({_PART})")


@pause_gc()
def encode(record: Record) -> bytes:
    """The bytes of a commit record. Errors: UsageError if a name, a number or the whole does not fit the format."""
    check_count("packs", len(record.packs), FRAMES_MAX)
    check_count("metrics", len(record.metrics), METRICS_MAX)
    out = ColumnWriter(ColumnKind.RECORD)
    out.strings("identity", [str(record.identity), record.writer])
    _write_manifest(out, record.manifest)
    out.strings("packs", [key for key, _ in record.packs])
    out.array("packs.size", [size for _, size in record.packs], "<u8")
    out.struct("places", record.places, delta=("pack", "offset"))
    out.strings("metrics", list(record.metrics))
    out.array("metrics.value", list(record.metrics.values()), "<f8")
    out.blob("about", _about_bytes(record.about))
    return out.finish()


@pause_gc()
def decode(data: bytes | memoryview, key: str) -> Record:
    """The record that `data` holds, fully checked. `key`: where it came from, for messages. If `key` has the form
    `commits/<identity>-<writer>`, the record must have that identity and writer. Errors: DamagedData names the record
    and what is wrong; NewerFormat (a DamagedData) for a later format."""
    source = ColumnReader(ColumnKind.RECORD, data, key)
    name, writer = source.strings("identity", 2)
    try:
        identity = Identity.parse(name)
    except ValueError as exc:
        raise source.damaged(f"{name[:80]!r} is not an identity") from exc
    if str(identity) != name or PATH_NAME.fullmatch(writer) is None:
        raise source.damaged(f"identity {name[:80]!r} or writer {writer[:80]!r} is not well-formed")
    match = _COMMIT_KEY.fullmatch(key)
    if match is not None and (match[1], match[2]) != (name, writer):
        raise source.damaged(f"it holds the record of {name} by {writer}, which belongs under another key")
    manifest = _read_manifest(source)
    packs = _read_packs(source)
    places = _read_places(source, manifest, packs)
    return Record(identity, writer, manifest, packs, places, _read_metrics(source), _read_about(source))


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest. Errors: UsageError if a name, a number or the whole does not fit the format."""
    out = ColumnWriter(ColumnKind.MANIFEST)
    _write_manifest(out, manifest)
    return out.finish()


def decode_manifest(data: bytes | memoryview) -> Manifest:
    """The manifest, checked as strictly as a record. Errors: DamagedData."""
    return _read_manifest(ColumnReader(ColumnKind.MANIFEST, data, "a manifest"))


def _write_manifest(out: ColumnWriter, manifest: Manifest) -> None:
    check_count("frames", len(manifest.frames), FRAMES_MAX)
    check_count("extents", len(manifest.extents), EXTENTS_MAX)
    check_count("ranks", len(manifest.coordinates), RANKS_MAX)
    write_tensors(out, manifest.tensors)
    out.array("tensors.values", [spec.values for spec in manifest.tensors], "|u1")
    write_boxes(out, manifest.tensor_by_box, [box for _, box in manifest.boxes])
    out.struct("frames", manifest.frames)
    out.struct("extents", manifest.extents, delta=("box", "frame"))
    out.strings("coordinates", manifest.coordinates)


def _read_manifest(source: ColumnReader) -> Manifest:
    tensors = read_tensors(source)
    boxes = read_boxes(source, tensors)
    if not is_covered_once(tensors, boxes):
        raise source.damaged("the boxes of a tensor overlap, or do not cover it")
    frames = source.struct("frames", FRAME, FRAMES_MAX)
    check_frames(source, frames)
    if (frames["length"] % ITEMSIZES[frames["dtype"]]).any():
        raise source.damaged("a frame ends within an element")
    extents = source.struct("extents", EXTENT, EXTENTS_MAX)
    _check_extents(source, extents, frames, tensors, boxes)
    specs = _specs(source, tensors)
    _check_values(source, specs, extents, frames, boxes)
    coordinates = source.strings("coordinates", read_count(source, "coordinates.len", RANKS_MAX))
    rows = BoxRows(boxes.tensor, boxes.boxes)
    return Manifest(specs, rows, frames, extents, tuple(coordinates))


def _specs(source: ColumnReader, tensors: TensorColumns) -> tuple[TensorSpec, ...]:
    is_values = source.ints("tensors.values", "|u1", len(tensors.names), top=1)
    columns = (tensors.names, tensors.dtypes(), tensors.shapes.tuples(), tensors.owners, map(bool, is_values.tolist()))
    specs = tuple(map(TensorSpec, *columns))
    order = [(spec.values, spec.name, spec.owner) for spec in specs]
    if any(a >= b for a, b in pairwise(order)):
        raise source.damaged("its tensors are not sorted, or one appears twice")
    for spec in specs[len(specs) - int(is_values.sum()) :]:
        is_blob = spec.name in (VALUES, RANK_VALUES) and spec.dtype == "uint8" and len(spec.shape) == 1
        if not is_blob or (spec.name == RANK_VALUES and not spec.owner):
            raise source.damaged(f"{spec.name[:80]!r} is not a blob of values")
    return specs


def _check_extents(
    source: ColumnReader, extents: Array, frames: Array, tensors: TensorColumns, boxes: BoxColumns
) -> None:
    box = extents["box"].astype(np.int64)
    frame = extents["frame"].astype(np.int64)
    start, length, offset = (extents[field].astype(np.int64) for field in ("start", "length", "offset"))
    if not len(extents):
        if boxes.sizes.any():
            raise source.damaged("the bytes of some boxes are in no frame")
        return
    if box.max() >= len(boxes.tensor) or frame.max() >= len(frames):
        raise source.damaged("an extent names a box or a frame that does not exist")
    if extents["start"].max() > PACK_BYTES_MAX or length.min() == 0:
        raise source.damaged("an extent is empty, or begins outside its box")
    if (offset + length > frames["length"][frame]).any():
        raise source.damaged("an extent reaches out of its frame")
    dtype = tensors.codes[boxes.tensor[box]]
    if (frames["dtype"][frame] != dtype).any() or ((start | length | offset) % ITEMSIZES[dtype]).any():
        raise source.damaged("an extent has another dtype than its frame, or begins within an element")
    # Sorted by box. Within a box, each extent begins where the one before ended, and the last one ends with the box.
    first = np.diff(box, prepend=-1) != 0
    before = np.concatenate(([0], (start + length)[:-1]))
    last = np.concatenate((first[1:], [True]))
    if (np.diff(box) < 0).any() or (start != np.where(first, 0, before)).any():
        raise source.damaged("its extents are not sorted, overlap, or leave a gap")
    if ((start + length)[last] != boxes.sizes[box[last]]).any() or np.delete(boxes.sizes, box[last]).any():
        raise source.damaged("the extents of a box do not cover it")


def _check_values(
    source: ColumnReader, specs: tuple[TensorSpec, ...], extents: Array, frames: Array, boxes: BoxColumns
) -> None:
    """Checks that each blob of values is one box in one frame, so that a reader of it needs memory for no more than a
    frame."""
    is_values = np.array([spec.values for spec in specs], bool)
    of_values = is_values[boxes.tensor]
    its = extents[of_values[extents["box"]]]
    if (
        of_values.sum() != is_values.sum()
        or (its["length"] != frames["length"][its["frame"]]).any()
        or its["start"].any()
    ):
        raise source.damaged("a blob of values is not one box in one frame")


def _read_packs(source: ColumnReader) -> tuple[tuple[str, int], ...]:
    sizes = source.ints("packs.size", "<u8", read_count(source, "packs.size", FRAMES_MAX), top=PACK_BYTES_MAX).tolist()
    keys = source.strings("packs", len(sizes))
    for key in keys:
        if _PACK_KEY.fullmatch(key) is None:
            raise source.damaged(f"{key[:200]!r} is not the key of a pack")
    if len(set(keys)) != len(keys):
        raise source.damaged("a pack appears twice")
    return tuple(zip(keys, sizes, strict=True))


def _read_places(source: ColumnReader, manifest: Manifest, packs: tuple[tuple[str, int], ...]) -> Array:
    places = source.struct("places", PLACE, FRAMES_MAX)
    if len(places) and places["codec"].max() > Codec.PLANES:
        text = f"it uses codec {places['codec'].max()}, which this ckpt does not know; install a newer ckpt"
        raise NewerFormat(f"{source.what}: {text}")
    if why := placement_fault(places, manifest.frames, [size for _, size in packs]):
        raise source.damaged(why)
    return places


def placement_fault(places: Array, frames: Array, sizes: Sequence[int]) -> str:
    """Why these frames cannot lie at these places in packs of these sizes; "" if they can."""
    if len(places) != len(frames):
        return f"it has {len(places)} places for {len(frames)} frames"
    if not len(places):
        return ""
    if places["pack"].max() >= len(sizes):
        return "a place names a pack that does not exist"
    if places["codec"].max() > Codec.PLANES:
        return f"codec {places['codec'].max()} is not known"
    length = places["length"].astype(np.uint64)
    room = np.array(sizes, np.uint64)[places["pack"]]
    if (length > room).any() or (places["offset"] > room - length).any():
        return "a place reaches out of its pack"
    raw = places["codec"] == Codec.RAW
    if length.min() == 0 or (length > frames["length"]).any() or (length[raw] != frames["length"][raw]).any():
        return "the stored length of a frame does not fit its codec"
    return ""


def _read_metrics(source: ColumnReader) -> dict[str, float]:
    values = source.array("metrics.value", "<f8", read_count(source, "metrics.value", METRICS_MAX)).tolist()
    names = source.strings("metrics", len(values))
    if len(set(names)) != len(names):
        raise source.damaged("a metric appears twice")
    return dict(zip(names, values, strict=True))


def _about_bytes(about: dict[str, Any]) -> bytes:
    try:
        data = json.dumps(about, sort_keys=True, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as exc:
        raise UsageError(f"the field `about` of a record must be a JSON object: {exc}") from exc
    if len(data) > ABOUT_BYTES_MAX:
        raise UsageError(f"the field `about` of a record has {len(data)} bytes; at most {ABOUT_BYTES_MAX} are kept")
    return data


def _read_about(source: ColumnReader) -> dict[str, Any]:
    try:
        about = json.loads(source.blob("about", ABOUT_BYTES_MAX))
    except (ValueError, RecursionError) as exc:
        raise source.damaged(f"its field `about` is not JSON: {exc}") from exc
    if not isinstance(about, dict):
        raise source.damaged("its field `about` is not a JSON object")
    return about
