"""The store at a URL that the user gave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt.storage import Backend


@contextmanager
def store(url: str) -> Iterator[Backend]:
    """The open store, opened as by `ckpt.open`, closed after the block. Errors: UsageError."""
    from ckpt.reader import open_store

    with closing(open_store(url)) as backend:
        yield backend
