"""Calls of the CUDA runtime that torch does not wrap: page locks, and the capture mode of a thread.

Pages are locked in parts of LOCK_BYTES, cut at addresses that are its multiples. After each part the thread pauses for
as long. While the driver locks pages, it lets no thread launch a kernel (83 ms for 2 GiB at once on an H200). No
transfer may cross the seam between two parts.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ckpt.errors import CkptError
from ckpt.trainer.state.pieces import address_and_size

LOCK_BYTES = 32 << 20


class PageLocks:
    """The page-locked regions of this process. `cuda` and `device_type`: see CudaCopier. Its lock is held for long; the
    training thread never takes it."""

    def __init__(self, cuda: Any, device_type: str) -> None:
        self._cuda, self._device_type = cuda, device_type
        self._parts_by_region: dict[int, list[int]] = {}  # by address of a region: the addresses of its locked parts
        self._is_closed = False
        self._lock = threading.Lock()

    def lock(self, data: memoryview) -> None:
        """Page-locks the region. Errors: CkptError with CUDA's own message. After close() it does nothing, since
        nothing would unlock the pages."""
        address, nbytes = address_and_size(data)
        with self._lock, relaxed_capture_mode():
            if self._is_closed:
                return
            done: list[int] = []
            try:
                for at, length in _seams(address, nbytes):
                    began_s = time.perf_counter()
                    self._lock_part(address + at, length)
                    done.append(address + at)
                    time.sleep(time.perf_counter() - began_s)
            except BaseException:  # Ctrl-C too
                self._unlock_parts(done)
                raise
            self._parts_by_region[address] = done

    def unlock(self, data: memoryview, wait: Callable[[], None]) -> None:
        """Unlocks the region, after `wait()`: no device may use it any more."""
        with self._lock, relaxed_capture_mode():
            parts = self._parts_by_region.pop(address_and_size(data)[0], [])
            try:
                wait()
            finally:
                self._unlock_parts(parts)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            parts = [part for each in self._parts_by_region.values() for part in each]
            self._parts_by_region = {}
            self._unlock_parts(parts)

    def _lock_part(self, address: int, nbytes: int) -> None:
        status = self._cuda.cudart().cudaHostRegister(address, nbytes, 1)  # 1: for all contexts
        if int(status) != 0:
            # CUDA keeps its last error, and the next kernel of the training would raise it. A kernel of ours clears it.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device_type).add_(1)
        self._check(status)

    def _unlock_parts(self, addresses: Sequence[int]) -> None:
        for status in [self._cuda.cudart().cudaHostUnregister(address) for address in addresses]:
            self._check(status)

    def _check(self, status: Any) -> None:
        if int(status) != 0:
            said = self._cuda.cudart().cudaGetErrorString(status)
            raise CkptError(f"CUDA did not lock or unlock the arena's pages: {said}")


def cut_at_seams(flat: Tensor) -> Iterator[tuple[int, int]]:
    """Parts (start, length) of flat bytes in host memory that cross no seam of locked pages."""
    return _seams(flat.data_ptr(), flat.nbytes)


def _seams(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    at = 0
    while at < nbytes:
        length = min(LOCK_BYTES - (address + at) % LOCK_BYTES, nbytes - at)
        yield at, length
        at += length


@contextlib.contextmanager
def relaxed_capture_mode() -> Iterator[None]:
    """A context for CUDA calls beside another thread's capture of a CUDA graph. By default, a call that could affect
    the capture fails, and the capture fails with it. The relaxed mode permits such calls."""
    exchange = _find_exchange_function()
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
def _find_exchange_function() -> Any:
    """cudaThreadExchangeStreamCaptureMode of the CUDA runtime that torch has loaded; None if there is none."""
    with contextlib.suppress(OSError, AttributeError):
        return ctypes.CDLL(_runtime_file_name(torch.version.cuda or "")).cudaThreadExchangeStreamCaptureMode
    return None


def _runtime_file_name(version: str) -> str:
    """The file name of a CUDA runtime: it ends in the major version, but for CUDA 11 in 11.0."""
    major = version.partition(".")[0]
    return f"libcudart.so.{'11.0' if major == '11' else major}"
