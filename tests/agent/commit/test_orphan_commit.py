"""What a node that survives the coordinator may commit, whatever began meanwhile."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.agent.commit.orphan_commit import OrphanVerdict, commit_orphan, judge
from ckpt.agent.commit.store_client import StoreClient
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint
from ckpt.errors import Superseded
from ckpt.store.lineage import Ancestor, Claim, CommitRef
from ckpt.store.run import RunView
from ckpt.types import Epoch, Identity, Version

A = Epoch(5, "a" * 16)


def at(epoch: Epoch, step: int) -> Identity:
    return Identity(epoch, Version(step))


def view(
    claims: tuple[Claim, ...] = (), commits: tuple[Identity, ...] = (), retired: tuple[Identity, ...] = ()
) -> RunView:
    refs = tuple(CommitRef(each, "w", 1) for each in commits)
    epochs = frozenset(claim.epoch for claim in claims) | {each.epoch for each in commits}
    return RunView(claims, epochs, refs, dict.fromkeys(retired, 0.0), frozenset(), {})


CLAIM = Claim(A, None)


def later(parent: Identity | None, number: int = 6, nonce: str = "b", ancestors: tuple[Ancestor, ...] = ()) -> Claim:
    return Claim(Epoch(number, nonce * 16), parent, ancestors)


CASES = {
    "its epoch is the newest": (view((CLAIM,)), OrphanVerdict.COMMIT),
    "the store knows nothing": (view(), OrphanVerdict.CLAIM),
    "the store knows an older epoch, of which it knows nothing": (view((later(None, 4),)), OrphanVerdict.OBSOLETE),
    "it is committed": (view((CLAIM,), (at(A, 20),)), OrphanVerdict.DONE),
    "a newer one is": (view((CLAIM,), (at(A, 30),)), OrphanVerdict.DONE),
    "an older one is": (view((CLAIM,), (at(A, 10),)), OrphanVerdict.COMMIT),
    "it was retired": (view((CLAIM,), (), (at(A, 20),)), OrphanVerdict.OBSOLETE),
    "a start went on from it": (view((CLAIM, later(at(A, 20)))), OrphanVerdict.COMMIT),
    "a start went on from it, and has committed": (
        view((CLAIM, later(at(A, 20))), (at(Epoch(6, "b" * 16), 25),)),
        OrphanVerdict.DONE,
    ),
    "a start went on from a later one": (view((CLAIM, later(at(A, 30)))), OrphanVerdict.COMMIT),
    "a start went on from an older one": (view((CLAIM, later(at(A, 10)))), OrphanVerdict.OBSOLETE),
    "a start began from nothing": (view((CLAIM, later(None))), OrphanVerdict.OBSOLETE),
    "its epoch is not claimed, and a start that knew it went on from it": (
        view((later(at(A, 20), ancestors=(Ancestor(A, None),)),)),
        OrphanVerdict.COMMIT,
    ),
    "its epoch is not claimed, and a start that did not know it began": (view((later(None),)), OrphanVerdict.OBSOLETE),
    "its epoch is not claimed, and one of the same number, a smaller nonce, is": (
        view((later(None, 5, "0"),)),
        OrphanVerdict.OBSOLETE,
    ),
    "its epoch is not claimed, and one of the same number, a larger nonce, is": (
        view((later(None, 5, "f"),)),
        OrphanVerdict.OBSOLETE,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_committed_where_it_is_on_the_line_and_not_otherwise(case: str) -> None:
    found, verdict = CASES[case]
    assert judge(found, CLAIM, at(A, 20)) is verdict


def test_an_epoch_is_claimed_late_where_the_store_ends_with_one_that_it_went_on_from() -> None:
    """And not where a start that knew neither it nor the one before has taken a smaller number than its own."""
    first, second = Claim(Epoch(4, "e" * 16), None), Claim(A, at(Epoch(4, "e" * 16), 15))
    assert judge(view((first,)), second, at(A, 20)) is OrphanVerdict.CLAIM
    assert judge(view((first, later(None, 4, "f"))), second, at(A, 20)) is OrphanVerdict.OBSOLETE


def stories(rng: random.Random) -> Iterator[tuple[RunView, Claim, Identity]]:
    """What a store may hold: a few epochs that went on from each other or from nothing, some of them never claimed,
    some of their checkpoints committed or retired. And one of the epochs, with a checkpoint that only a node has."""
    while True:
        made: list[Claim] = []
        numbers = itertools.count(1)
        for _ in range(rng.randint(1, 5)):
            number = next(numbers) if rng.random() < 0.8 or not made else made[-1].epoch.number
            older = [each for each in made if each.epoch.number < number]
            parent = at(rng.choice(older).epoch, rng.randint(1, 4)) if older and rng.random() < 0.8 else None
            chain: list[Ancestor] = []
            back = next((each for each in made if parent is not None and each.epoch == parent.epoch), None)
            while back is not None:
                chain.append(Ancestor(back.epoch, back.parent))
                wanted = back.parent.epoch if back.parent is not None else None
                back = next((each for each in made if each.epoch == wanted), None)
            made.append(Claim(Epoch(number, f"{rng.getrandbits(64):016x}"), parent, tuple(chain)))
        known = tuple(sorted((each for each in made if rng.random() < 0.7), key=lambda each: each.epoch))
        every = [at(each.epoch, step) for each in known for step in range(1, 5)]
        some = tuple(sorted(each for each in every if rng.random() < 0.2))
        gone = tuple(each for each in some if rng.random() < 0.1)
        whose = rng.choice(made)
        yield view(known, some, gone), whose, at(whose.epoch, rng.randint(1, 4))


def test_no_commit_takes_anything_from_the_line_or_the_run_from_a_start_that_the_store_knows(seed: int) -> None:
    rng = random.Random(seed)
    seen = set()
    for found, claim, identity in itertools.islice(stories(rng), 5000):
        verdict = judge(found, claim, identity)
        seen.add(verdict)
        before = [ref.identity for ref in found.history]
        claims = (*found.claims, claim) if verdict is OrphanVerdict.CLAIM else found.claims
        epochs = found.epochs | {identity.epoch} | {each.epoch for each in claims}
        refs = (*found.commits, CommitRef(identity, "z", 1))
        after = replace(found, claims=claims, epochs=epochs, commits=refs)
        if verdict is OrphanVerdict.CLAIM:
            chain = [each for each, _ in after.lineage.ancestry(claim.epoch)]
            assert found.newest_epoch is None or found.newest_epoch in chain
        if verdict is OrphanVerdict.COMMIT:
            assert after.newest_epoch == found.newest_epoch
        if verdict in (OrphanVerdict.COMMIT, OrphanVerdict.CLAIM):
            assert after.history[-1].identity == identity
        if verdict is OrphanVerdict.COMMIT:
            assert [ref.identity for ref in after.history] == [*before, identity]
    assert seen == set(OrphanVerdict)


@pytest.mark.parametrize("then", [later(at(A, 10)), later(at(A, 20))])
def test_whether_it_is_still_due_is_looked_at_again_just_before_the_record(then: Claim) -> None:
    """A start may have begun while its packs were put."""
    views = [view((CLAIM,)), view((CLAIM, then))]
    store = SimpleNamespace(
        open_run=lambda: SimpleNamespace(view=lambda: views.pop(0)),
        put_checkpoint=lambda claim, made, codec, bandwidth, about, check, *more: check(),
    )
    made = SimpleNamespace(identity=at(A, 20), manifest=SimpleNamespace(coordinates=()), differing_tensors=())
    given = cast(StoreClient, store), cast(MemoryCheckpoint, made), CommitTerms(CLAIM, "raw", None), threading.Event()
    if then.parent == made.identity:
        commit_orphan(*given)
    else:
        with pytest.raises(Superseded, match="no longer in the history"):
            commit_orphan(*given)
    assert not views
