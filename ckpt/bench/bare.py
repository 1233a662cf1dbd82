"""The ceiling of a store: the same bytes through the library below ckpt, with nothing of ckpt around the calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from ckpt.errors import StorageError


class Bare(Protocol):
    """Objects of one store. Keys have no folders."""

    def put(self, key: str, content: memoryview) -> None: ...

    def get(self, key: str, nbytes: int) -> int:
        """Reads `nbytes` from the beginning; returns how many came."""
        ...


def open_bare(url: str) -> Bare | None:
    """For a folder and for s3, gs and az; None for other stores. `url`: canonical."""
    from ckpt.storage.url import scheme_of

    scheme = scheme_of(url)
    if scheme == "file":
        return _BareFolder(Path(url))
    return _BareCloud(url) if scheme in ("s3", "gs", "az") else None


class _BareFolder:
    """Files that are written, synced and read at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def put(self, key: str, content: memoryview) -> None:
        fd = os.open(self._folder / key, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            done = 0
            while done < len(content):
                done += os.write(fd, content[done:])
            os.fsync(fd)
        finally:
            os.close(fd)

    def get(self, key: str, nbytes: int) -> int:
        with open(self._folder / key, "rb", buffering=0) as file:
            return len(file.read(nbytes) or b"")


class _BareCloud:
    """obstore."""

    def __init__(self, url: str) -> None:
        from ckpt.backends.cloud import open_obstore

        self._store: Any = open_obstore(url)
        self._has_ranged_gets = True

    def put(self, key: str, content: memoryview) -> None:
        import obstore

        with _translated(f"put {key}"):
            obstore.put(self._store, key, content, use_multipart=False)

    def get(self, key: str, nbytes: int) -> int:
        import obstore
        from obstore.exceptions import BaseError

        if self._has_ranged_gets:
            try:
                return len(obstore.get_range(self._store, key, start=0, length=nbytes))
            except BaseError:  # some servers answer a ranged get with 200, which obstore refuses
                self._has_ranged_gets = False
        with _translated(f"get {key}"):
            return len(obstore.get(self._store, key).bytes())


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Errors: StorageError. The ceiling is measured without retries, which would be part of it."""
    from obstore.exceptions import BaseError

    try:
        yield
    except BaseError as exc:
        text = " ".join(str(exc).split())[:300]
        raise StorageError(f"the ceiling could not be measured: obstore's {what} failed: {text}; try again") from exc
