"""The memory of one job on all its nodes: the division of its state among the ranks, the plan of slots and replicas,
the arenas of the slots, and the checkpoints that are put together in them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckpt.agent.job.job_context import JobContext, JobPolicy
from ckpt.agent.job.job_replication import JobReplication
from ckpt.agent.replication.replication_manager import SLOTS_MIN
from ckpt.agent.runtime.coroutines import Coro
from ckpt.agent.runtime.memory_plan import SLOTS, MemoryPlan, make_table, slots_for
from ckpt.agent.runtime.workers import Lane, error_text
from ckpt.agent.snapshots.division import Division, make_division
from ckpt.agent.snapshots.memory_checkpoint import MemoryCheckpoint, assemble_checkpoint
from ckpt.agent.snapshots.replica_check import ReplicaCheck
from ckpt.agent.state.memory_pressure import PERIOD_S
from ckpt.errors import CkptError
from ckpt.events import Event
from ckpt.ipc.control_page import SLOTS_MAX
from ckpt.types import Identity, Version, format_count

REPLAN_PAUSE_S = 60.0  # after an allocation failed, until memory is planned again
# Ranks change their layouts at the same step, but their reports arrive one after the other.
LAYOUTS_WAIT_S = 1.0
NAMES_MAX = 100  # in one event
NAMES_SHOWN = 5
FREE_PARTS = 8  # a change of free memory below this part of a slot is no reason to plan anew


class JobDivision:
    """Which rank stages what. It is made anew when a layout changes, or replicas begin to differ.

    `newest`: the division in force; None: none yet. `plan_memory`: called with the number of the layouts and a new
    division; the division is in force once `adopt` is called."""

    def __init__(self, context: JobContext, plan_memory: Callable[[int, Division], Coro[None]]) -> None:
        self.newest: Division | None = None
        self._context, self._plan_memory = context, plan_memory
        self._awaits_layouts = False  # a division waits for other ranks' layouts of the same version
        self._replica_check = ReplicaCheck()

    def make(self, patient: bool = True) -> None:
        """Makes a new division. If ranks report layouts of different versions, it waits LAYOUTS_WAIT_S for the other
        ranks' reports."""
        context = self._context
        self._awaits_layouts = patient and self._has_mixed_layouts
        if self._awaits_layouts:
            context.call_later(LAYOUTS_WAIT_S, lambda: self.make(patient=False) if self._awaits_layouts else None)
            return
        context.spawn(self._divide())

    async def _divide(self) -> None:
        context = self._context
        number, before = context.scheduler.arenas.layouts_version, self.newest
        ranks, distrusted = [each.contents for each in context.connections], self._replica_check.differing
        try:
            made = await context.run_on(Lane.MEMORY, lambda: make_division(ranks, before, distrusted))
        except CkptError as exc:
            if not context.is_dropped:
                error = error_text(exc)
                context.emit("division.failed", f"the state cannot be divided among the ranks: {error}", True)
                context.scheduler.arenas.record_division_failure(number, error)
            return
        if not context.is_dropped:
            await self._plan_memory(number, made)

    def adopt(self, division: Division) -> None:
        """Puts a division in force: each rank stages by it from now on."""
        context, before, differing = self._context, self.newest, division.differing_tensors
        self.newest = division
        if differing and (before is None or differing != before.differing_tensors):
            text = f"{format_count(len(differing), 'tensor')} of one name, with different values on the ranks"
            names = sorted(differing)
            shown = ", ".join(names[:NAMES_SHOWN])
            context.emit("layout.differs", f"{text}: saved per rank: {shown}", True, {"names": names[:NAMES_MAX]})
        head = {"t": "staging-plan", "division": division.id, "frame_bytes": division.frame_bytes}
        for rank, each in context.connections.by_rank.items():
            fields = {**head, "arena_bytes": division.arena_bytes[rank]}
            each.peer.send(fields, blobs=division.encoded_plans[rank])

    def on_layout(self) -> None:
        """A rank has reported a layout."""
        self._context.scheduler.arenas.record_layout()
        if self._awaits_layouts and not self._has_mixed_layouts:
            self.make(patient=False)

    def compare_samples(self, rank: int, fields: dict[str, Any]) -> None:
        """Compares samples of this rank's replicated tensors with other ranks' samples. On a difference the save
        attempt is abandoned, and from then on every rank saves its own copy."""
        division, number = self.newest, int(fields["attempt"])
        shared = division.shared_boxes if division is not None and fields["division"] == division.id else None
        names = self._replica_check.find_differing(number, shared, rank, fields.get("samples"), fields.get("sample"))
        if not names:
            return
        more = format_count(len(names) - 1, "more tensor")
        what = f"{names[0]} differs" if len(names) == 1 else f"{names[0]} and {more} differ"
        self._context.scheduler.save_attempts.record_miss(rank, number, f"{what} between the ranks")
        self._context.scheduler.arenas.record_layout()
        what = names[0] if len(names) == 1 else f"{len(names)} tensors, {', '.join(names[:NAMES_SHOWN])}"
        text = f"not the same on all ranks any more: {what}. From now on each rank saves its own"
        self._context.emit("replica.differs", text, True, {"tensor": names[0], "names": names[:NAMES_MAX]})

    @property
    def _has_mixed_layouts(self) -> bool:
        return len({each.contents.version for each in self._context.connections.by_rank.values()}) > 1


class JobMemory:
    """`plan`: of the node with the fewest slots; None: not planned yet. `division`: which rank stages what."""

    def __init__(self, context: JobContext, policy: JobPolicy, replication: JobReplication) -> None:
        self.plan: MemoryPlan | None = None
        self.division = JobDivision(context, self._plan_division)
        self._context, self._policy, self._replication = context, policy, replication
        self._planned_free_parts: dict[str, int] = {}  # see `_free_parts_by_node`
        self._next_plan_s = -math.inf  # memory is not planned again before this time
        self._plan_backoff_s = PERIOD_S  # from a plan that finds nothing new until the next one
        self._is_cramped = False  # earlier starts' checkpoints took memory at the layout's plan, and still do
        self._reported_slots_min = SLOTS_MAX  # the smallest number of slots that was reported as available
        self._reported_replica_bytes: dict[str, int] = {}  # by node: bytes of other nodes' replicas, as reported
        self._reported_differing: set[str] = set()

    # -- the plan

    async def _measure(self, division: Division, slots: int) -> MemoryPlan:
        """Has all nodes plan their memory for at most `slots` slots. Errors: CkptError."""
        context, sizes = self._context, dict(enumerate(division.arena_bytes))
        return await context.shares.plan_memory(sizes, slots, context.options.limits.memory)

    async def _plan_division(self, number: int, division: Division) -> None:
        """Plans the memory for a new division, of the layouts of that number."""
        scheduler = self._context.scheduler
        try:
            plan = await self._measure(division, slots_for(scheduler.clock.policy))
        except CkptError as exc:
            text = f"the memory for it cannot be planned: {error_text(exc)}"
            scheduler.arenas.record_division_failure(number, text)
            return
        before, plan = self.plan, replace(plan, slots=self._place_replicas(division, plan.slots))
        if not scheduler.arenas.record_division(number, division.id, division.arena_bytes, plan.slots):
            return
        self.request_replan()
        self.plan = plan
        self._planned_free_parts, self._is_cramped = self._free_parts_by_node(), self._has_earlier_starts
        self._report(before is None or (plan.slots, plan.slot_bytes) != (before.slots, before.slot_bytes))
        self.division.adopt(division)

    def _place_replicas(self, division: Division, slots: int, used: int = 0) -> int:
        """Places the replicas; returns how many of `slots` remain beside them. `used`: slots in use, which stay."""
        sizes = self._context.shares.sum_by_node(dict(enumerate(division.arena_bytes)))
        return self._replication.place(sizes, slots, used)

    @property
    def is_short(self) -> bool:
        """True if the job has fewer replicas than it wants, or still awaits memory for slots."""
        scheduler = self._context.scheduler
        if (
            self.plan is None
            or not scheduler.arenas.has_division
            or scheduler.facts.superseded_by
            or scheduler.facts.all_gone
        ):
            return False  # in these cases memory is planned anew anyway
        return self._replication.is_incomplete or (
            self._awaits_slots and scheduler.arenas.slot_limit < self.plan.wanted
        )

    @property
    def _awaits_slots(self) -> bool:
        """Whether the number of slots may still grow: there are too few to save well, or earlier starts' checkpoints
        were in the way. Otherwise the number stays until the layout changes."""
        return self._is_cramped or self._context.scheduler.arenas.slot_limit < SLOTS_MIN

    def _free_parts_by_node(self) -> dict[str, int]:
        """By node: the free memory for this job when it was last measured, in units of a PARTS-th of a slot."""
        plans = self._context.shares.plans
        return {name: each.replica_bytes_max(0) * FREE_PARTS // max(1, each.slot_bytes) for name, each in plans.items()}

    @property
    def _has_earlier_starts(self) -> bool:
        """Whether some node still holds a checkpoint of an earlier start."""
        return any(each.kept_bytes for each in self._context.shares.plans.values())

    def replan(self) -> None:
        """Plans the replicas of the same division again, since the free memory may have changed. More may be free once
        earlier starts' checkpoints or other processes are gone. Less may be free if replication fails. The slots stay;
        more come only to a job that awaits them. While nothing changes, other nodes are asked less and less often."""
        division, now_s = self.division.newest, time.monotonic()
        if division is None or now_s < self._next_plan_s:
            return
        if len(self._context.nodes) > 1:
            self._next_plan_s = now_s + self._plan_backoff_s
            self._plan_backoff_s = min(2 * self._plan_backoff_s, REPLAN_PAUSE_S)
        self._context.spawn(self._replan(division))

    async def _replan(self, division: Division) -> None:
        arenas, clock = self._context.scheduler.arenas, self._context.scheduler.clock
        number, slots = arenas.layouts_version, slots_for(clock.policy) if self._awaits_slots else arenas.slot_limit
        try:
            plan = await self._measure(division, slots)
        except CkptError:
            return
        if self.division.newest is division and arenas.layouts_version == number:  # new layouts are planned anyway
            self._apply_measurement(division, plan)

    def _apply_measurement(self, division: Division, plan: MemoryPlan) -> None:
        scheduler, parts = self._context.scheduler, self._free_parts_by_node()
        is_cramped = self._is_cramped and self._has_earlier_starts
        is_more = any(count > self._planned_free_parts.get(name, -1) for name, count in parts.items())
        is_more = is_more or is_cramped != self._is_cramped
        if not is_more and (parts == self._planned_free_parts or not scheduler.replicas.is_replication_failing):
            return
        self._planned_free_parts, self._is_cramped = parts, is_cramped
        used = scheduler.arenas.slot_limit
        slots = self._place_replicas(division, max(plan.slots, used), used)
        self.plan = replace(plan, slots=slots, wanted=(self.plan or plan).wanted)
        scheduler.arenas.raise_slot_limit(slots)
        self._report(slots != used)

    def request_replan(self) -> None:
        """Has the memory planned again without delay, since more may be free now."""
        self._next_plan_s, self._plan_backoff_s = -math.inf, PERIOD_S

    def replan_placement(self) -> None:
        """Decides the placement anew for the present slots, since the nodes that can keep replicas have changed."""
        division, used = self.division.newest, self._context.scheduler.arenas.slot_limit
        if division is not None and used:
            # Less may be free now than was planned with, so the next `replan` must act.
            self._planned_free_parts = {}
            self._place_replicas(division, used, used)
            self._report(False)

    def spare_bytes_by_node(self) -> dict[str, int]:
        """By node: the bytes left beside its slots and one generation of replicas."""
        manager = self._replication.manager
        placement = manager.placement if manager is not None else None
        if self.plan is None:
            return {}
        keeps = {load.node: load.keeps_bytes for load in placement.loads} if placement is not None else {}
        plans = self._context.shares.plans
        left = {name: plan.replica_bytes_max(self.plan.slots) for name, plan in plans.items()}
        return {name: max(0, count - keeps.get(name, 0)) for name, count in left.items()}

    # -- what is shown

    def table(self) -> dict[str, Any] | None:
        """The memory table of all nodes; None: not planned yet."""
        plan, manager = self.plan, self._replication.manager
        if plan is None:
            return None
        peers = manager.placement_fields() if manager is not None else None
        return {**plan.table(), **make_table(self._context.shares.plans, plan.slots, peers)}

    def _report(self, changed: bool) -> None:
        """Reports the memory plan if the slots changed (`changed`), or the memory for other nodes' replicas did."""
        table = self.table()
        if table is None or self.plan is None:
            return
        copies = {row["node"]: row["copies_bytes"] for row in table["nodes"]}
        if changed or copies != self._reported_replica_bytes:
            most = max(copies.values(), default=0)
            more = f"; up to {most >> 20:,} MiB for other nodes" if most else ""
            more += "" if self.plan.slots else "; nothing is saved until one fits: free memory, or save less"
            is_loud = self.plan.slots < min(SLOTS, self.plan.wanted)
            self._context.emit("memory.plan", f"memory: {self.plan}{more}", is_loud, table)
        self._reported_replica_bytes = copies

    # -- arenas and checkpoints

    def make_arenas(self, slot: int, sizes: tuple[int, ...]) -> None:
        """Has all nodes make the arenas of a slot, of `sizes` by rank."""
        self._context.spawn(self._make_arenas(slot, sizes))

    async def _make_arenas(self, slot: int, sizes: tuple[int, ...]) -> None:
        arenas, made = self._context.scheduler.arenas, dict[int, int]()
        try:
            made = await self._context.shares.make_arenas(slot, dict(enumerate(sizes)))
        except CkptError as exc:
            if arenas.needs_arenas(slot, sizes):
                self._reduce_slots(error_text(exc), slot)
        # After an error there are none, and none of these sizes is needed any more.
        arenas.record_arenas(slot, tuple(made[rank] for rank in sorted(made)))

    def _reduce_slots(self, why: str, slot: int) -> None:
        scheduler, had = self._context.scheduler, self._context.scheduler.arenas.usable_slot_count
        message = f"there is no memory for slot {slot} ({why}); in use: {format_count(had, 'slot')}"
        self._context.emit("memory.short", message, had < self._reported_slots_min)
        self._reported_slots_min = min(had, self._reported_slots_min)
        # Less was free than planned.
        self._next_plan_s, self._planned_free_parts = time.monotonic() + REPLAN_PAUSE_S, {}
        scheduler.arenas.limit_slots(had, f"not one arena fits into memory: {why}; free memory, or save less")
        if self.plan is not None:
            self.plan = replace(self.plan, slots=scheduler.arenas.slot_limit)

    def assemble(self, slot: int, number: int, version: Version) -> None:
        """Hashes what all ranks have staged in a slot, and puts the checkpoint together."""
        context = self._context
        attempt = context.scheduler.slots[slot].attempt
        if attempt is not None:
            stall_s = max(attempt.staged_ranks.values())
            context.services.account.record_staging(time.monotonic(), version, stall_s)
            self._policy.cost_model.record_stall(stall_s, version.step + 1)
            self._policy.apply()
        context.spawn(self._assemble(slot, number, Identity(context.epoch, version)))

    async def _assemble(self, slot: int, number: int, identity: Identity) -> None:
        context, error = self._context, ""
        try:
            parts = await context.shares.hash_snapshots(slot, identity)
            arenas = context.shares.local_share.arenas[slot]
            made = await context.run_on(Lane.MEMORY, lambda: assemble_checkpoint(identity, parts, arenas))
        except CkptError as exc:
            error = error_text(exc)
        else:
            context.checkpoints[slot] = made
            self._report_assembled(made)
        context.scheduler.save_attempts.record_assembly(slot, number, error)

    def _report_assembled(self, made: MemoryCheckpoint) -> None:
        context, version = self._context, made.identity.version
        count = int(made.manifest.frames["length"].sum())
        context.services.account.record_completion(context.epoch, version, count)
        text, facts = f"step {version.step} is whole in memory", {"identity": str(made.identity), "bytes": count}
        context.services.on_event(Event("snapshot.done", text, data=facts))
        if set(made.differing_tensors) - self._reported_differing:
            self._reported_differing.update(made.differing_tensors)
            text = f"{format_count(len(made.differing_tensors), 'tensor')} turned out to differ between the ranks"
            names = ", ".join(made.differing_tensors[:5])
            context.emit("snapshot.differs", f"{text}, saved per rank: {names}", True)
