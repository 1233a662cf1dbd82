"""Frames of a checkpoint that the store has, on their way through a start's window to the ranks of this node.

They are read in passes: what is wanted while one runs is read by the next. Main thread only, but for the reading, in
which threads wait for cells of the window.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from ckpt.agent.bulk import Bulk, Lane
from ckpt.agent.window import Window
from ckpt.errors import CkptError
from ckpt.format.manifest import Manifest

if TYPE_CHECKING:
    from ckpt.format.manifest import Record
    from ckpt.store.reader import FrameReader


class StoreFrames:
    """`wanted()`: frames that ranks wait for. `landed(frames, cell)`: all of `frames` have the bytes that lie at that
    offset of the window now; the cell is the listener's. `free(cell)`: nothing came into that one. `lacking(frame,
    error)`: the store does not give it. `unreadable(error)`: nor anything that is wanted. `opened(record)`: a pass is
    over. `guard`: runs what must not fail unnoticed, since ranks wait for it. The restore sets these and `window`."""

    def __init__(
        self,
        manifest: Manifest,
        open_record: Callable[[], FrameReader],
        bulk: Bulk,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self.window: Callable[[], Window]
        self.wanted: Callable[[], Collection[int]] = lambda: ()
        self.landed: Callable[[list[int], int], None] = lambda frames, cell: None
        self.free: Callable[[int], None] = lambda cell: None
        self.lacking: Callable[[int, Exception], None] = lambda frame, error: None
        self.unreadable: Callable[[BaseException], None] = lambda error: None
        self.opened: Callable[[Record], None] = lambda record: None
        self.guard: Callable[[Callable[[], None]], None] = lambda what: what()
        self._manifest, self._open_record = manifest, open_record
        self._bulk, self._run_soon = bulk, post
        self._reading = self._closed = False

    def pump(self) -> None:
        """Begins a pass over what is wanted, unless one runs."""
        if self._reading or self._closed or not (frames := sorted(self.wanted())):
            return
        self._reading = True
        window = self.window()
        self._bulk.run(
            Lane.FRONT, lambda: self._pass(window, frames), lambda done: self.guard(lambda: self._passed(done))
        )

    def close(self) -> None:
        self._closed = True

    # -- inside

    def _pass(self, window: Window, frames: list[int]) -> Record:
        """On a thread of its own, which starts others."""
        reader = self._open_record()
        theirs = same_frames(self._manifest, reader.record.manifest, frames)
        ours: dict[int, list[int]] = {}
        for frame, their in zip(frames, theirs, strict=True):
            if their is None:
                self._lacks([frame], CkptError("the store's record does not have it"))
            else:
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
    """The number of each frame in another manifest of the same checkpoint; None where that one does not have it."""
    if len(manifest.frames) == len(other.frames) and np.array_equal(manifest.frames, other.frames):
        return list(frames)
    columns = ["hash_hi", "hash_lo", "length"]
    known = {key: number for number, key in enumerate(other.frames[columns].tolist())}
    return [known.get(key) for key in manifest.frames[columns][frames].tolist()]
