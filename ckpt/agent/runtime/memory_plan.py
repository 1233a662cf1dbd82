"""The memory plan: how much memory the agent will take, and how many slots that allows. Computed before the first save.

A job wants three slots, or four if snapshots come closer together than appointments are announced (see `slots_for`). It
wants two if one slot takes more than a tenth of the memory of the machine or control group. If memory is short, it gets
fewer:
- 3 slots or more: no snapshot waits for an upload.
- 2 slots: a snapshot may wait for the upload of the previous one.
- 1 slot: each snapshot waits until the previous one is in the store.
- 0 slots: saves are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckpt.cgroups import CGROUPS, find_control_groups
from ckpt.errors import AgentError
from ckpt.ipc.control_page import SLOTS_MAX
from ckpt.policy.adaptive import Adaptive
from ckpt.policy.save_options import STEPS_APART, Every
from ckpt.types import format_count

SLOTS = 3  # one being filled, the newest complete one, one being uploaded
# One more: a snapshot is appointed while the one before it is still being filled.
SLOTS_CLOSE = 4
SLOTS_LARGE = 2  # if a slot takes more than one LARGE_PARTS-th
LARGE_PARTS = 10  # of the machine's memory
WINDOW_BYTES = 256 << 20  # buffer for frames on their way from the store to the trainers
COMMIT_BYTES = 256 << 20  # packs being encoded and put
SPARE_PARTS = 16  # one part in so many of the machine's free memory stays untouched
NODES_SHOWN = 64  # in the memory table: the fullest; the other nodes are only counted

_NUMBERS = ("slots", "wanted", "slot_bytes", "kept_bytes", "commit_bytes", "allowed_bytes", "reserve_bytes")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one node for one job: `slots` arenas for every rank, of `wanted` slots if memory allows.

    `slot_bytes`: of all ranks together. `kept_bytes`: checkpoints of earlier starts, kept until a newer one is
    complete. `allowed_bytes`: the limit of the total, and `bound` names that limit's source. `reserve_bytes`: the part
    of the limit that replicas must leave to other processes; slots may use it."""

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

    def replica_bytes_max(self, slots: int) -> int:
        """Bytes that replicas of other nodes' snapshots may take beside `slots` slots."""
        taken_bytes = slots * self.slot_bytes + self.kept_bytes + self.commit_bytes
        return max(0, self.allowed_bytes - self.reserve_bytes - taken_bytes)

    def table(self) -> dict[str, Any]:
        return {**asdict(self), "total_bytes": self.total_bytes}

    def __str__(self) -> str:
        return (
            f"{format_count(self.slots, 'slot')} of {_mib(self.slot_bytes)}, {_mib(self.kept_bytes)} kept from before, "
            f"{_mib(self.commit_bytes)} for commits: {_mib(self.total_bytes)} of {_mib(self.allowed_bytes)} "
            f"({self.bound})"
        )


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Arena bytes on this machine beside a job's own slots. `kept_bytes`: checkpoints of earlier starts, and replicas
    of such checkpoints. `lent_bytes`: replicas for other nodes of the same job, which the plan has room for."""

    kept_bytes: int = 0
    lent_bytes: int = 0


def slots_for(policy: Every | Adaptive) -> int:
    """The number of slots that this policy needs if memory allows."""
    steps = policy.steps if isinstance(policy, Every) else None
    return SLOTS_CLOSE if steps is not None and steps < STEPS_APART else SLOTS


def make_plan(
    slot_bytes: int,
    kept_bytes: int,
    held_bytes: int,
    limit_bytes: int | None,
    free_bytes: int,
    slots: int = SLOTS,
    reserve_bytes: int = 0,
    total_bytes: int | None = None,
) -> MemoryPlan:
    """The plan for one node. `kept_bytes`: see MemoryPlan.

    `held_bytes`: arenas that the job already has here, including replicas for its other nodes. `limit_bytes`: the
    user's limit. `free_bytes`: free on the machine. `slots`: the maximum. `reserve_bytes`: what replicas leave of the
    machine's memory. `total_bytes`: the machine's whole memory, to tell whether one slot is large; None: not
    considered."""
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
    """Bytes that a job takes with so many slots, without checkpoints kept from before."""
    return slots * slot_bytes + _commit_bytes(slot_bytes)


def _commit_bytes(slot_bytes: int) -> int:
    return min(COMMIT_BYTES, 2 * slot_bytes)


def restore_budget_bytes(plan: MemoryPlan, limit_bytes: int | None, free_bytes: int) -> int:
    """Extra bytes that a start may take until all ranks have restored, beside the job's own memory.

    It is half of the machine's free memory, and no more than the user's limit leaves beside the slots. Nothing is
    committed in that time. `plan`: the job's plan, or its estimate."""
    room = free_bytes // 2
    if limit_bytes is not None:
        room = min(room, limit_bytes - plan.slots * plan.slot_bytes - plan.kept_bytes - WINDOW_BYTES)
    return max(0, room)


def make_table(plans: Mapping[str, MemoryPlan], slots: int, peers: Mapping[str, Any] | None) -> dict[str, Any]:
    """The memory table of a job: what it takes on each node, in bytes. One row per node:
    - `slots`: the local ranks' own arenas.
    - `kept`: checkpoints of earlier starts, until a newer one is complete.
    - `copies`: replicas or parity kept for other nodes, of two generations.
    - `buffers`: scratch memory for parity, and the larger of the commit buffers and the restore window.
    - `sends`, `receives`: network traffic for each checkpoint.

    `plans`: each node's plan by its name, the coordinator's first. `slots`: the number that all nodes use. `peers`:
    what ReplicationManager.placement_fields returns; None: no replication."""
    loads = {row["node"]: row for row in peers["nodes"]} if peers is not None else {}
    scratch_bytes = peers.get("scratch_bytes", 0) if peers is not None else 0
    rows = [_row(name, plan, slots, loads.get(name, {}), scratch_bytes) for name, plan in plans.items()]
    first = rows[:1]  # the coordinator
    fullest = sorted(rows[1:], key=lambda row: row["allowed_bytes"] - row["total_bytes"])[: NODES_SHOWN - 1]
    return {"nodes": first + fullest, "nodes_left_out": len(rows) - len(first) - len(fullest)}


def _row(name: str, plan: MemoryPlan, slots: int, load: Mapping[str, int], scratch_bytes: int) -> dict[str, Any]:
    copies_bytes = load.get("keeps_bytes", 0)
    work_bytes = max(plan.commit_bytes, min(WINDOW_BYTES, plan.slot_bytes))
    buffers_bytes = work_bytes + (scratch_bytes if copies_bytes else 0)
    slots_bytes = slots * plan.slot_bytes
    return {
        "node": name,
        "slots_bytes": slots_bytes,
        "kept_bytes": plan.kept_bytes,
        "copies_bytes": copies_bytes,
        "buffers_bytes": buffers_bytes,
        "total_bytes": slots_bytes + plan.kept_bytes + copies_bytes + buffers_bytes,
        "allowed_bytes": plan.allowed_bytes,
        "bound": plan.bound,
        "sends_bytes": load.get("sends_bytes", 0),
        "receives_bytes": load.get("receives_bytes", 0),
    }


def parse_plan(told: Any) -> MemoryPlan:
    """The plan in another agent's message, which is that plan's `table`. Errors: AgentError if it is malformed."""
    numbers: dict[str, Any] = {name: told.get(name) if isinstance(told, dict) else None for name in _NUMBERS}
    if not all(type(number) is int and number >= 0 for number in numbers.values()) or numbers["slots"] > SLOTS_MAX:
        raise AgentError(f"a node says of its memory what cannot be: {told!r:.300}")
    return MemoryPlan(**numbers, bound=str(told.get("bound", ""))[:100])


def free_bytes(meminfo: str | None = None, at: Path = CGROUPS, own: str | None = None) -> int:
    """Bytes that may still be allocated: the least of the kernel's available memory and what each enclosing control
    group has left. Reclaimable caches count as free in both. `at`, `own`: see cgroups.groups."""
    text = meminfo if meminfo is not None else Path("/proc/meminfo").read_text()
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    free = int(fields["MemAvailable"].split()[0]) << 10
    for group in find_control_groups(at, own):
        with contextlib.suppress(OSError, ValueError):  # another version of control groups, or "max": no limit
            free = min(free, group.limit_bytes() - group.used_bytes())
    return max(0, free)


def total_bytes(meminfo: str | None = None, at: Path = CGROUPS, own: str | None = None) -> int:
    """The machine's memory in bytes, or the lowest limit of the enclosing control groups if that is less."""
    text = meminfo if meminfo is not None else Path("/proc/meminfo").read_text()
    found = next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("MemTotal:"))
    for group in find_control_groups(at, own):
        with contextlib.suppress(OSError, ValueError):
            found = min(found, group.limit_bytes())
    return found


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.0f} MiB"
