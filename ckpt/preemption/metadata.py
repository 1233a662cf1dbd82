"""Requests to a machine's metadata service: small, bounded in time and bytes, to one address, ended by `stop`.

- One connection a request, to the endpoint that was given: no proxy is used and no redirect followed. Who asks often
  keeps it open; where the service has closed it meanwhile the request is sent once more, on another one.
- What ends a request, and what is a reply, is said in wire.py.
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

WORDS_MAX = 200  # of what a service says, in a key or a message


@dataclass(frozen=True, slots=True)
class Reply:
    """`date`: when the service answered, as it says. `sent_s`, `came_s`: when it was asked, and when its answer was
    there, Unix seconds by our clock."""

    status: int
    body: bytes
    etag: str
    date: str
    sent_s: float
    came_s: float

    @property
    def date_s(self) -> float | None:
        """The service's clock when it answered, in whole seconds; None where it does not say."""
        try:
            return http_time_s(self.date) if self.date else None
        except Fault:
            return None

    def ours_s(self, theirs_s: float) -> float:
        """A time by the service's clock as one by ours (Unix seconds), the earliest that it can be.

        The service answered at `sent_s` or later, when its clock stood below date_s + 1: what comes out is early by up
        to a second and the time that the answer took. Without a Date both clocks are taken to agree.
        """
        date_s = self.date_s
        return theirs_s if date_s is None else self.sent_s + theirs_s - (date_s + 1.0)

    def text(self) -> str:
        return parsed("text", lambda: self.body.decode("ascii")).strip()

    def json(self) -> Any:
        return parsed("JSON", lambda: json.loads(self.body))


class Service:
    """The service at `endpoint`: an http URL, or host and port as some SDKs have it. Thread-safe.

    Errors: UsageError, at once, for an endpoint that is neither.
    """

    def __init__(self, endpoint: str, now_s: Callable[[], float] = time.time) -> None:
        self.endpoint = endpoint
        self._now_s = now_s
        try:
            url = urllib.parse.urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
            self._host, self._port = url.hostname or "", url.port or 80
        except ValueError as exc:
            raise UsageError(f"{endpoint!r} is no address of a metadata service: {exc}") from exc
        if url.scheme != "http" or not self._host or url.username or url.query or url.fragment:
            raise UsageError(
                f"{endpoint!r} is no address of a metadata service; give one such as http://127.0.0.1:1338"
            )
        self._base = url.path.rstrip("/")
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._named = host if self._port == 80 else f"{host}:{self._port}"
        self._lock = threading.Lock()
        self._keepers = 0
        self._idle: Wire | None = None

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Inside the block the connection stays open between requests, if the service lets it: making one each time
        costs more than asking."""
        with self._lock:
            self._keepers += 1
        try:
            yield
        finally:
            with self._lock:
                self._keepers -= 1
                idle, self._idle = (None, self._idle) if self._keepers else (self._idle, None)
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
        """One request and its whole reply, of whatever status. Errors: Fault, also when `stop` was set meanwhile."""
        until_s = time.monotonic() + timeout_s
        keep = self._keepers > 0 and method != "POST"  # which is never sent twice
        try:
            head = _head(method, self._base + path, self._named, tuple(headers.items()), len(body), keep)
            idle = self._taken() if keep else None
            try:
                return self._exchanged(idle, head + body, keep, stop, until_s)
            except Unheard:
                if idle is None:
                    raise
                return self._exchanged(None, head + body, keep, stop, until_s)  # the idle one was closed meanwhile
        except (OSError, ValueError, Fault) as exc:  # ValueError: a host whose name cannot be one
            raise Fault(f"{method} {self.endpoint}{path}: {exc}") from exc

    def _exchanged(self, idle: Wire | None, request: bytes, keep: bool, stop: threading.Event, until_s: float) -> Reply:
        """Over the connection that was idle, or a new one. `keep`: it stays open, if the service lets it."""
        wire = idle or Wire(self._host, self._port, stop, until_s)
        done: Wire | None = wire
        try:
            sent_s = self._now_s()
            answer = wire.exchange(request, stop, until_s)
            came_s = self._now_s()
            if keep and not answer.is_last:
                done = self._put_back(wire)
        finally:
            if done is not None:
                done.close()
        etag, date = answer.headers.get("etag", ""), answer.headers.get("date", "")
        return Reply(answer.status, answer.body, etag, date, sent_s, came_s)

    def _taken(self) -> Wire | None:
        with self._lock:
            idle, self._idle = self._idle, None
            return idle

    def _put_back(self, wire: Wire) -> Wire | None:
        """Keeps it for the next request; what is to be closed instead, if anything."""
        with self._lock:
            if not self._keepers:
                return wire
            other, self._idle = self._idle, wire
            return other


@functools.lru_cache(maxsize=16)  # who polls asks the same again and again
def _head(
    method: str, target: str, host: str, headers: tuple[tuple[str, str], ...], body_bytes: int, keep: bool
) -> bytes:
    """All of a request but its body. Errors: Fault for what would end a line early."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", "Accept-Encoding: identity"]
    lines += [f"{name}: {value}" for name, value in headers]
    if not keep:
        lines.append("Connection: close")
    if method != "GET":
        lines.append(f"Content-Length: {body_bytes}")
    if " " in target or not all(line.isascii() and line.isprintable() for line in lines):
        raise Fault("that does not fit into a request")
    return "\r\n".join([*lines, "", ""]).encode()


def parsed(what: str, parse: Callable[[], T]) -> T:
    """What `parse` makes of a body; Fault for whatever it cannot make sense of."""
    try:
        return parse()
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as exc:
        raise Fault(f"the answer is not the {what} that was expected: {exc!r}"[:500]) from exc


def http_time_s(text: str) -> float:
    """Unix seconds of "Mon, 19 Sep 2016 18:29:47 GMT", with or without the day of the week. Errors: Fault."""
    return parsed("time", lambda: _unix_s(email.utils.parsedate_to_datetime(text)))


def iso_time_s(text: str) -> float:
    """Unix seconds of an RFC 3339 time; UTC where no zone is said. Errors: Fault."""
    return parsed("time", lambda: _unix_s(datetime.fromisoformat(text)))


def _unix_s(when: datetime) -> float:
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def words(value: object) -> str:
    """A field of an answer that has to be text and not empty, made safe for a key or a line. Errors: Fault."""
    if not isinstance(value, str) or not value:
        raise Fault(f"the answer has {str(value)[:50]!r} where a text was expected")
    return "".join(c if c.isprintable() else "?" for c in value[:WORDS_MAX])
