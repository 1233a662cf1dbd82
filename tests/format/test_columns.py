"""The container: what is written comes back, and whatever is done to it is found before memory is taken."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import DamagedData, UsageError
from ckpt.format.columns import (
    HEADER,
    MAGIC,
    RAW_BYTES_MAX,
    SECTION,
    TYPES,
    VERSION,
    ColumnKind,
    ColumnReader,
    ColumnWriter,
    stored_bytes_max,
)
from tests.memory import memory_below


def sample() -> bytes:
    out = ColumnWriter(ColumnKind.LAYOUT)
    out.array("grow", np.arange(1000) * 7, "<u8", delta=True)
    out.array("small", [1, 2, 3], "<u2")
    out.array("real", np.linspace(0, 1, 500), "<f8")
    out.strings("names", ["", "model.weight", "héllo ☃", "x" * 1024])
    out.blob("data", bytes(5000))
    return out.finish()


def sealed(body: bytes) -> bytes:
    return body + xxhash.xxh3_128_digest(body)


def forged(name: str, dtype: str, coding: int, count: int, stored: bytes, stored_size: int | None = None) -> bytes:
    """A file of one section that says of itself whatever the test wants."""
    directory = np.zeros(1, SECTION)
    size = len(stored) if stored_size is None else stored_size
    directory[0] = (name.encode(), dtype.encode(), coding, count, size)
    return sealed(HEADER.pack(MAGIC, VERSION, ColumnKind.LAYOUT, 0, 1) + directory.tobytes() + stored)


def test_sections_come_back_as_they_were_written() -> None:
    source = ColumnReader(ColumnKind.LAYOUT, sample(), "x")
    assert source.array("grow", "<u8").tolist() == list(range(0, 7000, 7))
    assert source.array("small", "<u2", 3).tolist() == [1, 2, 3]
    assert source.array("real", "<f8").tolist() == np.linspace(0, 1, 500).tolist()
    assert source.strings("names", 4) == ["", "model.weight", "héllo ☃", "x" * 1024]
    assert source.blob("data", 5000) == bytes(5000)


@given(st.data())
def test_any_array_comes_back_as_it_was_written(data: st.DataObject) -> None:
    dtype = np.dtype(data.draw(st.sampled_from(TYPES)))
    raw = data.draw(st.binary(max_size=400).map(lambda b: b[: len(b) // 8 * 8]))
    values = np.frombuffer(raw, dtype)
    out = ColumnWriter(ColumnKind.SHARE)
    out.array("a", values, dtype.str, delta=data.draw(st.booleans()) and dtype.kind != "f")
    assert ColumnReader(ColumnKind.SHARE, out.finish(), "x").array("a", dtype.str).tobytes() == raw


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    data = sample()
    for at in range(0, len(data), 13):
        broken = bytearray(data)
        broken[at] ^= 1 << (at % 8)
        with pytest.raises(DamagedData, match=r"^x: "):
            ColumnReader(ColumnKind.LAYOUT, bytes(broken), "x")
        with pytest.raises(DamagedData, match=r"^x: "):
            ColumnReader(ColumnKind.LAYOUT, data[:at], "x")
    with pytest.raises(DamagedData):
        ColumnReader(ColumnKind.LAYOUT, data + b"\0", "x")


@pytest.mark.parametrize(
    ("version", "says"), [(VERSION + 1, "needs a newer ckpt"), (65535, "version 65535"), (0, "does not exist")]
)
def test_another_version_is_named(version: int, says: str) -> None:
    # Whether it is sound or not: the hash at the end only says whether it is believed (see format.md).
    with pytest.raises(DamagedData, match=says):
        ColumnReader(ColumnKind.LAYOUT, HEADER.pack(MAGIC, version, ColumnKind.LAYOUT, 0, 0) + b"whatever", "x")


def test_another_kind_is_refused() -> None:
    with pytest.raises(DamagedData, match=r"kind 4, not a record \(1\)"):
        ColumnReader(ColumnKind.RECORD, sample(), "x")


def test_a_reader_ignores_sections_that_it_does_not_know() -> None:
    out = ColumnWriter(ColumnKind.SHARE)
    out.array("from a later ckpt", [1], "<u8")
    out.array("a", [5], "<u8")
    assert ColumnReader(ColumnKind.SHARE, out.finish(), "x").array("a", "<u8").tolist() == [5]


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (forged("a", "<u8", 0, 1 << 60, b""), "when decompressed"),
        (forged("a", "<u8", 0, (1 << 64) - 1, b""), "when decompressed"),
        (forged("a", "<u8", 0, 2, bytes(8)), "holds 8 bytes for 2"),
        (forged("a", "<u8", 0, 1, bytes(8), 9), "beyond the end"),
        (forged("a", "<u8", 0, 0, bytes(8), 0), "belong to no section"),
        (forged("a", "<u8", 0, 1, bytes(8), (1 << 64) - 1), "beyond the end"),
        (forged("a", "O", 0, 1, bytes(8)), "unknown type"),
        (forged("a", "<u8", 9, 1, bytes(8)), "unknown type or coding"),
        (forged("a", "<f8", 2, 1, bytes(8)), "unknown type or coding"),
        (sealed(HEADER.pack(MAGIC, VERSION, ColumnKind.LAYOUT, 0, 1 << 31)), "directory"),
        (sealed(HEADER.pack(MAGIC, VERSION, ColumnKind.LAYOUT, 0, 2) + bytes(100)), "directory"),
        (sealed(HEADER.pack(MAGIC, VERSION, ColumnKind.LAYOUT, 0, 129) + bytes(129 * SECTION.itemsize)), "directory"),
        (sealed(HEADER.pack(MAGIC, VERSION, ColumnKind.LAYOUT, 1, 0)), "kind"),
        (b"PK\x03\x04" + bytes(100), "not a file of ckpt"),
        (b"", "not a file of ckpt"),
    ],
)
def test_a_forged_directory_is_refused(file: bytes, says: str) -> None:
    with pytest.raises(DamagedData, match=says):
        ColumnReader(ColumnKind.LAYOUT, file, "x")


def test_a_section_twice_is_refused() -> None:
    directory = np.zeros(2, SECTION)
    directory["name"], directory["type"], directory["count"], directory["stored"] = b"a", b"|u1", 1, 1
    with pytest.raises(DamagedData, match="appears twice"):
        ColumnReader(ColumnKind.LAYOUT, sealed(HEADER.pack(MAGIC, VERSION, 4, 0, 2) + directory.tobytes() + b"ab"), "x")


@pytest.mark.parametrize(
    ("stored", "count"),
    [
        (zstandard.compress(bytes(1 << 27)), 100),  # a bomb: says 128 MiB in its own header
        (zstandard.compress(bytes(100)), 1 << 24),  # declared larger than it is
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(800)), 100),
        (b"\x28\xb5\x2f\xfd" + bytes(20), 100),
        (zstandard.compress(bytes(800))[:-1], 100),
        (zstandard.compress(bytes(800)) + b"more", 100),
        # A well-formed frame of 800 zeros, one run, that says it needs a window of 1 GiB.
        (b"\x28\xb5\x2f\xfd\x80\xa0" + (800).to_bytes(4, "little") + (800 << 3 | 3).to_bytes(3, "little") + b"\0", 100),
        (b"", 100),
    ],
)
def test_a_hostile_zstd_section_takes_no_memory(stored: bytes, count: int) -> None:
    source = ColumnReader(ColumnKind.LAYOUT, forged("a", "<u8", 1, count, stored), "x")
    with memory_below(1 << 20), pytest.raises(DamagedData, match="section 'a'"):
        source.array("a", "<u8")


def test_a_file_above_its_cap_is_neither_written_nor_read() -> None:
    cap = stored_bytes_max(ColumnKind.RECORD)
    out = ColumnWriter(ColumnKind.RECORD)
    out.array("noise", np.random.default_rng(0).integers(0, 256, cap, np.uint8), "|u1")
    with pytest.raises(UsageError, match="at most 16777216"):
        out.finish()
    with pytest.raises(DamagedData, match="at most"):
        ColumnReader(ColumnKind.RECORD, bytes(cap + 1), "x")
    out = ColumnWriter(ColumnKind.RECORD)
    out.array("zeros", np.zeros(RAW_BYTES_MAX + 1, np.uint8), "|u1")
    with pytest.raises(UsageError, match="at most 16777216"):
        out.finish()


def test_a_wrong_type_a_wrong_count_and_a_missing_section_are_named() -> None:
    source = ColumnReader(ColumnKind.LAYOUT, sample(), "x")
    with pytest.raises(DamagedData, match="is of type <u8, not <u4"):
        source.array("grow", "<u4")
    with pytest.raises(DamagedData, match="has 1000 elements instead of 3"):
        source.array("grow", "<u8", 3)
    with pytest.raises(DamagedData, match="'other' is missing"):
        source.array("other", "<u8")
    with pytest.raises(DamagedData, match="at most 6000"):
        source.ints("grow", "<u8", top=6000)
    with pytest.raises(DamagedData, match="at most 4999"):
        source.blob("data", 4999)


@pytest.mark.parametrize("name", ["a\0b", "x" * 1025, "\ud800"])
def test_a_name_that_does_not_fit_is_refused_when_written(name: str) -> None:
    with pytest.raises(UsageError, match="rename it"):
        ColumnWriter(ColumnKind.LAYOUT).strings("names", ["ok", name])


@pytest.mark.parametrize(
    ("data", "lengths"), [(b"a\0b", [3]), (b"\xff\xfe", [2]), (b"abc", [2]), (b"a" * 2000, [2000])]
)
def test_a_name_that_does_not_fit_is_refused_when_read(data: bytes, lengths: list[int]) -> None:
    out = ColumnWriter(ColumnKind.LAYOUT)
    out.blob("names", data)
    out.array("names.len", lengths, "<u2")
    with pytest.raises(DamagedData, match="names"):
        ColumnReader(ColumnKind.LAYOUT, out.finish(), "x").strings("names", len(lengths))
