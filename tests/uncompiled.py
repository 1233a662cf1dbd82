"""Training scripts without torch's compiler, whose import is half of their start: torch imports it at the first
optimizer and process group, whether or not anything is compiled."""

from __future__ import annotations

import sys
import types
from typing import Any


class _Nothing(types.ModuleType):
    """Has any attribute, and does nothing; as a decorator it returns the function."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name)

    def __call__(self, given: Any = None, *more: Any, **named: Any) -> Any:
        return given


def leave_compiler_out() -> None:
    """To be called before the first optimizer. Nothing can be compiled in this process afterwards."""
    sys.modules.setdefault("torch._dynamo", _Nothing("torch._dynamo"))
