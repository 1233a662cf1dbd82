"""Which checkpoint may go for which."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.agent.node.node_memory import NodeMemory
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.agent.state.retention_rule import NewestStart, remaining_placement, surviving_nodes
from ckpt.placement.placement import Kept
from ckpt.types import Epoch, Identity, Version
from tests.agent.parts import bare_context

ONE, TWO, THREE = (Epoch(number, f"{number:016x}") for number in (1, 2, 3))


def test_what_is_kept_outlives_the_nodes_of_which_a_copy_is_left_elsewhere() -> None:
    kept = Kept("a", 2, ("b", "c")), Kept("b", 1, ("c",)), Kept("c", 0)
    for gone, left in (("", "ab"), ("b", "ab"), ("c", "a"), ("a", "ab"), ("bc", ""), ("abc", "")):
        assert surviving_nodes(remaining_placement(kept, gone)) == {*left}, gone
    assert remaining_placement(kept, "") == kept


def test_where_it_is_not_known_who_keeps_what_each_agent_that_is_lost_did() -> None:
    kept = Kept("a", 2), Kept("b", 1), Kept("c", 0)
    for gone, left in (("", "ab"), ("a", "a"), ("b", "ab"), ("c", "a"), ("bc", ""), ("ac", "a")):
        assert surviving_nodes(remaining_placement(kept, gone)) == {*left}, gone


def test_of_earlier_starts_what_was_gone_on_from_and_what_is_safe_stay() -> None:
    parent, safe = Identity(TWO, Version(9)), Identity(ONE, Version(5))
    begun = NewestStart(THREE, parent, safe)
    others = Identity(ONE, Version(4)), Identity(TWO, Version(8)), Identity(TWO, Version(10))
    assert not any(map(begun.supersedes, (parent, safe, Identity(THREE, Version(10)))))
    assert all(map(begun.supersedes, others))
    assert not any(map(begun.supersedes_epoch, (ONE, TWO, THREE)))
    assert NewestStart(THREE, parent).supersedes_epoch(ONE)
    assert not NewestStart(THREE, None, safe).supersedes_epoch(ONE)


@pytest.mark.parametrize("lends", [True, False])
def test_a_node_that_has_all_of_what_was_gone_on_from_keeps_nothing_older(lends: bool) -> None:
    """Else nothing newer fits beside the two, where it lends no more than twice what a job has."""
    parent, safe = Identity(TWO, Version(9)), Identity(ONE, Version(5))
    for kept, goes in (((safe, parent), True), ((safe,), False)):
        begun = begun_at(lends, THREE, parent, safe, {identity: [0, 1] for identity in kept})
        assert (begun.supersedes(safe), begun.supersedes_epoch(ONE)) == (goes, goes)
        assert not begun.supersedes(parent)


@pytest.mark.parametrize("lends", [True, False])
def test_nor_does_what_a_node_has_all_of_go_for_a_newer_one_that_lies_on_one_node_each(lends: bool) -> None:
    """What was said to be safe had gone for it."""
    whole, parent = Identity(ONE, Version(9)), Identity(TWO, Version(12))
    held = {whole: [0, 1], Identity(ONE, Version(8)): [0, 1], parent: [1], Identity(TWO, Version(13)): [0, 1]}
    begun = begun_at(lends, THREE, parent, Identity(ONE, Version(5)), held)
    assert [each for each in held if not begun.supersedes(each)] == [whole, parent]
    assert not begun.supersedes_epoch(ONE)


def begun_at(
    lends: bool, epoch: Epoch, parent: Identity, told_safe: Identity, held: dict[Identity, list[int]]
) -> NewestStart:
    """What a node goes by that holds these ranks, of two. `lends`: it is a memory-only one."""
    inventory = Inventory()
    for identity, ranks in held.items():
        inventory.add_local_snapshots(identity, 2, ranks)
    has_part = SimpleNamespace(claim=SimpleNamespace(epoch=epoch, parent=parent))
    context = bare_context()
    context.jobs.current = None if lends else cast(Any, has_part)
    memory = NodeMemory(context, cast(Any, has_part) if lends else None)
    memory.replicas.announced_replicated = told_safe
    memory.inventory = lambda whole: inventory  # type: ignore[method-assign]
    begun = memory.retention_rule()
    assert begun is not None
    return begun
