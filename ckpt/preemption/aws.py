"""The listener for EC2: spot notices, rebalance recommendations, maintenance events and Auto Scaling terminations.

It polls the instance metadata service, version 2. A path answers 404 while it has nothing to report. Version 1, without
a token, is never used: a proxy that was tricked into forwarding the request could answer it.

Sources: EC2 User Guide, "Use the Instance Metadata Service", "Spot Instance interruption notices", "EC2 instance
rebalance recommendations", "Scheduled events for your instances"; EC2 Auto Scaling, "Retrieve the target lifecycle
state".
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from ckpt.events import Events
from ckpt.preemption.metadata import Reply, Service, http_time_s, iso_time_s, printable_field
from ckpt.preemption.notice import FirstDeadlines, KnownNotices, Notice, OnNoticeChange
from ckpt.preemption.poll import Fault, poll_until_stopped

POLL_S = 5.0  # the interval that AWS documents for spot notices
TOKEN_TTL_S = 21600
# The shortest time from a rebalance recommendation to the end: the lead of the spot notice itself.
SPOT_LEAD_S = 120.0
# The service gives no time. Without a lifecycle hook the shutdown begins at once.
LIFECYCLE_LEAD_S = 30.0
MAINTENANCE_CODES = frozenset({"instance-stop", "system-reboot", "instance-reboot", "instance-retirement"})
MAINTENANCE_OVER = frozenset({"canceled", "completed"})
# A lifecycle state, such as InService or Warmed:Running. Any other text withdraws no notice.
STATE = re.compile(r"[A-Za-z]+(:[A-Za-z]+)?")
TOKEN = re.compile(r"[\x21-\x7e]{1,4096}")

# Handles the answer of one path; None where the answer was 404.
HandleReply = Callable[[Reply | None, KnownNotices], None]


class AwsListener:
    """Polls four paths every five seconds. A fault of one path does not stop the polls of the others."""

    name = "aws"

    def __init__(
        self,
        endpoint: str = "http://169.254.169.254",
        *,
        events: Events | None = None,
        timeout_s: float = 2.0,
        now_s: Callable[[], float] = time.time,
        first: FirstDeadlines | None = None,
    ) -> None:
        self._service = Service(endpoint, now_s)
        self._events = events
        self._timeout_s = timeout_s
        self._now_s = now_s
        self._first_deadlines: FirstDeadlines = {} if first is None else first
        self._token = ""
        self._token_until_s = 0.0  # on the monotonic clock

    def listen(self, stop: threading.Event, tell: OnNoticeChange) -> None:
        def known(source: str) -> KnownNotices:
            return KnownNotices(tell, self._first_deadlines.setdefault(source, {}))

        questions: list[tuple[str, KnownNotices, HandleReply]] = [
            ("/latest/meta-data/spot/instance-action", known("aws-spot"), self._handle_spot),
            ("/latest/meta-data/events/recommendations/rebalance", known("aws-rebalance"), self._handle_rebalance),
            ("/latest/meta-data/events/maintenance/scheduled", known("aws-maintenance"), self._handle_maintenance),
            ("/latest/meta-data/autoscaling/target-lifecycle-state", known("aws-lifecycle"), self._handle_lifecycle),
        ]

        def ask() -> float:
            # Without a token no path can be asked.
            self._valid_token(stop)
            faults: list[Fault] = []
            for path, known, hear in questions:
                try:
                    hear(self._get(path, stop), known)
                except Fault as exc:
                    faults.append(exc)
            if faults:
                raise faults[0]
            return POLL_S

        with contextlib.closing(self._service):
            poll_until_stopped(self.name, stop, ask, self._events)

    def _get(self, path: str, stop: threading.Event) -> Reply | None:
        """The reply, or None for 404. A refused token is dropped, and one new token is tried. Errors: Fault."""
        for _ in range(2):
            headers = {"X-aws-ec2-metadata-token": self._valid_token(stop)}
            reply = self._service.request("GET", path, headers, stop, timeout_s=self._timeout_s)
            if reply.status != 401:
                break
            self._token = ""
        if reply.status == 404:
            return None
        if reply.status != 200:
            raise Fault(f"GET {path} was answered with status {reply.status}")
        return reply

    def _valid_token(self, stop: threading.Event) -> str:
        if self._token and time.monotonic() < self._token_until_s:
            return self._token
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
        asked_s = time.monotonic()
        try:
            reply = self._service.request("PUT", "/latest/api/token", headers, stop, timeout_s=self._timeout_s)
        except Fault as exc:
            hint = "in a container, set the instance's metadata hop limit to 2 or more"
            raise Fault(f"the metadata service gave no token ({hint}): {exc}") from exc
        token = reply.text() if reply.status == 200 else ""
        if not TOKEN.fullmatch(token):
            raise Fault(f"the request for a token was answered with status {reply.status} and no token")
        self._token, self._token_until_s = token, asked_s + TOKEN_TTL_S - 60.0
        return token

    def _handle_spot(self, reply: Reply | None, known: KnownNotices) -> None:
        if reply is None:
            known.set_standing("aws-spot", [])
            return
        said = _json_object(reply.json())
        action, when = printable_field(said.get("action")), printable_field(said.get("time"))
        key = f"{action} {when}"
        deadline_s = reply.to_local_s(iso_time_s(when))
        # Hibernation begins with the notice.
        if action == "hibernate":
            deadline_s = known.earliest_deadline(key, min(deadline_s, self._now_s()))
        told = f"EC2 will {action} this spot instance at {when}"
        known.set_standing("aws-spot", [Notice(deadline_s, "aws-spot", True, key, told)])

    def _handle_rebalance(self, reply: Reply | None, known: KnownNotices) -> None:
        if reply is None:
            known.set_standing("aws-rebalance", [])
            return
        key = printable_field(_json_object(reply.json()).get("noticeTime"))
        deadline_s = known.earliest_deadline(key, self._now_s() + SPOT_LEAD_S)
        told = f"EC2 recommends leaving this spot instance (since {key})"
        known.set_standing("aws-rebalance", [Notice(deadline_s, "aws-rebalance", False, key, told)])

    def _handle_maintenance(self, reply: Reply | None, known: KnownNotices) -> None:
        def scheduled(event: object) -> Notice | None:
            said = _json_object(event)
            code, state = printable_field(said.get("Code")), str(said.get("State", "")).lower()
            if reply is None or code not in MAINTENANCE_CODES or state in MAINTENANCE_OVER:
                return None
            when = printable_field(said.get("NotBefore"))
            key = printable_field(said.get("EventId") or f"{code} {when}")
            told = f"EC2 has scheduled {code} for this instance, not before {when} ({key})"
            return Notice(reply.to_local_s(http_time_s(when)), "aws-maintenance", True, key, told)

        events = [] if reply is None else reply.json()
        if not isinstance(events, list):
            raise Fault("the answer is not a list of scheduled events")
        known.set_from_entries("aws-maintenance", events, scheduled)

    def _handle_lifecycle(self, reply: Reply | None, known: KnownNotices) -> None:
        state = "" if reply is None else reply.text()
        if reply is not None and not STATE.fullmatch(state):
            raise Fault(f"the answer is not a lifecycle state: {state[:50]!r}")
        if state != "Terminated":
            known.set_standing("aws-lifecycle", [])
            return
        deadline_s = known.earliest_deadline("Terminated", self._now_s() + LIFECYCLE_LEAD_S)
        told = "the Auto Scaling group is about to terminate this instance"
        known.set_standing("aws-lifecycle", [Notice(deadline_s, "aws-lifecycle", True, "Terminated", told)])


def _json_object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Fault("the answer is not the JSON object that was expected")
    return value
