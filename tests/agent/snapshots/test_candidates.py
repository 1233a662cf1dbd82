"""What a start goes on from, for everything that store and memory may know."""

from __future__ import annotations

import pytest

from ckpt.agent.snapshots.candidates import MemoryEpoch, choose_epoch, find_candidates, unclaimed_ancestors
from ckpt.errors import DamagedData
from ckpt.store.lineage import Ancestor, Claim, CommitRef
from ckpt.store.run import RunView
from ckpt.types import Epoch, Identity, Version

ONE, TWO, THREE = (Epoch(n, f"{n:016x}") for n in (1, 2, 3))


def at(epoch: Epoch, step: int) -> Identity:
    return Identity(epoch, Version(step))


def view(*claims: Claim, commits: tuple[Identity, ...] = (), retired: tuple[Identity, ...] = ()) -> RunView:
    refs = tuple(CommitRef(identity, "w", 10) for identity in commits)
    gone = dict.fromkeys(retired, 0.0)
    return RunView(claims, frozenset(c.epoch for c in claims), refs, gone, frozenset(), {})


def test_nothing_anywhere_is_a_fresh_run() -> None:
    assert find_candidates(view(), []) == []
    assert choose_epoch(view(), [], []).number == 1


def test_the_newest_of_the_line_comes_first() -> None:
    found = find_candidates(view(Claim(ONE, None), commits=(at(ONE, 10), at(ONE, 20))), [])
    assert [each.identity.version.step for each in found] == [20, 10]
    assert not found[0].in_memory


def test_memory_that_is_newer_than_the_store_wins() -> None:
    claim = Claim(ONE, None)
    found = find_candidates(view(claim, commits=(at(ONE, 10),)), [MemoryEpoch(claim, (at(ONE, 20),))])
    assert [(each.identity.version.step, each.in_memory) for each in found] == [(20, True), (10, False)]


def test_at_equal_identity_memory_is_used_and_the_store_stands_behind_it() -> None:
    claim = Claim(ONE, None)
    found = find_candidates(view(claim, commits=(at(ONE, 10),)), [MemoryEpoch(claim, (at(ONE, 10),))])
    assert [(each.in_memory, len(each.records)) for each in found] == [(True, 1)]


def test_memory_of_a_branch_that_the_run_has_left_is_no_candidate() -> None:
    """A later start went on from step 10; what this node holds of step 20 is a branch."""
    first, second = Claim(ONE, None), Claim(TWO, at(ONE, 10))
    found = find_candidates(view(first, second, commits=(at(ONE, 10),)), [MemoryEpoch(first, (at(ONE, 20),))])
    assert [each.identity for each in found] == [at(ONE, 10)]


def test_epochs_that_the_store_never_heard_of_are_on_the_line() -> None:
    """The store was down for the second start, which died without a checkpoint of its own."""
    first, second = Claim(ONE, None), Claim(TWO, at(ONE, 30))
    remembered = [MemoryEpoch(first, (at(ONE, 30),)), MemoryEpoch(second, ())]
    for known in (None, view(first, commits=(at(ONE, 10),))):
        assert find_candidates(known, remembered)[0].identity == at(ONE, 30)
        assert choose_epoch(known, remembered, []).number == 3


@pytest.mark.parametrize("in_store", [True, False])
def test_what_memory_has_of_an_epoch_is_on_the_line_though_nobody_who_was_there_is_left(in_store: bool) -> None:
    """Who keeps it came later, and knows only what the later start knew."""
    behind = () if in_store else (Ancestor(ONE, None),)
    remembered = [MemoryEpoch(None, (at(ONE, 30), at(ONE, 40))), MemoryEpoch(Claim(TWO, at(ONE, 30), behind), ())]
    found = find_candidates(view(Claim(ONE, None)) if in_store else None, remembered)
    assert [(each.identity, each.in_memory) for each in found] == [(at(ONE, 30), True)]
    assert choose_epoch(None, remembered, []).number == 3


def test_what_nothing_says_anything_about_is_no_candidate() -> None:
    assert find_candidates(view(), [MemoryEpoch(None, (at(ONE, 30),))]) == []


def test_what_was_retired_is_no_candidate() -> None:
    claim = Claim(ONE, None)
    retired = view(claim, commits=(at(ONE, 10), at(ONE, 20)), retired=(at(ONE, 20),))
    assert [each.identity for each in find_candidates(retired, [MemoryEpoch(claim, (at(ONE, 20),))])] == [at(ONE, 10)]


def test_a_line_that_cannot_be_followed_is_an_error_and_not_a_fresh_run() -> None:
    with pytest.raises(DamagedData):
        find_candidates(view(Claim(THREE, at(TWO, 5))), [])


def test_a_new_epoch_is_above_all_that_is_known_anywhere() -> None:
    unclaimed = Claim(TWO, at(ONE, 5), (Ancestor(ONE, None),))
    assert choose_epoch(view(Claim(ONE, None)), [MemoryEpoch(unclaimed, ())], [THREE]).number == 4


@pytest.mark.parametrize(
    ("claims", "in_store", "found"),
    [
        ([], [], ()),
        ([Claim(TWO, at(ONE, 5))], [TWO], ()),
        ([Claim(TWO, at(ONE, 5))], [], (Ancestor(TWO, at(ONE, 5)),)),
        ([Claim(TWO, at(ONE, 5)), Claim(ONE, None)], [], (Ancestor(TWO, at(ONE, 5)), Ancestor(ONE, None))),
        ([Claim(TWO, at(ONE, 5)), Claim(ONE, None)], [ONE], (Ancestor(TWO, at(ONE, 5)),)),
        # nobody is left who was there in the second epoch, but somebody who went on from it
        (
            [Claim(THREE, at(TWO, 7), (Ancestor(TWO, at(ONE, 5)), Ancestor(ONE, None)))],
            [],
            (Ancestor(TWO, at(ONE, 5)), Ancestor(ONE, None)),
        ),
    ],
)
def test_what_an_epoch_goes_on_from_is_named_back_to_what_the_store_knows(
    claims: list[Claim], in_store: list[Epoch], found: tuple[Ancestor, ...]
) -> None:
    assert unclaimed_ancestors(at(TWO, 7), claims, in_store.__contains__) == found
    assert unclaimed_ancestors(None, claims, in_store.__contains__) == ()
