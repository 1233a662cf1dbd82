"""From the URL that the user typed to an open store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt.storage import Backend


@contextmanager
def store(url: str) -> Iterator[Backend]:
    """The store, as `ckpt.open` opens it. Errors: UsageError."""
    from ckpt.reader import open_store

    with closing(open_store(url)) as backend:
        yield backend
