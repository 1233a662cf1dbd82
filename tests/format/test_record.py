"""Records and manifests: they come back equal, and one that lies about anything is refused in bounded memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import DamagedData, NewerFormat, UsageError
from ckpt.format import boxes as box_columns
from ckpt.format import columns, record
from ckpt.format.manifest import EXTENT, FRAME, PLACE, BoxRows, Manifest, Record, TensorSpec
from ckpt.types import DTYPE_CODE, FRAME_BYTES_MAX, FRAMES_MAX, Box, Epoch, Identity, Version
from tests.format import build
from tests.format.build import Tensor
from tests.memory import memory_below

IDENTITY = Identity(Epoch(7, "0123456789abcdef"), Version(1200, 3))
KEY = f"commits/{IDENTITY}-w0"


def small() -> Record:
    made, frames = build.manifest(
        [
            Tensor("a", "float32", np.arange(6, dtype=np.float32).reshape(2, 3)),
            Tensor(
                "b", "bfloat16", np.arange(40_000, dtype=np.uint16), boxes=(Box((0,), (9000,)), Box((9000,), (31000,)))
            ),
            Tensor("empty", "int64", np.zeros((3, 0), np.int64)),
            Tensor("own", "int8", np.arange(5, dtype=np.int8), owner="rank=0"),
            Tensor("own", "int8", np.arange(5, dtype=np.int8) + 1, owner="rank=1"),
            Tensor("scalar", "float64", np.array(3.5)),
        ],
        ("rank=0", "rank=1"),
        ({"lr": 0.1}, [{"r": 0}, {"r": 1}]),
    )
    return build.record(IDENTITY, made, frames, metrics={"loss": 1.5, "n": 3.0}, about={"host": "x", "ranks": [0, 1]})[
        0
    ]


def assert_equal(a: Record, b: Record) -> None:
    for field in ("frames", "extents"):
        assert getattr(a.manifest, field).tolist() == getattr(b.manifest, field).tolist()
    assert a.places.tolist() == b.places.tolist()
    assert a.places.dtype == PLACE
    assert (a.manifest.frames.dtype, a.manifest.extents.dtype) == (FRAME, EXTENT)
    blank = replace(a.manifest, frames=None, extents=None)
    assert blank == replace(b.manifest, frames=None, extents=None)
    assert replace(a, manifest=None, places=None) == replace(b, manifest=None, places=None)


def test_a_record_comes_back_equal() -> None:
    most = {str(n): float(n) for n in range(record.METRICS_MAX)}
    empty = build.record(IDENTITY, *build.manifest([]))[0]
    for done in (small(), empty, replace(small(), metrics=most), replace(small(), metrics={"best": float("-inf")})):
        assert_equal(record.decode(record.encode(done), KEY), done)


def _with(**changes: Any) -> Record:
    """`small`, but for these of its manifest."""
    done = small()
    return replace(done, manifest=replace(done.manifest, **changes))


TOO_MUCH: dict[str, Callable[[], Record]] = {
    "tensors": lambda: _with(tensors=(TensorSpec("a", "int8", ()),) * (box_columns.TENSORS_MAX + 1)),
    "dimensions": lambda: _with(tensors=(TensorSpec("a", "int8", (1,) * (box_columns.NDIM_MAX + 1)),)),
    "shapes": lambda: _with(tensors=(TensorSpec("a", "int8", (1,) * 64),) * (box_columns.NUMBERS_MAX // 64 + 1)),
    "boxes": lambda: _with(boxes=((0, Box((), ())),) * (box_columns.BOXES_MAX + 1)),
    "all boxes": lambda: _with(boxes=((0, Box((0,) * 64, (1,) * 64)),) * (box_columns.NUMBERS_MAX // 64 + 1)),
    "frames": lambda: _with(frames=np.zeros(FRAMES_MAX + 1, FRAME)),
    "extents": lambda: _with(extents=np.zeros(record.EXTENTS_MAX + 1, EXTENT)),
    "ranks": lambda: _with(coordinates=("rank=0",) * (record.RANKS_MAX + 1)),
    "packs": lambda: replace(small(), packs=(small().packs[0],) * (FRAMES_MAX + 1)),
    "metrics": lambda: replace(small(), metrics={str(n): 0.0 for n in range(record.METRICS_MAX + 1)}),
    "field `about`": lambda: replace(small(), about={"a": "b" * record.ABOUT_BYTES_MAX}),
    "must be a JSON object": lambda: replace(small(), about={"x": object()}),
    "the name": lambda: replace(small(), metrics={"a" * (columns.STRING_BYTES_MAX + 1): 0.0}),
}


@pytest.mark.parametrize("what", sorted(TOO_MUCH))
def test_what_a_reader_would_refuse_as_too_much_is_not_written(what: str) -> None:
    with pytest.raises(UsageError, match=what):
        record.encode(TOO_MUCH[what]())


@given(st.data())
def test_any_tiling_of_a_tensor_comes_back_equal(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=4)))
    boxes = [Box.whole(shape)]
    for _ in range(data.draw(st.integers(0, 6))):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        boxes += cut(box, data)
    bits = np.arange(np.prod(shape, dtype=np.int64), dtype=np.int32).reshape(shape)
    made, frames = build.manifest([Tensor("t", "int32", bits, boxes=tuple(boxes))])
    done, _ = build.record(IDENTITY, made, frames)
    assert_equal(record.decode(record.encode(done), KEY), done)
    # One box is put where another one is: the sizes still add up, but an overlap and a gap come in.
    i, j = (data.draw(st.integers(0, len(boxes) - 1)) for _ in range(2))
    wrong = list(made.boxes)
    wrong[i] = 0, Box(wrong[j][1].offset, wrong[i][1].shape)
    if is_wrong(wrong, shape):
        with pytest.raises(DamagedData):
            record.decode_manifest(record.encode_manifest(replace(made, boxes=tuple(wrong))))


def cut(box: Box, data: st.DataObject) -> list[Box]:
    axes = [axis for axis, n in enumerate(box.shape) if n > 1]
    if not axes:
        return [box]
    axis = data.draw(st.sampled_from(axes))
    at = data.draw(st.integers(1, box.shape[axis] - 1))
    low, high = list(box.shape), list(box.shape)
    low[axis], high[axis] = at, box.shape[axis] - at
    offset = list(box.offset)
    offset[axis] += at
    return [Box(box.offset, tuple(low)), Box(tuple(offset), tuple(high))]


def is_wrong(boxes: Sequence[tuple[int, Box]], shape: tuple[int, ...]) -> bool:
    if not all(box.within(shape) for _, box in boxes):
        return True
    count = np.zeros(shape, np.int64)
    for _, box in boxes:
        count[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] += 1
    return bool((count != 1).any())


# --- lies ----------------------------------------------------------------------------------------------------------

Lie = Callable[[Record], Record]


def frames(field: str, at: int, value: int) -> Lie:
    return lambda r: replace(r, manifest=replace(r.manifest, frames=changed(r.manifest.frames, field, at, value)))


def extents(field: str, at: int, value: int) -> Lie:
    return lambda r: replace(r, manifest=replace(r.manifest, extents=changed(r.manifest.extents, field, at, value)))


def places(field: str, at: int, value: int) -> Lie:
    return lambda r: replace(r, places=changed(r.places, field, at, value))


def changed(array: Any, field: str, at: int, value: int) -> Any:
    copy = array.copy()
    copy[field][at] = value
    return copy


def pack(key: str) -> Lie:
    return lambda r: replace(r, packs=((key, r.packs[0][1]),))


def tensor(at: int, **fields: Any) -> Lie:
    def lie(r: Record) -> Record:
        specs = list(r.manifest.tensors)
        specs[at] = replace(specs[at], **fields)
        return replace(r, manifest=replace(r.manifest, tensors=tuple(specs)))

    return lie


def boxes(edit: Callable[[list[tuple[int, Box]]], None]) -> Lie:
    def lie(r: Record) -> Record:
        copy = list(r.manifest.boxes)
        edit(copy)
        return replace(r, manifest=replace(r.manifest, boxes=tuple(copy)))

    return lie


def drop_extents(stop: int) -> Lie:
    return lambda r: replace(r, manifest=replace(r.manifest, extents=r.manifest.extents[:stop]))


def swap_extents(i: int, j: int) -> Lie:
    def lie(r: Record) -> Record:
        copy = r.manifest.extents.copy()
        copy[[i, j]] = copy[[j, i]]
        return replace(r, manifest=replace(r.manifest, extents=copy))

    return lie


def put(at: int, value: tuple[int, Box]) -> Callable[[list[tuple[int, Box]]], None]:
    return lambda all_boxes: all_boxes.__setitem__(at, value)


DATA = f"data/{IDENTITY}"
U32, U64 = (1 << 32) - 1, (1 << 64) - 1


def torn(how: str) -> Lie:
    """The last tensor, a blob of values, in two extents of its frame, in two boxes, or of half of its frame."""

    def lie(r: Record) -> Record:
        made = r.manifest
        last, (box, _, length, frame, _) = len(made.tensors) - 1, made.extents[-1].tolist()
        half = length // 2
        cuts = {"extents": [(0, length)], "boxes": [(0, half), (half, length - half)], "half": [(0, half)]}[how]
        ends = {
            "extents": [(box, 0, half, frame, 0), (box, half, length - half, frame, half)],
            "boxes": [(box, 0, half, frame, 0), (box + 1, 0, length - half, frame, half)],
            "half": [(box, 0, half, frame, 0)],
        }[how]
        whole = replace(made.tensors[last], shape=(sum(n for _, n in cuts),))
        pieces = [(last, Box((at,), (n,))) for at, n in cuts]
        return replace(
            r,
            manifest=replace(
                made,
                tensors=(*made.tensors[:last], whole),
                boxes=(*made.boxes[:-1], *pieces),
                extents=np.concatenate([made.extents[:-1], np.array(ends, EXTENT)]),
            ),
        )

    return lie


LIES: list[tuple[str, Lie, str]] = [
    ("a frame of an unknown dtype", frames("dtype", 0, 200), "dtype 200"),
    ("an empty frame", frames("length", 0, 0), "empty or has more"),
    ("a frame too large", frames("length", 0, FRAME_BYTES_MAX + 4), "empty or has more"),
    ("a frame that ends within an element", frames("length", 0, 23), "within an element"),
    ("a frame of another dtype than its tensor", frames("dtype", 0, DTYPE_CODE["int32"]), "another dtype"),
    ("an extent out of its frame", extents("offset", 1, U32 - 1), "out of its frame"),
    ("an extent longer than its frame", extents("length", 1, U32), "out of its frame"),
    ("an extent of length 0", extents("length", 1, 0), "empty"),
    ("an extent that begins beyond everything", extents("start", 1, U64), "begins outside its box"),
    ("an extent that leaves a gap", extents("start", 2, 1 << 20), "leave a gap"),
    ("an extent at an odd byte", extents("offset", 0, 1), "out of its frame|within an element"),
    ("an extent of a frame that is not there", extents("frame", 0, U32), "does not exist"),
    ("an extent of a box that is not there", extents("box", 0, U32), "does not exist"),
    ("a missing extent", drop_extents(-1), "do not cover"),
    ("no extents at all", drop_extents(0), "in no frame"),
    ("extents out of order", swap_extents(1, 2), "not sorted"),
    ("boxes of extents out of order", swap_extents(-1, -2), "not sorted"),
    ("an extent that ends within an element", extents("length", 0, 23), "within an element"),
    ("an extent that ends before its box", extents("length", 0, 20), "do not cover"),
    ("a place beyond its pack", places("offset", 0, 1 << 62), "out of its pack"),
    ("a place whose end wraps around", places("offset", 0, U64), "out of its pack"),
    ("a place in no pack", places("pack", 0, U32), "pack that does not exist"),
    ("an unknown codec", places("codec", 0, 77), "codec 77"),
    ("a place longer than its pack", lambda r: replace(r, packs=((r.packs[0][0], 1),)), "out of its pack"),
    ("a place of length 0", places("length", 1, 0), "does not fit its codec"),
    ("a place longer than its frame", places("length", 1, build.FRAME_BYTES + 1), "does not fit its codec"),
    ("a raw frame of another length", lambda r: places("length", 0, 20)(places("codec", 0, 0)(r)), "fit its codec"),
    ("fewer places than frames", lambda r: replace(r, places=r.places[:-1]), "places for"),
    ("a pack above the data", pack(f"{DATA}/../../etc/passwd-1.pack"), "not the key of a pack"),
    ("a pack elsewhere", pack("commits/x"), "not the key of a pack"),
    ("a pack with an absolute key", pack(f"/{DATA}/n/w-1.pack"), "not the key of a pack"),
    ("a pack with a hidden name", pack(f"{DATA}/n/.w-1.pack"), "not the key of a pack"),
    ("a pack with a dot folder", pack(f"{DATA}/../w-1.pack"), "not the key of a pack"),
    ("a pack with a line end", pack(f"{DATA}/n/w-1.pack\n"), "not the key of a pack"),
    ("a pack of other digits", pack(f"{DATA}/n/w-\N{ARABIC-INDIC DIGIT ONE}.pack"), "not the key of a pack"),
    ("a pack with a long name", pack(f"{DATA}/n/{'w' * 64}-1.pack"), "not the key of a pack"),
    ("a pack twice", lambda r: replace(r, packs=r.packs * 2), "pack appears twice"),
    ("a huge pack", lambda r: replace(r, packs=((r.packs[0][0], U64),)), "at most"),
    ("a tensor twice", tensor(1, name="a"), "not sorted"),
    ("tensors out of order", tensor(0, name="zz"), "not sorted"),
    ("a tensor of more bytes than there are", tensor(0, shape=(1 << 59, 1 << 59)), "tensor has more than"),
    ("a tensor of as many elements as bytes", tensor(0, shape=(1 << 58, 3)), "tensor has more than"),
    ("a shape whose product wraps to what is there", tensor(0, shape=(1 << 32, 1 << 32)), "tensor has more than"),
    ("a shape that no box covers", tensor(0, shape=(2, 4)), "do not cover"),
    ("a blob of values that is none", tensor(-1, name="zvalues"), "not a blob"),
    ("a rank's values without a rank", tensor(-3, owner=""), "not a blob"),
    ("values in pieces", torn("extents"), "not one box in one frame"),
    ("values of two boxes", torn("boxes"), "not one box in one frame"),
    ("values that are half of a frame", torn("half"), "not one box in one frame"),
    ("a box out of its tensor", boxes(put(0, (0, Box((1, 0), (2, 3))))), "out of its tensor"),
    ("a box at the end of the world", boxes(put(0, (0, Box(((1 << 60) - 1, 0), (2, 3))))), "out of its tensor"),
    ("a box of a tensor that is not there", boxes(put(0, (99, Box((), ())))), "boxes.tensor"),
    ("two boxes that overlap", boxes(lambda b: b.append(b[0])), "overlap"),
    ("an overlap that makes up for a gap", boxes(put(1, (1, Box((31000,), (9000,))))), "overlap"),
    ("a tensor without a box", boxes(lambda b: b.pop(0)), "overlap, or do not cover"),
    ("an empty tensor without a box", boxes(lambda b: b.pop(3)), "overlap, or do not cover"),
    ("a writer that is no name", lambda r: replace(r, writer="../x"), "not well-formed"),
]


@pytest.mark.parametrize(("lie", "says"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES])
def test_a_record_that_lies_is_refused(lie: Lie, says: str) -> None:
    with pytest.raises(DamagedData, match=f"^here: .*({says})"):
        record.decode(record.encode(lie(small())), "here")


def test_a_record_under_the_key_of_another_is_refused() -> None:
    data = record.encode(small())
    other = Identity(IDENTITY.epoch, Version(1201))
    record.decode(data, "a file that was copied somewhere")
    for key in (f"commits/{other}-w0", f"commits/{IDENTITY}-w1"):
        with pytest.raises(DamagedData, match="under another key"):
            record.decode(data, key)


def rewritten(of: Record | None = None, **sections: list[str] | bytes | np.ndarray[Any, Any]) -> bytes:
    """The bytes of a record (small()) with other sections in place of some."""
    whole = columns.ColumnReader(columns.ColumnKind.RECORD, record.encode(of or small()), "x")
    out = columns.ColumnWriter(columns.ColumnKind.RECORD)
    for name, section in whole._sections.items():
        value = sections.get(name)
        if isinstance(value, list):
            out.strings(name, value)
        elif isinstance(value, bytes):
            out.blob(name, value)
        elif value is not None:
            out.array(name, value, section.type)
        elif not name.endswith(".len") or name.removesuffix(".len") not in sections:
            out.array(name, whole.array(name, section.type), section.type)
    return out.finish()


WRONG: list[tuple[dict[str, Any], str]] = [
    *(
        ({"identity": [name, "w0"]}, "not an identity|not well-formed")
        for name in ("00000007-0123456789abcdef-000000001200.00003", "x", "", f"{IDENTITY}/..")
    ),
    *(({"about": about}, "its field `about` is not") for about in (b"[1]", b"{", b"\xff", b"[" * 60_000)),
    ({"metrics": ["loss", "loss"]}, "metric appears twice"),
    ({"tensors.ndim": np.full(9, 64)}, r"tensors\.shape"),  # takes no memory
]


@pytest.mark.parametrize(("sections", "says"), WRONG)
def test_a_record_with_a_wrong_section_is_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(DamagedData, match=says):
        record.decode(rewritten(**sections), "x")


def test_a_record_of_a_later_version_asks_for_a_newer_ckpt() -> None:
    data = bytearray(record.encode(small()))
    data[8:10] = (columns.VERSION + 1).to_bytes(2, "little")
    with pytest.raises(DamagedData) as caught:
        record.decode(bytes(data), KEY)
    assert not isinstance(caught.value, NewerFormat), "a flipped bit is damage"
    data[-columns.HASH_BYTES :] = xxhash.xxh3_128_digest(data[: -columns.HASH_BYTES])
    with pytest.raises(NewerFormat, match=rf"{KEY}: it has format version 2.*install a newer ckpt"):
        record.decode(bytes(data), KEY)


def big(tensors: int, boxes_each: int, frames_each: int, seed: int) -> Record:
    """`tensors` bf16 tensors of equal boxes, each of so many frames of 4 MiB."""
    rng = np.random.default_rng(seed)
    names = sorted(f"model.layers.{i // 16}.block{i % 16}.attention.weight" for i in range(tensors))
    shape = (frames_each * 512, 4096)
    specs = tuple(TensorSpec(name, "bfloat16", (boxes_each * shape[0], 4096)) for name in names)
    all_boxes = tuple((t, Box((k * shape[0], 0), shape)) for t in range(tensors) for k in range(boxes_each))
    count = len(all_boxes) * frames_each
    rows = np.zeros(count, FRAME)
    rows["hash_hi"], rows["hash_lo"] = rng.integers(0, 1 << 63, (2, count))
    rows["length"], rows["dtype"] = 4 << 20, DTYPE_CODE["bfloat16"]
    ext = np.zeros(count, EXTENT)
    ext["box"] = np.repeat(np.arange(len(all_boxes)), frames_each)
    ext["start"] = np.tile(np.arange(frames_each), len(all_boxes)) * (4 << 20)
    ext["length"], ext["frame"] = 4 << 20, np.arange(count)
    where = np.zeros(count, PLACE)
    where["length"] = rng.integers(2_700_000, 2_900_000, count)
    where["pack"], where["codec"] = np.arange(count) // 20, 2
    ends = np.cumsum(where["length"], dtype=np.uint64)
    where["offset"] = ends - where["length"] - np.repeat((ends - where["length"])[::20], 20)[:count]
    packs = tuple((f"{DATA}/node0/abcdef-{i}.pack", 64 << 20) for i in range(-(-count // 20)))
    return Record(IDENTITY, "w0", Manifest(specs, all_boxes, rows, ext, ("rank=0",)), packs, where)


@pytest.mark.parametrize(("tensors", "boxes_each", "frames_each"), [(20_000, 1, 13), (2_000, 64, 2)])
def test_the_largest_record_fits_and_is_checked_in_a_second(
    tensors: int, boxes_each: int, frames_each: int, seed: int
) -> None:
    done = big(tensors, boxes_each, frames_each, seed)
    assert len(done.places) <= FRAMES_MAX
    data = record.encode(done)
    assert len(data) < record.RECORD_BYTES_MAX // 2
    begin_s = time.process_time()
    back = record.decode(data, KEY)
    assert time.process_time() - begin_s < 5  # a guard against quadratic checks; it takes 0.2 to 0.5 s
    assert_equal(back, done)


@pytest.mark.parametrize(
    ("name", "dtype", "count"),
    [
        ("tensors.dtype", "|u1", (1 << 18) + 1),
        ("boxes.tensor", "<u4", (1 << 21) + 1),
        ("frames.hash_hi", "<u8", FRAMES_MAX + 1),
        ("extents.box", "<u4", (1 << 21) + 1),
        ("places.pack", "<u4", FRAMES_MAX + 1),
        ("packs.size", "<u8", FRAMES_MAX + 1),
        ("metrics.value", "<f8", 1025),
        ("coordinates.len", "<u2", (1 << 17) + 1),
        ("about", "|u1", (64 << 10) + 1),
    ],
)
def test_huge_counts_are_refused_before_memory_is_taken(name: str, dtype: str, count: int) -> None:
    data = rewritten(**{name: np.zeros(count, dtype)})
    with memory_below(1 << 20), pytest.raises(DamagedData, match="at most"):
        record.decode(data, KEY)


def test_many_boxes_of_many_dimensions_take_no_memory() -> None:
    made, frames = build.manifest([Tensor("t", "int8", np.zeros((1,) * 64, np.int8))])
    data = rewritten(build.record(IDENTITY, made, frames)[0], **{"boxes.tensor": np.zeros(1 << 20, np.uint32)})
    with memory_below(64 << 20), pytest.raises(DamagedData, match=r"'boxes\.offset' would have 67108864 elements"):
        record.decode(data, KEY)


@given(st.binary(max_size=300), st.integers(0, 4000))
def test_garbage_is_never_anything_but_damaged_data(garbage: bytes, at: int) -> None:
    """Even where the trailing hash is made right again."""
    data = bytearray(record.encode(small())[: -columns.HASH_BYTES])
    data[at : at + len(garbage)] = garbage
    sealed = bytes(data) + xxhash.xxh3_128_digest(bytes(data))
    with contextlib.suppress(DamagedData):
        record.decode(sealed, KEY)


def test_the_boxes_of_a_record_are_made_once_and_only_if_somebody_wants_them() -> None:
    made: list[int] = []

    def make() -> list[Box]:
        made.append(1)
        return [Box((0,), (2,)), Box((2,), (1,))]

    rows = BoxRows(np.array([4, 4]), make)
    manifest = replace(_with().manifest, boxes=rows)
    assert (len(rows), manifest.tensor_by_box, made) == (2, [4, 4], [])
    whole = ((4, Box((0,), (2,))), (4, Box((2,), (1,))))
    assert (rows[1], rows[-1:], tuple(rows)) == (whole[1], whole[1:], whole)
    assert rows == whole
    assert whole == rows
    assert rows != whole[:1]
    assert made == [1]
    assert replace(manifest, boxes=whole).tensor_by_box == [4, 4]
