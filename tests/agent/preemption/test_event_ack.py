"""When an event that is planned for a machine is let begin: last of all, once, by one node."""

from __future__ import annotations

import pytest

from ckpt.agent.preemption.notice_relay import PlannedEvent, StandingNotice, event_to_acknowledge
from ckpt.agent.state import actions as do
from tests.agent.preemption.test_preemption import Warned


def stands(
    key: str = "E1", node: str = "", source: str = "azure", lead_s: float = 60.0, certain: bool = True
) -> StandingNotice:
    named = f"{key} on node {node}" if node else key
    return StandingNotice(source, named, lead_s, 0.0, certain, nodes=frozenset({node}))


def test_of_the_nodes_that_an_event_names_the_coordinator_does_it_else_the_first_by_name() -> None:
    both = [stands(node="b"), stands(node="a")]
    assert event_to_acknowledge(both, (), 0.0) == (PlannedEvent("azure", "E1"), "a")
    assert event_to_acknowledge([*both, stands()], (), 0.0) == (PlannedEvent("azure", "E1"), "")
    assert event_to_acknowledge(both, {PlannedEvent("azure", "E1")}, 0.0) is None


def test_each_event_once_whatever_else_stands() -> None:
    told = [stands("E2", "b"), stands("E1", "b"), stands("E2", "a")]
    first = event_to_acknowledge(told, (), 0.0)
    assert first == (PlannedEvent("azure", "E1"), "b")
    assert event_to_acknowledge(told, {first[0]}, 0.0) == (PlannedEvent("azure", "E2"), "a")


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

    def leave(self) -> None:
        """All ranks have staged, and wait to be told that they may go."""
        word = self.take()
        self.hold(word)
        for rank in range(self.world):
            self.group.rank_states.record_leave_request(rank, ("leave", rank))
        self.group.save_attempts.record_assembly(word.slot, word.attempt_number, "")
        self.decide()

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


def test_not_where_the_user_does_not_let_it() -> None:
    driver = Planning(may=False)
    driver.leave()
    assert driver.group.exit_report.heeds_notices, (
        "what is saved has to be said before a deadline, which may come nearer"
    )
    driver.commit()
    assert not driver.group.exit_report.heeds_notices
    driver.group.leave_requests.record_close()
    driver.decide()
    assert not driver.acknowledged()


def test_not_where_the_last_snapshot_did_not_reach_the_store() -> None:
    driver = Planning()
    driver.leave()
    driver.commit("the store is gone")
    driver.group.commits.stop()
    driver.decide()
    driver.group.leave_requests.record_close()
    driver.decide()
    assert not driver.acknowledged()
    assert not driver.group.exit_report.heeds_notices


def test_not_what_was_taken_back_while_the_commit_ran() -> None:
    driver = Planning()
    driver.leave()
    assert driver.group.exit_report.heeds_notices, "though all ranks are gone"
    driver.group.preemption.withdraw_notice("azure", "E1")
    driver.group.preemption.withdraw_notice("azure", "E1 on node other")
    driver.commit()
    driver.group.leave_requests.record_close()
    driver.decide()
    assert not driver.acknowledged()


def test_not_by_a_job_that_came_to_its_end_or_that_another_has_superseded() -> None:
    driver = Planning()
    driver.leave()
    driver.group.supersede("a newer start")
    driver.commit()
    driver.group.leave_requests.record_close()
    driver.decide()
    assert not driver.acknowledged()
    assert not driver.group.exit_report.heeds_notices
