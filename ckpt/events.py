"""Events: what happened that a person may want to know, as one JSON object each.

An event never influences what is decided. Sinks are called on the thread that emits and must not block; one that
raises is not called again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class Event:
    """`name` is stable and dotted ("commit.failed"); `loud` events also go to the log as warnings."""

    name: str
    message: str
    loud: bool = False
    data: dict[str, Any] = field(default_factory=dict)
    time_s: float = field(default_factory=time.time)  # wall clock, for people only

    def to_json(self) -> str:
        body = {
            "event": self.name,
            "message": self.message,
            "time": self.time_s,
            "loud": self.loud,
            **self.data,
        }
        return json.dumps(body, default=str)


Sink = Callable[[Event], None]


class Events:
    """Hands each event to every sink, and to the log."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = list(sinks)

    def add(self, sink: Sink) -> None:
        self._sinks.append(sink)

    def emit(self, name: str, message: str, *, loud: bool = False, **data: Any) -> None:
        event = Event(name, message, loud, data)
        log.log(logging.WARNING if loud else logging.INFO, "%s", message)
        for sink in list(self._sinks):
            try:
                sink(event)
            except Exception:
                log.exception("ckpt: a sink failed at the event %s; it is not called any more", name)
                with contextlib.suppress(ValueError):  # another thread was first
                    self._sinks.remove(sink)
