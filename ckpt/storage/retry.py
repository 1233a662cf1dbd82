"""Retries: a wrapper around every backend, and the only place that retries. Nothing below or above it needs to.

Only TransientError is retried, with exponential backoff and jitter: each pause is drawn evenly from [half, whole] of
0.1 s x 2^n, at most 10 s. Retries end `retry_s` after the operation began. Before the store's first answer they end
after `contact_s`, if that is less: the address may be wrong, and a person waits. The outcome then:

- A read, a delete and abort_uploads are idempotent: the last TransientError is raised.
- A put that met a TransientError may have landed, or may land later. It is retried with the same bytes. If IF_ABSENT
  then finds the key taken, the object is read back: equal bytes are our own put whose reply was lost. A put that has
  not succeeded by the end raises Unsettled.
- A cancelled put (`cancel`) neither waits for a retry nor begins one.
- A listing continues behind the last key that it has returned.

AccessDenied does not pass by itself. But the file of credentials may be rewritten while a job runs. So the store is
opened anew, which reads the file again, and the operation is tried once more.
"""

from __future__ import annotations

import functools
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from ckpt.errors import AccessDenied, AlreadyExists, CkptError, DamagedData, NotFound, TransientError, Unsettled
from ckpt.events import Events
from ckpt.storage.contract import Backend, Buffer, ObjectInfo, PutMode
from ckpt.storage.failure import check_not_cancelled
from ckpt.storage.names import is_key
from ckpt.storage.usage import LIST_PAGE, StoreUsage
from ckpt.types import format_count

T = TypeVar("T")
B = TypeVar("B", bound=Buffer)

PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 10.0
ADDRESS_HINT = "; check the address of the store (AWS_ENDPOINT_URL or its like)"
RETRY_HINT = ". CKPT_RETRY_S=60 retries for 60 s"
CANCEL_S = 0.1  # in a pause, between two looks at `cancel`
# After one or two seconds, and once: a person who waits is told why.
LOUD_TRY = 5
# Between two warnings of one outage, over all operations; then twice as long each time, up to an hour.
LOUD_AGAIN_S, LOUD_AGAIN_S_MAX = 60.0, 3600.0


class Retrying:
    """A backend that retries the operations of the inner one. `contact_s`: how long to retry until the store's first
    answer of any kind; None: `retry_s`. `reopen`: opens the same store with the current credentials; None: they never
    change. `usage`: counts the requests. `pause(seconds)` waits; by default until `close` at the latest."""

    def __init__(
        self,
        inner: Backend,
        retry_s: float,
        events: Events | None = None,
        *,
        reopen: Callable[[], Backend] | None = None,
        contact_s: float | None = None,
        usage: StoreUsage | None = None,
        now_s: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] | None = None,
        seed: int | None = None,
    ) -> None:
        self.url = inner.url
        self.inner = inner
        self._retry_s = retry_s
        self._contact_s = None if contact_s is None or contact_s >= retry_s else contact_s
        self._has_answered = False
        self._usage = usage or StoreUsage()
        self._reopen = reopen
        self._reopen_lock = threading.Lock()
        self._events = events or Events()
        self._now_s = now_s
        self._closed = threading.Event()
        self._pause = pause or self._closed.wait
        self._random = random.Random(seed)
        self._warning_lock = threading.Lock()
        self._last_failure_s = -math.inf  # the newest failure
        self._next_warning_s, self._warning_interval_s = -math.inf, LOUD_AGAIN_S

    def put(
        self,
        key: str,
        chunks: Sequence[Buffer],
        mode: PutMode = PutMode.OVERWRITE,
        cancel: threading.Event | None = None,
    ) -> None:
        uncertain = False
        nbytes = sum(memoryview(chunk).nbytes for chunk in chunks)

        check = functools.partial(check_not_cancelled, cancel, self.url, key)

        def attempt() -> None:
            nonlocal uncertain
            check()
            self._usage.count("put")
            self._usage.add_bytes("put", nbytes)
            try:
                self.inner.put(key, chunks, mode, cancel)
            except TransientError:
                uncertain = True
                check()
                raise
            except AlreadyExists:
                if not (uncertain and self._has_content(key, chunks)):
                    raise

        try:
            self._call_with_retries(f"put {key}", attempt, cancel)
        except TransientError as exc:
            raise Unsettled(f"{exc}; the outcome is unknown: read {key} back to see whether it was written") from exc

    def get(self, key: str, size_max: int) -> bytes:
        return self._get(key, lambda: self.inner.get(key, size_max))

    def get_range(self, key: str, start: int, length: int) -> Buffer:
        return self._get(key, lambda: self.inner.get_range(key, start, length))

    def _get(self, key: str, get: Callable[[], B]) -> B:
        def attempt() -> B:
            self._usage.count("get")
            content = get()
            self._usage.add_bytes("get", memoryview(content).nbytes)
            return content

        return self._call_with_retries(f"get {key}", attempt)

    def head(self, key: str) -> ObjectInfo:
        def attempt() -> ObjectInfo:
            self._usage.count("head")
            return self.inner.head(key)

        return self._call_with_retries(f"head {key}", attempt)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        last, given = "", 0
        listing: Iterator[ObjectInfo] | None = None

        def following() -> ObjectInfo | None:
            nonlocal listing
            try:
                if listing is None:
                    self._usage.count("list")
                    listing = iter(self.inner.list(prefix))
                return next((info for info in listing if info.key > last), None)
            except CkptError:
                # A generator that has raised gives nothing more.
                listing = None
                raise

        while (info := self._call_with_retries(f"list {prefix}", following)) is not None:
            last, given = info.key, given + 1
            if given % LIST_PAGE == 0:
                self._usage.count("list")
            yield info

    def folders(self, prefix: str) -> Sequence[str]:
        def attempt() -> Sequence[str]:
            self._usage.count("list")
            return self.inner.folders(prefix)

        return self._call_with_retries(f"look below {prefix}", attempt)

    def delete(self, keys: Iterable[str]) -> None:
        each = list(keys)

        def attempt() -> None:
            self._usage.count("delete")
            self.inner.delete(each)

        self._call_with_retries(f"delete {format_count(len(each), 'object')}", attempt)

    def abort_uploads(
        self, older_than_s: float, prefixes: Sequence[str] = ("",), is_ours: Callable[[str], bool] = is_key
    ) -> int:
        return self._call_with_retries(
            "abort uploads", lambda: self.inner.abort_uploads(older_than_s, prefixes, is_ours)
        )

    def now_s(self) -> float:
        return self._call_with_retries("ask the time", lambda: self.inner.now_s())

    def close(self) -> None:
        """Closes the inner backend and ends every pause: an operation that waits for a retry raises its last error at
        once."""
        self._closed.set()
        self.inner.close()

    def _has_content(self, key: str, chunks: Sequence[Buffer]) -> bool:
        ours = b"".join(chunks)
        try:
            return self.inner.get(key, len(ours)) == ours
        except (DamagedData, NotFound):
            return False

    def _call_with_retries(self, what: str, attempt: Callable[[], T], cancel: threading.Event | None = None) -> T:
        """Runs `attempt` with retries. `cancel` ends a pause; `attempt` decides what follows."""
        began_s = self._now_s()
        tries = 0
        is_renewed = False
        while True:
            tries += 1
            inner = self.inner
            try:
                result = attempt()
            except AccessDenied:
                self._has_answered = True
                if is_renewed or not self._reopen_store(inner):
                    raise
                is_renewed = True
            except TransientError as exc:
                contact_s = None if self._has_answered else self._contact_s
                limit_s = self._retry_s if contact_s is None else contact_s
                left_s = began_s + limit_s - self._now_s()
                pause_s = min(PAUSE_MAX_S, PAUSE_FIRST_S * 2 ** min(tries - 1, 20)) * self._random.uniform(0.5, 1.0)
                if left_s <= pause_s or self._closed.is_set():
                    doubted = not self._has_answered and "://" in self.url  # a folder has no address
                    hint = "" if not doubted else ADDRESS_HINT if contact_s is None else ADDRESS_HINT + RETRY_HINT
                    after = format_count(tries, "attempt")
                    raise type(exc)(f"{self.url}: gave up trying to {what} after {after}: {exc}{hint}") from exc
                told = f"{self.url}: {what} failed; ckpt retries for {left_s:.0f} s: {exc}"
                loud = self._is_warning_due(tries)
                self._events.emit("store.retry", told, loud=loud, tries=tries, pause_s=pause_s)
                self._wait(pause_s, cancel)
            except Exception:
                self._has_answered = True  # a refusal is an answer
                raise
            else:
                self._has_answered = True
                return result

    def _is_warning_due(self, tries: int) -> bool:
        """Whether to log this failure as a warning: once per outage, then at growing intervals."""
        with self._warning_lock:
            now_s = self._now_s()
            if now_s - self._last_failure_s > LOUD_AGAIN_S:
                self._next_warning_s, self._warning_interval_s = now_s, LOUD_AGAIN_S
            self._last_failure_s = now_s
            if tries < LOUD_TRY or now_s < self._next_warning_s:
                return False
            self._next_warning_s = now_s + self._warning_interval_s
            self._warning_interval_s = min(2 * self._warning_interval_s, LOUD_AGAIN_S_MAX)
            return True

    def _reopen_store(self, refused: Backend) -> bool:
        """Opens the store anew in place of `refused`. Returns whether there is another store to ask. Errors: none."""
        with self._reopen_lock:
            if self.inner is not refused:  # another thread was refused before
                return True
            if self._reopen is None or self._closed.is_set():
                return False
            try:
                self.inner = self._reopen()
            except CkptError:  # the new credentials are useless, or half written
                return False
            refused.close()
        self._events.emit(
            "store.reopened", f"{self.url}: the store refused the credentials; ckpt retries with the current ones"
        )
        return True

    def _wait(self, pause_s: float, cancel: threading.Event | None) -> None:
        while pause_s > 0 and not (cancel is not None and cancel.is_set()):
            part_s = pause_s if cancel is None else min(pause_s, CANCEL_S)
            self._pause(part_s)
            pause_s -= part_s
