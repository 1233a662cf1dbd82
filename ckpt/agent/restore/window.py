"""The window of a restore: shared memory through which frames pass from the store or peers to the local ranks.

It is cut into cells of the largest frame's size. A filled cell is reused once no rank reads it. Main thread only, but
for `wait_for_cell` and `release`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from ckpt.agent.runtime.memory_plan import WINDOW_BYTES
from ckpt.errors import AgentError
from ckpt.ipc.arena import Arena

CELLS_MAX = 64
CELL_ALIGN = 4096  # bytes


class Window:
    """A shared-memory arena of bounded size, and the ranks that read in it. `on_freed`: a filled cell became free."""

    def __init__(
        self, frame_bytes_max: int, window_bytes: int = WINDOW_BYTES, on_freed: Callable[[], None] = lambda: None
    ) -> None:
        self._cell_bytes = -(-max(1, frame_bytes_max) // CELL_ALIGN) * CELL_ALIGN
        self.cell_count = max(1, min(CELLS_MAX, window_bytes // self._cell_bytes))
        self._on_freed = on_freed
        self._arena: Arena | None = None
        self._free_cells = list(range(self.cell_count))
        self._condition = threading.Condition()
        self._closed = False
        self._read_counts: Counter[int] = Counter()  # reads under way, by offset of the cell

    @property
    def arena(self) -> Arena:
        """The memory; it is created at first use. Any thread."""
        with self._condition:
            if self._arena is None:
                self._arena = Arena.create(self.cell_count * self._cell_bytes)
            return self._arena

    @property
    def free_count(self) -> int:
        with self._condition:
            return 0 if self._closed else len(self._free_cells)

    def wait_for_cell(self, length: int) -> tuple[int, memoryview]:
        """Waits for a free cell. Returns its offset in the window, and a view of its first `length` bytes. Errors:
        AgentError once the window is closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._free_cells or self._closed)
            if self._closed:
                raise AgentError("nobody waits for these frames any more")
            at = self._free_cells.pop() * self._cell_bytes
            return at, self.arena.part((at, length))

    def take_cell_nowait(self) -> int | None:
        """Takes a free cell without waiting. Returns its offset; None if there is none."""
        with self._condition:
            return self._free_cells.pop() * self._cell_bytes if self._free_cells and not self._closed else None

    def release(self, offset: int) -> None:
        """Frees a cell that was taken and not filled."""
        with self._condition:
            self._free_cells.append(offset // self._cell_bytes)
            self._condition.notify()

    def begin_read(self, offset: int) -> None:
        """A rank begins to read a frame in that cell, which was filled with it."""
        self._read_counts[offset] += 1

    def end_read(self, offset: int) -> None:
        """A rank is done with a frame in that cell."""
        self._read_counts[offset] -= 1
        self.free_if_unread(offset)

    def free_if_unread(self, offset: int) -> None:
        """Frees a filled cell unless a rank reads it."""
        if not self._read_counts[offset]:
            self.release(offset)
            self._on_freed()

    def close(self) -> None:
        """Ends every wait with an error. The memory is freed when its last view is dropped."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._arena is not None:
            self._arena.close()
