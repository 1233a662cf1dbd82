"""Calibration and the area under the curve, on drawn outcomes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ckpt.predict.calibration import auc, platt, sigmoid


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


def test_separated_outcomes_do_not_become_certain() -> None:
    slope, shift = platt(np.array([-4.0] * 200 + [4.0] * 6), np.array([0.0] * 200 + [1.0] * 6))
    certain, never = sigmoid(slope * np.array([4.0, -4.0]) + shift)
    assert 0.7 < certain < 0.99
    assert 0 < never < 0.02
