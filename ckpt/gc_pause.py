"""Python's cyclic collector, kept from running where a great many objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collecting() -> Iterator[None]:
    """For work of a second at most that leaves few cycles: each look of the collector at all that a trainer or an
    agent holds takes some 0.3 s, and thousands of new objects cause several. Also a decorator. Where two threads
    overlap, the collector runs again from the end of the first that came."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
