"""What a job goes on from, found again once its coordinator's agent was started again: whom that asks, until when."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from ckpt.agent.replication import rereplicate
from ckpt.agent.replication.restart_survey import Next, RestartSurvey, merge_answers, next_action
from ckpt.agent.replication.survey import KeptReplica
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.agent.snapshots.manifest_gather import FramePlaces
from ckpt.types import Epoch, Identity, Version

WHICH = Identity(Epoch(2, "0" * 16), Version(5))
PLACES = cast(FramePlaces, object())


def keeps(*ranks: int) -> KeptReplica:
    held = Inventory()
    held.add_local_snapshots(WHICH, 3, ranks)
    return KeptReplica(None, held)


def every(**nodes: KeptReplica) -> Inventory:
    return merge_answers(nodes, "me")


@pytest.mark.parametrize("all_said", [True, False])
@pytest.mark.parametrize(
    ("nodes", "whole"),
    [
        ({}, False),
        ({"me": keeps()}, False),
        ({"me": keeps(0), "a": keeps(1)}, False),
        ({"me": keeps(0), "a": keeps(1, 2)}, True),
        ({"a": keeps(0, 1, 2), "b": keeps(2)}, True),
    ],
)
def test_it_is_put_together_where_all_of_it_is_there_and_who_has_not_answered_is_waited_for_only_where_not(
    nodes: dict[str, KeptReplica], whole: bool, all_said: bool
) -> None:
    expected = Next.COLLECT if whole else Next.STOP if all_said else Next.RETRY
    assert next_action(merge_answers(nodes, "me"), WHICH, all_said) is expected


def test_what_this_node_has_is_told_apart_from_what_others_have() -> None:
    assert every(me=keeps(0, 1), a=keeps(1)).holders == {(WHICH, 0): [""], (WHICH, 1): ["", "a"]}


class Asking:
    """A test answers for the nodes, and for who puts together what they have."""

    def __init__(self) -> None:
        self.asked: list[Callable[[Inventory, bool], None]] = []
        self.collecting: list[Callable[[FramePlaces | None, str], None]] = []
        self.found: list[Inventory] = []
        self.waits: list[float] = []
        self.refinding = RestartSurvey(
            WHICH,
            self.asked.append,
            lambda inventory, then: self.collecting.append(then),
            lambda places, inventory: self.found.append(inventory),
            lambda delay_s, what: self.waits.append(delay_s),
        )

    def tend(self) -> None:
        """As after anything happened."""
        if self.refinding.is_due:
            self.refinding.begin_survey()

    def say(self, all_said: bool, **nodes: KeptReplica) -> None:
        self.asked.pop()(every(**nodes), all_said)
        self.tend()

    def collect(self, places: FramePlaces | None) -> None:
        self.collecting.pop()(places, "" if places is not None else "it is damaged there")
        self.tend()


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> Asking:
    monkeypatch.setattr(rereplicate, "RETRY_S_MAX", 0.0)
    made = Asking()
    made.tend()
    assert len(made.asked) == 1
    return made


def test_what_all_have_together_is_found_once(asking: Asking) -> None:
    asking.tend()
    assert len(asking.asked) == 1, "nobody is asked twice at once"
    asking.say(True, a=keeps(0, 1), b=keeps(2))
    assert not asking.found
    asking.collect(PLACES)
    assert [sorted(each.holders) for each in asking.found] == [[(WHICH, 0), (WHICH, 1), (WHICH, 2)]]
    assert not asking.refinding.is_due
    asking.refinding.mark_stale()
    asking.refinding.survey_again()
    assert not asking.refinding.is_due


def test_a_node_that_dies_while_it_is_asked_is_done_without_where_the_others_have_all_and_else_all_are_asked_again(
    asking: Asking,
) -> None:
    for tries in range(1, 4):
        asking.say(False, a=keeps(0, 1))
        assert (len(asking.asked), len(asking.waits)) == (1, tries)
    asking.say(False, a=keeps(0, 1, 2))
    asking.collect(PLACES)
    assert len(asking.found) == 1


def test_what_cannot_be_put_together_is_asked_for_again(asking: Asking) -> None:
    asking.say(True, a=keeps(0, 1, 2))
    asking.collect(None)
    asking.say(True, a=keeps(0, 1, 2), b=keeps(0, 1, 2))
    asking.collect(PLACES)
    assert len(asking.found) == 1


def test_what_an_agent_has_said_that_is_gone_meanwhile_counts_no_more(asking: Asking) -> None:
    asking.say(True, a=keeps(0, 1, 2), b=keeps(0, 1, 2))
    asking.refinding.mark_stale()
    asking.collect(PLACES)
    assert not asking.found
    asking.say(False, b=keeps(0, 1, 2))
    asking.collect(PLACES)
    (found,) = asking.found
    assert found.holders[WHICH, 0] == ["b"]


@pytest.mark.parametrize("when", ["while they are asked", "afterwards"])
def test_where_nobody_has_the_rest_a_memory_only_node_that_comes_is_asked_too(when: str, asking: Asking) -> None:
    if when == "while they are asked":
        asking.refinding.survey_again()
    asking.say(True, a=keeps(0, 1))
    if when == "afterwards":
        assert not asking.asked
        assert not asking.waits, "nothing is to come of that by itself"
        asking.refinding.survey_again()
        asking.tend()
    asking.say(True, a=keeps(0, 1), memory_node=keeps(2))
    asking.collect(PLACES)
    assert len(asking.found) == 1


@pytest.mark.parametrize("while_", ["asked", "collecting"])
def test_once_the_job_has_something_as_safe_nothing_is_found_any_more(while_: str, asking: Asking) -> None:
    if while_ == "collecting":
        asking.say(True, a=keeps(0, 1, 2))
    asking.refinding.end()
    if while_ == "asked":
        asking.say(True, a=keeps(0, 1, 2))
        assert not asking.collecting
    else:
        asking.collect(PLACES)
    assert not asking.found
    assert not asking.refinding.is_due
