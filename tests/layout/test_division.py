"""Who stages what."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from ckpt.errors import UsageError
from ckpt.layout.division import divide, division_id, find_agreed, incomplete_tensors, make_owned, whole_share
from ckpt.layout.layout import Entry, Layout, Part
from ckpt.layout.staging import small_bytes_for
from ckpt.types import ITEMSIZE, Box

FRAME = 1024  # so that boxes from 256 bytes on are large
SMALL = small_bytes_for(FRAME)


def entry(name: str, size: int, dtype: str = "uint8", owner: str = "") -> Entry:
    return Entry(name, dtype, (size,), (Box.whole((size,)),), owner)


def layout(*entries: Entry) -> Layout:
    return Layout(tuple(sorted(entries, key=lambda e: (e.name, e.owner))))


def keys(*layouts: Layout) -> set[tuple[str, str, Box]]:
    return {(e.name, e.owner, box) for each in layouts for e in each.entries for box in e.boxes}


def load(share: tuple[Part, ...]) -> int:
    return sum(part.stop - part.start for part in share)


def random_layout(rng: random.Random, count: int, prefix: str = "t") -> Layout:
    sizes = [rng.choice((0, 1, 3, 40, 200, 300, 1500, 5000, 20_000)) for _ in range(count)]
    return layout(*(entry(f"{prefix}{i:04d}", size) for i, size in enumerate(sizes)))


def staged_once(layouts: list[Layout], shares: list[tuple[Part, ...]]) -> None:
    """Each byte of each key is staged by exactly one rank that declares it."""
    runs: dict[tuple[str, str, Box], list[tuple[int, int]]] = {}
    for each, share in zip(layouts, shares, strict=True):
        assert list(share) == sorted(share, key=lambda p: (p.entry, p.box, p.start))
        for part in share:
            e = each.entries[part.entry]
            runs.setdefault((e.name, e.owner, e.boxes[part.box]), []).append((part.start, part.stop))
    for each in layouts:
        for e in each.entries:
            for box in e.boxes:
                at = 0
                for start, stop in sorted(runs.get((e.name, e.owner, box), [])):
                    assert start == at < stop
                    at = stop
                assert at == box.size * ITEMSIZE[e.dtype]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_what_all_ranks_agree_on_is_staged_once_and_equally(world, seed):
    rng = random.Random(seed)
    layouts = [random_layout(rng, 200)] * world
    shares = divide(layouts, keys(*layouts), FRAME)
    assert shares == divide(layouts, dict.fromkeys(sorted(keys(*layouts), reverse=True)).keys(), FRAME), "in any order"
    staged_once(layouts, shares)
    loads = [load(share) for share in shares]
    assert max(loads) - min(loads) <= 2 * FRAME
    for part in itertools.chain(*shares):  # a small box goes whole to one rank, and a large one is cut at frames
        size = layouts[0].entries[part.entry].boxes[0].size
        if size < SMALL:
            assert (part.start, part.stop) == (0, size)
        assert part.start % FRAME == 0
        assert part.stop % FRAME == 0 or part.stop == size


def test_what_is_not_agreed_is_staged_whole_by_each_rank_that_has_it():
    both = layout(entry("a", 5000), entry("b", 10), entry("empty", 0))
    shares = divide([both, both], {("b", "", Box((0,), (10,)))}, FRAME)
    assert all(Part(0, 0, 0, 5000) in share for share in shares)
    assert sum(part.entry == 1 for share in shares for part in share) == 1
    assert divide([both, both], set(), FRAME) == [whole_share(both), whole_share(both)]
    one, other = layout(entry("a", 5000)), layout(entry("a", 5000, "int8"))
    assert divide([one, other], keys(one, other), FRAME) == [whole_share(one), whole_share(other)], "different kinds"
    assert all(part.entry != 2 for part in whole_share(both))


def test_what_a_rank_must_stage_alone_counts_when_the_rest_is_divided():
    common = [entry(f"c{i}", 10_000) for i in range(10)]
    layouts = [layout(*common, entry("mine", 40_000, owner="rank=0")), layout(*common), layout(*common)]
    loads = [load(share) for share in divide(layouts, keys(layouts[1]), FRAME)]
    assert loads[0] == pytest.approx(140_000 / 3, abs=2 * FRAME)
    assert max(loads) - min(loads) <= 2 * FRAME


@pytest.mark.parametrize(
    "groups",
    [
        {(0, 2): 50_000, (1, 3): 10_000, (0, 1, 2, 3): 60_000},  # replicas of shards, and what all hold
        {(0, 1): 60_000, (1, 2): 60_000, (2, 3): 60_000},  # groups that cross: all four can have the same
    ],
)
def test_ranks_get_equal_bytes_where_groups_of_holders_nest_or_cross(groups):
    held: dict[int, list[Entry]] = {rank: [] for rank in range(4)}
    for number, (ranks, size) in enumerate(groups.items()):
        for rank in ranks:
            held[rank].append(entry(f"g{number}", size))
    layouts = [layout(*held[rank]) for rank in range(4)]
    shares = divide(layouts, keys(*layouts), FRAME)
    staged_once(layouts, shares)
    loads = [load(share) for share in shares]
    assert max(loads) - min(loads) <= 4 * FRAME


def test_adding_a_tensor_moves_few_bytes_to_other_ranks(seed):
    """Each of the 7 boundaries moves by at most the added bytes and the middle of what it falls into."""
    rng = random.Random(seed)
    before = random_layout(rng, 1000)
    for size in (10, 300, 5000):
        after = layout(*before.entries, entry(f"t{rng.randrange(1000):04d}.new", size))
        old, new = (holders(each, divide([each] * 8, keys(each), FRAME)) for each in (before, after))
        moved = sum(stop - start for (name, start, stop), rank in old.items() if new.get((name, start, stop)) != rank)
        assert moved <= 7 * (size + 2 * FRAME)


def holders(each: Layout, shares: list[tuple[Part, ...]]) -> dict[tuple[str, int, int], int]:
    """Which rank stages each frame of each box."""
    return {
        (each.entries[part.entry].name, at, min(at + FRAME, part.stop)): rank
        for rank, share in enumerate(shares)
        for part in share
        for at in range(part.start, part.stop, FRAME)
    }


def hashes(*rows: int) -> np.ndarray:
    return np.array([(row, row) for row in rows], np.uint64).reshape(-1, 2)


def test_agree_tells_equal_from_different_from_unknown():
    each = layout(*(entry(name, 8) for name in "abcd"))
    told = [hashes(1, 2, 3, 0), hashes(1, 2, 0, 0), hashes(1, 9, 3, 0)]
    assert find_agreed([each] * 3, told) == ({("a", "", Box((0,), (8,)))}, {("b", "")})
    alone, wide = layout(entry("a", 8)), Layout((Entry("a", "uint8", (8,), (Box((0,), (4,)), Box((4,), (4,)))),))
    for order in ((0, 1, 2), (1, 0, 2), (1, 2, 0)):  # a difference behind a rank that did not hash
        assert find_agreed([alone] * 3, [hashes(row) for row in order]) == (set(), {("a", "")})
    assert find_agreed([wide, wide], [hashes(1, 2), hashes(1, 3)]) == (set(), {("a", "")}), "in one box, so in none"
    other = [layout(entry("a", 8), entry("b", 8), entry("c", 8)), layout(entry("a", 8, "int8"), entry("b", 9))]
    assert find_agreed(other, [hashes(1, 2, 3), hashes(1, 2)]) == (set(), {("a", ""), ("b", "")}), "of other kinds"


def test_hashes_may_be_left_out_but_not_be_of_another_number():
    each = layout(entry("a", 8))
    assert find_agreed([each, each], [np.zeros((0, 2), np.uint64)] * 2) == (set(), set())
    with pytest.raises(UsageError, match="rank 1 declares 1 boxes"):
        find_agreed([each, each], [hashes(1), hashes(1, 2)])


def test_owned_rewrites_the_jobs_tensors_of_these_names_in_place():
    each = layout(entry("a", 8), entry("b", 8), entry("c", 8, owner="rank=1"))
    assert [e.owner for e in make_owned(each, {"a", "c"}, "rank=0").entries] == ["rank=0", "", "rank=1"]
    assert make_owned(each, set(), "rank=0") == each


def test_a_division_is_named_by_all_that_it_was_made_from():
    each = layout(entry("a", 8), entry("b", 8))
    share = whole_share(each)
    base = division_id([each, each], [share, share])
    assert len(base) == 16
    assert base == division_id([layout(*each.entries)] * 2, [tuple(share)] * 2)
    box = (Box((0,), (7,)),)
    others = [
        division_id([each], [share]),
        division_id([each, each], [share, share[:1]]),
        division_id([each, each], [share, (share[0], Part(1, 0, 0, 7))]),
        division_id([each, layout(entry("a", 8), entry("c", 8))], [share, share]),
        division_id([each, layout(entry("a", 8), entry("b", 8, "int8"))], [share, share]),
        division_id([each, layout(entry("a", 8), entry("b", 8, owner="rank=1"))], [share, share]),
        division_id([each, layout(entry("a", 8), Entry("b", "uint8", (8,), box))], [share, share]),
        division_id([each, layout(entry("a", 8), Entry("b", "uint8", (9,), box))], [share, share]),
    ]
    assert max(Counter([base, *others]).values()) == 1


def test_ranks_that_share_a_layout_get_what_equal_layouts_get(seed):
    rng = random.Random(seed)
    one, other = random_layout(rng, 60), random_layout(rng, 60)
    other = layout(*other.entries, entry("z", 700, owner="rank=1"))
    pattern = [one, other, one, one, other]
    copies = [Layout(tuple(each.entries)) for each in pattern]
    rows = {
        id(each): np.array([[rng.randrange(2), i] for i in range(len(each.entries))], np.uint64) for each in pattern
    }
    told = [rows[id(each)].copy() for each in pattern]
    told[3][5] += 1  # the same layout, other bytes
    agreed, differing = find_agreed(pattern, told)
    assert (agreed, differing) == find_agreed(copies, told)
    assert differing
    shares = divide(pattern, agreed, FRAME)
    assert shares == divide(copies, agreed, FRAME)
    assert division_id(pattern, shares) == division_id(copies, shares)


def test_tensors_that_the_ranks_do_not_hold_whole_are_found() -> None:
    def rank(**boxes: tuple[Box, ...]) -> Layout:
        return layout(*(Entry(name, "uint8", (8, 4), held) for name, held in boxes.items()))

    def rows(first: int, last: int) -> Box:
        return Box((first, 0), (last - first, 4))

    whole, top, low, middle = (rows(0, 8),), (rows(0, 4),), (rows(4, 8),), (rows(2, 6),)
    assert incomplete_tensors([rank(a=top, b=whole, c=()), rank(a=low, b=whole, c=whole)]) == []
    assert incomplete_tensors([rank(a=top, b=top, c=()), rank(a=low, b=(rows(5, 8),), c=())]) == ["b", "c"]
    assert incomplete_tensors([rank(a=top), rank(a=whole)]) == [], "stored per rank, as boxes that overlap are"
    assert incomplete_tensors([rank(a=top), rank(a=middle)]) == []
    assert incomplete_tensors([rank(a=top), layout(Entry("a", "int8", (8, 4), ()))]) == [], "of different dtypes"
    assert incomplete_tensors([layout(Entry("a", "uint8", (8, 4), top, "rank=0"))]) == [], "a rank's own"
    assert incomplete_tensors([layout(Entry("a", "uint8", (0, 4), ()), Entry("z", "uint8", (), (Box((), ()),)))]) == []
