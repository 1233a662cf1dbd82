"""Listening for word that this machine will go away. Names are loaded when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.notices.aws import AwsListener
    from ckpt.notices.azure import AzureListener
    from ckpt.notices.cloud import Cloud, Endpoints, listeners, which_cloud
    from ckpt.notices.files import FileListener
    from ckpt.notices.gcp import GcpListener
    from ckpt.notices.notice import Listener, Notice, Withdrawn
    from ckpt.notices.signals import Signals
    from ckpt.notices.slurm import SlurmListener

_WHERE = {
    "AwsListener": "aws",
    "AzureListener": "azure",
    "Cloud": "cloud",
    "Endpoints": "cloud",
    "FileListener": "files",
    "GcpListener": "gcp",
    "Listener": "notice",
    "Notice": "notice",
    "Signals": "signals",
    "SlurmListener": "slurm",
    "Withdrawn": "notice",
    "listeners": "cloud",
    "which_cloud": "cloud",
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
        raise AttributeError(f"module 'ckpt.notices' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ckpt.notices.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
