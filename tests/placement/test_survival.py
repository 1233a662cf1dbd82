"""Survival probabilities, exactly, by two ways; and what placements reach."""

from __future__ import annotations

from fractions import Fraction as F

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import UsageError
from ckpt.placement.groups import PlacementNode
from ckpt.placement.placement import Parity, Placement, Replicas, place
from tests.placement.survival import (
    group_ways,
    mixed_ways,
    pairs_mttdl_s,
    ring_ways,
    survival,
    survival_enumerated,
)

STATE = 12 * 4096 * 100


def nodes(count: int, **fields: list) -> list[PlacementNode]:
    return [
        PlacementNode(f"n{i:02d}", STATE, 100 * STATE, **{name: values[i] for name, values in fields.items()})
        for i in range(count)
    ]


def enumerated(placement: Placement, lost: int) -> F:
    units = [[load.node] for load in placement.loads]
    return survival_enumerated(lambda gone: not placement.lost_nodes(gone), units, lost)


@pytest.mark.parametrize(
    ("count", "copies", "lost", "exact", "ring"),
    [
        (4, 2, 2, F(2, 3), F(1, 3)),
        (8, 2, 2, F(6, 7), F(5, 7)),
        (8, 2, 3, F(4, 7), F(2, 7)),
        (16, 2, 2, F(14, 15), F(13, 15)),
        (12, 3, 3, F(54, 55), F(52, 55)),
        (12, 3, 4, F(51, 55), F(133, 165)),
        (5, 2, 2, F(3, 5), F(1, 2)),  # mixed: one pair and a ring of three
        (7, 3, 3, F(6, 7), F(4, 5)),
    ],
)
def test_copies_survive_as_often_as_groups_can_and_more_often_than_a_ring(count, copies, lost, exact, ring):
    assert survival(mixed_ways(count, copies), lost) == exact
    assert survival([ring_ways(count, copies)], lost) == ring
    assert enumerated(place(nodes(count), Replicas(copies - 1)), lost) == exact


@pytest.mark.parametrize(
    ("option", "group", "probabilities", "memory"),
    [
        (Replicas(1), (2, 1), (F(6, 7), F(4, 7), F(8, 35)), F(2)),
        (Parity(3, 1), (4, 1), (F(4, 7), F(0), F(0)), F(4, 3)),
        (Parity(2, 2), (4, 2), (F(1), F(6, 7), F(18, 35)), F(2)),
        (Parity(6, 2), (8, 2), (F(1), F(0), F(0)), F(4, 3)),
    ],
)
def test_eight_nodes_survive_and_take_memory_as_the_theory_says(option, group, probabilities, memory):
    placement = place(nodes(8), option)
    for lost, probability in zip((2, 3, 4), probabilities, strict=True):
        assert survival([group_ways(*group)] * (8 // group[0]), lost) == probability
        assert enumerated(placement, lost) == probability
    assert {F(load.own_bytes + load.keeps_bytes, STATE) for load in placement.loads} == {memory}


def test_whole_domains_are_paired_and_outlive_any_one_domain_and_two_thirds_of_the_pairs_of_domains():
    racks = ["a", "a", "b", "b", "c", "c", "d", "d"]
    units = [[f"n{i:02d}", f"n{i + 1:02d}"] for i in range(0, 8, 2)]

    def survives(pairs: list[tuple[int, int]], lost: int) -> F:
        names = [{f"n{a:02d}", f"n{b:02d}"} for a, b in pairs]
        return survival_enumerated(lambda gone: not any(pair <= set(gone) for pair in names), units, lost)

    assert [survives([(0, 1), (2, 3), (4, 5), (6, 7)], k) for k in (1, 2)] == [0, 0]
    assert [survives([(0, 2), (1, 3), (4, 6), (5, 7)], k) for k in (1, 2)] == [1, F(2, 3)]
    assert [survives([(0, 2), (1, 4), (3, 6), (5, 7)], k) for k in (1, 2)] == [1, F(1, 3)]  # scattered
    placement = place(nodes(8, domains=[(rack,) for rack in racks]), Replicas(1))
    for lost, probability in ((1, 1), (2, F(2, 3))):
        assert survival_enumerated(lambda gone: not placement.lost_nodes(gone), units, lost) == probability
    assert enumerated(placement, 2) == F(6, 7)
    assert placement.exposed_domains == ()


def test_pairs_that_are_protected_again_in_two_minutes_last_67_hours():
    assert pairs_mttdl_s(16, 1 / (6 * 3600), 120) / 3600 == pytest.approx(67.5)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=3), st.data())
def test_the_polynomial_and_enumeration_agree(groups, data):
    names = [[f"{g}.{i}" for i in range(count)] for g, (count, _) in enumerate(groups)]
    every = [name for group in names for name in group]
    lost = data.draw(st.integers(0, len(every)))

    def survives(gone):
        return all(len(set(group) & set(gone)) <= most for group, (_, most) in zip(names, groups, strict=True))

    exact = survival([group_ways(*group) for group in groups], lost)
    assert exact == survival_enumerated(survives, [[name] for name in every], lost)


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(UsageError, match="3 of 2"):
        survival([group_ways(2, 1)], 3)
    with pytest.raises(UsageError, match="too many to enumerate"):
        ring_ways(30, 2)
