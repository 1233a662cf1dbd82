"""The read sharding of a restore: decides which node reads which frame from the store.

One node, the frame's *home*, reads a frame and gives it to the other nodes. The result is a pure function of the frames
and the number of nodes, so every node computes the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import UsageError

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ReadSharding:
    """The home of each frame.

    By frame: `first_equal`: the first frame with the same bytes, which replaces it here. `home_nodes`: index of its
    home among the job's nodes; -1: none. `offsets`: bytes into its home's memory. `node_bytes`: by node, bytes of that
    memory."""

    first_equal: Numbers
    home_nodes: Numbers
    offsets: Numbers
    node_bytes: tuple[int, ...]

    def frames_of(self, node: int) -> Numbers:
        """The frames in the memory of `node`, in ascending order; their offsets ascend, too."""
        return np.flatnonzero((self.home_nodes == node) & (self.first_equal == np.arange(len(self.first_equal))))


def shard_reads(frames: npt.NDArray[Any], count: int, only: Numbers | None = None) -> ReadSharding:
    """The read sharding of a manifest's frames over `count` nodes.

    Each node gets one run of frames with 1/`count` of all bytes, give or take a frame; neighbours lie close together in
    the store. Frames with equal bytes have one home and are kept once. `frames`: array with hash_hi, hash_lo, length.
    `only`: the frames that get a home; all by default. Errors: UsageError if `count` is less than 1."""
    if count < 1:
        raise UsageError(f"count={count}: at least one node must read the frames")
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
    middles = 2 * stops - counted  # twice the middle, so that it is a whole number
    nodes = np.minimum(middles * count // max(1, 2 * total), count - 1)[same]
    sizes = np.bincount(nodes, counted, count).astype(np.int64)
    starts = np.cumsum(sizes) - sizes
    return same, nodes, ((stops - counted)[same]) - starts[nodes], sizes


def _same(frames: npt.NDArray[Any]) -> Numbers:
    columns = [np.ascontiguousarray(frames[name]) for name in ("hash_hi", "hash_lo", "length")]
    order = np.lexsort(columns)  # stable, so the first frame of a group has the lowest number
    new = np.ones(len(frames), bool)
    new[1:] = np.any([column[order][1:] != column[order][:-1] for column in columns], axis=0)
    same = np.empty(len(frames), np.int64)
    same[order] = order[new][np.cumsum(new) - 1]
    return same
