"""The client of a machine's metadata service: small requests to one address, bounded in time and bytes.

- No proxy is used and no redirect is followed. Each request has a connection of its own, and is sent once.
- A request ends within half a second after `stop` is set, at its deadline, and when more bytes come than any correct
  answer has. A reply that was cut short, in its headers or its body, raises Fault.
"""

from __future__ import annotations

import contextlib
import email.utils
import json
import os
import select
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from ckpt.errors import UsageError
from ckpt.preemption.poll import Fault

T = TypeVar("T")

ADDRESS = "http://169.254.169.254"  # of all three clouds
FIELD_LENGTH_MAX = 200  # characters of a service's text in a key or a message
BODY_BYTES_MAX = 64 << 10
REPLY_BYTES_MAX = 4 * BODY_BYTES_MAX  # with headers, and with the chunks' own
# The longest delay until `stop` is noticed. Wake-ups are most of the cost of a long poll.
SLICE_S = 0.5


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one request. `date`: the service's Date header. `sent_s`, `came_s`: when the request was sent and
    the answer was complete, in Unix seconds by this host's clock."""

    status: int
    body: bytes
    etag: str
    date: str
    sent_s: float
    received_s: float

    @property
    def date_s(self) -> float | None:
        """The service's clock when it answered, in whole seconds; None without a Date."""
        try:
            return http_time_s(self.date) if self.date else None
        except Fault:
            return None

    def to_local_s(self, theirs_s: float) -> float:
        """A time of the service's clock as Unix seconds of this host's clock: the earliest that is possible.

        The service answered at `sent_s` or later, when its clock was below date_s + 1. So the result is early by at
        most one second plus the time that the answer took. Without a Date both clocks are assumed to agree.
        """
        date_s = self.date_s
        return theirs_s if date_s is None else self.sent_s + theirs_s - (date_s + 1.0)

    def text(self) -> str:
        return parse_or_fault("text", lambda: self.body.decode("ascii")).strip()

    def json(self) -> Any:
        return parse_or_fault("JSON", lambda: json.loads(self.body))


class Service:
    """The metadata service at `endpoint`: an http URL, or host and port as some SDKs give it. Any thread may use it.

    Errors: the constructor raises UsageError for any other endpoint.
    """

    def __init__(self, endpoint: str, now_s: Callable[[], float] = time.time) -> None:
        self.endpoint = endpoint
        self._now_s = now_s
        try:
            url = urllib.parse.urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
            self._host, self._port = url.hostname or "", url.port or 80
        except ValueError as exc:
            raise UsageError(f"{endpoint!r} is not the address of a metadata service: {exc}") from exc
        if url.scheme != "http" or not self._host or url.username or url.query or url.fragment:
            raise UsageError(
                f"{endpoint!r} is not the address of a metadata service; give one such as http://127.0.0.1:1338"
            )
        self._base = url.path.rstrip("/")

    def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        stop: threading.Event,
        *,
        timeout_s: float,
        body: bytes | None = None,
    ) -> Reply:
        """Sends one request and returns the whole reply, of any status. Errors: Fault, also if `stop` is set."""
        from http.client import HTTPConnection, HTTPException

        connection = HTTPConnection(self._host, self._port)
        try:
            connection.sock = wire = _Socket(self._host, self._port, stop, time.monotonic() + timeout_s)
            sent_s = self._now_s()
            connection.request(method, self._base + path, body, {**headers, "Connection": "close"})
            with connection.getresponse() as answer:
                if wire.has_ended:
                    raise Fault("the connection ended within the headers of the reply")
                if (answer.length or 0) > BODY_BYTES_MAX:
                    raise Fault(f"the reply has {answer.length} bytes; at most {BODY_BYTES_MAX} are allowed")
                content = answer.read(BODY_BYTES_MAX + 1)
                if len(content) > BODY_BYTES_MAX:
                    raise Fault(f"the reply has more than {BODY_BYTES_MAX} bytes")
                if answer.length:
                    raise Fault(f"the connection ended after {len(content)} bytes of the body")
            etag, date = answer.getheader("ETag", ""), answer.getheader("Date", "")
            return Reply(answer.status, content, etag, date, sent_s, self._now_s())
        except (OSError, ValueError, HTTPException, Fault) as exc:  # ValueError: an impossible host name or header
            raise Fault(f"{method} {self.endpoint}{path}: {exc}") from exc
        finally:
            connection.close()


class _Socket(socket.socket):
    """A connected socket whose waits end when `stop` is set and at `until_s`, and which gives at most REPLY_BYTES_MAX
    bytes. `has_ended`: the other end has closed it. Errors: Fault, TimeoutError, OSError."""

    def __init__(self, host: str, port: int, stop: threading.Event, until_s: float) -> None:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        super().__init__(family, kind, protocol)
        self._stop, self._until_s, self._bytes_left, self.has_ended = stop, until_s, REPLY_BYTES_MAX, False
        try:
            self.setblocking(False)
            self.connect_ex(address)
            self._await(select.POLLOUT)
            if error := self.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
        except BaseException:
            self.close()
            raise

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        while True:
            self._await(select.POLLIN)
            with contextlib.suppress(BlockingIOError):
                count = super().recv_into(buffer, nbytes, flags)
                break
        self.has_ended = not count
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise Fault(f"the reply has more than {REPLY_BYTES_MAX} bytes")
        return count

    def sendall(self, data: Any, flags: int = 0) -> None:
        view = memoryview(data)
        while view:
            with contextlib.suppress(BlockingIOError):
                view = view[self.send(view, flags) :]
                continue
            self._await(select.POLLOUT)

    def _await(self, mask: int) -> None:
        poll = select.poll()
        poll.register(self, mask)
        while not self._stop.is_set():
            left_s = self._until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("no answer in time")
            if poll.poll(min(left_s, SLICE_S) * 1000):
                return
        raise Fault("stopped")


def parse_or_fault(what: str, parse: Callable[[], T]) -> T:
    """The result of `parse`. Errors: Fault for any parsing error."""
    try:
        return parse()
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as exc:
        raise Fault(f"the answer is not a valid {what}: {exc!r}"[:500]) from exc


def http_time_s(text: str) -> float:
    """Unix seconds of "Mon, 19 Sep 2016 18:29:47 GMT", with or without the day of the week. Errors: Fault."""
    return parse_or_fault("time", lambda: _unix_s(email.utils.parsedate_to_datetime(text)))


def iso_time_s(text: str) -> float:
    """Unix seconds of an RFC 3339 time; UTC if the time has no zone. Errors: Fault."""
    return parse_or_fault("time", lambda: _unix_s(datetime.fromisoformat(text)))


def _unix_s(when: datetime) -> float:
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def printable_field(value: object) -> str:
    """A field of an answer as text that is safe in a key or a log line. Errors: Fault if it is not text, or empty."""
    if not isinstance(value, str) or not value:
        raise Fault(f"the answer has {str(value)[:50]!r} instead of a text")
    return "".join(c if c.isprintable() else "?" for c in value[:FIELD_LENGTH_MAX])
