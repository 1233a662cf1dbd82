"""Memory to read objects into."""

from __future__ import annotations

import mmap

HUGE_BYTES = 24 << 20  # from here on malloc gives fresh pages every time, and faulting them in costs 6 x the copy


def read_buffer(length: int) -> memoryview:
    """Writable memory of that many bytes: the heap's, which is warm after the first time, or huge pages."""
    if length < HUGE_BYTES:
        return memoryview(bytearray(length))
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)
