"""The account of a run: each second is booked once, and what a failure throws back is counted from then on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.agent.state import accounting as account_module
from ckpt.agent.state.accounting import PARTS, Accounting, Phase
from ckpt.types import Epoch, Version

FIRST, SECOND = Epoch(1, "0" * 16), Epoch(2, "1" * 16)


class Run:
    """Drives an account by a clock: a step takes a second."""

    def __init__(self) -> None:
        self.account = Accounting()
        self.now_s = 100.0
        self.step = 0
        self.epoch = FIRST

    def wait(self, seconds: float, phase: Phase | None) -> None:
        self.now_s += seconds
        self.account.update(self.now_s, phase, self.step)

    def start(self, step: int = 0, level: str = "none", epoch: Epoch = FIRST, took_s: float = 2.0) -> None:
        self.wait(0.0, Phase.STARTING)
        self.now_s += took_s
        steps_lost = max(0, self.step - step)
        self.epoch, self.step = epoch, step
        self.account.record_start(
            self.now_s, epoch, Version(step), level, {level: 10} if step else {}, None, steps_lost
        )

    def train(self, steps: int) -> None:
        self.step += steps
        self.wait(float(steps), Phase.TRAINING)

    def snapshot(self, stall_s: float = 0.5, commit: bool = False) -> None:
        self.now_s += stall_s
        version = Version(self.step)
        self.account.record_staging(self.now_s, version, stall_s)
        self.account.record_completion(self.epoch, version, 1000)
        if commit:
            self.account.record_commit(self.epoch, version, 3.0, 1000, 400)

    def facts(self) -> dict:
        found = self.account.facts(self.now_s)
        assert sum(found[f"{part}_s"] for part in PARTS) == pytest.approx(found["elapsed_s"])
        assert all(found[f"{part}_s"] >= -1e-9 for part in PARTS)
        return found


def saved(commit: bool = False) -> Run:
    """One that has begun afresh, trained ten steps and taken a snapshot."""
    run = Run()
    run.start()
    run.train(10)
    run.snapshot(commit=commit)
    return run


def test_goodput_is_the_time_on_steps_that_were_kept_over_the_wall_time() -> None:
    run = Run()
    assert run.facts()["goodput"] is None
    run.start()
    run.train(10)
    run.snapshot()
    run.train(7)
    found = run.facts()
    assert found["elapsed_s"] == 19.5
    assert (found["starting_s"], found["productive_s"], found["stall_s"]) == (2, 17, 0.5)
    assert found["goodput"] == pytest.approx(17 / 19.5)
    assert found["snapshots"] == {"number": 1, "seconds": 0.5, "last_s": 0.5}
    assert found["ended_step"] == 17


def test_steps_that_were_ended_since_the_last_look_before_a_failure_are_lost_by_it_too() -> None:
    run = saved()
    run.step += 7  # nothing happened that an agent would look for
    run.wait(7.0, Phase.DOWN)
    run.start(10, "local", SECOND)
    found = run.facts()
    assert (found["lost_steps"], found["lost_s"]) == (7, pytest.approx(7.0))


def test_what_a_failure_throws_back_is_lost_and_the_time_until_training_goes_on_is_recovery() -> None:
    run = saved(commit=True)
    run.train(10)
    run.snapshot()
    run.train(4)
    run.wait(0, Phase.DOWN)
    run.wait(5, Phase.DOWN)
    run.start(20, "local", SECOND, took_s=3)
    found = run.facts()
    assert (found["lost_s"], found["lost_steps"], found["recovery_s"]) == (4, 4, 8)
    assert found["productive_s"] == 20
    assert found["recoveries"] == {"number": 1, "seconds": 8, "last_s": 8}
    assert (found["failures"], found["starts"], found["restores"]) == (1, 2, {"none": 1, "local": 1})
    assert found["restored_bytes"] == {"local": 10}


def test_a_second_failure_that_only_the_store_survives_throws_back_more() -> None:
    run = saved(commit=True)
    run.train(10)
    run.snapshot()
    run.train(4)
    run.wait(0, Phase.DOWN)
    run.start(20, "local", SECOND)
    run.train(6)
    run.wait(0, Phase.DOWN)
    run.start(10, "store", SECOND)
    found = run.facts()
    assert found["productive_s"] == 10
    assert (found["lost_s"], found["lost_steps"]) == (4 + 16, 4 + 16)
    run.train(10)
    run.snapshot()
    run.train(1)
    run.wait(0, Phase.DOWN)
    run.start(20, "local", SECOND)
    assert run.facts()["lost_steps"] == 21


def test_a_restart_over_trainers_that_still_live_is_a_failure_too() -> None:
    run = saved()
    run.train(3)
    run.start(10, "local", SECOND)
    found = run.facts()
    assert (found["failures"], found["lost_steps"], found["recovery_s"]) == (1, 3, 2)


def test_work_between_two_known_snapshots_goes_evenly() -> None:
    run = Run()
    run.start()
    run.train(10)
    run.snapshot(0)
    run.train(30)
    run.snapshot(0)
    run.wait(0, Phase.DOWN)
    run.start(25, "store", SECOND)  # an older agent may have taken that one
    assert run.facts()["productive_s"] == pytest.approx(25)


def test_what_lies_before_all_that_this_agent_knows_is_all_of_its_work() -> None:
    run = Run()
    run.start(100, "store")
    run.train(10)
    run.wait(0, Phase.DOWN)
    run.start(50, "store", SECOND)
    found = run.facts()
    assert (found["productive_s"], found["lost_s"], found["lost_steps"]) == (0, 10, 60)


def test_a_run_that_ended_in_order_costs_nothing_until_it_is_started_again() -> None:
    run = saved(commit=True)
    run.wait(0, Phase.ENDING)
    run.wait(3, Phase.IDLE)
    run.wait(1000, Phase.IDLE)
    run.start(10, "store", SECOND)
    found = run.facts()
    assert (found["elapsed_s"], found["ending_s"], found["starting_s"]) == (17.5, 3, 4)
    assert (found["failures"], found["lost_s"], found["recovery_s"]) == (0, 0, 0)


def test_going_on_from_an_older_checkpoint_on_purpose_is_no_loss() -> None:
    run = saved(commit=True)
    run.train(10)
    run.wait(0, Phase.IDLE)
    run.start(10, "store", SECOND)
    assert (run.facts()["lost_s"], run.facts()["lost_steps"]) == (0, 0)


def test_a_start_that_does_not_come_about_leaves_a_failed_run_down_and_an_ended_one_idle() -> None:
    run = Run()
    run.wait(0, Phase.STARTING)
    run.wait(1, None)
    assert run.account.phase is Phase.IDLE
    run.start()
    run.train(1)
    run.wait(0, Phase.DOWN)
    run.wait(1, Phase.STARTING)
    run.wait(1, None)
    assert run.account.phase is Phase.DOWN
    assert run.facts()["recovery_s"] == 2


def test_no_stall_is_longer_than_the_time_since_the_snapshot_before() -> None:
    run = Run()
    run.start()
    run.train(2)
    run.account.record_staging(run.now_s, Version(2), 50.0)
    run.account.record_staging(run.now_s, Version(3), 50.0)
    assert (run.facts()["stall_s"], run.facts()["productive_s"]) == (2, 0)


def test_an_agent_that_comes_to_a_running_job_counts_from_then() -> None:
    run = Run()
    run.step = 500
    run.account.adopt_epoch(FIRST)
    run.wait(0, Phase.TRAINING)
    run.train(10)
    run.snapshot()
    found = run.facts()
    assert (found["starting_s"], found["productive_s"], found["safe"]["local"]["step"]) == (0, 10, 510)
    run.wait(0, Phase.DOWN)
    run.start(505, "store", SECOND)
    assert run.facts()["productive_s"] == pytest.approx(5, abs=0.3)


def test_what_other_nodes_have_lost_is_not_safe_there_until_they_have_it_again() -> None:
    run = saved(commit=True)
    run.account.record_level("peer", FIRST, Version(10), 100)
    assert run.account.clear_replicated() == Version(10)
    assert run.account.clear_replicated() is None
    assert set(run.facts()["safe"]) == {"local", "store"}
    run.account.record_level("peer", FIRST, Version(10), 100)
    assert run.facts()["safe"]["peer"]["step"] == 10


def test_after_a_start_no_older_step_counts_as_replicated_until_it_is_found() -> None:
    run = saved(commit=True)
    run.account.record_level("peer", FIRST, Version(10), 100)
    run.train(10)
    run.snapshot(commit=True)
    run.wait(0, Phase.DOWN)
    run.start(20, "store", SECOND)
    assert set(run.facts()["safe"]) == {"store"}
    run.account.record_level("peer", FIRST, Version(10))
    assert run.facts()["safe"]["peer"]["step"] == 10


def test_what_a_start_goes_on_from_is_safe_in_other_nodes_memory_once_it_is_found_to_be_there_again() -> None:
    run = Run()
    run.step = 500
    run.account.adopt_epoch(SECOND)
    run.account.record_level("peer", FIRST, Version(490))
    assert "peer" not in run.facts()["safe"], "it is not known yet that this is on the line"
    run.account.adopt_epoch(SECOND, Version(490))
    run.account.record_level("peer", FIRST, Version(495))
    assert "peer" not in run.facts()["safe"], "it is not what is gone on from"
    run.account.record_level("peer", FIRST, Version(490))
    assert run.facts()["safe"]["peer"]["step"] == 490
    run.account.adopt_epoch(FIRST, Version(1))
    run.account.record_level("peer", FIRST, Version(480))
    assert run.facts()["safe"]["peer"]["step"] == 490


def test_the_safe_step_of_each_level_is_the_newest_on_the_line_and_says_its_age() -> None:
    run = saved(commit=True)
    run.train(10)
    run.snapshot()
    run.train(5)
    safe = run.facts()["safe"]
    assert {level: found["step"] for level, found in safe.items()} == {"local": 20, "store": 10}
    assert (safe["local"]["age_s"], safe["store"]["age_s"]) == (5, 15.5)
    run.wait(0, Phase.DOWN)
    run.start(10, "store", SECOND)
    safe = run.facts()["safe"]
    assert {level: found["step"] for level, found in safe.items()} == {"store": 10}
    run.account.record_commit(FIRST, Version(20), 1.0, 1, 1)  # of the start before: not what this one goes on from
    assert run.facts()["safe"]["store"]["step"] == 10
    run.train(20)
    run.snapshot(commit=True)
    assert run.facts()["safe"]["store"]["step"] == 30


def test_a_commit_of_the_start_before_counts_where_this_one_goes_on_from_it() -> None:
    run = saved()
    run.wait(0, Phase.DOWN)
    run.start(10, "local", SECOND)
    assert set(run.facts()["safe"]) == {"local"}
    run.account.record_commit(FIRST, Version(10), 1.0, 1000, 300)
    assert run.facts()["safe"]["store"]["step"] == 10
    assert run.facts()["saved_bytes"] == {"local": 1000, "store": 300}


def test_the_age_of_a_checkpoint_from_the_store_is_what_its_record_says() -> None:
    account = Accounting()
    account.update(0.0, Phase.STARTING)
    account.record_start(1.0, FIRST, Version(7), "store", {}, 60.0, 0)
    assert account.facts(11.0)["safe"] == {"store": {"step": 7, "version": str(Version(7)), "age_s": 70.0}}


def test_the_memory_of_snapshots_is_bounded_and_still_good_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account_module, "MARKS_MAX", 16)
    run = Run()
    run.start()
    for _ in range(200):
        run.train(10)
        run.snapshot(0)
    assert len(run.account._marks) <= 16
    run.wait(0, Phase.DOWN)
    run.start(1230, "store", SECOND)
    assert run.facts()["productive_s"] == pytest.approx(1230, abs=1)


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.floats(0, 50), st.sampled_from([*Phase, None])),
        st.tuples(st.just("start"), st.integers(0, 100), st.sampled_from(["none", "local", "store"])),
        st.tuples(st.just("train"), st.integers(0, 20), st.none()),
        st.tuples(st.just("snapshot"), st.floats(0, 5), st.booleans()),
    ),
    max_size=40,
)


@given(MOVES)
def test_whatever_happens_the_parts_sum_to_the_whole_and_none_is_negative(moves: list) -> None:
    run = Run()
    lost_s, elapsed_s = 0.0, 0.0
    for name, first, second in moves:
        if name == "wait":
            run.wait(first, second)
        elif name == "start":
            run.start(first, second, SECOND)
        elif name == "train":
            run.train(first)
        else:
            run.snapshot(first, second)
        found = run.facts()
        assert found["lost_s"] >= lost_s
        assert found["elapsed_s"] >= elapsed_s
        assert found["goodput"] is None or -1e-9 <= found["goodput"] <= 1 + 1e-9
        lost_s, elapsed_s = found["lost_s"], found["elapsed_s"]
