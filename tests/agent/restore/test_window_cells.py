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
        offset = self.cells.window().free_cell()
        assert offset is not None
        self.cells.put(frames, offset, source)
        return offset


@pytest.fixture
def filled() -> Iterator[Filled]:
    made = Filled()
    yield made
    made.cells.close()


def test_a_cell_is_free_once_nobody_reads_any_of_its_frames(filled: Filled) -> None:
    cells, one, two = filled.cells, Rank(), Rank()
    offset = filled.put([3, 7], From.HOME)
    cells.give(3, offset, one)
    cells.give(7, offset, two)
    cells.let_go(offset)
    assert cells.find(3) == cells.find(7) == (offset, From.HOME)
    assert cells.take_back(3, one) is From.HOME
    assert cells.take_back(3, one) is None, "said twice"
    assert (cells.window().free, filled.freed) == (COUNT - 1, [])
    assert cells.take_back(7, two) is From.HOME
    assert (cells.window().free, filled.freed) == (COUNT, [None])
    assert cells.find(3) is cells.find(7) is None


def test_what_nobody_waited_for_is_free_at_once(filled: Filled) -> None:
    filled.cells.let_go(filled.put([1]))
    assert (filled.cells.window().free, len(filled.freed)) == (COUNT, 1)


def test_a_frame_that_came_again_lies_where_it_came_last_whoever_still_reads_the_former(filled: Filled) -> None:
    cells, one, two = filled.cells, Rank(), Rank()
    former = filled.put([5])
    cells.give(5, former, one)
    newer = filled.put([5], From.PEER)
    cells.give(5, newer, two)
    assert cells.take_back(5, one) is From.STORE
    assert cells.find(5) == (newer, From.PEER)
    assert cells.window().free == COUNT - 1


def test_a_rank_that_is_gone_reads_nothing_and_the_others_go_on(filled: Filled) -> None:
    cells, gone, other = filled.cells, Rank(), Rank()
    shared, alone = filled.put([1]), filled.put([2])
    for rank, frame, offset in ((gone, 1, shared), (other, 1, shared), (gone, 2, alone)):
        cells.give(frame, offset, rank)
    cells.drop(gone)
    assert cells.window().free == COUNT - 1
    assert (cells.find(1), cells.find(2)) == ((shared, From.STORE), None)


def test_nothing_is_given_back_to_a_window_that_is_closed(filled: Filled) -> None:
    offset, window = filled.put([1]), filled.cells.window()
    filled.cells.close()
    filled.cells.let_go(offset)
    assert len(window._free) == COUNT - 1
