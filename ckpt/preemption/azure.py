"""The listener for Azure's scheduled events, which can also acknowledge an event so that Azure may begin it.

The document lists the events of all VMs of the availability set or scale set. Only events that name this VM count. An
event that is no longer listed was cancelled or is over.

Source: Azure, "Scheduled Events for Linux VMs", api-version 2020-07-01.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable

from ckpt.errors import UsageError
from ckpt.events import Events
from ckpt.preemption.metadata import ADDRESS, Reply, Service, http_time_s, printable_field
from ckpt.preemption.notice import FirstDeadlines, KnownNotices, Notice, NoticeChange, OnNoticeChange
from ckpt.preemption.poll import Fault, poll_until_stopped

POLL_S = 1.0
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
VM_NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
HEADERS = {"Metadata": "true"}  # without this header the service answers 400
# The first request enables the service for this VM, which may take two minutes.
FIRST_ANSWER_S = 130.0
# The name is asked once. With a wrong name no event would ever match this VM.
VM_NAME = re.compile(r"[\w.-]{1,200}", re.ASCII)
PREEMPTING_EVENTS = frozenset({"Reboot", "Redeploy", "Preempt", "Terminate"})  # Freeze is a pause of seconds


class AzureListener:
    """Polls the scheduled events every second. `acknowledge` may be called on any other thread."""

    name = "azure"

    def __init__(
        self,
        endpoint: str = ADDRESS,
        *,
        events: Events | None = None,
        timeout_s: float = 5.0,
        first_answer_s: float = FIRST_ANSWER_S,
        now_s: Callable[[], float] = time.time,
        first: FirstDeadlines | None = None,
    ) -> None:
        self._service = Service(endpoint, now_s)
        self._events = events
        self._timeout_s = timeout_s
        self._first_answer_s = first_answer_s
        self._now_s = now_s
        self._first_deadlines = first
        self._vm_name = ""
        self._has_answered = False
        # The keys of the standing notices. The set is replaced as a whole, so other threads may read it.
        self._standing_keys: frozenset[str] = frozenset()

    def listen(self, stop: threading.Event, tell: OnNoticeChange) -> None:
        def tell_and_keep(word: NoticeChange) -> None:
            kept = self._standing_keys - {word.key}
            self._standing_keys = kept | {word.key} if isinstance(word, Notice) else kept
            tell(word)

        known = KnownNotices(self.name, tell_and_keep, self._first_deadlines)
        self._standing_keys = frozenset()
        # The last document that was read, if no notice stood by it.
        quiet = b""

        def ask() -> float:
            nonlocal quiet
            if not self._vm_name:
                reply = self._get(VM_NAME_PATH, stop, self._timeout_s)
                if not VM_NAME.fullmatch(name := reply.text()):
                    raise Fault(f"GET {VM_NAME_PATH} was answered with {name[:50]!r}, which is not the name of a VM")
                self._vm_name = name
            timeout_s = self._timeout_s if self._has_answered else self._first_answer_s
            reply = self._get(EVENTS, stop, timeout_s)
            self._has_answered = True
            if reply.received_s - reply.sent_s > self._timeout_s:
                # The first answer may take two minutes, and `to_local_s` would make all times early by as much. If the
                # second request fails, an early time is better than none.
                with contextlib.suppress(Fault):
                    reply = self._get(EVENTS, stop, self._timeout_s)
            if reply.body != quiet:
                quiet = b""
                known.set_from_entries(_events(reply), lambda event: self._notice(event, reply, known))
                quiet = b"" if self._standing_keys else reply.body
            return POLL_S

        poll_until_stopped(self.name, stop, ask, self._events)

    def acknowledge(self, key: str, stop: threading.Event) -> bool:
        """Tells Azure that the event may begin now. True if Azure accepted; after False the caller may try again.

        It approves the event for all VMs that the event names, and can only bring the event forward. Call it on one
        node only, after everything that those VMs hold is replicated elsewhere. Errors: UsageError if no notice with
        that key stands.
        """
        if key not in self._standing_keys:
            raise UsageError(f"this VM has no scheduled event {key!r} to acknowledge")
        body = json.dumps({"StartRequests": [{"EventId": key}]}).encode()
        headers = {**HEADERS, "Content-Type": "application/json"}
        try:
            reply = self._service.request("POST", EVENTS, headers, stop, timeout_s=self._timeout_s, body=body)
        except Fault:
            return False
        return reply.status == 200

    def _get(self, path: str, stop: threading.Event, timeout_s: float) -> Reply:
        reply = self._service.request("GET", path, HEADERS, stop, timeout_s=timeout_s)
        if reply.status != 200:
            raise Fault(f"GET {path} was answered with status {reply.status}")
        return reply

    def _notice(self, event: object, reply: Reply, known: KnownNotices) -> Notice | None:
        if not isinstance(event, dict) or not isinstance(resources := event.get("Resources"), list):
            raise Fault("a scheduled event does not name its VMs")
        if self._vm_name.lower() not in (str(name).lower() for name in resources):
            return None
        key, what, status = (printable_field(event.get(name)) for name in ("EventId", "EventType", "EventStatus"))
        when = event.get("NotBefore") or ""
        if when and status != "Started":
            deadline_s = reply.to_local_s(http_time_s(printable_field(when)))
        else:
            deadline_s = known.earliest_deadline(key, self._now_s())
        told = (
            f"Azure: {what} of this VM, {'not before ' + printable_field(when) if when else 'which has begun'} ({key})"
        )
        return Notice(deadline_s, self.name, what in PREEMPTING_EVENTS, key, told)


def _events(reply: Reply) -> list[object]:
    document = reply.json()
    events = document.get("Events") if isinstance(document, dict) else None
    if not isinstance(events, list):
        raise Fault("the answer is not a document of scheduled events")
    return events
