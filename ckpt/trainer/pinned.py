"""The copier for tensors on CUDA devices: side streams into arena pages that are locked in place.

- The side stream of a device starts after what the current stream holds, so it reads the state as of the boundary.
- Small pieces (buffers that change in forward among them) are cloned on the current stream into one device buffer
  laid out like the arena, which then goes over in a few large transfers: they cost no waiting.
- Large pieces are read by the side stream. An eager copy makes the current stream wait for that, on the device; a
  late one leaves the waiting to `fence`.
- Sources are recorded on the side stream, so that the allocator does not hand out their memory while it is read.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckpt.errors import CkptError
from ckpt.trainer.copier import Copier, CpuCopier, Job, Ticket
from ckpt.trainer.pieces import Piece, flat_bytes, is_cuda_used, later, split, where

CLONED_BYTES = 1 << 20  # pieces up to this are cloned first
SCRATCH_BYTES = 64 << 20  # how much of an arena is brought back to a device at once for a comparison


def make_copier() -> Copier:
    """The copier for this process: with CUDA where CUDA is in use (asking does not start it)."""
    return CudaCopier(CpuCopier()) if is_cuda_used() else CpuCopier()


class CudaCopier:
    """Takes the pieces of CUDA devices itself and gives those in host memory to `host`, which it then owns.

    `cuda` and `device_type` are torch.cuda and "cuda", except where a test stands in for the device."""

    blocking = False

    def __init__(self, host: CpuCopier, cuda: Any = torch.cuda, device_type: str = "cuda") -> None:
        self.host = host
        self.cuda = cuda
        self._device_type = device_type
        self._streams: dict[torch.device, Any] = {}
        self._locked: dict[int, int] = {}  # address -> bytes
        self._lock = threading.Lock()

    def pin(self, data: memoryview) -> None:
        """Page-locks the region where it lies. Errors: CkptError with CUDA's own message; copies work all the same,
        while the host waits."""
        address, nbytes = where(data)
        with self._lock:
            if not nbytes:
                return
            status = self.cuda.cudart().cudaHostRegister(address, nbytes, 1)  # 1: for all contexts
            if int(status) != 0:
                # It stays behind as CUDA's last error, which the next kernel of the training would raise: one of ours
                # takes it.
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=self._device_type).add_(1)
            _check(self.cuda, status)
            self._locked[address] = nbytes

    def unpin(self, data: memoryview) -> None:
        address, _ = where(data)
        with self._lock:
            if self._locked.pop(address, None) is not None:
                _check(self.cuda, self.cuda.cudart().cudaHostUnregister(address))

    def prepare(self, pieces: Sequence[Piece]) -> CudaJob:
        host, by_device = self._divide(pieces)
        return CudaJob(self, self.host.prepare(host), by_device)

    def same(self, pieces: Sequence[Piece]) -> Callable[[], list[int]]:
        host, by_device = self._divide(pieces)
        verdicts = [(host, self.host.same(host))]
        for device, group in by_device.items():
            parts = [(whole, part) for whole in group for part in split(whole, SCRATCH_BYTES)]
            flags = torch.zeros(len(parts), dtype=torch.bool, device=device)
            with self.cuda.device(device):
                self.cuda.current_stream(device).wait_stream(self.stream(device))  # the targets have landed
                for n, (_, part) in enumerate(parts):
                    back = flat_bytes(part.target).to(device, non_blocking=True)
                    flags[n] = (flat_bytes(part.source) != back).any()
                verdicts.append((group, _differing(group, [whole for whole, _ in parts], later(flags))))
        index = {id(piece): n for n, piece in enumerate(pieces)}
        return lambda: sorted(index[id(group[n])] for group, verdict in verdicts for n in verdict())

    def stream(self, device: torch.device) -> Any:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = self.cuda.Stream(device)
            return self._streams[device]

    def close(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
        with self._lock:
            for address in list(self._locked):
                _check(self.cuda, self.cuda.cudart().cudaHostUnregister(address))
                del self._locked[address]
        self.host.close()

    def _divide(self, pieces: Sequence[Piece]) -> tuple[list[Piece], dict[torch.device, list[Piece]]]:
        host: list[Piece] = []
        by_device: dict[torch.device, list[Piece]] = {}
        for piece in pieces:
            if piece.source.device.type == self._device_type:
                by_device.setdefault(piece.source.device, []).append(piece)
            else:
                host.append(piece)
        return host, by_device


class CudaJob:
    def __init__(self, copier: CudaCopier, host: Job, by_device: dict[torch.device, list[Piece]]) -> None:
        self._copier = copier
        self._host = host
        self._parts = [_DevicePart(copier, device, pieces) for device, pieces in by_device.items()]

    def eager(self) -> Ticket:
        started = [part.start(waits=True) for part in self._parts]  # the devices work while the host copies
        return CudaTicket(self._copier, self._host.eager(), started)

    def late(self) -> Ticket:
        started = [part.start(waits=False) for part in self._parts]
        return CudaTicket(self._copier, self._host.late(), started)


@dataclass(frozen=True, slots=True)
class _Started:
    """Events of one device: `read` when the sources were read, `landed` when the bytes are in the arena, `before` and
    `after` around what the current stream had to do and to wait for."""

    device: torch.device
    read: Any
    landed: Any
    before: Any
    after: Any


class _DevicePart:
    """The pieces of one device: `large` ones with views for a direct transfer, the others behind a device clone."""

    def __init__(self, copier: CudaCopier, device: torch.device, pieces: Sequence[Piece]) -> None:
        self._copier = copier
        self.device = device
        self._large = [piece for piece in pieces if piece.nbytes > CLONED_BYTES]
        small = [piece for piece in pieces if piece.nbytes <= CLONED_BYTES]
        self._sources = [piece.source for piece in small]
        self._clone = torch.empty(sum(_padded(p.nbytes) for p in small), dtype=torch.uint8, device=device)
        self._clones, self._transfers = _mirror(small, self._clone)

    def start(self, waits: bool) -> _Started:
        """Enqueues everything. `waits`: whether the current stream waits until the sources were read."""
        cuda, side = self._copier.cuda, self._copier.stream(self.device)
        with cuda.device(self.device):
            current = cuda.current_stream(self.device)
            before, read, landed, after = (cuda.Event(enable_timing=True) for _ in range(4))
            current.wait_stream(side)  # the clone may still be on its way from the last time
            before.record(current)
            if self._sources:
                torch._foreach_copy_(self._clones, self._sources)
            side.wait_stream(current)
            with cuda.stream(side):
                for piece in self._large:
                    piece.target.copy_(piece.source, non_blocking=True)
                    _keep(piece.source, side)
                read.record(side)
                for target, source in self._transfers:
                    target.copy_(source, non_blocking=True)
                _keep(self._clone, side)
                landed.record(side)
            if waits and self._large:
                current.wait_event(read)
            after.record(current)
        return _Started(self.device, read, landed, before, after)


class CudaTicket:
    def __init__(self, copier: CudaCopier, host: Ticket, started: Sequence[_Started]) -> None:
        self._copier = copier
        self._host = host
        self._started = started
        self._waits: list[tuple[Any, Any]] = []  # events around the waits of fences

    def fence(self) -> None:
        cuda = self._copier.cuda
        for one in self._started:
            with cuda.device(one.device):
                current = cuda.current_stream(one.device)
                before, after = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
                before.record(current)
                current.wait_event(one.read)
                after.record(current)
                self._waits.append((before, after))
        self._host.fence()

    def hold_back(self) -> None:
        for one in self._started:
            with self._copier.cuda.device(one.device):
                self._copier.cuda.current_stream(one.device).wait_event(one.read)
        self._host.hold_back()

    def wait(self) -> None:
        for one in self._started:
            one.landed.synchronize()
            one.after.synchronize()
        for _, after in self._waits:
            after.synchronize()
        self._host.wait()

    def stall_s(self) -> float:
        pairs = [*((one.before, one.after) for one in self._started), *self._waits]
        return sum(float(before.elapsed_time(after)) for before, after in pairs) / 1e3


def _keep(tensor: Tensor, stream: Any) -> None:
    """Whoever drops the tensor: its memory is not given out before the stream has come this far."""
    if tensor.is_cuda:
        tensor.record_stream(stream)


def _mirror(pieces: Sequence[Piece], clone: Tensor) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """A view of `clone` for each piece, and the transfers (target, part of clone): targets that adjoin go as one."""
    views: list[Tensor] = []
    runs: list[tuple[Tensor, int, int]] = []  # (first target, offset in the clone, bytes)
    at = end = 0
    for piece in pieces:
        if runs and piece.target.data_ptr() == end and not at % piece.target.element_size():
            runs[-1] = (*runs[-1][:2], runs[-1][2] + piece.nbytes)
        else:
            at = _padded(at)
            runs.append((piece.target.reshape(-1).view(torch.uint8), at, piece.nbytes))
        views.append(clone[at : at + piece.nbytes].view(piece.target.dtype).view(piece.target.shape))
        at += piece.nbytes
        end = piece.target.data_ptr() + piece.nbytes
    return views, [(first.as_strided((n,), (1,)), clone[at : at + n]) for first, at, n in runs]


def _differing(group: Sequence[Piece], wholes: Sequence[Piece], flags: Callable[[], Tensor]) -> Callable[[], list[int]]:
    index = {id(piece): n for n, piece in enumerate(group)}
    return lambda: sorted({index[id(w)] for w, flag in zip(wholes, flags().tolist(), strict=True) if flag})


def _padded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def _check(cuda: Any, status: Any) -> None:
    if int(status) != 0:
        raise CkptError(f"CUDA did not lock or unlock the arena's pages: {cuda.cudart().cudaGetErrorString(status)}")
