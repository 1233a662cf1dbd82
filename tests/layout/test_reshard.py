"""Which frames hold what is wanted, and how each is cut."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from ckpt.errors import DamagedData, StateMismatch
from ckpt.format.manifest import VALUES
from ckpt.layout.assemble import assemble
from ckpt.layout.reshard import Cut, Want, apply_cuts, plan_cuts, split_dimensions, whole_run
from ckpt.types import Box
from tests.layout.jobs import Rank, fetch, random_array, region, take
from tests.layout.reshard_cases import all_boxes, manifest_of_runs

RNG = random.Random(11)


def array_of(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.uint16).reshape(shape)


def want(
    shape: tuple[int, ...], box: Box | None = None, name: str = "t", owner: str = "", dtype: str = "bfloat16"
) -> Want:
    return Want(name, owner, dtype, shape, box or Box.whole(shape))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (4, 0, 2), (2, 3, 4), (2, 1, 3, 2), (2, 2, 2, 2, 3)])
def test_every_box_of_a_small_tensor_is_cut_right_for_every_extent_boundary(shape):
    """Exhaustive: each box (of the largest shapes a sample), with the tensor's bytes in runs of k elements, all k."""
    array = array_of(shape)
    boxes = list(all_boxes(shape))
    boxes = boxes if len(boxes) <= 400 else RNG.sample(boxes, 400)
    wants = [want(shape, box) for box in boxes]
    for run in range(1, max(array.size, 1) + 1):
        manifest, frames = manifest_of_runs(array, run)
        outs = [np.zeros(box.shape, np.uint16) for box in boxes]
        plan = plan_cuts(manifest, wants)
        for number, frame in enumerate(frames):
            apply_cuts(plan, number, frame, outs)
        for box, out in zip(boxes, outs, strict=True):
            assert (out == array[region(box)]).all(), (box, run)


@pytest.mark.parametrize("ndim", [1, 2, 3, 4])
def test_a_frame_of_a_whole_box_is_one_run_and_at_most_two_cuts_per_dimension_less_one(ndim):
    shape = (3,) * ndim
    for run in range(1, 3**ndim + 1):
        array = array_of(shape)
        manifest, frames = manifest_of_runs(array, run)
        plan = plan_cuts(manifest, [want(shape)])
        assert [(cut.frame, cut.box_offset) for cut in plan] == [(n, (n * run,)) for n in range(len(frames))]
        out = np.zeros(shape, np.uint16, order="F")
        for cut in plan:
            parts = list(split_dimensions(cut, shape, 2))
            assert len(parts) <= 2 * ndim - 1
            apply_cuts(parts, cut.frame, frames[cut.frame], [out])
        assert (out == array).all()


def test_a_wanted_row_needs_no_frame_that_holds_none_of_it():
    manifest, _ = manifest_of_runs(array_of((10, 4)), 4)
    assert plan_cuts(manifest, [want((10, 4), Box((3, 0), (2, 4)))]) == [
        Cut(3, 6, (4,), (1,), 0, (0,)),
        Cut(4, 6, (4,), (1,), 0, (4,)),
    ]


def test_a_column_of_rows_is_a_strided_view():
    manifest, _ = manifest_of_runs(array_of((4, 6)), 12)
    assert plan_cuts(manifest, [want((4, 6), Box((0, 2), (4, 3)))]) == [
        Cut(0, 6 + 4, (2, 3), (6, 1), 0, (0, 0)),
        Cut(1, 6 + 4, (2, 3), (6, 1), 0, (2, 0)),
    ]


def test_what_is_missing_or_of_another_shape_is_not_cut():
    manifest, _ = manifest_of_runs(array_of((4,)), 4)
    with pytest.raises(StateMismatch, match="no u of shape"):
        plan_cuts(manifest, [want((4,), name="u")])
    with pytest.raises(StateMismatch, match=r"no t of shape \(5,\)"):
        plan_cuts(manifest, [want((5,))])
    with pytest.raises(StateMismatch, match=r"no t \(owned by rank=0\)"):
        plan_cuts(manifest, [want((4,), owner="rank=0")])
    with pytest.raises(StateMismatch, match="does not lie within t, which has the shape"):
        plan_cuts(manifest, [want((4,), Box((2,), (3,)))])


def test_a_manifest_that_does_not_hold_what_it_says_is_damaged():
    manifest, frames = manifest_of_runs(array_of((4, 4)), 4)
    with pytest.raises(DamagedData, match="hold only 12 of 16 elements of t"):
        plan_cuts(replace(manifest, extents=manifest.extents[:-1]), [want((4, 4))])
    short = manifest.extents[:1].copy()
    short["length"] = 8
    with pytest.raises(DamagedData, match="hold only 4 of 16 elements of t"):
        plan_cuts(replace(manifest, extents=short), [want((4, 4))])
    odd = manifest.extents.copy()
    odd["start"] += 1
    with pytest.raises(DamagedData, match="cuts an element"):
        plan_cuts(replace(manifest, extents=odd), [want((4, 4))])
    plan = plan_cuts(manifest, [want((4, 4))])
    narrow = plan_cuts(manifest, [want((4, 4), Box((0, 0), (4, 3)))])[0]
    for bad in (replace(plan[0], offset=12), replace(plan[0], offset=-2), replace(narrow, strides=(1, 1 << 40))):
        with pytest.raises(DamagedData, match="frame 0"):
            apply_cuts([bad], 0, frames[0], [np.zeros((4, 4), np.uint16)])


def test_a_part_of_a_ranks_own_tensor_is_found_by_its_box():
    ranks = [Rank("rank=0"), Rank("rank=1")]
    arrays = {}
    for r, rank in enumerate(ranks):
        boxes = [Box((2 * r, 0), (1, 3)), Box((2 * r + 1, 0), (1, 3))]
        arrays[r] = [(box, random_array(RNG, "bfloat16", box.shape)) for box in boxes]
        rank.held["t", rank.coordinate] = ("bfloat16", (4, 3), arrays[r])
    snapshot = take(ranks)
    assembled = assemble(snapshot.staged)
    for r, rank in enumerate(ranks):
        wants = [want((4, 3), box, owner=rank.coordinate) for box, _ in arrays[r]]
        for out, (_, array) in zip(fetch(snapshot, assembled, wants), arrays[r], strict=True):
            assert (out == array).all()
    other = want((4, 3), Box((0, 0), (2, 3)), owner="rank=0")
    with pytest.raises(StateMismatch):
        plan_cuts(assembled.manifest, [other])


def test_values_are_never_taken_for_a_tensor_of_their_name():
    rank = Rank("rank=0", shared=b"ab")
    box = Box.whole((2,))
    rank.held[VALUES, ""] = ("bfloat16", (2,), [(box, np.array([1, 2], np.uint16))])
    snapshot = take([rank])
    assembled = assemble(snapshot.staged)
    assert fetch(snapshot, assembled, [want((2,), name=VALUES)])[0].tolist() == [1, 2]
    rank.held.clear()
    manifest = assemble(take([rank]).staged).manifest
    with pytest.raises(StateMismatch):
        plan_cuts(manifest, [want((2,), name=VALUES, dtype="uint8")])


@pytest.mark.parametrize("shape", [(), (24,), (5, 7), (2, 3, 4)])
def test_a_frame_that_lands_in_one_run_is_known_by_where_it_begins(shape):
    array = array_of(shape)
    for run in range(1, array.size + 1):
        manifest, frames = manifest_of_runs(array, run)
        plan = plan_cuts(manifest, [want(shape)])
        for number, frame in enumerate(frames):
            mine = [replace(cut, offset=cut.offset - 6) for cut in plan if cut.frame == number]
            assert whole_run(mine, 2, len(frame) - 10) == number * run
            assert whole_run(mine, 2, len(frame) - 9) is None, "a byte of the frame goes elsewhere"


def test_a_frame_that_is_cut_apart_or_goes_to_two_boxes_lands_in_no_one_run():
    manifest, _ = manifest_of_runs(array_of((4, 6)), 24)
    halves = [Box((0, 0), (2, 6)), Box((2, 0), (2, 6))]
    plan = [replace(cut, offset=cut.offset - 6) for cut in plan_cuts(manifest, [want((4, 6), box) for box in halves])]
    assert whole_run(plan, 2, 48) is None
    narrow = [replace(c, offset=c.offset - 6) for c in plan_cuts(manifest, [want((4, 6), Box((0, 0), (4, 4)))])]
    assert whole_run(narrow, 2, 32) is None
    manifest, _ = manifest_of_runs(array_of((24,)), 6)
    swapped = [
        replace(cut, frame=0, offset=24 - 12 * i) for i, cut in enumerate(plan_cuts(manifest, [want((24,))])[:2])
    ]
    assert whole_run(swapped, 2, 24) is None, "the halves change places"
