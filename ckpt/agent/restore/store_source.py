"""The store source: reads a checkpoint's frames from the store, through the window, for the ranks of this node.

If the store is a local folder, the ranks first get a list of the files and read these themselves; only frames that a
rank could not read are read here. Frames are read in passes: those requested while a pass runs are read by the next.
Main thread only, except for the reads, whose threads wait for cells of the window.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from ckpt.agent.restore.window import Window
from ckpt.agent.runtime.workers import Lane, Workers
from ckpt.errors import CkptError
from ckpt.format.manifest import Manifest
from ckpt.ipc.file_list import FileList

if TYPE_CHECKING:
    from ckpt.format.manifest import Record
    from ckpt.store.reader import FrameReader


class StoreSource:
    """The frames of one record. Its RestoreSession sets `window` and the callbacks. `get_wanted_frames()`: frames that
    ranks wait for. `failed_file_frames`: frames that a rank failed to read from a file. `named(files)`: the ranks can
    read these files themselves. `landed(frames, cell)`: bytes that all of `frames` have lie at that offset of the
    window; the session owns the cell. `free(cell)`: a taken cell stayed empty. `lacking(frame, error)`: the store does
    not give the frame. `unreadable(error)`: the pass failed. `opened(record)`: a pass has ended. `guard(what)`: runs
    `what`, and reports exceptions, since ranks wait."""

    def __init__(
        self,
        manifest: Manifest,
        open_record: Callable[[], FrameReader],
        workers: Workers,
        post: Callable[[Callable[[], None]], None],
        folder: str | None = None,
    ) -> None:
        self.get_window: Callable[[], Window]
        self.get_wanted_frames: Callable[[], Collection[int]] = lambda: ()
        self.on_received: Callable[[list[int], int], None] = lambda frames, cell: None
        self.on_files_listed: Callable[[FileList], None] = lambda files: None
        self.failed_file_frames: Collection[int] = ()
        self.release_cell: Callable[[int], None] = lambda cell: None
        self.on_unavailable: Callable[[int, Exception], None] = lambda frame, error: None
        self.on_error: Callable[[BaseException], None] = lambda error: None
        self.on_record_opened: Callable[[Record], None] = lambda record: None
        self.guard: Callable[[Callable[[], None]], None] = lambda what: what()
        self._manifest, self._open_record = manifest, open_record
        self._workers, self._post_unguarded, self._folder = workers, post, folder
        self._reader: FrameReader | None = None
        self._is_reading = self._closed = False

    def start_pass(self) -> None:
        """Begins a pass over the wanted frames, unless one runs."""
        if self._is_reading or self._closed or not (frames := sorted(self.get_wanted_frames())):
            return
        self._is_reading = True
        new = [frame for frame in frames if frame not in self.failed_file_frames] if self._folder is not None else []
        work = (
            functools.partial(self._list_files, new)
            if new
            else functools.partial(self._run_pass, self.get_window(), frames)
        )
        self._workers.run(Lane.FRONT, work, lambda done: self.guard(lambda: self._end_pass(done)))

    def close(self) -> None:
        self._closed = True

    # -- inside

    def _open_reader(self, frames: list[int]) -> tuple[FrameReader, dict[int, int]]:
        """On a pass's thread: the reader, and the number of each frame in its record. Reports frames it lacks."""
        self._reader = reader = self._reader or self._open_record()
        theirs = dict(zip(frames, same_frames(self._manifest, reader.record.manifest, frames), strict=True))
        lacking = [frame for frame, their in theirs.items() if their is None]
        self._report_unavailable(lacking, CkptError("the store's record does not have it"))
        return reader, {frame: their for frame, their in theirs.items() if their is not None}

    def _list_files(self, frames: list[int]) -> Record:
        """On a worker: lists the files of these frames, for the ranks to read."""
        reader, theirs = self._open_reader(frames)
        assert self._folder is not None
        files = FileList.from_record(self._folder, reader.record, self._manifest, theirs)
        self._post(lambda: self.on_files_listed(files))
        return reader.record

    def _run_pass(self, window: Window, frames: list[int]) -> Record:
        """On a worker, which starts further threads: reads these frames into cells."""
        reader, theirs = self._open_reader(frames)
        ours: dict[int, list[int]] = {}
        for frame, their in theirs.items():
            ours.setdefault(their, []).append(frame)
        cells: dict[int, tuple[int, memoryview]] = {}

        def out(their: int) -> memoryview:
            cells[their] = window.wait_for_cell(int(reader.record.manifest.frames["length"][their]))
            return cells[their][1]

        def deliver(their: int) -> None:
            offset = cells.pop(their)[0]
            self._post(lambda: self.on_received(ours[their], offset))

        def failed(their: int, error: Exception) -> None:
            cell = cells.pop(their, None)
            if cell is not None:
                self._post(lambda: self.release_cell(cell[0]))
            self._report_unavailable(ours[their], error)

        reader.read(ours, deliver, out, failed)
        return reader.record

    def _report_unavailable(self, frames: list[int], error: Exception) -> None:
        for frame in frames:
            self._post(functools.partial(self.on_unavailable, frame, error))

    def _end_pass(self, done: Future[Record]) -> None:
        self._is_reading = False
        if self._closed:
            return
        error = done.exception()
        if error is not None:
            self.on_error(error)
            return
        self.on_record_opened(done.result())
        self.start_pass()

    def _post(self, what: Callable[[], None]) -> None:
        self._post_unguarded(lambda: self.guard(what))


def same_frames(manifest: Manifest, other: Manifest, frames: list[int]) -> list[int | None]:
    """The number of each frame in another manifest of the same checkpoint; None for a frame that it lacks."""
    if len(manifest.frames) == len(other.frames) and np.array_equal(manifest.frames, other.frames):
        return list(frames)
    columns = ["hash_hi", "hash_lo", "length"]
    known = {key: number for number, key in enumerate(other.frames[columns].tolist())}
    return [known.get(key) for key in manifest.frames[columns][frames].tolist()]
