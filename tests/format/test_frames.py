"""Hashes of frames: the reference value, any buffer, any division among threads."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import xxhash

from ckpt.errors import UsageError
from ckpt.format.frames import frame_hash, hash_bytes, hash_frames
from ckpt.layout.layout import STAGED_FRAME
from tests.threads import without_threads


def test_a_frame_hash_is_xxh3_128_high_half_first() -> None:
    # The published test value of XXH3_128bits("", seed 0).
    assert frame_hash(b"") == (0x99AA06D3014798D8, 0x6001C324468D497F)
    assert hash_bytes(*frame_hash(b"abc")) == xxhash.xxh3_128_digest(b"abc")


def test_any_buffer_of_the_same_bytes_has_the_same_hash() -> None:
    data = bytes(range(256)) * 40
    with mmap.mmap(-1, len(data)) as mapped:
        mapped[:] = data
        assert frame_hash(mapped) == frame_hash(data)
        with memoryview(mapped) as view, view[7:] as part:
            assert frame_hash(part) == frame_hash(data[7:])
    assert frame_hash(np.frombuffer(data, "<u4").data) == frame_hash(bytearray(data)) == frame_hash(data)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_frames_are_hashed_alike_by_any_number_of_threads_and_where_none_is_to_be_had(threads: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, 24 << 20, np.uint8)
    lengths = rng.integers(1, 1 << 20, 60)
    lengths[7] = 9 << 20  # one frame larger than a run
    frames = np.zeros(60, STAGED_FRAME)
    frames["length"] = lengths
    frames["offset"] = rng.integers(0, len(data) - lengths)
    expected = [frame_hash(data[o : o + n].data) for o, n, _ in frames.tolist()]
    assert [tuple(row) for row in hash_frames(data.data, frames, threads).tolist()] == expected
    with without_threads():
        assert [tuple(row) for row in hash_frames(data.data, frames, threads).tolist()] == expected


def test_no_frames_have_no_hashes() -> None:
    assert hash_frames(memoryview(b""), np.zeros(0, STAGED_FRAME), 4).shape == (0, 2)


@pytest.mark.parametrize(("offset", "length"), [(5, 6), (11, 0), (1 << 63, 1), ((1 << 64) - 1, 2)])
def test_a_frame_out_of_the_region_is_refused(offset: int, length: int) -> None:
    frames = np.array([(0, 3, 0), (offset, length, 0)], STAGED_FRAME)
    with pytest.raises(UsageError, match="beyond the 10 bytes"):
        hash_frames(memoryview(bytes(10)), frames, 1)
