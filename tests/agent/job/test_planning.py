"""What a job has room for, planned anew where that was less than it is to have."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.agent.job import job_executor
from ckpt.agent.job.job_executor import REPLAN_PAUSE_S, SLOT_RETURN_S, SLOT_YIELD_S, JobExecutor
from ckpt.agent.job.scheduler import Scheduler
from ckpt.agent.replication.replication_manager import SLOTS_MIN
from ckpt.agent.runtime import memory_plan
from ckpt.agent.snapshots.all_shares import AllShares
from ckpt.agent.state.memory_pressure import PERIOD_S
from ckpt.placement.placement import Kept
from ckpt.policy.save_options import Every
from ckpt.types import Version

MIB = 1 << 20


class Planned:
    """A job on one node, or on more, whose slots take a MiB each. `free`: MiB of the machine."""

    def __init__(self, free: float, nodes: int = 1) -> None:
        self.free = free
        self.measured = self.placed = 0
        self.said: list[tuple[str, bool]] = []
        self.group = Scheduler(1, Every(seconds=60))
        self.group.record_layout(0)
        self.carrier = SimpleNamespace(
            scheduler=self.group,
            replication_manager=None,
            ranks=SimpleNamespace(plan_memory=self.measure),
            options=SimpleNamespace(limits=SimpleNamespace(memory=None)),
            _division=SimpleNamespace(arena_bytes=(MIB,)),
            _guard_callback=lambda then: then,
            _place_replicas=self.update_placement,
            _report_memory=lambda changed: None,
            emit=lambda name, text, loud: self.said.append((name, loud)),
            _planned_free_parts={},
            _next_plan_s=0.0,
            _plan_backoff_s=PERIOD_S,
            _replica_short_since_s=math.inf,
            _slot_yields_until_s=-math.inf,
            nodes=("",) * nodes,
            _reported_slots_min=9,
        )
        self.carrier._free_parts_by_node = lambda plan: JobExecutor._free_parts_by_node(self.me, plan)
        self.carrier.plan = self.plan()
        self.carrier._planned_free_parts = JobExecutor._free_parts_by_node(self.me, self.carrier.plan)
        self.group.record_division(self.group.layouts_version, "d", (MIB,), self.carrier.plan.slots)

    @property
    def me(self) -> Any:
        return cast(Any, self.carrier)

    def plan(self) -> memory_plan.MemoryPlan:
        return memory_plan.make_plan(MIB, 0, 0, None, int(self.free * MIB))

    def measure(self, sizes: Any, slots: int, limit: int | None, then: Callable[..., None]) -> None:
        self.measured += 1
        then(replace(self.plan(), slots=min(slots, self.plan().slots)), "")

    def update_placement(self, division: Any, slots: int, used: int, gives_way: bool = False) -> int:
        self.placed += 1
        return SLOTS_MIN if gives_way else slots

    def look(self) -> int:
        if JobExecutor.is_short_of_memory.fget(self.me):  # type: ignore[attr-defined]
            JobExecutor.replan_memory(self.me)
        return self.group.slot_limit


def test_slots_for_which_others_left_no_memory_come_once_there_is_some_and_stay_where_others_take_it() -> None:
    job = Planned(free=2.5)
    assert (job.look(), job.group.refusal_reason != "") == (0, True)
    job.free = 4.5
    assert (job.look(), job.group.refusal_reason) == (2, "")
    job.free = 0.0
    assert job.look() == 2
    job.free = 9.0
    assert job.look() == 3
    measured = job.measured
    assert job.look() == 3
    assert job.measured == measured, "it has what it is to have"


def test_nothing_is_decided_anew_as_long_as_there_is_about_as_much_memory() -> None:
    job = Planned(free=4.05)
    placed = job.placed
    for free in (4.06, 4.04, 4.05):
        job.free = free
        job.look()
    assert (job.measured, job.placed) == (3, placed)
    job.free = 3.0
    job.look()
    assert job.placed == placed, "with less there is nothing to be had"


def test_a_slot_that_could_not_be_had_is_tried_again_after_a_while_and_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(job_executor.time, "monotonic", lambda: now[0])
    job = Planned(free=9.0)
    for slot in range(2):
        job.group.record_arenas(slot, (MIB,))
    for tries in range(1, 4):
        JobExecutor._reduce_slots(job.me, 2, "it is full")
        assert job.look() == 2
        now[0] += REPLAN_PAUSE_S
        assert (job.look(), job.measured) == (3, tries)
    assert job.said == [("memory.short", True), ("memory.short", False), ("memory.short", False)]


def test_as_long_as_there_is_no_more_memory_other_nodes_are_asked_less_and_less_often_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(job_executor.time, "monotonic", lambda: now[0])
    job = Planned(free=2.5, nodes=1000)

    def asked(looks: int) -> list[int]:
        """At which of so many looks."""
        found = []
        for number in range(looks):
            before = job.measured
            job.look()
            found += [number] * (job.measured - before)
            now[0] += PERIOD_S
        return found

    assert asked(60) == [0, 1, 3, 7, 15, 27, 39, 51]
    job.free = 9.0
    assert len(asked(12)) == 1
    assert job.look() == 3
    job.group.limit_slots(2, "others took it")
    job.free = 2.5
    JobExecutor.request_replan(job.me)
    assert asked(4) == [0, 1, 3], "there is news"


def test_what_was_placed_while_there_was_little_memory_is_placed_again_once_there_is_as_much_as_before() -> None:
    """A memory-only node came or went just then, say."""
    job = Planned(free=4.5)
    assert job.look() == 2
    job.free = 2.5
    job.look()
    JobExecutor.replan_placement(job.me)
    placed = job.placed
    job.free = 4.5
    job.look()
    assert job.placed > placed
    placed = job.placed
    job.look()
    assert job.placed == placed


def test_where_copies_fail_and_a_node_has_less_memory_than_was_planned_with_it_is_decided_anew_who_keeps_them() -> None:
    """It refuses copies for ever, and another one may have room."""
    job = Planned(free=9.0)
    job.carrier.replication_manager = SimpleNamespace(is_requested=True)
    job.group.is_replication_on, job.group.placement = True, (Kept("", 1, ("b",)),)
    job.group.record_held_snapshot(0, Version(10), False)

    def copy(error: str) -> None:
        slot = job.group.slots[0]
        assert slot.attempt is not None
        job.group.begin_replication(slot, slot.attempt, 0.0)
        job.group.record_replication(0, error, 0.0)

    copy("")
    job.free = 7.0
    job.look()
    assert (job.measured, job.placed) == (0, 0), "it has all copies that it is to have"
    copy("no memory for a copy")
    for _ in range(3):
        job.look()
        assert job.placed == 1, "once, as long as there is about as much"
    job.free = 6.0
    job.look()
    assert (job.placed, job.group.slot_limit) == (2, 3)
    copy("")
    measured = job.measured
    job.free = 5.0
    job.look()
    assert job.measured == measured


def test_a_slot_gives_way_once_there_has_been_no_room_for_copies_for_a_while_and_comes_again_much_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A memory-only node may be away for less, and other processes' memory come and go."""
    now = [100.0]
    monkeypatch.setattr(job_executor.time, "monotonic", lambda: now[0])
    job = Planned(free=9.0)
    job.carrier.replication_manager = SimpleNamespace(is_requested=True)
    job.carrier._replica_short_since_s = now[0]

    def look(after_s: float) -> int:
        now[0] += after_s
        return job.look()

    assert [look(PERIOD_S), look(SLOT_YIELD_S - 2 * PERIOD_S)] == [3, 3]
    assert look(PERIOD_S) == 2
    job.carrier._replica_short_since_s = math.inf
    assert {look(PERIOD_S) for _ in range(round(SLOT_RETURN_S / PERIOD_S) - 1)} == {2}
    assert look(PERIOD_S) == 3, "though there is no more memory than all the time"


def test_what_others_have_just_ceased_to_keep_counts_as_short_from_then_on_whatever_they_have_never_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A memory-only node that keeps some nodes' parts is away for a moment, and nobody ever had room for another's."""
    now = [100.0]
    monkeypatch.setattr(job_executor.time, "monotonic", lambda: now[0])
    job = Planned(free=9.0)
    replication_manager = SimpleNamespace(
        holders_by_node=(), has_holders=True, is_requested=True, warnings=[], is_alone=False, placement_fields=dict
    )
    keep: set[str] = set()

    def place(sizes: Any, plans: Any, used: int, gives_way: bool) -> int:
        replication_manager.holders_by_node = tuple(Kept(node, int(node in keep)) for node in ("", "b", "c"))
        return SLOTS_MIN if gives_way else used

    class Two(AllShares):
        def __init__(self) -> None: ...

        def sum_by_node(self, sizes: Any) -> dict[str, int]:
            return {}

        def plans_by_name(self) -> dict[str, memory_plan.MemoryPlan]:
            return {"": job.plan()}

        plan_memory = job.measure

    replication_manager.update_placement = place
    job.carrier.ranks, job.carrier.replication_manager = Two(), replication_manager
    job.carrier.cost_model, job.carrier._has_reported_placement = None, True
    job.carrier._place_replicas = lambda *given: JobExecutor._place_replicas(job.me, *given)

    def look(after_s: float, *kept: str) -> int:
        now[0] += after_s
        keep.clear()
        keep.update(kept)
        JobExecutor.replan_placement(job.me)
        return job.look()

    job.group.slot_limit = 2
    assert look(0.0, "b", "c") == 2, "it is short from the beginning"
    job.group.slot_limit = 3
    assert look(1000.0) == 3, "the memory-only node may be back in a moment"
    assert look(SLOT_YIELD_S - PERIOD_S) == 3
    assert look(PERIOD_S) == 2


def test_where_a_slot_gave_way_and_another_one_is_lost_that_comes_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(job_executor.time, "monotonic", lambda: now[0])
    job = Planned(free=9.0)
    job.carrier.replication_manager = SimpleNamespace(is_requested=True)
    job.carrier._replica_short_since_s = now[0] - SLOT_YIELD_S
    assert job.look() == 2
    job.carrier._replica_short_since_s = math.inf
    job.group.record_arenas(0, (MIB,))
    JobExecutor._reduce_slots(job.me, 1, "it is full")
    assert job.group.slot_limit == 1
    now[0] += REPLAN_PAUSE_S
    assert job.look() == 2


@pytest.mark.parametrize("meanwhile", ["nothing", "it is not in use any more", "the state has grown"])
def test_an_arena_that_is_not_needed_any_more_and_could_not_be_had_says_nothing_of_those_that_are(
    meanwhile: str,
) -> None:
    """Where the state had grown no slot at all was to be had, so it seemed, and saves were refused for a while."""
    job = Planned(free=9.0)
    failed: list[Callable[..., None]] = []
    job.carrier.ranks.make_arenas = lambda slot, sizes, then: failed.append(then)
    job.carrier._reduce_slots = lambda slot, why: JobExecutor._reduce_slots(job.me, slot, why)
    for slot in range(2):
        job.group.record_arenas(slot, (MIB,))
    job.group.slots[2].is_making_arenas = True
    JobExecutor._make_arenas(job.me, 2, (MIB,))
    if meanwhile == "it is not in use any more":
        job.group.set_slot_limit(2)
    elif meanwhile == "the state has grown":
        job.group.record_layout(0)
        job.group.record_division(job.group.layouts_version, "e", (2 * MIB,), 3)
    failed[0]({}, "it is full")
    assert job.said == ([("memory.short", True)] if meanwhile == "nothing" else [])
    assert job.group.slot_limit == (3 if meanwhile == "the state has grown" else 2)
    assert (job.group.refusal_reason, job.group.slots[2].is_making_arenas) == ("", False)
