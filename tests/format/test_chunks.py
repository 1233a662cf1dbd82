"""What a parity chunk says of itself: there and back, and what is not let in."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import DamagedData, UsageError
from ckpt.format.chunks import MADE_OF, Chunk, Source, decode, encode
from ckpt.format.parity import MEMBERS_MAX, Row
from ckpt.types import FRAME_BYTES_MAX, Epoch, Identity, Tick

IDENTITY = Identity(Epoch(7, "0123456789abcdef"), Tick(1200, 3))
STRIPE = 1 << 20


def source(member: str, *lengths: int, start: int = 0, nbytes: int | None = None) -> Source:
    frames = np.array([(i, ~i % 2**64, length) for i, length in enumerate(lengths, 1)], MADE_OF)
    return Source(member, start, sum(lengths) - start if nbytes is None else nbytes, frames)


CHUNK = Chunk(IDENTITY, Row.Q, STRIPE, bytes(range(16)), (source("host-1", 4096, 100, start=7), source("höst", 9)))


def same(one: Chunk, other: Chunk) -> bool:
    return replace(one, sources=()) == replace(other, sources=()) and all(
        (a.member, a.start, a.length, a.frames.tobytes()) == (b.member, b.start, b.length, b.frames.tobytes())
        for a, b in zip(one.sources, other.sources, strict=True)
    )


def test_a_description_comes_back_as_it_was():
    assert same(decode(encode(CHUNK)), CHUNK)
    many = replace(CHUNK, sources=tuple(source(f"n{i}", 1 + i) for i in range(MEMBERS_MAX)))
    assert same(decode(memoryview(encode(many))), many)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(CHUNK, sources=()),
        replace(CHUNK, sources=(source("a", 1), source("a", 2))),
        replace(CHUNK, sources=(source("", 1),)),
        replace(CHUNK, sources=(source("a" * 256, 1),)),
        replace(CHUNK, sources=tuple(source(f"n{i}", 1) for i in range(MEMBERS_MAX + 1))),
        replace(CHUNK, sources=(source("a"),)),
        replace(CHUNK, sources=(source("a", 5, 0, 5),)),
        replace(CHUNK, sources=(source("a", FRAME_BYTES_MAX + 1, nbytes=5),)),
        replace(CHUNK, sources=(source("a", 5, 5, start=5),)),  # the first frame is not needed
        replace(CHUNK, sources=(source("a", 5, 5, nbytes=5),)),  # nor the last one
        replace(CHUNK, sources=(source("a", 5, 5, nbytes=11),)),
        replace(CHUNK, sources=(source("a", 5, nbytes=0),)),
        replace(CHUNK, sources=(source("a", STRIPE + 1),)),
        replace(CHUNK, sources=(source("a", 5, start=-1),)),
        replace(CHUNK, length=0),
        replace(CHUNK, length=1 << 61),
        replace(CHUNK, parity_hash=bytes(15)),
    ],
)
def test_what_could_not_be_read_is_not_written(wrong):
    with pytest.raises(UsageError):
        encode(wrong)


def sealed(body: bytes) -> bytes:
    return body + xxhash.xxh3_128_digest(body)


def test_every_cut_and_every_flipped_bit_is_found():
    data = encode(CHUNK)
    for stop in range(len(data)):
        with pytest.raises(DamagedData, match=r"^here: "):
            decode(data[:stop], "here")
    for at in range(len(data)):
        with pytest.raises(DamagedData, match=r"^here: "):
            decode(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :], "here")


@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=12))
def test_a_forged_description_is_refused_or_is_one_that_could_have_been_written(at, forged):
    body = bytearray(encode(CHUNK)[:-16])
    at %= len(body)
    body[at : at + len(forged)] = forged
    try:
        found = decode(sealed(bytes(body)))
    except DamagedData:
        return
    assert encode(found) == sealed(bytes(body))


def test_hostile_numbers_cost_no_memory():
    body = bytearray(encode(replace(CHUNK, sources=(source("a", 5),)))[:-16])
    at = bytes(body).rindex(struct.pack("<QQI", 0, 5, 1))
    struct.pack_into("<I", body, at + 16, 2**32 - 1)
    with pytest.raises(DamagedData, match="4294967295 frames"):
        decode(sealed(bytes(body)))
    struct.pack_into("<I", body, at + 16, 1 << 18)
    with pytest.raises(DamagedData, match="too early"):
        decode(sealed(bytes(body)))


def test_an_identity_is_written_in_one_way_only():
    body = encode(CHUNK)[:-16]
    written = str(IDENTITY).encode()
    assert body.count(written) == 1
    with pytest.raises(DamagedData, match="no identity"):
        decode(sealed(body.replace(written, written[:25] + b"+" + written[26:])))


def test_another_version_is_named():
    body = bytearray(encode(CHUNK)[:-16])
    body[7] = 2
    with pytest.raises(DamagedData, match="version 2"):
        decode(sealed(bytes(body)))
