"""The copier for tensors on CUDA devices: side streams copy into arena pages that are locked in place.

- A device's side stream starts after the work in the current stream. So it reads the state as of the boundary.
- Small pieces (also buffers that change in forward) are cloned on the current stream into one device buffer. The buffer
  is laid out like the arena, and all arenas share it. A few large transfers then copy it to the arena. Training does
  not wait for them.
- Large pieces are read by the side stream. For an eager copy the current stream waits for that, on the device. For a
  deferred copy `fence` makes it wait.
- Threads other than the training thread use streams of their own, also while a CUDA graph is captured. They enter a
  device of the state before their first CUDA call. A thread begins on device 0, and the first call would initialise
  CUDA there (0.5 GB for each rank of the node).
- Sources are recorded on the side stream, so the allocator does not reuse their memory while it is read.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ckpt.trainer.snapshot.cpu_copier import Copier, CopyJob, CpuCopier, Ticket
from ckpt.trainer.snapshot.cuda_runtime import PageLocks, cut_at_seams, relaxed_capture_mode
from ckpt.trainer.state.pieces import (
    CopyPiece,
    flat_bytes,
    group_pieces,
    is_cuda_used,
    keep_for_stream,
    result_waiter,
    split_piece,
)

# Pieces up to CLONED_BYTES are cloned: the smallest ones, at most CLONE_BYTES_MAX together. Device memory is scarce.
CLONED_BYTES = 1 << 20
CLONE_BYTES_MAX = 64 << 20
QUERY_INTERVAL_S = 0.0005  # between two queries of an event
SCRATCH_BYTES = 16 << 20  # arena bytes copied back to a device at once, for a comparison


def make_copier() -> Copier:
    """The copier for this process: a CudaCopier if CUDA is in use. The call does not initialise CUDA."""
    return CudaCopier(CpuCopier()) if is_cuda_used() else CpuCopier()


class CudaCopier:
    """Copies pieces on CUDA devices itself. Gives those in host memory to `host`, and owns it. `cuda` and `device_type`
    are torch.cuda and "cuda", except in tests with a fake device."""

    is_blocking = False

    def __init__(self, host: CpuCopier, cuda: Any = torch.cuda, device_type: str = "cuda") -> None:
        self.host_copier = host
        self.cuda = cuda
        self._device_type = device_type
        self._side_streams: dict[torch.device, Any] = {}
        self._background_streams: dict[torch.device, Any] = {}
        self._clone_buffers: dict[torch.device, Tensor] = {}
        self._page_locks = PageLocks(cuda, device_type)
        self._lock = threading.Lock()
        self._clone_lock = threading.Lock()

    def pin(self, data: memoryview) -> None:
        """Page-locks the region. Errors: CkptError with CUDA's own message; copies still work, but the host waits for
        them. After close() it does nothing, since nothing would unlock the pages."""
        with self._device_context():
            self._page_locks.lock(data)

    def unpin(self, data: memoryview) -> None:
        with self._device_context():
            # A device may still write to the region, or compare its bytes.
            self._page_locks.unlock(data, lambda: self.wait_for_streams(self._side_streams))

    def prepare(self, pieces: Sequence[CopyPiece]) -> CudaJob:
        host, by_device = self._divide_by_device(pieces)
        return CudaJob(self, self.host_copier.prepare(host), by_device)

    def start_comparison(self, pieces: Sequence[CopyPiece]) -> Callable[[], list[int]]:
        host, by_device = self._divide_by_device(pieces)
        differing_hosts = self.host_copier.start_comparison(host)
        verdicts: list[Callable[[], list[CopyPiece]]] = [lambda: [host[n] for n in differing_hosts()]]
        for device, group in by_device.items():
            parts = [(whole, part) for whole in group for part in split_piece(whole, SCRATCH_BYTES)]
            flags = torch.zeros(len(parts), dtype=torch.bool, device=device)
            with self.cuda.device(device):
                # Wait until the bytes are in the targets.
                self.cuda.current_stream(device).wait_stream(self.side_stream(device))
                for n, (_, part) in enumerate(parts):
                    flags[n] = (flat_bytes(part.source) != _copy_to_device(device, flat_bytes(part.target))).any()
                # The next copy into the targets waits for this comparison.
                self.side_stream(device).wait_stream(self.cuda.current_stream(device))
                verdicts.append(partial(_await_differing, [whole for whole, _ in parts], result_waiter(flags)))
        index = {piece: n for n, piece in enumerate(pieces)}
        return lambda: sorted({index[piece] for verdict in verdicts for piece in verdict()})

    def barrier(self) -> Callable[[], None]:
        events = []
        for device in list(self._side_streams):
            with self.cuda.device(device):
                event = self.cuda.Event()
                event.record(self.cuda.current_stream(device))
                events.append((device, event))

        def wait() -> None:
            for device, event in events:
                self.cuda.current_stream(device).wait_event(event)

        return wait

    @contextlib.contextmanager
    def background_context(self, devices: Collection[torch.device]) -> Iterator[None]:
        mine = (device for device in devices if device.type == self._device_type)
        with contextlib.ExitStack() as ends:
            for device in mine:
                # The device is entered first: leaving only the stream's context would initialise CUDA on device 0.
                ends.enter_context(self.cuda.device(device))
                ends.enter_context(relaxed_capture_mode())
                stream = self._get_stream(self._background_streams, device)
                ends.callback(self._wait_for_stream, stream)
                ends.enter_context(self.cuda.stream(stream))
            yield

    def side_stream(self, device: torch.device) -> Any:
        """The side stream of a device."""
        return self._get_stream(self._side_streams, device)

    def get_clone_buffer(self, device: torch.device, nbytes: int) -> Tensor:
        """Memory on the device for clones, shared by all jobs. Each job waits until the previous job's clones have been
        read."""
        with self._clone_lock:
            known = self._clone_buffers.get(device)
            if known is None or known.nbytes < nbytes:
                known = self._clone_buffers[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
            return known

    def close(self) -> None:
        # Every part is closed, also if the device is lost.
        with contextlib.ExitStack() as ends:
            ends.callback(self.host_copier.close)
            ends.callback(self._page_locks.close)
            self.wait_for_streams(self._side_streams)

    def wait_for_streams(self, devices: Collection[torch.device]) -> None:
        """Returns when the side streams of these devices have finished all that is enqueued now."""
        for device in list(devices):
            self._wait_for_stream(self.side_stream(device))

    def _wait_for_stream(self, stream: Any) -> None:
        """Returns when the stream has finished all that is enqueued now. It polls: so Ctrl-C works if a device hangs,
        and torch.cuda.set_sync_debug_mode reports only the user's own waits."""
        event = self.cuda.Event()
        event.record(stream)
        while not event.query():
            time.sleep(QUERY_INTERVAL_S)

    def _device_context(self) -> contextlib.AbstractContextManager[object]:
        """A context on a device of the state, if there is one, for CUDA calls that concern no device."""
        nearest = next(iter([*self._background_streams]), None)
        context: contextlib.AbstractContextManager[object] = self.cuda.device(nearest)
        return context

    def _get_stream(self, streams: dict[torch.device, Any], device: torch.device) -> Any:
        with self._lock:
            if device not in streams:
                streams[device] = self.cuda.Stream(device)
            return streams[device]

    def _divide_by_device(
        self, pieces: Sequence[CopyPiece]
    ) -> tuple[list[CopyPiece], dict[torch.device, list[CopyPiece]]]:
        host: list[CopyPiece] = []
        by_device: dict[torch.device, list[CopyPiece]] = {}
        for piece in pieces:
            if piece.source.device.type == self._device_type:
                by_device.setdefault(piece.source.device, []).append(piece)
            else:
                host.append(piece)
        return host, by_device


class CudaJob:
    """Pieces ready to be copied: those on CUDA devices, and those of the host copier's job."""

    def __init__(self, copier: CudaCopier, host: CopyJob, by_device: dict[torch.device, list[CopyPiece]]) -> None:
        self._copier = copier
        self._host_job = host
        self._device_parts = [_DevicePart(copier, device, pieces) for device, pieces in by_device.items()]

    def start_eager(self) -> Ticket:
        return self._start(self._host_job.start_eager, waits=True)

    def start_deferred(self) -> Ticket:
        return self._start(self._host_job.start_deferred, waits=False)

    def _start(self, host: Callable[[], Ticket], waits: bool) -> Ticket:
        try:
            # The devices work while the host copies.
            started = [part.start(waits) for part in self._device_parts]
            return CudaTicket(self._copier, host(), started)
        except BaseException:
            # The caller gets no ticket to wait for.
            self._copier.wait_for_streams([part.device for part in self._device_parts])
            raise


@dataclass(frozen=True, slots=True)
class _Started:
    """Events of one device's copy. `read_event`: the sources were read. `landed_event`: the bytes are in the arena.
    `stall_events`: before and after the work and the waiting of the current stream."""

    device: torch.device
    read_event: Any
    landed_event: Any
    stall_events: tuple[Any, Any]


class _DevicePart:
    """The pieces of one device. Large pieces are transferred directly, small ones by way of a clone."""

    def __init__(self, copier: CudaCopier, device: torch.device, pieces: Sequence[CopyPiece]) -> None:
        self._copier = copier
        self.device = device
        cloned = _choose_cloned(pieces)
        self._direct_copies = [
            (piece.source, [(piece.source[a : a + n], piece.target[a : a + n]) for a, n in cut_at_seams(piece.target)])
            for piece in pieces
            if piece not in cloned
        ]
        mirrored = [piece for piece in pieces if piece in cloned]
        self._clone_buffer = copier.get_clone_buffer(device, sum(_pad_bytes(piece.nbytes) for piece in mirrored))
        self._mirror = _make_mirror(mirrored, self._clone_buffer)

    def start(self, waits: bool) -> _Started:
        """Enqueues everything. `waits`: whether the current stream waits until the sources were read."""
        cuda, side = self._copier.cuda, self._copier.side_stream(self.device)
        with cuda.device(self.device):
            current = cuda.current_stream(self.device)
            before, read, landed, after = (cuda.Event(enable_timing=True) for _ in range(4))
            # The clone of another job may still be in transfer.
            current.wait_stream(side)
            before.record(current)
            keep_for_stream(self._clone_buffer, current)
            for sources, clone in self._mirror.concatenated:
                torch.cat(sources, out=clone)
            for sources, clones in self._mirror.by_dtype:
                torch._foreach_copy_(clones, sources)
            side.wait_stream(current)
            with cuda.stream(side):
                for whole, parts in self._direct_copies:
                    for source, target in parts:
                        target.copy_(source, non_blocking=True)
                    keep_for_stream(whole, side)
                read.record(side)
                for source, target in self._mirror.transfers:
                    target.copy_(source, non_blocking=True)
                keep_for_stream(self._clone_buffer, side)
                landed.record(side)
            if waits and self._direct_copies:
                current.wait_event(read)
            after.record(current)
        return _Started(self.device, read, landed, (before, after))


class CudaTicket:
    """One copy under way, on the devices and on the host."""

    def __init__(self, copier: CudaCopier, host: Ticket, started: Sequence[_Started]) -> None:
        self._copier = copier
        self._host_ticket = host
        self._started_copies = started
        # Events before and after each time for which a current stream was kept from work.
        self._stall_events = [one.stall_events for one in started]

    def fence(self) -> None:
        cuda = self._copier.cuda
        for one in self._started_copies:
            with cuda.device(one.device):
                current = cuda.current_stream(one.device)
                before, after = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
                before.record(current)
                current.wait_event(one.read_event)
                after.record(current)
                self._stall_events.append((before, after))
        self._host_ticket.fence()

    def wait(self) -> None:
        for one in self._started_copies:
            one.landed_event.synchronize()
        for _, after in self._stall_events:
            after.synchronize()
        self._host_ticket.wait()

    def stall_s(self) -> float:
        return sum(float(before.elapsed_time(after)) for before, after in self._stall_events) / 1e3


def _choose_cloned(pieces: Sequence[CopyPiece]) -> set[CopyPiece]:
    """The pieces that are cloned: those that are not plain bytes (these are small), and the smallest others."""
    found = {piece for piece in pieces if not piece.is_flat}
    total = 0
    for piece in sorted((piece for piece in pieces if piece.is_flat), key=lambda piece: piece.nbytes):
        total += piece.nbytes
        if piece.nbytes > CLONED_BYTES or total > CLONE_BYTES_MAX:
            break
        found.add(piece)
    return found


@dataclass(frozen=True, slots=True)
class _Mirror:
    """How small pieces get into a clone, and the clone into the arena. `concatenated`: plain bytes that adjoin there,
    at two thirds of the cost of single copies. `by_dtype`: other pieces, else torch would copy them one by one.
    `transfers`: (part of the clone, target)."""

    concatenated: list[tuple[list[Tensor], Tensor]]
    by_dtype: list[tuple[list[Tensor], list[Tensor]]]
    transfers: list[tuple[Tensor, Tensor]]


def _make_mirror(pieces: Sequence[CopyPiece], clone: Tensor) -> _Mirror:
    """The mirror of `pieces` in `clone`. Pieces whose targets adjoin also adjoin in the clone, and are transferred as
    one."""
    joined: list[tuple[list[Tensor], Tensor]] = []
    others: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    transfers: list[tuple[Tensor, Tensor]] = []
    at = 0
    for run in group_pieces(pieces, _joins_mirror):
        at = first = _pad_bytes(at)
        for is_flat, group in groupby(run, key=lambda piece: piece.is_flat):
            begin, sources = at, []
            for piece in group:
                sources.append(piece.source)
                if not is_flat:
                    of_dtype = others.setdefault(piece.source.dtype, ([], []))
                    of_dtype[0].append(piece.source)
                    of_dtype[1].append(clone[at : at + piece.nbytes].view(piece.target.dtype).view(piece.target.shape))
                at += piece.nbytes
            if is_flat:
                joined.append((sources, clone[begin:at]))
        target = run[0].target.reshape(-1).view(torch.uint8).as_strided((at - first,), (1,))
        transfers += [(clone[first + a : first + a + n], target[a : a + n]) for a, n in cut_at_seams(target)]
    return _Mirror(joined, list(others.values()), transfers)


def _joins_mirror(run: list[CopyPiece], nbytes: int, piece: CopyPiece) -> bool:
    """Whether the targets adjoin, and the piece is aligned to its dtype in a clone of the run."""
    return piece.adjoins(run[-1]) and nbytes % piece.target.element_size() == 0


def _copy_to_device(device: torch.device, flat: Tensor) -> Tensor:
    """The bytes of a target on `device`."""
    if flat.device == device:
        return flat
    back = torch.empty(flat.nbytes, dtype=torch.uint8, device=device)
    for at, length in cut_at_seams(flat):
        back[at : at + length].copy_(flat[at : at + length], non_blocking=True)
    return back


def _await_differing(wholes: Sequence[CopyPiece], flags: Callable[[], Tensor]) -> list[CopyPiece]:
    return [whole for whole, flag in zip(wholes, flags().tolist(), strict=True) if flag]


def _pad_bytes(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
