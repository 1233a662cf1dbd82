"""The coverage table: the segments of all ranks, by box and rank, and the comparison of copies of the same box.

A *cell* is one declared box of one tensor. Ranks that declare equal boxes share a cell. Cells, ranks and frames are
numbers, and rows are NumPy vectors, since a checkpoint has up to 2^18 frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import DamagedData
from ckpt.format.manifest import FRAME
from ckpt.layout.layout import Array, Staging

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
# (rank, offset in the rank's data region, length) -> a buffer with those staged bytes
Read = Callable[[int, int, int], Any]


@dataclass(frozen=True, slots=True)
class BoxCells:
    """The cells of all declared boxes.

    `size`: bytes of each cell. `cell_by_box`: per rank, the cell of each box, in order of (entry, box). `first_box`:
    per rank, the index into `cell_by_box` of each entry's first box; at the end the number of boxes."""

    size: Ints
    cell_by_box: tuple[Ints, ...]
    first_box: tuple[Ints, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """The segments of all ranks, one row each, sorted by (cell, rank, start).

    `start`, `length`: byte range in the cell. `frame`: numbered over all ranks. `offset`: bytes into the frame.
    A *group* is the run of rows [first, stop) of one (cell, rank). `key` = cell * world + rank. `is_whole`: whether the
    group is the whole cell. `lowest`: for each cell, the whole group of the lowest rank, or -1. `tiles`: the rows, in
    order of start, of each cell that no rank staged whole, but all ranks together staged exactly once.
    """

    world: int
    cell: Ints
    rank: Ints
    start: Ints
    length: Ints
    frame: Ints
    offset: Ints
    key: Ints
    first: Ints
    stop: Ints
    is_whole: Bools
    lowest: Ints
    tiles: dict[int, Ints]
    frames: Array  # array of FRAME
    frame_offset: Ints  # offset of each frame in its rank's data region
    frame_base: Ints  # first frame of each rank; at the end the number of all frames

    def whole_group(self, cell: int, rank: int) -> int:
        """The group of `rank` if it staged the whole cell, else -1."""
        key = cell * self.world + rank
        group = int(np.searchsorted(self.key, key))
        return group if group < len(self.key) and self.key[group] == key and self.is_whole[group] else -1

    def group_rows(self, groups: Ints) -> tuple[Ints, Ints]:
        """(the rows of these groups, end to end; the number of rows of each group)."""
        count = self.stop[groups] - self.first[groups]
        return np.repeat(self.first[groups] - (np.cumsum(count) - count), count) + np.arange(int(count.sum())), count


def rows_of(stagings: Sequence[Staging], hashes: Sequence[npt.NDArray[np.uint64]], cells: BoxCells) -> Rows:
    """The table of all ranks' stagings. Errors: DamagedData if a staging does not fit its rank's layout or hashes."""
    world = len(stagings)
    frame_base = np.cumsum([0] + [len(staging.frames) for staging in stagings])
    parts = [_columns(rank, staging, cells, int(frame_base[rank])) for rank, staging in enumerate(stagings)]
    cell, rank, start, length, frame, offset = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((start, rank, cell))
    cell, rank, start, length, frame, offset = (c[order] for c in (cell, rank, start, length, frame, offset))

    key = cell * world + rank
    first, stop, whole = _runs(key, start, length, cells.size[cell])
    lowest = np.full(len(cells.size), -1, np.int64)
    # In reverse order, so that the last assignment to a cell is the one of its lowest rank.
    groups = np.flatnonzero(whole)[::-1]
    lowest[cell[first[groups]]] = groups
    return Rows(
        world=world, cell=cell, rank=rank, start=start, length=length, frame=frame, offset=offset,
        key=key[first], first=first, stop=stop, is_whole=whole, lowest=lowest,
        tiles=_tiles(cell, start, length, cells.size, lowest),
        frames=np.concatenate([_frames(r, staging, hashes[r]) for r, staging in enumerate(stagings)]),
        frame_offset=np.concatenate([staging.frames["offset"] for staging in stagings]).astype(np.int64),
        frame_base=frame_base,
    )  # fmt: skip


def differing_cells(rows: Rows, read: Read | None) -> Iterator[int]:
    """The cells that several ranks staged whole, but with different bytes. A cell may come more than once.

    Equal frames prove equal bytes. If frames differ, the bytes are compared with `read`. Without `read` the cell counts
    as differing.
    """
    other = np.flatnonzero(rows.is_whole)
    one = rows.lowest[rows.cell[rows.first[other]]]
    one, other = one[one != other], other[one != other]
    proven = _equal_by_hash(rows, one, other)
    for a, b in zip(one[~proven].tolist(), other[~proven].tolist(), strict=True):
        if read is None or not _equal_bytes(rows, a, b, read):
            yield int(rows.cell[rows.first[a]])


def _columns(rank: int, staging: Staging, cells: BoxCells, frame_base: int) -> tuple[Ints, ...]:
    """One rank's segments as columns (cell, rank, start, length, frame, offset). Errors: DamagedData if they do not fit
    the rank's layout."""
    entry, box, start, length, offset, frame = (
        staging.segments[name].astype(np.int64) for name in ("entry", "box", "start", "length", "offset", "frame")
    )
    first_box, of_box = cells.first_box[rank], cells.cell_by_box[rank]
    if (entry < len(first_box) - 1).all() and (frame < len(staging.frames)).all():
        position = first_box[entry] + box
        if (position < first_box[entry + 1]).all():
            cell = of_box[position]
            offset -= staging.frames["offset"].astype(np.int64)[frame]
            in_cell = (start >= 0) & (length > 0) & (length <= cells.size[cell]) & (start <= cells.size[cell] - length)
            in_frame = (offset >= 0) & (offset + length <= staging.frames["length"][frame])
            if (in_cell & in_frame).all():
                return cell, np.full(len(cell), rank, np.int64), start, length, frame + frame_base, offset
    raise DamagedData(f"the staging of rank {rank} does not fit the rank's layout; its snapshot is unusable")


def _frames(rank: int, staging: Staging, hashes: npt.NDArray[np.uint64]) -> Array:
    if hashes.shape != (len(staging.frames), 2):
        raise DamagedData(f"rank {rank} staged {len(staging.frames)} frames and has hashes of shape {hashes.shape}")
    frames = np.zeros(len(staging.frames), FRAME)
    frames["hash_hi"], frames["hash_lo"] = hashes[:, 0], hashes[:, 1]
    frames["length"], frames["dtype"] = staging.frames["length"], staging.frames["dtype"]
    return frames


def _runs(key: Ints, start: Ints, length: Ints, size: Ints) -> tuple[Ints, Ints, Bools]:
    """Runs of rows with equal key: (first row, row after the last, whether the run covers bytes 0 to `size` once)."""
    if not len(key):
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.bool_)
    first = np.flatnonzero(np.append(True, key[1:] != key[:-1]))
    stop = np.append(first[1:], len(key))
    end = start + length
    expected = np.append(0, end[:-1])
    expected[first] = 0
    return first, stop, np.logical_and.reduceat(start == expected, first) & (end[stop - 1] == size[first])


def _tiles(cell: Ints, start: Ints, length: Ints, size: Ints, lowest: Ints) -> dict[int, Ints]:
    rest = np.flatnonzero(lowest[cell] < 0)
    rest = rest[np.lexsort((start[rest], cell[rest]))]
    first, stop, tiled = _runs(cell[rest], start[rest], length[rest], size[cell[rest]])
    return {int(cell[rest[a]]): rest[a:b] for a, b in zip(first[tiled].tolist(), stop[tiled].tolist(), strict=True)}


def _equal_by_hash(rows: Rows, one: Ints, other: Ints) -> Bools:
    """For each pair of groups, whether the hashes of their frames prove that they are equal."""
    alike = np.flatnonzero(rows.stop[one] - rows.first[one] == rows.stop[other] - rows.first[other])
    i, count = rows.group_rows(one[alike])
    j, _ = rows.group_rows(other[alike])
    f, g = rows.frames[rows.frame[i]], rows.frames[rows.frame[j]]
    same = (f["hash_hi"] == g["hash_hi"]) & (f["hash_lo"] == g["hash_lo"]) & (f["length"] == g["length"])
    same &= (rows.start[i] == rows.start[j]) & (rows.length[i] == rows.length[j]) & (rows.offset[i] == rows.offset[j])
    proven = np.zeros(len(one), np.bool_)
    if len(alike):
        proven[alike] = np.logical_and.reduceat(same, np.cumsum(count) - count)
    return proven


def _equal_bytes(rows: Rows, one: int, other: int, read: Read) -> bool:
    """Whether two whole groups of one cell have equal bytes. Compares run by run."""

    def bytes_of(row: int, start: int, stop: int) -> npt.NDArray[np.uint8]:
        at = int(rows.frame_offset[rows.frame[row]] + rows.offset[row] + start - rows.start[row])
        return np.frombuffer(read(int(rows.rank[row]), at, stop - start), np.uint8)

    i, j, start = int(rows.first[one]), int(rows.first[other]), 0
    while i < rows.stop[one]:
        end_i, end_j = int(rows.start[i] + rows.length[i]), int(rows.start[j] + rows.length[j])
        stop = min(end_i, end_j)
        if not np.array_equal(bytes_of(i, start, stop), bytes_of(j, start, stop)):
            return False
        i, j, start = i + (end_i == stop), j + (end_j == stop), stop
    return True
