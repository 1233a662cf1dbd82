"""The client of a machine's metadata service: small requests to one address, bounded in time and bytes.

- No proxy is used and no redirect is followed. Each request has its own connection, unless `keep_open` keeps one.
- If the service has closed a kept connection, the request is sent once more over a new one. POST is never sent twice.
- http_connection.py says what a reply is and what ends a request.
"""

from __future__ import annotations

import contextlib
import email.utils
import functools
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from ckpt.errors import UsageError
from ckpt.preemption.http_connection import Unheard, Wire
from ckpt.preemption.poll import Fault

T = TypeVar("T")

FIELD_LENGTH_MAX = 200  # characters of a service's text in a key or a message


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
    """The metadata service at `endpoint`: an http URL, or host and port as some SDKs give it. Thread-safe.

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
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._host_header = host if self._port == 80 else f"{host}:{self._port}"
        self._lock = threading.Lock()
        self._keep_open_count = 0
        self._idle: Wire | None = None

    @contextlib.contextmanager
    def keep_open(self) -> Iterator[None]:
        """Keeps the connection open between requests inside the block, if the service allows.
        A new connection costs more than a request."""
        with self._lock:
            self._keep_open_count += 1
        try:
            yield
        finally:
            with self._lock:
                self._keep_open_count -= 1
                idle, self._idle = (None, self._idle) if self._keep_open_count else (self._idle, None)
            if idle is not None:
                idle.close()

    def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        stop: threading.Event,
        *,
        timeout_s: float,
        body: bytes = b"",
    ) -> Reply:
        """Sends one request and returns the whole reply, of any status. Errors: Fault, also if `stop` is set."""
        until_s = time.monotonic() + timeout_s
        keep = self._keep_open_count > 0 and method != "POST"  # a POST is never sent twice
        try:
            head = _head(method, self._base + path, self._host_header, tuple(headers.items()), len(body), keep)
            idle = self._take_idle() if keep else None
            try:
                return self._exchange(idle, head + body, keep, stop, until_s)
            except Unheard:
                if idle is None:
                    raise
                # The service had closed the idle connection.
                return self._exchange(None, head + body, keep, stop, until_s)
        except (OSError, ValueError, Fault) as exc:  # ValueError: an impossible host name
            raise Fault(f"{method} {self.endpoint}{path}: {exc}") from exc

    def _exchange(self, idle: Wire | None, request: bytes, keep: bool, stop: threading.Event, until_s: float) -> Reply:
        """One exchange, over the idle connection or a new one. `keep`: leave it open if the service allows."""
        wire = idle or Wire(self._host, self._port, stop, until_s)
        done: Wire | None = wire
        try:
            sent_s = self._now_s()
            answer = wire.exchange(request, stop, until_s)
            came_s = self._now_s()
            if keep and not answer.is_last:
                done = self._keep_idle(wire)
        finally:
            if done is not None:
                done.close()
        etag, date = answer.headers.get("etag", ""), answer.headers.get("date", "")
        return Reply(answer.status, answer.body, etag, date, sent_s, came_s)

    def _take_idle(self) -> Wire | None:
        with self._lock:
            idle, self._idle = self._idle, None
            return idle

    def _keep_idle(self, wire: Wire) -> Wire | None:
        """Keeps the connection for the next request. Returns the connection to close instead, if any."""
        with self._lock:
            if not self._keep_open_count:
                return wire
            other, self._idle = self._idle, wire
            return other


@functools.lru_cache(maxsize=16)  # a poller repeats the same request
def _head(
    method: str, target: str, host: str, headers: tuple[tuple[str, str], ...], body_bytes: int, keep: bool
) -> bytes:
    """The request line and headers. Errors: Fault for characters that would end a line early."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", "Accept-Encoding: identity"]
    lines += [f"{name}: {value}" for name, value in headers]
    if not keep:
        lines.append("Connection: close")
    if method != "GET":
        lines.append(f"Content-Length: {body_bytes}")
    if " " in target or not all(line.isascii() and line.isprintable() for line in lines):
        raise Fault("the request has characters that HTTP headers do not allow")
    return "\r\n".join([*lines, "", ""]).encode()


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
