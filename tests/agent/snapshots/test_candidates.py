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


FIRST, SECOND = Claim(ONE, None), Claim(TWO, at(ONE, 30))
DOWN = [MemoryEpoch(FIRST, (at(ONE, 30),)), MemoryEpoch(SECOND, ())]  # the store was down for the second start
LEFT = MemoryEpoch(None, (at(ONE, 30), at(ONE, 40)))  # nobody is left who was there in the first epoch

# What the store says, what memory has, and of each candidate: its step, whether memory has it, its records.
CASES = {
    "nothing anywhere": (view(), [], []),
    "the newest comes first": (view(FIRST, commits=(at(ONE, 10), at(ONE, 20))), [], [(20, False, 1), (10, False, 1)]),
    "memory has a newer one": (
        view(FIRST, commits=(at(ONE, 10),)),
        [MemoryEpoch(FIRST, (at(ONE, 20),))],
        [(20, True, 0), (10, False, 1)],
    ),
    "both have it": (view(FIRST, commits=(at(ONE, 10),)), [MemoryEpoch(FIRST, (at(ONE, 10),))], [(10, True, 1)]),
    "a later start went on from an older one": (
        view(FIRST, Claim(TWO, at(ONE, 10)), commits=(at(ONE, 10),)),
        [MemoryEpoch(FIRST, (at(ONE, 20),))],
        [(10, False, 1)],
    ),
    "the store does not answer": (None, DOWN, [(30, True, 0)]),
    "the store never heard of the second start": (
        view(FIRST, commits=(at(ONE, 10),)),
        DOWN,
        [(30, True, 0), (10, False, 1)],
    ),
    "who keeps it came later, and the store knows its epoch": (
        view(FIRST),
        [LEFT, MemoryEpoch(SECOND, ())],
        [(30, True, 0)],
    ),
    "who keeps it came later, and knows what it went on from": (
        None,
        [LEFT, MemoryEpoch(Claim(TWO, at(ONE, 30), (Ancestor(ONE, None),)), ())],
        [(30, True, 0)],
    ),
    "nothing says anything about it": (view(), [LEFT], []),
    "it was retired": (
        view(FIRST, commits=(at(ONE, 10), at(ONE, 20)), retired=(at(ONE, 20),)),
        [MemoryEpoch(FIRST, (at(ONE, 20),))],
        [(10, False, 1)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_start_goes_on_from_the_newest_of_the_line_and_from_memory_first(case: str) -> None:
    found = find_candidates(*CASES[case][:2])
    assert [(each.identity.version.step, each.in_memory, len(each.records)) for each in found] == CASES[case][2]
    assert {each.identity.epoch for each in found} <= {ONE}


def test_a_line_that_cannot_be_followed_is_an_error_and_not_a_fresh_run() -> None:
    with pytest.raises(DamagedData):
        find_candidates(view(Claim(THREE, at(TWO, 5))), [])


def test_a_new_epoch_is_above_all_that_is_known_anywhere() -> None:
    unclaimed = MemoryEpoch(Claim(TWO, at(ONE, 5), (Ancestor(ONE, None),)), ())
    assert choose_epoch(view(), [], []).number == 1
    assert choose_epoch(None, DOWN, []).number == choose_epoch(view(FIRST), [unclaimed], []).number == 3
    assert choose_epoch(view(FIRST), [unclaimed], [THREE]).number == 4


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
