"""The calibration of a predictor's logits, and the area under its ROC curve.

Platt's calibration uses scores of rows that the predictor was not fitted to (Platt 1999; Lin, Lin, Weng 2007, "A note
on Platt's probabilistic outputs", Machine Learning).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

STEPS_MAX = 50
TOLERANCE = 1e-10
LOGIT_MAX = 30.0
RIDGE = 1e-6  # next to nothing: for separated data, or data of one kind only


def platt(logits: Array, y: Array) -> tuple[float, float]:
    """(slope, shift) of the calibrated logit slope * logit + shift, with the least log loss for the outcomes `y` (0 or
    1). The targets are slightly inside 0 and 1, as if one more row of each kind had been seen. So perfectly separated
    data do not give certainty."""
    y = np.asarray(y, dtype=np.float64)
    positive, negative = float(y.sum()), float((1 - y).sum())
    targets = np.where(y > 0, (positive + 1) / (positive + 2), 1 / (negative + 2))
    design = np.stack([np.asarray(logits, dtype=np.float64), np.ones(len(y))], axis=1)
    found = np.zeros(2)

    def loss(at: Array) -> float:
        scaled = design @ at
        return float((np.logaddexp(0, scaled) - targets * scaled).sum() + RIDGE / 2 * at @ at)

    # Newton's method. Each step is halved until the loss falls, so that it also ends on separated data.
    for _ in range(STEPS_MAX):
        p = sigmoid(design @ found)
        hessian = (design * (p * (1 - p))[:, None]).T @ design + RIDGE * np.eye(2)
        step = np.linalg.solve(hessian, design.T @ (p - targets) + RIDGE * found)
        before = loss(found)
        while loss(found - step) > before and abs(step).max() > TOLERANCE:
            step /= 2
        gained = before - loss(found - step)
        if gained <= 0:
            break
        found -= step
        if gained <= TOLERANCE * max(1.0, before):
            break
    slope, shift = found.tolist()
    return (slope, shift) if slope > 0 else (0.0, math.log((positive + 1) / (negative + 1)))


def auc(scores: Array, y: Array) -> float:
    """The area under the ROC curve: the probability that a failure's row has a larger score than another row, ties
    counted half (Mann and Whitney 1947). Not a number if there is only one kind of rows."""
    failed = np.asarray(y) > 0
    positive, negative = int(failed.sum()), int((~failed).sum())
    if not positive or not negative:
        return math.nan
    _, inverse, counts = np.unique(np.asarray(scores), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((ranks[failed].sum() - positive * (positive + 1) / 2) / (positive * negative))


def sigmoid(logits: Array) -> Array:
    found: Array = 1 / (1 + np.exp(-np.clip(logits, -LOGIT_MAX, LOGIT_MAX)))
    return found
