"""Copy pieces: the pairs of views that a snapshot copies, from live tensors into an arena.

A `CopyPiece` is a part of one live tensor, and the part of the arena that it is copied to. Pieces are made once per
(walk, staging, arena). As views they keep their storage alive, so a copy never reads freed memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckpt.errors import CkptError
from ckpt.layout.layout import Staging
from ckpt.trainer.state.shard import dense_bytes
from ckpt.trainer.state.state_walk import Walk

SERIAL_ELEMENTS = 16384  # torch copies fewer than 32768 elements without its thread pool


@dataclass(frozen=True, slots=True, eq=False)
class CopyPiece:
    """`source` and `target` have the same dtype and shape; the target is contiguous. A contiguous source is given as
    flat bytes (uint8). Any other source keeps its dtype, in parts of at most SERIAL_ELEMENTS elements. `entry`, `box`:
    the indices in the walk of the tensor and of its box."""

    entry: int
    box: int
    source: Tensor
    target: Tensor

    @property
    def nbytes(self) -> int:
        return self.target.nbytes

    @property
    def is_flat(self) -> bool:
        """Whether the source is given as flat bytes."""
        return self.source.dtype is torch.uint8 and self.source.dim() == 1

    def adjoins(self, before: CopyPiece) -> bool:
        """Whether the target begins where that of the piece before ends."""
        return self.target.data_ptr() == before.target.data_ptr() + before.nbytes


def cut_pieces(walk: Walk, staging: Staging, data: memoryview) -> tuple[CopyPiece, ...]:
    """The pieces that fill `data` (a writable data region) as `staging` says, in order of target. Errors: CkptError if
    the staging does not fit the walk or the region, or splits an element, or if `data` is read-only."""
    arena = _as_tensor(data)
    pieces: list[CopyPiece] = []
    for entry, box, start, length, offset in _join_runs(staging):
        name = walk.layout.entries[entry].name
        live = walk.tensors[entry][box].detach()
        if start + length > live.nbytes or offset + length > arena.nbytes:
            raise CkptError(
                f"the staging asks for bytes {start} to {start + length} of {name} ({live.nbytes} bytes), to lie "
                f"at {offset} of {arena.nbytes}: it is of another layout; stage again from the present one"
            )
        target = arena[offset : offset + length]
        if live.is_contiguous():
            flat = dense_bytes(live)
            pieces.append(CopyPiece(entry, box, flat[start : start + length], target))
            continue
        if start % live.element_size() or length % live.element_size() or offset % live.element_size():
            raise CkptError(f"the staging cuts an element of {name} in two, or places it at an odd offset")
        pieces += _strided(entry, box, live, start // live.element_size(), target)
    return tuple(pieces)


def _join_runs(staging: Staging) -> Iterator[tuple[int, int, int, int, int]]:
    """(entry, box, start, length, offset) of each run: segments that adjoin in both tensor and arena are joined."""
    segments = staging.segments
    if len(segments) == 0:
        return
    fields = "entry", "box", "start", "length", "offset"
    entry, box, start, length, offset = (segments[field].astype(np.int64) for field in fields)
    joins = np.ones(len(segments) - 1, dtype=bool)
    for before, after in ((entry, entry), (box, box), (start + length, start), (offset + length, offset)):
        joins &= before[:-1] == after[1:]
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    runs = entry[first], box[first], start[first], np.add.reduceat(length, first), offset[first]
    for run in zip(*(column.tolist() for column in runs), strict=True):
        if run[3]:
            yield run


def _strided(entry: int, box: int, live: Tensor, start: int, target: Tensor) -> Iterator[CopyPiece]:
    """Pieces for a flat range of a tensor that is not contiguous: rectangular views, so nothing is gathered first."""
    size = live.element_size()
    at = 0
    for index, count in blocks(tuple(live.shape), start, start + target.nbytes // size, SERIAL_ELEMENTS):
        source = live[index]
        flat = target[at : at + count * size].view(live.dtype)
        yield CopyPiece(entry, box, source, flat.view(source.shape))
        at += count * size


def blocks(shape: tuple[int, ...], start: int, stop: int, count_max: int) -> Iterator[tuple[tuple[slice, ...], int]]:
    """The flat element range [start, stop) of a row-major tensor as (index, count), in order. Each block has at most
    `count_max` elements, which follow one another."""
    inner = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    at = start
    while at < stop:
        d = next(
            d
            for d, n in enumerate(inner)
            if n == 1 or (at % n == 0 and at + n <= stop and n <= count_max)  # n == 1 for the last dimension
        )
        position = [at // n % size for n, size in zip(inner[: d + 1], shape, strict=False)]
        rows = min((stop - at) // inner[d], shape[d] - position[d], max(1, count_max // inner[d]))
        index = (*(slice(i, i + 1) for i in position[:d]), slice(position[d], position[d] + rows))
        yield index, rows * inner[d]
        at += rows * inner[d]


def split_piece(piece: CopyPiece, nbytes_max: int) -> Iterator[CopyPiece]:
    """The same bytes in pieces of at most `nbytes_max`. A piece that is not flat bytes is small already: it stays
    whole."""
    if piece.nbytes <= nbytes_max or not piece.is_flat:
        yield piece
        return
    for at in range(0, piece.nbytes, nbytes_max):
        yield CopyPiece(piece.entry, piece.box, piece.source[at : at + nbytes_max], piece.target[at : at + nbytes_max])


def group_pieces(
    pieces: Iterable[CopyPiece], joins: Callable[[list[CopyPiece], int, CopyPiece], bool]
) -> Iterator[list[CopyPiece]]:
    """The pieces in groups, in order. `joins(group, nbytes, piece)`: whether a piece joins the group of `nbytes`."""
    group: list[CopyPiece] = []
    nbytes = 0
    for piece in pieces:
        if group and not joins(group, nbytes, piece):
            yield group
            group, nbytes = [], 0
        group.append(piece)
        nbytes += piece.nbytes
    if group:
        yield group


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in row-major order, as a flat uint8 tensor: a view if it is contiguous, else a copy."""
    return dense_bytes(tensor.detach().contiguous())


def is_cuda_used() -> bool:
    """Whether this process has initialised CUDA. The call does not initialise it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def result_waiter(result: Tensor) -> Callable[[], Tensor]:
    """A function that waits until the current stream has computed `result`, then returns it. Any thread may call it."""
    if result.device.type != "cuda":
        return lambda: result
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(result.device))

    def when_there() -> Tensor:
        event.synchronize()
        return result

    return when_there


def keep_for_stream(tensor: Tensor, stream: Any = None) -> None:
    """For a tensor that is used on another stream than it was made on. Once it is dropped, its memory is reused only
    after `stream` (default: the current one) has come this far."""
    if tensor.is_cuda:
        tensor.record_stream(stream or torch.cuda.current_stream(tensor.device))


def address_and_size(data: memoryview) -> tuple[int, int]:
    """The address and the size in bytes of a region."""
    return (np.frombuffer(data, dtype=np.uint8).ctypes.data if data.nbytes else 0), data.nbytes


def _as_tensor(data: memoryview) -> Tensor:
    if data.readonly:
        raise CkptError("the arena's data region is mapped read-only; map it writable to stage into it")
    # From NumPy: torch.frombuffer would follow a default device that the user set, and refuses empty buffers.
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8))
