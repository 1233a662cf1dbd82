"""The sources that read the store for this node's ranks: the files of a local folder, which the ranks read themselves,
and the store, through the window. Main thread only, except for the passes, whose threads wait for cells of the window.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from ckpt.agent.restore.rank_request import Origin, RankRequest
from ckpt.agent.restore.restore_session import FrameSource, RestoreSession
from ckpt.agent.runtime.coroutines import Task, spawn, work_on
from ckpt.agent.runtime.workers import Lane
from ckpt.errors import CkptError
from ckpt.format.manifest import Manifest
from ckpt.ipc.file_list import FileList

if TYPE_CHECKING:
    from ckpt.store.reader import FrameReader

OpenReader = Callable[[], "FrameReader"]


class RecordPasses:
    """Passes over frames of one record, on a worker. Frames requested during a pass are taken by the next one.

    `work(reader, ours)`: runs on the worker; `ours`: by number in the record, the frames with these bytes.
    `ended(frames, error)`: called after each pass. `frames`: its frames, also those that the record lacks, but for
    those requested anew; after an error, also all that were requested since."""

    def __init__(
        self,
        session: RestoreSession,
        open_reader: OpenReader,
        work: Callable[[FrameReader, dict[int, list[int]]], None],
        ended: Callable[[list[int], BaseException | None], None],
    ) -> None:
        self._session, self._open_reader, self._work, self._on_ended = session, open_reader, work, ended
        self._requested: set[int] = set()
        self._running: Task[None] | None = None

    def request(self, frames: Iterable[int]) -> None:
        self._requested.update(frames)
        if self._running is None or self._running.is_settled:
            self._running = spawn(self._run(), self._session.guard)

    async def _run(self) -> None:
        while self._requested:
            frames, self._requested = sorted(self._requested), set()
            error: Exception | None = None
            try:
                await work_on(self._session.workers, Lane.FRONT, functools.partial(self._read, frames))
            except Exception as exc:
                error = exc
            requested = self._requested
            if error:  # the next pass would fail, too
                self._requested = set()
            self._on_ended(sorted({*frames} | requested if error else {*frames} - requested), error)

    def _read(self, frames: list[int]) -> None:
        reader, manifest = self._open_reader(), self._session.manifest
        ours: dict[int, list[int]] = {}
        for frame, their in zip(frames, same_frames(manifest, reader.record.manifest, frames), strict=True):
            if their is not None:
                ours.setdefault(their, []).append(frame)
        self._work(reader, ours)


class StoreSource(FrameSource):
    """The frames of one record: read through the window, or, in files of `folder`, by the ranks themselves."""

    def __init__(self, open_reader: OpenReader, folder: str | None = None) -> None:
        self._open_reader, self._folder = open_reader, folder
        self._passes: RecordPasses

    def begin(self, session: RestoreSession, number: int) -> None:
        super().begin(session, number)
        work = self._read if self._folder is None else self._list_files
        self._passes = RecordPasses(session, self._open_reader, work, self._end_pass)

    def select(self, frames: set[int], asked: RankRequest) -> set[int]:
        return frames

    def request(self, frames: set[int], asked: RankRequest) -> None:
        self._passes.request(frames)

    # -- inside

    @property
    def _origin(self) -> Origin:
        return Origin(self.number, "store")

    def _end_pass(self, frames: list[int], error: BaseException | None) -> None:
        self.session.fail(self.number, frames, error or CkptError("the store's record does not have it"))

    def _list_files(self, reader: FrameReader, ours: dict[int, list[int]]) -> None:
        """On a worker: lists the files of these frames, for the ranks to read."""
        assert self._folder is not None
        theirs = {frame: their for their, frames in ours.items() for frame in frames}
        files = FileList.from_record(self._folder, reader.record, self.session.manifest, theirs)
        self.session.post(lambda: self.session.receive_files(self._origin, files))

    def _read(self, reader: FrameReader, ours: dict[int, list[int]]) -> None:
        """On a worker, which starts further threads: reads these frames into cells."""
        window, cells = self.session.window, dict[int, tuple[int, memoryview]]()

        def out(their: int) -> memoryview:
            cells[their] = window.wait_for_cell(int(reader.record.manifest.frames["length"][their]))
            return cells[their][1]

        def deliver(their: int) -> None:
            offset = cells.pop(their)[0]
            self.session.post(lambda: self.session.receive(self._origin, ours[their], offset))

        def failed(their: int, error: Exception) -> None:
            cell = cells.pop(their, None)
            if cell is not None:
                window.release(cell[0])
            self.session.post(lambda: self.session.fail(self.number, ours[their], error))

        reader.read(ours, deliver, out, failed)


def same_frames(manifest: Manifest, other: Manifest, frames: list[int]) -> list[int | None]:
    """The number of each frame in another manifest of the same checkpoint; None for a frame that it lacks."""
    if len(manifest.frames) == len(other.frames) and np.array_equal(manifest.frames, other.frames):
        return list(frames)
    columns = ["hash_hi", "hash_lo", "length"]
    known = {key: number for number, key in enumerate(other.frames[columns].tolist())}
    return [known.get(key) for key in manifest.frames[columns][frames].tolist()]
