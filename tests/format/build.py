"""Checkpoints made by hand: tensors as NumPy arrays of their bits, cut into boxes and frames, with a record on top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckpt.format import codecs, values
from ckpt.format.frames import frame_hash
from ckpt.format.manifest import EXTENT, FRAME, PLACE, RANK_VALUES, VALUES, Manifest, Record, TensorSpec
from ckpt.types import DTYPE_CODE, Box, CodecOption, Identity

LARGE_BYTES = 4096
FRAME_BYTES = 16384


@dataclass(frozen=True)
class Tensor:
    """`bits`: the tensor's elements as any NumPy dtype of the right size. `boxes`: how it is cut (None: whole)."""

    name: str
    dtype: str
    bits: npt.NDArray[np.generic]
    owner: str = ""
    boxes: tuple[Box, ...] | None = None


def blobs(shared: object, own: Sequence[object], coordinates: Sequence[str]) -> list[tuple[TensorSpec, bytes]]:
    data = [(VALUES, "", values.encode(shared))]
    data += [(RANK_VALUES, where, values.encode(tree)) for where, tree in zip(coordinates, own, strict=True)]
    return [(TensorSpec(name, "uint8", (len(b),), owner, values=True), b) for name, owner, b in data]


def manifest(
    tensors: Sequence[Tensor],
    coordinates: Sequence[str] = ("rank=0",),
    values_of: tuple[object, list[object]] | None = None,
) -> tuple[Manifest, list[bytes]]:
    """The manifest and the raw bytes of its frames."""
    items = [
        (TensorSpec(t.name, t.dtype, t.bits.shape, t.owner), t.bits, t.boxes or (Box.whole(t.bits.shape),))
        for t in tensors
    ]
    if values_of is not None:
        for spec, data in blobs(values_of[0], values_of[1], coordinates):
            items.append((spec, np.frombuffer(data, np.uint8), (Box.whole(spec.shape),)))
    items.sort(key=lambda item: (item[0].values, item[0].name, item[0].owner))
    boxes: list[tuple[int, Box]] = []
    extents: list[tuple[int, int, int, int, int]] = []
    frames: list[tuple[str, bytearray]] = []
    open_frames: dict[str, int] = {}  # where small boxes of a dtype are packed
    for index, (spec, bits, cut) in enumerate(items):
        for box in cut:
            part = bits[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
            data = np.ascontiguousarray(part).tobytes()
            number = len(boxes)
            boxes.append((index, box))
            if spec.values or len(data) >= LARGE_BYTES:
                for start in range(0, len(data), FRAME_BYTES):
                    piece = data[start : start + FRAME_BYTES]
                    extents.append((number, start, len(piece), len(frames), 0))
                    frames.append((spec.dtype, bytearray(piece)))
            elif data:
                at = open_frames.get(spec.dtype)
                if at is None or len(frames[at][1]) + len(data) > FRAME_BYTES:
                    at = open_frames[spec.dtype] = len(frames)
                    frames.append((spec.dtype, bytearray()))
                extents.append((number, 0, len(data), at, len(frames[at][1])))
                frames[at][1].extend(data)
    rows = [(*frame_hash(data), len(data), DTYPE_CODE[dtype]) for dtype, data in frames]
    made = Manifest(
        tuple(spec for spec, _, _ in items),
        tuple(boxes),
        np.array(rows, FRAME),
        np.array(extents, EXTENT),
        tuple(coordinates),
    )
    return made, [bytes(data) for _, data in frames]


def record(
    identity: Identity,
    made: Manifest,
    frames: Sequence[bytes],
    *,
    writer: str = "w0",
    options: Sequence[CodecOption] = ("auto",),
    base: Record | None = None,
    metrics: dict[str, float] | None = None,
    about: dict[str, object] | None = None,
) -> tuple[Record, bytes]:
    """A record whose new frames lie in one pack, and that pack. `options` are taken in turn, frame by frame. Frames
    that `base` has are referred to."""
    scratch = codecs.CodecScratch()
    packs = list(base.packs) if base else []
    known = {}
    if base is not None:
        known = {tuple(f.tolist()): p.tolist() for f, p in zip(base.manifest.frames, base.places, strict=True)}
    pack = bytearray()
    places = []
    for i, data in enumerate(frames):
        old = known.get(tuple(made.frames[i].tolist()))
        if old is not None:
            places.append(old)
            continue
        codec, stored = codecs.encode(options[i % len(options)], int(made.frames["dtype"][i]), data, scratch)
        places.append((len(packs), len(pack), len(stored), codec))
        pack += stored
    packs.append((f"data/{identity}/node0/{writer}-0.pack", len(pack)))
    done = Record(identity, writer, made, tuple(packs), np.array(places, PLACE), metrics or {}, about or {})
    return done, bytes(pack)
