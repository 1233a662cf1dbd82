"""An arena: one memfd in which one rank's shards lie packed, with a first page that says what it holds.

    0        header page: the trainer's half [0, 2048), written last, zeroed when a fill begins;
             the agent's half [2048, 4096): where the frame hashes are, written once they are known
    4096     data region; Staging offsets are relative to it
    then     declaration | shared values | own values | about | frame hashes, each 64-aligned, as the header says

One writer at a time: the trainer that was granted it until `staged`, then the agent. A mapping cannot be revoked, so
the agent grants an arena to one trainer incarnation and again only when that process is dead. The memfd is sealed
against shrinking: a truncation would kill a training process by SIGBUS.
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
from ckpt.types import Epoch, Identity, Tick

PAGE = 4096
DATA_AT = PAGE
WARM_BYTES = 16 << 20  # some 5 ms of work where pages are fresh
GIVE_WAY_S = 0.2  # at most, before each of these, while training stands still
_MAGIC = b"CKPTARN1"
STEP_MAX = 10**12 - 1  # what a tick's written form has room for
_AGENT_AT = 2048
_AGENT_MAGIC = b"CKPTHASH"
# magic, epoch number, nonce, step, sub, rank, world, data bytes, then (offset, length) of the four parts
_TRAINER_HALF = struct.Struct("<8sQ16sQIIIQ8Q")
_AGENT_HALF = struct.Struct("<8sQQ16s")  # magic, offset, length, xxh3-128 of the hash table

_NAME = "ckpt-arena"
_SHOWN = f"/memfd:{_NAME} (deleted)"  # by the kernel
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # as on x86 and ARM
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_mmap.restype = ctypes.c_void_p

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Header:
    """What a staged arena says of itself. Parts are (offset, length) within the memfd."""

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
    """How large an arena has to be: data, declaration, values (with room to double, at least 1 MiB), hashes."""
    room = max(1 << 20, 2 * values_bytes)
    return align(DATA_AT + align(data_bytes) + align(declaration_bytes) + room + 16 * frames + 256, mmap.PAGESIZE)


def created_bytes(size: int) -> int:
    """Of an arena that is made for so many."""
    return align(max(size, PAGE), mmap.PAGESIZE)


class Arena:
    """Owns a descriptor and its shared mapping. Not thread-safe; see the module for who writes when."""

    def __init__(self, fd: int) -> None:
        """Takes over the descriptor."""
        self.fd = fd
        self.bytes = os.fstat(fd).st_size
        if self.bytes < PAGE:
            raise AgentError(f"an arena of {self.bytes} bytes has no room for its header")
        self._map = mmap.mmap(fd, self.bytes)
        # Where the kernel gives huge pages to shared memory that asks for them (shmem_enabled: advise), a new mapping
        # costs next to nothing. Elsewhere a restore spends a third of its time on page faults and unmapping.
        with contextlib.suppress(OSError):  # a kernel without them
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, size: int) -> Arena:
        """A new one of `created_bytes`, its pages not yet touched. Errors: OSError."""
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
        """One that came over a socket; the descriptor is closed where it is refused.

        Errors: AgentError if it could be truncated under us, or cannot be mapped and written."""
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise AgentError("a descriptor given as an arena is not sealed against shrinking")
            return cls(fd)
        except (OSError, ValueError) as exc:
            os.close(fd)
            raise AgentError(f"a descriptor given as an arena is no memfd that can be mapped: {exc}") from exc
        except BaseException:
            os.close(fd)
            raise

    @property
    def to_take_bytes(self) -> int:
        """Of its pages that nobody has touched, which the machine still has."""
        return max(0, self.bytes - 512 * os.fstat(self.fd).st_blocks)

    def warm(self, between: Callable[[], object] = lambda: None) -> None:
        """Touches every page, so that no later write waits for one: a fresh page costs ten times a warm one.
        Keeps the content; the arena must have no other writer meanwhile. Runs outside the GIL; `between` is called
        every WARM_BYTES, and may wait."""
        pages = np.frombuffer(self._map, dtype=np.uint8)
        for at in range(0, len(pages), WARM_BYTES):
            between()
            some = pages[at : at + WARM_BYTES : mmap.PAGESIZE]
            np.bitwise_or(some, 0, out=some)

    def data(self, offset: int, length: int) -> memoryview:
        """Bytes of the data region."""
        return self.view[DATA_AT + offset : DATA_AT + offset + length]

    def part(self, place: tuple[int, int]) -> memoryview:
        return self.view[place[0] : place[0] + place[1]]

    # -- the trainer's half

    def begin_fill(self) -> None:
        """From here on it holds nothing, until `seal`."""
        self.view[:PAGE] = bytes(PAGE)

    def write_declaration(self, data_bytes: int, declaration: bytes) -> tuple[int, int]:
        """Puts the declaration behind the data region; its place stays the same until it is written anew."""
        at = align(DATA_AT + data_bytes)
        self._put(at, declaration)
        return at, len(declaration)

    def values_room(self, declaration: tuple[int, int], frames: int) -> int:
        """How many bytes of shared values, own values and about fit behind the declaration."""
        return self.bytes - align(sum(declaration)) - align(16 * frames) - 256

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
        """Writes the values and, last, the header: from here on it holds `identity`."""
        at = align(sum(declaration))
        places = []
        for part in (shared, own, about):
            self._put(at, part)
            places.append((at, len(part)))
            at = align(at + len(part))
        header = Header(identity, rank, world, data_bytes, declaration, places[0], places[1], places[2])
        half = _TRAINER_HALF.pack(
            _MAGIC,
            identity.epoch.number,
            identity.epoch.nonce.encode(),
            identity.tick.step,
            identity.tick.sub,
            rank,
            world,
            data_bytes,
            *(number for place in header.parts for number in place),
        )
        self.view[: len(half) + 16] = half + xxhash.xxh3_128_digest(half)
        return header

    # -- the agent's half

    def header(self) -> Header:
        """Errors: DamagedData when nothing is sealed in it, or the header is not sound."""
        half = bytes(self.view[: _TRAINER_HALF.size])
        digest = bytes(self.view[_TRAINER_HALF.size : _TRAINER_HALF.size + 16])
        if half[:8] != _MAGIC or xxhash.xxh3_128_digest(half) != digest:
            raise DamagedData("an arena holds no sealed snapshot")
        _, number, nonce, step, sub, rank, world, data_bytes, *flat = _TRAINER_HALF.unpack(half)
        places = [(flat[i], flat[i + 1]) for i in range(0, 8, 2)]
        if DATA_AT + data_bytes > self.bytes or any(at + length > self.bytes for at, length in places):
            raise DamagedData("an arena's header points outside the arena")
        if step > STEP_MAX or sub > SUB_MAX:
            raise DamagedData(f"an arena's header names no tick: step {step}, {sub} within it")
        try:
            epoch = Epoch.parse(f"{number:08d}-{nonce.decode('ascii')}")
        except ValueError as exc:
            raise DamagedData("an arena's header names no epoch") from exc
        return Header(Identity(epoch, Tick(step, sub)), rank, world, data_bytes, *places)

    def write_hashes(self, header: Header, hashes: npt.NDArray[np.uint64]) -> None:
        """Keeps the frame hashes with the frames, so that they outlive the agent. hashes: (frames, 2), hi and lo."""
        at = align(max(offset + length for offset, length in header.parts))
        table = np.ascontiguousarray(hashes, dtype="<u8").tobytes()
        self._put(at, table)
        half = _AGENT_HALF.pack(_AGENT_MAGIC, at, len(table), xxhash.xxh3_128_digest(table))
        self.view[_AGENT_AT : _AGENT_AT + len(half)] = half

    def hashes(self) -> npt.NDArray[np.uint64] | None:
        """(frames, 2), or None where none were written since the arena was filled."""
        magic, at, length, digest = _AGENT_HALF.unpack_from(self.view, _AGENT_AT)
        if magic != _AGENT_MAGIC or at + length > self.bytes or length % 16:
            return None
        table = bytes(self.view[at : at + length])
        if xxhash.xxh3_128_digest(table) != digest:
            return None
        return np.frombuffer(table, dtype="<u8").reshape(-1, 2).astype(np.uint64)

    def tail(self) -> tuple[int, int]:
        """What lies behind the data of a sealed and hashed arena: offset and length, from the first part to the end of
        the hashes. Errors: DamagedData."""
        header = self.header()
        magic, at, length, _ = _AGENT_HALF.unpack_from(self.view, _AGENT_AT)
        if magic != _AGENT_MAGIC or at + length > self.bytes:
            raise DamagedData("an arena has no hashes")
        first = min(offset for offset, _ in header.parts)
        return first, at + length - first

    def page(self) -> bytes:
        """Its first page: what makes an arena with the same bytes behind it hold the same."""
        return bytes(self.view[:PAGE])

    def set_page(self, page: bytes) -> None:
        """Written last. Errors: AgentError."""
        if len(page) != PAGE:
            raise AgentError(f"the first page of an arena has {len(page)} bytes instead of {PAGE}")
        self.view[:PAGE] = page

    def close(self) -> None:
        """Unmaps and closes; views that others still hold keep the mapping alive until they are dropped."""
        if self.fd >= 0:
            self.view.release()
            with contextlib.suppress(BufferError):  # a caller's view is alive: the mapping goes with that
                self._map.close()
            fd, self.fd = self.fd, -1
            del self._map  # it has a descriptor of its own
            os.close(fd)

    def _put(self, at: int, data: bytes) -> None:
        if at + len(data) > self.bytes:
            raise AgentError(f"an arena of {self.bytes} bytes has no room for {len(data)} bytes at {at}")
        self.view[at : at + len(data)] = data


def abandon_in_child() -> None:
    """In a forked child: no memory of its parent's arenas stays here, whoever had them there, or had just received
    them. Views of it are of other pages then, which take none until they are written to. Errors: OSError."""
    nothing, failed = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 0
    for name in os.listdir("/proc/self/fd"):  # a mapping has one of its own, which it closes with its last view
        with contextlib.suppress(OSError):  # that of the list itself
            if os.readlink(f"/proc/self/fd/{name}") == _SHOWN:
                os.dup2(nothing, int(name), inheritable=False)
    os.close(nothing)
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
    for line in Path("/proc/self/maps").read_text(errors="replace").split("\n"):
        if line.endswith(f" {_SHOWN}"):
            at, end = (int(each, 16) for each in line.partition(" ")[0].split("-"))
            if _mmap(at, end - at, mmap.PROT_READ | mmap.PROT_WRITE, anonymous, -1, 0) != at:
                failed = ctypes.get_errno()
    if failed:
        raise OSError(failed, os.strerror(failed))
