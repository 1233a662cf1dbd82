"""The window: of bounded memory; its cells are kept as long as somebody reads them, and no longer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from ckpt.agent.restore.window import Window
from ckpt.agent.runtime import memory_plan
from ckpt.errors import AgentError
from ckpt.threads import Tasks

FRAME_BYTES = 4096
COUNT = 4


@dataclass
class Filled:
    """A window of which all cells but those in use are free. `freed`: how often one became so."""

    freed: list[None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cells = Window(FRAME_BYTES, COUNT * FRAME_BYTES, lambda: self.freed.append(None))

    def take(self) -> int:
        offset = self.cells.take_cell_nowait()
        assert offset is not None
        return offset


@pytest.fixture
def filled() -> Iterator[Filled]:
    made = Filled()
    yield made
    made.cells.close()


def test_a_cell_is_free_once_nobody_reads_any_of_its_frames(filled: Filled) -> None:
    cells, one, two = filled.cells, object(), object()
    offset = filled.take()
    cells.begin_read(3, offset, one)
    cells.begin_read(7, offset, two)
    cells.free_if_unread(offset)
    for _ in range(2):
        cells.end_read(3, one)
    assert (cells.free_count, filled.freed) == (COUNT - 1, [])
    cells.end_read(7, two)
    assert (cells.free_count, filled.freed) == (COUNT, [None])


def test_what_nobody_waited_for_is_free_at_once(filled: Filled) -> None:
    filled.cells.free_if_unread(filled.take())
    assert (filled.cells.free_count, len(filled.freed)) == (COUNT, 1)


def test_a_rank_that_is_gone_reads_nothing_and_the_others_go_on(filled: Filled) -> None:
    cells, gone, other = filled.cells, object(), object()
    shared, alone = filled.take(), filled.take()
    for rank, frame, offset in ((gone, 1, shared), (other, 1, shared), (gone, 2, alone)):
        cells.begin_read(frame, offset, rank)
    cells.end_all_reads(gone)
    assert cells.free_count == COUNT - 1


def test_nothing_is_given_back_to_a_window_that_is_closed(filled: Filled) -> None:
    offset, window = filled.take(), filled.cells
    filled.cells.close()
    filled.cells.free_if_unread(offset)
    assert len(window._free_cells) == COUNT - 1


def test_a_windows_memory_is_bounded_whatever_the_frames() -> None:
    for frame_bytes in (1, 4096, 4 << 20, 200 << 20):
        window = Window(frame_bytes)
        try:
            assert window.arena.size_bytes <= memory_plan.WINDOW_BYTES
        finally:
            window.close()


def test_a_wait_for_a_cell_ends_with_the_window() -> None:
    window = Window(memory_plan.WINDOW_BYTES)
    assert window.wait_for_cell(5)[1].nbytes == 5
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        window.wait_for_cell(5)

    with Tasks("cell", pool_size=1) as tasks:
        second = tasks.submit(wait)
        assert waiting.wait(60)
        window.close()
        with pytest.raises(AgentError):
            second.result(60)
