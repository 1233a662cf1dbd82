"""CUSUM: how long to an alarm, what it learns, and when the alarm ends."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from ckpt.predict.cusum import LEARNT_MIN, MEMORY, RELEARN, Cusum, Usual, next_sum


def run_length(rng: random.Random, k: float, h: float, shift: float) -> int:
    total, n = 0.0, 0
    while total <= h:
        total, n = next_sum(total, rng.gauss(shift, 1), k), n + 1
    return n


@pytest.mark.parametrize(
    ("k", "h", "shift", "arl"),
    [(0.5, 4, 0.0, 336.0), (0.5, 5, 0.0, 930.0), (0.5, 4, 1.0, 8.38), (0.5, 5, 1.0, 10.4), (0.5, 5, 2.0, 4.01)],
)
def test_the_run_lengths_are_the_tabulated_ones(k: float, h: float, shift: float, arl: float, seed: int) -> None:
    """One-sided, of known mean and variance: Hawkins and Olwell 1998, Montgomery 2009 (twice the two-sided ones where
    nothing has moved)."""
    rng = random.Random(seed)
    lengths = [run_length(rng, k, h, shift) for _ in range(1500)]
    error = statistics.stdev(lengths) / math.sqrt(len(lengths))
    assert statistics.fmean(lengths) == pytest.approx(arl, abs=5 * error + 0.01 * arl)


def test_mean_and_variance_are_those_of_all_readings(seed: int) -> None:
    values = [random.Random(seed).gauss(1e6, 3.0) for _ in range(500)]
    usual = Usual()
    for value in values:
        usual = usual.with_value(value)
    assert usual.mean == pytest.approx(statistics.fmean(values))
    assert usual.deviation == pytest.approx(statistics.pstdev(values), rel=1e-6)


def test_what_is_usual_moves_along_in_the_end() -> None:
    usual = Usual()
    for value in [0.0] * 10 * MEMORY + [1.0] * 5 * MEMORY:
        usual = usual.with_value(value)
    assert usual.mean == pytest.approx(1.0, abs=0.01)


def learnt(rng: random.Random, **how: float) -> Cusum:
    found = Cusum(**how)
    for _ in range(500):
        found = found.with_reading(rng.gauss(10, 2))
    return found


def test_an_alarm_stands_while_the_signal_is_unusual_and_ends_when_it_is_not(seed: int) -> None:
    rng = random.Random(seed)
    before = learnt(rng, k=1, h=10)
    assert not before.is_alarm
    raised = before
    for _ in range(20):
        raised = raised.with_reading(10 + 5 * 2)
    assert raised.is_alarm
    for _ in range(RELEARN // 2):
        raised = raised.with_reading(10 + 5 * 2)
    assert raised.is_alarm
    assert raised.baseline.mean == pytest.approx(10, abs=0.7), "what is unusual is not learnt"
    calm = raised
    for _ in range(60):
        calm = calm.with_reading(rng.gauss(10, 2))
    assert not calm.is_alarm


def test_what_lasts_becomes_the_usual(seed: int) -> None:
    found = learnt(random.Random(seed), k=1, h=10)
    for _ in range(20 + RELEARN + LEARNT_MIN):
        found = found.with_reading(30.0)
    assert not found.is_alarm
    assert found.baseline.mean == 30.0


def test_nothing_is_said_before_enough_is_learnt_and_one_wild_reading_is_no_alarm() -> None:
    found = Cusum(k=1, h=10)
    for value in [1.0] * (LEARNT_MIN // 2) + [1e9]:
        found = found.with_reading(value)
    assert not found.is_alarm
    found = learnt(random.Random(1), k=1, h=10).with_reading(1e300)
    assert not found.is_alarm
    assert found.with_reading(math.nan) == found


def test_a_counter_that_was_always_zero_raises_an_alarm_by_its_least_deviation() -> None:
    found = Cusum(k=1, h=10, min_deviation=0.01)
    for _ in range(100):
        found = found.with_reading(0.0)
    for _ in range(2):
        found = found.with_reading(1.0)
    assert found.is_alarm
