"""Whose word has something dropped while starts ask what lies here."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.agent.node.coordinator import FrozenWatch
from ckpt.agent.node.dispatch import epoch_of
from ckpt.agent.node.inventory_lease import LEASE_TIMEOUT_S, InventoryLease
from ckpt.errors import AgentError
from ckpt.types import OWN_NODE, Epoch

ONE, TWO, THREE = (Epoch(number, f"{number:016x}") for number in (1, 2, 3))


Later = dict[float, Callable[[], None]]


def asked(later: Later | None = None) -> InventoryLease:
    """By "y", where "x" coordinates epoch 1. `later`: receives its timers."""
    made = InventoryLease((later if later is not None else {}).__setitem__)
    made.take_lease("y", ONE)
    return made


def test_until_the_outcome_no_epoch_that_was_known_has_anything_dropped_whoever_says_it() -> None:
    fence = asked()
    for by in ("x", "y", OWN_NODE):
        with pytest.raises(AgentError, match="asked what lies here"):
            fence.check(by, ONE)
    assert fence.refusal("y", TWO) == ""
    assert fence.refusal("x", TWO)


def test_once_it_has_begun_it_alone_decides_and_older_epochs_never_again() -> None:
    fence = asked()
    assert fence.on_epoch_begun("y", TWO)
    assert not fence.is_held
    assert fence.refusal("x", ONE)
    assert fence.refusal("y", TWO) == fence.refusal("z", THREE) == ""


def test_whoever_has_not_asked_or_names_an_epoch_that_was_there_before_has_begun_nothing() -> None:
    fence = asked()
    assert not fence.on_epoch_begun("x", TWO)
    assert not fence.on_epoch_begun("y", ONE)
    assert fence.is_held
    assert fence.refusal("x", ONE)


def test_a_start_that_comes_to_nothing_leaves_everything_as_it_was() -> None:
    fence = asked()
    fence.end_lease("y")
    assert fence.refusal("x", ONE) == ""


def test_a_start_whose_coordinator_is_gone_is_over_after_a_bound_and_not_before() -> None:
    later: Later = {}
    fence = asked(later)
    fence.on_holder_lost("x")  # who has asked nothing
    assert not later
    fence.on_holder_lost("y")
    expire = later.pop(LEASE_TIMEOUT_S)
    fence.on_holder_lost("y")
    assert not later
    assert fence.refusal("x", ONE)
    expire()
    assert fence.refusal("x", ONE) == ""
    assert not fence.on_epoch_begun("y", TWO), "its word comes too late"


def test_one_that_is_connected_again_is_waited_for() -> None:
    later: Later = {}
    fence = asked(later)
    fence.on_holder_lost("y")
    expire = later[LEASE_TIMEOUT_S]
    fence.on_holder_connected("y")
    fence.on_holder_lost("y")
    expire()
    assert fence.is_held
    later[LEASE_TIMEOUT_S]()
    assert not fence.is_held


def test_the_start_that_asked_last_counts_and_ends_those_before_it() -> None:
    fence = asked()
    fence.take_lease("z", ONE)
    assert fence.refusal("y", TWO)
    assert fence.on_epoch_begun("z", THREE)
    assert not fence.has_lease("y")
    assert fence.refusal("y", TWO)


def test_one_that_begins_while_a_newer_one_asks_has_nothing_dropped() -> None:
    fence = asked()
    fence.take_lease("z", ONE)
    assert fence.on_epoch_begun("y", TWO)
    assert fence.refusal("y", TWO)
    fence.end_lease("z")
    assert fence.refusal("y", TWO) == ""


def test_the_epoch_is_the_one_that_is_named_or_that_of_the_checkpoint() -> None:
    assert epoch_of({"epoch": str(TWO), "identity": f"{ONE}-000000000005.0000"}) == TWO
    assert epoch_of({"identity": f"{ONE}-000000000005.0000"}) == ONE


def test_who_asks_for_what_a_job_has_left_holds_it_too_and_others_may_ask_beside() -> None:
    fence = InventoryLease({}.__setitem__)
    for by in ("x", "y"):
        fence.take_lease(by, ONE, for_orphans=True)
    fence.end_lease("x")
    with pytest.raises(AgentError, match="asked what lies here"):
        fence.check("x", ONE)
    fence.end_lease("y")
    fence.check("x", ONE)


def test_where_a_start_has_asked_nobody_else_does_for_what_a_job_has_left() -> None:
    fence = asked()
    with pytest.raises(AgentError, match="a start has asked"):
        fence.take_lease("x", ONE, for_orphans=True)
    assert fence.on_epoch_begun("y", TWO)
    fence.take_lease("x", TWO, for_orphans=True)


def test_a_start_waits_for_no_outcome_of_what_was_to_be_done_with_what_is_left() -> None:
    """It may have asked before, and the outcome may be lost."""
    fence = InventoryLease({}.__setitem__)
    fence.take_lease("x", ONE, for_orphans=True)
    fence.take_lease("y", ONE)
    assert not fence.has_lease("x")
    assert fence.on_epoch_begun("y", TWO)
    assert fence.refusal("y", TWO) == ""


class Node:
    """Its job of several nodes, as far as the lease says what becomes of it; and what that is told."""

    def __init__(self) -> None:
        self.inventory_lease = asked()
        self.watch = FrozenWatch(self.inventory_lease)
        self.told: list[tuple[Any, ...]] = []
        self.begin(ONE)

    def begin(self, epoch: Epoch) -> None:
        facts = SimpleNamespace(is_frozen=False, all_gone=False, superseded_by="")
        emit = lambda *event: self.told.append(event)  # noqa: E731
        self.disconnected_ranks: list[dict[str, Any]] = []
        self.job = SimpleNamespace(
            epoch=epoch,
            scheduler=SimpleNamespace(facts=facts),
            context=SimpleNamespace(emit=emit),
            disconnected_ranks=lambda: self.disconnected_ranks,
        )

    def tend(self, now_s: float) -> tuple[float | None, int]:
        """When it looks again, and how often its job was told that it is frozen."""
        self.job.scheduler.facts.is_frozen = bool(self.inventory_lease.refusal(OWN_NODE, self.job.epoch))
        return self.watch.update(cast(Any, self.job), now_s), len(self.told)


def test_a_job_that_stays_frozen_longer_than_a_bound_is_told_so_loudly_and_once() -> None:
    node = Node()
    assert node.tend(5.0) == (5.0 + LEASE_TIMEOUT_S, 0)
    assert node.tend(4.9 + LEASE_TIMEOUT_S) == (5.0 + LEASE_TIMEOUT_S, 0)
    assert node.tend(5.0 + LEASE_TIMEOUT_S) == (None, 1)
    name, message, loud, facts = node.told[0]
    assert (name, loud) == ("job.frozen", True)
    assert "agent y" in message
    assert facts["reason"] in message
    assert node.tend(1e9) == (None, 1)


def test_a_job_that_older_epochs_words_are_refused_for_good_hears_to_be_started_again() -> None:
    node = Node()
    node.inventory_lease.on_epoch_begun("y", TWO)
    node.tend(0.0)
    assert node.tend(LEASE_TIMEOUT_S) == (None, 1)
    assert f"{TWO} has begun" in node.told[0][1]
    assert "start the job again" in node.told[0][1]


def test_what_froze_it_only_for_a_while_and_again_is_not_told() -> None:
    node = Node()
    node.tend(0.0)
    node.inventory_lease.end_lease("y")
    assert node.tend(LEASE_TIMEOUT_S - 1) == (None, 0)
    node.inventory_lease.take_lease("y", ONE)
    assert node.tend(LEASE_TIMEOUT_S) == (2 * LEASE_TIMEOUT_S, 0)
    node.begin(Epoch(1, "f" * 16))  # and that of a job before it does not count
    node.inventory_lease.take_lease("z", TWO)
    assert node.tend(2 * LEASE_TIMEOUT_S) == (3 * LEASE_TIMEOUT_S, 0)


def test_a_job_that_takes_no_snapshots_since_a_node_is_cut_off_from_it_is_told_so_loudly_and_once() -> None:
    node = Node()
    node.inventory_lease.end_lease("y")
    node.disconnected_ranks = [{"node": None, "ranks": [0]}]  # this node's own rank says itself that it has no agent
    assert node.tend(5.0) == (None, 0)
    node.disconnected_ranks += [{"node": "b", "ranks": [1]}, {"node": "c", "ranks": [2]}]
    assert node.tend(5.0) == (5.0 + LEASE_TIMEOUT_S, 0)
    assert node.tend(5.0 + LEASE_TIMEOUT_S) == (None, 1)
    name, message, loud, facts = node.told[0]
    assert (name, loud) == ("job.frozen", True)
    assert "node b, node c" in message
    assert "ckpt watch" in message
    assert facts["reason"] in message
    assert node.tend(1e9) == (None, 1)
    node.disconnected_ranks = []
    node.tend(2e9)
    node.disconnected_ranks = [{"node": "b", "ranks": [1]}]
    node.tend(3e9)
    assert node.tend(3e9 + LEASE_TIMEOUT_S) == (None, 2)


@pytest.mark.parametrize("gone", [{"all_gone": True}, {"superseded_by": "another"}])
def test_a_job_that_nobody_trains_or_that_hears_to_leave_is_told_nothing_more(gone: dict[str, Any]) -> None:
    node = Node()
    vars(node.job.scheduler.facts).update(gone)
    node.disconnected_ranks = [{"node": "b", "ranks": [1]}]
    node.tend(0.0)
    assert node.tend(1e9) == (None, 0)
