"""The ceilings of snapshots and restores: memmove between warm memory, on several threads.

Two of them. `Pieces` moves the same tensors, each with one call, as whatever copies a state has to; `Whole` moves as
many bytes in one call a thread. From some size on (x86_non_temporal_threshold of glibc, often 192 MiB) memmove writes
past the caches, which is up to half as fast again, and which no tensor below that size can have.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

ALIGN = 64


def memfd(nbytes: int) -> memoryview:
    """Shared memory as an arena is, its pages touched."""
    fd = os.memfd_create("benchmark")
    os.ftruncate(fd, nbytes)
    mapped = mmap.mmap(fd, nbytes)
    os.close(fd)
    view = memoryview(mapped)
    torch.frombuffer(view, dtype=torch.uint8).fill_(1)
    return view


class Pieces:
    """Buffers of these sizes into one warm memfd, in as many lanes of about equal bytes as there are threads."""

    def __init__(self, sizes: Sequence[int], threads: int) -> None:
        total = sum(sizes)
        self._sources = [torch.ones(size, dtype=torch.uint8) for size in sizes]
        self._target = torch.frombuffer(memfd(total + ALIGN * len(sizes)), dtype=torch.uint8)
        self._lanes: list[list[tuple[int, int, int]]] = [[] for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads)
        at = done = 0
        for source in self._sources:
            lane = self._lanes[min(done * threads // max(1, total), threads - 1)]
            lane.append((self._target.data_ptr() + at, source.data_ptr(), source.nbytes))
            at += -(-source.nbytes // ALIGN) * ALIGN
            done += source.nbytes

    def __call__(self) -> None:
        list(self._pool.map(_move, self._lanes))

    def __enter__(self) -> Self:
        self()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._pool.shutdown()


class Whole(Pieces):
    """`nbytes` in one call a thread."""

    def __init__(self, nbytes: int, threads: int) -> None:
        super().__init__([nbytes // threads] * threads, threads)


def _move(lane: Sequence[tuple[int, int, int]]) -> None:
    for target, source, nbytes in lane:
        ctypes.memmove(target, source, nbytes)
