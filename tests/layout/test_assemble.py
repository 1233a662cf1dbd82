"""From what the ranks staged to a manifest."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import CkptError, DamagedData, UsageError
from ckpt.format.manifest import RANK_VALUES, VALUES, TensorSpec
from ckpt.format.record import decode_manifest, encode_manifest
from ckpt.layout.assemble import OWN, SHARED, Blob, Incomplete, assemble
from ckpt.layout.division import find_agreed
from ckpt.layout.layout import SEGMENT, STAGED_FRAME, Part, Staging
from ckpt.layout.reshard import Want
from ckpt.types import FRAME_BYTES_MAX, FRAMES_MAX, Box
from tests.layout.jobs import Rank, Snapshot, blob, fetch, random_array, random_ranks, random_state, region, take

RNG = random.Random(7)


def ranks_of(world: int, *names: str, size: int = 40, dtype: str = "uint8") -> list[Rank]:
    """Ranks with equal replicas."""
    arrays = {name: random_array(RNG, dtype, (size,)) for name in names}
    held = {(name, ""): (dtype, (size,), [(Box.whole((size,)), array)]) for name, array in arrays.items()}
    return [Rank(f"rank={r}", {key: (d, s, list(b)) for key, (d, s, b) in held.items()}) for r in range(world)]


def sharded(name: str, shape: tuple[int, ...], *boxes_by_rank: list[Box]) -> list[Rank]:
    array = random_array(RNG, "uint8", shape)
    held = [[(box, array[region(box)]) for box in boxes] for boxes in boxes_by_rank]
    return [Rank(f"rank={r}", {(name, ""): ("uint8", shape, boxes)}) for r, boxes in enumerate(held)]


def data_specs(assembled) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(s.name, s.owner, s.shape) for s in assembled.manifest.tensors if not s.values]


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 6), st.booleans())
def test_every_manifest_passes_the_checks_of_the_durable_format(seed, world, divided):
    rng = random.Random(seed)
    ranks = random_ranks(rng, random_state(rng, 10), world)
    agreed, _ = find_agreed([rank.layout() for rank in ranks], [rank.hashes() for rank in ranks])
    snapshot = take(ranks, agreed if divided else None)
    manifest = assemble(snapshot.staged, snapshot.read).manifest
    back = decode_manifest(encode_manifest(manifest))
    assert (back.tensors, back.boxes, back.coordinates) == (manifest.tensors, manifest.boxes, manifest.coordinates)
    assert (back.frames == manifest.frames).all()
    assert (back.extents == manifest.extents).all()


def test_of_equal_replicas_the_lowest_ranks_frames_are_taken_in_any_order_of_arrival():
    snapshot = take(ranks_of(3, "a", "b"))
    assembled = assemble(snapshot.staged)
    assert set(assembled.sources["rank"][assembled.sources["region"] == 0].tolist()) == {0}
    again = assemble(snapshot.staged[::-1])
    assert (again.sources == assembled.sources).all()
    assert again.manifest.tensors == assembled.manifest.tensors
    assert assembled.differing_tensors == ()


def test_only_the_tensor_that_differs_is_stored_per_rank_though_others_share_its_frame():
    ranks = ranks_of(2, "a", "b", "c")
    ranks[1].held["b", ""] = ("uint8", (40,), [(Box((0,), (40,)), random_array(RNG, "uint8", (40,)))])
    snapshot = take(ranks)
    assert len(snapshot.staged[0].hashes) == 1, "all three lie in one frame"
    assembled = assemble(snapshot.staged, snapshot.read)
    assert assembled.differing_tensors == ("b",)
    assert data_specs(assembled) == [
        ("a", "", (40,)), ("b", "rank=0", (40,)), ("b", "rank=1", (40,)), ("c", "", (40,))
    ]  # fmt: skip
    without = assemble(snapshot.staged)
    assert without.differing_tensors == ("a", "b", "c"), "without the bytes, nothing in that frame is proven equal"


def test_equal_replicas_count_as_equal_though_their_ranks_pack_them_otherwise():
    """Rank 1 has a tensor more, so that its frames hold other things; large boxes in other parts too."""
    ranks = ranks_of(2, "b", "c", "large", size=60)
    large = random_array(RNG, "uint8", (1000,))
    for rank in ranks:
        rank.held["large", ""] = ("uint8", (1000,), [(Box((0,), (1000,)), large)])
    ranks[1].held["a", ""] = ("uint8", (7,), [(Box((0,), (7,)), random_array(RNG, "uint8", (7,)))])
    snapshot = take(ranks)
    assert assemble(snapshot.staged, snapshot.read).differing_tensors == ()
    other = take(ranks, frame_bytes=512)
    mixed = Snapshot(
        ranks, [snapshot.staged[0], replace_division(other.staged[1], snapshot)], [snapshot.data[0], other.data[1]]
    )
    assert assemble(mixed.staged, mixed.read).differing_tensors == ()
    mixed.data[1][-1] ^= 1  # of the last packed tensor, "c"
    assert assemble(mixed.staged, mixed.read).differing_tensors == ("c",)


def test_equal_frames_prove_nothing_of_tensors_that_lie_elsewhere_in_them():
    """Rank 0 has a, b and rank 1 has b, c: both frames hold the bytes x, y, and b is y here and x there."""
    x, y = (random_array(RNG, "uint8", (10,)) for _ in range(2))
    box = Box((0,), (10,))
    ranks = [Rank(f"rank={r}") for r in range(2)]
    for rank, names in zip(ranks, ("ab", "bc"), strict=True):
        for name, array in zip(names, (x, y), strict=True):
            rank.held[name, ""] = ("uint8", (10,), [(box, array)])
    snapshot = take(ranks)
    assert (snapshot.staged[0].hashes == snapshot.staged[1].hashes).all()
    assert assemble(snapshot.staged, snapshot.read).differing_tensors == ("b",)


@pytest.mark.parametrize("half", [0, 1])
def test_both_halves_of_a_hash_count(half):
    first, second = take(ranks_of(2, "a")).staged
    hashes = second.hashes.copy()
    hashes[:, half] ^= np.uint64(1)
    assert assemble([first, replace(second, hashes=hashes)]).differing_tensors == ("a",)


def test_a_box_may_be_staged_in_parts_by_any_ranks_in_any_order():
    ranks = ranks_of(3, "a", size=1000)
    parts = [(512, 1000), (0, 256), (256, 512)]
    snapshot = take(ranks, shares=[(Part(0, 0, start, stop),) for start, stop in parts])
    assembled = assemble(snapshot.staged)
    (out,) = fetch(snapshot, assembled, [Want("a", "", "uint8", (1000,), Box((0,), (1000,)))])
    assert (out == ranks[0].held["a", ""][2][0][1]).all()


def test_boxes_come_in_order_of_their_offsets_whichever_rank_holds_them():
    boxes = [Box((0, 2), (4, 1)), Box((4, 0), (2, 3)), Box((0, 0), (4, 2))]
    manifest = assemble(take(sharded("t", (6, 3), *([box] for box in boxes))).staged).manifest
    assert [box for _, box in manifest.boxes[:3]] == sorted(boxes)


def test_more_frames_than_a_checkpoint_may_have_are_refused():
    count = FRAMES_MAX + 1
    staged = take(ranks_of(1, "a", size=count)).staged[0]
    at = np.arange(count)
    frames, segments = np.zeros(count, STAGED_FRAME), np.zeros(count, SEGMENT)
    frames["offset"], frames["length"] = at, 1
    segments["start"], segments["length"], segments["offset"], segments["frame"] = at, 1, at, at
    broken = changed(staged, staging=Staging(segments, frames, count))
    with pytest.raises(CkptError, match="at most 262144 are allowed"):
        assemble([replace(broken, hashes=np.zeros((count, 2), np.uint64))])


def replace_division(staged, snapshot):
    division = snapshot.staged[0].declaration.division
    return replace(staged, declaration=replace(staged.declaration, division=division))


def test_a_tensor_of_other_dtype_or_shape_on_one_rank_is_stored_per_rank():
    ranks = ranks_of(3, "a", "b")
    ranks[1].held["a", ""] = ("int8", (40,), ranks[1].held["a", ""][2])
    ranks[2].held["b", ""] = ("uint8", (4, 10), [(Box.whole((4, 10)), random_array(RNG, "uint8", (4, 10)))])
    snapshot = take(ranks)
    assembled = assemble(snapshot.staged, snapshot.read)
    assert assembled.differing_tensors == ("a", "b")
    assert data_specs(assembled) == [
        (name, f"rank={r}", (4, 10) if (name, r) == ("b", 2) else (40,)) for name in "ab" for r in range(3)
    ]
    dtypes = [spec.dtype for spec in assembled.manifest.tensors if spec.name == "a"]
    assert dtypes == ["uint8", "int8", "uint8"]


def test_boxes_that_overlap_in_part_are_stored_per_rank_whole():
    """Nothing proves that the common part is equal: neither box may stand for the other."""
    ranks = sharded("t", (6, 2), [Box((0, 0), (4, 2))], [Box((2, 0), (4, 2))])
    snapshot = take(ranks)
    assembled = assemble(snapshot.staged, snapshot.read)
    assert assembled.differing_tensors == ("t",)
    assert data_specs(assembled) == [("t", "rank=0@0,0", (4, 2)), ("t", "rank=1@2,0", (4, 2))]
    for rank, (box, array) in ((r, ranks[r].held["t", ""][2][0]) for r in range(2)):
        (out,) = fetch(snapshot, assembled, [Want("t", f"rank={rank}", "uint8", (6, 2), box)])
        assert (out == array).all()


@pytest.mark.parametrize(
    ("staged", "message", "missing"),
    [
        (list, "no rank", ()),
        (lambda: take(ranks_of(4, "a")).staged[1:3], "staged nothing", ("rank 0", "rank 3")),
        (lambda: take(sharded("t", (6, 2), [Box((0, 0), (3, 2))], [Box((3, 0), (3, 1))])).staged, "are staged", ("t",)),
        (lambda: take(sharded("t", (6,), [], [])).staged, "are staged", ("t",)),
        (
            lambda: take(ranks_of(1, *(f"t{i}" for i in range(10, 40))), shares=[()]).staged,
            "and 10 more",
            tuple(f"t{i}" for i in range(10, 30)),
        ),
    ],
)
def test_what_is_not_staged_is_named(staged, message, missing):
    with pytest.raises(Incomplete, match=message) as caught:
        assemble(staged())
    assert caught.value.missing == missing


def test_an_empty_tensor_needs_no_bytes():
    assembled = assemble(take(sharded("t", (0, 6), [], [])).staged)
    assert data_specs(assembled) == [("t", "", (0, 6))]
    assert (0, Box((0, 0), (0, 6))) in assembled.manifest.boxes


def changed(staged, **fields):
    return replace(staged, declaration=replace(staged.declaration, **fields))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"division": "0123456789abcdef"}, CkptError, "rank 1 staged under division 0123456789abcdef, rank 0 under"),
        ({"world": 3}, CkptError, "rank 1 of 3 does not fit rank 0 of 2"),
        ({"rank": 7}, CkptError, "rank 7 of 2"),
        ({"rank": 0}, CkptError, "rank 0 staged two snapshots"),
        ({"coordinate": "rank=0"}, UsageError, "ranks 0 and 1 both have the coordinate 'rank=0'; give mesh="),
    ],
)
def test_ranks_that_do_not_belong_together_are_refused(fields, error, message):
    first, second = take(ranks_of(2, "a")).staged
    with pytest.raises(error, match=message):
        assemble([first, changed(second, **fields)])


def out_of_the_tensor():
    ranks = sharded("t", (6,), [Box((2,), (4,))])
    ranks[0].held["t", ""][2][0] = (Box((3,), (4,)), random_array(RNG, "uint8", (4,)))
    return take(ranks).staged


def of_another_rank():
    ranks = ranks_of(2, "a")
    ranks[0].held["mine", "rank=1"] = ranks[0].held["a", ""]
    return take(ranks).staged


@pytest.mark.parametrize(
    ("staged", "error", "message"),
    [
        (out_of_the_tensor, DamagedData, r"rank=0 declares .* of t, whose shape is \(6,\)"),
        (of_another_rank, CkptError, "rank=0 declares mine as owned by rank=1"),
        (
            lambda: [replace(each, hashes=each.hashes[:0]) for each in take(ranks_of(1, "a")).staged],
            DamagedData,
            "hash",
        ),
        (
            lambda: take(sharded("t", (6,), [Box((0,), (3,)), Box((0,), (4,))])).staged,
            CkptError,
            "t of rank=0@0 is declared twice",
        ),
    ],
)
def test_a_rank_that_declares_what_cannot_be_is_refused(staged, error, message):
    with pytest.raises(error, match=message):
        assemble(staged())


@pytest.mark.parametrize(
    ("field", "value"),
    [("entry", 5), ("box", 3), ("start", 1), ("length", 41), ("length", 0), ("offset", 10**9), ("frame", 9)],
)
def test_a_staging_that_contradicts_its_layout_is_refused(field, value):
    first, second = take(ranks_of(2, "a")).staged
    segments = second.declaration.staging.segments.copy()
    segments[field] = value
    broken = changed(second, staging=replace(second.declaration.staging, segments=segments))
    with pytest.raises(DamagedData, match="rank 1"):
        assemble([first, broken])


def values_specs(assembled) -> list[TensorSpec]:
    return [spec for spec in assembled.manifest.tensors if spec.values]


def test_equal_shared_values_are_stored_once_and_different_or_own_values_for_each_rank():
    ranks = ranks_of(2, "a")
    ranks[0].own, ranks[1].own = b"zero", b"one"
    snapshot = take(ranks)
    assembled = assemble(snapshot.staged)
    assert values_specs(assembled) == [
        TensorSpec(RANK_VALUES, "uint8", (4,), "rank=0", values=True),
        TensorSpec(RANK_VALUES, "uint8", (3,), "rank=1", values=True),
        TensorSpec(VALUES, "uint8", (13,), "", values=True),
    ]
    blobs = assembled.sources[assembled.sources["region"] > 0].tolist()
    assert blobs == [(0, OWN, 0), (1, OWN, 0), (0, SHARED, 0)]
    for number in np.flatnonzero(assembled.sources["region"] > 0).tolist():
        snapshot.frame(assembled, number)  # checks the hash and the length
    ranks[1].shared = b"other"
    owners = [(spec.owner, spec.shape) for spec in values_specs(assemble(take(ranks).staged)) if spec.name == VALUES]
    assert owners == [("rank=0", (13,)), ("rank=1", (5,))]


def test_empty_values_are_a_tensor_without_a_frame():
    ranks = ranks_of(1)
    ranks[0].shared = ranks[0].own = b""
    manifest = assemble(take(ranks).staged).manifest
    assert [spec.shape for spec in manifest.tensors] == [(0,), (0,)]
    assert (len(manifest.frames), len(manifest.extents), len(manifest.boxes)) == (0, 0, 2)


def test_values_beyond_a_frame_are_refused():
    staged = take(ranks_of(1)).staged[0]
    with pytest.raises(UsageError, match="hold large data in tensors"):
        assemble([replace(staged, own_values=Blob(blob(b"").hash, FRAME_BYTES_MAX + 1))])


class CountedBlob(Blob):
    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedBlob.compared += 1
        return super().__eq__(other)

    __hash__ = Blob.__hash__


def test_the_values_of_each_rank_are_compared_once_with_those_of_the_first() -> None:
    """There may be thousands of ranks."""
    world = 40
    snapshot = take(ranks_of(world, "a"))
    told = [replace(each, shared_values=CountedBlob(bytes(16), 5)) for each in snapshot.staged]
    CountedBlob.compared = 0
    assemble(told)
    assert CountedBlob.compared <= world
