"""From a frame into tensors: the last copy of a restore, and the check of the bytes."""

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
from ckpt.layout.reshard import Cut, Want, cuts, per_dimension, whole_run
from ckpt.trainer.state.names import some
from ckpt.trainer.state.pieces import flat_bytes
from ckpt.trainer.state.shard import changing, dense_bytes
from ckpt.types import ITEMSIZE

# Bytes copied before they are hashed: still in the cache then, and long enough that the C library does not take its
# path for short copies, which is three times slower from freshly mapped memory.
BLOCK_BYTES = 2 << 20
ROOMS_MAX = 16  # frames on their way to devices at once

_Marks = list[tuple[torch.device, torch.cuda.Event]]
_Room = tuple[torch.Tensor, _Marks]  # and until when it is read


class Filler:
    """Puts frames into the tensors that want them. `tensors[i]`: the destination of `wants[i]`, on any device and with
    any strides; gradients do not notice. Frames may be given in any order, by several threads at once, then `check` is
    due.

    Those of `whole` may be put into their `room` by the caller, who checks their hash; see fetch.Rooms. `written` gets
    each frame before anything of it is copied.

    Errors: those of `cuts`.
    """

    def __init__(
        self,
        manifest: Manifest,
        wants: Sequence[Want],
        tensors: Sequence[torch.Tensor],
        written: set[int] | None = None,
    ) -> None:
        self._wants, self._tensors = wants, tensors
        self._written = set() if written is None else written
        self._meeting = _meeting(tensors)
        self._lift = Lift({tensor.device for tensor in tensors if tensor.is_cuda})
        self._landed: list[tuple[int, torch.Tensor, tuple[int, int]]] = []  # of those that meet: want, place, hash
        self._cuts: dict[int, list[Cut]] = {}
        for cut in cuts(manifest, wants):
            self._cuts.setdefault(cut.frame, []).append(cut)
        self._hi, self._lo = manifest.frames["hash_hi"].tolist(), manifest.frames["hash_lo"].tolist()
        lengths = manifest.frames["length"].tolist()
        self._runs: dict[int, npt.NDArray[np.uint8]] = {}  # where a frame goes as a whole
        flats = [None if n in self._meeting else _flat(tensor) for n, tensor in enumerate(tensors)]
        for frame, mine in self._cuts.items():
            want, flat = mine[0].want, flats[mine[0].want]
            itemsize = ITEMSIZE[wants[want].dtype]
            # A tensor of another itemsize is refused when it is cut; it must not be written as bytes before that.
            if flat is not None and itemsize == tensors[want].element_size():
                first = whole_run(mine, itemsize, lengths[frame])
                if first is not None:
                    self._runs[frame] = flat[first * itemsize : first * itemsize + lengths[frame]]

    @property
    def frames(self) -> Collection[int]:
        return self._cuts.keys()

    def __call__(self, frame: int, raw: memoryview) -> bool:
        """Fills in all that `raw`, the frame's raw bytes, holds; whether its hash is right. Where it is not the
        tensors may hold wrong bytes until the frame comes again."""
        self._written.add(frame)
        expected = (self._hi[frame], self._lo[frame])
        run = self._runs.get(frame)
        if run is not None:
            return copy_run(raw, run) == expected
        mine = self._cuts[frame]
        if any(self._tensors[cut.want].is_cuda for cut in mine):
            return self._lift(raw, expected, lambda data: self._fill(mine, data))
        if frame_hash(raw) != expected:
            return False
        self._fill(mine, torch.frombuffer(raw, dtype=torch.uint8))
        return True

    def _fill(self, cuts: Sequence[Cut], data: torch.Tensor) -> None:
        for cut in cuts:
            copy_cut(cut, data, self._tensors[cut.want])
            if cut.want in self._meeting:
                pairs = _pairs(cut, data, self._tensors[cut.want])
                self._landed += [(cut.want, part, _hash(source)) for source, part in pairs]

    @property
    def whole(self) -> Collection[int]:
        return self._runs.keys()

    def room(self, frame: int) -> memoryview:
        self._written.add(frame)
        return self._runs[frame].data

    def is_right(self, frame: int, value: tuple[int, int]) -> bool:
        return value == (self._hi[frame], self._lo[frame])

    def check(self) -> None:
        """Once all is there: whether all tensors still hold what they were filled with.

        Errors: StateMismatch names those that share memory, of which the checkpoint has different values."""
        self._lift.settle()
        names = sorted({self._wants[want].name for want, part, hash in self._landed if _hash(part) != hash})
        if names:
            raise StateMismatch(
                f"{some(names)} shared memory with other tensors of the state, and the checkpoint has other values for "
                "those, so that not all of them could be restored. Give each memory of its own before the start "
                "(tensor.clone()), or register only one of them"
            )


class Lift:
    """Takes frames to CUDA devices by way of page-locked memory, from where a device reads several times as fast and
    while the next frames are copied and checked. Of a damaged frame no device gets anything. Thread-safe.

    It starts after all that these devices were told to do before."""

    def __init__(self, devices: Collection[torch.device]) -> None:
        self._devices = devices
        self._rooms: queue.SimpleQueue[_Room] = queue.SimpleQueue()
        self._made = 0
        self._lock = threading.Lock()
        self.settle()

    def __call__(self, raw: memoryview, expected: tuple[int, int], fill: Callable[[torch.Tensor], None]) -> bool:
        """Whether the frame is right; then `fill` was called with it, and enqueued what it does."""
        room, reads = self._take()
        try:
            self._wait(reads)
            reads = []
            if room.nbytes < len(raw):
                room = _locked(len(raw))
            data = room[: len(raw)]
            np.copyto(data.numpy(), np.frombuffer(raw, dtype=np.uint8))
            if frame_hash(data.numpy().data) != expected:  # in one piece: each more would wait for the GIL once more
                return False
            try:
                fill(data)
            finally:  # also where it got only so far
                reads = self._marks()
            return True
        finally:
            self._rooms.put((room, reads))

    def settle(self) -> None:
        """Returns when all that these devices were told to do is done."""
        for device in self._devices:
            torch.cuda.synchronize(device)

    def _take(self) -> _Room:
        with self._lock:
            is_new = self._made < ROOMS_MAX
            self._made += is_new
        return (torch.empty(0, dtype=torch.uint8, device="cpu"), []) if is_new else self._rooms.get()

    def _marks(self) -> _Marks:
        """Of what this thread has enqueued so far."""
        events: _Marks = [(device, torch.cuda.Event()) for device in self._devices]  # type: ignore[no-untyped-call]
        for device, event in events:
            event.record(torch.cuda.current_stream(device))
        return events

    def _wait(self, marks: _Marks) -> None:
        for device, event in marks:
            with torch.cuda.device(device):  # a thread begins on device 0, and would start CUDA there
                event.synchronize()


def _locked(nbytes: int) -> torch.Tensor:
    room = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    with contextlib.suppress(RuntimeError):  # no more can be locked: it is slower
        return room.pin_memory()
    return room


def _meeting(tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    """Those whose memory, from the first byte to the last, meets that of another."""
    spans = []
    for n, tensor in enumerate(tensors):
        if tensor.numel():
            first = torch.Tensor.data_ptr(tensor)
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((str(tensor.device), first, first + (last + 1) * tensor.element_size(), n))
    found: set[int] = set()
    before: tuple[str, int, int, int] | None = None  # of those so far the one that reaches furthest
    for span in sorted(spans):
        if before is not None and span[0] == before[0] and span[1] < before[2]:
            found |= {span[3], before[3]}
            before = max(before, span, key=lambda each: each[2])
        else:
            before = span
    return frozenset(found)


def _hash(part: torch.Tensor) -> tuple[int, int]:
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
    """Copies what `cut` says of `frame` (uint8, one dimension: its raw bytes) into `tensor`, the destination of the
    cut's want; on a device, on its current stream, if the frame lies in page-locked memory.

    Errors: DamagedData for a cut that does not lie in the frame or the tensor.
    """
    for source, part in _pairs(cut, frame, tensor):
        with changing(part):
            part.copy_(source, non_blocking=part.is_cuda)


def _pairs(cut: Cut, frame: torch.Tensor, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of one dtype and shape: what of the frame goes where."""
    whole = tensor.detach()
    if len(cut.at) == 1 and whole.is_contiguous():
        yield _pair(cut, frame, whole.view(-1))
    else:
        for each in per_dimension(cut, tuple(whole.shape), whole.element_size()):
            yield _pair(each, frame, whole)


def _pair(cut: Cut, frame: torch.Tensor, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`cut`: with one number for each dimension of `part`."""
    itemsize = part.element_size()
    span = 1 + sum((n - 1) * s for n, s in zip(cut.shape, cut.strides, strict=True))
    fits = len(cut.shape) == len(cut.at) == part.ndim and all(
        a >= 0 and n > 0 and s >= 0 and a + n <= m
        for a, n, s, m in zip(cut.at, cut.shape, cut.strides, part.shape, strict=True)
    )
    if not fits or cut.offset < 0 or cut.offset + span * itemsize > frame.numel():
        raise DamagedData(f"frame {cut.frame}: a part of shape {cut.shape} at byte {cut.offset} is not in it")
    for dim, (start, length) in enumerate(zip(cut.at, cut.shape, strict=True)):
        part = part.narrow(dim, start, length)
    source = frame[cut.offset : cut.offset + span * itemsize].view(part.dtype)
    return source.as_strided(cut.shape, cut.strides), part


def _flat(tensor: torch.Tensor) -> npt.NDArray[np.uint8] | None:
    """The tensor's bytes, where they are one run of this host's memory."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return None
    flat: npt.NDArray[np.uint8] = dense_bytes(tensor.detach()).numpy()
    return flat
