"""When an event that is planned for a machine is let begin: last of all, once, by one node."""

from __future__ import annotations

import pytest

from ckpt.agent.preemption.notice_relay import StandingNotice, event_to_acknowledge
from ckpt.agent.state import actions as do
from tests.agent.preemption.test_preemption import Warned


def stands(
    key: str = "E1", node: str = "", source: str = "azure", lead_s: float = 60.0, certain: bool = True
) -> StandingNotice:
    named = f"{key} on node {node}" if node else key
    return StandingNotice(source, named, lead_s, 0.0, certain, nodes=frozenset({node}))


def test_of_the_nodes_that_an_event_names_the_coordinator_does_it_else_the_first_by_name() -> None:
    both = [stands(node="b"), stands(node="a")]
    assert event_to_acknowledge(both, (), 0.0) == (("azure", "E1"), "a")
    assert event_to_acknowledge([*both, stands()], (), 0.0) == (("azure", "E1"), "")
    assert event_to_acknowledge(both, {("azure", "E1")}, 0.0) is None


def test_each_event_once_whatever_else_stands() -> None:
    told = [stands("E2", "b"), stands("E1", "b"), stands("E2", "a")]
    first = event_to_acknowledge(told, (), 0.0)
    assert first == (("azure", "E1"), "b")
    assert event_to_acknowledge(told, {first[0]}, 0.0) == (("azure", "E2"), "a")


@pytest.mark.parametrize("told", [stands(source="gcp-preempted"), stands(certain=False), stands(lead_s=0.0)])
def test_not_what_has_begun_may_not_come_or_knows_no_such_word(told: StandingNotice) -> None:
    assert event_to_acknowledge([told], (), 0.0) is None


class Planning(Warned):
    def __init__(self, may: bool = True) -> None:
        super().__init__()
        self.group.exit_report.can_acknowledge = may
        self.save_once()
        for each in (stands(lead_s=self.now_s + 12.0), stands(node="other", lead_s=self.now_s + 12.0)):
            self.group.preemption.add_notice(each)
        self.decide()

    def leave(self, **how: bool) -> None:
        """All ranks have staged, and wait to be told that they may go."""
        word = self.take()
        self.hold(word)
        super().leave()
        self.assemble(word.slot, word.attempt_number)

    def acknowledged(self) -> list[do.Acknowledge]:
        return [each for each in self.said if isinstance(each, do.Acknowledge)]


def test_it_is_the_last_of_all_after_the_commit_and_the_answers_to_the_ranks() -> None:
    driver = Planning()
    driver.leave()
    assert not driver.acknowledged()
    driver.commit()
    assert not driver.acknowledged(), "the ranks wait for their answer"
    driver.group.leave_requests.record_close()
    assert driver.group.exit_report.heeds_notices, "until it is said"
    driver.decide()
    assert driver.acknowledged() == [do.Acknowledge("azure", "E1", "")]
    answered = [
        at for at, each in enumerate(driver.said) if isinstance(each, do.AnswerRequest) and each.request[0] == "leave"
    ]
    assert len(answered) == driver.world
    assert max(answered) < driver.said.index(driver.acknowledged()[0])
    assert driver.group.exit_report.heeds_notices
    driver.decide()
    driver.group.exit_report.record_acknowledgement()
    driver.decide()
    assert len(driver.acknowledged()) == 1, "of two nodes that it names, one says so, once"
    assert not driver.group.exit_report.heeds_notices


@pytest.mark.parametrize("why", ["the user does not let it", "not stored", "withdrawn", "superseded"])
def test_not_without_the_users_word_the_last_commit_and_a_standing_event_nor_by_a_superseded_job(why: str) -> None:
    driver = Planning(may=why != "the user does not let it")
    driver.leave()
    assert driver.group.exit_report.heeds_notices, "before the deadline it has to be said what is saved"
    if why == "withdrawn":
        driver.group.preemption.withdraw_notice("azure", "E1")
        driver.group.preemption.withdraw_notice("azure", "E1 on node other")
    elif why == "superseded":
        driver.group.supersede("a newer start")
    driver.commit("the store is gone" if why == "not stored" else "")
    if why == "not stored":
        driver.group.commits.stop()
        driver.decide()
    driver.close()
    assert not driver.acknowledged()
    assert not driver.group.exit_report.heeds_notices
