"""The file list: tells a rank where frames lie in the files of a local store, so that the rank reads them itself.

A rank on this host can open the same files as its agent. So it reads the bytes directly into its tensors, without the
window and its copy, on as many threads as the host has cores. The rank verifies each frame. The agent reads the frames
that the rank cannot read or finds damaged.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import msgpack
import numpy as np

from ckpt.errors import AgentError
from ckpt.format.manifest import Manifest, Record
from ckpt.ipc.bounded_msgpack import unpack_bounded
from ckpt.ipc.messages import Message
from ckpt.layout.layout import Array

# One row per frame. `file`: index of the file in the list. `stored`: bytes in the file. `length`: bytes when decoded.
ROW = np.dtype(
    [
        *(("frame", "<u4"), ("file", "<u4"), ("offset", "<u8"), ("stored", "<u4"), ("length", "<u4")),
        *(("codec", "u1"), ("dtype", "u1")),
    ]
)


@dataclass(frozen=True, slots=True)
class FileList:
    """Files of a folder, and the frames in them. `rows`: array of ROW, in order of (file, offset)."""

    folder: str
    names: list[str]
    rows: Array

    @staticmethod
    def decode(message: Message) -> FileList:
        """The list that `blobs` encoded into a message. Errors: AgentError if it is malformed."""
        try:
            named, rows = message.blobs
            folder, names = unpack_bounded(named, "the list of files")
            return FileList(folder, names, np.frombuffer(rows, ROW))
        except (TypeError, ValueError) as exc:
            raise AgentError("the list of files cannot be decoded") from exc

    @staticmethod
    def from_record(folder: str, record: Record, manifest: Manifest, frames: dict[int, int]) -> FileList:
        """The list of frames that a commit record stores. `frames`: frame number in `manifest` -> number in
        `record`."""
        ours, theirs = (np.array(list(each), np.int64) for each in (frames.keys(), frames.values()))
        places, specs = record.places[theirs], manifest.frames[ours]
        rows = np.zeros(len(ours), ROW)
        packs, rows["file"] = np.unique(places["pack"], return_inverse=True)
        rows["frame"], rows["offset"], rows["codec"] = ours, places["offset"], places["codec"]
        rows["stored"], rows["length"], rows["dtype"] = places["length"], specs["length"], specs["dtype"]
        names = [record.packs[pack][0] for pack in packs.tolist()]
        return FileList(folder, names, rows[np.lexsort((rows["offset"], rows["file"]))])

    def select_frames(self, frames: Collection[int]) -> FileList:
        """The list without all other frames."""
        return replace(self, rows=self.rows[np.isin(self.rows["frame"], list(frames))])

    def encode(self) -> list[bytes]:
        """The list as blobs of a message."""
        return [msgpack.packb([self.folder, self.names]), self.rows.tobytes()]
