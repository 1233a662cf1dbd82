"""What the codecs gain and cost on this machine, one thread, on numbers like those of a model and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckpt.bench.figures import Figure, in_turns
from ckpt.format import codecs
from ckpt.types import DTYPE_CODE

SECTION = "codecs"
ROUNDS, LIMIT_S = 3, 10.0


def measure(nbytes: int) -> Iterator[Figure]:
    """Ratio, and GB/s of raw bytes against a memcpy. `nbytes`: of each kind of tensor."""
    random = np.random.default_rng(0)
    weights = random.normal(0.0, 0.02, nbytes // 4).astype(np.float32)
    # bfloat16 is the upper half of float32.
    halves = np.ascontiguousarray((weights.view(np.uint32) >> 16).astype(np.uint16))
    kinds: dict[str, tuple[str, np.ndarray]] = {
        "weights, bfloat16": ("bfloat16", halves),
        "weights, float32": ("float32", weights),
        "first moment, float32": ("float32", random.normal(0.0, 1e-3, nbytes // 4).astype(np.float32)),
    }
    for name, (dtype, data) in kinds.items():
        yield from _measure_kind(name, DTYPE_CODE[dtype], data.view(np.uint8))


def _measure_kind(name: str, code: int, data: np.ndarray) -> Iterator[Figure]:
    scratch = codecs.CodecScratch()
    codec, coded = codecs.encode("auto", code, data.data, scratch)
    stored = bytes(coded)
    out = np.empty_like(data)
    works = {
        "encode": lambda: codecs.encode("auto", code, data.data, scratch),
        "decode": lambda: codecs.decode(codec, code, stored, out.data, scratch),
        "copy": lambda: np.copyto(out, data),
    }
    found = {way: len(data) / 1e9 / seconds for way, seconds in in_turns(works, ROUNDS, LIMIT_S).items()}
    yield Figure(SECTION, f"{name}: raw / stored bytes", len(data) / len(stored), "x", "higher")
    yield Figure(SECTION, f"{name}: encode", found["encode"], "GB/s", "higher", found["copy"])
    yield Figure(SECTION, f"{name}: decode", found["decode"], "GB/s", "higher", found["copy"])
