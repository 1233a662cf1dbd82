"""Reading the files of a local folder, for the local backend and for a rank that restores directly from the folder; and
memory for bytes that are read."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.errors import DamagedData, NotFound

# From this size on, malloc gives fresh pages every time, and faulting them in costs 6 times the copy.
HUGE_BYTES = 24 << 20


@contextmanager
def open_file(path: str) -> Iterator[tuple[int, int]]:
    """Descriptor and size of a regular file. A pipe or a device does not block, and counts as missing. Errors: OSError;
    NotFound."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise NotFound(f"{path} is not a file")
        yield fd, found.st_size
    finally:
        os.close(fd)


def read_into(fd: int, start: int, out: memoryview, path: str) -> None:
    """Fills `out` with the bytes from `start` on. Errors: OSError; DamagedData if the file ends before."""
    done = 0
    while done < len(out):
        got = os.preadv(fd, [out[done:]], start + done)
        if got == 0:
            raise DamagedData(f"{path} was truncated to {start + done} bytes while it was read")
        done += got


def read_buffer(length: int) -> memoryview:
    """Writable memory of `length` bytes: from the heap, which is warm after its first use, or huge pages."""
    if length < HUGE_BYTES:
        return memoryview(bytearray(length))
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)
