"""Memory for the bytes of objects that are read."""

from __future__ import annotations

import mmap

# From this size on, malloc gives fresh pages every time, and faulting them in costs 6 times the copy.
HUGE_BYTES = 24 << 20


def read_buffer(length: int) -> memoryview:
    """Writable memory of `length` bytes: from the heap, which is warm after its first use, or huge pages."""
    if length < HUGE_BYTES:
        return memoryview(bytearray(length))
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)
