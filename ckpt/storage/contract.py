"""The contract of a backend: what every store promises. The core reaches a backend only through
`ckpt.storage.open(url)`.

Keys are relative to the URL and `/`-separated; each part matches types.PATH_NAME. A backend is thread-safe: any number
of threads may call it at once. It translates every foreign exception into ckpt.errors (`from exc`). The class says
whether a retry can help (TransientError) or not. A backend does not retry: only `ckpt.storage.retry` does.
"""

from __future__ import annotations

import enum
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckpt.errors import DamagedData
from ckpt.storage.names import is_key

Buffer = bytes | bytearray | memoryview


class PutMode(enum.Enum):
    """What a put does if the key is taken."""

    OVERWRITE = "overwrite"
    # AlreadyExists if the key is taken, provided that the store honours the mode. Never rely on it.
    IF_ABSENT = "if-absent"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a store.

    `modified_s`: by the store's clock, Unix seconds; infinity if the store gives no times, so the object never counts
    as old. `version`: an opaque string that changes when the object is written again: an ETag, or mtime and size. Mtime
    and size may miss a second write of the same size within the resolution of the store's times."""

    key: str
    size: int
    modified_s: float
    version: str


class Backend(Protocol):
    """A store at one URL. The code that opens a backend closes it."""

    url: str

    def put(
        self,
        key: str,
        chunks: Sequence[Buffer],
        mode: PutMode = PutMode.OVERWRITE,
        cancel: threading.Event | None = None,
    ) -> None:
        """Writes the concatenation of `chunks` as one object.

        After the return the object is durable and visible as a whole. Before, and after any failure, no part of it is
        visible. A single large chunk is not copied, if the library allows it. Large objects are sent in parallel parts;
        a failed upload is aborted.

        `cancel`: set it to stop a large put soon, if the backend can. The put then raises StorageError and reads the
        chunks no more. Parts that were sent are left to `abort_uploads`, since there is no time to delete them."""
        ...

    def get(self, key: str, size_max: int) -> bytes:
        """The whole object. Errors: NotFound; DamagedData if it is larger than size_max (no more is read then)."""
        ...

    def get_range(self, key: str, start: int, length: int) -> Buffer:
        """Exactly `length` bytes. Correct also on a store that answers a ranged get with 200. Errors: NotFound;
        DamagedData if the object ends before."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """The object's size, time and version. Errors: NotFound."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key starts with `prefix`, in key order. `prefix`: a string that ends with `/`, or "" for
        all."""
        ...

    def folders(self, prefix: str) -> Sequence[str]:
        """The sorted names of the folders directly below `prefix` that can be part of a key. For people who look for
        runs. Asks the store for no more than that level, if the store can do so."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes the objects. A missing key is no error."""
        ...

    def abort_uploads(
        self, older_than_s: float, prefixes: Sequence[str] = ("",), is_ours: Callable[[str], bool] = is_key
    ) -> int:
        """Aborts unfinished multipart uploads, or removes temporary files. Returns their number; 0 if the store has
        none.

        Only those below these prefixes of this URL that are older than `older_than_s` by the store's clock. `is_ours`:
        whether an upload to that key may be aborted; a temporary file is recognised by its name. Foreign objects are
        not touched."""
        ...

    def now_s(self) -> float:
        """The store's own clock, Unix seconds."""
        ...

    def close(self) -> None: ...


def check_end(backend: Backend, key: str, stop: int) -> None:
    """For the backends. Errors: DamagedData if the object ends before byte `stop`; NotFound."""
    size = backend.head(key).size
    if stop > size:
        raise DamagedData(f"{backend.url}: {key} has {size} bytes; bytes up to {stop} were requested")


def time_of_new_object_s(backend: Backend) -> float:
    """For the backends: the modification time of an object that is put now, and deleted."""
    key = f"clock/{secrets.token_hex(8)}"
    backend.put(key, [b"now"])
    try:
        return backend.head(key).modified_s
    finally:
        backend.delete([key])
