"""Codecs: every dtype comes back bit for bit, whatever the numbers; hostile frames take no memory."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import DamagedData, UsageError
from ckpt.format import codecs
from ckpt.format.codecs import CodecScratch
from ckpt.format.manifest import Codec
from ckpt.types import DTYPE_CODE, DTYPES, ITEMSIZE, CodecOption
from tests.memory import memory_below

OPTIONS: tuple[CodecOption, ...] = ("auto", "raw", "zstd", "planes")
BF16, F32, F64, I64, U8 = (DTYPE_CODE[name] for name in ("bfloat16", "float32", "float64", "int64", "uint8"))


def weights(dtype: str, count: int, seed: int) -> bytes:
    """Normal numbers, as trained weights are; random bits for dtypes that are no floats of NumPy."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal(count * ITEMSIZE[dtype] // 4 + 2).astype(np.float32) * np.float32(0.02)
    if dtype == "bfloat16":
        return (rng.standard_normal(count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    if dtype == "float64":
        return rng.standard_normal(count).tobytes()
    return numbers.tobytes()[: count * ITEMSIZE[dtype]]


def there_and_back(option: CodecOption, code: int, raw: bytes, scratch: CodecScratch) -> tuple[int, bytes]:
    codec, stored = codecs.encode(option, code, raw, scratch)
    stored = bytes(stored)
    assert len(stored) <= len(raw)
    assert codec != Codec.RAW or stored == raw
    out = bytearray(b"\xaa" * len(raw))
    codecs.decode(codec, code, stored, memoryview(out), scratch)
    assert out == raw
    return codec, stored


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(dtype: str, option: CodecOption, seed: int) -> None:
    scratch = CodecScratch()
    for count in (0, 1, 7, 1000, 70_001, codecs.BLOCK_ELEMENTS * 2 + 1):
        there_and_back(option, DTYPE_CODE[dtype], weights(dtype, count, seed), scratch)


@given(st.sampled_from(DTYPES), st.sampled_from(OPTIONS), st.binary(max_size=300), st.integers(1, 40))
def test_any_bytes_come_back_bit_for_bit(dtype: str, option: CodecOption, data: bytes, times: int) -> None:
    there_and_back(option, DTYPE_CODE[dtype], data * times, SCRATCH)


SCRATCH = CodecScratch()


@pytest.mark.parametrize("fill", [b"\0", b"\xff", b"\x3f\x80", bytes(range(256))])
@pytest.mark.parametrize("code", [BF16, F32, F64])
def test_constant_numbers_shrink_to_almost_nothing(code: int, fill: bytes) -> None:
    raw = fill * ((1 << 20) // len(fill))
    codec, stored = there_and_back("auto", code, raw, SCRATCH)
    assert codec == Codec.PLANES
    assert len(stored) < len(raw) // 50


def test_noise_is_stored_raw_and_not_copied(seed: int) -> None:
    noise = np.random.default_rng(seed).integers(0, 256, 1 << 20, np.uint8).tobytes()
    for code in (BF16, F32, F64, I64, U8):
        for option in OPTIONS:
            codec, stored = codecs.encode(option, code, noise, SCRATCH)
            assert codec == Codec.RAW
            assert stored is noise


def test_a_plane_that_looks_dense_in_its_head_alone_is_still_coded(seed: int) -> None:
    """The sample has a stride: a frame of several tensors is judged by all of it."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, 1 << 16, np.uint8).tobytes() + bytes(15 << 16)
    assert len(there_and_back("auto", BF16, raw, SCRATCH)[1]) < len(raw) // 8


def test_an_unknown_option_is_answered_with_those_there_are() -> None:
    with pytest.raises(UsageError, match='codec=\'lz4\' is not known; give "auto", "raw", "zstd" or "planes"'):
        codecs.choose(F32, "lz4")  # type: ignore[arg-type]


def test_trained_weights_shrink_as_promised(seed: int) -> None:
    raw = weights("bfloat16", 1 << 21, seed)
    assert len(raw) / len(there_and_back("auto", BF16, raw, SCRATCH)[1]) > 1.48


def test_the_memory_that_a_frame_takes_is_kept_for_the_next(seed: int) -> None:
    raw = weights("bfloat16", 1 << 21, seed)
    scratch = CodecScratch()
    out = memoryview(bytearray(len(raw)))
    for _ in range(2):
        codec, stored = codecs.encode("auto", BF16, raw, scratch)
        codecs.decode(codec, BF16, bytes(stored), out, scratch)
    tracemalloc.start()
    codec, stored = codecs.encode("auto", BF16, raw, scratch)
    copy = bytes(stored)
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    codecs.encode("auto", BF16, raw, scratch)
    codecs.decode(codec, BF16, copy, out, scratch)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert peak < 1 << 19


# --- hostile frames ------------------------------------------------------------------------------------------------


def planes(*head: tuple[int, int, int], body: bytes = b"", count: int | None = None) -> bytes:
    start = struct.pack("<B", len(head) if count is None else count)
    start += b"".join(struct.pack("<BBI", *plane) for plane in head)
    return start + bytes(-len(start) % 8) + body


BOMB = zstandard.compress(bytes(1 << 26))
OF_1000 = zstandard.compress(bytes(1000))
OF_500 = zstandard.compress(bytes(500))
UNSAID = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
WIDE = zstandard.ZstdCompressor(
    compression_params=zstandard.ZstdCompressionParameters(window_log=30, write_content_size=False)
).compress(bytes(1000))

HOSTILE = [
    ("raw of another length", Codec.RAW, bytes(999)),
    ("an unknown codec", 9, bytes(10)),
    ("no zstd", Codec.ZSTD, bytes(100)),
    ("nothing as zstd", Codec.ZSTD, b""),
    ("a zstd bomb", Codec.ZSTD, BOMB),
    ("zstd of another length", Codec.ZSTD, zstandard.compress(bytes(1001))),
    ("zstd that does not say its length", Codec.ZSTD, UNSAID),
    ("zstd with a huge window", Codec.ZSTD, WIDE),
    ("zstd cut off", Codec.ZSTD, zstandard.compress(bytes(range(250)) * 4)[:-9]),
    ("no planes", Codec.PLANES, b""),
    ("no planes in a head", Codec.PLANES, planes()),
    ("more planes than bytes", Codec.PLANES, planes(count=200)),
    ("a head cut off", Codec.PLANES, planes((1, 0, 500), (1, 0, 500))[:9]),
    ("planes of no width", Codec.PLANES, planes((0, 0, 0), (1, 0, 1000), body=bytes(1000))),
    ("planes of width 3", Codec.PLANES, planes((3, 0, 750), (1, 0, 250), body=bytes(1000))),
    ("planes of numbers of 5 bytes", Codec.PLANES, planes((4, 0, 800), (1, 0, 200), body=bytes(1000))),
    ("planes of numbers of 16 bytes", Codec.PLANES, planes((4, 0, 500), (2, 0, 300), (2, 0, 200), (8, 0, 0))),
    ("a raw plane too short", Codec.PLANES, planes((1, 0, 499), (1, 0, 500), body=bytes(999))),
    ("planes of another length", Codec.PLANES, planes((1, 0, 500), (1, 0, 500), body=bytes(1001))),
    ("a plane beyond the end", Codec.PLANES, planes((1, 0, 500), (1, 1, (1 << 32) - 1), body=bytes(600))),
    ("a plane of an unknown coding", Codec.PLANES, planes((1, 0, 500), (1, 7, len(OF_500)), body=bytes(500) + OF_500)),
    ("a plane that is a bomb", Codec.PLANES, planes((1, 0, 500), (1, 1, len(BOMB)), body=bytes(500) + BOMB)),
    (
        "a plane as long as the frame",
        Codec.PLANES,
        planes((1, 0, 500), (1, 1, len(OF_1000)), body=bytes(500) + OF_1000),
    ),
]


@pytest.mark.parametrize(("codec", "data"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_a_hostile_frame_is_refused_and_takes_no_memory(codec: int, data: bytes) -> None:
    out = memoryview(bytearray(1000))
    scratch = CodecScratch()
    with memory_below(1 << 19), pytest.raises(DamagedData):
        codecs.decode(codec, BF16, data, out, scratch)


def test_planes_that_do_not_divide_the_frame_are_refused() -> None:
    data = planes((1, 0, 500), (1, 0, 500), body=bytes(1000))
    with pytest.raises(DamagedData, match="do not make a frame of 1001 bytes"):
        codecs.decode(Codec.PLANES, BF16, data, memoryview(bytearray(1001)), SCRATCH)


@given(st.binary(max_size=40), st.integers(0, 3000), st.sampled_from([Codec.ZSTD, Codec.PLANES]))
def test_garbage_gives_other_bytes_or_damaged_data(garbage: bytes, at: int, codec: int) -> None:
    option: CodecOption = "zstd" if codec == Codec.ZSTD else "planes"
    raw = np.arange(2000, dtype=np.uint16).tobytes()
    made, stored = codecs.encode(option, BF16, raw, SCRATCH)
    data = bytearray(stored)
    data[at : at + len(garbage)] = garbage
    out = memoryview(bytearray(len(raw)))
    try:
        codecs.decode(made, BF16, bytes(data), out, SCRATCH)
    except DamagedData:
        return
    # The scratch is whole after a failure: the next frame is right.
    there_and_back(option, BF16, raw, SCRATCH)


def test_the_benchmark_runs(tmp_path: Path) -> None:
    words = ["-m", "benchmarks.codecs", "--small", "--json", tmp_path / "x.json"]
    subprocess.run([sys.executable, *words], check=True, capture_output=True, cwd=Path(__file__).parents[2])
    rows = {row["question"]: row for row in json.loads((tmp_path / "x.json").read_text())["rows"]}
    assert rows["bf16 weights, planes: ratio"]["met"] is not None
    assert rows["exp_avg_sq, zstd 3: decode"]["figure"] > 0
    assert all(row["figure"] > 0 for row in rows.values())
