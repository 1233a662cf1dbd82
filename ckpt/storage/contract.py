"""What every backend promises. The core reaches a backend only through `ckpt.storage.open(url)`.

Keys are relative to the URL, `/`-separated, each part matching types.PATH_NAME. Bytes are given and taken as
buffers. A backend is thread-safe: any number of threads may call it at once. It translates every foreign exception
into ckpt.errors (`from exc`) and says by the class whether trying again can help (TransientError) or not.
It does not retry: `ckpt.storage.retry` is the one place that does.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckpt.storage.names import is_key

Buffer = bytes | bytearray | memoryview


class PutMode(enum.Enum):
    OVERWRITE = "overwrite"
    IF_ABSENT = "if-absent"  # AlreadyExists where the key is taken, if the store honours it: never rely on it


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """`modified_s`: the store's own clock, Unix seconds; infinity where the store tells no time, so that the object is
    for ever new. `version`: an opaque string that changes when the object is written again (an ETag, or mtime and
    size: then it may not tell two writings of one size within what the store's times can tell apart)."""

    key: str
    size: int
    modified_s: float
    version: str


class Backend(Protocol):
    url: str

    def put(
        self,
        key: str,
        chunks: Sequence[Buffer],
        mode: PutMode = PutMode.OVERWRITE,
        cancel: threading.Event | None = None,
    ) -> None:
        """Writes the concatenation of `chunks` as one object: after the return it is durable and visible whole;
        before, or after any failure, nothing half-written is ever visible. No copy of a single large chunk is made
        where the library allows it. Large objects go in parallel parts; a failed upload is aborted. `cancel`: set it to
        have a large one broken off soon, where that can be done: StorageError, and the chunks are not read any more.
        Parts of it that are there are left to `abort_uploads`: that takes time, which there is none of then."""
        ...

    def get(self, key: str, size_max: int) -> bytes:
        """The whole object. Errors: NotFound; DamagedData where it is larger than size_max (read no further)."""
        ...

    def get_range(self, key: str, start: int, length: int) -> Buffer:
        """Exactly `length` bytes. Errors: NotFound; DamagedData where the object ends before. Right also on a store
        that answers a ranged get with 200."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Errors: NotFound."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key starts with `prefix` (a string prefix that ends at a `/`, or "" for all), in key
        order."""
        ...

    def folders(self, prefix: str) -> Sequence[str]:
        """The names of the folders right below `prefix`, sorted, each fit to be a part of a key: for people who look
        for runs. Asks for no more than that level, where the store can."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes them; a key that is not there is no error."""
        ...

    def abort_uploads(
        self, older_than_s: float, prefixes: Sequence[str] = ("",), is_ours: Callable[[str], bool] = is_key
    ) -> int:
        """Aborts unfinished multipart uploads (or removes temporary files) below these prefixes of this URL that are
        older, by the store's clock; the number ended. 0 where the store has no such thing. `is_ours`: whether an upload
        to that key is ours to end; a temporary file is known by its name. What else lies beside is not looked at."""
        ...

    def now_s(self) -> float:
        """The store's own clock, Unix seconds."""
        ...

    def close(self) -> None: ...
