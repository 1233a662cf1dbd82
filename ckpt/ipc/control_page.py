"""The control page of one job: a shared memfd with which the agent appoints snapshots and each rank shows its position.

From byte 0 on there is one control word per slot. The agent writes it, and every trainer reads it at each step. The
cache line at byte 64 x (1 + rank) is written by the trainer of that rank and read by the agent. Byte 56 holds the round
(save attempt) after which all ranks leave. The agent writes this round before it tells the first rank, so the other
ranks find it even if the agent dies. All accesses are aligned 64-bit loads and stores, which are atomic on the
supported machines. No decision depends on the order of two of them.

    word = round << 44 | slot << 40 | kind << 36 | at        0: nothing is appointed
    at   = step, or for a poll after it (kind with POLL): (step mod 2^16) << 20 | poll
    line = entered step << 20 | polls and saves since the last ended step; entry time in ns; whether the rank copies
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
ATTEMPT_MAX = (1 << 20) - 1
STEP_MAX = (1 << 36) - 1
SUB_MAX = (1 << 20) - 1
WORLD_MAX = 1 << 14  # the page has 64 bytes for each: 1 MiB
# Why a rank missed a snapshot that was appointed at the end of a step.
GRADIENTS_WAIT = "gradients wait for an update"
# Why a rank missed a snapshot that was appointed at a poll. The rank would miss the next poll, too.
MID_STEP = "in the middle of a step"
_LEAVE_INDEX = 7  # index of the 64-bit value at byte 56
_POLL_FLAG = 8  # flag in `kind`
# A word for a poll has room for these low bits of the step only. They suffice, since all ranks are in that step.
_STEP_MASK = (1 << 16) - 1


class WordKind(enum.IntEnum):
    """What the ranks do at the appointed version."""

    TAKE = 1  # take a snapshot
    HOLD = 2  # take a snapshot, then wait until the agent decides: leave or go on


class RankPlace(enum.Enum):
    """The position of the appointed version, as seen by one rank."""

    EARLY = "early"  # still ahead of the rank
    DUE = "due"
    LATE = "late"  # passed; the rank will not reach it


@dataclass(frozen=True, slots=True)
class ControlWord:
    """One appointment: a snapshot at version (`step`, `sub`) into the arenas of `slot`.

    `attempt_number`: number of the save attempt, 1..ATTEMPT_MAX, compared for equality only. `sub`: 0 means the end of
    that step. A word that was read with `sub` > 0 knows `step` only modulo 2^16; use `place_for` to compare it."""

    attempt_number: int
    slot: int
    kind: WordKind
    step: int
    sub: int = 0

    def pack(self) -> int:
        """The word as 64 bits. Errors: AgentError if a field is out of range."""
        ranges = (
            (self.attempt_number, ATTEMPT_MAX),
            (self.slot, SLOTS_MAX - 1),
            (self.step, STEP_MAX),
            (self.sub, SUB_MAX),
        )
        if self.attempt_number == 0 or not all(0 <= value <= most for value, most in ranges):
            raise AgentError(f"the appointment {self} is out of range")
        kind, at = int(self.kind), self.step
        if self.sub:
            kind, at = kind | _POLL_FLAG, (self.step & _STEP_MASK) << 20 | self.sub
        return self.attempt_number << 44 | self.slot << 40 | kind << 36 | at

    @staticmethod
    def unpack(word: int) -> ControlWord | None:
        """The appointment that a 64-bit word holds; None if it is 0."""
        if word == 0:
            return None
        kind, at = word >> 36 & 0xF, word & STEP_MAX
        step, sub = (at >> 20, at & SUB_MAX) if kind & _POLL_FLAG else (at, 0)
        return ControlWord(word >> 44, word >> 40 & 0xF, WordKind(kind & ~_POLL_FLAG), step, sub)

    def place_for(self, step: int, sub: int) -> RankPlace:
        """The position of the appointed version for a rank whose last ended step is `step`, with `sub` polls and saves
        since then."""
        here, there = (step, sub), (self.step, self.sub)
        if self.sub:
            if step & _STEP_MASK != self.step:
                return RankPlace.LATE
            here, there = (0, sub), (0, self.sub)
        return RankPlace.DUE if here == there else RankPlace.EARLY if here < there else RankPlace.LATE


class ControlPage:
    """The mapping of one control page; owns the mapping and the descriptor. `control_words`: the control words of all
    slots, as unsigned 64-bit integers. The trainer reads them directly, since a method call costs more than the
    loads."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, size)
        self._page = memoryview(self._map).cast("Q")
        self.control_words = self._page[:SLOTS_MAX]

    @classmethod
    def create(cls, world: int) -> ControlPage:
        """A new, empty page for a job of `world` ranks, sealed against resizing. Errors: AgentError above WORLD_MAX."""
        if not 0 < world <= WORLD_MAX:
            raise AgentError(f"the job has {world} ranks; 1 to {WORLD_MAX} are allowed")
        size = -(-64 * (1 + world) // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("ckpt-control", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(fd)

    def announce(self, slot: int, word: ControlWord | None) -> None:
        """Writes the appointment of `slot`; None clears it. Errors: AgentError if `word` belongs to another slot."""
        if not 0 <= slot < SLOTS_MAX or (word is not None and word.slot != slot):
            raise AgentError(f"slot {slot} cannot take the appointment {word}")
        self.control_words[slot] = word.pack() if word is not None else 0

    def appointments(self) -> list[ControlWord]:
        return [word for each in self.control_words if (word := ControlWord.unpack(each)) is not None]

    def publish_leave(self, attempt: int) -> None:
        """Publishes the verdict "leave" for save attempt `attempt`."""
        self._page[_LEAVE_INDEX] = attempt

    def leave_attempt(self) -> int:
        """The save attempt after which the ranks leave; 0: none."""
        return self._page[_LEAVE_INDEX]

    def publish_step(self, rank: int, step: int, sub: int = 0) -> None:
        """Publishes that `rank` is in `step` and has polled or saved `sub` times since the previous step ended.

        With `sub` 0 it also publishes the entry time, from which the agent estimates when the step ends. The time is a
        hint: a reader may still see the one of the previous step."""
        if not sub:
            self._page[8 * (1 + rank) + 1] = time.monotonic_ns()
        self._page[8 * (1 + rank)] = step << 20 | min(sub, SUB_MAX)

    def entered_step(self, rank: int) -> int:
        """The step that `rank` is in; 0: none yet."""
        return self._page[8 * (1 + rank)] >> 20

    def entry_time_s(self, rank: int) -> float | None:
        """When `rank` entered its step, in seconds of the host's monotonic clock; None: no step yet."""
        at_ns = self._page[8 * (1 + rank) + 1]
        return at_ns / 1e9 if at_ns else None

    def publish_copying(self, rank: int, begins: bool) -> None:
        """Publishes that training of `rank` pauses for a copy (`begins`), or goes on. A hint."""
        self._page[8 * (1 + rank) + 2] = begins

    @property
    def has_copying_rank(self) -> bool:
        """Whether training of some rank is paused for a copy."""
        return any(self._page[8 + 2 :: 8])

    def poll_count(self, rank: int) -> int:
        """How often `rank` polled or saved since the last ended step."""
        return self._page[8 * (1 + rank)] & SUB_MAX

    def close(self) -> None:
        if self.fd >= 0:
            self.control_words.release()
            self._page.release()
            self._map.close()
            fd, self.fd = self.fd, -1
            os.close(fd)
