"""How far a source is believed: cautious ends, nothing before 20 outcomes, and nothing for crying always."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from ckpt.policy.history import SOURCE_NUMBERS_MAX
from ckpt.predict.scoring import LEADS, OUTCOMES_MIN, WINDOW_S, Score, beta_cdf, beta_quantile, merge_scores

DAY_S = 86_400.0


def scored(true: int = 0, false: int = 0, missed: int = 0, late: int = 0, days: float = 30) -> Score:
    score = Score()
    for count, then in (
        (true, lambda s: s.with_true_alarm(120, True)),
        (late, lambda s: s.with_true_alarm(1, False)),
        (false, Score.with_false_alarm),
        (missed, Score.with_missed_failure),
    ):
        for _ in range(count):
            score = then(score.with_watch_time(days * DAY_S / (true + false + missed + late)))
    return score


@pytest.mark.parametrize(
    ("a", "b", "p", "x"),
    [
        (1, 1, 0.3, 0.3),
        (2, 1, 0.25, 0.5),
        (1, 3, 0.875, 0.5),
        (19, 1, 0.05, 0.05 ** (1 / 19)),  # 19 of 19: Clopper and Pearson's bound in closed form
        (8, 3, 0.05, 0.4930987),  # 8 of 10
    ],
)
def test_quantiles_are_the_known_ones(a, b, p, x) -> None:
    assert beta_quantile(a, b, p) == pytest.approx(x, abs=1e-6)
    assert beta_cdf(a, b, x) == pytest.approx(p, abs=1e-6)


def test_a_good_source_is_proven_by_its_twentieth_outcome_and_not_before() -> None:
    before, after = scored(true=OUTCOMES_MIN - 1), scored(true=OUTCOMES_MIN)
    assert (before.recall, before.is_proven) == (0.0, False)
    assert before.precision > 0.8
    assert after.is_proven
    assert after.recall == pytest.approx(0.05 ** (1 / 20), abs=0.02)
    assert after.lead_s == 120


def test_a_source_that_always_cries_is_not_proven() -> None:
    """It finds each of 30 failures in 30 days; one alarm follows another."""
    windows = int(30 * DAY_S / WINDOW_S)
    score = Score()
    for n in range(windows):
        score = score.with_watch_time(WINDOW_S)
        score = score.with_true_alarm(WINDOW_S / 2, True) if n % (windows // 30) == 0 else score.with_false_alarm()
    assert score.seen > OUTCOMES_MIN
    assert not score.is_proven
    assert score.recall == 0


def test_a_source_that_is_wrong_19_times_of_20_is_noise_however_rare_failures_are() -> None:
    score = Score()
    for n in range(600):
        score = score.with_watch_time(DAY_S)
        score = score.with_true_alarm(120, True) if n % 30 == 0 else score.with_false_alarm()
    assert 10 * score.chance_precision < score.precision < 0.05
    assert not score.is_proven


def test_alarms_too_late_to_act_on_count_for_the_precision_and_against_the_recall() -> None:
    score = scored(late=40)
    assert score.precision > 0.9
    assert score.recall == 0
    assert not score.is_proven


def test_what_has_turned_bad_is_found_out() -> None:
    score = scored(true=200)
    assert score.is_proven
    for _ in range(400):
        score = score.with_watch_time(DAY_S).with_missed_failure().with_watch_time(3600).with_false_alarm()
    assert score.recall < 0.05


def test_a_source_that_is_hardly_better_than_chance_is_not_proven_and_unproven_in_turns() -> None:
    """Asked for between outcomes, too, as by whoever acts on alarms: it may become proven as time goes by."""
    changes = []
    for seed in range(10):
        rng, score, was = random.Random(seed), Score(), []
        for _ in range(600):
            for _ in range(4):
                score = score.with_watch_time(7200 * 0.15 / 0.7 / 4)
                was.append(score.is_proven)
            score = score.with_true_alarm(100, True) if rng.random() < 0.15 else score.with_false_alarm()
            if rng.random() < 0.15 * 0.43:
                score = score.with_missed_failure()
            was.append(score.is_proven)
        changes.append(sum(one != other for one, other in itertools.pairwise(was)))
    assert max(changes) <= 3, changes
    assert sum(changes) <= 15, changes


def test_it_comes_back_as_it_was() -> None:
    score = scored(true=25, false=3, missed=2, late=1)
    assert Score.from_numbers(json.loads(json.dumps(score.numbers()))) == score
    assert Score.from_numbers(Score().numbers()) == Score()


def test_all_its_numbers_are_kept_for_the_next_run() -> None:
    score = scored(true=LEADS + 10)
    assert len(score.leads_s) == LEADS
    assert len(score.numbers()) == SOURCE_NUMBERS_MAX


@pytest.mark.parametrize(
    "change",
    [
        {"true": -1},
        {"true": float("nan")},
        {"seen": 0.5},
        {"seen": 1e13},
        {"more": 1},
        {"true": 1e6},
        {"lead.0": float("inf")},
        {"seen": 0},
        {"was_proven": -1},
    ],
)
def test_numbers_that_cannot_be_are_not_taken(change) -> None:
    assert Score.from_numbers({**scored(true=25, false=3).numbers(), **change}) is None
    assert Score.from_numbers({}) is None


def test_of_two_the_one_that_saw_more_counts() -> None:
    more, less = scored(true=10), scored(true=5)
    assert merge_scores({"a": more, "b": less}, {"a": less, "b": more, "c": less}) == {"a": more, "b": more, "c": less}
