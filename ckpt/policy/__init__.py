"""The policy: when to save and what to keep. Values, and pure functions that compute intervals from measured costs.

Start with save_options.py (what the user sets), then interval_solver.py (how the intervals are chosen). Imports only
the base modules of ckpt. Names are loaded on first use (PEP 562): most of ckpt needs only save_options.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.policy.adaptive import Adaptive, Chosen, Decision
    from ckpt.policy.failures import Failure, FailureRate
    from ckpt.policy.history import Recalled, merged, recall, remember
    from ckpt.policy.interval import checkfreq_steps, daly, daly_higher, exact, overhead, young
    from ckpt.policy.interval_solver import decide
    from ckpt.policy.known import Measurements
    from ckpt.policy.levels import (
        Intervals,
        Level,
        LevelCosts,
        Nested,
        best,
        nested,
        nested_overhead,
        overhead_first_order,
        overhead_of,
        snapshots_per_commit,
        staleness,
        store_rate,
    )
    from ckpt.policy.predicted import Predicted, predicted_waste, with_predictions
    from ckpt.policy.rates import Change, GammaRate, reconsider
    from ckpt.policy.robust_mean import RobustMean
    from ckpt.policy.save_options import Best, Every, Keep, Limits
    from ckpt.policy.uptime import weibull_next, weibull_overhead, weibull_scale, weibull_survival, weibull_times

_WHERE = {
    "Adaptive": "adaptive",
    "Chosen": "adaptive",
    "Decision": "adaptive",
    "decide": "interval_solver",
    "Best": "save_options",
    "Every": "save_options",
    "Keep": "save_options",
    "Limits": "save_options",
    "Failure": "failures",
    "FailureRate": "failures",
    "checkfreq_steps": "interval",
    "daly": "interval",
    "daly_higher": "interval",
    "exact": "interval",
    "overhead": "interval",
    "young": "interval",
    "Measurements": "known",
    "Intervals": "levels",
    "Level": "levels",
    "LevelCosts": "levels",
    "Nested": "levels",
    "best": "levels",
    "nested": "levels",
    "nested_overhead": "levels",
    "overhead_first_order": "levels",
    "overhead_of": "levels",
    "snapshots_per_commit": "levels",
    "staleness": "levels",
    "store_rate": "levels",
    "Predicted": "predicted",
    "predicted_waste": "predicted",
    "with_predictions": "predicted",
    "Change": "rates",
    "GammaRate": "rates",
    "reconsider": "rates",
    "Recalled": "history",
    "merged": "history",
    "recall": "history",
    "remember": "history",
    "RobustMean": "robust_mean",
    "weibull_next": "uptime",
    "weibull_overhead": "uptime",
    "weibull_scale": "uptime",
    "weibull_survival": "uptime",
    "weibull_times": "uptime",
}

__all__ = [
    "Adaptive",
    "Best",
    "Change",
    "Chosen",
    "Decision",
    "Every",
    "Failure",
    "FailureRate",
    "GammaRate",
    "Intervals",
    "Keep",
    "Level",
    "LevelCosts",
    "Limits",
    "Measurements",
    "Nested",
    "Predicted",
    "Recalled",
    "RobustMean",
    "best",
    "checkfreq_steps",
    "daly",
    "daly_higher",
    "decide",
    "exact",
    "merged",
    "nested",
    "nested_overhead",
    "overhead",
    "overhead_first_order",
    "overhead_of",
    "predicted_waste",
    "recall",
    "reconsider",
    "remember",
    "snapshots_per_commit",
    "staleness",
    "store_rate",
    "weibull_next",
    "weibull_overhead",
    "weibull_scale",
    "weibull_survival",
    "weibull_times",
    "with_predictions",
    "young",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ckpt.policy' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ckpt.policy.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
