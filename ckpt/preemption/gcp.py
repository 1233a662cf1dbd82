"""The listener for Compute Engine: the metadata values `preempted` and `maintenance-event`, each by a long poll.

The service is asked by its address, not by the equivalent name metadata.google.internal: a resolver that hangs would
keep the listener from ending.

Sources: Compute Engine, "Query VM metadata" (wait_for_change, last_etag, timeout_sec), "Preemptible and Spot VMs", "Get
live migration and maintenance notices".
"""

from __future__ import annotations

import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass

from ckpt.events import Events
from ckpt.preemption.metadata import ADDRESS, Service
from ckpt.preemption.notice import FirstDeadlines, KnownNotices, Notice, OnNoticeChange
from ckpt.preemption.poll import Fault, poll_until_stopped

POLL_S = 1.0  # only where the service does not wait
# The duration that a long poll asks for. The service then answers with the unchanged value.
WAIT_S = 60
PREEMPTED_LEAD_S = 30.0  # Spot VMs: from the soft-off signal to power off
# Machines with GPUs get about an hour, but the service does not say which kind this is.
MAINTENANCE_LEAD_S = 60.0


@dataclass(frozen=True, slots=True)
class _Means:
    """What a value means as a notice."""

    certain: bool
    message: str


@dataclass(frozen=True, slots=True)
class Question:
    """One metadata value to watch. `meanings`: what each value means; None: no notice stands."""

    source: str
    path: str
    lead_s: float
    meanings: dict[str, _Means | None]


PREEMPTED = Question(
    "gcp-preempted",
    "/computeMetadata/v1/instance/preempted",
    PREEMPTED_LEAD_S,
    {"FALSE": None, "TRUE": _Means(True, "Compute Engine preempts this machine")},
)
MAINTENANCE = Question(
    "gcp-maintenance",
    "/computeMetadata/v1/instance/maintenance-event",
    MAINTENANCE_LEAD_S,
    {
        "NONE": None,
        "MIGRATE_ON_HOST_MAINTENANCE": _Means(False, "Compute Engine will move this machine to another host"),
        "TERMINATE_ON_HOST_MAINTENANCE": _Means(True, "Compute Engine will stop this machine for host maintenance"),
    },
)


class GcpListener:
    """Watches one metadata value. The value names no time: the lead counts from when the value was first seen."""

    def __init__(
        self,
        question: Question,
        endpoint: str = ADDRESS,
        *,
        events: Events | None = None,
        timeout_s: float = 5.0,
        wait_s: int = WAIT_S,
        now_s: Callable[[], float] = time.time,
        first: FirstDeadlines | None = None,
    ) -> None:
        self.name = question.source
        self._question = question
        self._service = Service(endpoint, now_s)
        self._events = events
        self._timeout_s = timeout_s
        self._wait_s = wait_s
        self._now_s = now_s
        self._first_deadlines = first

    def listen(self, stop: threading.Event, tell: OnNoticeChange) -> None:
        known = KnownNotices(self.name, tell, self._first_deadlines)
        # The tag of the last value; with "" the service answers at once with the current value.
        etag = ""

        def ask() -> float:
            nonlocal etag
            began_s = time.monotonic()
            # After a fault the value is read anew.
            before, etag = etag, ""
            value, etag = self._value(before, stop)
            means = self._question.meanings[value]
            known.set_standing([] if means is None else [self._notice(value, means, known)])
            has_waited = time.monotonic() - began_s >= POLL_S
            return 0.0 if etag and (has_waited or not before) else POLL_S

        poll_until_stopped(self.name, stop, ask, self._events)

    def _value(self, etag: str, stop: threading.Event) -> tuple[str, str]:
        path, timeout_s = self._question.path, self._timeout_s
        if etag:
            asked = {"wait_for_change": "true", "last_etag": etag, "timeout_sec": str(self._wait_s)}
            path, timeout_s = f"{path}?{urllib.parse.urlencode(asked)}", timeout_s + self._wait_s
        reply = self._service.request("GET", path, {"Metadata-Flavor": "Google"}, stop, timeout_s=timeout_s)
        if reply.status != 200:
            raise Fault(f"GET {path} was answered with status {reply.status}")
        value = reply.text()
        if value not in self._question.meanings:
            raise Fault(f"GET {path} was answered with the unknown value {value[:50]!r}")
        return value, reply.etag

    def _notice(self, value: str, means: _Means, known: KnownNotices) -> Notice:
        deadline_s = known.earliest_deadline(value, self._now_s() + self._question.lead_s)
        return Notice(deadline_s, self.name, means.certain, value, means.message)
