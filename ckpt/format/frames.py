"""The hash that accompanies every frame from the arena to the store and back: xxh3-128 of its raw bytes.

It detects accidents, not forgery. Hashing reads the buffer in place (bytes, a memoryview, an mmap, an array's .data)
and runs outside the GIL.
"""

from __future__ import annotations

import itertools
import mmap

import numpy as np
import numpy.typing as npt
import xxhash

from ckpt.errors import CkptError, UsageError
from ckpt.layout.layout import Array
from ckpt.threads import Tasks

Buffer = bytes | bytearray | memoryview | mmap.mmap

_LOW = (1 << 64) - 1


def frame_hash(buffer: Buffer) -> tuple[int, int]:
    """xxh3-128 (seed 0) as (high, low) 64-bit halves. `buffer` must be C-contiguous."""
    value = xxhash.xxh3_128_intdigest(buffer)
    return value >> 64, value & _LOW


class FrameHasher:
    """Computes `frame_hash` of bytes that come in parts."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, part: Buffer) -> None:
        self._hash.update(part)

    def result(self) -> tuple[int, int]:
        value = self._hash.intdigest()
        return value >> 64, value & _LOW


def hash_bytes(hi: int, lo: int) -> bytes:
    """The canonical 16 bytes of a hash: big-endian, high half first (as xxhsum prints it)."""
    return hi.to_bytes(8, "big") + lo.to_bytes(8, "big")


def hash_frames(data: memoryview, frames: Array, threads: int = 1) -> npt.NDArray[np.uint64]:
    """The hashes of all `frames` (array of STAGED_FRAME) in `data`: uint64, shape (len(frames), 2), (hi, lo).
    `threads`: how many threads share the work, including the caller's. Errors: UsageError if a frame does not lie
    within `data`."""
    offsets = frames["offset"].astype(np.uint64)
    lengths = frames["length"].astype(np.uint64)
    size = np.uint64(data.nbytes)
    if len(frames) and (lengths.max() > size or (offsets > size - lengths).any()):
        raise UsageError(f"the frames to hash reach beyond the {data.nbytes} bytes of their region")
    hashes = np.empty((len(frames), 2), np.uint64)
    flat = data.cast("B")

    def hash_run(first: int, last: int) -> None:
        starts = offsets[first:last].tolist()
        stops = (offsets + lengths)[first:last].tolist()
        for i, (start, stop) in enumerate(zip(starts, stops, strict=True), first):
            value = xxhash.xxh3_128_intdigest(flat[start:stop])
            hashes[i, 0] = value >> 64
            hashes[i, 1] = value & _LOW

    bounds = _equal_runs(lengths, threads)
    with Tasks("hash", pool_size=len(bounds) - 2) as tasks:
        others = []
        for a, b in itertools.pairwise(bounds[1:]):
            try:
                others.append(tasks.submit(hash_run, a, b))
            # No thread can be started: hash on this one.
            except CkptError:
                hash_run(a, b)
        hash_run(bounds[0], bounds[1])
        for other in others:
            other.result()
    return hashes


def _equal_runs(lengths: npt.NDArray[np.uint64], threads: int) -> list[int]:
    """Bounds that cut the frames into at most `threads` runs of about equal bytes, none below 4 MiB."""
    total = int(lengths.sum())
    runs = max(1, min(threads, len(lengths), total >> 22))
    ends = np.cumsum(lengths)
    cuts = np.searchsorted(ends, [total * i // runs for i in range(1, runs)], side="left") + 1
    return [0, *(int(cut) for cut in cuts), len(lengths)]
