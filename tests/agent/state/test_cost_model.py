"""What the agent learns of a job, from what happens anyway."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

import pytest

from ckpt.agent.state.cost_model import CostModel, classify_failure
from ckpt.policy.adaptive import Adaptive
from ckpt.policy.failures import Failure
from ckpt.policy.history import recall
from ckpt.storage import open as open_store
from ckpt.store.reader import open_record
from ckpt.store.run import Run
from tests.agent.fake import FakeRank
from tests.agent.node import test_agent
from tests.agent.node.test_agent import checkpoint, finish, one_step, reconnect, start, wait_for, wait_gone
from tests.agent.observability.test_status import status_of

url, ranks = test_agent.url, test_agent.ranks  # the fixtures


def trained(learning: CostModel, commits: int, step_s: float = 0.1, beside_s: float = 0.2) -> float:
    """Some commits of 2 s, 10 s apart; when the last one ended."""
    now_s, step = 100.0, 0
    learning.record_start(now_s, step)
    for _ in range(commits):
        learning.record_stall(0.5, step)
        now_s, step = now_s + 8.0, step + round(7.5 / step_s)
        learning.record_commit_begin(now_s, step)
        now_s, step = now_s + 2.0, step + round(2.0 / beside_s)
        learning.record_commit_end(now_s, step, (2.0, 10**6))
    return now_s


def test_costs_are_read_off_snapshots_commits_and_the_steps_between_them() -> None:
    learning = CostModel(Adaptive())
    trained(learning, 8)
    known = learning.measurements
    assert known.stall.mean == pytest.approx(0.5)
    assert (known.commit.mean, known.commit_bytes.mean) == (2.0, 10**6)
    assert known.step.mean == pytest.approx(0.1), "without what the snapshots stalled"
    assert known.step_beside_commit.mean == pytest.approx(0.2)


@pytest.mark.parametrize("commit_s", [10.0, 50.0, 90.0])
def test_what_commits_slow_training_by_does_not_come_from_where_in_a_step_they_end(commit_s: float) -> None:
    """They begin after one, and steps take 20 s, always, beside what each snapshot stalls."""
    learning, now_s, step = CostModel(Adaptive()), 0.0, 1
    learning.record_start(now_s, step)
    for _ in range(16):
        now_s, step = now_s + 200.0, step + 10
        learning.record_stall(0.5, step)
        learning.record_commit_begin(now_s, step)
        steps = int((commit_s - 0.5) / 20.0)
        learning.record_commit_end(now_s + 0.5 * (steps > 0) + 20.0 * steps, step + steps, (commit_s, 10**6))
        now_s += 0.5
    assert learning.measurements.step.mean == pytest.approx(20.0)
    if steps > 1:
        assert learning.measurements.step_beside_commit.mean == pytest.approx(20.0)


def test_a_commit_that_failed_says_nothing_of_what_commits_take() -> None:
    learning = CostModel(Adaptive())
    learning.record_start(0.0, 0)
    learning.record_commit_begin(10.0, 100)
    learning.record_commit_end(70.0, 400, None)
    assert learning.measurements.commit.count == 0
    assert learning.measurements.step_beside_commit.count == 1


def test_few_steps_and_short_times_are_no_pace() -> None:
    learning = CostModel(Adaptive())
    learning.record_start(0.0, 5)
    learning.record_commit_begin(60.0, 6)  # one long step
    learning.record_commit_end(60.01, 9, (0.01, 1))
    assert not learning.measurements.step.count
    assert not learning.measurements.step_beside_commit.count


def test_the_intervals_follow_what_is_learnt_and_stay_where_nothing_new_is() -> None:
    learning = CostModel(Adaptive())
    first = learning.decision
    assert first.local_by == "start"
    now_s = trained(learning, 8)
    learned = learning.decide(now_s)
    assert learned.local_by != "start"
    again = learning.decide(now_s + 1.0)
    assert (again.local_s, again.snapshots) == (learned.local_s, learned.snapshots)


def test_nodes_fail_each_by_itself_and_their_loss_needs_the_store_only_where_no_other_keeps_copies() -> None:
    learning = CostModel(Adaptive(), nodes=4)
    now_s = trained(learning, 8)
    learning.record_failure(Failure.NODE)
    alone = learning.decide(now_s)
    assert learning.measurements.node.total_exposure_s == pytest.approx(
        4 * learning.measurements.process.total_exposure_s
    )
    learning.has_replicas = True
    kept = learning.decide(now_s)
    assert kept.store_s > alone.store_s
    assert kept.local_s <= alone.local_s
    learning.record_recovery("peer", 3.0)
    assert learning.measurements.peer_recovery.mean == 3.0


@pytest.mark.parametrize(
    ("lost_nodes", "peers", "from_store", "warned", "failure"),
    [
        (0, True, False, False, Failure.PROCESS),
        (0, False, True, True, Failure.PROCESS),
        (1, True, False, False, Failure.NODE),
        (2, True, False, True, Failure.PREEMPTION),
        (1, False, True, False, Failure.NODE),
        (1, False, True, True, Failure.PREEMPTION),
        (1, True, True, False, Failure.JOB),
        (4, True, True, True, Failure.JOB),
    ],
)
def test_a_failure_is_of_the_class_of_what_was_lost(lost_nodes, peers, from_store, warned, failure) -> None:
    assert classify_failure(lost_nodes, peers, from_store, warned) is failure


def test_a_commit_that_ended_after_its_ranks_takes_no_run_time_back() -> None:
    learning = CostModel(Adaptive())
    learning.record_start(0.0, 0)
    learning.decide(100.0)
    learning.decide(99.5)  # when the ranks were seen gone
    assert learning.measurements.process.total_exposure_s == 100.0
    learning.decide(101.0)
    assert learning.measurements.process.total_exposure_s == 101.0


def test_failures_shorten_the_intervals_and_outlive_the_job_in_its_records() -> None:
    learning = CostModel(Adaptive())
    now_s = trained(learning, 8)
    before = learning.decide(now_s)
    for _ in range(5):
        now_s += 600.0
        learning.decide(now_s)
        learning.record_failure(Failure.PROCESS)
    assert learning.decide(now_s).local_s < before.local_s
    heir = CostModel(Adaptive())
    recalled = recall(learning.record_fields())
    assert not recalled.refusal
    heir.merge_measurements(recalled.measurements)
    assert heir.measurements.process == learning.measurements.process
    assert heir.measurements.stall.count == 0, "another machine may have other costs"


OFTEN = {
    **test_agent.OPTIONS,
    "policy": {"kind": "adaptive", "overhead": 1.0, "store_mb_s": None, "at_risk_s": 1.0},
}


def failures_seen(url: str) -> int:
    found: int = status_of(url)["job"]["rates"]["process"]["seen"]
    return found


def test_each_failure_counts_though_nothing_was_saved_since_the_one_before(
    url: str, ranks: Callable[..., list[FakeRank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where failures come more often than snapshots they are what the interval has to follow."""
    monkeypatch.setenv("CKPT_LINGER_S", "60")
    for number in range(4):
        (rank,) = job = ranks(1, options=OFTEN)
        start(job)
        assert failures_seen(url) == number
        wait_for(lambda: status_of(url)["account"]["phase"] == "training")
        assert status_of(url)["account"]["failures"] == number
        if not number:
            checkpoint(job, "store")
        if number < 3:
            rank.leave("exception")
            rank.connection.close()
    finish(job)


def test_starts_with_given_intervals_hand_on_what_was_learnt_before_them_and_what_they_see(
    url: str, ranks: Callable[..., list[FakeRank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the records alone: no agent that knew it is left, and none of the newest is of an adaptive start."""
    monkeypatch.setenv("CKPT_LINGER_S", "60")
    for options, seen in ((OFTEN, 0), (test_agent.OPTIONS, 1), (OFTEN, 2)):
        for fails in (True, False) if seen < 2 else (False,):
            (rank,) = job = ranks(1, options=options)
            start(job)
            assert failures_seen(url) == seen + (not fails and seen < 2)
            for _ in range(4):
                checkpoint(job, "store")
            if fails:
                rank.leave("exception")
            else:
                finish(job)
            agent = rank.connection.agent_pid
            rank.connection.close()
        wait_gone(agent)


def test_an_agent_that_takes_over_a_job_knows_what_that_had_learnt_and_hands_it_on(
    url: str, ranks: Callable[..., list[FakeRank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_LINGER_S", "60")
    for number in range(2):  # what ends by an exception has failed
        (rank,) = job = ranks(1, options=OFTEN)
        start(job)
        assert failures_seen(url) == number
        checkpoint(job, "store")
        if not number:
            rank.leave("exception")
            rank.connection.close()
    agent = rank.connection.agent_pid
    os.kill(agent, signal.SIGKILL)
    assert rank.lost.wait(30)
    rank.disconnect()
    reconnect(rank)
    rank.join(rank.epoch, resume=True)
    rank.wait_warm()
    wait_for(lambda: failures_seen(url) == 1)
    one_step(rank)  # it says where it is
    checkpoint(job, "store")
    finish(job)
    agent = rank.connection.agent_pid
    rank.connection.close()
    wait_gone(agent)
    with contextlib.closing(open_store(url)) as store:
        newest = open_record(store, Run(store).view().history[-1])
    assert newest.about["learnt"]["process.seen"] == 1
