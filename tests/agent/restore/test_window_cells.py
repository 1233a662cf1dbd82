"""The cells of a window: kept as long as somebody reads them, and no longer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from ckpt.agent.restore.window_cells import From, WindowCells

FRAME_BYTES = 4096
COUNT = 4


class Rank:
    def send(self, fields: dict[str, Any], fds: Any = ()) -> None: ...


@dataclass
class Filled:
    """A window of which all cells but those in use are free. `freed`: how often one became so."""

    freed: list[None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cells = WindowCells(FRAME_BYTES, COUNT * FRAME_BYTES, lambda: self.freed.append(None))

    def put(self, frames: list[int], source: From = From.STORE) -> int:
        offset = self.cells.get_window().take_cell_nowait()
        assert offset is not None
        self.cells.add_cell(frames, offset, source)
        return offset


@pytest.fixture
def filled() -> Iterator[Filled]:
    made = Filled()
    yield made
    made.cells.close()


def test_a_cell_is_free_once_nobody_reads_any_of_its_frames(filled: Filled) -> None:
    cells, one, two = filled.cells, Rank(), Rank()
    offset = filled.put([3, 7], From.HOME)
    cells.begin_read(3, offset, one)
    cells.begin_read(7, offset, two)
    cells.free_if_unread(offset)
    assert cells.find_frame(3) == cells.find_frame(7) == (offset, From.HOME)
    assert cells.end_read(3, one) is From.HOME
    assert cells.end_read(3, one) is None, "said twice"
    assert (cells.get_window().free_count, filled.freed) == (COUNT - 1, [])
    assert cells.end_read(7, two) is From.HOME
    assert (cells.get_window().free_count, filled.freed) == (COUNT, [None])
    assert cells.find_frame(3) is cells.find_frame(7) is None


def test_what_nobody_waited_for_is_free_at_once(filled: Filled) -> None:
    filled.cells.free_if_unread(filled.put([1]))
    assert (filled.cells.get_window().free_count, len(filled.freed)) == (COUNT, 1)


def test_a_frame_that_came_again_lies_where_it_came_last_whoever_still_reads_the_former(filled: Filled) -> None:
    cells, one, two = filled.cells, Rank(), Rank()
    former = filled.put([5])
    cells.begin_read(5, former, one)
    newer = filled.put([5], From.PEER)
    cells.begin_read(5, newer, two)
    assert cells.end_read(5, one) is From.STORE
    assert cells.find_frame(5) == (newer, From.PEER)
    assert cells.get_window().free_count == COUNT - 1


def test_a_rank_that_is_gone_reads_nothing_and_the_others_go_on(filled: Filled) -> None:
    cells, gone, other = filled.cells, Rank(), Rank()
    shared, alone = filled.put([1]), filled.put([2])
    for rank, frame, offset in ((gone, 1, shared), (other, 1, shared), (gone, 2, alone)):
        cells.begin_read(frame, offset, rank)
    cells.end_all_reads(gone)
    assert cells.get_window().free_count == COUNT - 1
    assert (cells.find_frame(1), cells.find_frame(2)) == ((shared, From.STORE), None)


def test_nothing_is_given_back_to_a_window_that_is_closed(filled: Filled) -> None:
    offset, window = filled.put([1]), filled.cells.get_window()
    filled.cells.close()
    filled.cells.free_if_unread(offset)
    assert len(window._free_cells) == COUNT - 1
