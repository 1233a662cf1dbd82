"""Requests to a machine's metadata service: small, bounded in time and bytes, to one address, ended by `stop`.

- One connection a request, to the endpoint that was given: no proxy is used and no redirect followed. Who asks often
  keeps it open; where the service has closed it meanwhile the request is sent once more, on another one.
- A request ends when `stop` is set (within a quarter of a second), when its time is up however slowly bytes drip in,
  or when more bytes come than any right answer has.
- A reply that was cut short is a fault, never an answer.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import os
import select
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from ckpt.errors import UsageError
from ckpt.notices.asking import Fault

T = TypeVar("T")

SLICE_S = 0.25  # how long a wait for the network goes on after `stop`
BODY_BYTES_MAX = 64 << 10
HEAD_BYTES_MAX = 16 << 10
WORDS_MAX = 200  # of what a service says, in a key or a message


@dataclass(frozen=True, slots=True)
class Reply:
    """`sent_s`: when the request was sent, Unix seconds by our clock. `date_s`: the service's clock when it answered,
    in whole seconds; None where it does not say."""

    status: int
    body: bytes
    etag: str
    sent_s: float
    date_s: float | None

    def ours_s(self, theirs_s: float) -> float:
        """A time by the service's clock as one by ours (Unix seconds), the earliest that it can be.

        The service answered at `sent_s` or later, when its clock stood below date_s + 1. Without a Date both clocks
        are taken to agree.
        """
        return theirs_s if self.date_s is None else self.sent_s + theirs_s - (self.date_s + 1.0)

    def text(self) -> str:
        return parsed("text", lambda: self.body.decode("ascii")).strip()

    def json(self) -> Any:
        return parsed("JSON", lambda: json.loads(self.body))


class _Connection(http.client.HTTPConnection):
    """Over a socket whose waits are bounded. `was_used`: a request came before."""

    watched: _Watched | None = None  # the same as `sock`
    was_used = False

    def close(self) -> None:
        super().close()
        self.watched = None


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
        self._lock = threading.Lock()
        self._keepers = 0
        self._idle: _Connection | None = None

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
        body: bytes | None = None,
    ) -> Reply:
        """One request and its whole reply, of whatever status. Errors: Fault, also when `stop` was set meanwhile."""
        until_s = time.monotonic() + timeout_s
        with self._lock:
            keep = self._keepers > 0 and method != "POST"  # which is never sent twice
            kept, self._idle = (self._idle, None) if keep else (None, self._idle)
        told = headers if keep else {**headers, "Connection": "close"}
        sent_s = self._now_s()
        made = kept or _Connection(self._host, self._port)
        connection: _Connection | None = made
        try:
            reply = self._reply(made, method, path, told, stop, until_s, body)
            with reply:
                content = reply.read(BODY_BYTES_MAX + 1)
                if len(content) > BODY_BYTES_MAX or reply.length:
                    raise Fault(f"{method} {self.endpoint}{path}: {len(content)} bytes came, not the whole reply")
                date_s, etag = _date_s(reply.getheader("Date")), reply.getheader("ETag") or ""
                ends = reply.will_close
            if not ends:
                connection = self._put_back(made)
            return Reply(reply.status, content, etag, sent_s, date_s)
        except (OSError, http.client.HTTPException, ValueError) as exc:  # ValueError: what does not fit into a request
            raise Fault(f"{method} {self.endpoint}{path}: {exc!r}") from exc
        finally:
            if connection is not None:
                connection.close()

    def _reply(
        self,
        connection: _Connection,
        method: str,
        path: str,
        headers: Mapping[str, str],
        stop: threading.Event,
        until_s: float,
        body: bytes | None,
    ) -> http.client.HTTPResponse:
        while True:
            if connection.watched is None:
                connection.watched = connection.sock = _connected(self._host, self._port, stop, until_s)
            connection.watched.begin(stop, until_s)
            was_used, connection.was_used = connection.was_used, True
            try:
                connection.request(method, self._base + path, body, headers)
                return connection.getresponse()
            except (ConnectionError, http.client.HTTPException):  # RemoteDisconnected is both
                if not was_used:
                    raise
                connection.close()  # it was closed while it was idle: what was asked is harmless twice
                connection.was_used = False

    def _put_back(self, connection: _Connection) -> _Connection | None:
        """Keeps it for the next request; what is to be closed instead, if anything."""
        with self._lock:
            if not self._keepers:
                return connection
            other, self._idle = self._idle, connection
            return other


class _Watched(socket.socket):
    """A socket whose waits end by `stop` or at a deadline, and which takes only so many bytes."""

    stop: threading.Event
    until_s: float
    bytes_left = 0

    def begin(self, stop: threading.Event, until_s: float) -> None:
        """The next request: until when, and how much."""
        self.stop, self.until_s = stop, until_s
        self.bytes_left = BODY_BYTES_MAX + HEAD_BYTES_MAX

    def await_ready(self, mask: int) -> None:
        poll = select.poll()
        poll.register(self, mask)
        while not self.stop.is_set():
            left_s = self.until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("no answer in time")
            if poll.poll(min(left_s, SLICE_S) * 1000):
                return
        raise Fault("stopped")

    def recv_into(self, *args: Any) -> int:
        self.await_ready(select.POLLIN)
        count = super().recv_into(*args)
        self.bytes_left -= count
        if self.bytes_left < 0:
            raise Fault("more bytes came than a right answer has")
        return count


def _connected(host: str, port: int, stop: threading.Event, until_s: float) -> _Watched:
    """To the first address of the host: a metadata service has one."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = _Watched(family, kind, protocol)
    try:
        made.begin(stop, until_s)
        made.setblocking(False)
        made.connect_ex(address)
        made.await_ready(select.POLLOUT)
        if error := made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
        made.settimeout(SLICE_S)
    except BaseException:
        made.close()
        raise
    return made


def _date_s(header: str | None) -> float | None:
    try:
        return http_time_s(header) if header else None
    except Fault:
        return None


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
