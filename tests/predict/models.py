"""Predictors for tests: made up, not trained."""

from __future__ import annotations

import numpy as np

from ckpt.predict.model import Trained, shapes


def made(
    signals: tuple[str, ...] = ("memory.used", "io.some"), hidden: int = 4, window: int = 8, seed: int = 0
) -> Trained:
    rng = np.random.default_rng(seed)
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes(len(signals), hidden).items()}
    arrays["deviation"] = np.abs(arrays["deviation"]) + np.float32(0.1)
    return Trained(signals, window, hidden, 5.0, 0.5, 1.2, -0.3, arrays, {"auc": 0.9})


def certain(probability: float = 0.9, signal: str = "memory.used") -> Trained:
    """Says that of whatever it reads, at the first reading."""
    arrays = {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes(1, 1).items()}
    arrays["deviation"] = np.ones(1, dtype=np.float32)
    return Trained((signal,), 1, 1, 5.0, 0.5, 1.0, float(np.log(probability / (1 - probability))), arrays, {})
