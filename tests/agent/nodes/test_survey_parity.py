"""What a coordinator that was started again finds out of what is safe by parity, so that the next has room and nothing
goes before its time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest

from ckpt.agent.replication.survey import SafeCheckpoint
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.placement.placement import Parity
from ckpt.types import Identity
from tests.agent.nodes.fleet import Fleet
from tests.agent.nodes.staged import identity
from tests.agent.nodes.test_rebuild import FOUR, UNEVEN, Make, make

__all__ = ["make"]

FIRST, SECOND, THIRD = identity(5), identity(10), identity(15)
LENT = {"a": [0], "b": [1], "m": list[int]()}  # the last is a memory-only node: of one parity it keeps all


def outlives(fleet: Fleet, which: Identity, losses: int) -> bool:
    """Whether it comes back whichever of so many nodes are lost."""
    for gone in itertools.combinations(fleet.ranks, losses):
        left = Inventory()
        for name in fleet.ranks.keys() - set(gone):
            left.merge(fleet.keeps(name), name)
        if which not in left.complete_checkpoints():
            return False
    return True


@pytest.mark.parametrize("ranks", [FOUR, UNEVEN, LENT, {"a": [0, 1], "b": [2]}])
@pytest.mark.parametrize("option", [Parity(3, 1), Parity(2, 2), Parity(1, 1)])
@pytest.mark.parametrize("again", [False, True])
def test_what_is_found_is_what_outlives_the_losses_asked_for_or_as_many_as_what_others_were_told(
    make: Make, ranks: Mapping[str, Sequence[int]], option: Parity, again: bool
) -> None:
    """The second was complete in its parity when the coordinator died, and nobody was told. `again`: what that kept for
    others went with its agent, of both; else it lost no more than what it knew."""
    fleet = make(ranks, option)
    assert fleet.protect(FIRST) == ""
    fleet.deaf = set(ranks)
    assert fleet.protect(SECOND, safe=FIRST) == ""
    fleet.copies["a"].announced_replicated = FIRST
    kept_some = bool(fleet.kept("a"))
    if again:
        fleet.restart("a")
    losses = min(kept.losses_max for kept in fleet.placed(SECOND).protected_states)
    whole = max((each for each in (FIRST, SECOND) if outlives(fleet, each, losses)), default=None)
    assert whole == (None if again and kept_some else SECOND)
    assert fleet.find(SECOND) == SafeCheckpoint(SECOND, whole)


def test_a_node_that_lends_twice_the_parity_takes_the_next_of_a_coordinator_that_was_started_again(make: Make) -> None:
    fleet = make(LENT, Parity(2, 1))
    assert fleet.protect(FIRST) == ""
    lent_bytes = 2 * fleet.copies["m"].arenas.used_bytes
    fleet.copies["m"].arenas.set_limit(lambda: lent_bytes)
    fleet.deaf = {"b", "m"}
    assert fleet.protect(SECOND, safe=FIRST) == ""
    fleet.restart("a")
    assert fleet.kept("m") == {5, 10}
    assert "no room" in fleet.protect(THIRD), "what is safe is not known, and nothing goes"
    assert fleet.find(SECOND) == SafeCheckpoint(SECOND, SECOND)
    assert fleet.protect(THIRD, safe=SECOND) == ""
    assert fleet.kept("m") == {10, 15}


def test_while_a_node_does_not_answer_nothing_is_known_of_parity_either(make: Make) -> None:
    fleet = make(FOUR, Parity(3, 1))
    assert fleet.protect(FIRST) == ""
    fleet.gone = {"c"}
    assert fleet.find(FIRST) is None
