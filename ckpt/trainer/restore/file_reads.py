"""File reads: a rank reads frames by itself, from the files of a local folder straight into its tensors.

The agent says where the frames lie. A frame that one tensor takes as a run is read, or decoded, in place. Any other
frame goes through a small buffer. Each frame is hashed. A frame that cannot be read, or is wrong, is reported to the
agent, which then reads it itself. So no damaged file ends a restore here.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator

import numpy as np

from ckpt.errors import CkptError, DamagedData
from ckpt.format import codecs
from ckpt.format.frames import frame_hash
from ckpt.format.manifest import Codec
from ckpt.ipc.file_list import FileList
from ckpt.layout.layout import Array
from ckpt.storage.files import open_file, read_into
from ckpt.threads import Flag, Outcome, Tasks
from ckpt.trainer.restore.fill import Filler

log = logging.getLogger("ckpt")

BATCH_BYTES = 16 << 20  # per job; each job ends with a message to the agent
THREADS_MIN = 4  # some threads wait for the disk while others copy
THREADS_MAX = 8  # each thread has buffers of a few frames

Deliver = Callable[[int, memoryview], bool]  # (frame number, its raw bytes) -> whether its hash was right


def read_frames(
    files: FileList,
    deliver: Deliver,
    rooms: Filler | None,
    got: Callable[[list[int], list[int]], None],
    ended: Flag,
) -> None:
    """Reads all these frames on several threads, into their rooms or for `deliver`. `got`: called with the right frames
    and the wrong ones, on several threads at once. `ended`: set once no frame is wanted any more. No thread is left
    when this returns. Errors: those of `got`."""
    threads = min(THREADS_MAX, max(THREADS_MIN, len(os.sched_getaffinity(0))))
    with Tasks("files", pool_size=threads) as tasks:
        reading = _FileReads(files, deliver, rooms, ended)
        jobs: list[Outcome[None]] = [tasks.submit(reading.read_batch, rows, got) for rows in _batches(files.rows)]
        for job in jobs:
            job.result()


def _batches(rows: Array) -> Iterator[Array]:
    """Runs of rows of one file, of about equal bytes."""
    if len(rows):
        ends = np.cumsum(rows["length"].astype(np.int64))
        cuts = (np.diff((ends - 1) // BATCH_BYTES) != 0) | (np.diff(rows["file"].astype(np.int64)) != 0)
        yield from np.split(rows, np.flatnonzero(cuts) + 1)


class _FileReads(threading.local):
    """The reads of one file list; each thread has buffers of its own."""

    def __init__(self, files: FileList, deliver: Deliver, rooms: Filler | None, ended: Flag) -> None:
        self._files, self._deliver, self._rooms, self._ended = files, deliver, rooms, ended
        self._whole_frames = rooms.whole_frames if rooms is not None else ()
        self._scratch = codecs.CodecScratch()

    def read_batch(self, rows: Array, got: Callable[[list[int], list[int]], None]) -> None:
        """Reads the frames of `rows`, all in one file. From the first wrong one on, all are reported as wrong."""
        path = os.path.join(self._files.folder, self._files.names[int(rows[0]["file"])])
        good: list[int] = []
        try:
            with open_file(path) as (fd, size):
                for row in rows:
                    if self._ended.is_set():
                        return
                    if not self._read_frame(fd, size, path, row):
                        break
                    good.append(int(row["frame"]))
        except (OSError, CkptError) as exc:
            log.info("%s cannot be read straight into the tensors: %s", path, exc)
        got(good, rows["frame"][len(good) :].tolist())

    def _read_frame(self, fd: int, size: int, path: str, row: np.void) -> bool:
        """Reads one frame; returns whether it was right."""
        frame, start, stored = int(row["frame"]), int(row["offset"]), int(row["stored"])
        if start + stored > size:
            raise DamagedData(f"{path} ends at byte {size}; frame {frame} ends at byte {start + stored}")
        scratch, rooms = self._scratch, self._rooms if frame in self._whole_frames else None
        raw = scratch.buffer("raw", int(row["length"])).data if rooms is None else rooms.frame_memory(frame)
        if row["codec"] == Codec.RAW:
            read_into(fd, start, raw, path)
        else:
            data = scratch.buffer("stored", stored).data
            read_into(fd, start, data, path)
            codecs.decode(int(row["codec"]), int(row["dtype"]), data, raw, scratch)
        return self._deliver(frame, raw) if rooms is None else rooms.has_right_hash(frame, frame_hash(raw))
