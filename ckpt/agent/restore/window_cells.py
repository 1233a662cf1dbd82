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
        self._freed = freed
        self._window: Window | None = None
        self._cells: dict[int, _Cell] = {}  # by offset
        self._newest: dict[int, int] = {}  # frame -> the offset of the newest cell that has it
        self._given: dict[tuple[int, int], int] = {}  # (frame, id of the receiver) -> offset of the cell it reads

    def window(self) -> Window:
        """The window; creates it at first use."""
        if self._window is None:
            self._window = Window(*self._sizes)
        return self._window

    def put(self, frames: list[int], offset: int, source: From) -> None:
        """A cell was filled with bytes that all of `frames` have. Call `let_go` after giving it to waiting ranks."""
        self._cells[offset] = _Cell(source, frames)
        self._newest.update(dict.fromkeys(frames, offset))

    def find(self, frame: int) -> tuple[int, From] | None:
        """The frame's newest offset in the window, and its source; None if it is not there."""
        offset = self._newest.get(frame)
        return None if offset is None else (offset, self._cells[offset].source)

    def give(self, frame: int, offset: int, receiver: StreamPeer) -> None:
        """A rank begins to read the frame in that cell."""
        key = frame, id(receiver)
        self._given[key] = offset
        self._cells[offset].readers.add(key)

    def take_back(self, frame: int, receiver: StreamPeer) -> From | None:
        """A rank is done with the frame. Returns the frame's source; None if the rank did not read it in the window."""
        key = frame, id(receiver)
        offset = self._given.pop(key, None)
        if offset is None:
            return None
        cell = self._cells[offset]
        cell.readers.discard(key)
        self.let_go(offset)
        return cell.source

    def drop(self, receiver: StreamPeer) -> None:
        """Ends all reads of a rank."""
        for frame in [frame for frame, who in self._given if who == id(receiver)]:
            self.take_back(frame, receiver)

    def let_go(self, offset: int) -> None:
        """Frees a cell unless a rank reads it."""
        cell = self._cells[offset]
        if cell.readers:
            return
        del self._cells[offset]
        for frame in cell.frames:
            if self._newest.get(frame) == offset:
                del self._newest[frame]
        self.free(offset)

    def free(self, offset: int) -> None:
        """Frees a cell, whatever it holds."""
        if self._window is not None:
            self._window.release(offset)
        self._freed()

    def close(self) -> None:
        if self._window is not None:
            self._window.close()
            self._window = None
