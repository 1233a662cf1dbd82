"""How much memory the agent will take, computed before the first save, and how many slots that allows.

There are to be two slots where one takes more than a tenth of the machine's memory, or of what our control group may
take. Else it degrades in this order: a fourth slot (only where snapshots are to be closer than an appointment is ahead,
see `slots_for`), a third one (nothing waits), a second one (the next snapshot waits for the upload of the one before
it), one (each snapshot waits until the one before it is in the store), none: refused.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckpt.cgroups import CGROUPS, groups
from ckpt.errors import AgentError
from ckpt.ipc.control_page import SLOTS_MAX
from ckpt.policy.adaptive import Adaptive
from ckpt.policy.save_options import STEPS_APART, Every
from ckpt.types import counted

SLOTS = 3  # one being filled, the newest complete one, one being uploaded
SLOTS_CLOSE = 4  # and the next one, which is appointed before that which is being filled is complete
SLOTS_LARGE = 2  # where a slot takes more than one of
LARGE_PARTS = 10  # so many parts of the memory
WINDOW_BYTES = 256 << 20  # through which frames of the store reach the trainers
COMMIT_BYTES = 256 << 20  # packs being encoded and put
SPARE_PARTS = 16  # one part in so many of what the machine has left stays untouched

_NUMBERS = ("slots", "wanted", "slot_bytes", "kept_bytes", "commit_bytes", "allowed_bytes", "reserve_bytes")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`slots` arenas for every rank, of `wanted` that there are to be; `slot_bytes` for all ranks together.
    `kept_bytes`: checkpoints of earlier starts, until a newer one is complete. `allowed_bytes`: what all of it may come
    to, and `bound` says by what; copies come to `reserve_bytes` less, which this machine leaves to other processes and
    slots may take."""

    slots: int
    slot_bytes: int
    kept_bytes: int
    commit_bytes: int
    allowed_bytes: int
    bound: str
    reserve_bytes: int = 0
    wanted: int = SLOTS

    @property
    def total_bytes(self) -> int:
        return self.slots * self.slot_bytes + self.kept_bytes + self.commit_bytes

    def left_bytes(self, slots: int) -> int:
        """What others' snapshots may take beside so many slots."""
        taken_bytes = slots * self.slot_bytes + self.kept_bytes + self.commit_bytes
        return max(0, self.allowed_bytes - self.reserve_bytes - taken_bytes)

    def table(self) -> dict[str, Any]:
        return {**asdict(self), "total_bytes": self.total_bytes}

    def __str__(self) -> str:
        return (
            f"{counted(self.slots, 'slot')} of {_mib(self.slot_bytes)}, {_mib(self.kept_bytes)} kept from before, "
            f"{_mib(self.commit_bytes)} for commits: {_mib(self.total_bytes)} of {_mib(self.allowed_bytes)} "
            f"({self.bound})"
        )


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What arenas take on this machine beside a job's own slots. `kept_bytes`: checkpoints of earlier starts, and
    copies of such. `lent_bytes`: copies that are kept for other nodes of the job itself: room for such is there."""

    kept_bytes: int = 0
    lent_bytes: int = 0


def slots_for(policy: Every | Adaptive) -> int:
    """How many slots there are to be, if memory allows."""
    steps = policy.steps if isinstance(policy, Every) else None
    return SLOTS_CLOSE if steps is not None and steps < STEPS_APART else SLOTS


def plan(
    slot_bytes: int,
    kept_bytes: int,
    held_bytes: int,
    limit_bytes: int | None,
    free_bytes: int,
    slots: int = SLOTS,
    reserve_bytes: int = 0,
    total_bytes: int | None = None,
) -> MemoryPlan:
    """`held_bytes`: of arenas that this job has already, copies for its other nodes among them; `limit_bytes`: the
    user's; `free_bytes`: the machine's; `slots`: at most; `reserve_bytes`: that copies leave of the machine's;
    `total_bytes`: all that the machine has, beside which the state may be large; None: that does not count."""
    if total_bytes is not None and slot_bytes > total_bytes // LARGE_PARTS:
        slots = min(slots, SLOTS_LARGE)
    wanted = slots
    spare_bytes = free_bytes // SPARE_PARTS
    machine = free_bytes - spare_bytes + held_bytes + kept_bytes
    allowed, bound = machine, "what the machine has left"
    if limit_bytes is not None and limit_bytes < machine:
        allowed, bound = limit_bytes, "ckpt.Limits(memory=)"
    commit_bytes = _commit_bytes(slot_bytes)
    while slots and slots * slot_bytes + kept_bytes + commit_bytes > allowed:
        slots -= 1
    reserve_bytes = max(0, reserve_bytes - spare_bytes - (machine - allowed))
    return MemoryPlan(slots, slot_bytes, kept_bytes, commit_bytes, allowed, bound, reserve_bytes, wanted)


def needed_bytes(slot_bytes: int, slots: int) -> int:
    """What a job takes with so many slots, beside what is kept from before."""
    return slots * slot_bytes + _commit_bytes(slot_bytes)


def _commit_bytes(slot_bytes: int) -> int:
    return min(COMMIT_BYTES, 2 * slot_bytes)


def for_a_while_bytes(plan: MemoryPlan, limit_bytes: int | None, free_bytes: int) -> int:
    """What a start may take until all ranks have restored, beside what the job itself will: half of what the machine
    has left, and what a user's limit leaves beside the slots. Nothing is committed in that time. `plan`: of the job, or
    what it is foreseen to be."""
    room = free_bytes // 2
    if limit_bytes is not None:
        room = min(room, limit_bytes - plan.slots * plan.slot_bytes - plan.kept_bytes - WINDOW_BYTES)
    return max(0, room)


def plan_told(told: Any) -> MemoryPlan:
    """What another node's agent says of itself: its `table`. Errors: AgentError."""
    numbers: dict[str, Any] = {name: told.get(name) if isinstance(told, dict) else None for name in _NUMBERS}
    if not all(type(number) is int and number >= 0 for number in numbers.values()) or numbers["slots"] > SLOTS_MAX:
        raise AgentError(f"a node says of its memory what cannot be: {told!r:.300}")
    return MemoryPlan(**numbers, bound=str(told.get("bound", ""))[:100])


def free_bytes(meminfo: str | None = None, at: Path = CGROUPS, own: str | None = None) -> int:
    """What may still be taken: what the kernel has available, and what our control group, and those that it is in, have
    left of their limits. Caches that the kernel takes back at once are not in use, for either. `at`, `own`: see
    cgroups.groups."""
    text = meminfo if meminfo is not None else Path("/proc/meminfo").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    free = int(fields["MemAvailable"].split()[0]) << 10
    for group in groups(at, own):
        with contextlib.suppress(OSError, ValueError):  # another version of control groups, or "max": no limit
            free = min(free, group.limit_bytes() - group.used_bytes())
    return max(0, free)


def total_bytes(meminfo: str | None = None, at: Path = CGROUPS, own: str | None = None) -> int:
    """What there is at all: of the machine, or within our control groups' limits."""
    text = meminfo if meminfo is not None else Path("/proc/meminfo").read_text()
    found = next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("MemTotal:"))
    for group in groups(at, own):
        with contextlib.suppress(OSError, ValueError):
            found = min(found, group.limit_bytes())
    return found


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.0f} MiB"
