"""Where a share lies in an arena."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ckpt.errors import UsageError
from ckpt.layout.division import divide, whole_share
from ckpt.layout.layout import Entry, Layout, Part
from ckpt.layout.staging import frame_bytes_for, small_bytes_for, stage
from ckpt.types import DTYPE_CODE, FRAME_BYTES, FRAME_BYTES_MAX, FRAMES_MAX, ITEMSIZE, SMALL_BYTES, Box
from tests.layout.jobs import DTYPES, grid

FRAME = 1024
SMALL = small_bytes_for(FRAME)


def entry(name: str, count: int, dtype: str = "uint8") -> Entry:
    return Entry(name, dtype, (count,), (Box.whole((count,)),))


def random_layout(rng: random.Random, count: int) -> Layout:
    entries = []
    for i in range(count):
        shape = tuple(rng.choice((0, 1, 2, 5, 30)) for _ in range(rng.randrange(4)))
        boxes = grid(rng, shape, rng.choice((1, 3)))
        entries.append(Entry(f"t{i:03d}", rng.choice(DTYPES), shape, tuple(rng.sample(boxes, len(boxes)))))
    return Layout(tuple(entries))


def random_share(rng: random.Random, layout: Layout) -> tuple[Part, ...]:
    """Any runs of whole elements, not only those that a division makes."""
    share = []
    for e, item in enumerate(layout.entries):
        for b, box in enumerate(item.boxes):
            cuts = sorted(rng.sample(range(box.size + 1), min((box.size + 1) // 2 * 2, rng.choice((0, 2, 2, 4)))))
            size = ITEMSIZE[item.dtype]
            share += [Part(e, b, x * size, y * size) for x, y in zip(cuts[::2], cuts[1::2], strict=True)]
    return tuple(share)


@pytest.mark.parametrize("case", range(40))
def test_segments_and_frames_keep_what_the_layout_of_an_arena_promises(case, seed):
    rng = random.Random(seed + case)
    layout = random_layout(rng, 30)
    share = random_share(rng, layout) if case % 2 else whole_share(layout)
    staging = stage(layout, share, FRAME)
    frames, segments = staging.frames, staging.segments
    ends = frames["offset"].astype(np.int64) + frames["length"]
    assert (frames["length"] > 0).all()
    assert (frames["length"] <= FRAME).all()
    assert (frames["offset"] % 64 == 0).all()
    assert (frames["offset"][1:] >= ends[:-1]).all()
    assert staging.data_bytes == (ends[-1] if len(ends) else 0)

    used = np.zeros(len(frames), np.int64)
    at = 0
    runs: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for e, b, start, length, offset, frame in segments.tolist():
        item = layout.entries[e]
        assert frames["offset"][frame] <= offset >= at
        at = offset + length
        assert at <= ends[frame]
        used[frame] += length
        assert frames["dtype"][frame] == DTYPE_CODE[item.dtype]
        assert offset % ITEMSIZE[item.dtype] == 0
        if item.boxes[b].size * ITEMSIZE[item.dtype] >= SMALL:
            assert frames["offset"][frame] == offset
            assert offset % 4096 == 0
            assert start // FRAME == (start + length - 1) // FRAME
        runs.setdefault((e, b), []).append((start, start + length))
    assert (used == frames["length"]).all(), "no padding within a frame, and nothing lies twice in one"
    wanted = np.concatenate([np.arange(p.start, p.stop) + (p.entry << 40 | p.box << 20) for p in share] or [[]])
    staged = np.concatenate(
        [np.arange(a, b) + (e << 40 | x << 20) for (e, x), some in runs.items() for a, b in some] or [[]]
    )
    assert (np.sort(wanted) == np.sort(staged)).all()


def test_frames_of_a_large_box_do_not_depend_on_the_share():
    layout = Layout((entry("a", 10 * FRAME + 100), entry("b", 5)))
    whole = {(s, n) for e, _, s, n, _, _ in stage(layout, whole_share(layout), FRAME).segments.tolist() if e == 0}
    agreed = {("a", "", layout.entries[0].boxes[0])}
    divided = set()
    for share in divide([layout] * 3, agreed, FRAME):
        divided |= {(s, n) for e, _, s, n, _, _ in stage(layout, share, FRAME).segments.tolist() if e == 0}
    assert divided == whole


def test_small_tensors_are_packed_by_dtype_in_canonical_order_without_padding():
    layout = Layout((entry("a", 9), entry("b", 100, "float16"), entry("c", 11), entry("d", 3, "float16")))
    staging = stage(layout, whole_share(layout), FRAME)
    assert staging.segments["entry"].tolist() == [0, 2, 1, 3]
    assert staging.frames.tolist() == [(0, 20, DTYPE_CODE["uint8"]), (64, 206, DTYPE_CODE["float16"])]
    assert staging.segments["offset"].tolist() == [0, 9, 64, 264]


def test_a_packed_frame_ends_before_the_tensor_that_would_overfill_it():
    layout = Layout(tuple(entry(f"t{i}", 200) for i in range(12)))
    staging = stage(layout, whole_share(layout), FRAME)
    assert staging.frames["length"].tolist() == [1000, 1000, 400]
    layout = Layout(tuple(entry(f"t{i}", 128) for i in range(9)))
    assert stage(layout, whole_share(layout), FRAME).frames["length"].tolist() == [1024, 128]
    layout = Layout((entry("a", SMALL), entry("b", SMALL - 1), entry("c", 1)))  # from SMALL on, frames of its own
    assert stage(layout, whole_share(layout), FRAME).frames["length"].tolist() == [SMALL, SMALL]


def test_nothing_to_stage_is_no_frame():
    layout = Layout((entry("a", 0), entry("b", 7), entry("c", 3 * FRAME)))
    for share in ((), (Part(0, 0, 0, 0), Part(1, 0, 3, 3), Part(2, 0, 100, 100))):
        staging = stage(layout, share, FRAME)
        assert (len(staging.segments), len(staging.frames), staging.data_bytes) == (0, 0, 0)


@pytest.mark.parametrize("sizes", [[SMALL], [SMALL - 1], [FRAME + 1], [SMALL - 1, SMALL, FRAME, FRAME + 1, 1]])
def test_frames_stay_below_the_cap_at_the_size_that_the_total_asks_for(sizes):
    """frame_bytes_for leaves 8 times as many frames as the bytes fill; no mix of sizes needs half of them."""
    layout = Layout(tuple(entry(f"t{i:04d}", sizes[i % len(sizes)]) for i in range(600)))
    staging = stage(layout, whole_share(layout), FRAME)
    total = int(staging.frames["length"].sum())
    assert len(staging.frames) <= 4 * total / FRAME + 1


def test_frames_grow_with_the_state_up_to_a_stated_end():
    assert frame_bytes_for(0) == FRAME_BYTES
    limit = FRAME_BYTES * FRAMES_MAX // 8
    assert frame_bytes_for(limit) == FRAME_BYTES
    assert frame_bytes_for(limit + 1) == 2 * FRAME_BYTES
    assert small_bytes_for(FRAME_BYTES) == SMALL_BYTES
    assert frame_bytes_for(FRAME_BYTES_MAX * FRAMES_MAX // 8) == FRAME_BYTES_MAX
    with pytest.raises(UsageError, match="Split the state over several Checkpointers"):
        frame_bytes_for(FRAME_BYTES_MAX * FRAMES_MAX // 8 + 1)


@pytest.mark.parametrize("frame_bytes", [0, -64, 100, 2 * FRAME_BYTES_MAX])
def test_a_frame_size_that_cannot_be_is_refused(frame_bytes):
    layout = Layout((entry("a", 9),))
    with pytest.raises(UsageError, match="multiple of 64"):
        stage(layout, whole_share(layout), frame_bytes)
