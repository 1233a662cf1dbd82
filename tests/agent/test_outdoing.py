"""Which checkpoint may go for which."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any, cast

from ckpt.agent.lending import LendingNode
from ckpt.agent.outdoing import Begun, Safety, may_go
from ckpt.types import Epoch, Identity, Tick

ONE, TWO, THREE = (Epoch(number, f"{number:016x}") for number in (1, 2, 3))


def test_a_checkpoint_goes_for_none_that_is_less_safe_unless_it_is_in_the_store() -> None:
    for older, newer in product(Safety, repeat=2):
        assert may_go(older, newer) == (newer >= older or older is Safety.STORE)
    assert not may_go(Safety.WHOLE, Safety.PART)
    assert not may_go(Safety.WHOLE, Safety.HERE)
    assert may_go(Safety.WHOLE, Safety.STORE)


def test_of_earlier_starts_what_was_gone_on_from_and_what_is_safe_stay() -> None:
    parent, safe = Identity(TWO, Tick(9)), Identity(ONE, Tick(5))
    begun = Begun(THREE, parent, safe)
    others = Identity(ONE, Tick(4)), Identity(TWO, Tick(8)), Identity(TWO, Tick(10))
    assert not any(map(begun.outdates, (parent, safe, Identity(THREE, Tick(10)))))
    assert all(map(begun.outdates, others))
    assert not any(map(begun.outdates_all_of, (ONE, TWO, THREE)))
    assert Begun(THREE, parent).outdates_all_of(ONE)
    assert not Begun(THREE, None, safe).outdates_all_of(ONE)


def test_a_memory_only_node_that_has_all_of_what_was_gone_on_from_keeps_nothing_older() -> None:
    """Else nothing newer fits beside the two, where it lends no more than twice what a job has."""
    parent, safe = Identity(TWO, Tick(9)), Identity(ONE, Tick(5))
    for kept, goes in (((safe, parent), True), ((safe,), False)):
        whole = [SimpleNamespace(identity=identity) for identity in kept]
        told = SimpleNamespace(claim=SimpleNamespace(epoch=THREE, parent=parent))
        node = SimpleNamespace(_loan=told, _begun_with=lambda _: Begun(THREE, parent, safe), _whole=lambda of=whole: of)
        begun = LendingNode._begun(cast(Any, node))
        assert begun is not None
        assert (begun.outdates(safe), begun.outdates_all_of(ONE)) == (goes, goes)
        assert not begun.outdates(parent)
