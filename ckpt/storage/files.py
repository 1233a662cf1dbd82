"""Reading the files of a local folder: a backend does, and a rank that restores from there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.errors import DamagedData, NotFound


@contextmanager
def opened(path: str) -> Iterator[tuple[int, int]]:
    """The descriptor and the size of a regular file. A pipe or a device does not block and is not there. Errors:
    OSError; NotFound."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise NotFound(f"{path} is not a file")
        yield fd, found.st_size
    finally:
        os.close(fd)


def read_into(fd: int, start: int, out: memoryview, path: str) -> None:
    """Fills `out` with the bytes from `start` on. Errors: OSError; DamagedData where the file ends before."""
    done = 0
    while done < len(out):
        got = os.preadv(fd, [out[done:]], start + done)
        if got == 0:
            raise DamagedData(f"{path} was cut off at byte {start + done} while it was read")
        done += got
