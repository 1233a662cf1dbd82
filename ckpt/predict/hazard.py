"""The hazard model: the probability of a failure within the window, by a calibrated logistic regression.

It is fitted by Newton's method from few failures and tens of features, and its probability must be reliable. So the
weights are penalised (the intercept is not: without data the answer is the base rate). Platt's calibration uses scores
of parts that the weights were not fitted to (Platt 1999; Lin, Lin, Weng 2007, "A note on Platt's probabilistic
outputs", Machine Learning).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import UsageError

Array = npt.NDArray[np.float64]

# The weight decay: worth one observation that each weight is about 0 plus or minus 1.
RIDGE = 1.0
STEPS_MAX = 50
TOLERANCE = 1e-10
FOLDS = 5
LOGIT_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Hazard:
    """A fitted model. `weights` (one per feature) and `intercept`: of the uncalibrated logit. `slope`, `shift`: of the
    calibration."""

    weights: tuple[float, ...]
    intercept: float
    slope: float = 1.0
    shift: float = 0.0

    @classmethod
    def from_base_rate(cls, rate: float, features: int = 0) -> Hazard:
        """The model that always answers `rate`: used before anything is learnt."""
        rate = min(max(rate, 1e-9), 1 - 1e-9)
        return cls((0.0,) * features, math.log(rate / (1 - rate)))

    def logits(self, x: Array) -> Array:
        """The uncalibrated logits, one per row."""
        raw: Array = np.asarray(x, dtype=np.float64) @ np.asarray(self.weights) + self.intercept
        return raw

    def probabilities(self, x: Array) -> Array:
        return sigmoid(self.slope * self.logits(x) + self.shift)

    def probability(self, features: Array) -> float:
        return float(self.probabilities(np.asarray(features, dtype=np.float64)[None, :])[0])


def fit(x: Array, y: Array, weights: Array | None = None, groups: npt.NDArray[Any] | None = None) -> Hazard:
    """Fits a model to rows of features and outcomes: 1 if a failure followed, else 0.

    `weights`: how many observations each row stands for. `groups`: rows of one group, such as those before one failure,
    are never split between fit and calibration; by default each row is its own group. With failures in fewer than two
    groups there is no calibration. Errors: UsageError for shapes that do not match, or invalid values.
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    w = np.ones(len(y)) if weights is None else np.asarray(weights, dtype=np.float64)
    if x.ndim != 2 or not len(x) == len(y) == len(w) or not len(y):
        raise UsageError(
            f"features of shape {x.shape}, {len(y)} outcomes and {len(w)} weights do not have the same number of rows"
        )
    if not (np.isfinite(x).all() and np.isin(y, (0, 1)).all() and (w > 0).all() and np.isfinite(w).all()):
        raise UsageError("features and weights must be finite, weights above 0, and outcomes 0 or 1")
    coefficients = _newton(_with_one(x), y, w, RIDGE)
    slope, shift = _calibrated(x, y, w, np.arange(len(y)) if groups is None else np.asarray(groups))
    return Hazard(tuple(coefficients[:-1].tolist()), float(coefficients[-1]), slope, shift)


def platt(logits: Array, y: Array, weights: Array | None = None) -> tuple[float, float]:
    """(slope, shift) of the calibrated logit slope * logit + shift. The targets are slightly inside 0 and 1, as if one
    more row of each kind had been seen. So perfectly separated data do not give certainty."""
    y = np.asarray(y, dtype=np.float64)
    w = np.ones(len(y)) if weights is None else np.asarray(weights, dtype=np.float64)
    positive, negative = float(w @ y), float(w @ (1 - y))
    targets = np.where(y > 0, (positive + 1) / (positive + 2), 1 / (negative + 2))
    design = np.stack([np.asarray(logits, dtype=np.float64), np.ones(len(y))], axis=1)
    slope, shift = _newton(design, targets, w, 1e-6)
    return (float(slope), float(shift)) if slope > 0 else (0.0, math.log((positive + 1) / (negative + 1)))


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


def _calibrated(x: Array, y: Array, w: Array, groups: npt.NDArray[Any]) -> tuple[float, float]:
    """The calibration, from scores of each fold by weights that were fitted to the other folds."""
    failing = np.unique(groups[y > 0])
    if len(failing) < 2 or not (y == 0).any():
        return 1.0, 0.0
    folds = min(FOLDS, len(failing))
    fold_of = {each: i % folds for i, each in enumerate(failing.tolist())}
    rest = [each for each in np.unique(groups).tolist() if each not in fold_of]
    fold_of |= {each: i % folds for i, each in enumerate(rest)}
    fold = np.array([fold_of[each] for each in groups.tolist()])
    logits = np.zeros(len(y))
    for each in range(folds):
        inside = fold == each
        coefficients = _newton(_with_one(x[~inside]), y[~inside], w[~inside], RIDGE)
        logits[inside] = _with_one(x[inside]) @ coefficients
    return platt(logits, y, w)


def _with_one(x: Array) -> Array:
    return np.concatenate([x, np.ones((len(x), 1))], axis=1)


def _newton(design: Array, targets: Array, w: Array, ridge: float) -> Array:
    """The coefficients of least penalised log loss. The last one, the intercept, is not penalised. Each step is halved
    until the loss falls, so that it also ends on separated data."""
    penalty = np.full(design.shape[1], ridge)
    penalty[-1] = 1e-6  # almost none, for data of one kind only
    found = np.zeros(design.shape[1])
    loss = _loss(design, targets, w, penalty, found)
    for _ in range(STEPS_MAX):
        p = sigmoid(design @ found)
        gradient = design.T @ (w * (p - targets)) + penalty * found
        hessian = (design * (w * p * (1 - p))[:, None]).T @ design + np.diag(penalty)
        step = np.linalg.solve(hessian, gradient)
        size = 1.0
        while (moved := _loss(design, targets, w, penalty, found - size * step)) > loss and size > 1e-6:
            size /= 2
        if not moved < loss:
            break
        found, gained, loss = found - size * step, loss - moved, moved
        if gained <= TOLERANCE * max(1.0, abs(loss)):
            break
    return found


def _loss(design: Array, targets: Array, w: Array, penalty: Array, found: Array) -> float:
    logits = design @ found
    return float(w @ (np.logaddexp(0, logits) - targets * logits) + 0.5 * (penalty * found) @ found)
