"""The listener for EC2: spot notices, rebalance recommendations, maintenance events and Auto Scaling terminations.

It polls the instance metadata service, version 2. A path answers 404 while it has nothing to report. Version 1, without
a token, is never used: a proxy that was tricked into forwarding the request could answer it.

Sources: EC2 User Guide, "Use the Instance Metadata Service", "Spot Instance interruption notices", "EC2 instance
rebalance recommendations", "Scheduled events for your instances"; EC2 Auto Scaling, "Retrieve the target lifecycle
state".
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

from ckpt.events import Events
from ckpt.preemption.metadata import ADDRESS, Reply, Service, http_time_s, iso_time_s, printable_field
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


class AwsListener:
    """Polls four paths every five seconds. A fault of one path does not stop the polls of the others."""

    name = "aws"

    def __init__(
        self,
        endpoint: str = ADDRESS,
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
        self._first_deadlines = first
        self._token = ""
        self._token_until_s = 0.0  # on the monotonic clock

    def listen(self, stop: threading.Event, tell: OnNoticeChange) -> None:
        questions = [
            (path, KnownNotices(source, tell, self._first_deadlines), read)
            for source, path, read in (
                ("aws-spot", "spot/instance-action", self._read_spot),
                ("aws-rebalance", "events/recommendations/rebalance", self._read_rebalance),
                ("aws-maintenance", "events/maintenance/scheduled", self._read_maintenance),
                ("aws-lifecycle", "autoscaling/target-lifecycle-state", self._read_lifecycle),
            )
        ]

        def ask() -> float:
            # Without a token no path can be asked.
            self._valid_token(stop)
            faults: list[Fault] = []
            for path, known, read in questions:
                try:
                    reply = self._get(f"/latest/meta-data/{path}", stop)
                    if reply is None:
                        known.set_standing([])
                    else:
                        read(reply, known)
                except Fault as exc:
                    faults.append(exc)
            if faults:
                raise faults[0]
            return POLL_S

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

    def _read_spot(self, reply: Reply, known: KnownNotices) -> None:
        said = _json_object(reply.json())
        action, when = printable_field(said.get("action")), printable_field(said.get("time"))
        key = f"{action} {when}"
        deadline_s = reply.to_local_s(iso_time_s(when))
        # Hibernation begins with the notice.
        if action == "hibernate":
            deadline_s = known.earliest_deadline(key, min(deadline_s, self._now_s()))
        told = f"EC2 will {action} this spot instance at {when}"
        known.set_standing([Notice(deadline_s, known.source, True, key, told)])

    def _read_rebalance(self, reply: Reply, known: KnownNotices) -> None:
        key = printable_field(_json_object(reply.json()).get("noticeTime"))
        deadline_s = known.earliest_deadline(key, self._now_s() + SPOT_LEAD_S)
        told = f"EC2 recommends leaving this spot instance (since {key})"
        known.set_standing([Notice(deadline_s, known.source, False, key, told)])

    def _read_maintenance(self, reply: Reply, known: KnownNotices) -> None:
        def scheduled(event: object) -> Notice | None:
            said = _json_object(event)
            code, state = printable_field(said.get("Code")), str(said.get("State", "")).lower()
            if code not in MAINTENANCE_CODES or state in MAINTENANCE_OVER:
                return None
            when = printable_field(said.get("NotBefore"))
            key = printable_field(said.get("EventId") or f"{code} {when}")
            told = f"EC2 has scheduled {code} for this instance, not before {when} ({key})"
            return Notice(reply.to_local_s(http_time_s(when)), known.source, True, key, told)

        events = reply.json()
        if not isinstance(events, list):
            raise Fault("the answer is not a list of scheduled events")
        known.set_from_entries(events, scheduled)

    def _read_lifecycle(self, reply: Reply, known: KnownNotices) -> None:
        state = reply.text()
        if not STATE.fullmatch(state):
            raise Fault(f"the answer is not a lifecycle state: {state[:50]!r}")
        if state != "Terminated":
            known.set_standing([])
            return
        deadline_s = known.earliest_deadline(state, self._now_s() + LIFECYCLE_LEAD_S)
        told = "the Auto Scaling group is about to terminate this instance"
        known.set_standing([Notice(deadline_s, known.source, True, state, told)])


def _json_object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Fault("the answer is not the JSON object that was expected")
    return value
