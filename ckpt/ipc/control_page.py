"""The control page: words by which the agent appoints snapshots, and where each rank is.

One memfd per job. From byte 0 on there is a word for each slot, written by the agent and read by every trainer at each
step; the line at byte 64 x (1 + rank) is written by that trainer and read by the agent. At byte 56 the agent puts the
round by which all ranks leave, before it tells the first of them: should it die then, the others find it there. All are
aligned 64-bit loads and stores, atomic on the machines we run on; no decision depends on the order of two of them.

    word = round << 44 | slot << 40 | kind << 36 | at        0: nothing is appointed
    at   = step, or for a poll after it (kind with POLL): (step mod 2^16) << 20 | poll
    line = entered step << 20 | polls, saves since the last ended step; behind it when that was, and whether it copies
"""

from __future__ import annotations

import enum
import fcntl
import mmap
import os
import time
from dataclasses import dataclass

from ckpt.errors import AgentError

SLOTS_MAX = 5  # of a job
ROUND_MAX = (1 << 20) - 1
STEP_MAX = (1 << 36) - 1
SUB_MAX = (1 << 20) - 1
WORLD_MAX = 4096
WAITING = "gradients wait for an update"  # why what is appointed at a step without one is missed
AMID = "in the middle of a step"  # why what is appointed at a poll is missed, and would be at the next one
_LEAVE = 7  # the word of the page that says by which round
_POLL = 8  # in the kind
_STEP_LOW = (1 << 16) - 1  # so much of its step is told with a poll: all ranks are known to be at it


class WordKind(enum.IntEnum):
    TAKE = 1  # take a snapshot at that tick
    HOLD = 2  # take it, and hold until the agent says leave or go on


class RankPlace(enum.Enum):
    EARLY = "early"  # the appointed tick is yet to come
    DUE = "due"
    LATE = "late"  # it will not come any more


@dataclass(frozen=True, slots=True)
class ControlWord:
    """`round`: 1..ROUND_MAX, compared for equality only. `slot`: which arenas. `step`, `sub`: at which tick; with sub 0
    the end of that step. Of a word that was read, with sub > 0, `step` is only known modulo 2^16: ask `place`."""

    round: int
    slot: int
    kind: WordKind
    step: int
    sub: int = 0

    def pack(self) -> int:
        ranges = (self.round, ROUND_MAX), (self.slot, SLOTS_MAX - 1), (self.step, STEP_MAX), (self.sub, SUB_MAX)
        if self.round == 0 or not all(0 <= value <= most for value, most in ranges):
            raise AgentError(f"an appointment out of range: {self}")
        kind, at = int(self.kind), self.step
        if self.sub:
            kind, at = kind | _POLL, (self.step & _STEP_LOW) << 20 | self.sub
        return self.round << 44 | self.slot << 40 | kind << 36 | at

    @staticmethod
    def unpack(word: int) -> ControlWord | None:
        if word == 0:
            return None
        kind, at = word >> 36 & 0xF, word & STEP_MAX
        step, sub = (at >> 20, at & SUB_MAX) if kind & _POLL else (at, 0)
        return ControlWord(word >> 44, word >> 40 & 0xF, WordKind(kind & ~_POLL), step, sub)

    def place(self, step: int, sub: int) -> RankPlace:
        """Where the appointed tick is, as seen by a rank that is at (step, sub), the last ended step and what came
        since."""
        here, there = (step, sub), (self.step, self.sub)
        if self.sub:
            if step & _STEP_LOW != self.step:
                return RankPlace.LATE
            here, there = (0, sub), (0, self.sub)
        return RankPlace.DUE if here == there else RankPlace.EARLY if here < there else RankPlace.LATE


class ControlPage:
    """Owns its mapping and its descriptor. `words`: those of the slots, as unsigned 64-bit integers: the trainer reads
    them itself, since a call costs more than the loads."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, size)
        self._page = memoryview(self._map).cast("Q")
        self.words = self._page[:SLOTS_MAX]

    @classmethod
    def create(cls, world: int) -> ControlPage:
        if not 0 < world <= WORLD_MAX:
            raise AgentError(f"a job of {world} ranks on one node; at most {WORLD_MAX}")
        size = -(-64 * (1 + world) // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("ckpt-control", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(fd)

    def announce(self, slot: int, word: ControlWord | None) -> None:
        """What that slot is appointed for; None: nothing. Errors: AgentError for a word of another slot."""
        if not 0 <= slot < SLOTS_MAX or (word is not None and word.slot != slot):
            raise AgentError(f"an appointment of slot {slot} that is none: {word}")
        self.words[slot] = word.pack() if word is not None else 0

    def appointed(self) -> list[ControlWord]:
        return [word for each in self.words if (word := ControlWord.unpack(each)) is not None]

    def leave(self, round_: int) -> None:
        """The verdict of that round is: leave."""
        self._page[_LEAVE] = round_

    def leaves(self) -> int:
        """The round by which the ranks leave; 0: none."""
        return self._page[_LEAVE]

    def enter(self, rank: int, step: int, sub: int = 0) -> None:
        """`rank` is in `step`, and has polled or saved `sub` times since the step before it ended. Since when, too, for
        whoever asks how long that step still takes: a hint, which may belong to the step before."""
        if not sub:
            self._page[8 * (1 + rank) + 1] = time.monotonic_ns()
        self._page[8 * (1 + rank)] = step << 20 | min(sub, SUB_MAX)

    def entered(self, rank: int) -> int:
        return self._page[8 * (1 + rank)] >> 20

    def since_s(self, rank: int) -> float | None:
        """When it entered that step, on the host's monotonic clock; None: none yet."""
        at_ns = self._page[8 * (1 + rank) + 1]
        return at_ns / 1e9 if at_ns else None

    def copy(self, rank: int, begins: bool) -> None:
        """Training of `rank` stands still for a copy, or goes on. A hint."""
        self._page[8 * (1 + rank) + 2] = begins

    @property
    def copies(self) -> bool:
        """Whether training of some rank stands still for a copy."""
        return any(self._page[8 + 2 :: 8])

    def polled(self, rank: int) -> int:
        return self._page[8 * (1 + rank)] & SUB_MAX

    def close(self) -> None:
        if self.fd >= 0:
            self.words.release()
            self._page.release()
            self._map.close()
            fd, self.fd = self.fd, -1
            os.close(fd)
