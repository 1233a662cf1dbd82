"""What lies in the cells of a start's window, whence it came, and who still reads it. Main thread only."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from ckpt.agent.restore.direct_stream import StreamPeer
from ckpt.agent.restore.window import Window


class From(enum.Enum):
    """Whence what a rank was given came, where it was not in this node's memory before."""

    STORE = enum.auto()  # which this node has read for itself
    FILE = enum.auto()  # which the rank reads by itself, in the store's folder
    HOME = enum.auto()  # which one of the nodes has read from there for all
    PEER = enum.auto()  # another node's memory


@dataclass(slots=True)
class _Cell:
    """In use: the bytes that all of `frames` have. `readers`: who reads which of them."""

    source: From
    frames: list[int]
    readers: set[tuple[int, int]] = field(default_factory=set)


class WindowCells:
    """Of one window, which is made when the first is needed. A cell is free again once nobody reads it, which `freed`
    is told of."""

    def __init__(self, frame_bytes_max: int, window_bytes: int, freed: Callable[[], None]) -> None:
        self._sizes = frame_bytes_max, window_bytes
        self._freed = freed
        self._window: Window | None = None
        self._cells: dict[int, _Cell] = {}  # by offset
        self._newest: dict[int, int] = {}  # frame -> the offset of the newest cell that has it
        self._given: dict[tuple[int, int], int] = {}  # frame, receiver -> the offset of the cell that it was given

    def window(self) -> Window:
        if self._window is None:
            self._window = Window(*self._sizes)
        return self._window

    def put(self, frames: list[int], offset: int, source: From) -> None:
        """All of `frames` have the bytes that lie there now. Say `let_go` once all are given to who waits for them."""
        self._cells[offset] = _Cell(source, frames)
        self._newest.update(dict.fromkeys(frames, offset))

    def find(self, frame: int) -> tuple[int, From] | None:
        """Where it lies, and whence it came."""
        offset = self._newest.get(frame)
        return None if offset is None else (offset, self._cells[offset].source)

    def give(self, frame: int, offset: int, receiver: StreamPeer) -> None:
        """That rank reads it there from here on."""
        key = frame, id(receiver)
        self._given[key] = offset
        self._cells[offset].readers.add(key)

    def take_back(self, frame: int, receiver: StreamPeer) -> From | None:
        """That rank is done with it. Whence it came; None where it was not given from here."""
        key = frame, id(receiver)
        offset = self._given.pop(key, None)
        if offset is None:
            return None
        cell = self._cells[offset]
        cell.readers.discard(key)
        self.let_go(offset)
        return cell.source

    def drop(self, receiver: StreamPeer) -> None:
        """It reads nothing any more."""
        for frame in [frame for frame, who in self._given if who == id(receiver)]:
            self.take_back(frame, receiver)

    def let_go(self, offset: int) -> None:
        """That cell is free, unless somebody reads it."""
        cell = self._cells[offset]
        if cell.readers:
            return
        del self._cells[offset]
        for frame in cell.frames:
            if self._newest.get(frame) == offset:
                del self._newest[frame]
        self.free(offset)

    def free(self, offset: int) -> None:
        """Nobody needs that cell, whatever came into it."""
        if self._window is not None:
            self._window.release(offset)
        self._freed()

    def close(self) -> None:
        if self._window is not None:
            self._window.close()
            self._window = None
