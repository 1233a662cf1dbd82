"""The slots of one job and the save attempts in them. Pure.

A slot holds one save attempt, and an attempt is one version. A slot is an arena on each rank.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckpt.ipc.control_page import SLOTS_MAX
from ckpt.types import Version

RETRY_S_MAX = 60.0
FAILURES_MAX = 16  # counted; more make no longer pause


class SaveReason(enum.Enum):
    """Why a save attempt was made."""

    STEP = "appointed"
    DUE = "due"  # the policy names that step, and all ranks ask for it
    HOLD = "hold"  # the last snapshot before a deadline, at which the ranks wait
    SAVE = "save"  # ck.save()
    EXIT = "exit"  # the end of the block


class SlotState(enum.Enum):
    """The state of a slot: that of the save attempt in it, or FREE."""

    FREE = "free"
    GRANTED = "granted"  # announced or granted: ranks may be filling it
    STAGED = "staged"
    COMPLETE = "complete"


class WorkState(enum.Enum):
    """The outcome of a complete save attempt at the store, or on peers."""

    NEW = "new"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class Backoff:
    """When failed work is tried again. `retry_s`: inf after a success."""

    failures: int = 0
    retry_s: float = math.inf

    def record(self, is_failed: bool, now_s: float) -> None:
        self.failures = min(self.failures + 1, FAILURES_MAX) if is_failed else 0
        self.retry_s = now_s + min(2.0**self.failures, RETRY_S_MAX) if is_failed else math.inf


@dataclass(slots=True)
class AttemptTimes:
    """When a save attempt was opened, when all ranks had staged it, how long hashing took, and when its last commit
    began; None: not yet."""

    opened_s: float
    staged_s: float | None = None
    hashing_s: float | None = None
    commit_began_s: float | None = None


@dataclass(slots=True, eq=False)
class SaveAttempt:
    """One save attempt: a version, in one slot, under one division."""

    number: int
    slot: int
    reason: SaveReason
    version: Version
    division: str
    times: AttemptTimes
    memory_bytes: int = 0  # memory of all ranks' arenas
    state: SlotState = SlotState.GRANTED
    staged_ranks: dict[int, float] = field(default_factory=dict)  # rank -> stall in seconds
    is_announced: bool = False  # by a control word
    miss_reason: str = ""  # reason to abandon the attempt
    commit_state: WorkState = WorkState.NEW  # its commit
    replication_state: WorkState = WorkState.NEW  # its replication
    is_last_try: bool = False  # its last commit was begun
    verdict: bool | None = None  # of a hold: True: leave; False: go on

    @property
    def is_explicit(self) -> bool:
        """Whether anything but an ordinary appointment made this attempt."""
        return self.reason is not SaveReason.STEP

    @property
    def is_verdict_pending(self) -> bool:
        """Whether this is a hold without a verdict yet."""
        return self.reason is SaveReason.HOLD and self.verdict is None

    def miss(self, why: str) -> None:
        """Has the attempt abandoned by the next decision. The first reason stays."""
        self.miss_reason = self.miss_reason or why


@dataclass(slots=True)
class Slot:
    """One slot: an arena on each rank. `bytes`: the sizes of the arenas, by rank; () if there are none."""

    number: int
    attempt: SaveAttempt | None = None
    leases: int = 0
    arena_bytes: tuple[int, ...] = ()
    has_fitting_arenas: bool = False  # they have the sizes that the present division needs
    is_making_arenas: bool = False
    is_handed_out: bool = False  # some rank or its agent may have an arena of the slot
    is_offered: bool = False  # to all ranks, since the last division
    warm_ranks: set[int] = field(default_factory=set)  # ranks whose arena is bound for the present division

    @property
    def state(self) -> SlotState:
        return SlotState.FREE if self.attempt is None else self.attempt.state


class JobSlots:
    """The slots of one job."""

    def __init__(self) -> None:
        self._slots = [Slot(n) for n in range(SLOTS_MAX)]
        self.is_taking_over = False  # ranks bring their arenas from a former agent, and not all have come yet
        # By slot: the version of a former agent's complete snapshot. The slot is leased until a newer one is safe, or
        # until it is needed, the last one first.
        self.inherited_versions: dict[int, Version] = {}

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def take_lease(self, slot: int) -> None:
        """Takes a lease on that slot, which is not reused before `release_lease`."""
        self._slots[slot].leases += 1

    def release_lease(self, slot: int) -> None:
        """Ends one lease on that slot."""
        self._slots[slot].leases -= 1

    def attempts(self, *states: SlotState) -> list[SaveAttempt]:
        """The save attempts in the slots; if `states` are given, those in one of these states."""
        held = [slot.attempt for slot in self._slots if slot.attempt is not None]
        return [attempt for attempt in held if not states or attempt.state in states]

    @property
    def open_attempts(self) -> list[SaveAttempt]:
        """The save attempts that may still be abandoned."""
        return self.attempts(SlotState.GRANTED)

    def attempt_of(self, number: int, *states: SlotState) -> SaveAttempt | None:
        """The save attempt with that number, 0 being none; if `states` are given, in one of these states."""
        return next((attempt for attempt in self.attempts(*states) if number and attempt.number == number), None)

    @property
    def newest(self) -> SaveAttempt | None:
        """The newest complete checkpoint; None: there is none."""
        return max(self.attempts(SlotState.COMPLETE), key=lambda each: (each.version, each.slot), default=None)

    @property
    def newest_commit_state(self) -> WorkState | None:
        """The outcome of the newest complete checkpoint's commit; None: there is no such checkpoint."""
        return self.newest.commit_state if self.newest is not None else None

    @property
    def committing_slot(self) -> int | None:
        """The slot whose attempt is being committed."""
        running = (each.slot for each in self.attempts(SlotState.COMPLETE) if each.commit_state is WorkState.RUNNING)
        return next(running, None)

    @property
    def is_at_work(self) -> bool:
        """Whether work is under way that ends by itself: hashing, making arenas, a commit."""
        staged = any(slot.state is SlotState.STAGED or slot.is_making_arenas for slot in self._slots)
        return staged or self.committing_slot is not None

    @property
    def is_at_end(self) -> bool:
        """Whether all ranks have ended their blocks and staged their last snapshot: no further boundary comes."""
        staged = self.attempts(SlotState.STAGED, SlotState.COMPLETE)
        return any(attempt.reason is SaveReason.EXIT for attempt in staged)

    def require_commit(self, version: Version, why: SaveReason = SaveReason.SAVE) -> None:
        """A rank waits for the commit of that snapshot: it is not skipped. `why`: EXIT at the end of the block."""
        for attempt in self.attempts():
            if attempt.version == version and attempt.reason in (SaveReason.STEP, SaveReason.SAVE, SaveReason.DUE):
                attempt.reason = why

    def check(self, world: int) -> None:
        """Asserts the invariants of slots and attempts in a job of `world` ranks."""
        numbers = [attempt.number for attempt in self.attempts()]
        assert len(numbers) == len({*numbers}), f"two attempts with one number: {numbers}"
        for slot in self._slots:
            attempt = slot.attempt
            assert slot.leases >= 0, f"slot {slot.number} has {slot.leases} leases"
            assert not (slot.is_making_arenas and (attempt or slot.warm_ranks)), f"slot {slot.number} is in use"
            if attempt is None:
                continue
            assert attempt.slot == slot.number, f"attempt {attempt.number} lies in slot {slot.number}"
            assert attempt.state is not SlotState.FREE
            if attempt.state is not SlotState.GRANTED:
                assert len(attempt.staged_ranks) == world, f"{attempt.version} is not staged by all"
                assert not attempt.is_announced, f"{attempt.version} is staged, and still announced"
            if attempt.state is not SlotState.COMPLETE:
                states = attempt.commit_state, attempt.replication_state
                assert states == (WorkState.NEW, WorkState.NEW), f"{attempt.version} is not complete, and {states}"
