"""The copier for tensors on CUDA devices: side streams into arena pages that are locked in place.

- Pages are locked LOCK_BYTES at a time, cut at multiples of that as addresses go, with as long a rest: meanwhile the
  driver lets nobody launch a kernel (83 ms for 2 GiB in one go on an H200). No transfer may cross such a seam.
- The side stream of a device starts after what the current stream holds, so it reads the state as of the boundary.
- Small pieces (buffers that change in forward among them) are cloned on the current stream into one device buffer
  laid out like the arena, the same for all arenas, which then goes over in a few large transfers: they cost no waiting.
- Large pieces are read by the side stream. An eager copy makes the current stream wait for that, on the device; a
  late one leaves the waiting to `fence`.
- Other threads than the training thread work on streams of their own, and may while a CUDA graph is captured. They
  are on a device of the state before they ask CUDA anything: a thread begins on device 0, where the first call would
  start CUDA (half a GB there for each rank of the node).
- Sources are recorded on the side stream, so that the allocator does not hand out their memory while it is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ckpt.errors import CkptError
from ckpt.trainer.snapshot.cpu_copier import Copier, CopyJob, CpuCopier, Ticket
from ckpt.trainer.state.pieces import CopyPiece, flat_bytes, is_cuda_used, keep, later, split, where

CLONED_BYTES = 1 << 20  # pieces up to this are cloned first,
CLONE_BYTES_MAX = 64 << 20  # the smallest of them, so many together: a device has no memory to spare
LOCK_BYTES = 32 << 20
ASK_S = 0.0005
SCRATCH_BYTES = 16 << 20  # how much of an arena is brought back to a device at once for a comparison


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
        self._aside: dict[torch.device, Any] = {}
        self._clones: dict[torch.device, Tensor] = {}
        self._locked: dict[int, list[int]] = {}  # of a region: where it begins -> where each part does that was locked
        self._lock = threading.Lock()
        self._cloning = threading.Lock()
        self._locking = threading.Lock()  # takes a while: the training thread has nothing to do with it
        self._is_closed = False

    def pin(self, data: memoryview) -> None:
        """Page-locks the region where it lies. Errors: CkptError with CUDA's own message; copies work all the same,
        while the host waits. Once it is closed this does nothing: nobody would unlock them."""
        address, nbytes = where(data)
        with self._locking, self._near(), _beside_captures():
            if self._is_closed:
                return
            done: list[int] = []
            try:
                for at, length in _seams(address, nbytes):
                    began_s = time.perf_counter()
                    self._register(address + at, length)
                    done.append(address + at)
                    time.sleep(time.perf_counter() - began_s)
            except BaseException:  # Ctrl-C too
                self._unlock(done)
                raise
            self._locked[address] = done

    def unpin(self, data: memoryview) -> None:
        with self._locking, self._near(), _beside_captures():
            parts = self._locked.pop(where(data)[0], [])
            try:
                self.settle(self._streams)  # a device may still write there, or compare what lies there
            finally:
                self._unlock(parts)

    def prepare(self, pieces: Sequence[CopyPiece]) -> CudaJob:
        host, by_device = self._divide(pieces)
        return CudaJob(self, self.host.prepare(host), by_device)

    def same(self, pieces: Sequence[CopyPiece]) -> Callable[[], list[int]]:
        host, by_device = self._divide(pieces)
        verdicts = [(host, self.host.same(host))]
        for device, group in by_device.items():
            parts = [(whole, part) for whole in group for part in split(whole, SCRATCH_BYTES)]
            flags = torch.zeros(len(parts), dtype=torch.bool, device=device)
            with self.cuda.device(device):
                self.cuda.current_stream(device).wait_stream(self.stream(device))  # the targets have landed
                for n, (_, part) in enumerate(parts):
                    flags[n] = (flat_bytes(part.source) != _on(device, flat_bytes(part.target))).any()
                self.stream(device).wait_stream(self.cuda.current_stream(device))  # before others are written there
                verdicts.append((group, _differing(group, [whole for whole, _ in parts], later(flags))))
        index = {id(piece): n for n, piece in enumerate(pieces)}
        return lambda: sorted(index[id(group[n])] for group, verdict in verdicts for n in verdict())

    def barrier(self) -> Callable[[], None]:
        events = []
        for device in list(self._streams):
            with self.cuda.device(device):
                event = self.cuda.Event()
                event.record(self.cuda.current_stream(device))
                events.append((device, event))

        def wait() -> None:
            for device, event in events:
                self.cuda.current_stream(device).wait_event(event)

        return wait

    @contextlib.contextmanager
    def aside(self, devices: Collection[torch.device]) -> Iterator[None]:
        mine = (device for device in devices if device.type == self._device_type)
        with contextlib.ExitStack() as ends:
            for device in mine:
                ends.enter_context(self.cuda.device(device))  # and not by the stream, whose end would start device 0
                ends.enter_context(_beside_captures())
                stream = self._of(self._aside, device)
                ends.callback(self._wait_for, stream)
                ends.enter_context(self.cuda.stream(stream))
            yield

    def stream(self, device: torch.device) -> Any:
        """The side stream."""
        return self._of(self._streams, device)

    def clone(self, device: torch.device, nbytes: int) -> Tensor:
        """Memory of that device for clones, the same for all jobs: each waits until the former's have been read."""
        with self._cloning:
            known = self._clones.get(device)
            if known is None or known.nbytes < nbytes:
                known = self._clones[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
            return known

    def close(self) -> None:
        with contextlib.ExitStack() as ends:  # each of it, also where the device is lost
            ends.callback(self.host.close)
            ends.callback(self._unlock_all)
            self.settle(self._streams)

    def settle(self, devices: Collection[torch.device]) -> None:
        """Returns when the side streams of these have come to their end."""
        for device in list(devices):
            self._wait_for(self.stream(device))

    def _wait_for(self, stream: Any) -> None:
        """Returns when it has come to its end. Asks for that again and again: so Ctrl-C is heard where a device hangs,
        and torch.cuda.set_sync_debug_mode is for the user's own."""
        event = self.cuda.Event()
        event.record(stream)
        while not event.query():
            time.sleep(ASK_S)

    def _unlock_all(self) -> None:
        with self._locking:
            self._is_closed = True
            parts, self._locked = [part for each in self._locked.values() for part in each], {}
            self._unlock(parts)

    def _near(self) -> contextlib.AbstractContextManager[object]:
        """For a thread that asks CUDA for what is of no device: on one that the state lies on, if any does."""
        near: contextlib.AbstractContextManager[object] = self.cuda.device(next(iter(list(self._aside)), None))
        return near

    def _of(self, streams: dict[torch.device, Any], device: torch.device) -> Any:
        with self._lock:
            if device not in streams:
                streams[device] = self.cuda.Stream(device)
            return streams[device]

    def _register(self, address: int, nbytes: int) -> None:
        status = self.cuda.cudart().cudaHostRegister(address, nbytes, 1)  # 1: for all contexts
        if int(status) != 0:
            # It stays behind as CUDA's last error, which the next kernel of the training would raise: one of ours
            # takes it.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device_type).add_(1)
        _check(self.cuda, status)

    def _unlock(self, addresses: Sequence[int]) -> None:
        for status in [self.cuda.cudart().cudaHostUnregister(address) for address in addresses]:
            _check(self.cuda, status)

    def _divide(self, pieces: Sequence[CopyPiece]) -> tuple[list[CopyPiece], dict[torch.device, list[CopyPiece]]]:
        host: list[CopyPiece] = []
        by_device: dict[torch.device, list[CopyPiece]] = {}
        for piece in pieces:
            if piece.source.device.type == self._device_type:
                by_device.setdefault(piece.source.device, []).append(piece)
            else:
                host.append(piece)
        return host, by_device


class CudaJob:
    def __init__(self, copier: CudaCopier, host: CopyJob, by_device: dict[torch.device, list[CopyPiece]]) -> None:
        self._copier = copier
        self._host = host
        self._parts = [_DevicePart(copier, device, pieces) for device, pieces in by_device.items()]

    def eager(self) -> Ticket:
        return self._start(self._host.eager, waits=True)

    def late(self) -> Ticket:
        return self._start(self._host.late, waits=False)

    def _start(self, host: Callable[[], Ticket], waits: bool) -> Ticket:
        try:
            started = [part.start(waits) for part in self._parts]  # the devices work while the host copies
            return CudaTicket(self._copier, host(), started)
        except BaseException:  # nobody has the ticket, to wait for what was begun
            self._copier.settle([part.device for part in self._parts])
            raise


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
    """The pieces of one device: most bytes with views for a direct transfer, and small pieces behind a clone."""

    def __init__(self, copier: CudaCopier, device: torch.device, pieces: Sequence[CopyPiece]) -> None:
        self._copier = copier
        self.device = device
        cloned = _cloned(pieces)
        self._direct = [
            (piece.source, [(piece.source[a : a + n], piece.target[a : a + n]) for a, n in _cut(piece.target)])
            for n, piece in enumerate(pieces)
            if n not in cloned
        ]
        mirrored = [piece for n, piece in enumerate(pieces) if n in cloned]
        self._clone = copier.clone(device, sum(_padded(piece.nbytes) for piece in mirrored))
        self._mirror = _mirror(mirrored, self._clone)

    def start(self, waits: bool) -> _Started:
        """Enqueues everything. `waits`: whether the current stream waits until the sources were read."""
        cuda, side = self._copier.cuda, self._copier.stream(self.device)
        with cuda.device(self.device):
            current = cuda.current_stream(self.device)
            before, read, landed, after = (cuda.Event(enable_timing=True) for _ in range(4))
            current.wait_stream(side)  # the clone may still be on its way, of another job
            before.record(current)
            keep(self._clone, current)
            for sources, clone in self._mirror.joined:
                torch.cat(sources, out=clone)
            for sources, clones in self._mirror.others:
                torch._foreach_copy_(clones, sources)
            side.wait_stream(current)
            with cuda.stream(side):
                for whole, parts in self._direct:
                    for source, target in parts:
                        target.copy_(source, non_blocking=True)
                    keep(whole, side)
                read.record(side)
                for source, target in self._mirror.transfers:
                    target.copy_(source, non_blocking=True)
                keep(self._clone, side)
                landed.record(side)
            if waits and self._direct:
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


def _cloned(pieces: Sequence[CopyPiece]) -> set[int]:
    """Which go by way of a clone: what is not plain bytes (its pieces are small), and the smallest of what is."""
    plain = [n for n, piece in enumerate(pieces) if piece.is_flat]
    found = set(range(len(pieces))).difference(plain)
    total = 0
    for n in sorted(plain, key=lambda n: pieces[n].nbytes):
        total += pieces[n].nbytes
        if pieces[n].nbytes > CLONED_BYTES or total > CLONE_BYTES_MAX:
            break
        found.add(n)
    return found


@dataclass(frozen=True, slots=True)
class _Mirror:
    """How small pieces come into a clone, and it into the arena. `joined`: bytes that lie end to end there, gathered at
    two thirds of what copying each costs. `others`: of one dtype each, without which torch copies them one by one.
    `transfers`: (part of the clone, target)."""

    joined: list[tuple[list[Tensor], Tensor]]
    others: list[tuple[list[Tensor], list[Tensor]]]
    transfers: list[tuple[Tensor, Tensor]]


def _mirror(pieces: Sequence[CopyPiece], clone: Tensor) -> _Mirror:
    """Laid out as the targets are: those that adjoin do so in the clone, and go over as one."""
    joined: list[tuple[list[Tensor], Tensor]] = []
    others: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    transfers: list[tuple[Tensor, Tensor]] = []
    at = 0
    for run in _adjoining(pieces):
        at = first = _padded(at)
        flats: list[CopyPiece] = []
        for piece, is_last in zip(run, [False] * (len(run) - 1) + [True], strict=True):
            if piece.is_flat:
                flats.append(piece)
            else:
                sources, clones = others.setdefault(piece.source.dtype, ([], []))
                sources.append(piece.source)
                clones.append(clone[at : at + piece.nbytes].view(piece.target.dtype).view(piece.target.shape))
            if flats and (is_last or not piece.is_flat):
                end = at + piece.nbytes if piece.is_flat else at
                joined.append(([each.source for each in flats], clone[end - sum(f.nbytes for f in flats) : end]))
                flats = []
            at += piece.nbytes
        target = run[0].target.reshape(-1).view(torch.uint8).as_strided((at - first,), (1,))
        transfers += [(clone[first + a : first + a + n], target[a : a + n]) for a, n in _cut(target)]
    return _Mirror(joined, list(others.values()), transfers)


def _adjoining(pieces: Sequence[CopyPiece]) -> Iterator[list[CopyPiece]]:
    """Runs of pieces whose targets follow one another, each where the elements of its dtype may lie in a clone."""
    run: list[CopyPiece] = []
    end = nbytes = 0
    for piece in pieces:
        if run and (piece.target.data_ptr() != end or nbytes % piece.target.element_size()):
            yield run
            run, nbytes = [], 0
        run.append(piece)
        nbytes += piece.nbytes
        end = piece.target.data_ptr() + piece.nbytes
    if run:
        yield run


def _on(device: torch.device, flat: Tensor) -> Tensor:
    """The bytes of a target on that device."""
    if flat.device == device:
        return flat
    back = torch.empty(flat.nbytes, dtype=torch.uint8, device=device)
    for at, length in _cut(flat):
        back[at : at + length].copy_(flat[at : at + length], non_blocking=True)
    return back


def _cut(flat: Tensor) -> Iterator[tuple[int, int]]:
    """Parts (start, length) of flat bytes in host memory that cross no seam of locked pages."""
    return _seams(flat.data_ptr(), flat.nbytes)


def _seams(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    at = 0
    while at < nbytes:
        length = min(LOCK_BYTES - (address + at) % LOCK_BYTES, nbytes - at)
        yield at, length
        at += length


def _differing(
    group: Sequence[CopyPiece], wholes: Sequence[CopyPiece], flags: Callable[[], Tensor]
) -> Callable[[], list[int]]:
    index = {id(piece): n for n, piece in enumerate(group)}
    return lambda: sorted({index[id(w)] for w, flag in zip(wholes, flags().tolist(), strict=True) if flag})


def _padded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


@contextlib.contextmanager
def _beside_captures() -> Iterator[None]:
    """While one thread captures a CUDA graph, CUDA has the others do nothing that could matter to it, and else both
    fail; unless they say that it does not."""
    exchange = _exchange()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(2)  # cudaStreamCaptureModeRelaxed
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@cache
def _exchange() -> Any:
    """cudaThreadExchangeStreamCaptureMode of the library that torch has loaded; None where there is none."""
    with contextlib.suppress(OSError, AttributeError):
        return ctypes.CDLL(_runtime(torch.version.cuda or "")).cudaThreadExchangeStreamCaptureMode
    return None


def _runtime(version: str) -> str:
    """What the file of that CUDA runtime is called: by its major version, but for the last one that was not."""
    major = version.partition(".")[0]
    return f"libcudart.so.{'11.0' if major == '11' else major}"


def _check(cuda: Any, status: Any) -> None:
    if int(status) != 0:
        raise CkptError(f"CUDA did not lock or unlock the arena's pages: {cuda.cudart().cudaGetErrorString(status)}")
