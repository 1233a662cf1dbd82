"""Frames that a rank reads by itself, from the files of a local folder straight into its tensors.

The agent says where they lie. A frame that one tensor takes as a run is read, or decoded, where it belongs; any other
one by way of a small buffer. Each is hashed. What cannot be read, or is wrong, is reported to the agent, which reads it
itself: so no file and no fault in one ends a restore here.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from ckpt.errors import CkptError, DamagedData
from ckpt.format import codecs
from ckpt.format.frames import frame_hash
from ckpt.format.manifest import Codec
from ckpt.ipc.file_list import FileList
from ckpt.layout.layout import Array
from ckpt.storage.files import opened, read_into
from ckpt.threads import Flag, Outcome, Tasks

if TYPE_CHECKING:
    from ckpt.trainer.restore.fetch import Deliver, Rooms

log = logging.getLogger("ckpt")

BATCH_BYTES = 16 << 20  # per job of a thread: each ends with a message to the agent
THREADS_MIN = 4  # some wait for the disk while others copy
THREADS_MAX = 8  # each has buffers of a few frames


def read(
    files: FileList, deliver: Deliver, rooms: Rooms | None, got: Callable[[list[int], list[int]], None], ended: Flag
) -> None:
    """Reads all of these frames, on several threads: into their rooms, or for `deliver`. `got`: told which were right
    and which were not, from several threads at once. `ended`: nobody wants more of them. No thread is left when this
    returns. Errors: those of `got`."""
    threads = min(THREADS_MAX, max(THREADS_MIN, len(os.sched_getaffinity(0))))
    with Tasks("files", pool_size=threads) as tasks:
        reading = _FileReads(files, deliver, rooms, ended)
        jobs: list[Outcome[None]] = [tasks.submit(reading.batch, rows, got) for rows in _batches(files.rows)]
        for job in jobs:
            job.result()


def _batches(rows: Array) -> Iterator[Array]:
    """Runs of rows of one file, of about equal bytes."""
    if len(rows):
        ends = np.cumsum(rows["length"].astype(np.int64))
        cuts = (np.diff((ends - 1) // BATCH_BYTES) != 0) | (np.diff(rows["file"].astype(np.int64)) != 0)
        yield from np.split(rows, np.flatnonzero(cuts) + 1)


class _Buffers(threading.local):
    """Of one thread."""

    def __init__(self) -> None:
        self.scratch = codecs.CodecScratch()


class _FileReads:
    """What the threads share."""

    def __init__(self, files: FileList, deliver: Deliver, rooms: Rooms | None, ended: Flag) -> None:
        self._files, self._deliver, self._rooms, self._ended = files, deliver, rooms, ended
        self._whole = rooms.whole if rooms is not None else ()
        self._buffers = _Buffers()

    def batch(self, rows: Array, got: Callable[[list[int], list[int]], None]) -> None:
        """Of one file."""
        path = os.path.join(self._files.folder, self._files.names[int(rows[0]["file"])])
        good: list[int] = []
        try:
            with opened(path) as (fd, size):
                for row in rows:
                    if self._ended.is_set():
                        return
                    if not self._frame(fd, size, path, row):
                        break
                    good.append(int(row["frame"]))
        except (OSError, CkptError) as exc:
            log.info("%s cannot be read straight into the tensors: %s", path, exc)
        got(good, rows["frame"][len(good) :].tolist())

    def _frame(self, fd: int, size: int, path: str, row: np.void) -> bool:
        """Whether it was right."""
        frame, start, stored = int(row["frame"]), int(row["offset"]), int(row["stored"])
        if start + stored > size:
            raise DamagedData(f"{path} ends at byte {size}; frame {frame} ends at byte {start + stored}")
        scratch, rooms = self._buffers.scratch, self._rooms if frame in self._whole else None
        raw = scratch.buffer("raw", int(row["length"])).data if rooms is None else rooms.room(frame)
        if row["codec"] == Codec.RAW:
            read_into(fd, start, raw, path)
        else:
            data = scratch.buffer("stored", stored).data
            read_into(fd, start, data, path)
            codecs.decode(int(row["codec"]), int(row["dtype"]), data, raw, scratch)
        return self._deliver(frame, raw) if rooms is None else rooms.is_right(frame, frame_hash(raw))
