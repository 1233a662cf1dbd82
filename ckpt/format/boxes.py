"""Tensors and boxes as columns, for all durable files, with checks that are fast for any number of them."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckpt.errors import UsageError
from ckpt.format.columns import ColumnReader, ColumnWriter, Ints
from ckpt.format.manifest import TensorSpec
from ckpt.layout.layout import Array, Entry
from ckpt.types import DTYPE_CODE, DTYPES, FRAME_BYTES_MAX, ITEMSIZE, Box

TENSORS_MAX = 1 << 18
BOXES_MAX = 1 << 21  # 1,000 tensors, each sharded over 2,048 ranks
NDIM_MAX = 64
NUMBERS_MAX = 1 << 22  # in all shapes together; in all boxes' offsets; in all boxes' shapes
BYTES_MAX = 1 << 60  # of one tensor

UInts = npt.NDArray[np.uint64]
ITEMSIZES = np.array([ITEMSIZE[name] for name in DTYPES], np.int64)


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of integers of different lengths: row i is the next `counts[i]` elements of `flat`."""

    counts: Ints
    flat: Ints

    def starts(self) -> Ints:
        return np.cumsum(self.counts) - self.counts

    def tuples(self) -> list[tuple[int, ...]]:
        flat, found, at = self.flat.tolist(), list[tuple[int, ...]](), 0
        # Neighbours mostly have the same length: a run of such rows is cut at once.
        firsts = np.flatnonzero(np.diff(self.counts, prepend=-1)).tolist()
        for first, stop in itertools.pairwise([*firsts, len(self.counts)]):
            length = int(self.counts[first])
            end = at + (stop - first) * length
            found += zip(*[iter(flat[at:end])] * length, strict=True) if length else [()] * (stop - first)
            at = end
        return found

    def products(self) -> Ints:
        """The product of each row; 1 for an empty row; -1 for a row whose product may exceed BYTES_MAX."""
        exact = np.ones(len(self.counts), np.int64)
        about = np.ones(len(self.counts), np.float64)
        starts = self.starts()
        for dim in range(int(self.counts.max(initial=0))):
            rows = np.flatnonzero(self.counts > dim)
            values = self.flat[starts[rows] + dim]
            with np.errstate(over="ignore", invalid="ignore"):
                # May wrap. Then `about` shows it, or a later zero makes the product right again.
                exact[rows] *= values
                about[rows] *= values
        return np.where(about <= BYTES_MAX, exact, -1)

    def take(self, rows: Ints) -> Ragged:
        counts = self.counts[rows]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return Ragged(counts, self.flat[np.repeat(self.starts()[rows], counts) + within])


@dataclass(frozen=True, slots=True)
class TensorColumns:
    """Tensors by column. `codes`: dtypes by types.DTYPE_CODE. `sizes`: bytes of each whole tensor."""

    names: list[str]
    owners: list[str]
    codes: Ints
    shapes: Ragged
    sizes: Ints

    def dtypes(self) -> list[str]:
        return [DTYPES[code] for code in self.codes.tolist()]


@dataclass(frozen=True, slots=True)
class BoxColumns:
    """Boxes by column. `tensor`: the index of each box's tensor. `sizes`: bytes of each box."""

    tensor: Ints
    offsets: Ragged
    shapes: Ragged
    sizes: Ints

    def boxes(self) -> list[Box]:
        return list(map(Box, self.offsets.tuples(), self.shapes.tuples()))


def write_tensors(out: ColumnWriter, tensors: Sequence[TensorSpec | Entry]) -> None:
    """Writes tensors as sections. Errors: UsageError if a reader would refuse them."""
    check_count("tensors", len(tensors), TENSORS_MAX)
    check_count("dimensions in one tensor", max((len(tensor.shape) for tensor in tensors), default=0), NDIM_MAX)
    check_count("numbers in all shapes", sum(len(tensor.shape) for tensor in tensors), NUMBERS_MAX)
    out.strings("tensors", [tensor.name for tensor in tensors])
    out.strings("owners", [tensor.owner for tensor in tensors])
    out.array("tensors.dtype", [DTYPE_CODE[tensor.dtype] for tensor in tensors], "|u1")
    out.array("tensors.ndim", [len(tensor.shape) for tensor in tensors], "|u1")
    out.array("tensors.shape", _flat(tensor.shape for tensor in tensors), "<u8")


def read_tensors(source: ColumnReader) -> TensorColumns:
    """The tensors of a file. Errors: DamagedData; also for an unknown dtype, or a size beyond BYTES_MAX."""
    count = read_count(source, "tensors.dtype", TENSORS_MAX)
    codes = source.ints("tensors.dtype", "|u1", count, top=len(DTYPES) - 1)
    ndims = source.ints("tensors.ndim", "|u1", count, top=NDIM_MAX)
    shapes = Ragged(ndims, _numbers(source, "tensors.shape", ndims))
    elements = shapes.products()
    if (elements < 0).any() or (elements > BYTES_MAX // ITEMSIZES[codes]).any():
        raise source.damaged(f"a tensor has more than {BYTES_MAX} bytes")
    sizes = elements * ITEMSIZES[codes]
    return TensorColumns(source.strings("tensors", count), source.strings("owners", count), codes, shapes, sizes)


def write_boxes(out: ColumnWriter, tensor: Sequence[int], boxes: Sequence[Box]) -> None:
    """Writes boxes as sections. Errors: UsageError if a reader would refuse them."""
    check_count("boxes", len(boxes), BOXES_MAX)
    check_count("numbers in all boxes", sum(len(box.shape) for box in boxes), NUMBERS_MAX)
    out.array("boxes.tensor", tensor, "<u4", delta=True)
    out.array("boxes.offset", _flat(box.offset for box in boxes), "<u8")
    out.array("boxes.shape", _flat(box.shape for box in boxes), "<u8")


def read_boxes(source: ColumnReader, tensors: TensorColumns) -> BoxColumns:
    """The boxes of a file. Each lies within its tensor. Errors: DamagedData."""
    tensor = source.ints("boxes.tensor", "<u4", read_count(source, "boxes.tensor", BOXES_MAX), len(tensors.names) - 1)
    _numbers_total(source, "boxes.offset", tensors.shapes.counts[tensor])
    whole = tensors.shapes.take(tensor)
    offsets = Ragged(whole.counts, _numbers(source, "boxes.offset", whole.counts))
    shapes = Ragged(whole.counts, _numbers(source, "boxes.shape", whole.counts))
    if (offsets.flat + shapes.flat > whole.flat).any():
        raise source.damaged("a box reaches out of its tensor")
    return BoxColumns(tensor, offsets, shapes, shapes.products() * ITEMSIZES[tensors.codes[tensor]])


def is_covered_once(tensors: TensorColumns, boxes: BoxColumns) -> bool:
    """Whether every tensor has a box, and its boxes cover each element exactly once.

    The sum of the boxes' areas must equal the tensor's. With plain areas an overlap could hide a gap. So the area uses
    a measure that is random along each axis, and an overlap hides a gap only by chance. Measures lie in a prime field;
    by Schwartz and Zippel (1979, 1980) two draws are wrong with a probability below (64 / 2^31)^2."""
    if (np.bincount(boxes.tensor, minlength=len(tensors.names)) == 0).any():
        return False
    every = Ragged(tensors.shapes.counts, np.zeros_like(tensors.shapes.flat))
    for _ in range(2):
        seeds = [np.uint64(secrets.randbits(64)) for _ in range(NDIM_MAX)]
        sums = np.zeros(len(tensors.names), np.uint64)
        np.add.at(sums, boxes.tensor, _measure(boxes.offsets, boxes.shapes, seeds))
        if (sums % _PRIME != _measure(every, tensors.shapes, seeds)).any():
            return False
    return True


_PRIME = np.uint64((1 << 31) - 1)


def _measure(offsets: Ragged, shapes: Ragged, seeds: Sequence[np.uint64]) -> UInts:
    total = np.ones(len(offsets.counts), np.uint64)
    starts = offsets.starts()
    for dim in range(int(offsets.counts.max(initial=0))):
        rows = np.flatnonzero(offsets.counts > dim)
        low = offsets.flat[starts[rows] + dim].astype(np.uint64)
        high = low + shapes.flat[starts[rows] + dim].astype(np.uint64)
        length = _random(high, seeds[dim]) + _PRIME - _random(low, seeds[dim])
        total[rows] = total[rows] * (length % _PRIME) % _PRIME
    return total


def _random(x: UInts, seed: np.uint64) -> UInts:
    """A random function of x, chosen by the seed (the finaliser of splitmix64; Steele, Lea, Flood 2014)."""
    x = x * np.uint64(0x9E3779B97F4A7C15) + seed
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) % _PRIME


def check_frames(source: ColumnReader, frames: Array) -> None:
    """Checks dtypes and lengths. `frames`: array of FRAME or of STAGED_FRAME. Errors: DamagedData."""
    if not len(frames):
        return
    if frames["dtype"].max() >= len(DTYPES):
        raise source.damaged(f"a frame has dtype {frames['dtype'].max()}, which this ckpt does not know")
    if frames["length"].min() == 0 or frames["length"].max() > FRAME_BYTES_MAX:
        raise source.damaged(f"a frame is empty or has more than {FRAME_BYTES_MAX} bytes")


def check_count(what: str, count: int, count_max: int) -> None:
    """Checks a count before writing: more could fit into memory here, and then be refused by a reader. Errors:
    UsageError."""
    if count > count_max:
        raise UsageError(f"the state has {count} {what}; a checkpoint holds at most {count_max}")


def read_count(source: ColumnReader, name: str, count_max: int) -> int:
    """The number of elements of a section. Errors: DamagedData if there are more than `count_max`."""
    count = source.count(name)
    if count > count_max:
        raise source.damaged(f"section {name!r} has {count} elements; at most {count_max} are allowed")
    return count


def _numbers(source: ColumnReader, name: str, counts: Ints) -> Ints:
    return source.ints(name, "<u8", _numbers_total(source, name, counts), top=BYTES_MAX)


def _numbers_total(source: ColumnReader, name: str, counts: Ints) -> int:
    total = int(counts.sum())
    if total > NUMBERS_MAX:
        raise source.damaged(f"section {name!r} would have {total} elements; at most {NUMBERS_MAX} are allowed")
    return total


def _flat(rows: Iterable[tuple[int, ...]]) -> list[int]:
    return list(itertools.chain.from_iterable(rows))
