"""The staging: places a rank's share in its arena. A pure function of (layout, share, frame size).

Trainer and agent compute the same staging. Large boxes come first, in frames of their own. These are cut at multiples
of `frame_bytes` of the box, whatever the share, so an unchanged large tensor keeps its frames when the division
changes. Small boxes follow, sorted by dtype and then in canonical order, packed end to end into frames.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckpt.errors import UsageError
from ckpt.layout.layout import SEGMENT, STAGED_FRAME, Layout, Share, Staging
from ckpt.types import DTYPE_CODE, FRAME_BYTES, FRAME_BYTES_MAX, FRAMES_MAX, ITEMSIZE, SMALL_BYTES

Ints = npt.NDArray[np.int64]

PAGE = 4096  # large frames begin at pages, so that they can be read and sent without a copy
CACHE_LINE = 64  # packed frames begin at cache lines


def frame_bytes_for(total_bytes: int) -> int:
    """The frame size for a checkpoint of `total_bytes`: FRAME_BYTES, doubled until FRAMES_MAX cannot be exceeded.

    In the worst case every tensor is just too large to be packed and takes a quarter of a frame. So the size is chosen
    for FRAMES_MAX / 8 full frames. This leaves room for the worst case, and again as much for packed frames, tails and
    values. Errors: UsageError above 32 TiB, where a frame would exceed FRAME_BYTES_MAX.
    """
    frame_bytes = FRAME_BYTES
    while total_bytes > frame_bytes * (FRAMES_MAX // 8):
        frame_bytes *= 2
    if frame_bytes > FRAME_BYTES_MAX:
        raise UsageError(
            f"the state has {total_bytes:,} bytes; one checkpoint holds at most "
            f"{FRAME_BYTES_MAX * (FRAMES_MAX // 8):,}. Split the state over several Checkpointers"
        )
    return frame_bytes


def small_bytes_for(frame_bytes: int) -> int:
    """The size below which boxes are packed together: SMALL_BYTES for usual frames, in proportion for larger ones."""
    return SMALL_BYTES * frame_bytes // FRAME_BYTES


def stage(layout: Layout, share: Share, frame_bytes: int) -> Staging:
    """The staging of a share. Segments and frames are in order of their offsets. Takes about 3 us per part.

    `frame_bytes`: a multiple of 64, at most FRAME_BYTES_MAX, else UsageError.
    """
    if frame_bytes % CACHE_LINE or not 0 < frame_bytes <= FRAME_BYTES_MAX:
        raise UsageError(f"frame_bytes={frame_bytes}: give a multiple of {CACHE_LINE} up to {FRAME_BYTES_MAX}")
    parts = np.array([(p.entry, p.box, p.start, p.stop) for p in share if p.stop > p.start], np.int64).reshape(-1, 4)
    entry, box, start, stop = parts.T
    codes = np.array([DTYPE_CODE[e.dtype] for e in layout.entries], np.int64)[entry]
    box_bytes = np.array(
        [
            layout.entries[e].boxes[b].size * ITEMSIZE[layout.entries[e].dtype]
            for e, b in zip(entry.tolist(), box.tolist(), strict=True)
        ],
        np.int64,
    )
    is_large = box_bytes >= small_bytes_for(frame_bytes)

    large = np.flatnonzero(is_large)
    part, cut_start, cut_stop = _cut(start[large], stop[large], frame_bytes)
    part = large[part]
    cut_length = cut_stop - cut_start
    cut_offset = _offsets(cut_length, PAGE, 0)
    large_bytes = int(cut_offset[-1] + cut_length[-1]) if len(cut_offset) else 0

    small = np.flatnonzero(~is_large)
    small = small[np.argsort(codes[small], kind="stable")]
    small_length = stop[small] - start[small]
    firsts = _pack(codes[small], small_length, frame_bytes)
    frame_length = np.add.reduceat(small_length, firsts) if len(firsts) else np.zeros(0, np.int64)
    frame_offset = _offsets(frame_length, CACHE_LINE, -(-large_bytes // CACHE_LINE) * CACHE_LINE)
    members = np.diff(np.append(firsts, len(small)))
    within = np.cumsum(small_length) - small_length
    within -= np.repeat(within[firsts], members)

    which = np.concatenate([part, small])
    segments = np.zeros(len(which), SEGMENT)
    segments["entry"] = entry[which]
    segments["box"] = box[which]
    segments["start"] = np.concatenate([cut_start, start[small]])
    segments["length"] = np.concatenate([cut_length, small_length])
    segments["offset"] = np.concatenate([cut_offset, np.repeat(frame_offset, members) + within])
    segments["frame"] = np.concatenate([np.arange(len(part)), len(part) + np.repeat(np.arange(len(firsts)), members)])
    frames = np.zeros(len(part) + len(firsts), STAGED_FRAME)
    frames["offset"] = np.concatenate([cut_offset, frame_offset])
    frames["length"] = np.concatenate([cut_length, frame_length])
    frames["dtype"] = np.concatenate([codes[part], codes[small][firsts]])
    return Staging(segments, frames, int(frames["offset"][-1] + frames["length"][-1]) if len(frames) else 0)


def _cut(start: Ints, stop: Ints, frame_bytes: int) -> tuple[Ints, Ints, Ints]:
    """The pieces of byte ranges that are cut at multiples of `frame_bytes`: (index of the range, start, stop)."""
    first = start // frame_bytes
    count = -(-stop // frame_bytes) - first
    which = np.repeat(np.arange(len(start)), count)
    frame = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + first[which]
    return which, np.maximum(frame * frame_bytes, start[which]), np.minimum((frame + 1) * frame_bytes, stop[which])


def _offsets(length: Ints, align: int, base: int) -> Ints:
    """The offsets of runs of these lengths, each at the next multiple of `align`. `base` must be such a multiple."""
    room = -(-length // align) * align
    return base + np.cumsum(room) - room


def _pack(codes: Ints, length: Ints, frame_bytes: int) -> Ints:
    """The first member of each packed frame. A frame takes as many members of one dtype as fit. `codes` are sorted."""
    ends = np.cumsum(length)
    kind_ends = np.searchsorted(codes, codes, side="right")
    firsts = []
    at = 0
    while at < len(codes):
        firsts.append(at)
        before = int(ends[at - 1]) if at else 0
        at = min(int(np.searchsorted(ends, before + frame_bytes, side="right")), int(kind_ends[at]))
    return np.array(firsts, np.int64)
