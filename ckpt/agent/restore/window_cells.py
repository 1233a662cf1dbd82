"""The cells of a restore's window: the frames in each, their source, and the ranks that read them. Main thread only."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt.agent.restore.direct_stream import StreamPeer
from ckpt.agent.restore.window import Window


class From(enum.Enum):
    """The source of a frame that was not in this node's memory."""

    STORE = enum.auto()  # the store, read by this node for itself
    FILE = enum.auto()  # the store's folder, read by the rank itself
    HOME = enum.auto()  # the store, read by one node for all
    PEER = enum.auto()  # another node's memory


@dataclass(slots=True)
class _Cell:
    """A cell in use. All of `frames` have its bytes. `readers`: (frame, id of the receiver) of each read under way."""

    source: From
    frames: list[int]
    readers: set[tuple[int, int]] = field(default_factory=set)


class WindowCells:
    """The cells of one window. A cell is freed when no rank reads it any more; then `freed` is called."""

    def __init__(self, frame_bytes_max: int, window_bytes: int, freed: Callable[[], None]) -> None:
        self._sizes = frame_bytes_max, window_bytes
        self._on_freed = freed
        self._window: Window | None = None
        self._cells: dict[int, _Cell] = {}  # by offset
        self._newest_offsets: dict[int, int] = {}  # frame -> the offset of the newest cell that has it
        self._offsets_by_read: dict[
            tuple[int, int], int
        ] = {}  # (frame, id of the receiver) -> offset of the cell it reads

    def get_window(self) -> Window:
        """The window; creates it at first use."""
        if self._window is None:
            self._window = Window(*self._sizes)
        return self._window

    def add_cell(self, frames: list[int], offset: int, source: From) -> None:
        """A cell was filled with bytes that all of `frames` have. Call `free_if_unread` after giving it to waiting
        ranks."""
        self._cells[offset] = _Cell(source, frames)
        self._newest_offsets.update(dict.fromkeys(frames, offset))

    def find_frame(self, frame: int) -> tuple[int, From] | None:
        """The frame's newest offset in the window, and its source; None if it is not there."""
        offset = self._newest_offsets.get(frame)
        return None if offset is None else (offset, self._cells[offset].source)

    def begin_read(self, frame: int, offset: int, receiver: StreamPeer) -> None:
        """A rank begins to read the frame in that cell."""
        key = frame, id(receiver)
        self._offsets_by_read[key] = offset
        self._cells[offset].readers.add(key)

    def end_read(self, frame: int, receiver: StreamPeer) -> From | None:
        """A rank is done with the frame. Returns the frame's source; None if the rank did not read it in the window."""
        key = frame, id(receiver)
        offset = self._offsets_by_read.pop(key, None)
        if offset is None:
            return None
        cell = self._cells[offset]
        cell.readers.discard(key)
        self.free_if_unread(offset)
        return cell.source

    def end_all_reads(self, receiver: StreamPeer) -> None:
        """Ends all reads of a rank."""
        for frame in [frame for frame, who in self._offsets_by_read if who == id(receiver)]:
            self.end_read(frame, receiver)

    def free_if_unread(self, offset: int) -> None:
        """Frees a cell unless a rank reads it."""
        cell = self._cells[offset]
        if cell.readers:
            return
        del self._cells[offset]
        for frame in cell.frames:
            if self._newest_offsets.get(frame) == offset:
                del self._newest_offsets[frame]
        self.free_cell(offset)

    def free_cell(self, offset: int) -> None:
        """Frees a cell, whatever it holds."""
        if self._window is not None:
            self._window.release(offset)
        self._on_freed()

    def close(self) -> None:
        if self._window is not None:
            self._window.close()
            self._window = None
