"""Which node of a job reads which frame of a checkpoint from the store: each is read by one, its home, and given to the
others. A pure function of the frames and the number of nodes, so that every node has the same answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import UsageError

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ReadSharding:
    """By frame: `same`: the first frame that has the same bytes, which stands for it here. `nodes`: its home, by the
    node's place in the job; -1: it has none. `offsets`: where it lies in its home's memory. `sizes`: bytes of that
    memory, by node."""

    same: Numbers
    nodes: Numbers
    offsets: Numbers
    sizes: tuple[int, ...]

    def of(self, node: int) -> Numbers:
        """The frames that lie in that node's memory, ascending, and so are their offsets."""
        return np.flatnonzero((self.nodes == node) & (self.same == np.arange(len(self.same))))


def homes(frames: npt.NDArray[Any], count: int, only: Numbers | None = None) -> ReadSharding:
    """`frames`: of a manifest, which have hash_hi, hash_lo and length. `count`: of the nodes. Each gets a run of frames
    (those lie near one another in the store) of a `count`th of all bytes, give or take a frame. Frames of equal bytes
    are at one home, once. `only`: the frames that have one; all by default. Errors: UsageError without nodes."""
    if count < 1:
        raise UsageError(f"frames are read by nodes, and there are {count}")
    numbers = np.arange(len(frames)) if only is None else only
    same, nodes, offsets, sizes = _homes(frames[numbers], count)
    all_same, all_nodes, all_offsets = np.arange(len(frames)), np.full(len(frames), -1), np.zeros(len(frames), np.int64)
    all_same[numbers], all_nodes[numbers], all_offsets[numbers] = numbers[same], nodes, offsets
    return ReadSharding(all_same, all_nodes, all_offsets, tuple(sizes.tolist()))


def _homes(frames: npt.NDArray[Any], count: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    same = _same(frames)
    counted = np.where(same == np.arange(len(frames)), frames["length"], 0).astype(np.int64)
    stops = np.cumsum(counted)
    total = int(stops[-1]) if len(stops) else 0
    middles = 2 * stops - counted  # twice that, so that it is whole
    nodes = np.minimum(middles * count // max(1, 2 * total), count - 1)[same]
    sizes = np.bincount(nodes, counted, count).astype(np.int64)
    starts = np.cumsum(sizes) - sizes
    return same, nodes, ((stops - counted)[same]) - starts[nodes], sizes


def _same(frames: npt.NDArray[Any]) -> Numbers:
    columns = [np.ascontiguousarray(frames[name]) for name in ("hash_hi", "hash_lo", "length")]
    order = np.lexsort(columns)  # stable: the first of a group is its lowest
    new = np.ones(len(frames), bool)
    new[1:] = np.any([column[order][1:] != column[order][:-1] for column in columns], axis=0)
    same = np.empty(len(frames), np.int64)
    same[order] = order[new][np.cumsum(new) - 1]
    return same
