"""What a step takes, and how long the ranks are in the one that they are in."""

from __future__ import annotations

import pytest

from ckpt.agent.state.step_timing import DOUBTS_MAX, LONG_FACTOR, STEP_S, StepTiming
from ckpt.ipc.control_page import SUB_MAX
from ckpt.types import Version


def trained(step_s: float, steps: int = 10) -> tuple[StepTiming, float]:
    """Two ranks, of which the first shows when it enters a step; and when they enter the last one."""
    pace, now_s = StepTiming(), 100.0
    for step in range(1, steps + 1):
        now_s += step_s
        pace.record_progress(now_s + 0.3 * step_s, [step, step], [0, 0], [now_s, None], None)
    return pace, now_s


def test_before_a_step_was_seen_it_takes_a_second() -> None:
    pace = StepTiming()
    pace.record_progress(5.0, [0, 0], (), (), None)
    assert (pace.boundary_interval_s, pace.measured_step_s, pace.is_long, pace.all_poll) == (STEP_S, None, False, False)


def test_a_step_is_measured_from_when_ranks_enter_it_however_late_that_is_seen() -> None:
    pace, now_s = trained(1.5)
    assert (pace.usual_step_s, pace.entered_s, pace.is_entry_published) == (pytest.approx(1.5), now_s, True)
    pace.record_progress(now_s + 9.0, [11, 11], (), (), None)
    assert (pace.entered_s, pace.is_entry_published) == (now_s + 9.0, False), "that is when it was seen"
    pace.record_progress(now_s + 10.0, [12, 12], (), [now_s + 10.1, None], None)
    assert (pace.entered_s, pace.is_entry_published) == (now_s + 10.0, False), "that is of the step after it"


def test_where_all_ranks_poll_what_lies_between_two_polls_does() -> None:
    pace, now_s = trained(1.5)
    pace.record_progress(now_s + 60.0, [10, 10], [30, 29], [now_s, None], None)
    assert (pace.all_poll, pace.boundary_interval_s, pace.is_long) == (True, pytest.approx(2.0), True)
    pace.record_progress(now_s + 60.0, [10, 10], [30, 29], [now_s, None], Version(9, 10))
    assert (pace.all_poll, pace.boundary_interval_s) == (True, pytest.approx(3.0)), "that far it were saves"
    pace.record_progress(now_s + 60.0, [10, 10], [1, 1], [now_s, None], Version(9, 1))
    assert (pace.all_poll, pace.boundary_interval_s) == (False, pytest.approx(60.0))
    pace.record_progress(now_s + 60.0, [10, 10], [1, 1], [now_s, None], Version(8, 1))
    assert pace.all_poll
    pace.record_progress(now_s + 60.0, [10, 10], [31, 0], [now_s, None], None)
    assert (pace.all_poll, pace.boundary_interval_s) == (False, pytest.approx(60.0)), "one of them does not"
    pace.record_progress(now_s + 60.0, [11, 10], [31, 30], [now_s, None], None)
    assert not pace.all_poll, "they are not in one step"
    pace.record_progress(now_s + 60.0, [10, 10], [SUB_MAX, 30], [now_s, None], None)
    assert not pace.all_poll, "no more of them can be told apart"


def test_one_long_step_was_an_evaluation_and_two_are_another_pace() -> None:
    pace, now_s = trained(1.5)
    pace.record_progress(now_s + 60.0, [11, 11], [0, 0], [now_s + 60.0, None], None)
    assert pace.usual_step_s == pytest.approx(1.5)
    pace.record_progress(now_s + 61.5, [12, 12], [0, 0], [now_s + 61.5, None], None)
    pace.record_progress(now_s + 121.5, [13, 13], [0, 0], [now_s + 121.5, None], None)
    assert pace.usual_step_s == pytest.approx(1.5), "there was another evaluation"
    pace.record_progress(now_s + 181.5, [14, 14], [0, 0], [now_s + 181.5, None], None)
    assert pace.usual_step_s == pytest.approx(60.0)


def test_polls_are_counted_from_when_the_foremost_rank_is_first_seen_in_their_step() -> None:
    pace, now_s = trained(1.0)
    for for_s, polls, per_s in ((0.1, 4, 4.0), (2.0, 8, 4.0), (3.0, 21, 7.0)):
        pace.record_progress(now_s + for_s, [10, 10], [0, polls], [now_s, None], None)
        assert pace.polls_per_s == pytest.approx(per_s, rel=0.2)
    pace.record_progress(now_s + 4.0, [11, 10], [50, 21], (), None)
    assert pace.polls_per_s == 0.0
    pace.record_progress(now_s + 6.0, [11, 11], [60, 21], (), None)
    assert pace.polls_per_s == pytest.approx(5.0)
    pace.record_progress(now_s + 7.0, [0, 11], [0, 22], (), None)
    assert pace.polls_per_s == 0.0, "that rank was lost"


def test_a_step_has_to_take_twice_as_long_each_time_that_polls_of_another_one_came_to_nothing() -> None:
    pace, now_s = trained(1.0)

    def looks(step: int, for_s: float) -> tuple[bool, bool]:
        pace.record_progress(now_s + for_s, [step] * 2, [1, 1], [now_s, None], None)
        return pace.is_poll_next, pace.is_long

    assert looks(10, LONG_FACTOR + 0.1) == (True, True)
    for _ in range(3):  # once for each step
        pace.record_missed_poll(10)
        assert looks(10, LONG_FACTOR + 0.1) == (True, True), "of this one more is known"
    assert looks(11, LONG_FACTOR + 0.1) == (False, False)
    assert looks(11, 2 * LONG_FACTOR + 0.1) == (False, True)
    pace.record_completion()
    assert looks(11, LONG_FACTOR + 0.1) == (True, True)


def test_however_many_evaluations_came_to_nothing_one_that_can_be_saved_in_is_tried_again() -> None:
    pace, now_s = trained(1.0)
    for step in range(10, 2000):
        pace.record_missed_poll(step)
    for for_s, is_long in ((LONG_FACTOR * 2**DOUBTS_MAX - 1.0, False), (LONG_FACTOR * 2**DOUBTS_MAX + 1.0, True)):
        pace.record_progress(now_s + for_s, [2000] * 2, [1, 1], [now_s, None], None)
        assert pace.is_long is is_long
    for _ in range(DOUBTS_MAX):
        pace.record_completion()
    assert pace.is_poll_next
