"""A pause of Python's cyclic garbage collector, for code that makes very many objects that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_gc() -> Iterator[None]:
    """A context manager, also a decorator, that turns the cyclic collector off. Use it for at most a second of work
    that leaves few cycles. One full collection in a trainer or an agent takes some 0.3 s, and thousands of new objects
    trigger several. If two threads overlap, the collector runs again once the first of them has ended."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
