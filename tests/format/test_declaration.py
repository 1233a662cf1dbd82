"""Declarations, layouts and shares: they come back equal, and one that lies is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import DamagedData
from ckpt.format import columns, declaration
from ckpt.layout.layout import SEGMENT, STAGED_FRAME, Declaration, Entry, Layout, Part, Staging
from ckpt.types import DTYPE_CODE, DTYPES, Box

F32, I64 = DTYPE_CODE["float32"], DTYPE_CODE["int64"]


def sample() -> Declaration:
    layout = Layout(
        (
            Entry("a", "float32", (4, 6), (Box((0, 0), (2, 6)), Box((3, 0), (1, 6)))),
            Entry("b", "float32", (), (Box((), ()),)),
            Entry("b", "float32", (), (Box((), ()),), owner="rank=1"),
            Entry("c", "int64", (0, 3), (Box((0, 0), (0, 3)),)),
            Entry("d", "int64", (100,), ()),
            Entry("e", "int64", (5,), (Box((1,), (2,)),)),
        )
    )
    segments = [
        (0, 0, 16, 32, 0, 0),
        (0, 1, 0, 24, 64, 1),
        (1, 0, 0, 4, 88, 1),
        (2, 0, 0, 4, 92, 1),
        (5, 0, 0, 16, 128, 2),
    ]
    frames = [(0, 32, F32), (64, 32, F32), (128, 16, I64)]
    staging = Staging(np.array(segments, SEGMENT), np.array(frames, STAGED_FRAME), 144)
    return Declaration(1, 4, "rank=1", "00112233aabbccdd", layout, staging)


def assert_equal(a: Declaration, b: Declaration) -> None:
    assert (a.staging.segments.dtype, a.staging.frames.dtype) == (b.staging.segments.dtype, b.staging.frames.dtype)
    assert a.staging.segments.tolist() == b.staging.segments.tolist()
    assert a.staging.frames.tolist() == b.staging.frames.tolist()
    assert a.staging.data_bytes == b.staging.data_bytes
    assert replace(a, staging=None) == replace(b, staging=None)


EMPTY = Declaration(0, 1, "rank=0", "0" * 16, Layout(()), Staging(np.zeros(0, SEGMENT), np.zeros(0, STAGED_FRAME), 0))


@pytest.mark.parametrize("made", [sample(), EMPTY], ids=["sample", "empty"])
def test_a_declaration_comes_back_equal(made: Declaration) -> None:
    assert_equal(declaration.decode(declaration.encode(made)), made)


@pytest.mark.parametrize("count", [0, 1, 3000])
def test_the_size_of_a_declaration_is_bounded_before_it_is_encoded(count: int) -> None:
    """Of noise, which does not compress."""
    rng = np.random.default_rng(count)
    noise = Staging(
        np.frombuffer(rng.bytes(count * SEGMENT.itemsize), SEGMENT),
        np.frombuffer(rng.bytes(count * STAGED_FRAME.itemsize), STAGED_FRAME),
        1 << 50,
    )
    for coordinate in ("rank=1", "dp=1," * 200):
        each = replace(sample(), staging=noise, coordinate=coordinate)
        bound = declaration.bytes_max(len(declaration.encode_layout(each.layout)), coordinate, noise)
        assert len(declaration.encode(each)) <= bound


@given(st.data())
def test_any_layout_comes_back_equal(data: st.DataObject) -> None:
    def box(shape: tuple[int, ...]) -> Box:
        offset = tuple(data.draw(st.integers(0, n)) for n in shape)
        return Box(offset, tuple(data.draw(st.integers(0, n - o)) for o, n in zip(offset, shape, strict=True)))

    keys = data.draw(
        st.lists(
            st.tuples(
                st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=9),
                st.sampled_from(["", "rank=0"]),
            ),
            unique=True,
            max_size=6,
        )
    )
    entries = []
    for name, owner in sorted(keys):
        shape = tuple(data.draw(st.lists(st.integers(0, 1 << 18), max_size=3)))
        boxes = tuple(box(shape) for _ in range(data.draw(st.integers(0, 3))))
        entries.append(Entry(name, data.draw(st.sampled_from(DTYPES)), shape, boxes, owner))
    layout = Layout(tuple(entries))
    assert declaration.decode_layout(declaration.encode_layout(layout)) == layout


@pytest.mark.parametrize("share", [(), (Part(0, 0, 0, 10), Part(0, 1, 5, 5), Part(7, 0, 1 << 40, 1 << 41))])
def test_a_share_comes_back_equal(share: tuple[Part, ...]) -> None:
    assert declaration.decode_share(declaration.encode_share(share)) == share


@pytest.mark.parametrize("part", [Part(0, 0, 10, 9), Part(0, 0, 0, (1 << 60) + 1)])
def test_a_part_that_ends_before_it_begins_or_beyond_any_box_is_refused(part: Part) -> None:
    with pytest.raises(DamagedData, match="ends before it begins, or beyond any box"):
        declaration.decode_share(declaration.encode_share((part,)))


Lie = Callable[[Declaration], Declaration]


def staged(array: str, field: str, at: int, value: int) -> Lie:
    def lie(d: Declaration) -> Declaration:
        copy: Any = getattr(d.staging, array).copy()
        copy[field][at] = value
        return replace(d, staging=replace(d.staging, **{array: copy}))

    return lie


def wide(d: Declaration) -> Declaration:
    return replace(d, staging=replace(d.staging, data_bytes=1 << 40))


def entry(at: int, **fields: Any) -> Lie:
    def lie(d: Declaration) -> Declaration:
        entries = list(d.layout.entries)
        entries[at] = replace(entries[at], **fields)
        return replace(d, layout=Layout(tuple(entries)))

    return lie


U32, U64 = (1 << 32) - 1, (1 << 64) - 1

LIES: list[tuple[str, Lie, str]] = [
    ("a rank beyond the world", lambda d: replace(d, rank=4), "rank 4 is not a rank"),
    ("a world of millions", lambda d: replace(d, world=1 << 30), "rank 1 is not a rank"),
    ("a data region beyond any memory", lambda d: replace(d, staging=replace(d.staging, data_bytes=U64)), "at most"),
    ("a frame out of the region", staged("frames", "length", 2, 24), "out of the data region"),
    ("a frame whose end wraps around", staged("frames", "offset", 0, U64 - 8), "out of the data region"),
    ("a frame too large", lambda d: wide(staged("frames", "length", 2, (1 << 30) + 8)(d)), "has more than"),
    ("an empty frame", staged("frames", "length", 0, 0), "is empty"),
    ("a frame of an unknown dtype", staged("frames", "dtype", 0, 99), "dtype 99"),
    ("a frame of another dtype", staged("frames", "dtype", 0, I64), "another dtype"),
    ("a segment of an entry that is not there", staged("segments", "entry", 4, 6), "does not exist"),
    ("a segment of a box that is not there", staged("segments", "box", 1, 2), "does not exist"),
    ("a segment of an entry without boxes", staged("segments", "entry", 4, 4), "does not exist"),
    ("a segment in a frame that is not there", staged("segments", "frame", 0, 3), "does not exist"),
    ("a segment out of its box", staged("segments", "start", 0, 24), "out of its box"),
    ("a segment whose end wraps around", staged("segments", "start", 0, U64), "out of its box"),
    ("a segment before its frame", staged("segments", "offset", 1, 60), "out of its frame"),
    ("a segment behind its frame", staged("segments", "offset", 1, 76), "out of its frame"),
    ("a segment that begins within an element", staged("segments", "start", 0, 14), "within an element"),
    ("a box out of its tensor", entry(5, boxes=(Box((4,), (2,)),)), "out of its tensor"),
    ("entries out of order", entry(0, name="x"), "not sorted"),
    ("an entry twice", entry(2, owner=""), "not sorted"),
    ("a shape that wraps around", entry(0, shape=(1 << 33, 1 << 33)), "a tensor has more than"),
]


@pytest.mark.parametrize(("lie", "says"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES])
def test_a_declaration_that_lies_is_refused(lie: Lie, says: str) -> None:
    with pytest.raises(DamagedData, match=f"^slot 3: .*({says})"):
        declaration.decode(declaration.encode(lie(sample())), "slot 3")


def test_boxes_out_of_the_order_of_their_entries_are_refused() -> None:
    whole = columns.ColumnReader(columns.ColumnKind.LAYOUT, declaration.encode_layout(sample().layout), "x")
    out = columns.ColumnWriter(columns.ColumnKind.LAYOUT)
    for name, section in whole._sections.items():
        values = whole.array(name, section.type)
        out.array(name, [0, 0, 2, 1, 3, 5] if name == "boxes.tensor" else values, section.type)
    with pytest.raises(DamagedData, match="order of their entries"):
        declaration.decode_layout(out.finish())


@given(st.binary(max_size=200), st.integers(0, 2000))
def test_garbage_is_never_anything_but_damaged_data(garbage: bytes, at: int) -> None:
    """Even where the trailing hash is made right again."""
    data = bytearray(declaration.encode(sample())[: -columns.HASH_BYTES])
    data[at : at + len(garbage)] = garbage
    with contextlib.suppress(DamagedData):
        declaration.decode(bytes(data) + xxhash.xxh3_128_digest(bytes(data)))
