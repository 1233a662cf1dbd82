"""When a job leaves by a notice, rule by rule. What they come to together is in test_preemption_sim.py."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt.agent.preemption.exit_report import OUTCOME_S
from ckpt.agent.preemption.exit_vote import AWAY_S, END_S
from ckpt.agent.preemption.notice_relay import OUTLIVES_S, ExitTiming, StandingNotice
from ckpt.agent.preemption.preemption import NOTICES_MAX
from ckpt.agent.scheduler.scheduler import Scheduler
from ckpt.agent.state import actions as do
from ckpt.agent.state.rank_presence import REJOIN_S
from ckpt.agent.state.slots import SaveReason
from ckpt.ipc.control_page import MID_STEP, SUB_MAX, ControlWord, RankPlace, WordKind
from ckpt.ipc.notice_sources import FORMER_NOTICE, SIGNAL_SOURCE
from ckpt.placement.placement import Kept
from ckpt.policy.save_options import EXIT_RESERVE_S, EXIT_SLACK, Every
from ckpt.types import Version
from tests.agent.scheduler.test_scheduler import Driver, hold_snapshot

DAY_S = 86400.0


class Warned(Driver):
    """Trains at ten steps a second, and commits take a second."""

    def __init__(self, world: int = 2, every: int = 1000, slots: int = 3, start_step: int | None = 0) -> None:
        super().__init__(world, None, slots, start_step, every)

    @property
    def lead_s(self) -> float:
        return self.group.facts.save_estimate.lead_time_s

    def train(self, seconds: float) -> None:
        self.now_s += seconds
        self.steps = [step + round(10 * seconds) for step in self.steps]
        self.decide()

    def warn(self, lead_s: float, key: str = "1", **more: Any) -> None:
        source = more.pop("source", "cloud")
        self.group.preemption.add_notice(StandingNotice(source, key, self.now_s + lead_s, self.now_s, **more))
        self.decide()

    def save_once(self) -> None:
        self.train(2.0)
        self.save(Version(self.steps[0] - 1, 1))
        self.take_saved(Version(self.steps[0] - 1, 1))
        self.now_s += 1.0
        self.commit()

    def measure(self) -> None:
        """It is known what a save and what a step take."""
        self.save_once()
        for _ in range(2):
            self.train(2.0)

    def take(self, ranks: range | None = None) -> Any:
        word = self.word()
        self.steps = [word.step + 1] * self.world
        self.stage(word.attempt_number, Version(word.step), word.slot, ranks)
        return word

    def hold(self, word: Any, ranks: range | None = None) -> dict[Any, Any]:
        for rank in range(self.world) if ranks is None else ranks:
            self.group.exit_vote.record_hold(rank, word.attempt_number, ("rank-holds", rank))
        self.decide()
        return {rank: body["leave"] for rank, body in self.answers("rank-holds").items()}

    def leave_by_hold(self) -> Any:
        """All ranks stage the last snapshot, hold at it and are told to leave. Returns its word."""
        word = self.take()
        assert self.hold(word) == dict.fromkeys(range(self.world), True)
        self.assemble(word.slot, word.attempt_number)
        return word

    def outcomes(self) -> list[dict[str, Any]]:
        return [action.body for action in self.all_of(do.WriteOutcome)]

    def ends(self) -> list[dict[str, Any]]:
        return [a.body for a in self.all_of(do.NotifyRanks) if a.body["t"] == "end-process"]

    def is_hold(self) -> bool:
        word = self.word()
        return word is not None and word.kind is WordKind.HOLD


def test_a_notice_days_ahead_is_remembered_and_left_by_only_when_it_is_time() -> None:
    driver = Warned()
    driver.save_once()
    driver.warn(2 * DAY_S)
    at_s = driver.now_s + 2 * DAY_S
    assert not driver.group.preemption.is_time_to_leave
    assert not driver.is_hold()
    need_s = driver.lead_s
    assert EXIT_RESERVE_S < need_s < EXIT_RESERVE_S + 10
    driver.train(at_s - need_s - 1 - driver.now_s)
    assert not driver.is_hold()
    assert driver.lead_s < need_s, "the pace is known better by now"
    assert driver.wake_s <= at_s - driver.lead_s
    driver.train(at_s - driver.lead_s - driver.now_s)
    assert driver.is_hold()
    assert driver.word().step <= driver.steps[0] + 2


@pytest.mark.parametrize("ends_s", [700.0, 3580.0])
def test_an_evaluation_without_polls_makes_nobody_leave_that_has_time_once_it_is_over(ends_s: float) -> None:
    """Until then it may go on for as long again, or for longer."""
    driver = Polling()
    driver.measure()
    driver.warn(3600.0)
    began_s = driver.now_s
    driver.evaluate(600.0, polls=0)
    assert not driver.is_hold()
    while driver.now_s < began_s + ends_s:
        driver.evaluate(5.0, polls=0)
    word = driver.word()
    assert word.kind is WordKind.HOLD
    driver.train(0.1)
    has_time = driver.now_s + 2 * driver.lead_s < began_s + 3600.0
    assert driver.hold(driver.take()) == dict.fromkeys(range(2), not has_time)
    assert has_time is (ends_s == 700.0)


def test_a_state_that_has_grown_since_it_was_saved_is_left_with_as_much_earlier() -> None:
    driver = Warned()
    driver.save_once()
    before_s = driver.lead_s
    driver.arenas.record_layout()  # an optimizer has its state now
    driver.decide()
    assert driver.arenas.record_division(driver.world + 1, "e", (300,) * driver.world, 3)
    driver.make_ready()
    assert driver.lead_s == pytest.approx(before_s + EXIT_SLACK * 2.0), "three seconds instead of one, with slack"
    driver.save_once()
    assert driver.lead_s < before_s + EXIT_SLACK * 2.0, "and then it is measured"


def leaves_at(driver: Warned, in_step_s: float | None) -> int:
    """How many steps beyond the present one, which the ranks of this node entered so long ago."""
    since_s = None if in_step_s is None else driver.now_s - in_step_s
    driver.group.preemption.add_notice(
        StandingNotice("cloud", "1", driver.now_s + 60.0, driver.now_s, exit_timing=ExitTiming.AT_ONCE)
    )
    driver.said += driver.group.decide(driver.now_s, driver.steps, (), [since_s, None])
    assert driver.is_hold()
    return int(driver.word().step - driver.steps[0])


@pytest.mark.parametrize(
    ("in_step_s", "beyond"), [(0.0, 0), (0.08, 0), (0.095, 1), (0.15, 1), (0.3, 2), (None, 2), (-0.5, 2)]
)
def test_they_leave_at_the_end_of_the_step_they_are_in_if_the_word_can_be_there_by_then(
    in_step_s: float | None, beyond: int
) -> None:
    driver = Warned()  # 100 ms a step
    driver.measure()
    assert leaves_at(driver, in_step_s) == beyond


def test_and_further_ahead_where_words_were_late() -> None:
    driver = Warned(every=10)
    driver.measure()
    word = driver.word()
    driver.group.save_attempts.record_miss(1, word.attempt_number, "late")
    driver.decide()
    assert leaves_at(driver, 0.0) >= 2


def test_the_earliest_certain_deadline_counts() -> None:
    driver = Warned()
    driver.save_once()
    driver.warn(DAY_S, "far")
    driver.warn(1.0, "perhaps", certain=False)
    assert driver.group.preemption.deadline_s(driver.now_s) == driver.now_s + DAY_S
    driver.warn(5.0, "near")
    assert driver.group.preemption.deadline_s(driver.now_s) == driver.now_s + 5.0
    assert driver.is_hold()


def test_one_that_is_uncertain_costs_one_checkpoint_and_nobody_leaves() -> None:
    driver = Warned()
    driver.save_once()
    driver.warn(60.0, certain=False)
    word = driver.word()
    assert (word.kind, word.step <= driver.steps[0] + 2) == (WordKind.TAKE, True)
    driver.complete()
    driver.commit()
    assert driver.word().step == 1000, "and then as before"
    driver.warn(90.0, certain=False)
    driver.train(20.0)
    assert driver.word().step == 1000, "the same one again is no news"
    assert not driver.outcomes()


def left_by(driver: Warned) -> list[tuple[str, str, str]]:
    return [(each.source, each.key, each.node) for each in driver.all_of(do.RecordExit)]


def test_each_machine_hears_by_which_of_its_notices_the_job_leaves() -> None:
    driver = Warned()
    driver.save_once()
    driver.warn(60.0, "1 on node b", nodes=frozenset({"b"}))
    driver.warn(DAY_S, "2")
    driver.warn(60.0, "3", certain=False)
    driver.warn(60.0, "SIGTERM", source=SIGNAL_SOURCE, exit_timing=ExitTiming.AT_ONCE)
    driver.now_s += 60.0 - driver.lead_s
    word = driver.take()
    assert left_by(driver) == []
    driver.hold(word)
    assert left_by(driver) == [("cloud", "1", "b")], "by the one that is due; the others are left by if they come"


def test_by_what_a_start_has_left_the_next_one_does_not_and_takes_one_more_just_before() -> None:
    driver = Warned(every=1000)
    former = Warned()
    former.save_once()
    driver.group.facts.save_estimate.inherit(former.group.facts.save_estimate)
    assert driver.lead_s == former.group.facts.save_estimate.lead_time_s < 60.0, "what saving took is known"
    driver.make_ready()
    driver.train(10.0)
    driver.warn(60.0, exit_timing=ExitTiming.NOT_AGAIN)
    assert driver.group.preemption.is_warned(driver.now_s), "a failure is none of this job's"
    due_s = driver.now_s + 60.0
    while driver.now_s < due_s - driver.lead_s - 1.0:
        assert driver.word().step >= 1000, "not yet"
        driver.train(1.0)
    assert driver.wake_s <= due_s - driver.lead_s
    driver.train(2.0)
    word = driver.word()
    assert (word.kind, word.step <= driver.steps[0] + 2) == (WordKind.TAKE, True)
    assert driver.group.preemption.doomed_nodes == {""}
    driver.complete()
    driver.commit()
    driver.train(60.0)
    assert driver.word().step >= 1000, "and then as before, also when the time is over"
    assert not driver.group.preemption.is_time_to_leave
    assert not driver.outcomes()
    driver.warn(10.0, "2")
    assert driver.is_hold(), "another one is another matter"


def test_how_long_saving_takes_is_not_guessed_before_a_start_has_learnt_what_it_goes_on_from() -> None:
    former = Warned()
    former.save_once()
    driver = Warned(every=1000, start_step=None)
    driver.steps = [0, 0]
    driver.warn(40.0, exit_timing=ExitTiming.NOT_AGAIN)
    due_s = driver.now_s + 40.0
    wake_s = driver.group.next_wake_s(driver.now_s)
    assert wake_s is None or wake_s > driver.now_s
    driver.group.facts.save_estimate.inherit(former.group.facts.save_estimate)
    driver.group.appointments.record_start(0, driver.now_s)
    driver.steps = [1, 1]
    driver.make_ready()
    driver.train(2.0)
    driver.train(10.0)
    assert driver.word().step >= 1000
    driver.train(due_s - driver.lead_s - driver.now_s)
    assert driver.word().step <= driver.steps[0] + 2


def test_where_nothing_was_measured_one_is_taken_at_once_and_another_just_before() -> None:
    driver = Warned(every=1000)
    driver.make_ready()
    driver.train(2.0)
    driver.warn(90.0, exit_timing=ExitTiming.NOT_AGAIN)
    due_s = driver.now_s + 90.0
    taken = []
    while driver.now_s < due_s:
        if driver.word().step < 1000:
            taken.append(due_s - driver.now_s)
            driver.complete()
            driver.commit()
        driver.train(1.0)
    first_s, second_s = taken
    assert first_s > 80.0
    assert EXIT_RESERVE_S - 1.0 < second_s < EXIT_RESERVE_S + 5.0


def committed(driver: Warned, count: int) -> int:
    """How many of so many appointed snapshots, one each ten seconds."""
    found = 0
    for _ in range(count):
        driver.make_ready()
        driver.train(10.0)
        driver.complete()
        if driver.slots.committing_slot is not None:
            found += 1
            driver.commit()
    return found


def test_a_certain_notice_costs_nothing_before_it_is_time_to_leave_by_it() -> None:
    """It may be taken back."""
    driver = Warned()
    driver.save_once()
    driver.group.clock.set_intervals(10.0, 10_000.0, driver.now_s)
    driver.warn(200.0)
    assert committed(driver, 5) == 0
    driver.train(driver.group.preemption.deadline_s(driver.now_s) - driver.lead_s - driver.now_s)
    assert driver.is_hold(), "and then it is time to leave"
    assert driver.slots.committing_slot is not None, "what is complete, as long as that does not delay the last one"
    driver.commit()
    word = driver.leave_by_hold()
    assert driver.slots.committing_slot == word.slot


def stays(driver: Warned, answers: ExitTiming) -> None:
    """What a notice of 40 s says comes to nothing, and nobody takes it back."""
    driver.warn(40.0, exit_timing=answers)
    deadline_s = driver.now_s + 40.0
    if answers is not ExitTiming.NOT_AGAIN:  # one rank is late, so that all go on
        while not driver.is_hold():
            driver.train(1.0)
        word = driver.take(range(1))
        driver.hold(word, range(1))
        driver.now_s = max(driver.now_s, deadline_s)
        driver.decide()
        driver.group.save_attempts.record_miss(1, word.attempt_number, "late")
        driver.steps = [max(driver.steps)] * 2
        assert driver.answers("rank-holds")[0]["leave"] is False
    while driver.now_s <= deadline_s:
        committed(driver, 1)


@pytest.mark.parametrize("answers", list(ExitTiming))
def test_a_notice_that_was_false_and_is_never_taken_back_costs_nothing_more_after_its_deadline(
    answers: ExitTiming,
) -> None:
    driver = Warned()
    driver.save_once()
    driver.group.clock.set_intervals(10.0, 100.0, driver.now_s)
    assert committed(driver, 50) == 5
    stays(driver, answers)
    deadline_s = min(each.deadline_s for each in driver.group.preemption.notices.values())
    assert driver.group.preemption.is_warned(deadline_s + OUTLIVES_S - 1.0), "the machine may still go"
    assert not driver.group.preemption.is_warned(deadline_s + OUTLIVES_S)
    assert committed(driver, 50) <= 6, "as few as before"
    assert not driver.group.preemption.doomed_nodes, "it stays as far as anybody knows"
    driver.warn(60.0)
    assert driver.group.preemption.is_warned(driver.now_s), "the same one with a time ahead is news"


@pytest.mark.parametrize("fails_first", [True, False])
def test_one_that_is_uncertain_costs_one_checkpoint_that_is_committed_out_of_turn(fails_first: bool) -> None:
    driver = Warned(every=1000)
    driver.save_once()
    driver.group.clock.set_intervals(1000.0, 10_000.0, driver.now_s)  # neither is due for long
    driver.decide()
    before = driver.group.facts.committed_version
    driver.warn(600.0, certain=False)
    word = driver.word()
    assert (word.kind, word.step <= driver.steps[0] + 2) == (WordKind.TAKE, True)
    driver.complete()
    if fails_first:
        driver.commit("the store is gone")
        driver.train(5.0)
    driver.commit()
    assert driver.group.facts.committed_version == Version(word.step) > before
    driver.train(20.0)
    assert driver.word() is None, "and then as before"
    assert not driver.outcomes()


def test_an_extra_checkpoint_that_is_missed_is_tried_a_few_times() -> None:
    driver = Warned()
    driver.warn(60.0, certain=False)
    attempts = set()
    for _ in range(10):
        if driver.word() is not None and driver.word().step < 1000:
            attempts.add(driver.word().attempt_number)
            driver.group.save_attempts.record_miss(0, driver.word().attempt_number, "late")
        driver.train(0.2)
    assert len(attempts) == 3


def test_one_that_moves_away_again_is_left_by_later() -> None:
    driver = Warned()
    driver.save_once()
    driver.warn(5.0)
    assert driver.is_hold()
    word = driver.take()
    driver.warn(DAY_S)
    assert driver.hold(word) == {0: False, 1: False}
    assert not driver.group.preemption.is_time_to_leave


def test_where_a_rank_does_not_come_back_to_the_next_agent_those_that_hold_leave() -> None:
    """In a job of several nodes; that agent does not know the round at which they hold."""
    driver = Warned(3)
    driver.group = Scheduler(3, driver.group.clock.policy, 500)
    driver.group.facts.is_single_node = False
    driver.group.appointments.record_agent_restart(driver.now_s)
    driver.group.record_join(1)
    driver.group.exit_vote.record_hold(1, 7, ("rank-holds", 1))
    driver.decide()
    driver.wait(REJOIN_S - 1)
    assert not driver.answers("rank-holds")
    driver.now_s = driver.wake_s
    driver.decide()
    assert driver.answers("rank-holds")[1]["leave"]


def leaving_in_20_s() -> tuple[Warned, Any]:
    driver = Warned()
    driver.warn(20.0, exit_timing=ExitTiming.AT_ONCE)
    return driver, driver.leave_by_hold()


@pytest.mark.parametrize(
    ("ends_s", "said"),
    [
        (2.0, [("store", 18.0)]),
        (19.5, [("local", OUTCOME_S), ("store", 0.5)]),
        (21.0, [("local", OUTCOME_S)]),  # what comes after the deadline was not saved before it
    ],
)
def test_what_was_saved_is_reported_once_it_is_committed_and_shortly_before_the_deadline_at_the_latest(
    ends_s: float, said: list[tuple[str, float]]
) -> None:
    driver, word = leaving_in_20_s()
    ends_s += driver.now_s
    while (wake_s := driver.group.next_wake_s(driver.now_s)) is not None and wake_s < ends_s:
        driver.now_s = wake_s
        driver.decide()
    driver.now_s = ends_s
    driver.commit()
    assert [(body["level"], body["left_s"]) for body in driver.outcomes()] == said
    for body in driver.outcomes():
        assert (body["how"], body["step"], body["notices"]) == ("left", word.step, ["cloud 1"])
        assert body["committed_step"] == (word.step if body["level"] == "store" else None)
    told = [a for a in driver.all_of(do.Emit) if a.name == "notice.outcome" and a.loud]
    assert len(told) == len(said)


def leave_by(driver: Warned) -> list[float]:
    """What the ranks were told once they were told to leave."""
    told = (action.body for action in driver.all_of(do.NotifyRanks))
    return [body["leave_deadline_s"] for body in told if body["t"] == "leave-deadline"]


@pytest.mark.parametrize("by", ["another notice", "the same one, when all ranks are gone"])
def test_a_deadline_that_comes_nearer_once_the_ranks_leave_is_told_to_them_and_the_outcome_before_it(by: str) -> None:
    driver, word = leaving_in_20_s()
    driver.warn(60.0, "2")
    assert leave_by(driver) == [], "the earliest counts"
    at_s = driver.now_s + 6.0
    if by == "another notice":
        driver.warn(6.0, "3")
        driver.group.preemption.withdraw_notice("cloud", "3")
    else:
        driver.leave()
        driver.decide()
        assert driver.group.exit_report.heeds_notices
        driver.warn(6.0, exit_timing=ExitTiming.NOT_AGAIN)  # as whoever listens has it, since the job leaves by it
    driver.decide()
    driver.group.exit_vote.record_hold(1, word.attempt_number, ("rank-holds", 1))
    driver.decide()
    assert driver.answers("rank-holds")[1] == {"leave": True, "leave_deadline_s": at_s}, "who asks again hears it, too"
    assert driver.group.next_wake_s(driver.now_s) == at_s - OUTCOME_S
    driver.now_s = at_s - OUTCOME_S
    driver.decide()
    (body,) = driver.outcomes()
    assert (body["how"], body["level"], body["left_s"]) == ("left", "local", OUTCOME_S)
    assert leave_by(driver) == [at_s], "once"
    driver.commit()
    assert driver.group.exit_report.heeds_notices is (by == "another notice"), "until all is said"


@pytest.mark.parametrize("asked", [True, False])
def test_a_rank_that_was_away_when_the_deadline_came_nearer_is_told_once_it_is_back(asked: bool) -> None:
    driver, _ = leaving_in_20_s()
    if asked:
        driver.group.rank_states.record_leave_request(1, ("leave", 1), insists=True)
    driver.group.record_disconnect(1, driver.now_s)
    driver.warn(6.0, "2")
    at_s = driver.now_s + 6.0
    driver.now_s += 1.0
    driver.group.record_join(1)
    driver.decide()
    assert leave_by(driver) == [at_s] * 2


def sent_away(
    driver: Warned, *ranks: int, why: str = "", committed: Version | None = None, notices: tuple[str, ...] = ()
) -> None:
    """To an agent that has told nobody to leave."""
    for rank in ranks:
        driver.group.exit_vote.record_exit_order(why, driver.now_s + 20.0, committed, notices)
        driver.group.rank_states.record_leave_request(rank, ("leave", rank))
        driver.decide()


@pytest.mark.parametrize(("heard_by", "left_s"), [("the agent", 15.0), ("the ranks", 17.0)])
def test_an_agent_started_again_reports_what_comes_of_ranks_that_a_former_one_sent_away(
    heard_by: str, left_s: float
) -> None:
    """They have saved the last step again."""
    driver = Warned()
    hold_snapshot(driver.group, 1, Version(7))
    sent_away(driver, 0)
    assert not driver.outcomes(), "it is to be committed first"
    if heard_by == "the agent":
        driver.warn(18.0, source=SIGNAL_SOURCE, key="SIGTERM")
    else:
        sent_away(driver, 0, notices=("signal SIGTERM",))
    driver.now_s += 3.0
    driver.commit()
    sent_away(driver, 1)
    (body,) = driver.outcomes()
    assert (body["how"], body["level"], body["step"], body["left_s"]) == ("left", "store", 7, left_s)
    assert body["notices"] == ["signal SIGTERM"]


def test_where_nothing_was_handed_over_it_says_what_is_in_the_store_as_the_ranks_know_it() -> None:
    driver = Warned()
    sent_away(driver, 0, 1, why="rank 3 is gone", committed=Version(5))
    (body,) = driver.outcomes()
    assert (body["how"], body["why"]) == ("ended", "rank 3 is gone")
    assert (body["level"], body["step"], body["committed_step"]) == ("none", None, 5)
    assert body["notices"] == [FORMER_NOTICE]


@pytest.mark.parametrize("is_begun", [True, False])
def test_what_is_complete_is_committed_first_where_the_last_one_cannot_reach_the_store(is_begun: bool) -> None:
    driver = Warned(every=10)
    driver.complete()
    driver.now_s += 20.0
    driver.commit()
    if not is_begun:
        driver.group.clock.set_intervals(10_000.0, 10_000.0, driver.now_s)
    driver.complete()  # its commit will take about twenty seconds, too
    assert (driver.slots.committing_slot is not None) is is_begun
    driver.warn(15.0)
    older = driver.slots.committing_slot
    assert older is not None
    word = driver.leave_by_hold()
    assert driver.slots.committing_slot == older
    assert not giving_up(driver)
    driver.now_s += 5.0
    driver.commit()
    assert driver.slots.committing_slot == word.slot
    driver.wait(9.0)
    (body,) = driver.outcomes()
    assert (body["how"], body["level"], body["step"]) == ("left", "local", word.step)
    assert body["committed_step"] == driver.group.facts.committed_version.step  # type: ignore[union-attr]


def test_a_deadline_that_passes_while_the_machine_stays_is_reported_and_training_goes_on() -> None:
    driver = Warned()
    driver.warn(5.0)
    word = driver.take(range(1))
    driver.hold(word, range(1))
    driver.wait(6.0)
    assert driver.answers("rank-holds")[0]["leave"] is False
    assert [body["how"] for body in driver.outcomes()] == ["stayed"]
    driver.now_s += 60.0
    driver.stage(word.attempt_number, Version(word.step), word.slot, range(1, 2))
    assert driver.hold(word, range(1, 2))[1] is False, "who comes later goes on, too"
    assert len(driver.outcomes()) == 1
    driver.assemble(word.slot, word.attempt_number)
    assert driver.word().kind is WordKind.TAKE


def test_a_deadline_that_has_passed_when_it_is_told_may_come_at_any_moment() -> None:
    driver = Warned()
    driver.warn(-100.0)
    assert driver.is_hold()


def signalled(driver: Warned, lead_s: float = 30.0, key: str = "SIGTERM") -> None:
    driver.warn(lead_s, key, source=SIGNAL_SOURCE, exit_timing=ExitTiming.AT_ONCE)


@pytest.mark.parametrize("how", ["dead", "failed", "left in order"])
def test_signalled_ranks_end_at_once_when_one_is_dead_or_has_failed_and_not_when_it_came_to_its_end(how: str) -> None:
    driver = Warned(world=3)
    driver.save_once()
    signalled(driver)
    assert not driver.ends()
    if how == "dead":
        driver.group.record_death(2)
    else:
        driver.group.rank_states.record_leave_request(2, ("leave", 2), how == "left in order")
    driver.decide()
    assert [(end["wait_for_saves"], "rank 2" in end["why"]) for end in driver.ends()] == (
        [] if how == "left in order" else [(False, True)]
    )
    assert [body["how"] for body in driver.outcomes()] == ["ended"] * len(driver.ends())


@pytest.mark.parametrize("key", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("world", [1, 2])
def test_ranks_that_live_are_waited_for_until_shortly_before_the_deadline(world: int, key: str) -> None:
    driver = Warned(world)
    driver.save_once()
    driver.train(2.0)
    signalled(driver, 90.0, key)
    driver.wait(90.0 - END_S - 1.0)  # a long backward pass, an evaluation, a call that holds the GIL
    assert not driver.ends()
    assert driver.wake_s <= driver.now_s + 1.0
    driver.wait(1.0)
    assert driver.ends()[0]["wait_for_saves"]
    driver.group.exit_vote.record_hold(0, driver.word().attempt_number if driver.word() else 1, ("rank-holds", 0))
    driver.decide()
    assert driver.answers("rank-holds")[0]["leave"] is True


def test_signalled_ranks_end_before_the_earlier_deadline_of_another_notice() -> None:
    driver = Warned()
    driver.save_once()
    signalled(driver)
    driver.warn(10.0)
    assert driver.wake_s <= driver.now_s + 10.0 - END_S
    driver.wait(10.0 - END_S)
    assert driver.ends()[0]["wait_for_saves"]


@pytest.mark.parametrize("before", [True, False])
def test_a_rank_of_which_nothing_is_heard_ends_the_wait_and_one_that_comes_back_does_not(before: bool) -> None:
    for returns in (True, False):
        driver = Warned(world=3)
        driver.save_once()
        driver.train(2.0)
        if before:
            driver.group.record_disconnect(2, driver.now_s)
        signalled(driver)
        if not before:
            driver.group.record_disconnect(2, driver.now_s)
        driver.decide()
        assert not driver.ends(), "its agent may be started again"
        if returns:
            driver.group.record_join(2)
        assert returns or driver.wake_s <= driver.now_s + AWAY_S
        driver.wait(AWAY_S)
        assert [end["wait_for_saves"] for end in driver.ends()] == ([] if returns else [False])


@pytest.mark.parametrize("lead_s", [0.5, END_S, END_S + 0.5])
def test_of_a_signal_that_leaves_no_time_it_is_not_said_that_no_boundary_came(lead_s: float) -> None:
    driver = Warned()
    driver.save_once()
    driver.train(2.0)
    driver.warn(lead_s, source=SIGNAL_SOURCE, key="SIGTERM", exit_timing=ExitTiming.AT_ONCE)
    driver.wait(1.0)
    (end,) = driver.ends()
    short = "there was no time to wait for a boundary"
    assert end["why"] == (short if lead_s <= END_S else "no boundary came in time")


def at_their_end(driver: Warned) -> Version:
    """All ranks have staged what they end with, and wait for its commit, which is under way."""
    version = Version(driver.steps[0] - 1, 1)
    driver.save(version, SaveReason.EXIT)
    answer = driver.take_saved(version)
    assert driver.slots.committing_slot == answer["slot"]
    return version


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("saved", [True, False])
def test_ranks_that_are_signalled_in_the_last_commit_of_a_normal_end_leave_in_order(world: int, saved: bool) -> None:
    """None comes to a boundary any more, and none is missing one."""
    driver = Warned(world)
    driver.train(2.0)
    version = at_their_end(driver)
    signalled(driver)
    driver.wait(30.0 - OUTCOME_S - 0.1)
    assert (driver.ends(), driver.outcomes(), driver.word()) == ([], [], None)
    if saved:
        driver.commit()
    else:
        driver.wait(0.1)
    (body,) = driver.outcomes()
    assert (body["how"], body["level"], body["step"]) == ("left", "store" if saved else "local", version.step)
    assert body["committed_step"] == (version.step if saved else None)
    assert (body["notices"], body["error"]) == ([f"{SIGNAL_SOURCE} SIGTERM"], "")


@pytest.mark.parametrize(("lead_s", "said"), [(10.0, ["left"]), (3600.0, [])])
def test_of_a_machine_that_goes_once_the_ranks_are_at_their_end_it_is_said_that_they_left_where_it_goes_soon(
    lead_s: float, said: list[str]
) -> None:
    driver = Warned()
    driver.save_once()
    driver.train(2.0)
    at_their_end(driver)
    driver.warn(lead_s)
    driver.commit()
    assert [body["how"] for body in driver.outcomes()] == said


def test_the_same_signal_at_another_rank_does_not_put_the_end_off() -> None:
    driver = Warned()
    signalled(driver)
    first_s = driver.group.preemption.deadline_s(driver.now_s)
    driver.now_s += 3.0
    signalled(driver)
    assert driver.group.preemption.deadline_s(driver.now_s) == first_s


def test_so_many_notices_are_remembered_and_no_more() -> None:
    driver = Warned()
    for number in range(2 * NOTICES_MAX):
        driver.group.preemption.add_notice(StandingNotice("cloud", str(number), DAY_S + number, 0.0))
    assert len(driver.group.preemption.notices) == NOTICES_MAX
    assert ("cloud", "0") in driver.group.preemption.notices


def test_what_all_of_many_nodes_hear_counts_for_all_of_them() -> None:
    """The end of an allocation, which each of them tells of: none of them stays, and none leaves by it again."""
    driver = Warned()
    driver.save_once()
    nodes = [f"n{number}" for number in range(3 * NOTICES_MAX)]

    def tell(lead_s: float) -> None:
        driver.warn(lead_s, "7", source="slurm")
        for number, node in enumerate(nodes):
            driver.warn(lead_s + 0.001 * number, f"7 on node {node}", source="slurm", nodes=frozenset({node}))

    tell(2 * DAY_S)
    tell(14.0)  # it was cut short
    driver.warn(14.0, "7", source="slurm")  # once more, as its listener begins anew
    assert len(driver.group.preemption.notices) == NOTICES_MAX
    assert driver.group.preemption.doomed_nodes == {"", *nodes}
    word = driver.take()
    driver.hold(word)
    assert sorted(left_by(driver)) == sorted(("slurm", "7", node) for node in ("", *nodes))


def leaves_while_the_agent_of_rank_1_dies() -> Warned:
    driver, _ = leaving_in_20_s()
    driver.leave()
    driver.decide()
    driver.group.record_disconnect(1, driver.now_s)
    driver.commit("its part was not written")
    return driver


def test_the_last_commit_is_tried_again_once_the_agent_that_was_missing_is_back() -> None:
    driver = leaves_while_the_agent_of_rank_1_dies()
    assert driver.slots.committing_slot is None
    assert not driver.answers("leave"), "it is not given up yet"
    driver.group.record_join(1)
    driver.decide()
    driver.commit()
    driver.close()
    assert {body["error"] for body in driver.answers("leave").values()} == {None}


def test_also_where_it_is_back_before_the_commit_that_began_without_it_has_failed() -> None:
    driver, _ = leaving_in_20_s()
    driver.slots[driver.slots.committing_slot or 0].attempt.is_last_try = True  # type: ignore[union-attr]
    driver.leave()
    driver.group.record_disconnect(1, driver.now_s)
    driver.decide()
    driver.group.record_join(1)
    driver.commit("its part was not written")
    driver.commit()
    assert driver.group.facts.committed_version is not None


def test_but_not_longer_than_until_the_deadline() -> None:
    driver = leaves_while_the_agent_of_rank_1_dies()
    wake_s = driver.wake_s
    driver.now_s += 20.0 - END_S
    assert wake_s <= driver.now_s
    driver.decide()
    driver.commit("its part was not written")
    assert driver.slots.committing_slot is None
    assert set(driver.answers("leave")) == {0}, "who is there is told that it failed"
    assert not driver.group.rank_states.summary.waiting_to_leave


def giving_up(driver: Warned) -> int:
    """How many commits it has cancelled."""
    return len(driver.all_of(do.CancelCommit))


def leaves_beside_a_commit(takes_s: float, since_s: float, lead_s: float, explicit: bool = False) -> Warned:
    """Commits take so long, and one has begun so long ago, when a signal leaves so much time, and all hold at once."""
    driver = Warned(every=10)
    driver.complete()
    driver.now_s += takes_s
    driver.commit()
    if explicit:
        driver.steps = [16] * 2
        driver.save(Version(15, 1))
        driver.take_saved(Version(15, 1))
    else:
        driver.complete()
    driver.now_s += since_s
    signalled(driver, lead_s)
    driver.leave_by_hold()
    return driver


@pytest.mark.parametrize(
    ("takes_s", "since_s", "lead_s", "gives_way"),
    [
        (18.0, 1.0, 30.0, True),
        (18.0, 5.0, 30.0, True),
        (18.0, 7.0, 30.0, False),  # both fit
        (10.0, 0.0, 30.0, False),
        (18.0, 1.0, 18.5, True),
        (18.0, 1.0, 17.5, False),  # neither would, the last one alone
        (18.0, 17.0, 18.5, True),
        (18.0, 30.0, 18.5, False),  # it should have ended long ago
    ],
)
def test_a_commit_is_given_up_for_the_last_one_only_where_that_fits_alone_and_not_behind_it(
    takes_s: float, since_s: float, lead_s: float, gives_way: bool
) -> None:
    driver = leaves_beside_a_commit(takes_s, since_s, lead_s)
    older, newest = driver.slots.committing_slot, driver.slots.newest
    assert older is not None
    assert newest is not None
    assert older != newest.slot
    assert giving_up(driver) == gives_way
    for _ in range(100):
        driver.wait(0.1)
    assert giving_up(driver) == gives_way, "what time alone brings changes nothing, and once is enough"


def test_then_the_last_one_begins_and_who_waits_for_what_gave_way_is_told() -> None:
    driver = leaves_beside_a_commit(18.0, 1.0, 30.0, explicit=True)
    newest = driver.slots.newest
    assert newest is not None
    driver.commit("it was broken off")
    told = [a.body for a in driver.all_of(do.NotifyRanks) if a.body.get("version") == str(Version(15, 1))]
    (store,) = [body for body in told if body["level"] == "store"]
    assert not store["ok"]
    assert driver.slots.committing_slot == newest.slot, "at once"
    driver.now_s += 18.0
    driver.commit()
    (body,) = driver.outcomes()
    assert (body["level"], body["error"], body["left_s"]) == ("store", "", 12.0)


def test_a_save_that_waits_for_its_turn_is_committed_behind_the_last_one_that_would_come_too_late_else() -> None:
    driver = Warned(every=10, slots=4)
    driver.complete()
    driver.now_s += 18.0
    driver.commit()
    driver.complete()
    driver.now_s += 15.0
    driver.steps = [26] * 2
    driver.save(Version(25, 1))
    answer = driver.take_saved(Version(25, 1))
    signalled(driver, 30.0)
    word = driver.leave_by_hold()
    assert not giving_up(driver), "it is all but done"
    driver.now_s += 3.0
    driver.commit()
    assert driver.slots.committing_slot == word.slot
    driver.now_s += 18.0
    driver.commit()
    assert driver.slots.committing_slot == answer["slot"], "somebody waits for it"
    driver.now_s += 18.0
    driver.commit()
    assert driver.group.facts.committed_version == Version(word.step), "which is the newest that is there"


@pytest.mark.parametrize(("lost", "level"), [("b", "local"), ("c", "peer")])
def test_what_a_lost_agent_kept_is_not_said_to_be_in_the_memory_of_nodes_that_stay(lost: str, level: str) -> None:
    driver = Warned()
    driver.place(Kept("", 1, ("b",)), Kept("b", 1, ("c",)), Kept("c", 1, ("b",)))
    driver.warn(20.0, exit_timing=ExitTiming.AT_ONCE)
    word = driver.leave_by_hold()
    driver.replicas.record_replication(word.slot, "", driver.now_s)
    driver.decide()
    driver.replicas.record_lost_holder(lost, driver.replicas.peer_versions)
    driver.wait(20.0 - OUTCOME_S)
    (body,) = driver.outcomes()
    assert (body["level"], body["peer_step"]) == (level, word.step if level == "peer" else None)
    assert driver.replicas.replicating_slot == word.slot, "they are made again"
    driver.replicas.record_replication(word.slot, "", driver.now_s)
    driver.decide()
    assert driver.outcomes()[-1]["level"] == "peer"


class Polling(Warned):
    """All ranks are in one step since `since_s`, and have polled so often in it."""

    polls, since_s = 0, 0.0

    def look(self) -> list[do.Action]:
        return self.group.decide(self.now_s, self.steps, [self.polls] * self.world, [self.since_s] * self.world)

    def train(self, seconds: float) -> None:
        self.polls, self.since_s = 0, self.now_s + seconds
        super().train(seconds)

    def evaluate(self, seconds: float, polls: int = 1) -> None:
        self.now_s += seconds
        self.polls += polls
        self.decide()


def about_to_hold() -> Polling:
    """A hold is appointed at the end of a step, of which nothing has taken place yet."""
    driver = Polling()
    driver.save_once()
    driver.train(1.0)
    driver.warn(60.0, exit_timing=ExitTiming.AT_ONCE)
    return driver


def test_a_hold_at_the_end_of_a_step_comes_at_a_poll_once_that_step_takes_long() -> None:
    driver = about_to_hold()
    word = driver.word()
    assert (word.kind, word.sub, word.step >= driver.steps[0]) == (WordKind.HOLD, 0, True)
    driver.evaluate(0.1)
    assert driver.word() == word, "it may be a step like others"
    assert driver.wake_s <= driver.now_s + 1.0
    driver.evaluate(4 * driver.group.facts.step_timing.boundary_interval_s)
    moved = driver.word()
    assert (moved.kind, moved.step) == (WordKind.HOLD, driver.steps[0] - 1)
    assert driver.group.facts.last_error == "", "nothing is lost"
    assert not driver.all_of(do.Emit)
    assert driver.polls < moved.sub <= driver.polls + 4
    for _ in range(20):
        driver.evaluate(0.1, polls=0)
    assert driver.word() == moved
    version = Version(moved.step, moved.sub)
    driver.stage(moved.attempt_number, version, moved.slot)
    assert driver.hold(moved) == {0: True, 1: True}


@pytest.mark.parametrize("one_page", [True, False])
def test_a_poll_is_far_enough_ahead_of_ranks_that_were_seen_a_moment_ago(one_page: bool) -> None:
    driver = about_to_hold()
    driver.group.facts.is_single_node = one_page
    while not driver.word().sub:
        driver.evaluate(0.1, polls=4)
    unseen = driver.word().sub - driver.polls - 2
    assert unseen == 0 if one_page else unseen >= 10


def test_polls_that_come_by_the_hundred_thousand_lead_to_none_that_cannot_be_told() -> None:
    driver = about_to_hold()
    driver.group.facts.is_single_node = False
    driver.evaluate(1.0, polls=SUB_MAX // 2 - 1)
    word = driver.word()
    assert ControlWord.unpack(word.pack()).sub == word.sub > driver.polls


def test_a_hold_at_which_one_rank_has_staged_already_is_not_moved() -> None:
    driver = about_to_hold()
    word = driver.word()
    driver.steps = [word.step + 1] * 2
    driver.since_s = driver.now_s
    driver.stage(word.attempt_number, Version(word.step), word.slot, range(1))
    driver.evaluate(2.0)
    assert driver.word() == word


@pytest.mark.parametrize("asked_by", ["an uncertain notice", "a notice that was left by"])
def test_one_checkpoint_more_that_is_asked_for_does_not_wait_for_the_end_of_an_evaluation(asked_by: str) -> None:
    driver = Polling()
    driver.measure()
    if asked_by == "an uncertain notice":
        driver.warn(20.0, certain=False)
    else:
        driver.warn(10.0, exit_timing=ExitTiming.NOT_AGAIN)
    assert (driver.word().sub, driver.word().step <= driver.steps[0] + 2) == (0, True)
    for _ in range(4):
        driver.evaluate(1.0)
    assert driver.word().sub > 0


def test_nothing_is_appointed_at_polls_of_a_step_once_it_was_said_that_they_are_in_the_middle_of_it() -> None:
    driver = about_to_hold()
    for _ in range(3):
        driver.evaluate(1.0)
    moved = driver.word()
    assert moved.sub
    for rank in range(2):
        driver.group.save_attempts.record_miss(rank, moved.attempt_number, MID_STEP)
    for _ in range(3):
        driver.evaluate(1.0)
        assert (driver.is_hold(), driver.word().sub) == (True, 0)
    driver.train(0.1)
    driver.evaluate(25.0)
    driver.evaluate(1.0)
    assert driver.word().sub > 0, "another step is asked anew"


def test_who_polls_in_a_long_evaluation_leaves_no_earlier_than_he_has_to() -> None:
    driver = Polling()
    driver.measure()
    driver.warn(3600.0)
    need_s = driver.lead_s
    for _ in range(600):
        driver.evaluate(1.0)
    assert driver.lead_s < need_s + 3 * EXIT_SLACK * 1.1, "three polls, and not three such evaluations"
    for _ in range(60):
        driver.evaluate(1.0, polls=0)
    assert driver.lead_s > need_s + 0.1, "a silent one may take any time"


def test_a_hold_whose_notice_was_taken_back_does_not_stand_in_the_way_of_the_next_one() -> None:
    driver = Warned()
    driver.save_once()
    driver.warn(60.0, exit_timing=ExitTiming.AT_ONCE)
    before = driver.word()
    driver.group.preemption.withdraw_notice("cloud", "1")
    driver.decide()
    assert driver.word() == before, "ranks may be on their way to it"
    driver.warn(60.0, "2", exit_timing=ExitTiming.AT_ONCE)
    assert driver.word().attempt_number != before.attempt_number
    assert driver.leave_by_hold().step <= before.step


class InTurns(Polling):
    """Steps of one second and of ten, in turns; the long ones begin with so many polls. Ranks keep what is appointed,
    or say that it is too late or, of polls, that these are in the middle of a step."""

    def __init__(self, polls_each: int, amid: bool = False) -> None:
        self.polls_each, self.amid = polls_each, amid
        self.seen: set[int] = set()
        self.taken: list[Version] = []
        super().__init__(start_step=None)

    def turn(self, seconds: float) -> None:
        for _ in range(self.polls_each if seconds > 1 else 0):
            self.evaluate(seconds / (self.polls_each + 1))
            self.keep()
            self.decide()
            seconds *= self.polls_each / (self.polls_each + 1)
        self.now_s += seconds
        self.steps, self.polls, self.since_s = [step + 1 for step in self.steps], 0, self.now_s
        self.keep()
        self.decide()

    def keep(self) -> None:
        here = self.steps[0] - 1, self.polls
        for word in self.words():
            read = ControlWord.unpack(word.pack())
            assert read is not None
            place = read.place_for(*here)
            if place is RankPlace.EARLY or word.attempt_number in self.seen:
                continue
            self.seen.add(word.attempt_number)
            for rank in range(self.world):
                if place is RankPlace.LATE or (self.polls and self.amid):
                    self.group.save_attempts.record_miss(
                        rank, word.attempt_number, "late" if place is RankPlace.LATE else MID_STEP
                    )
                else:
                    self.group.save_attempts.record_staging(
                        rank, word.attempt_number, Version(*here), word.slot, "d", 0.0
                    )
            if place is RankPlace.DUE and not (self.polls and self.amid):
                self.taken.append(Version(*here))
                self.decide()
                self.group.save_attempts.record_assembly(word.slot, word.attempt_number, "")


@pytest.mark.parametrize("amid", [False, True])
@pytest.mark.parametrize("polls", [1, 2, 3])
@pytest.mark.parametrize("by", ["a notice", "the clock", "an uncertain notice"])
def test_what_each_of_many_evaluations_has_too_few_polls_for_is_taken_at_the_end_of_a_step(
    by: str, polls: int, amid: bool
) -> None:
    driver = InTurns(polls, amid)
    driver.group.clock.set_policy(Every(seconds=30.0) if by == "the clock" else Every(steps=1000), 0.0)
    driver.group.appointments.record_start(0, 0.0)
    driver.steps = [1, 1]
    for seconds in [1.0, 10.0] * 6:
        driver.turn(seconds)
    driver.taken.clear()
    if by == "a notice":
        driver.warn(600.0, exit_timing=ExitTiming.AT_ONCE)
    elif by == "an uncertain notice":
        driver.warn(600.0, certain=False)
    for seconds in [1.0, 10.0] * 10:
        driver.turn(seconds)
    assert driver.taken
