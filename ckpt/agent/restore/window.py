"""The window of a restore: shared memory through which frames pass from the store or peers to the local ranks."""

from __future__ import annotations

import threading

from ckpt.agent.runtime.memory_plan import WINDOW_BYTES
from ckpt.errors import AgentError
from ckpt.ipc.arena import Arena

CELLS_MAX = 64
CELL_ALIGN = 4096  # bytes


class Window:
    """A shared-memory arena of bounded size, cut into `cell_count` cells of the largest frame's size. Thread-safe."""

    def __init__(self, frame_bytes_max: int, window_bytes: int = WINDOW_BYTES) -> None:
        self._cell_bytes = -(-max(1, frame_bytes_max) // CELL_ALIGN) * CELL_ALIGN
        self.cell_count = max(1, min(CELLS_MAX, window_bytes // self._cell_bytes))
        self.arena = Arena.create(self.cell_count * self._cell_bytes)
        self._free_cells = list(range(self.cell_count))
        self._condition = threading.Condition()
        self._closed = False

    def wait_for_cell(self, length: int) -> tuple[int, memoryview]:
        """Waits for a free cell. Returns its offset in the window, and a view of its first `length` bytes.

        Errors: AgentError once the window is closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._free_cells or self._closed)
            if self._closed:
                raise AgentError("nobody waits for these frames any more")
            at = self._free_cells.pop() * self._cell_bytes
            return at, self.arena.part((at, length))

    @property
    def free_count(self) -> int:
        """The number of free cells."""
        with self._condition:
            return 0 if self._closed else len(self._free_cells)

    def take_cell_nowait(self) -> int | None:
        """Takes a free cell without waiting. Returns its offset; None if there is none."""
        with self._condition:
            return self._free_cells.pop() * self._cell_bytes if self._free_cells and not self._closed else None

    def release(self, offset: int) -> None:
        """Frees the cell at that offset."""
        with self._condition:
            self._free_cells.append(offset // self._cell_bytes)
            self._condition.notify()

    def close(self) -> None:
        """Ends every wait with an error. The memory is freed when its last view is dropped."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self.arena.close()
