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
    """The frames of one record. Its RestoreSession sets `window` and the callbacks. `wanted()`: frames that ranks wait
    for. `misread`: frames that a rank failed to read from a file. `named(files)`: the ranks can read these files
    themselves. `landed(frames, cell)`: bytes that all of `frames` have lie at that offset of the window; the session
    owns the cell. `free(cell)`: a taken cell stayed empty. `lacking(frame, error)`: the store does not give the frame.
    `unreadable(error)`: the pass failed. `opened(record)`: a pass has ended. `guard(what)`: runs `what`, and reports
    exceptions, since ranks wait."""

    def __init__(
        self,
        manifest: Manifest,
        open_record: Callable[[], FrameReader],
        bulk: Workers,
        post: Callable[[Callable[[], None]], None],
        folder: str | None = None,
    ) -> None:
        self.window: Callable[[], Window]
        self.wanted: Callable[[], Collection[int]] = lambda: ()
        self.landed: Callable[[list[int], int], None] = lambda frames, cell: None
        self.named: Callable[[FileList], None] = lambda files: None
        self.misread: Collection[int] = ()
        self.free: Callable[[int], None] = lambda cell: None
        self.lacking: Callable[[int, Exception], None] = lambda frame, error: None
        self.unreadable: Callable[[BaseException], None] = lambda error: None
        self.opened: Callable[[Record], None] = lambda record: None
        self.guard: Callable[[Callable[[], None]], None] = lambda what: what()
        self._manifest, self._open_record = manifest, open_record
        self._bulk, self._run_soon, self._folder = bulk, post, folder
        self._reader: FrameReader | None = None
        self._reading = self._closed = False

    def pump(self) -> None:
        """Begins a pass over the wanted frames, unless one runs."""
        if self._reading or self._closed or not (frames := sorted(self.wanted())):
            return
        self._reading = True
        new = [frame for frame in frames if frame not in self.misread] if self._folder is not None else []
        work = functools.partial(self._name, new) if new else functools.partial(self._pass, self.window(), frames)
        self._bulk.run(Lane.FRONT, work, lambda done: self.guard(lambda: self._passed(done)))

    def close(self) -> None:
        self._closed = True

    # -- inside

    def _opened(self, frames: list[int]) -> tuple[FrameReader, dict[int, int]]:
        """On a pass's thread: the reader, and the number of each frame in its record. Reports frames it lacks."""
        self._reader = reader = self._reader or self._open_record()
        theirs = dict(zip(frames, same_frames(self._manifest, reader.record.manifest, frames), strict=True))
        lacking = [frame for frame, their in theirs.items() if their is None]
        self._lacks(lacking, CkptError("the store's record does not have it"))
        return reader, {frame: their for frame, their in theirs.items() if their is not None}

    def _name(self, frames: list[int]) -> Record:
        """On a worker: lists the files of these frames, for the ranks to read."""
        reader, theirs = self._opened(frames)
        assert self._folder is not None
        files = FileList.of_record(self._folder, reader.record, self._manifest, theirs)
        self._post(lambda: self.named(files))
        return reader.record

    def _pass(self, window: Window, frames: list[int]) -> Record:
        """On a worker, which starts further threads: reads these frames into cells."""
        reader, theirs = self._opened(frames)
        ours: dict[int, list[int]] = {}
        for frame, their in theirs.items():
            ours.setdefault(their, []).append(frame)
        cells: dict[int, tuple[int, memoryview]] = {}

        def out(their: int) -> memoryview:
            cells[their] = window.cell(int(reader.record.manifest.frames["length"][their]))
            return cells[their][1]

        def deliver(their: int) -> None:
            offset = cells.pop(their)[0]
            self._post(lambda: self.landed(ours[their], offset))

        def failed(their: int, error: Exception) -> None:
            cell = cells.pop(their, None)
            if cell is not None:
                self._post(lambda: self.free(cell[0]))
            self._lacks(ours[their], error)

        reader.read(ours, deliver, out, failed)
        return reader.record

    def _lacks(self, frames: list[int], error: Exception) -> None:
        for frame in frames:
            self._post(functools.partial(self.lacking, frame, error))

    def _passed(self, done: Future[Record]) -> None:
        self._reading = False
        if self._closed:
            return
        error = done.exception()
        if error is not None:
            self.unreadable(error)
            return
        self.opened(done.result())
        self.pump()

    def _post(self, what: Callable[[], None]) -> None:
        self._run_soon(lambda: self.guard(what))


def same_frames(manifest: Manifest, other: Manifest, frames: list[int]) -> list[int | None]:
    """The number of each frame in another manifest of the same checkpoint; None for a frame that it lacks."""
    if len(manifest.frames) == len(other.frames) and np.array_equal(manifest.frames, other.frames):
        return list(frames)
    columns = ["hash_hi", "hash_lo", "length"]
    known = {key: number for number, key in enumerate(other.frames[columns].tolist())}
    return [known.get(key) for key in manifest.frames[columns][frames].tolist()]
