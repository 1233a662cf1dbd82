"""Requests by presigned URL over http.client, for what obstore cannot do.

- A ranged get on a server that answers 200. With Content-Range the reply holds just the range (rclone serve s3).
  Without, it is the whole object, and the bytes before the range are read and dropped.
- The store's clock, from the Date header.

Connections are kept and shared between threads, with one request at a time on each. `close` closes the idle ones; each
other one is closed when its request ends.
"""

from __future__ import annotations

import email.utils
import http.client
import re
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckpt.errors import CkptError, DamagedData, StorageError
from ckpt.storage.failure import connection_error
from ckpt.storage.files import read_buffer

IDLE_MAX = 32
ERROR_BYTES_MAX = 64 << 10
SKIP_BYTES = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class SignedHttp:
    """A client for presigned URLs. Thread-safe. `sign(method, key)` returns a URL; `failed(what, status, text)` returns
    the error for a bad reply. `roots`: PEM certificates that are trusted besides the system's."""

    def __init__(
        self,
        sign: Callable[[str, str], str],
        failed: Callable[[str, int, str], CkptError],
        timeout_s: float,
        roots: bytes | None = None,
    ) -> None:
        self._sign = sign
        self._error_of_reply = failed
        self._timeout_s = timeout_s
        self._roots = roots
        self._ssl_context: ssl.SSLContext | None = None
        self._idle: list[tuple[str, http.client.HTTPConnection]] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        """Exactly `length` (> 0) bytes. Errors: as Backend.get_range."""
        what = f"get {key}"
        url = self._sign("GET", key)
        with self._exchange(what, "GET", url, {"Range": f"bytes={start}-{start + length - 1}"}) as reply:
            if reply.status == 416:
                raise DamagedData(f"{key} ends before byte {start + length}")
            if reply.status not in (200, 206):
                raise self._error_of_reply(what, reply.status, reply.read(ERROR_BYTES_MAX).decode(errors="replace"))
            given = reply.getheader("Content-Range")
            if given is None:
                self._skip(_host(url), what, reply, start)
            elif (m := _CONTENT_RANGE.fullmatch(given)) is None or int(m[1]) != start:
                raise StorageError(f"{what}: bytes from {start} on were requested, and the store sent {given[:100]!r}")
            elif int(m[2]) + 1 < start + length:
                raise DamagedData(f"{key} ends at byte {int(m[2]) + 1}, before {start + length}")
            out = read_buffer(length)
            done = 0
            while done < length and (got := reply.readinto(out[done:])):
                done += got
            if done < length and given is None and not reply.length:
                raise DamagedData(f"{key} ends at byte {start + done}, before {start + length}")
            if done < length:
                raise connection_error(_host(url), what, f"{done} of {length} bytes arrived")
        return out

    def date_s(self, url: Callable[[], str]) -> float | None:
        """The clock of the server at that URL, Unix seconds, from any reply. None if `url` raises StorageError, the
        request fails, or the reply has no time."""
        try:
            with self._exchange("ask the time", "HEAD", url(), {}) as reply:
                date = reply.getheader("Date")
            return email.utils.parsedate_to_datetime(date).timestamp() if date else None
        except (StorageError, ValueError):
            return None

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            self._is_closed = True
        for _, connection in idle:
            connection.close()

    @contextmanager
    def _exchange(
        self, what: str, method: str, url: str, headers: dict[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        """One request and its reply. The connection is kept only if the reply was read to its end."""
        host = _host(url)
        connection = self._connection(host)
        try:
            try:
                connection.request(method, url[len(host) :], headers=headers)
                reply = connection.getresponse()
                yield reply
                is_reusable = reply.isclosed() and not reply.will_close
            except (OSError, http.client.HTTPException) as exc:
                raise connection_error(host, what, repr(exc)) from exc
            if is_reusable:
                with self._lock:
                    if len(self._idle) < IDLE_MAX and not self._is_closed:
                        self._idle.append((host, connection))
                        return
            connection.close()
        except BaseException:
            connection.close()
            raise

    def _connection(self, host: str) -> http.client.HTTPConnection:
        with self._lock:
            for at, (known, connection) in enumerate(self._idle):
                if known == host:
                    del self._idle[at]
                    return connection
        parsed = urllib.parse.urlsplit(host)
        if parsed.scheme != "https":
            return http.client.HTTPConnection(parsed.netloc, timeout=self._timeout_s)
        with self._lock:
            if self._ssl_context is None:  # reading the system's certificates takes 10 ms
                self._ssl_context = ssl.create_default_context()
                if self._roots is not None:
                    self._ssl_context.load_verify_locations(cadata=self._roots.decode("ascii"))
        return http.client.HTTPSConnection(parsed.netloc, timeout=self._timeout_s, context=self._ssl_context)

    @staticmethod
    def _skip(host: str, what: str, reply: http.client.HTTPResponse, count: int) -> None:
        drop = memoryview(bytearray(min(count, SKIP_BYTES)))
        at = 0
        while at < count:
            got = reply.readinto(drop[: min(count - at, SKIP_BYTES)])
            # http.client does not report a body that ends before its Content-Length.
            if not got and reply.length:
                raise connection_error(host, what, f"the reply broke off after {at} bytes")
            if not got:
                raise DamagedData(f"{what}: the object ends at byte {at}, before {count}")
            at += got


def _host(url: str) -> str:
    """Scheme and host of a URL."""
    parsed = urllib.parse.urlsplit(url)
    return f"{parsed.scheme}://{parsed.netloc}"
