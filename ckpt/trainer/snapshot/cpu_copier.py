"""Copying pieces, and the copier for tensors in host memory.

Guarantees, for every copier:
- `Job.eager` returns when whatever the caller does next may change the sources: the targets get the old bytes.
- `Job.late` returns at once; the caller must not change the sources before `Ticket.fence` returned.
- The bytes are in the targets when `Ticket.wait` returned, not before.

Bytes are moved outside the GIL: large pieces by memmove (one call a piece, so that the training loop is asked for the
GIL rarely), small ones in groups by one foreach call, tiny ones by one concatenation of those that follow one another.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from ckpt.errors import CkptError
from ckpt.threads import Outcome, Tasks
from ckpt.trainer.state.pieces import CopyPiece, flat_bytes, split

Unit = Callable[[], None]

UNIT_BYTES = 4 << 20  # what one thread does before it looks for more: soon over, also for one that has to give way
SMALL_BYTES = 512 << 10  # smaller pieces are copied in groups, as elements of 16 bytes where they are aligned
NARROW_BYTES = 16 << 10  # ... else as single bytes, up to here: torch would use its own threads for many more elements
WIDE = torch.complex128
GROUP_PIECES = 4096
TINY_BYTES = 4 << 10  # what is smaller still and lies end to end in the target is concatenated into it
RUN_BYTES = 32 << 10  # ... so much at once: torch concatenates fewer elements in one plain loop, at half the cost
LATE_NICE = 5  # a third of another's share of a core, so that it is kept from a unit for 10 ms and not for seconds
THREADS_MAX = 8  # a few threads fill the memory's bandwidth

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Ticket(Protocol):
    """One copy under way."""

    def fence(self) -> None:
        """What the caller does from now on (on the host, and on its current streams) comes after all reads of the
        sources. Errors: what the copy failed with."""
        ...

    def wait(self) -> None:
        """Returns when the bytes are in the targets. Any thread. Errors: what the copy failed with."""
        ...

    def stall_s(self) -> float:
        """Seconds that the copy kept a device from later work, the host's time to enqueue it among them; to be called
        after `wait`."""
        ...


class CopyJob(Protocol):
    """Pieces made ready to be copied, as often as wanted, one copy at a time."""

    def eager(self) -> Ticket: ...
    def late(self) -> Ticket: ...


class Copier(Protocol):
    """`blocking`: whether `fence` returns only when the bytes are there, so that nobody need `wait` elsewhere."""

    @property
    def blocking(self) -> bool: ...

    def pin(self, data: memoryview) -> None:
        """Makes a data region fit for being copied into; once per region, before the first job that uses it."""
        ...

    def unpin(self, data: memoryview) -> None: ...

    def prepare(self, pieces: Sequence[CopyPiece]) -> CopyJob: ...

    def same(self, pieces: Sequence[CopyPiece]) -> Callable[[], list[int]]:
        """Compares the sources, as they are when this returns, with their targets, to which they were copied before.
        The function that it returns waits for the outcome: the indices of the pieces that differ. Any thread."""
        ...

    def barrier(self) -> Callable[[], None]:
        """After `fence` and `same`, for what is done on other streams: the function, which any thread may call, has its
        current streams wait for all reads that the caller's wait for."""
        ...

    def aside(self, devices: Collection[torch.device]) -> contextlib.AbstractContextManager[object]:
        """Around what another thread than the training thread does with pieces of these devices, or what is to be used
        on any stream: it is over at the end."""
        ...

    def close(self) -> None: ...


class CpuCopier:
    """For tensors in host memory; those of other devices are copied too, slowly, while the caller waits.

    `threads`: how many copy at once while the caller waits, itself among them (default: as many as torch uses, at
    most THREADS_MAX). A late copy takes as many, which are a little nicer than training: it and the threads of its
    collectives, which have to be woken at once, hardly wait for them. Not more than a little: where others keep all
    cores busy, a thread that is left in the middle of a unit, or holding the GIL, is what training waits for. A fence
    that comes before the end helps, so that a late copy never makes the caller wait much longer than an eager one.
    """

    blocking = True

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(torch.get_num_threads(), THREADS_MAX)
        self._tasks = Tasks("copier", pool_size=self.threads)
        self._late_tasks = Tasks("copier-late", pool_size=self.threads, begin=_be_nicer)

    def pin(self, data: memoryview) -> None:
        pass

    def unpin(self, data: memoryview) -> None:
        pass

    def prepare(self, pieces: Sequence[CopyPiece]) -> CpuJob:
        return CpuJob(self, _copy_units(pieces))

    def same(self, pieces: Sequence[CopyPiece]) -> Callable[[], list[int]]:
        different: set[int] = set()

        def compare(index: int, piece: CopyPiece) -> Unit:
            def unit() -> None:
                if not is_same(piece.source, piece.target):
                    different.add(index)

            return unit

        units = [(p.nbytes, compare(i, p)) for i, piece in enumerate(pieces) for p in split(piece, UNIT_BYTES)]
        CpuJob(self, units).eager()
        return lambda: sorted(different)

    def barrier(self) -> Callable[[], None]:
        return lambda: None

    def aside(self, devices: Collection[torch.device]) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def submit(self, work: Unit, late: bool = False, into: list[Outcome[None]] | None = None) -> Outcome[None]:
        """`into`: as `Tasks.submit`."""
        return (self._late_tasks if late else self._tasks).submit(work, into=into)

    def close(self) -> None:
        self._late_tasks.close()
        self._tasks.close()


class CpuJob:
    """Units of work in lanes: one contiguous lane per thread, equal by bytes. A thread that is done with its own lane
    takes from the far ends of the others."""

    def __init__(self, copier: CpuCopier, units: Sequence[tuple[int, Unit]]) -> None:
        self._copier = copier
        self._lanes: list[list[Unit]] = [[] for _ in range(copier.threads)]
        total = sum(nbytes for nbytes, _ in units) or 1
        before = 0
        for nbytes, unit in units:
            self._lanes[min(before * copier.threads // total, copier.threads - 1)].append(unit)
            before += nbytes

    def eager(self) -> CpuTicket:
        ticket = CpuTicket(self._copier, self._lanes)
        ticket.fence()
        return ticket

    def late(self) -> CpuTicket:
        ticket = CpuTicket(self._copier, self._lanes)
        try:
            ticket.start()
        except BaseException:  # nobody has the ticket
            ticket.cancel()
            raise
        return ticket


class CpuTicket:
    def __init__(self, copier: CpuCopier, lanes: Sequence[Sequence[Unit]]) -> None:
        self._copier = copier
        self._lanes = [deque(lane) for lane in lanes]
        self._running: list[Outcome[None]] = []

    def start(self) -> None:
        for n in self._busy():
            self._copier.submit(partial(self._drain, n), late=True, into=self._running)

    def fence(self) -> None:
        """The caller's thread helps with what is left, and others that are no nicer, and it waits for all."""
        busy = self._busy()
        try:
            for n in busy[:-1]:
                self._copier.submit(partial(self._drain, n), into=self._running)
            try:
                if busy:
                    self._drain(busy[-1])
            finally:
                self._let_end()  # also after an error here: nobody may still read the sources
        except BaseException:  # Ctrl-C, in this wait too
            self.cancel()
            raise
        self.wait()

    def _let_end(self) -> None:
        for running in self._running:
            running.settle()

    def cancel(self) -> None:
        """Copies no more than what was begun, and waits for that: a unit for each thread."""
        for lane in self._lanes:
            lane.clear()
        self._let_end()

    def wait(self) -> None:
        for running in self._running:
            running.result()

    def stall_s(self) -> float:
        return 0.0

    def _busy(self) -> list[int]:
        return [n for n, lane in enumerate(self._lanes) if lane]

    def _drain(self, own: int) -> None:
        for lane, take in [(self._lanes[own], deque.popleft), *((other, deque.pop) for other in self._lanes)]:
            while True:
                try:
                    unit = take(lane)
                except IndexError:
                    break
                unit()


def _be_nicer() -> None:
    """Where that is forbidden this thread runs like any other."""
    with contextlib.suppress(OSError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + LATE_NICE)


def _copy_units(pieces: Sequence[CopyPiece]) -> list[tuple[int, Unit]]:
    """Groups of small pieces become one unit each, the rest one memmove each; in order of target."""
    units: list[tuple[int, Unit]] = []
    for grouped, run in groupby(pieces, key=_is_grouped):
        if not grouped:
            units += [(p.nbytes, _move(p)) for piece in run for p in split(piece, UNIT_BYTES)]
            continue
        group: list[CopyPiece] = []
        group_bytes = 0
        for piece in run:
            group.append(piece)
            group_bytes += piece.nbytes
            if group_bytes >= UNIT_BYTES or len(group) == GROUP_PIECES:
                units.append((group_bytes, _group(group)))
                group, group_bytes = [], 0
        if group:
            units.append((group_bytes, _group(group)))
    return units


def _is_flat(piece: CopyPiece) -> bool:
    """Whether it is plain bytes in host memory."""
    return piece.is_flat and piece.source.is_contiguous() and piece.source.device.type == "cpu"


def _is_wide(piece: CopyPiece) -> bool:
    """Whether it can be seen as elements of 16 bytes."""
    offsets = int(piece.source.storage_offset()), int(piece.target.storage_offset())
    return _is_flat(piece) and not any(n % WIDE.itemsize for n in (piece.nbytes, *offsets))


def _is_grouped(piece: CopyPiece) -> bool:
    return not _is_flat(piece) or piece.nbytes <= NARROW_BYTES or (piece.nbytes < SMALL_BYTES and _is_wide(piece))


def _group(pieces: Sequence[CopyPiece]) -> Unit:
    """Small pieces as one unit of work."""
    units: list[Unit] = []
    others: list[CopyPiece] = []
    for run in _runs(pieces):
        if len(run) > 1:
            units.append(_concatenate(run))
        else:
            others += run
    if others:
        units.append(_foreach(others))

    def unit() -> None:
        for each in units:
            each()

    return unit


def _runs(pieces: Sequence[CopyPiece]) -> Iterator[list[CopyPiece]]:
    """Tiny pieces together whose targets lie end to end, RUN_BYTES at most; every other piece alone."""
    run: list[CopyPiece] = []
    end = run_bytes = 0
    for piece in pieces:
        is_tiny = piece.nbytes <= TINY_BYTES and _is_flat(piece)
        if run and not (is_tiny and piece.target.data_ptr() == end and run_bytes + piece.nbytes < RUN_BYTES):
            yield run
            run, run_bytes = [], 0
        run.append(piece)
        run_bytes += piece.nbytes
        end = piece.target.data_ptr() + piece.nbytes if is_tiny else -1
    if run:
        yield run


def _concatenate(run: Sequence[CopyPiece]) -> Unit:
    sources = [piece.source for piece in run]
    first = run[0].target
    target = first.as_strided((sum(piece.nbytes for piece in run),), (1,), first.storage_offset())

    def unit() -> None:
        torch.cat(sources, out=target)

    return unit


def _foreach(pieces: Sequence[CopyPiece]) -> Unit:
    wide = [_is_wide(piece) for piece in pieces]
    sources = [p.source.view(WIDE) if w else p.source for p, w in zip(pieces, wide, strict=True)]
    targets = [p.target.view(WIDE) if w else p.target for p, w in zip(pieces, wide, strict=True)]
    checked = [piece.source for piece in pieces if piece.nbytes > NARROW_BYTES]

    def unit() -> None:
        for source in checked:
            check_storage(source)
        torch._foreach_copy_(targets, sources)

    return unit


def _move(piece: CopyPiece) -> Unit:
    source, target, nbytes = piece.source, piece.target, piece.nbytes

    def unit() -> None:
        check_storage(source)  # addresses are read anew each time: a storage may have been resized
        ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)

    return unit


def is_same(source: Tensor, target: Tensor) -> bool:
    """Whether two host tensors of one dtype and shape hold the same bytes (NaN is equal to itself, -0 is not 0). What
    lost its storage holds none."""
    if _has_shrunk(source):
        return False
    one, other = flat_bytes(source.cpu()), flat_bytes(target.cpu())
    return bool(_memcmp(one.data_ptr(), other.data_ptr(), one.nbytes) == 0)


def check_storage(source: Tensor) -> None:
    """Errors: CkptError where a view is of memory that is not there any more, which torch does not look at."""
    if _has_shrunk(source):
        raise CkptError("a tensor's storage was freed or shrank after its views were made")


def _has_shrunk(source: Tensor) -> bool:
    last = sum((n - 1) * stride for n, stride in zip(source.shape, source.stride(), strict=True))
    return (source.storage_offset() + last + 1) * source.element_size() > source.untyped_storage().nbytes()
