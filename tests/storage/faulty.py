"""A backend whose failures are planned.

Fault model, for the operations that a Rule picks: they fail, and

    BEFORE      nothing was done
    LOST_REPLY  it was done all the same
"""

from __future__ import annotations

import enum
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ckpt.errors import CkptError, TransientError
from ckpt.storage import Backend


class Fault(enum.Enum):
    BEFORE = "before"
    LOST_REPLY = "lost reply"


@dataclass(frozen=True)
class Rule:
    """The first `count` calls of `operation` (* for any) meet the fault, and raise `error`."""

    operation: str
    fault: Fault
    count: int = 1
    error: type[CkptError] = TransientError


class FaultyBackend:
    """Wraps `inner`. `log`: the operations that were asked for, such as "put k", in order."""

    def __init__(self, inner: Backend, plan: Iterable[Rule] = ()) -> None:
        self.inner, self.url, self.log = inner, inner.url, list[str]()
        self._left = {rule: rule.count for rule in plan}
        self._lock = threading.Lock()

    def list(self, prefix: str) -> Iterator[Any]:
        return iter(self._call("list", lambda prefix: [*self.inner.list(prefix)], prefix))

    def close(self) -> None:
        self.inner.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        work = getattr(self.inner, name)
        return lambda *args, **more: self._call(name, functools.partial(work, **more), *args)

    def _call(self, name: str, work: Callable[..., Any], *args: Any) -> Any:
        told = f"{name} {args[0] if args else ''}".strip()
        with self._lock:
            self.log.append(told)
            rule = next((each for each, left in self._left.items() if left and each.operation in ("*", name)), None)
            if rule is not None:
                self._left[rule] -= 1
        if rule is None:
            return work(*args)
        if rule.fault is Fault.LOST_REPLY:
            work(*args)
        raise rule.error(f"planned: {told} failed")
