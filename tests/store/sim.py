"""The memory backend, or another one, under a clock and faults that a test commands.

Fault model. `fault(operation, key)` is asked before every put and delete and may answer:
FAIL: it is not done, TransientError. LOST: it is done, and the reply is lost (TransientError).
LATE: TransientError now, and it is done when the test calls `land`. CRASH: it is not done, and the process is gone:
every later operation raises Crash too. With `honest=False` put-if-absent overwrites silently.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ckpt.backends.memory import open_memory
from ckpt.errors import AlreadyExists, TransientError
from ckpt.storage.contract import Backend, Buffer, ObjectInfo, PutMode
from ckpt.storage.names import is_key


class Fault(enum.Enum):
    FAIL = enum.auto()
    LOST = enum.auto()
    LATE = enum.auto()
    CRASH = enum.auto()


class Crash(BaseException):
    """The process that used the store is gone."""


class Sim:
    """One client's view of a store; `client()` is another client of the same store."""

    def __init__(self, *, honest: bool = True, shared: Sim | None = None, inner: Backend | None = None) -> None:
        self.inner = inner or (shared.inner if shared else open_memory(f"memory://{uuid.uuid4().hex}"))
        self.url = self.inner.url
        self.world = _World() if shared is None else shared.world
        self.honest = honest if shared is None else shared.honest
        self.fault: Callable[[str, str], Fault | None] = lambda operation, key: None
        self.crashed = False
        self.late: list[Callable[[], None]] = []
        self.log: list[tuple[str, str, str]] = []  # ("begin" or "end", operation, key)
        self.reads: list[tuple[str, int]] = []
        self._lock = threading.Lock()

    def client(self) -> Sim:
        return Sim(shared=self)

    def advance(self, seconds: float) -> None:
        self.world.now_s += seconds

    def land(self) -> None:
        for each in self.late:
            with contextlib.suppress(AlreadyExists):  # an honest store refuses it
                each()
        self.late.clear()

    def put(
        self,
        key: str,
        chunks: Sequence[Buffer],
        mode: PutMode = PutMode.OVERWRITE,
        cancel: threading.Event | None = None,
    ) -> None:
        data = b"".join(bytes(chunk) for chunk in chunks)
        mode = mode if self.honest else PutMode.OVERWRITE

        def do() -> None:
            self.inner.put(key, [data], mode)
            self.world.modified_s[key] = self.world.now_s

        self._run("put", key, do)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._run("delete", key, lambda key=key: self.inner.delete([key]))  # type: ignore[misc]

    def get(self, key: str, size_max: int) -> bytes:
        self._alive()
        return self.inner.get(key, size_max)

    def get_range(self, key: str, start: int, length: int) -> Buffer:
        self._alive()
        self.reads.append((key, length))
        return self.inner.get_range(key, start, length)

    def head(self, key: str) -> ObjectInfo:
        self._alive()
        return replace(self.inner.head(key), modified_s=self.world.modified_s.get(key, 0.0))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._alive()
        for info in self.inner.list(prefix):
            yield replace(info, modified_s=self.world.modified_s.get(info.key, 0.0))

    def folders(self, prefix: str) -> Sequence[str]:
        self._alive()
        return self.inner.folders(prefix)

    def abort_uploads(
        self, older_than_s: float, prefixes: Sequence[str] = ("",), is_ours: Callable[[str], bool] = is_key
    ) -> int:
        self._alive()
        return 0

    def now_s(self) -> float:
        self._alive()
        return self.world.now_s

    def close(self) -> None:
        pass

    def held(self, prefix: str = "") -> list[str]:
        return [info.key for info in self.inner.list(prefix)]

    def copy(self) -> Sim:
        """Another store with the same content and time."""
        other = Sim(honest=self.honest)
        other.world.now_s = self.world.now_s
        for info in self.inner.list(""):
            other.inner.put(info.key, [self.inner.get(info.key, info.size)])
            other.world.modified_s[info.key] = self.world.modified_s.get(info.key, 0.0)
        return other

    def spoil(self, key: str, change: Callable[[bytes], bytes]) -> None:
        self.inner.put(key, [change(self.inner.get(key, 1 << 30))])

    def _alive(self) -> None:
        if self.crashed:
            raise Crash

    def _run(self, operation: str, key: str, do: Callable[[], None]) -> None:
        self._alive()
        with self._lock:
            self.log.append(("begin", operation, key))
            fault = self.fault(operation, key)
        if fault is Fault.CRASH:
            self.crashed = True
            raise Crash
        if fault is Fault.LATE:
            self.late.append(do)
        if fault not in (Fault.FAIL, Fault.LATE):
            do()
        if fault is not None:
            raise TransientError(f"{operation} {key}: {fault.name}")
        with self._lock:
            self.log.append(("end", operation, key))


class _World:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0
        self.modified_s: dict[str, float] = {}
