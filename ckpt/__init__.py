"""ckpt: keeps a PyTorch training job's state in host memory, peers' memory and object storage, and restores it.

This file only exports the public API; read checkpointer.py first. Each name is loaded on first use (PEP 562), so that
`import ckpt` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.checkpoint import Checkpoint, TensorInfo
    from ckpt.checkpointer import Checkpointer, Handle, Restored
    from ckpt.errors import (
        AccessDenied,
        AgentError,
        CkptError,
        CommitFailed,
        DamagedData,
        Leave,
        NewerFormat,
        NoCheckpoint,
        RunInUse,
        SaveFailed,
        StateMismatch,
        StorageError,
        Superseded,
        UsageError,
    )
    from ckpt.events import Event
    from ckpt.placement.placement import Parity, Replicas
    from ckpt.policy.adaptive import Adaptive
    from ckpt.policy.export_rule import Export
    from ckpt.policy.save_options import Best, Every, Keep, Limits
    from ckpt.reader import Reader, open
    from ckpt.store.draft import Draft, DraftBox, DraftPart
    from ckpt.trainer.loop.worker_signals import shield_worker
    from ckpt.trainer.state.shard import Shard

__version__ = "0.1.0"

# The module of each public name; all other names are error classes.
_WHERE = {
    "Checkpoint": "ckpt.checkpoint",
    "TensorInfo": "ckpt.checkpoint",
    "Reader": "ckpt.reader",
    "open": "ckpt.reader",
    "Checkpointer": "ckpt.checkpointer",
    "Draft": "ckpt.store.draft",
    "DraftBox": "ckpt.store.draft",
    "DraftPart": "ckpt.store.draft",
    "Handle": "ckpt.checkpointer",
    "Restored": "ckpt.checkpointer",
    "Shard": "ckpt.trainer.state.shard",
    "shield_worker": "ckpt.trainer.loop.worker_signals",
    "Adaptive": "ckpt.policy.adaptive",
    "Best": "ckpt.policy.save_options",
    "Export": "ckpt.policy.export_rule",
    "Every": "ckpt.policy.save_options",
    "Keep": "ckpt.policy.save_options",
    "Limits": "ckpt.policy.save_options",
    "Parity": "ckpt.placement.placement",
    "Replicas": "ckpt.placement.placement",
    "Event": "ckpt.events",
}

__all__ = [
    "AccessDenied",
    "Adaptive",
    "AgentError",
    "Best",
    "Checkpoint",
    "Checkpointer",
    "CkptError",
    "CommitFailed",
    "DamagedData",
    "Draft",
    "DraftBox",
    "DraftPart",
    "Event",
    "Every",
    "Export",
    "Handle",
    "Keep",
    "Leave",
    "Limits",
    "NewerFormat",
    "NoCheckpoint",
    "Parity",
    "Reader",
    "Replicas",
    "Restored",
    "RunInUse",
    "SaveFailed",
    "Shard",
    "StateMismatch",
    "StorageError",
    "Superseded",
    "TensorInfo",
    "UsageError",
    "open",
    "shield_worker",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE.get(name, "ckpt.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
