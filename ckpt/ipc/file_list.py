"""Frames in the files of a local folder, which the ranks of this host read by themselves.

A rank on this host can open what its agent can. So its agent tells it where in which file each frame lies, and the rank
reads the bytes into its tensors: no window, no copy more, and as many threads as the host has cores. The rank checks
each frame. What it cannot read, or finds wrong, its agent reads.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import msgpack
import numpy as np

from ckpt.errors import AgentError
from ckpt.format.manifest import Manifest, Record
from ckpt.ipc.bounded_msgpack import unpacked
from ckpt.ipc.messages import Message
from ckpt.layout.layout import Array

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

    @staticmethod
    def of(message: Message) -> FileList:
        """What `blobs` has made of it. Errors: AgentError."""
        try:
            named, rows = message.blobs
            folder, names = unpacked(named, "the list of files")
            return FileList(folder, names, np.frombuffer(rows, ROW))
        except (TypeError, ValueError) as exc:
            raise AgentError("the list of files does not parse") from exc

    @staticmethod
    def of_record(folder: str, record: Record, manifest: Manifest, frames: dict[int, int]) -> FileList:
        """`frames`: by their numbers in `manifest`, those in the record's own."""
        ours, theirs = (np.array(list(each), np.int64) for each in (frames.keys(), frames.values()))
        places, specs = record.places[theirs], manifest.frames[ours]
        rows = np.zeros(len(ours), ROW)
        packs, rows["file"] = np.unique(places["pack"], return_inverse=True)
        rows["frame"], rows["offset"], rows["codec"] = ours, places["offset"], places["codec"]
        rows["stored"], rows["length"], rows["dtype"] = places["length"], specs["length"], specs["dtype"]
        names = [record.packs[pack][0] for pack in packs.tolist()]
        return FileList(folder, names, rows[np.lexsort((rows["offset"], rows["file"]))])

    def only(self, frames: Collection[int]) -> FileList:
        return replace(self, rows=self.rows[np.isin(self.rows["frame"], list(frames))])

    def blobs(self) -> list[bytes]:
        return [msgpack.packb([self.folder, self.names]), self.rows.tobytes()]
