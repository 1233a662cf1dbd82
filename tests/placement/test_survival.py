"""How likely the state outlives the loss of nodes in a placement: exactly what the theory says, by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from fractions import Fraction as F

import pytest

from ckpt.placement.groups import PlacementNode
from ckpt.placement.placement import Parity, Placement, Replicas, place

STATE = 12 * 4096 * 100


def nodes(count: int, **fields: list) -> list[PlacementNode]:
    return [
        PlacementNode(f"n{i:02d}", STATE, 100 * STATE, **{name: values[i] for name, values in fields.items()})
        for i in range(count)
    ]


def enumerated(placement: Placement, lost: int, units: Sequence[Collection[str]] = ()) -> F:
    """The probability that the state outlives the loss of so many units at random; a unit is what is lost at once: by
    default a node."""
    sets = list(itertools.combinations(units or [[load.node] for load in placement.loads], lost))
    return F(sum(not placement.lost_nodes([*itertools.chain(*chosen)]) for chosen in sets), len(sets))


@pytest.mark.parametrize(
    ("count", "copies", "lost", "exact"),
    [
        (4, 2, 2, F(2, 3)),  # a ring: 1/3
        (8, 2, 2, F(6, 7)),
        (8, 2, 3, F(4, 7)),
        (16, 2, 2, F(14, 15)),
        (12, 3, 3, F(54, 55)),
        (12, 3, 4, F(51, 55)),  # a ring: 133/165
        (5, 2, 2, F(3, 5)),  # one pair and a ring of three
        (7, 3, 3, F(6, 7)),
    ],
)
def test_copies_survive_as_often_as_groups_can(count, copies, lost, exact):
    assert enumerated(place(nodes(count), Replicas(copies - 1)), lost) == exact


@pytest.mark.parametrize(
    ("option", "probabilities", "memory"),
    [
        (Replicas(1), (F(6, 7), F(4, 7), F(8, 35)), F(2)),
        (Parity(3, 1), (F(4, 7), F(0), F(0)), F(4, 3)),
        (Parity(2, 2), (F(1), F(6, 7), F(18, 35)), F(2)),
        (Parity(6, 2), (F(1), F(0), F(0)), F(4, 3)),
    ],
)
def test_eight_nodes_survive_and_take_memory_as_the_theory_says(option, probabilities, memory):
    placement = place(nodes(8), option)
    for lost, probability in zip((2, 3, 4), probabilities, strict=True):
        assert enumerated(placement, lost) == probability
    assert {F(load.own_bytes + load.keeps_bytes, STATE) for load in placement.loads} == {memory}


def test_whole_domains_are_paired_and_outlive_any_one_domain_and_two_thirds_of_the_pairs_of_domains():
    racks = ["a", "a", "b", "b", "c", "c", "d", "d"]
    units = [[f"n{i:02d}", f"n{i + 1:02d}"] for i in range(0, 8, 2)]
    placement = place(nodes(8, domains=[(rack,) for rack in racks]), Replicas(1))
    for lost, probability in ((1, 1), (2, F(2, 3))):  # scattered pairs: 1/3
        assert enumerated(placement, lost, units) == probability
    assert enumerated(placement, 2) == F(6, 7)
    assert placement.exposed_domains == ()
