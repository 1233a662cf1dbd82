"""Writing frames into packs: what is written where, and the threads that do it.

A pack is encoded and put by one thread, several packs at once, so that encoding goes on while others are on the way.
With the raw codec nothing is copied: frames that lie behind one another in memory are put as one slice of it.
Otherwise the encoded frames are gathered in one buffer per thread, which is reused.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckpt.clock import Clock
from ckpt.errors import SaveFailed
from ckpt.format import codecs
from ckpt.format.frames import frame_hash
from ckpt.format.manifest import PLACE, Codec
from ckpt.layout.layout import Array
from ckpt.storage.contract import Backend, Buffer
from ckpt.store import keys
from ckpt.threads import Tasks
from ckpt.types import Identity

PACK_BYTES = 64 << 20
PACKS_MAX = 512  # per owner and checkpoint; above it packs grow
PUTS_MAX = 4  # packs on the way at once
ENCODED_BYTES_MAX = 256 << 20  # what encoded packs may take in memory (one pack always may)
GAP_BYTES_MAX = 4096  # alignment between two frames in memory that is written along rather than cut out

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Written:
    """`packs`: keys and sizes. `places`: array of PLACE, one for each frame that was to be written; `pack` counts from
    0 in `packs`."""

    packs: tuple[tuple[str, int], ...]
    places: Array

    @property
    def stored_bytes(self) -> int:
        return sum(size for _, size in self.packs)


class Packs:
    """One writer's packs of one checkpoint. `frames`: array of FRAME, what is to be written; `frame(i)`: the raw bytes
    of the i-th, contiguous, unchanged until `write` returns; called from several threads. `key(n)`: of the n-th pack.
    `pack_bytes`: raw bytes per pack, about. `cancel`: set it to give up."""

    def __init__(
        self,
        backend: Backend,
        frames: Array,
        frame: Callable[[int], memoryview],
        key: Callable[[int], str],
        codec: codecs.CodecOption,
        pack_bytes: int,
        pace: PutRateLimit,
        cancel: threading.Event,
    ) -> None:
        self._backend, self._frames, self._frame, self._key = backend, frames, frame, key
        self._codec, self._pack_bytes, self._pace, self._cancel = codec, pack_bytes, pace, cancel
        self._staged: list[tuple[int, int, int]] = frames[["length", "hash_hi", "hash_lo"]].tolist()
        self._places: Array = np.zeros(len(frames), PLACE)
        self._failed = threading.Event()
        self._encoders = threading.BoundedSemaphore(max(1, len(os.sched_getaffinity(0))))
        self._benches: queue.SimpleQueue[_Bench] = queue.SimpleQueue()

    def write(self) -> Written:
        """When it returns or raises, no thread of it is left. Errors: whatever the first failing pack met; SaveFailed
        where it was cancelled."""
        groups = self._groups()
        return Written(tuple(self._write_all(groups)) if groups else (), self._places)

    def _groups(self) -> list[Indices]:
        """Frames by pack: runs of about as many raw bytes each, in order, which keeps a tensor's frames together."""
        if not len(self._frames):
            return []
        ends = np.cumsum(self._frames["length"].astype(np.int64))
        size = max(self._pack_bytes, -(-int(ends[-1]) // PACKS_MAX))
        return np.split(np.arange(len(ends)), np.flatnonzero(np.diff((ends - 1) // size)) + 1)

    def _write_all(self, groups: list[Indices]) -> list[tuple[str, int]]:
        largest = max(bytes_of(self._frames[group]) for group in groups)
        puts = PUTS_MAX if self._codec == "raw" else max(1, min(PUTS_MAX, ENCODED_BYTES_MAX // largest))
        with Tasks("commit", pool_size=min(puts, len(groups))) as tasks:
            futures = [tasks.submit(self._write_one, number, group) for number, group in enumerate(groups)]
            try:
                for future in futures:
                    future.settle()
            except BaseException:
                self._failed.set()
                raise
        ended = [future for future in futures if not future.cancelled()]
        errors = [error for future in ended if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, _Stopped)), errors[0])
        return [future.result() for future in futures]

    def _write_one(self, number: int, group: Indices) -> tuple[str, int]:
        key = self._key(number)
        try:
            bench = self._benches.get_nowait()
        except queue.Empty:
            bench = _Bench()
        try:
            with self._encoders:
                chunks = self._slices(number, group) if self._codec == "raw" else self._encoded(number, group, bench)
            size = sum(memoryview(chunk).nbytes for chunk in chunks)
            self._pace.take(size, self._check)
            self._check()
            self._backend.put(key, chunks, cancel=self._cancel)
        except BaseException:
            self._failed.set()  # whatever has not begun to put does not
            raise
        self._benches.put(bench)
        return key, size

    def _slices(self, number: int, group: Indices) -> list[Buffer]:
        """The frames' own memory; the alignment between two of them is part of the slice."""
        slices, places = _Slices(), []
        for i in group.tolist():
            raw = self._checked_frame(i)
            places.append((number, slices.add(raw), raw.nbytes, Codec.RAW))
        self._places[group] = places
        return slices.chunks

    def _encoded(self, number: int, group: Indices, bench: _Bench) -> list[Buffer]:
        frames, at, places = self._frames[group], 0, []
        room = bench.room(bytes_of(frames))
        for i, dtype in zip(group.tolist(), frames["dtype"].tolist(), strict=True):
            raw = self._checked_frame(i)
            codec, data = codecs.encode(self._codec, dtype, raw, bench.scratch)
            length = memoryview(data).nbytes
            room[at : at + length] = memoryview(data).cast("B")
            places.append((number, at, length, codec))
            at += length
        self._places[group] = places
        return [room[:at]]

    def _checked_frame(self, i: int) -> memoryview:
        self._check()
        raw = self._frame(i).cast("B")
        if (raw.nbytes, *frame_hash(raw)) != self._staged[i]:
            raise SaveFailed(f"frame {i} has changed in memory since it was staged")
        return raw

    def _check(self) -> None:
        if self._cancel.is_set():
            raise SaveFailed("it was cancelled")
        if self._failed.is_set():
            raise _Stopped("another pack failed")


class _Stopped(SaveFailed):
    """Not the cause: another pack's failure is."""


class _Bench:
    """What one thread works with: the codec's scratch memory, and a buffer for the pack it fills."""

    def __init__(self) -> None:
        self.scratch = codecs.CodecScratch()
        self._buffer = np.empty(0, np.uint8)

    def room(self, size: int) -> memoryview:
        if len(self._buffer) < size:
            self._buffer = np.empty(size, np.uint8)
        return self._buffer.data


class _Slices:
    """Chunks of memory behind one another in a pack; what lies behind one another in memory too is one chunk."""

    def __init__(self) -> None:
        self.chunks: list[Buffer] = []
        self._size = 0
        self._last: tuple[object, int, int] = (None, 0, 0)  # the object that the last chunk is [start, stop) of

    def add(self, raw: memoryview) -> int:
        """Where in the pack it begins."""
        whole = memoryview(raw.obj)
        start = _address(raw) - _address(whole) if whole.c_contiguous else 0
        stop = start + raw.nbytes
        memory, begin, end = self._last
        if memory is whole.obj and whole.c_contiguous and 0 <= start - end <= GAP_BYTES_MAX:
            self.chunks[-1] = whole.cast("B")[begin:stop]
            self._size += start - end
        else:
            begin = start
            self.chunks.append(raw)
        self._last = (whole.obj, begin, stop)
        self._size += raw.nbytes
        return self._size - raw.nbytes


class PutRateLimit:
    """Holds puts back so that no more than `bytes_per_s` are sent on average, from the start of a commit to the end of
    any put: a pack is paid for before it goes, with time that has passed meanwhile. None: no limit."""

    def __init__(self, clock: Clock, bytes_per_s: float | None) -> None:
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._free_at_s = clock.now_s()
        self._lock = threading.Lock()

    def take(self, size: int, check: Callable[[], None]) -> None:
        """Returns when `size` bytes may be sent. `check` is called every second meanwhile, and may raise."""
        if self._bytes_per_s is None:
            return
        price_s = size / self._bytes_per_s
        with self._lock:
            self._free_at_s = paid_at_s = max(self._free_at_s, self._clock.now_s()) + price_s
        try:
            while (left_s := paid_at_s - self._clock.now_s()) > 0:
                check()
                self._clock.sleep_s(min(left_s, 1.0))
        except BaseException:
            with self._lock:
                self._free_at_s -= price_s  # it is not sent: the next commit does not pay for it
            raise


def bytes_of(frames: Array) -> int:
    return int(frames["length"].sum(dtype=np.int64))


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def pack_keys(identity: Identity, owner: str, writer: str) -> Callable[[int], str]:
    return lambda number: keys.pack_key(identity, owner, writer, number)
