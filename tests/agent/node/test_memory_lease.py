"""To whom a memory-only node lends, and when it commits by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.agent.node.memory_lease import RETRY_S, RETRY_S_MAX, MemoryLease
from ckpt.agent.state.retention_rule import NewestStart
from ckpt.errors import AgentError, CkptError, Superseded
from ckpt.store.lineage import Ancestor, Claim
from ckpt.types import Epoch, Identity, Version
from tests.agent.nodes.staged import spoiled

ONE, TWO, THREE = (Epoch(number, f"{number:016x}") for number in (1, 2, 3))


def at(epoch: Epoch, step: int) -> Identity:
    return Identity(epoch, Version(step))


def terms(epoch: Epoch, parent: Identity | None = None, launch: str = "a") -> CommitTerms:
    return CommitTerms(Claim(epoch, parent, (), launch, "host", 1.5), "raw", 100.0)


def lent(commit_after_s: float = 10.0) -> MemoryLease:
    """To an agent "x", which coordinates epoch 1 of launch "a"."""
    made = MemoryLease(commit_after_s, 0.0)
    assert made.lease_for_start("x", "a", take_over=False) == ""
    assert made.borrow("x", terms(ONE)) == ""
    return made


def test_it_lends_to_one_job_at_a_time_until_its_coordinator_is_gone() -> None:
    loan = lent()
    assert loan.lease_for_start("y", "b", take_over=False) == "a"
    assert loan.borrow("y", terms(TWO, launch="b")) == "a"
    loan.check("x", at(ONE, 5))
    loan.on_coordinator_lost("x", 1.0)
    assert loan.lease_for_start("y", "b", take_over=False) == ""


@pytest.mark.parametrize(("launch", "take_over"), [("a", False), ("b", True)])
def test_a_restart_of_the_job_and_one_that_takes_over_wait_for_nobody(launch: str, take_over: bool) -> None:
    loan = lent()
    assert loan.lease_for_start("y", launch, take_over) == ""


def test_between_a_starts_question_and_its_epoch_nothing_is_taken_from_anybody() -> None:
    """A coordinator that lives on is fenced: what was listed for the start stays as it is."""
    loan = lent()
    loan.lease_for_start("y", "a", take_over=False)
    assert loan.borrow("x", terms(ONE)) == "a"
    for name in ("x", "y"):
        for epoch in (ONE, TWO):
            with pytest.raises(AgentError):
                loan.check(name, at(epoch, 5))
    assert loan.claim is None, "nothing is known not to be gone on from"
    loan.borrow("y", terms(TWO, at(ONE, 5)))
    loan.check("y", at(TWO, 6))
    with pytest.raises(AgentError):
        loan.check("x", at(ONE, 7))
    loan.on_coordinator_lost("x", 1.0)  # whose connection ends only now
    loan.check("y", at(TWO, 6))


def test_an_epoch_that_was_superseded_is_never_lent_to_again() -> None:
    loan = lent()
    loan.lease_for_start("y", "a", take_over=False)
    loan.borrow("y", terms(TWO))
    loan.on_coordinator_lost("y", 1.0)
    with pytest.raises(Superseded):
        loan.borrow("x", terms(ONE))


def test_of_a_start_that_came_to_nothing_the_job_before_it_has_the_node_again() -> None:
    loan = lent()
    loan.lease_for_start("y", "a", take_over=False)
    loan.on_coordinator_lost("y", 1.0)
    assert loan.borrow("x", terms(ONE)) == ""
    loan.check("x", at(ONE, 7))


def test_only_what_the_new_epoch_did_not_go_on_from_may_go_before_it_has_a_checkpoint() -> None:
    loan = lent()
    loan.lease_for_start("y", "a", take_over=False)
    loan.borrow("y", terms(TWO, at(ONE, 5)))
    for _ in range(2):
        assert loan.claim is not None
        begun = NewestStart(loan.claim.epoch, loan.claim.parent)
        assert [begun.supersedes(at(ONE, step)) for step in (4, 5, 6)] == [True, False, True]
        assert not begun.supersedes(at(TWO, 6))
        loan.on_coordinator_lost("y", 1.0)


def test_it_commits_only_while_nobody_is_there_and_has_not_been_for_a_while() -> None:
    loan = lent(10.0)
    assert loan.commit_due_s(at(ONE, 5)) is None
    loan.on_coordinator_lost("x", 100.0)
    assert loan.commit_due_s(None) is None
    assert loan.commit_due_s(at(ONE, 5)) == 110.0
    loan.borrow("x", terms(ONE))
    assert loan.commit_due_s(at(ONE, 5)) is None
    loan.on_coordinator_lost("x", 200.0)
    assert loan.commit_due_s(at(ONE, 5)) == 210.0


def test_what_is_settled_is_left_alone_until_somebody_was_there_again() -> None:
    loan = lent(10.0)
    loan.on_coordinator_lost("x", 0.0)
    loan.record_commit_attempt(at(ONE, 5), True, 20.0)
    assert loan.commit_due_s(at(ONE, 5)) is None
    loan.borrow("x", terms(ONE))
    loan.on_coordinator_lost("x", 100.0)
    assert loan.commit_due_s(at(ONE, 5)) == 110.0  # the other ranks' part may have come meanwhile


def test_what_failed_is_tried_again_ever_more_rarely_and_for_ever() -> None:
    loan = lent(10.0)
    loan.on_coordinator_lost("x", 0.0)
    waits = []
    for _ in range(40):
        loan.record_commit_attempt(at(ONE, 5), False, 1000.0)
        waits.append((loan.commit_due_s(at(ONE, 5)) or 0.0) - 1000.0)
    assert waits[:3] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S]
    assert waits[-1] == RETRY_S_MAX


def test_terms_are_kept_as_long_as_something_of_their_epoch_is() -> None:
    loan = lent()
    loan.borrow("x", terms(TWO))
    loan.drop_old_terms({ONE})
    assert set(loan.terms) == {ONE, TWO}
    loan.drop_old_terms(set())
    assert set(loan.terms) == {TWO}


def test_the_claim_arrives_as_it_is_so_that_whoever_puts_it_puts_the_same_bytes() -> None:
    claim = Claim(THREE, at(TWO, 7), (Ancestor(TWO, at(ONE, 5)), Ancestor(ONE, None)), "launch", "host", 1.25)
    claim = replace(claim, secret_name="r", agents=(("a", ("10.0.0.1:7",)),))
    sent = CommitTerms(claim, "planes", None)
    assert CommitTerms.parse(sent.fields()) == sent


def test_terms_that_are_none_are_an_error_and_nothing_else() -> None:
    right = CommitTerms(Claim(TWO, at(ONE, 5), (Ancestor(ONE, None),), "launch", "host", 1.25), "raw", 5.0).fields()
    for wrong in spoiled(right):
        try:
            CommitTerms.parse(wrong)
        except (CkptError, ValueError, TypeError, LookupError, AttributeError, OverflowError):
            continue
