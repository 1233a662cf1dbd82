"""What is divided is only what was shown to be equal on the very ranks that hold it."""

from __future__ import annotations

import numpy as np

from ckpt.agent.snapshots.division import Division, RankContents, make_division, parse_layout
from ckpt.format.declaration import decode_layout, decode_share, encode_layout
from ckpt.layout.layout import Entry, Layout
from ckpt.types import Box

BOX = Box.whole((300, 1000))


def held(rank: int, version: str, value: int, *, holds: bool = True) -> RankContents:
    entries = (Entry("model.w", "float32", (300, 1000), (BOX,) if holds else ()),)
    hashes = np.full((1 if holds else 0, 2), value, dtype=np.uint64)
    return RankContents(f"rank={rank}", Layout(entries), hashes, version, 100)


def staged_bytes(division: Division) -> list[int]:
    return [sum(part.stop - part.start for part in share) for share in division.shares]


def test_equal_hashes_of_one_tick_divide_and_others_do_not() -> None:
    whole = BOX.size * 4
    equal = make_division([held(0, "1", 7), held(1, "1", 7)], None)
    assert sum(staged_bytes(equal)) == whole
    unequal = make_division([held(0, "1", 7), held(1, "1", 8)], None)
    assert staged_bytes(unequal) == [whole, whole]
    assert unequal.differing_tensors == {"model.w"}
    unknown = make_division([held(0, "1", 7), held(1, "2", 7)], None)
    assert staged_bytes(unknown) == [whole, whole]


def test_a_rank_that_holds_newly_what_others_agreed_on_is_not_trusted() -> None:
    whole = BOX.size * 4
    before = make_division([held(0, "1", 7), held(1, "1", 7), held(2, "1", 0, holds=False)], None)
    assert sum(staged_bytes(before)) == whole
    kept = make_division([held(0, "1", 7), held(1, "2", 9), held(2, "2", 0, holds=False)], before)
    assert sum(staged_bytes(kept)) == whole
    after = make_division([held(0, "1", 7), held(1, "1", 7), held(2, "2", 9)], before)
    assert staged_bytes(after) == [whole] * 3


def test_equal_layouts_are_one_object_and_what_each_rank_is_told_is_its_own() -> None:
    blob = encode_layout(held(0, "1", 7).layout)
    one, again = parse_layout(blob), parse_layout(memoryview(bytes(bytearray(blob))))
    assert one is again
    assert one == decode_layout(blob)
    ranks = [RankContents(f"rank={rank}", one, np.full((1, 2), 7, np.uint64), "1", 100) for rank in range(3)]
    made = make_division(ranks, None)
    assert made == make_division([held(rank, "1", 7) for rank in range(3)], None)
    told = [(decode_layout(layout), decode_share(share)) for layout, share in made.encoded_plans]
    assert told == list(zip(made.layouts, made.shares, strict=True))
    assert made.shares.count(()) == 2  # a frame is not cut in two
