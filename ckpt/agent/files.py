"""Frames in the files of a local folder, which the ranks of this node read by themselves.

A rank on this host can open what its agent can. So it is told where in which file each frame lies, and reads the bytes
into its tensors: no window, no copy more, and as many threads as it has cores. The rank checks each frame. What it
cannot read, or finds wrong, comes by the agent's own reading, as if no rank had tried. Main thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgpack
import numpy as np

from ckpt.agent.bulk import Bulk, Lane
from ckpt.agent.storeframes import same_frames
from ckpt.agent.straight import Receiver
from ckpt.agent.wire import Message
from ckpt.format.manifest import Manifest
from ckpt.plan.layout import Array

if TYPE_CHECKING:
    from ckpt.format.manifest import Record
    from ckpt.store.reader import FrameReader

# One row a frame. `file`: its number in the list. `stored`, `length`: bytes there, and of the frame itself.
ROW = np.dtype(
    [
        *(("frame", "<u4"), ("file", "<u4"), ("offset", "<u8"), ("stored", "<u4"), ("length", "<u4")),
        *(("codec", "u1"), ("dtype", "u1")),
    ]
)


@dataclass(frozen=True, slots=True)
class FileList:
    """Files of a folder, and which frames lie in them: an array of ROW, in the order of the files."""

    folder: str
    names: list[str]
    rows: Array

    def blobs(self) -> list[bytes]:
        return [msgpack.packb([self.folder, self.names]), self.rows.tobytes()]

    @staticmethod
    def of(message: Message) -> FileList:
        named, rows = message.blobs
        folder, names = msgpack.unpackb(named)
        return FileList(folder, names, np.frombuffer(rows, ROW))


class Files:
    """Of one restore, which sets `opened` (told the record, once it was read) and `guard` (runs what must not fail
    unnoticed, since ranks wait for it)."""

    def __init__(self, folder: str, manifest: Manifest, open_record: Callable[[], FrameReader], bulk: Bulk) -> None:
        self.opened: Callable[[Record], None] = lambda record: None
        self.guard: Callable[[Callable[[], None]], None] = lambda what: what()
        self._folder, self._manifest = folder, manifest
        self._open_record, self._bulk = open_record, bulk
        self._reader: FrameReader | None = None
        self._given: set[tuple[int, int]] = set()  # frame, receiver

    def give(self, receiver: Receiver, frames: Collection[int], left: Callable[[set[int]], None]) -> None:
        """Tells the rank where they lie. `left`: told of those of which the record, or what it says, is not there."""
        wanted = set(frames)
        self._given.update((frame, id(receiver)) for frame in wanted)
        if self._reader is not None:
            self._tell(receiver, wanted, left, self._reader)
            return

        def then(done: Future[FrameReader]) -> None:
            if done.exception() is not None:
                self._leave(receiver, wanted, left)
                return
            self._reader = done.result()
            self.opened(self._reader.record)
            self._tell(receiver, wanted, left, self._reader)

        self._bulk.run(Lane.FRONT, self._open_record, lambda done: self.guard(lambda: then(done)))

    def take_back(self, frame: int, receiver: Receiver) -> bool:
        """That rank is done with it, right or wrong. Whether it was told to read it."""
        key = frame, id(receiver)
        is_its = key in self._given
        self._given.discard(key)
        return is_its

    def drop(self, receiver: Receiver) -> None:
        """It is gone, or asks anew."""
        self._given = {each for each in self._given if each[1] != id(receiver)}

    # -- inside

    def _tell(
        self, receiver: Receiver, frames: set[int], left: Callable[[set[int]], None], reader: FrameReader
    ) -> None:
        record = reader.record
        asked = sorted(frame for frame in frames if (frame, id(receiver)) in self._given)
        pairs = zip(asked, same_frames(self._manifest, record.manifest, asked), strict=True)
        found = [(frame, their) for frame, their in pairs if their is not None]
        if found:
            ours, theirs = (np.array(each, np.int64) for each in zip(*found, strict=True))
            places = record.places[theirs]
            rows = np.zeros(len(found), ROW)
            packs, rows["file"] = np.unique(places["pack"], return_inverse=True)
            rows["frame"], rows["offset"], rows["codec"] = ours, places["offset"], places["codec"]
            rows["stored"], rows["length"] = places["length"], self._manifest.frames["length"][ours]
            rows["dtype"] = self._manifest.frames["dtype"][ours]
            rows = rows[np.lexsort((rows["offset"], rows["file"]))]
            names = [record.packs[pack][0] for pack in packs.tolist()]
            receiver.send({"t": "files"}, (), FileList(self._folder, names, rows).blobs())
        lacking = set(asked).difference(frame for frame, _ in found)
        if lacking:
            self._leave(receiver, lacking, left)

    def _leave(self, receiver: Receiver, frames: set[int], left: Callable[[set[int]], None]) -> None:
        if lost := {frame for frame in frames if self.take_back(frame, receiver)}:
            left(lost)
