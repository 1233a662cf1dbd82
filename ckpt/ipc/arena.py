"""An arena: one memfd that holds one rank's packed shards, with a first page that describes its content.

    0        header page: the trainer's half [0, 2048), written last, zeroed when a fill begins;
             the agent's half [2048, 4096): where the frame hashes are, written once they are known, and whether the
             snapshot is replicated
    4096     data region; Staging offsets are relative to it
    then     declaration | shared values | own values | about | frame hashes, each 64-aligned, as the header says

An arena has one writer at a time: first the trainer that holds the grant, and after `snapshot-staged` the agent. A
mapping cannot be revoked. So the agent grants an arena to one trainer incarnation, and to another only after that
process is dead. The memfd is sealed against shrinking, since a truncation would kill a training process by SIGBUS.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from ckpt.errors import AgentError, DamagedData
from ckpt.ipc.control_page import SUB_MAX
from ckpt.types import Epoch, Identity, Version

PAGE = 4096
DATA_OFFSET = PAGE
# The unit in which memory is touched: about 5 ms of work on fresh pages.
WARM_BYTES = 16 << 20
# The longest pause before each unit, to give way to a rank that copies while its training is paused.
YIELD_S_MAX = 0.2
_MAGIC = b"CKPTARN1"
STEP_MAX = 10**12 - 1  # the largest step that the text form of a version can hold
_AGENT_OFFSET = 2048
_AGENT_MAGIC = b"CKPTHASH"
_REPLICATED_PLACE = slice(3072, 3080)
_REPLICATED = b"CKPTREPL"
# magic, epoch number, nonce, step, sub, rank, world, data bytes, then (offset, length) of the four parts
_TRAINER_HALF = struct.Struct("<8sQ16sQIIIQ8Q")
_AGENT_HALF = struct.Struct("<8sQQ16s")  # magic, offset, length, xxh3-128 of the hash table

_NAME = "ckpt-arena"
_PROC_NAME = f"/memfd:{_NAME} (deleted)"  # the name that /proc shows
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # values on x86 and ARM
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_mmap.restype = ctypes.c_void_p

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Header:
    """The description that a sealed arena holds. Parts are (offset, length) within the memfd."""

    identity: Identity
    rank: int
    world: int
    data_bytes: int
    declaration: tuple[int, int]
    shared: tuple[int, int]
    own: tuple[int, int]
    about: tuple[int, int]

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        return (self.declaration, self.shared, self.own, self.about)


def align(offset: int, to: int = 64) -> int:
    return -(-offset // to) * to


def arena_bytes(data_bytes: int, frames: int, declaration_bytes: int, values_bytes: int) -> int:
    """The size that an arena needs, in bytes: data, declaration, values (room to double, at least 1 MiB), hashes."""
    room = max(1 << 20, 2 * values_bytes)
    return align(DATA_OFFSET + align(data_bytes) + align(declaration_bytes) + room + 16 * frames + 256, mmap.PAGESIZE)


def created_bytes(size: int) -> int:
    """The size of the arena that `Arena.create(size)` makes, in bytes."""
    return align(max(size, PAGE), mmap.PAGESIZE)


class Arena:
    """One arena; owns its descriptor and its shared mapping. Not thread-safe; the module says who writes when."""

    def __init__(self, fd: int) -> None:
        """Takes over the descriptor. Errors: AgentError if the memfd is smaller than one page; OSError; ValueError."""
        self.fd = fd
        self.size_bytes = os.fstat(fd).st_size
        if self.size_bytes < PAGE:
            raise AgentError(f"an arena of {self.size_bytes} bytes has no room for its header")
        self._map = mmap.mmap(fd, self.size_bytes)
        # Huge pages (shmem_enabled: advise) make a new mapping almost free. Without them a restore spends a third of
        # its time on page faults and unmapping. A kernel without huge pages raises OSError.
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, size: int) -> Arena:
        """A new arena of `created_bytes(size)`, whose pages are not touched yet. Errors: OSError."""
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, created_bytes(size))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def adopt(cls, fd: int) -> Arena:
        """The arena of a descriptor that came over a socket. A refused descriptor is closed. Errors: AgentError if the
        descriptor is not sealed against shrinking, or cannot be mapped."""
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise AgentError("a descriptor given as an arena is not sealed against shrinking")
            return cls(fd)
        except (OSError, ValueError) as exc:
            os.close(fd)
            raise AgentError(f"a descriptor given as an arena is not a memfd that can be mapped: {exc}") from exc
        except BaseException:
            os.close(fd)
            raise

    @property
    def untouched_bytes(self) -> int:
        """The bytes of pages that were never touched: memory that the arena will still take from the machine."""
        return max(0, self.size_bytes - 512 * os.fstat(self.fd).st_blocks)

    def warm(self, between: Callable[[], object] = lambda: None) -> None:
        """Touches every page, so that later writes are fast: a fresh page costs ten times a warm one.

        The content stays. The arena must have no other writer meanwhile. Touching runs outside the GIL. `between` is
        called before every WARM_BYTES, and may wait."""
        pages = np.frombuffer(self._map, dtype=np.uint8)
        for at in range(0, len(pages), WARM_BYTES):
            between()
            some = pages[at : at + WARM_BYTES : mmap.PAGESIZE]
            np.bitwise_or(some, 0, out=some)

    def data(self, offset: int, length: int) -> memoryview:
        """A view of the data region, `offset` bytes from its start."""
        return self.view[DATA_OFFSET + offset : DATA_OFFSET + offset + length]

    def part(self, place: tuple[int, int]) -> memoryview:
        return self.view[place[0] : place[0] + place[1]]

    # -- the trainer's half

    def begin_fill(self) -> None:
        """Clears the header: the arena holds no snapshot from now until `seal`."""
        self.view[:PAGE] = bytes(PAGE)

    def write_declaration(self, data_bytes: int, declaration: bytes) -> tuple[int, int]:
        """Writes the declaration behind the data region; returns its (offset, length), valid until the next call."""
        at = align(DATA_OFFSET + data_bytes)
        self._write(at, declaration)
        return at, len(declaration)

    def values_room(self, declaration: tuple[int, int], frames: int) -> int:
        """The bytes that are free behind the declaration for shared values, own values and about."""
        return self.size_bytes - align(sum(declaration)) - align(16 * frames) - 256

    def seal(
        self,
        identity: Identity,
        rank: int,
        world: int,
        data_bytes: int,
        declaration: tuple[int, int],
        shared: bytes,
        own: bytes,
        about: bytes,
    ) -> Header:
        """Writes the values and then the header. From now on the arena holds the snapshot `identity`."""
        at = align(sum(declaration))
        places = []
        for part in (shared, own, about):
            self._write(at, part)
            places.append((at, len(part)))
            at = align(at + len(part))
        header = Header(identity, rank, world, data_bytes, declaration, places[0], places[1], places[2])
        half = _TRAINER_HALF.pack(
            _MAGIC,
            identity.epoch.number,
            identity.epoch.nonce.encode(),
            identity.version.step,
            identity.version.sub,
            rank,
            world,
            data_bytes,
            *(number for place in header.parts for number in place),
        )
        self.view[: len(half) + 16] = half + xxhash.xxh3_128_digest(half)
        return header

    # -- the agent's half

    def header(self) -> Header:
        """The header. Errors: DamagedData if the arena holds no sealed snapshot, or the header is malformed."""
        half = bytes(self.view[: _TRAINER_HALF.size])
        digest = bytes(self.view[_TRAINER_HALF.size : _TRAINER_HALF.size + 16])
        if half[:8] != _MAGIC or xxhash.xxh3_128_digest(half) != digest:
            raise DamagedData("an arena holds no sealed snapshot")
        _, number, nonce, step, sub, rank, world, data_bytes, *flat = _TRAINER_HALF.unpack(half)
        places = [(flat[i], flat[i + 1]) for i in range(0, 8, 2)]
        if DATA_OFFSET + data_bytes > self.size_bytes or any(at + length > self.size_bytes for at, length in places):
            raise DamagedData("an arena's header points outside the arena")
        if step > STEP_MAX or sub > SUB_MAX:
            raise DamagedData(f"an arena's header has an invalid version: step {step}, sub-step {sub}")
        try:
            epoch = Epoch.parse(f"{number:08d}-{nonce.decode('ascii')}")
        except ValueError as exc:
            raise DamagedData("an arena's header has an invalid epoch") from exc
        return Header(Identity(epoch, Version(step, sub)), rank, world, data_bytes, *places)

    def write_hashes(self, header: Header, hashes: npt.NDArray[np.uint64]) -> None:
        """Stores the frame hashes in the arena, so that they outlive the agent. `hashes`: shape (frames, 2), (hi,
        lo)."""
        at = align(max(offset + length for offset, length in header.parts))
        table = np.ascontiguousarray(hashes, dtype="<u8").tobytes()
        self._write(at, table)
        half = _AGENT_HALF.pack(_AGENT_MAGIC, at, len(table), xxhash.xxh3_128_digest(table))
        self.view[_AGENT_OFFSET : _AGENT_OFFSET + len(half)] = half

    def hashes(self) -> npt.NDArray[np.uint64] | None:
        """The frame hashes, shape (frames, 2); None if none were written since the arena was filled, or they are
        damaged."""
        magic, at, length, digest = _AGENT_HALF.unpack_from(self.view, _AGENT_OFFSET)
        if magic != _AGENT_MAGIC or at + length > self.size_bytes or length % 16:
            return None
        table = bytes(self.view[at : at + length])
        if xxhash.xxh3_128_digest(table) != digest:
            return None
        return np.frombuffer(table, dtype="<u8").reshape(-1, 2).astype(np.uint64)

    def tail(self) -> tuple[int, int]:
        """(offset, length) of everything behind the data of a sealed and hashed arena: from the first part to the end
        of the hashes. Errors: DamagedData if the arena is not sealed or has no hashes."""
        header = self.header()
        magic, at, length, _ = _AGENT_HALF.unpack_from(self.view, _AGENT_OFFSET)
        if magic != _AGENT_MAGIC or at + length > self.size_bytes:
            raise DamagedData("an arena has no hashes")
        first = min(offset for offset, _ in header.parts)
        return first, at + length - first

    @property
    def is_replicated(self) -> bool:
        """Whether `mark_replicated` was called since the arena was filled."""
        return bytes(self.view[_REPLICATED_PLACE]) == _REPLICATED

    def mark_replicated(self) -> None:
        """The snapshot's checkpoint is replicated. The mark outlives the agent, but is not in `header_page`."""
        self.view[_REPLICATED_PLACE] = _REPLICATED

    def header_page(self) -> bytes:
        """A copy of the first page. Another arena with this page and the same bytes behind it holds the same
        snapshot."""
        page = bytearray(self.view[:PAGE])
        page[_REPLICATED_PLACE] = bytes(len(_REPLICATED))
        return bytes(page)

    def write_header_page(self, page: bytes) -> None:
        """Writes the first page. Call it after all other bytes. Errors: AgentError if `page` has a wrong length."""
        if len(page) != PAGE:
            raise AgentError(f"the first page of an arena has {len(page)} bytes instead of {PAGE}")
        self.view[:PAGE] = page

    def close(self) -> None:
        """Unmaps and closes the arena. Views that callers still hold keep the mapping alive until they are dropped."""
        if self.fd >= 0:
            self.view.release()
            # BufferError: a caller holds a view. The mapping ends with that view.
            with contextlib.suppress(BufferError):
                self._map.close()
            fd, self.fd = self.fd, -1
            # The mapping holds a descriptor of its own.
            del self._map
            os.close(fd)

    def _write(self, at: int, data: bytes) -> None:
        if at + len(data) > self.size_bytes:
            raise AgentError(f"an arena of {self.size_bytes} bytes has no room for {len(data)} bytes from byte {at} on")
        self.view[at : at + len(data)] = data


def abandon_in_child() -> None:
    """Releases the memory of all arenas of the parent process; call it in a forked child.

    It finds descriptors and mappings in /proc, so it also releases arenas that no object owns yet. Existing views
    then show anonymous pages, which take no memory until they are written. Errors: OSError."""
    nothing, failed = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 0
    # Descriptors are replaced, not closed: a mapping has a descriptor of its own and closes it with its last view.
    for name in os.listdir("/proc/self/fd"):
        # OSError: the descriptor of the listing itself, which is closed by now.
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == _PROC_NAME:
                os.dup2(nothing, int(name), inheritable=False)
    os.close(nothing)
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    for line in Path("/proc/self/maps").read_text(errors="replace").split("\n"):
        if line.endswith(f" {_PROC_NAME}"):
            at, end = (int(each, 16) for each in line.partition(" ")[0].split("-"))
            if _mmap(at, end - at, mmap.PROT_READ | mmap.PROT_WRITE, anonymous, -1, 0) != at:
                failed = ctypes.get_errno()
    if failed:
        raise OSError(failed, os.strerror(failed))
