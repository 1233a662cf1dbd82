"""The control page: a word by which the agent appoints snapshots, and the step each rank has entered.

One memfd per job. The word at byte 0 is written by the agent and read by every trainer at each step; the slot at byte
64 x (1 + rank) is written by that trainer and read by the agent. Both are aligned 64-bit loads and stores, which are
atomic on the machines we run on; no decision depends on the order of two of them.

    word = round << 44 | slot << 40 | kind << 36 | step        0: nothing is appointed
"""

from __future__ import annotations

import enum
import fcntl
import mmap
import os
from dataclasses import dataclass

from ckpt.errors import AgentError

ROUND_MAX = (1 << 20) - 1
SLOT_MAX = 15
STEP_MAX = (1 << 36) - 1
WORLD_MAX = 4096


class Kind(enum.IntEnum):
    TAKE = 1  # take a snapshot when `step` has ended
    HOLD = 2  # take it, and hold until the agent says leave or go on


@dataclass(frozen=True, slots=True)
class Word:
    """`round`: 1..ROUND_MAX, compared for equality only. `slot`: which arena. `step`: at whose end."""

    round: int
    slot: int
    kind: Kind
    step: int

    def pack(self) -> int:
        if not (0 < self.round <= ROUND_MAX and 0 <= self.slot <= SLOT_MAX and 0 <= self.step <= STEP_MAX):
            raise AgentError(f"an appointment out of range: {self}")
        return self.round << 44 | self.slot << 40 | self.kind << 36 | self.step

    @staticmethod
    def unpack(word: int) -> Word | None:
        if word == 0:
            return None
        return Word(word >> 44, word >> 40 & 0xF, Kind(word >> 36 & 0xF), word & STEP_MAX)


class ControlPage:
    """Owns its mapping and its descriptor. `words` is the page as unsigned 64-bit integers: the trainer's step()
    reads `words[0]` itself, since a call costs more than the load."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, size)
        self.words = memoryview(self._map).cast("Q")

    @classmethod
    def create(cls, world: int) -> ControlPage:
        if not 0 < world <= WORLD_MAX:
            raise AgentError(f"a job of {world} ranks on one node; at most {WORLD_MAX}")
        size = -(-64 * (1 + world) // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("ckpt-control", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(fd)

    def announce(self, word: Word | None) -> None:
        self.words[0] = word.pack() if word else 0

    def word(self) -> Word | None:
        return Word.unpack(self.words[0])

    def enter(self, rank: int, step: int) -> None:
        self.words[8 * (1 + rank)] = step

    def entered(self, rank: int) -> int:
        return self.words[8 * (1 + rank)]

    def close(self) -> None:
        if not self._map.closed:
            self.words.release()
            self._map.close()
            os.close(self.fd)
