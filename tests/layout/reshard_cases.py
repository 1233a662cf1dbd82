"""Manifests made by hand, for the exhaustive cases of resharding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from ckpt.format.manifest import EXTENT, FRAME, Manifest, TensorSpec
from ckpt.types import DTYPE_CODE, Box
from tests.layout.jobs import halves


def all_boxes(shape: Sequence[int]) -> Iterator[Box]:
    spans = [[(a, b) for a in range(n + 1) for b in range(a, n + 1)] for n in shape]
    for spans_of_box in itertools.product(*spans):
        yield Box(tuple(a for a, _ in spans_of_box), tuple(b - a for a, b in spans_of_box))


def manifest_of_runs(array: np.ndarray, run: int) -> tuple[Manifest, list[np.ndarray]]:
    """One tensor "t" of 2-byte elements in one box; each `run` elements lie 6 bytes into a frame of their own."""
    raw = array.tobytes()
    frames, extents, datas = [], [], []
    for number, start in enumerate(range(0, len(raw), 2 * run)):
        data = bytes(6) + raw[start : start + 2 * run] + bytes(4)
        frames.append((*halves(data), len(data), DTYPE_CODE["bfloat16"]))
        extents.append((0, start, len(data) - 10, number, 6))
        datas.append(np.frombuffer(data, np.uint8))
    spec = TensorSpec("t", "bfloat16", array.shape)
    manifest = Manifest(
        (spec,), ((0, Box.whole(array.shape)),), np.array(frames, FRAME), np.array(extents, EXTENT), ("rank=0",)
    )
    return manifest, datas
