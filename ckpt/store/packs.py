"""Writing frames into packs: how they are divided into packs, and the threads that encode and put them.

One thread encodes and puts one pack; several packs are in work at once, so encoding overlaps with sending. The raw
codec copies nothing. Other codecs collect the encoded frames in one buffer per thread, which is reused.
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
from ckpt.format.manifest import PLACE
from ckpt.layout.layout import Array
from ckpt.storage.contract import Backend, Buffer
from ckpt.threads import Tasks
from ckpt.types import CodecOption

PACK_BYTES = 64 << 20
PACKS_MAX = 512  # per owner and checkpoint; beyond it, packs grow
PUTS_MAX = 4  # packs being put at once
ENCODED_BYTES_MAX = 256 << 20  # memory for encoded packs (one pack is always allowed)

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Written:
    """What one writer has put. `packs`: keys and sizes. `places`: array of PLACE, one per frame that was to be written;
    `pack` is an index into `packs`."""

    packs: tuple[tuple[str, int], ...]
    places: Array

    @property
    def stored_bytes(self) -> int:
        return sum(size for _, size in self.packs)

    def of_frames(self, numbers: Indices) -> Written:
        """The part of these frames, with only the packs that they lie in."""
        places = self.places[numbers]
        used, places["pack"] = np.unique(places["pack"], return_inverse=True)
        return Written(tuple(self.packs[pack] for pack in used.tolist()), places)


class Packs:
    """The packs that one writer puts for one checkpoint. `frames`: array of FRAME, the frames to write. `frame(i)`: the
    raw bytes of the i-th, contiguous; called from several threads; the bytes must not change until `write` returns.
    `key(n)`: the key of the n-th pack. `pack_bytes`: approximate raw bytes per pack. `cancel`: set it to stop."""

    def __init__(
        self,
        backend: Backend,
        frames: Array,
        frame: Callable[[int], memoryview],
        key: Callable[[int], str],
        codec: CodecOption,
        pack_bytes: int,
        pace: PutRateLimit,
        cancel: threading.Event,
    ) -> None:
        self._backend, self._frames, self._frame_bytes, self._pack_key = backend, frames, frame, key
        self._codec, self._pack_bytes, self._rate_limit, self._cancel = codec, pack_bytes, pace, cancel
        self._staged_hashes: list[tuple[int, int, int]] = frames[["length", "hash_hi", "hash_lo"]].tolist()
        self._places: Array = np.zeros(len(frames), PLACE)
        self._failed_event = threading.Event()
        self._encoder_slots = threading.BoundedSemaphore(max(1, len(os.sched_getaffinity(0))))
        self._idle_scratch: queue.SimpleQueue[_Bench] = queue.SimpleQueue()

    def write(self) -> Written:
        """Puts all packs. When it returns or raises, none of its threads is left. Errors: the error of the first pack
        that failed; SaveFailed if cancelled."""
        groups = self._group_frames()
        return Written(tuple(self._write_all(groups)) if groups else (), self._places)

    def _group_frames(self) -> list[Indices]:
        """The frames by pack: consecutive runs of about equal raw size, which keep a tensor's frames together."""
        if not len(self._frames):
            return []
        ends = np.cumsum(self._frames["length"].astype(np.int64))
        size = max(self._pack_bytes, -(-int(ends[-1]) // PACKS_MAX))
        return np.split(np.arange(len(ends)), np.flatnonzero(np.diff((ends - 1) // size)) + 1)

    def _write_all(self, groups: list[Indices]) -> list[tuple[str, int]]:
        largest = max(raw_bytes_of(self._frames[group]) for group in groups)
        puts = PUTS_MAX if self._codec == "raw" else max(1, min(PUTS_MAX, ENCODED_BYTES_MAX // largest))
        with Tasks("commit", pool_size=min(puts, len(groups))) as tasks:
            futures = [tasks.submit(self._write_one, number, group) for number, group in enumerate(groups)]
            try:
                for future in futures:
                    future.wait_until_done()
            except BaseException:
                self._failed_event.set()
                raise
        ended = [future for future in futures if not future.cancelled()]
        errors = [error for future in ended if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, _Stopped)), errors[0])
        return [future.result() for future in futures]

    def _write_one(self, number: int, group: Indices) -> tuple[str, int]:
        key = self._pack_key(number)
        try:
            bench = self._idle_scratch.get_nowait()
        except queue.Empty:
            bench = _Bench()
        try:
            with self._encoder_slots:
                chunks = self._chunks(number, group, bench)
            size = sum(memoryview(chunk).nbytes for chunk in chunks)
            self._rate_limit.await_budget(size, self._check_stopped)
            self._check_stopped()
            self._backend.put(key, chunks, cancel=self._cancel)
        except BaseException:
            # Packs whose put has not begun are not put any more.
            self._failed_event.set()
            raise
        self._idle_scratch.put(bench)
        return key, size

    def _chunks(self, number: int, group: Indices, bench: _Bench) -> list[Buffer]:
        """The frames' own memory for the raw codec; else one buffer of `bench`."""
        frames, at, places = self._frames[group], 0, []
        raws: list[Buffer] = []
        room = memoryview(b"") if self._codec == "raw" else bench.pack_buffer(raw_bytes_of(frames))
        for i, dtype in zip(group.tolist(), frames["dtype"].tolist(), strict=True):
            raw = self._checked_frame(i)
            codec, data = codecs.encode(self._codec, dtype, raw, bench.scratch)
            length = memoryview(data).nbytes
            if self._codec == "raw":
                raws.append(raw)
            else:
                room[at : at + length] = memoryview(data).cast("B")
            places.append((number, at, length, codec))
            at += length
        self._places[group] = places
        return raws or [room[:at]]

    def _checked_frame(self, i: int) -> memoryview:
        self._check_stopped()
        raw = self._frame_bytes(i).cast("B")
        if (raw.nbytes, *frame_hash(raw)) != self._staged_hashes[i]:
            raise SaveFailed(f"frame {i} has changed in memory since it was staged")
        return raw

    def _check_stopped(self) -> None:
        if self._cancel.is_set():
            raise SaveFailed("the commit was cancelled")
        if self._failed_event.is_set():
            raise _Stopped("another pack failed")


class _Stopped(SaveFailed):
    """The error of a pack that stopped because another pack failed. It is never the cause."""


class _Bench:
    """The working memory of one thread: the codec's scratch, and a buffer for the pack that it fills."""

    def __init__(self) -> None:
        self.scratch = codecs.CodecScratch()
        self._buffer = np.empty(0, np.uint8)

    def pack_buffer(self, size: int) -> memoryview:
        if len(self._buffer) < size:
            self._buffer = np.empty(size, np.uint8)
        return self._buffer.data


class PutRateLimit:
    """A rate limit: delays puts so that at most `bytes_per_s` are sent on average. None: no limit. The average runs
    from the start of a commit to the end of any put. So a pack is paid for before it is sent, with time that has
    passed."""

    def __init__(self, clock: Clock, bytes_per_s: float | None) -> None:
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._next_put_s = clock.now_s()
        self._lock = threading.Lock()

    def await_budget(self, size: int, check: Callable[[], None]) -> None:
        """Returns when `size` bytes may be sent. Meanwhile `check` is called every second, and may raise."""
        if self._bytes_per_s is None:
            return
        price_s = size / self._bytes_per_s
        with self._lock:
            self._next_put_s = paid_at_s = max(self._next_put_s, self._clock.now_s()) + price_s
        try:
            while (left_s := paid_at_s - self._clock.now_s()) > 0:
                check()
                self._clock.sleep_s(min(left_s, 1.0))
        except BaseException:
            with self._lock:
                # These bytes are not sent, so the next commit does not pay for them.
                self._next_put_s -= price_s
            raise


def raw_bytes_of(frames: Array) -> int:
    return int(frames["length"].sum(dtype=np.int64))
