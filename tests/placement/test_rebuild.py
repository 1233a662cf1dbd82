"""What can be made again of a checkpoint from what is left of it: exactly what the placement promises, and never more
than the bytes that are there."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest

from ckpt.errors import UsageError
from ckpt.placement.groups import PlacementNode
from ckpt.placement.placement import Parity, Placement, place
from ckpt.placement.rebuild import (
    StagedRun,
    Striped,
    protected_ranks,
    rebuildable_ranks,
    solvable_windows,
    stripes_of,
    windows,
)

OPTIONS = [Parity(1, 1), Parity(3, 1), Parity(2, 2), Parity(4, 2)]


def job(rng: random.Random, nodes: int, option: Parity) -> tuple[Placement, dict[str, list[tuple[int, int]]]]:
    """Some nodes with some ranks of some sizes: where their parity is planned, and what each staged: less than that."""
    ranks, staged = iter(range(1000)), {}
    planned = []
    for n in range(nodes):
        sizes = [rng.choice((1, 4096, 10_000, 300_000)) for _ in range(rng.randint(1, 3))]
        staged[f"n{n}"] = [(next(ranks), size) for size in sizes]
        planned.append(PlacementNode(f"n{n}", sum(sizes) + rng.choice((0, 1, 50_000)), 1 << 30))
    return place(planned, option), staged


def all_stripes(placement: Placement, staged: dict[str, list[tuple[int, int]]]) -> list[tuple[Striped, list[str]]]:
    """Each with the nodes that keep its parities."""
    found = []
    for group in placement.groups:
        sizes = [staged[member] for member in group.members]
        for striped, holders in stripes_of(group.stripes, sizes):
            found.append((striped, [group.members[holder] for holder in holders]))
    return found


def left(found: list[tuple[Striped, list[str]]], gone: tuple[str, ...]) -> dict[Striped, list[int]]:
    return {striped: [row for row, name in enumerate(names) if name not in gone] for striped, names in found}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 6, 7])
def test_whichever_nodes_are_lost_their_ranks_can_be_made_again_where_the_placement_says_so(
    option: Parity, nodes: int, seed: int
) -> None:
    """For every loss, of more nodes than are promised, too. There the plan judges by the byte, and so may save ranks
    of a node of which the placement gives up the whole: never fewer."""
    rng = random.Random(seed + nodes)
    placement, staged = job(rng, nodes, option)
    sizes = dict(itertools.chain(*staged.values()))
    found = all_stripes(placement, staged)
    for count in range(1, nodes + 1):
        for gone in itertools.combinations(staged, count):
            missing = {rank for name in gone for rank, _ in staged[name]}
            made = rebuildable_ranks(missing, sizes, left(found, gone))
            lost = {rank for name in placement.lost_nodes(gone) for rank, _ in staged[name]}
            assert made >= missing - lost, (gone, placement)
            if count <= option.parity and count < nodes:
                assert made == missing


def test_what_parity_is_said_to_protect_survives_any_loss_wherever_lost_ranks_were_made_again(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        option = rng.choice(OPTIONS)
        placement, staged = job(rng, rng.randint(2, 7), option)
        found, losses = (
            all_stripes(placement, staged),
            {kept.node: kept.losses_max for kept in placement.protected_states},
        )
        holders = {rank: [name] for name, ranks in staged.items() for rank, _ in ranks}
        sizes = dict(itertools.chain(*staged.values()))

        def rows(gone: tuple[str, ...], found: Any = found) -> dict[Striped, dict[int, set[str]]]:
            return {each: {row: {at} for row, at in enumerate(names) if at not in gone} for each, names in found}

        for count in range(1, option.parity + 1):
            whole = {rank for name, ranks in staged.items() for rank, _ in ranks if losses[name] >= count}
            assert protected_ranks(holders, sizes, rows(()), count) >= whole, "nothing is lost: it is as it was placed"
            more = {rank: [*names, *rng.sample(sorted(staged), rng.randint(0, 2))] for rank, names in holders.items()}
            assert protected_ranks(more, sizes, rows(()), 1) >= protected_ranks(holders, sizes, rows(()), 1), (
                "more is not less"
            )
        before = tuple(rng.sample(sorted(staged), rng.randint(0, min(option.parity, len(staged) - 1))))
        there = [name for name in staged if name not in before]
        now = {rank: [at for at in names if at in there] or [rng.choice(there)] for rank, names in holders.items()}
        for rank in rng.sample(sorted(now), rng.randint(0, len(now))):  # made again though its node is there
            now[rank] = sorted({*now[rank], rng.choice(there)})
        for gone in itertools.combinations(there, min(option.parity, len(there))):
            said = protected_ranks(now, sizes, rows(before), option.parity)
            missing = [rank for rank, names in now.items() if set(names) <= set(gone)]
            again = rebuildable_ranks(missing, sizes, left(found, (*before, *gone)))
            assert said.intersection(missing) <= again


@pytest.mark.parametrize("option", OPTIONS)
def test_each_byte_lies_in_one_stripe_windows_leave_no_gap_and_no_more_is_kept_than_planned(
    option: Parity, seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        placement, staged = job(rng, rng.randint(2, 7), option)
        sizes = dict(itertools.chain(*staged.values()))
        seen: dict[int, list[tuple[int, int]]] = {rank: [] for rank in sizes}
        kept: Counter[str] = Counter()
        for striped, names in all_stripes(placement, staged):
            kept.update(dict.fromkeys(names, striped.length))
            cut = [part for window in windows(striped, ()) for part in window.split(5000)]
            assert [part.start for part in cut] == [0, *(part.stop for part in cut[:-1])]
            assert cut[-1].stop == striped.length
            for part in cut:
                assert all(run.stop - run.start == part.stop - part.start for run in part.runs.values())
                for run in part.runs.values():
                    seen[run.rank].append((run.start, run.stop))
        for rank, parts in seen.items():
            ends = [0, *(stop for _, stop in sorted(parts))]
            assert [start for start, _ in sorted(parts)] == ends[:-1]
            assert ends[-1] == sizes[rank]
        planned: Counter[str] = Counter()
        for group in placement.groups:
            for stripe in group.stripes:
                planned.update({group.members[holder]: stripe.length for holder in stripe.holders})
        assert kept <= planned


def test_what_was_not_planned_for_is_refused() -> None:
    placement = place([PlacementNode(name, 10_000, 1 << 20) for name in "abc"], Parity(2, 1))
    (group,) = placement.groups
    assert stripes_of(group.stripes, [[(0, 9_000)], [(1, 5)], [(2, 10_000)]])
    with pytest.raises(UsageError, match="planned"):
        stripes_of(group.stripes, [[(0, 9_000)], [(1, 13_000)], [(2, 10_000)]])


def test_a_rank_whose_stripe_nobody_holds_any_more_or_whose_size_nobody_knows_cannot_be_made_again() -> None:
    one = Striped(100, ((StagedRun(0, 0, 100),), (StagedRun(1, 0, 50),)))
    two = Striped(60, ((StagedRun(0, 100, 160),), (StagedRun(2, 0, 60),)))
    assert rebuildable_ranks({0}, {0: 160}, {one: [0], two: [0]}) == {0}
    assert rebuildable_ranks({0}, {0: 160}, {one: [1], two: [0]}) == {0}
    assert rebuildable_ranks({0}, {0: 160}, {one: [0], two: []}) == frozenset()
    assert rebuildable_ranks({0}, {0: 160}, {one: [0]}) == frozenset()
    assert rebuildable_ranks({0}, {0: 161}, {one: [0], two: [0]}) == frozenset()
    assert rebuildable_ranks({0}, {}, {one: [0], two: [0]}) == frozenset()
    # Of two that one parity cannot tell apart, the byte that only one of them has comes back, and so not the whole.
    assert rebuildable_ranks({0, 1}, {0: 160, 1: 50}, {one: [0], two: [0]}) == frozenset()
    assert [(w.start, w.stop) for w in solvable_windows({0, 1}, {one: [0]})] == [(50, 100)]
    assert rebuildable_ranks({0, 1}, {0: 160, 1: 50}, {one: [0, 1], two: [0]}) == {0, 1}


@pytest.mark.parametrize(
    ("length", "sources"),
    [
        (0, ((StagedRun(0, 0, 1),),)),
        (1 << 61, ((StagedRun(0, 0, 1),),)),
        (10, ()),
        (10, ((),)),
        (10, ((StagedRun(0, 0, 11),),)),
        (10, ((StagedRun(0, 0, 6), StagedRun(1, 0, 5)),)),
        (10, ((StagedRun(0, 5, 5),),)),
        (10, ((StagedRun(0, 6, 5),),)),
        (10, ((StagedRun(-1, 0, 5),),)),
        (10, ((StagedRun(0, -1, 5),),)),
    ],
)
def test_a_stripe_that_cannot_be_is_refused(length: int, sources: tuple[tuple[StagedRun, ...], ...]) -> None:
    with pytest.raises(UsageError):
        Striped(length, sources)
