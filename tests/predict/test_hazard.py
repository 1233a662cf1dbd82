"""The hazard: the base rate where nothing is learnt, the right probabilities where something is."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ckpt.errors import UsageError
from ckpt.predict.hazard import Hazard, auc, fit, platt, sigmoid

TRUE = np.array([1.5, -0.7, 0.0])


def drawn(seed: int, rows: int = 4000, intercept: float = -2.0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3))
    p = sigmoid(x @ TRUE + intercept)
    return x, (rng.random(rows) < p).astype(float), p


def log_loss(probabilities: np.ndarray, y: np.ndarray) -> float:
    """The mean of -log of what was given to the outcome: a proper score, the least for the true probabilities."""
    p = np.clip(np.asarray(probabilities, dtype=np.float64), 1e-12, 1 - 1e-12)
    return float(-np.mean(np.where(np.asarray(y) > 0, np.log(p), np.log1p(-p))))


def test_it_begins_at_the_base_rate() -> None:
    hazard = Hazard.from_base_rate(0.01, features=3)
    assert hazard.probability(np.array([5.0, -5.0, 100.0])) == pytest.approx(0.01)


def test_what_cannot_be_told_apart_stays_at_the_base_rate(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2000, 5)), (rng.random(2000) < 0.05).astype(float)
    found = fit(x, y).probabilities(rng.normal(size=(1000, 5)))
    assert found.mean() == pytest.approx(y.mean(), abs=0.02)
    assert found.max() < 0.2


def test_the_true_weights_are_found(seed: int) -> None:
    x, y, _ = drawn(seed, 20_000)
    found = fit(x, y)
    assert np.array(found.weights) == pytest.approx(TRUE, abs=0.2)
    assert found.intercept == pytest.approx(-2.0, abs=0.2)


def test_its_score_is_nearly_that_of_the_true_probabilities_and_better_than_the_base_rates(seed: int) -> None:
    x, y, _ = drawn(seed)
    found = fit(x, y)
    x, y, p = drawn(seed + 1, 20_000)
    mine = log_loss(found.probabilities(x), y)
    assert mine < log_loss(p, y) + 0.01
    assert mine < log_loss(np.full(len(y), y.mean()), y) - 0.05
    for low, high in ((0.05, 0.15), (0.2, 0.4), (0.5, 0.8)):
        inside = (found.probabilities(x) >= low) & (found.probabilities(x) < high)
        assert y[inside].mean() == pytest.approx(found.probabilities(x)[inside].mean(), abs=0.08), "calibrated"


def test_few_failures_that_are_separated_do_not_become_certain() -> None:
    x = np.concatenate([np.zeros((200, 1)), np.full((6, 1), 4.0)])
    y = np.concatenate([np.zeros(200), np.ones(6)])
    found = fit(x, y)
    assert 0.3 < found.probability(np.array([4.0])) < 0.99
    assert found.probability(np.array([0.0])) < 0.03


def test_a_row_may_stand_for_many(seed: int) -> None:
    x, y, _ = drawn(seed, 500)
    w = np.random.default_rng(seed).integers(1, 4, len(y))
    weighted = fit(x, y, w.astype(float))
    repeated = fit(np.repeat(x, w, axis=0), np.repeat(y, w), groups=np.repeat(np.arange(len(y)), w))
    assert np.array(weighted.weights) == pytest.approx(np.array(repeated.weights), abs=1e-6)


def test_calibration_undoes_a_logit_that_is_too_sure(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=20_000)
    y = (rng.random(len(logits)) < sigmoid(0.5 * logits - 1)).astype(float)
    assert platt(logits, y) == pytest.approx((0.5, -1.0), abs=0.08)
    slope, shift = platt(-logits, y)
    assert (slope, sigmoid(np.array(shift))) == (0.0, pytest.approx(y.mean(), abs=0.01)), "worse than nothing: nothing"


def test_the_area_under_the_curve_counts_ties_half() -> None:
    assert auc(np.array([1, 2, 3, 4.0]), np.array([0, 0, 1, 1])) == 1.0
    assert auc(np.array([4, 3, 2, 1.0]), np.array([0, 0, 1, 1])) == 0.0
    assert auc(np.array([1, 1, 1, 1.0]), np.array([0, 1, 1, 0])) == 0.5
    assert auc(np.array([1, 2, 2, 3.0]), np.array([0, 0, 1, 1])) == 0.875
    assert math.isnan(auc(np.array([1.0]), np.array([1])))


@pytest.mark.parametrize(
    ("x", "y", "w"),
    [
        (np.zeros((2, 1)), [0], None),
        (np.zeros(2), [0, 1], None),
        (np.zeros((0, 1)), [], None),
        (np.full((1, 1), np.nan), [0], None),
        (np.zeros((1, 1)), [2], None),
        (np.zeros((1, 1)), [1], [0]),
    ],
)
def test_what_cannot_be_fitted_is_refused(x, y, w) -> None:
    with pytest.raises(UsageError):
        fit(x, np.array(y), None if w is None else np.array(w))


def test_one_kind_of_outcome_only_is_no_error() -> None:
    assert fit(np.zeros((50, 2)), np.zeros(50)).probability(np.zeros(2)) < 0.01
