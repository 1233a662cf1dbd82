"""The filler: puts frames into tensors, which is the last copy of a restore, and checks their bytes."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ckpt.errors import DamagedData, StateMismatch
from ckpt.format.frames import FrameHasher, frame_hash
from ckpt.format.manifest import Manifest
from ckpt.layout.reshard import Cut, Want, plan_cuts, split_dimensions, whole_run
from ckpt.trainer.state.names import shorten_names
from ckpt.trainer.state.pieces import flat_bytes
from ckpt.trainer.state.shard import allow_in_place, dense_bytes
from ckpt.types import ITEMSIZE

# Bytes that are copied, then hashed while they are still in the cache. For fewer bytes the C library may take its path
# for short copies, which is three times slower from freshly mapped memory.
BLOCK_BYTES = 2 << 20
BUFFERS_MAX = 16  # frames in transfer to devices at once

_DeviceEvents = list[tuple[torch.device, torch.cuda.Event]]
_Buffer = tuple[torch.Tensor, _DeviceEvents]  # a buffer, and the events after which it may be reused


class Filler:
    """Puts frames into the tensors that want them. `tensors[i]`: the destination of `wants[i]`, on any device, with any
    strides; autograd does not notice. Frames may be given in any order, by several threads at once. Call
    `check_overlaps` at the end. A frame of `whole_frames` may instead be put into its `frame_memory` by the caller, who
    checks its hash. `has_written`: whether a tensor may have got bytes, right or wrong. Errors: as plan_cuts()."""

    def __init__(self, manifest: Manifest, wants: Sequence[Want], tensors: Sequence[torch.Tensor]) -> None:
        self._wants, self._tensors = wants, tensors
        self.has_written = False
        self._overlapping = _find_overlapping(tensors)
        self._lift = Lift({tensor.device for tensor in tensors if tensor.is_cuda})
        # (want, destination, hash of the bytes) for tensors whose memory overlaps that of another.
        self._overlap_hashes: list[tuple[int, torch.Tensor, tuple[int, int]]] = []
        self._cuts_by_frame: dict[int, list[Cut]] = {}
        for cut in plan_cuts(manifest, wants):
            self._cuts_by_frame.setdefault(cut.frame, []).append(cut)
        self._hash_high, self._hash_low = manifest.frames["hash_hi"].tolist(), manifest.frames["hash_lo"].tolist()
        lengths = manifest.frames["length"].tolist()
        self._runs_by_frame: dict[int, npt.NDArray[np.uint8]] = {}  # the memory that a frame fills as a whole
        flats = [None if n in self._overlapping else _flat_memory(tensor) for n, tensor in enumerate(tensors)]
        for frame, mine in self._cuts_by_frame.items():
            want, flat = mine[0].want, flats[mine[0].want]
            itemsize = ITEMSIZE[wants[want].dtype]
            # A tensor of another itemsize is refused when it is cut. It must not be written as bytes before.
            if flat is not None and itemsize == tensors[want].element_size():
                first = whole_run(mine, itemsize, lengths[frame])
                if first is not None:
                    self._runs_by_frame[frame] = flat[first * itemsize : first * itemsize + lengths[frame]]

    @property
    def frames(self) -> Collection[int]:
        return self._cuts_by_frame.keys()

    def __call__(self, frame: int, raw: memoryview) -> bool:
        """Fills in all that `raw`, the frame's raw bytes, holds. Returns whether its hash is right. If it is not, the
        tensors may hold wrong bytes until the frame comes again."""
        self.has_written = True
        expected = (self._hash_high[frame], self._hash_low[frame])
        run = self._runs_by_frame.get(frame)
        if run is not None:
            return copy_run(raw, run) == expected
        mine = self._cuts_by_frame[frame]
        if any(self._tensors[cut.want].is_cuda for cut in mine):
            return self._lift(raw, expected, lambda data: self._fill(mine, data))
        if frame_hash(raw) != expected:
            return False
        self._fill(mine, torch.frombuffer(raw, dtype=torch.uint8))
        return True

    def _fill(self, cuts: Sequence[Cut], data: torch.Tensor) -> None:
        for cut in cuts:
            copy_cut(cut, data, self._tensors[cut.want])
            if cut.want in self._overlapping:
                pairs = _pairs(cut, data, self._tensors[cut.want])
                self._overlap_hashes += [(cut.want, part, _hash_tensor(source)) for source, part in pairs]

    @property
    def whole_frames(self) -> Collection[int]:
        """The frames that are taken as one run."""
        return self._runs_by_frame.keys()

    def frame_memory(self, frame: int) -> memoryview:
        """The memory to be filled with the bytes of one of `whole_frames`."""
        self.has_written = True
        return self._runs_by_frame[frame].data

    def has_right_hash(self, frame: int, value: tuple[int, int]) -> bool:
        """Whether `value` is the hash of the frame's bytes."""
        return value == (self._hash_high[frame], self._hash_low[frame])

    def check_overlaps(self) -> None:
        """Checks, once all frames are there, that all tensors still hold what they were filled with. Errors:
        StateMismatch names tensors that share memory, and for which the checkpoint has different values."""
        self._lift.synchronize()
        names = sorted(
            {self._wants[want].name for want, part, hash in self._overlap_hashes if _hash_tensor(part) != hash}
        )
        if names:
            raise StateMismatch(
                f"{shorten_names(names)} shared memory with other tensors of the state, and the checkpoint has other "
                "values for "
                "those, so that not all of them could be restored. Give each memory of its own before the start "
                "(tensor.clone()), or register only one of them"
            )


class Lift:
    """Takes frames to CUDA devices by way of page-locked memory. A device reads that several times as fast, and while
    the next frames are copied and checked. No byte of a damaged frame reaches a device. Thread-safe. Before it starts,
    it waits for all that was enqueued on these devices."""

    def __init__(self, devices: Collection[torch.device]) -> None:
        self._devices = devices
        self._buffers: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        self._buffer_count = 0
        self._lock = threading.Lock()
        self.synchronize()

    def __call__(self, raw: memoryview, expected: tuple[int, int], fill: Callable[[torch.Tensor], None]) -> bool:
        """Whether the frame is right. If it is, `fill` was called with its bytes, and has enqueued its copies."""
        room, reads = self._take_buffer()
        try:
            self._wait_for_events(reads)
            reads = []
            if room.nbytes < len(raw):
                room = _allocate_pinned(len(raw))
            data = room[: len(raw)]
            np.copyto(data.numpy(), np.frombuffer(raw, dtype=np.uint8))
            # Hashed in one piece: each further call would wait for the GIL again.
            if frame_hash(data.numpy().data) != expected:
                return False
            try:
                fill(data)
            finally:
                # Also if only some of the copies were enqueued.
                reads = self._record_events()
            return True
        finally:
            self._buffers.put((room, reads))

    def synchronize(self) -> None:
        """Waits for all that is enqueued on these devices."""
        for device in self._devices:
            torch.cuda.synchronize(device)

    def _take_buffer(self) -> _Buffer:
        with self._lock:
            is_new = self._buffer_count < BUFFERS_MAX
            self._buffer_count += is_new
        return (torch.empty(0, dtype=torch.uint8, device="cpu"), []) if is_new else self._buffers.get()

    def _record_events(self) -> _DeviceEvents:
        """Events after all that this thread has enqueued so far."""
        events: _DeviceEvents = [(device, torch.cuda.Event()) for device in self._devices]  # type: ignore[no-untyped-call]
        for device, event in events:
            event.record(torch.cuda.current_stream(device))
        return events

    def _wait_for_events(self, marks: _DeviceEvents) -> None:
        for device, event in marks:
            # A thread begins on device 0, and would initialise CUDA there.
            with torch.cuda.device(device):
                event.synchronize()


def _allocate_pinned(nbytes: int) -> torch.Tensor:
    room = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    # If no more memory can be locked, copies are slower.
    with contextlib.suppress(RuntimeError):
        return room.pin_memory()
    return room


def _find_overlapping(tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    """The indices of tensors whose memory, from the first byte to the last, overlaps that of another."""
    spans = []
    for n, tensor in enumerate(tensors):
        if tensor.numel():
            first = torch.Tensor.data_ptr(tensor)
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((str(tensor.device), first, first + (last + 1) * tensor.element_size(), n))
    found: set[int] = set()
    before: tuple[str, int, int, int] | None = None  # the span so far that reaches furthest
    for span in sorted(spans):
        if before is not None and span[0] == before[0] and span[1] < before[2]:
            found |= {span[3], before[3]}
            before = max(before, span, key=lambda each: each[2])
        else:
            before = span
    return frozenset(found)


def _hash_tensor(part: torch.Tensor) -> tuple[int, int]:
    return frame_hash(flat_bytes(part).cpu().numpy().data)


def copy_run(raw: memoryview, target: npt.NDArray[np.uint8]) -> tuple[int, int]:
    """Copies `raw` into `target`, of the same size, and returns the hash of what landed there."""
    source = np.frombuffer(raw, dtype=np.uint8)
    hasher = FrameHasher()
    for first in range(0, len(source), BLOCK_BYTES):
        landed = target[first : first + BLOCK_BYTES]
        np.copyto(landed, source[first : first + BLOCK_BYTES])
        hasher.update(landed.data)
    return hasher.result()


def copy_cut(cut: Cut, frame: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copies the part of `frame` (uint8, one dimension: its raw bytes) that `cut` says into `tensor`, the destination
    of the cut's want. To a device it copies on the current stream, asynchronously if the frame lies in page-locked
    memory. Errors: DamagedData for a cut that does not lie in the frame or the tensor."""
    for source, part in _pairs(cut, frame, tensor):
        with allow_in_place(part):
            part.copy_(source, non_blocking=part.is_cuda)


def _pairs(cut: Cut, frame: torch.Tensor, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(part of the frame, part of the tensor): views of one dtype and shape."""
    whole = tensor.detach()
    if len(cut.box_offset) == 1 and whole.is_contiguous():
        yield _pair(cut, frame, whole.view(-1))
    else:
        for each in split_dimensions(cut, tuple(whole.shape), whole.element_size()):
            yield _pair(each, frame, whole)


def _pair(cut: Cut, frame: torch.Tensor, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One such pair. `cut`: with one number for each dimension of `part`."""
    itemsize = part.element_size()
    span = 1 + sum((n - 1) * s for n, s in zip(cut.shape, cut.strides, strict=True))
    fits = len(cut.shape) == len(cut.box_offset) == part.ndim and all(
        a >= 0 and n > 0 and s >= 0 and a + n <= m
        for a, n, s, m in zip(cut.box_offset, cut.shape, cut.strides, part.shape, strict=True)
    )
    if not fits or cut.offset < 0 or cut.offset + span * itemsize > frame.numel():
        raise DamagedData(f"frame {cut.frame}: a part of shape {cut.shape} at byte {cut.offset} is not in it")
    for dim, (start, length) in enumerate(zip(cut.box_offset, cut.shape, strict=True)):
        part = part.narrow(dim, start, length)
    source = frame[cut.offset : cut.offset + span * itemsize].view(part.dtype)
    return source.as_strided(cut.shape, cut.strides), part


def _flat_memory(tensor: torch.Tensor) -> npt.NDArray[np.uint8] | None:
    """The bytes of a tensor if they are one run of this host's memory; else None."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return None
    flat: npt.NDArray[np.uint8] = dense_bytes(tensor.detach()).numpy()
    return flat
