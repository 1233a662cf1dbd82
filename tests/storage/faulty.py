"""A backend whose failures are planned.

Fault model, for each operation that a Rule picks:

    BEFORE      it fails, and nothing was done
    LOST_REPLY  it is done, and fails all the same
    LATE        a put that fails now and lands when the test says `land()`
    TRUNCATED   a get or get_range that gives the first half of the bytes
    FLIPPED     a get or get_range with one bit wrong
    HANG        it waits until the test says `release()`, then goes on as if nothing were
    CRASH       the process dies here: this and every later operation raises Crash, and nothing more is done
    CRASH_AFTER the same, but this operation is still done

Everything asked for is in `log`, in order, with what became of it.
"""

from __future__ import annotations

import enum
import fnmatch
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ckpt.errors import CkptError, TransientError
from ckpt.storage import Backend, Buffer, ObjectInfo, PutMode
from ckpt.storage.names import is_key


class Fault(enum.Enum):
    BEFORE = "before"
    LOST_REPLY = "lost reply"
    LATE = "late"
    TRUNCATED = "truncated"
    FLIPPED = "flipped"
    HANG = "hang"
    CRASH = "crash"
    CRASH_AFTER = "crash after"


class Crash(BaseException):
    """The process that used the backend is dead. No `except Exception` may come back to life from it."""


@dataclass(frozen=True)
class Rule:
    """The `nth` call (from 1) of `operation` whose key matches the glob, and `count - 1` more, meet the fault.

    `operation`: put, get, get_range, head, list, folders, delete, now_s, abort_uploads, or * for any; list and folders
    are matched by their prefix, delete by its first key. `error`: what BEFORE, LOST_REPLY and LATE raise."""

    operation: str
    fault: Fault
    key: str = "*"
    nth: int = 1
    count: int = 1
    error: type[CkptError] = TransientError


@dataclass(frozen=True)
class Operation:
    number: int
    name: str
    key: str
    size: int
    fault: Fault | None
    done: bool = False


class FaultyBackend:
    """Wraps `inner`. Thread-safe; operations that meet no fault run in parallel."""

    def __init__(self, inner: Backend, plan: Iterable[Rule] = ()) -> None:
        self.inner = inner
        self.url = inner.url
        self.plan = tuple(plan)
        self.log: list[Operation] = []
        self._seen = [0] * len(self.plan)
        self._late: list[tuple[str, bytes, PutMode]] = []
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._hung = threading.Semaphore(0)
        self._is_dead = False

    def land(self) -> int:
        """Lets the late puts happen, in order; how many."""
        with self._lock:
            late, self._late = self._late, []
        for key, data, mode in late:
            self.inner.put(key, [data], mode)
        return len(late)

    def wait_hung(self, timeout_s: float = 30.0) -> None:
        """Waits until one more operation hangs."""
        assert self._hung.acquire(timeout=timeout_s), "no operation hangs"

    def release(self) -> None:
        """Lets all that hangs go on, now and later."""
        self._released.set()

    def names(self) -> list[str]:
        """The log as "put commits/x" lines."""
        return [f"{each.name} {each.key}" for each in self.log]

    def put(
        self,
        key: str,
        chunks: Sequence[Buffer],
        mode: PutMode = PutMode.OVERWRITE,
        cancel: threading.Event | None = None,
    ) -> None:
        size = sum(memoryview(chunk).nbytes for chunk in chunks)
        with self._operation("put", key, size) as it:
            if it.fault is Fault.LATE:
                with self._lock:
                    self._late.append((key, b"".join(chunks), mode))
                raise it.error(f"planned: put {key} has not landed yet")
            self.inner.put(key, chunks, mode, cancel)

    def get(self, key: str, size_max: int) -> bytes:
        with self._operation("get", key) as it:
            return bytes(it.spoilt(self.inner.get(key, size_max)))

    def get_range(self, key: str, start: int, length: int) -> Buffer:
        with self._operation("get_range", key, length) as it:
            return it.spoilt(self.inner.get_range(key, start, length))

    def head(self, key: str) -> ObjectInfo:
        with self._operation("head", key):
            return self.inner.head(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._operation("list", prefix):
            return iter(list(self.inner.list(prefix)))

    def folders(self, prefix: str) -> Sequence[str]:
        with self._operation("folders", prefix):
            return self.inner.folders(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        each = list(keys)
        with self._operation("delete", each[0] if each else "", len(each)):
            self.inner.delete(each)

    def abort_uploads(
        self, older_than_s: float, prefixes: Sequence[str] = ("",), is_ours: Callable[[str], bool] = is_key
    ) -> int:
        with self._operation("abort_uploads", ""):
            return self.inner.abort_uploads(older_than_s, prefixes, is_ours)

    def now_s(self) -> float:
        with self._operation("now_s", ""):
            return self.inner.now_s()

    def close(self) -> None:
        self._released.set()
        self.inner.close()

    def _operation(self, name: str, key: str, size: int = 0) -> _Running:
        with self._lock:
            rule = None
            for at, each in enumerate(self.plan):
                if each.operation in ("*", name) and fnmatch.fnmatchcase(key, each.key):
                    self._seen[at] += 1
                    if each.nth <= self._seen[at] < each.nth + each.count:
                        rule = rule or each
            self.log.append(Operation(len(self.log), name, key, size, rule.fault if rule else None))
            return _Running(self, len(self.log) - 1, rule)


class _Running:
    """One operation, as a context: what is raised on entry and exit is the fault."""

    def __init__(self, owner: FaultyBackend, number: int, rule: Rule | None) -> None:
        self._owner = owner
        self._number = number
        self.fault = rule.fault if rule else None
        self.error = rule.error if rule else TransientError

    def __enter__(self) -> _Running:
        owner = self._owner
        if self.fault is Fault.CRASH:
            owner._is_dead = True
        if owner._is_dead:
            raise Crash(f"planned: dead at operation {self._number}")
        if self.fault is Fault.BEFORE:
            raise self.error(f"planned: {owner.names()[self._number]} failed")
        if self.fault is Fault.HANG:
            owner._hung.release()
            owner._released.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: object) -> None:
        if error is not None:
            return
        owner = self._owner
        with owner._lock:
            owner.log[self._number] = replace(owner.log[self._number], done=True)
        if self.fault is Fault.CRASH_AFTER:
            owner._is_dead = True
            raise Crash(f"planned: dead after operation {self._number}")
        if self.fault is Fault.LOST_REPLY:
            raise self.error(f"planned: the reply to {owner.names()[self._number]} was lost")

    def spoilt(self, data: Buffer) -> Buffer:
        if self.fault is Fault.TRUNCATED:
            return bytes(data)[: len(data) // 2]
        if self.fault is Fault.FLIPPED and len(data):
            wrong = bytearray(data)
            wrong[len(wrong) // 2] ^= 1
            return bytes(wrong)
        return data
