"""To whom a memory-only node lends."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.agent.node.dispatch import Permissions, Sender
from ckpt.agent.node.inventory_lease import InventoryLease, MemoryLease
from ckpt.agent.node.memory_node import MemoryNode
from ckpt.agent.node.node_jobs import NodeJobs
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


def lent() -> MemoryLease:
    """To an agent "x", which coordinates epoch 1 of launch "a"."""
    made = MemoryLease(1 << 30)
    assert made.lease_for_start("x", "a", take_over=False) == ""
    assert made.borrow("x", terms(ONE)) == ""
    return made


def test_it_lends_to_one_job_at_a_time_until_its_coordinator_is_gone() -> None:
    loan = lent()
    assert loan.lease_for_start("y", "b", take_over=False) == "a"
    assert loan.borrow("y", terms(TWO, launch="b")) == "a"
    loan.on_coordinator_lost("y")
    assert loan.is_connected
    loan.on_coordinator_lost("x")
    assert loan.lease_for_start("y", "b", take_over=False) == ""


@pytest.mark.parametrize(("launch", "take_over"), [("a", False), ("b", True)])
def test_a_restart_of_the_job_and_one_that_takes_over_wait_for_nobody(launch: str, take_over: bool) -> None:
    loan = lent()
    assert loan.lease_for_start("y", launch, take_over) == ""


def test_between_a_starts_question_and_its_epoch_nothing_is_taken_from_anybody() -> None:
    """A coordinator that lives on is fenced: what was listed for the start stays as it is."""
    loan, fence = lent(), InventoryLease({}.__setitem__)
    permissions = Permissions(NodeJobs(), fence, loan.is_coordinator, lambda: False)

    def check(name: str, identity: Identity) -> None:
        fields = {"t": "replicate", "identity": str(identity)}
        permissions.check(Sender.EVICTING_COORDINATOR, SimpleNamespace(peer=name), fields)

    check("x", at(ONE, 5))
    loan.lease_for_start("y", "a", take_over=False)
    fence.take_lease("y", ONE)
    assert loan.borrow("x", terms(ONE)) == "a"
    for name in ("x", "y"):
        for epoch in (ONE, TWO):
            with pytest.raises(AgentError):
                check(name, at(epoch, 5))
    assert loan.claim is None, "nothing is known not to be gone on from"
    loan.borrow("y", terms(TWO, at(ONE, 5)))
    assert fence.on_epoch_begun("y", TWO)
    check("y", at(TWO, 6))
    with pytest.raises(AgentError):
        check("x", at(ONE, 7))
    loan.on_coordinator_lost("x")  # whose connection ends only now
    assert loan.is_connected
    check("y", at(TWO, 6))


def test_an_epoch_that_was_superseded_is_never_lent_to_again() -> None:
    loan = lent()
    loan.lease_for_start("y", "a", take_over=False)
    loan.borrow("y", terms(TWO))
    loan.on_coordinator_lost("y")
    with pytest.raises(Superseded):
        loan.borrow("x", terms(ONE))


def test_of_a_start_that_came_to_nothing_the_job_before_it_has_the_node_again() -> None:
    loan = lent()
    loan.lease_for_start("y", "a", take_over=False)
    loan.on_coordinator_lost("y")
    assert loan.borrow("x", terms(ONE)) == ""
    assert (loan.coordinator, loan.epoch) == ("x", ONE)


def test_only_what_the_new_epoch_did_not_go_on_from_may_go_before_it_has_a_checkpoint() -> None:
    loan = lent()
    loan.lease_for_start("y", "a", take_over=False)
    loan.borrow("y", terms(TWO, at(ONE, 5)))
    for _ in range(2):
        assert loan.claim is not None
        begun = NewestStart(loan.claim.epoch, loan.claim.parent)
        assert [begun.supersedes(at(ONE, step)) for step in (4, 5, 6)] == [True, False, True]
        assert not begun.supersedes(at(TWO, 6))
        loan.on_coordinator_lost("y")


def test_it_commits_only_while_no_coordinator_is_connected() -> None:
    kept = SimpleNamespace(identities={at(ONE, 5)})
    node: Any = SimpleNamespace(lease=lent(), memory=SimpleNamespace(replicas=SimpleNamespace(kept=kept)))
    assert MemoryNode._find_uncoordinated_job(node) is None
    node.lease.on_coordinator_lost("x")
    job = MemoryNode._find_uncoordinated_job(node)
    assert job is not None
    assert set(job.terms) == {ONE}
    kept.identities.clear()
    assert MemoryNode._find_uncoordinated_job(node) is None


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
