"""A node's step time against the median of its peers."""

from __future__ import annotations

import pytest

from ckpt.predict.step_ratio import StepRatios


def test_who_is_slow_is_slower_than_the_median_and_who_is_fast_faster() -> None:
    paces = StepRatios()
    assert paces.add_steps(0.0, {"a": 0, "b": 0, "c": 0, "d": 0}) == {}
    found = paces.add_steps(10.0, {"a": 100, "b": 100, "c": 50, "d": 200})
    assert found == pytest.approx({"a": 1.0, "b": 1.0, "c": 2.0, "d": 0.5})


def test_of_too_few_or_of_who_stands_still_nothing_is_said() -> None:
    paces = StepRatios()
    paces.add_steps(0.0, {"a": 0, "b": 0, "c": 0})
    assert paces.add_steps(5.0, {"a": 10, "b": 10, "c": 0}) == {}
    assert paces.add_steps(10.0, {"a": 20, "b": 20, "c": 10})["c"] == pytest.approx(2.0), "counted from its last step"


def test_who_goes_back_begins_anew() -> None:
    paces = StepRatios()
    paces.add_steps(0.0, {"a": 100, "b": 100, "c": 100})
    assert paces.add_steps(1.0, {"a": 0, "b": 0, "c": 0}) == {}
    assert paces.add_steps(10.0, {"a": 20, "b": 20, "c": 90})["a"] == pytest.approx(0.45 / 0.275)


@pytest.mark.parametrize("steps_per_s", [0.1, 1.0, 30.0])
def test_of_nodes_that_keep_step_nothing_is_said_however_old_what_is_known_of_the_others_is(steps_per_s: float) -> None:
    paces = StepRatios()
    for look in range(1, 50):
        now_s = 5.0 * look
        ages_s = {"here": 0.0, "there": 1.9 * (look % 3) / 2, "far": 1.9 * (look % 2)}
        assert paces.add_steps(now_s, {node: int((now_s - age) * steps_per_s) for node, age in ages_s.items()}) == {}
