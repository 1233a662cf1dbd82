"""One HTTP/1.1 connection to a metadata service (RFC 9112): small requests and replies, one after the other.

- A reply that was cut short, in its headers or its body, raises Fault. The end of the connection ends the body only if
  the service gives no length.
- An exchange ends within half a second after `stop` is set. It also ends at its deadline, and when more bytes come than
  any correct answer has.

http.client is not used. It takes more CPU than all the rest of a poll, and accepts a reply that ends within its headers
as one without a body.
"""

from __future__ import annotations

import os
import re
import select
import socket
import threading
import time
from dataclasses import dataclass

from ckpt.preemption.poll import Fault

# The longest delay until `stop` is noticed. Wake-ups are most of the cost of a long poll.
SLICE_S = 0.5
BODY_BYTES_MAX = 64 << 10
HEAD_BYTES_MAX = 16 << 10

_HEAD_END = re.compile(rb"\r?\n\r?\n")
_STATUS = re.compile(r"HTTP/1\.([01]) ([1-9][0-9]{2})(?:\s|$)")
_LENGTH = re.compile(r"[0-9]{1,9}")
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?\r\n")


class Unheard(Fault):
    """The connection was closed before a byte of the reply came."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """One reply. `headers`: names in lower case. `is_last`: the connection takes no other exchange."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_last: bool


class Wire:
    """An open connection. The constructor connects to the host's first address (a metadata service has one).
    One thread at a time; the owner closes it. `until_s`: on the monotonic clock. Errors: Fault, OSError."""

    def __init__(self, host: str, port: int, stop: threading.Event, until_s: float) -> None:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._socket = made = socket.socket(family, kind, protocol)
        try:
            made.setblocking(False)
            made.connect_ex(address)
            self._await(select.POLLOUT, stop, until_s)
            if error := made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
        except BaseException:
            made.close()
            raise

    def exchange(self, request: bytes, stop: threading.Event, until_s: float) -> HttpResponse:
        """Sends the request and returns the whole reply, until `until_s` on the monotonic clock.
        After an error the connection is unusable. Errors: Unheard, Fault, OSError."""
        came = b""
        try:
            sent = self._socket.send(request)
            while sent < len(request):
                self._await(select.POLLOUT, stop, until_s)
                sent += self._socket.send(request[sent:])
            while True:
                self._await(select.POLLIN, stop, until_s)
                part = self._socket.recv(HEAD_BYTES_MAX)
                came += part
                if (answer := parse_response(came, is_end=not part)) is not None:
                    return answer
        except ConnectionError as exc:
            if came:
                raise
            raise Unheard(repr(exc)) from exc

    def close(self) -> None:
        self._socket.close()

    def _await(self, mask: int, stop: threading.Event, until_s: float) -> None:
        poll = select.poll()
        poll.register(self._socket, mask)
        while not stop.is_set():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("no answer in time")
            if poll.poll(min(left_s, SLICE_S) * 1000):
                return
        raise Fault("stopped")


def parse_response(came: bytes, *, is_end: bool) -> HttpResponse | None:
    """The reply in the bytes that came; None while it is incomplete. `is_end`: no more bytes come.
    Errors: Fault for an invalid, truncated or too large reply; Unheard if no byte came."""
    if is_end and not came:
        raise Unheard("the connection was closed without an answer")
    body_at, status = 0, 100
    # An interim reply, such as 100 Continue, precedes the final one.
    while status < 200:
        end = _HEAD_END.search(came, body_at, HEAD_BYTES_MAX)
        if end is None:
            if len(came) >= HEAD_BYTES_MAX:
                raise Fault(f"the headers of the reply have more than {HEAD_BYTES_MAX} bytes")
            if is_end:
                raise Fault("the connection ended within the headers of the reply")
            return None
        version, status, headers = _head(came[body_at : end.start()])
        body_at = end.end()
    ends_with_connection = False
    body: bytes | None
    if status in (204, 304):
        body, end_at = b"", body_at
    elif "transfer-encoding" in headers:
        if headers["transfer-encoding"].lower() != "chunked":
            raise Fault(
                f"the reply has the transfer encoding {headers['transfer-encoding'][:50]!r}, which is not supported"
            )
        body, end_at = _join_chunks(came, body_at)
    elif "content-length" in headers:
        length = headers["content-length"]
        if not _LENGTH.fullmatch(length) or int(length) > BODY_BYTES_MAX:
            raise Fault(f"the reply has the content length {length[:50]!r}; at most {BODY_BYTES_MAX} bytes are allowed")
        end_at = body_at + int(length)
        body = came[body_at:end_at] if len(came) >= end_at else None
    else:
        ends_with_connection, end_at = True, len(came)
        body = came[body_at:] if is_end else None
    # Twice the limit, because chunks have headers, too.
    if len(came) - body_at > 2 * BODY_BYTES_MAX or len(body or b"") > BODY_BYTES_MAX:
        raise Fault(f"the reply has more than {BODY_BYTES_MAX} bytes")
    if body is None:
        if is_end:
            raise Fault(f"the connection ended after {len(came) - body_at} bytes of the body")
        return None
    said = headers.get("connection", "").lower()
    is_last = ends_with_connection or "close" in said or (version == "0" and "keep-alive" not in said)
    return HttpResponse(status, headers, body, is_last or end_at < len(came))


def _head(head: bytes) -> tuple[str, int, dict[str, str]]:
    """The minor version of HTTP, the status and the headers. Repeated headers are joined by a comma (RFC 9110, 5.3)."""
    first, *lines = head.decode("latin-1").split("\n")
    found = _STATUS.match(first)
    if found is None:
        raise Fault(f"an HTTP reply does not begin with {first[:50]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        name, value = name.strip().lower(), value.strip()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return found[1], int(found[2]), headers


def _join_chunks(came: bytes, at: int) -> tuple[bytes | None, int]:
    """The body whose chunks begin at `at`, and where it ends; None while it is incomplete. Errors: Fault."""
    parts: list[bytes] = []
    while True:
        found = _CHUNK.match(came, at)
        if found is None:
            if b"\n" in came[at:]:
                raise Fault("a chunk of the body has no valid length")
            return None, at
        at, size = found.end(), int(found[1], 16)
        if size == 0:
            break
        if len(came) < at + size + 2:
            return None, at
        if came[at + size : at + size + 2] != b"\r\n":
            raise Fault("a chunk of the body is longer than its stated length")
        parts.append(came[at : at + size])
        at += size + 2
    # The end of the trailer. Without a trailer the last chunk's own line end is the first half.
    end = _HEAD_END.search(came, at - 2)
    return (None, at) if end is None else (b"".join(parts), end.end())
