"""Samples: a few bytes of every tensor that other ranks may hold too, at each snapshot. They show that replicas have
begun to differ in the very snapshot in which they do.

- The bytes read of a box depend only on its name, shape, dtype and version. So all ranks that hold it read the same.
- A box of up to WHOLE_BYTES is read whole. Of a larger box, a line of elements along its longest dimension is read.
- If there are more than BOXES_MAX boxes, they take turns, by their names.
- In addition, a longer part of one box is read at each snapshot, from another place each time. A difference may begin
  where no line of elements lies.
"""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from ckpt.format.declaration import SAMPLE
from ckpt.layout.layout import Entry, Layout
from ckpt.trainer.state.shard import dense_bytes
from ckpt.trainer.state.state_walk import Walk
from ckpt.types import Box

WHOLE_BYTES = 4 << 10
LINE_ELEMENTS = 16  # elements read of a larger box
BOXES_MAX = 1024  # per snapshot, or a few more: 12 bytes for each have to fit into a message
LONG_SAMPLE_BYTES = 64 << 10  # read of the one box whose turn it is

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class TakenSamples:
    """The bytes as of the boundary, to be hashed on another thread, and the boxes that they belong to. `long_sample`:
    of one box, the name of its tensor, its offset and shape, and the bytes."""

    rows: tuple[int, ...]
    ends: tuple[int, ...]  # in bytes, by row
    data: tuple[bytes, ...]
    long_sample: tuple[str, list[int], bytes]

    def fields(self) -> dict[str, Any]:
        """The fields of the message to the agent. `samples`: an array of SAMPLE; `sample`: [name, box, hash]."""
        whole = memoryview(b"".join(self.data))
        found = np.zeros(len(self.rows), SAMPLE)
        found["box"] = self.rows
        starts = (0, *self.ends[:-1])
        found["hash"] = [xxhash.xxh3_64_intdigest(whole[a:b]) for a, b in zip(starts, self.ends, strict=True)]
        name, box, data = self.long_sample
        return {"samples": found.tobytes(), "sample": [name, box, xxhash.xxh3_128_digest(data)]}


@dataclass(frozen=True, slots=True)
class _Box:
    """A box to be sampled. `row`: its place in the order of (entry, box)."""

    row: int
    name_crc: int  # the CRC of its tensor's name
    entry: Entry
    box: Box
    live: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Turn:
    """The samples of one turn. `reads`: in groups of one device and element size, which are read together; `rows`,
    `ends`: in the same order."""

    reads: tuple[tuple[Callable[[], torch.Tensor], ...], ...]
    rows: tuple[int, ...]
    ends: tuple[int, ...]


class Samples:
    """The samples of one walk, read from its live tensors. `layout`: of the walk's plan; it tells which tensors are the
    rank's own. Any thread may make this object, in about 20 us a tensor. The training thread calls take()."""

    def __init__(self, walk: Walk, layout: Layout) -> None:
        self.walk, self.layout = walk, layout
        self._boxes: list[_Box] = []
        row = 0
        for entry, live, replica in zip(layout.entries, walk.tensors, walk.may_have_replicas, strict=True):
            if replica and not entry.owner:
                number = zlib.crc32(entry.name.encode())
                boxes = zip(entry.boxes, live, strict=True)
                self._boxes += [_Box(row + n, number, entry, box, tensor) for n, (box, tensor) in enumerate(boxes)]
            row += len(entry.boxes)
        self._boxes = [box for box in self._boxes if box.live.numel()]
        turns = 1
        while turns * BOXES_MAX < len(self._boxes):
            turns *= 2
        with torch.inference_mode(False), torch.no_grad():
            self._turns = [self._make_turn(turn, turns) for turn in range(turns)]

    def take(self, turn: int) -> TakenSamples | None:
        """Reads the samples; waits for the device. `turn`: the same on all ranks, another one at each snapshot. None if
        no other rank can hold any of the tensors."""
        if not self._boxes:
            return None
        with torch.inference_mode(False), torch.no_grad():
            made = self._turns[turn % len(self._turns)]
            data = [_to_bytes(torch.cat([read() for read in reads])) for reads in made.reads]
            return TakenSamples(made.rows, made.ends, tuple(data), self._read_long_sample(turn))

    def _read_long_sample(self, turn: int) -> tuple[str, list[int], bytes]:
        chosen = self._boxes[turn % len(self._boxes)]
        live = chosen.live.detach()
        # reshape(-1) would copy all of a large tensor that is not contiguous. So one line is cut out of it first.
        if live.ndim > 1 and live.nbytes > LONG_SAMPLE_BYTES:
            along = max(range(live.ndim), key=lambda d: live.shape[d])
            live = live[tuple(slice(None) if d == along else turn % n for d, n in enumerate(live.shape))]
        flat = live.reshape(-1)
        count = min(flat.numel(), max(1, LONG_SAMPLE_BYTES // flat.element_size()))
        start = turn % (flat.numel() - count + 1)
        return chosen.entry.name, [*chosen.box.offset, *chosen.box.shape], _to_bytes(flat[start : start + count])

    def _make_turn(self, turn: int, turns: int) -> _Turn:
        boxes = [box for box in self._boxes if box.name_crc % turns == turn]
        groups = group_reads(box.live for box in boxes)
        rows = tuple(boxes[n].row for group in groups for n, _, _ in group)
        ends = itertools.accumulate(count for group in groups for _, count, _ in group)
        return _Turn(tuple(tuple(read for _, _, read in group) for group in groups), rows, tuple(ends))


def _to_bytes(tensor: torch.Tensor) -> bytes:
    found: bytes = dense_bytes(tensor.cpu().contiguous()).numpy().tobytes()
    return found


def group_reads(tensors: Iterable[torch.Tensor]) -> list[list[tuple[int, int, Callable[[], torch.Tensor]]]]:
    """(index, bytes, read) for each tensor, in groups of one device and dtype, which are read together."""
    groups: defaultdict[Any, list[tuple[int, int, Callable[[], torch.Tensor]]]] = defaultdict(list)
    for index, (now, read) in enumerate(map(sample_elements, tensors)):
        groups[now.device, now.dtype].append((index, now.nbytes, read))
    return [*groups.values()]


def sample_elements(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """The elements that are read of a box: as they are now, and a function that reads them again."""
    tensor = tensor.detach()
    # Floats of a few bits cannot be concatenated on every device.
    if dtype := _INTEGERS.get(tensor.element_size()):
        tensor = tensor.view(dtype)
    if tensor.nbytes > WHOLE_BYTES:
        along = max(range(tensor.ndim), key=lambda d: tensor.shape[d])
        size = tensor.shape[along]
        step = slice(None, None, max(1, size // LINE_ELEMENTS))
        at = tuple(step if d == along else n // 2 for d, n in enumerate(tensor.shape))
        line = tensor[at][:LINE_ELEMENTS]
        return line, lambda: line
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        return flat, lambda: flat
    # A small tensor, copied at each read. It is not copied here, where a CUDA graph may be captured.
    return tensor, lambda: tensor.reshape(-1)
