"""The protocol of a copier, and the copier for tensors in host memory.

Guarantees, for every copier:
- `CopyJob.start_eager` returns when later work of the caller may change the sources. The targets still get the old
  bytes.
- `CopyJob.start_deferred` returns at once. The caller must not change the sources before `Ticket.fence` has returned.
- The bytes are in the targets once `Ticket.wait` has returned, not before.

Bytes are copied outside the GIL. A large piece is one memmove, so copying rarely competes for the GIL. Small pieces are
copied in groups, by one foreach call. Tiny pieces whose targets adjoin are copied by one concatenation.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from ckpt.errors import CkptError
from ckpt.threads import Outcome, Tasks
from ckpt.trainer.state.pieces import CopyPiece, flat_bytes, group_pieces, split_piece

Unit = Callable[[], None]

# A thread's unit of work. It is over soon, even on a niced thread.
UNIT_BYTES = 4 << 20
# Pieces below SMALL_BYTES are copied in groups: as elements of 16 bytes if aligned, else as single bytes up to
# NARROW_BYTES. For many more elements torch would use its own threads.
SMALL_BYTES = 512 << 10
NARROW_BYTES = 16 << 10
WIDE_DTYPE = torch.complex128
GROUP_PIECES = 4096
# Pieces up to TINY_BYTES whose targets adjoin are concatenated. Below RUN_BYTES torch does that in one plain loop, at
# half the cost.
TINY_BYTES = 4 << 10
RUN_BYTES = 32 << 10
# A niced thread gets a third of a normal thread's share of a core. So a unit is held up for 10 ms, not for seconds.
DEFERRED_NICE = 5
THREADS_MAX = 8  # a few threads fill the memory's bandwidth

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Ticket(Protocol):
    """One copy under way."""

    def fence(self) -> None:
        """Returns when all later work of the caller (on the host, and on its current streams) comes after all reads of
        the sources. Errors: the error of the copy."""
        ...

    def wait(self) -> None:
        """Returns when the bytes are in the targets. Any thread. Errors: the error of the copy."""
        ...

    def stall_s(self) -> float:
        """Seconds for which the copy kept a device from later work, with the host's time to enqueue it. Call it after
        `wait`."""
        ...


class CopyJob(Protocol):
    """Pieces ready to be copied: any number of times, one copy at a time."""

    def start_eager(self) -> Ticket: ...
    def start_deferred(self) -> Ticket: ...


class Copier(Protocol):
    """Copies pieces into arenas. `is_blocking`: whether `fence` returns only once the bytes are in the targets, so that
    no other thread has to call `wait`."""

    @property
    def is_blocking(self) -> bool: ...

    def pin(self, data: memoryview) -> None:
        """Prepares a data region as a target of copies. Call it once per region, before the first job that uses the
        region."""
        ...

    def unpin(self, data: memoryview) -> None: ...

    def prepare(self, pieces: Sequence[CopyPiece]) -> CopyJob: ...

    def start_comparison(self, pieces: Sequence[CopyPiece]) -> Callable[[], list[int]]:
        """Compares the sources, as of this call, with the targets that they were copied to before. The returned
        function waits for the outcome: the indices of the pieces that differ. Any thread may call that function."""
        ...

    def barrier(self) -> Callable[[], None]:
        """For work on other streams, after `fence` and `start_comparison`. Returns a function for any thread: it makes
        that thread's current streams wait for the same reads as the current streams of this call's thread."""
        ...

    def background_context(self, devices: Collection[torch.device]) -> contextlib.AbstractContextManager[object]:
        """A context for work with pieces on these devices, off the training thread or for use on any stream. At the end
        of the context the work is done."""
        ...

    def close(self) -> None: ...


class CpuCopier:
    """The copier for tensors in host memory. It copies tensors on other devices too, slowly, while the caller waits.

    `threads`: how many threads copy while the caller waits, the caller's included (default: torch's number, at most
    THREADS_MAX). A deferred copy uses as many threads, a little niced. So training, and the threads of its collectives,
    hardly wait for them. More niceness would hurt on busy cores: training would wait for a thread that was preempted
    within a unit, or while holding the GIL. A fence before the end of a deferred copy helps to copy. So the caller
    never waits much longer than for an eager copy."""

    is_blocking = True

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(torch.get_num_threads(), THREADS_MAX)
        self._tasks = Tasks("copier", pool_size=self.threads)
        self._deferred_tasks = Tasks("copier-late", pool_size=self.threads, begin=_raise_niceness)

    def pin(self, data: memoryview) -> None:
        pass

    def unpin(self, data: memoryview) -> None:
        pass

    def prepare(self, pieces: Sequence[CopyPiece]) -> CpuJob:
        return CpuJob(self, _copy_units(pieces))

    def start_comparison(self, pieces: Sequence[CopyPiece]) -> Callable[[], list[int]]:
        different: set[int] = set()

        def compare(index: int, piece: CopyPiece) -> Unit:
            def unit() -> None:
                if not has_same_bytes(piece.source, piece.target):
                    different.add(index)

            return unit

        CpuJob(
            self, [compare(i, p) for i, piece in enumerate(pieces) for p in split_piece(piece, UNIT_BYTES)]
        ).start_eager()
        return lambda: sorted(different)

    def barrier(self) -> Callable[[], None]:
        return lambda: None

    def background_context(self, devices: Collection[torch.device]) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def submit(self, work: Unit, late: bool = False, into: list[Outcome[None]] | None = None) -> Outcome[None]:
        """Runs a unit on a thread of the pool, a niced one if `late`. `into`: as in `Tasks.submit`."""
        return (self._deferred_tasks if late else self._tasks).submit(work, into=into)

    def close(self) -> None:
        self._deferred_tasks.close()
        self._tasks.close()


class CpuJob:
    """Units of work, in the order in which the threads take them."""

    def __init__(self, copier: CpuCopier, units: Sequence[Unit]) -> None:
        self._copier = copier
        self._units = units

    def start_eager(self) -> CpuTicket:
        ticket = CpuTicket(self._copier, self._units)
        ticket.fence()
        return ticket

    def start_deferred(self) -> CpuTicket:
        ticket = CpuTicket(self._copier, self._units)
        try:
            ticket.start()
        except BaseException:
            # The caller gets no ticket to wait for.
            ticket.cancel()
            raise
        return ticket


class CpuTicket:
    """One copy under way on the threads of a CpuCopier."""

    def __init__(self, copier: CpuCopier, units: Sequence[Unit]) -> None:
        self._copier = copier
        self._units = deque(units)
        self._running_jobs: list[Outcome[None]] = []

    def start(self) -> None:
        for _ in range(self._useful_threads()):
            self._copier.submit(self._do_units, late=True, into=self._running_jobs)

    def fence(self) -> None:
        """Returns when all units are done. The caller's thread, and further threads without niceness, take part."""
        try:
            for _ in range(self._useful_threads() - 1):
                self._copier.submit(self._do_units, into=self._running_jobs)
            try:
                self._do_units()
            finally:
                # Also after an error: no thread may still read the sources.
                self._wait_for_running()
        except BaseException:
            # Ctrl-C, also during the wait above.
            self.cancel()
            raise
        self.wait()

    def _wait_for_running(self) -> None:
        for running in self._running_jobs:
            running.wait_until_done()

    def cancel(self) -> None:
        """Drops the units that have not begun, and waits for the begun ones: one per thread."""
        self._units.clear()
        self._wait_for_running()

    def wait(self) -> None:
        for running in self._running_jobs:
            running.result()

    def stall_s(self) -> float:
        return 0.0

    def _useful_threads(self) -> int:
        return min(len(self._units), self._copier.threads)

    def _do_units(self) -> None:
        while True:
            try:
                unit = self._units.popleft()
            except IndexError:
                return
            unit()


def _raise_niceness() -> None:
    """Nices this thread by DEFERRED_NICE, if that is allowed."""
    with contextlib.suppress(OSError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + DEFERRED_NICE)


def _copy_units(pieces: Sequence[CopyPiece]) -> list[Unit]:
    """The units of work in order of target: groups of small pieces, and single memmoves of larger ones."""

    def joins(group: list[CopyPiece], nbytes: int, piece: CopyPiece) -> bool:
        return nbytes < UNIT_BYTES and len(group) < GROUP_PIECES

    units: list[Unit] = []
    for grouped, run in groupby(pieces, key=_is_grouped):
        if grouped:
            units += map(_group_unit, group_pieces(run, joins))
        else:
            units += [_memmove_unit(p) for piece in run for p in split_piece(piece, UNIT_BYTES)]
    return units


def _is_flat(piece: CopyPiece) -> bool:
    """Whether a piece is plain bytes in host memory."""
    return piece.is_flat and piece.source.is_contiguous() and piece.source.device.type == "cpu"


def _is_wide(piece: CopyPiece) -> bool:
    """Whether a piece can be copied as elements of 16 bytes."""
    offsets = int(piece.source.storage_offset()), int(piece.target.storage_offset())
    return _is_flat(piece) and not any(n % WIDE_DTYPE.itemsize for n in (piece.nbytes, *offsets))


def _is_grouped(piece: CopyPiece) -> bool:
    return not _is_flat(piece) or piece.nbytes <= NARROW_BYTES or (piece.nbytes < SMALL_BYTES and _is_wide(piece))


def _group_unit(pieces: Sequence[CopyPiece]) -> Unit:
    """One unit of work for several small pieces."""
    units: list[Unit] = []
    others: list[CopyPiece] = []
    for run in group_pieces(pieces, _joins_run):
        if len(run) > 1:
            units.append(_concatenate_unit(run))
        else:
            others += run
    if others:
        units.append(_foreach_unit(others))

    def unit() -> None:
        for each in units:
            each()

    return unit


def _joins_run(run: list[CopyPiece], nbytes: int, piece: CopyPiece) -> bool:
    """Tiny pieces whose targets adjoin are together, below RUN_BYTES; every other piece is alone."""
    is_small = nbytes + piece.nbytes < RUN_BYTES and max(piece.nbytes, run[-1].nbytes) <= TINY_BYTES
    return is_small and piece.adjoins(run[-1]) and _is_flat(piece) and _is_flat(run[-1])


def _concatenate_unit(run: Sequence[CopyPiece]) -> Unit:
    sources = [piece.source for piece in run]
    first = run[0].target
    target = first.as_strided((sum(piece.nbytes for piece in run),), (1,), first.storage_offset())

    def unit() -> None:
        torch.cat(sources, out=target)

    return unit


def _foreach_unit(pieces: Sequence[CopyPiece]) -> Unit:
    wide = [_is_wide(piece) for piece in pieces]
    sources = [p.source.view(WIDE_DTYPE) if w else p.source for p, w in zip(pieces, wide, strict=True)]
    targets = [p.target.view(WIDE_DTYPE) if w else p.target for p, w in zip(pieces, wide, strict=True)]
    checked = [piece.source for piece in pieces if piece.nbytes > NARROW_BYTES]

    def unit() -> None:
        for source in checked:
            check_storage(source)
        torch._foreach_copy_(targets, sources)

    return unit


def _memmove_unit(piece: CopyPiece) -> Unit:
    source, target, nbytes = piece.source, piece.target, piece.nbytes

    def unit() -> None:
        # A storage may have been resized, so addresses are read anew for each copy.
        check_storage(source)
        ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)

    return unit


def has_same_bytes(source: Tensor, target: Tensor) -> bool:
    """Whether two host tensors of one dtype and shape hold the same bytes (NaN equals itself, -0 differs from 0). A
    source that has lost its storage equals nothing."""
    if _has_shrunk(source):
        return False
    one, other = flat_bytes(source.cpu()), flat_bytes(target.cpu())
    return bool(_memcmp(one.data_ptr(), other.data_ptr(), one.nbytes) == 0)


def check_storage(source: Tensor) -> None:
    """Raises CkptError if a view's memory was freed or shrank, which torch does not check."""
    if _has_shrunk(source):
        raise CkptError("a tensor's storage was freed or shrank after its views were made")


def _has_shrunk(source: Tensor) -> bool:
    last = sum((n - 1) * stride for n, stride in zip(source.shape, source.stride(), strict=True))
    return (source.storage_offset() + last + 1) * source.element_size() > source.untyped_storage().nbytes()
