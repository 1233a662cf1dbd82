"""Small checkpoints for the tests: arrays in one piece of memory, as an arena holds them, and the manifest of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.events import Events
from ckpt.format import values
from ckpt.format.frames import frame_hash
from ckpt.format.manifest import EXTENT, FRAME, RANK_VALUES, VALUES, Manifest, Record, TensorSpec
from ckpt.store.commit import Committed, Committer
from ckpt.store.dtypes import bits_dtype
from ckpt.store.lineage import Claim
from ckpt.store.reader import FrameReader
from ckpt.store.run import Run
from ckpt.store.tensor_stream import slabs_of, stream
from ckpt.types import DTYPE_CODE, Box, Epoch, Identity, Version

Bits = npt.NDArray[Any]


@dataclass(frozen=True)
class Tensor:
    """`bits`: the global tensor. `boxes`: how it was sharded; None: one box."""

    dtype: str
    bits: Bits
    boxes: tuple[Box, ...] | None = None
    owner: str = ""


@dataclass
class Snapshot:
    """One checkpoint's content and where its frames lie in `memory`."""

    manifest: Manifest
    memory: bytearray
    at: list[tuple[int, int]]
    tensors: dict[tuple[str, str], Bits] = field(default_factory=dict)

    def frame(self, i: int) -> memoryview:
        start, length = self.at[i]
        return memoryview(self.memory)[start : start + length]


def floats(*shape: int, seed: int = 0) -> Tensor:
    return Tensor("float32", np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def snapshot(
    tensors: Mapping[str, Tensor] | Sequence[tuple[str, Tensor]],
    frame_bytes: int = 1024,
    shared: Any = None,
    own: Mapping[str, Any] | None = None,
    align: int = 64,
) -> Snapshot:
    """Every box is cut into frames of `frame_bytes`; nothing is packed together."""
    items = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    for name, owner, tree in [(VALUES, "", shared), *((RANK_VALUES, o, t) for o, t in (own or {}).items())]:
        if tree is not None:
            items.append((name, Tensor("uint8", np.frombuffer(values.encode(tree), np.uint8), owner=owner)))
    items.sort(key=lambda item: (item[0] in (VALUES, RANK_VALUES), item[0], item[1].owner))
    specs, boxes, frames, extents, at = [], [], [], [], []
    memory = bytearray()
    for name, tensor in items:
        is_values = name in (VALUES, RANK_VALUES)
        shape = tuple(tensor.bits.shape)
        specs.append(TensorSpec(name, tensor.dtype, shape, tensor.owner, is_values))
        for box in tensor.boxes or (Box.whole(shape),):
            inside = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            data = np.ascontiguousarray(tensor.bits[inside]).tobytes()
            boxes.append((len(specs) - 1, box))
            step = len(data) if is_values else frame_bytes
            for start in range(0, len(data), max(1, step)):
                part = data[start : start + step]
                extents.append((len(boxes) - 1, start, len(part), len(frames), 0))
                frames.append((*frame_hash(part), len(part), DTYPE_CODE[tensor.dtype]))
                memory.extend(bytes(-len(memory) % align))
                at.append((len(memory), len(part)))
                memory.extend(part)
    manifest = Manifest(
        tuple(specs), tuple(boxes), np.array(frames, FRAME), np.array(extents, EXTENT), tuple(own or ("rank=0",))
    )
    return Snapshot(manifest, memory, at, {(n, t.owner): t.bits for n, t in items if n not in (VALUES, RANK_VALUES)})


def rows(shape: tuple[int, ...], parts: int, dim: int = 0) -> tuple[Box, ...]:
    """An uneven division of one dimension."""
    edges = [shape[dim] * i // parts for i in range(parts)] + [shape[dim]]
    return tuple(
        Box(
            tuple(a if d == dim else 0 for d in range(len(shape))),
            tuple(b - a if d == dim else n for d, n in enumerate(shape)),
        )
        for a, b in itertools.pairwise(edges)
    )


def read_all(backend: Any, record: Record, slab_bytes: int = 2048) -> dict[tuple[str, str], Bits]:
    """Every tensor of a record, read through slabs of so many bytes."""
    specs = [spec for spec in record.manifest.tensors if not spec.values]
    out = {(s.name, s.owner): np.zeros(s.shape, bits_dtype(s.dtype)) for s in specs}
    wants = [want for spec in specs for want in slabs_of(spec, slab_bytes)]
    for i, bits in stream(FrameReader(backend, record), wants):
        want = wants[i]
        inside = tuple(slice(o, o + n) for o, n in zip(want.box.offset, want.box.shape, strict=True))
        out[want.name, want.owner][inside] = bits
    return out


def same(a: Mapping[tuple[str, str], Bits], b: Mapping[tuple[str, str], Bits]) -> bool:
    return a.keys() == b.keys() and all(
        a[key].shape == b[key].shape and a[key].tobytes() == b[key].tobytes() for key in a
    )


def begun(store: Any, events: Events | None = None) -> Run:
    """A run whose epoch 1 has been claimed."""
    run = Run(store, events=events)
    run.put_claim(Claim(epoch(1), None))
    return run


def commit(
    store: Any,
    step: int,
    snap: Snapshot,
    writer: str = "w",
    codec: Any = "raw",
    *,
    pack_bytes: int = 4096,
    events: Events | None = None,
    frame: Callable[[int], memoryview] | None = None,
    check: Callable[[], None] = lambda: None,
    **options: Any,
) -> Committed:
    """Commits a step of epoch 1."""
    committer = Committer(store, writer, codec, pack_bytes=pack_bytes, events=events)
    return committer.commit(identity(1, step), snap.manifest, frame or snap.frame, check=check, **options)


def epoch(number: int, nonce: int = 0) -> Epoch:
    return Epoch(number, f"{nonce:016x}")


def identity(epoch_number: int, step: int, nonce: int = 0, sub: int = 0) -> Identity:
    return Identity(epoch(epoch_number, nonce), Version(step, sub))
