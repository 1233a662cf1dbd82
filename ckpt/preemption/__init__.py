"""The listeners for notices that this machine will go away: clouds, Slurm, signals and a file.

Start with notice.py, which defines a notice and what each listener promises. detect.py chooses the listeners that fit
this machine. For a new cloud: add a module with its listener, and name it in detect.py and in the table below. What the
agent does about a notice is in agent/preemption. Imports only the base modules of ckpt. Names are loaded on first use
(PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.preemption.aws import AwsListener
    from ckpt.preemption.azure import AzureListener
    from ckpt.preemption.detect import Cloud, Endpoints, listeners, which_cloud
    from ckpt.preemption.files import FileListener
    from ckpt.preemption.gcp import GcpListener
    from ckpt.preemption.notice import Listener, Notice, Withdrawn
    from ckpt.preemption.signals import Signals
    from ckpt.preemption.slurm import SlurmListener

_WHERE = {
    "AwsListener": "aws",
    "AzureListener": "azure",
    "Cloud": "detect",
    "Endpoints": "detect",
    "FileListener": "files",
    "GcpListener": "gcp",
    "Listener": "notice",
    "Notice": "notice",
    "Signals": "signals",
    "SlurmListener": "slurm",
    "Withdrawn": "notice",
    "listeners": "detect",
    "which_cloud": "detect",
}

__all__ = [
    "AwsListener",
    "AzureListener",
    "Cloud",
    "Endpoints",
    "FileListener",
    "GcpListener",
    "Listener",
    "Notice",
    "Signals",
    "SlurmListener",
    "Withdrawn",
    "listeners",
    "which_cloud",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ckpt.preemption' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ckpt.preemption.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
