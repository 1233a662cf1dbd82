"""Backend for memory://name: a store within this process, shared by all that open the name; for tests and trials.

Fault model: none. Objects appear whole, put-if-absent is honoured, listings are current. `close` keeps the content, as
a server would; the content ends with the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ckpt.errors import AlreadyExists, DamagedData, NotFound
from ckpt.storage.contract import Buffer, ObjectInfo, PutMode, check_end
from ckpt.storage.names import check_key, check_prefix, check_range, is_key


@dataclass(slots=True)
class _Store:
    """The content of one name, shared by all that opened it. `lock` guards both fields."""

    objects: dict[str, tuple[bytes, ObjectInfo]] = field(default_factory=dict)
    puts: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


_STORES: dict[str, _Store] = {}
_STORES_LOCK = threading.Lock()


def open_memory(url: str) -> MemoryBackend:
    with _STORES_LOCK:
        return MemoryBackend(url, _STORES.setdefault(url, _Store()))


class MemoryBackend:
    """A Backend (see ckpt.storage.contract) in this process's memory."""

    def __init__(self, url: str, store: _Store) -> None:
        self.url = url
        self._store = store

    def put(
        self,
        key: str,
        chunks: Sequence[Buffer],
        mode: PutMode = PutMode.OVERWRITE,
        cancel: threading.Event | None = None,
    ) -> None:
        check_key(key)
        data = b"".join(chunks)
        with self._store.lock:
            if mode is PutMode.IF_ABSENT and key in self._store.objects:
                raise AlreadyExists(f"{self.url}: {key} exists already")
            self._store.puts += 1
            info = ObjectInfo(key, len(data), time.time(), str(self._store.puts))
            self._store.objects[key] = data, info

    def get(self, key: str, size_max: int) -> bytes:
        data, _ = self._object(key)
        if len(data) > size_max:
            raise DamagedData(f"{self.url}: {key} has {len(data)} bytes; at most {size_max} are expected")
        return data

    def get_range(self, key: str, start: int, length: int) -> Buffer:
        check_range(start, length)
        check_end(self, key, start + length)
        data, _ = self._object(key)
        return memoryview(data)[start : start + length]

    def head(self, key: str) -> ObjectInfo:
        return self._object(key)[1]

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with self._store.lock:
            found = [info for key, (_, info) in self._store.objects.items() if key.startswith(prefix) and is_key(key)]
        yield from sorted(found, key=lambda info: info.key)

    def folders(self, prefix: str) -> Sequence[str]:
        rest = [info.key[len(prefix) :] for info in self.list(prefix)]
        return sorted({key.partition("/")[0] for key in rest if "/" in key})

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with self._store.lock:
                self._store.objects.pop(check_key(key), None)

    def abort_uploads(
        self, older_than_s: float, prefixes: Sequence[str] = ("",), is_ours: Callable[[str], bool] = is_key
    ) -> int:
        return 0

    def now_s(self) -> float:
        return time.time()

    def close(self) -> None:
        pass

    def _object(self, key: str) -> tuple[bytes, ObjectInfo]:
        with self._store.lock:
            found = self._store.objects.get(check_key(key))
        if found is None:
            raise NotFound(f"{self.url}: {key} does not exist")
        return found
