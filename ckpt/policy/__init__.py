"""The policy: when to save and what to keep. Values, and pure functions that compute intervals from measured costs.

Start with save_options.py (what the user sets), then interval_solver.py (how the intervals are chosen). Imports only
the base modules of ckpt. Names are loaded on first use (PEP 562): most of ckpt needs only save_options.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "adaptive": ("Adaptive", "Chosen", "Decision"),
    "failures": ("Failure", "FailureRate"),
    "history": ("Recalled", "merged", "recall", "remember"),
    "interval": ("exact", "overhead", "young"),
    "interval_solver": ("decide",),
    "known": ("Measurements",),
    "levels": ("LevelCosts", "overhead_of", "snapshots_per_commit"),
    "predicted": ("Predicted", "predicted_waste", "with_predictions"),
    "rates": ("Change", "GammaRate", "reconsider"),
    "robust_mean": ("RobustMean",),
    "save_options": ("Best", "Every", "Keep", "Limits"),
}
_MODULE = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULE)


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'ckpt.policy' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ckpt.policy.{_MODULE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
