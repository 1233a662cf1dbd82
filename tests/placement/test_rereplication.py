"""What lost its copies is copied again: from who has it to who has not, within what each lends, to as many as asked."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from ckpt.errors import UsageError
from ckpt.placement.groups import PlacementNode
from ckpt.placement.rereplication import Copy, Reprotection, plan_rereplication

PLENTY = 1 << 40


def nodes(*names: str, lend: int = PLENTY) -> list[PlacementNode]:
    return [PlacementNode(name, lend_bytes=lend) for name in names]


def after(holders: dict[int, list[str]], made: Reprotection) -> dict[int, set[str]]:
    found = {rank: set(names) for rank, names in holders.items()}
    for copy in made.replicas:
        for rank in copy.ranks:
            assert copy.source in holders[rank], "nobody gives what it has not"
            assert copy.holder not in found[rank], "nobody is given what it has"
            found[rank].add(copy.holder)
    return found


def test_after_the_loss_of_one_of_a_ring_of_three_each_of_the_other_two_gets_what_it_has_not() -> None:
    holders = {0: ["a", "b"], 1: ["b", "c"], 2: ["c", "a"]}
    sizes = dict.fromkeys(holders, 100)
    made = plan_rereplication(holders, sizes, nodes("a", "b"), 1)
    assert made == Reprotection((Copy("a", "b", (2,)), Copy("b", "a", (1,))), ())


def test_what_is_on_enough_nodes_is_left_alone_and_what_nobody_has_cannot_be_helped() -> None:
    assert plan_rereplication({0: ["a", "b"], 1: ["gone"]}, {0: 1, 1: 1}, nodes("a", "b", "c"), 1) == Reprotection(
        (), ()
    )
    assert plan_rereplication({0: ["a"]}, {0: 1}, nodes("a"), 2) == Reprotection((), ())
    with pytest.raises(UsageError):
        plan_rereplication({0: ["a"]}, {0: 1}, nodes("a", "a"), 1)


def test_a_copy_lies_in_another_domain_where_one_has_room() -> None:
    racks = [PlacementNode(name, lend_bytes=PLENTY, domains=(name[0],)) for name in ("x1", "x2", "y1", "y2")]
    made = plan_rereplication({0: ["x1"], 1: ["y2"]}, {0: 5, 1: 5}, racks, 1)
    assert [(copy.source[0], copy.holder[0]) for copy in made.replicas] == [("x", "y"), ("y", "x")]


@pytest.mark.parametrize(("count", "copies"), [(c, n) for c in (2, 3, 4, 5) for n in (1, 2, 3)])
def test_whoever_has_what_in_the_end_all_is_on_as_many_nodes_as_were_asked_for(count: int, copies: int) -> None:
    """Every set of holders that the ranks of three may have."""
    names = [f"n{i}" for i in range(count)]
    sets = [list(each) for size in range(1, count + 1) for each in itertools.combinations(names, size)]
    rng = random.Random(7)
    many = list(itertools.product(sets, repeat=3))
    for held in rng.sample(many, min(len(many), 400)):
        holders = dict(enumerate(held))
        sizes = {rank: rng.randint(1, 9) for rank in holders}
        made = plan_rereplication(holders, sizes, nodes(*names), copies)
        assert not made.short_ranks
        assert all(len(have) >= min(copies + 1, count) for have in after(holders, made).values())
        assert sum(len(have) for have in after(holders, made).values()) == sum(
            max(len(names), min(copies + 1, count)) for names in held
        ), "no copy more than was asked for"


def test_nobody_is_given_more_than_it_lends_and_the_order_of_what_is_said_does_not_count(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        names = [f"n{i}" for i in range(rng.randint(1, 6))]
        holders = {rank: rng.sample([*names, "gone"], rng.randint(0, len(names))) for rank in range(rng.randint(1, 8))}
        sizes = {rank: rng.randint(1, 100) for rank in holders}
        there = [
            PlacementNode(name, lend_bytes=rng.choice((0, 50, 150, PLENTY)), domains=(rng.choice("xy"),))
            for name in names
        ]
        copies = rng.randint(1, 3)
        made = plan_rereplication(holders, sizes, there, copies)
        given = Counter[str]()
        for copy in made.replicas:
            given[copy.holder] += sum(sizes[rank] for rank in copy.ranks)
        assert all(given[node.id] <= node.lend_bytes for node in there)
        have, wanted = after(holders, made), min(copies + 1, len(names))
        few = {rank for rank, who in have.items() if 0 < len(who - {"gone"}) < wanted}
        assert few == set(made.short_ranks)
        shuffled = {
            rank: rng.sample(holders[rank], len(holders[rank])) for rank in rng.sample(list(holders), len(holders))
        }
        assert plan_rereplication(shuffled, sizes, rng.sample(there, len(there)), copies) == made
