"""What a job has room for, planned anew where that was less than it is to have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.agent.job import job_executor
from ckpt.agent.job.job_executor import REPLAN_PAUSE_S, JobExecutor
from ckpt.agent.job.scheduler import Scheduler
from ckpt.agent.runtime import memory_plan
from ckpt.agent.state.memory_pressure import PERIOD_S
from ckpt.placement.placement import Kept
from ckpt.policy.save_options import Every
from ckpt.types import Version
from tests.agent.job.test_scheduler import hold_snapshot

MIB = 1 << 20


class Planned:
    """A job on one node, or on more, whose slots take a MiB each. `free`: MiB of the machine. `kept`: MiB of what
    earlier starts left."""

    def __init__(self, free: float, nodes: int = 1, kept: float = 0.0) -> None:
        self.free, self.kept = free, kept
        self.measured = self.placed = 0
        self.said: list[tuple[str, bool]] = []
        self.group = Scheduler(1, Every(seconds=60))
        self.group.record_layout()
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
            nodes=("",) * nodes,
            _reported_slots_min=9,
        )
        self.carrier._plans_by_node = lambda plan: {"": plan}
        self.carrier._free_parts_by_node = lambda plan: JobExecutor._free_parts_by_node(self.me, plan)
        self.carrier._has_earlier_starts = lambda plan: JobExecutor._has_earlier_starts(self.me, plan)
        self.divide("d")

    @property
    def me(self) -> Any:
        return cast(Any, self.carrier)

    def divide(self, division: str) -> None:
        """The first plan, or that of a new layout."""
        self.carrier.plan = self.plan()
        self.carrier._planned_free_parts = JobExecutor._free_parts_by_node(self.me, self.carrier.plan)
        self.carrier._is_cramped = bool(self.kept)
        self.group.record_division(self.group.layouts_version, division, (MIB,), self.carrier.plan.slots)

    def plan(self) -> memory_plan.MemoryPlan:
        return memory_plan.make_plan(MIB, int(self.kept * MIB), 0, None, int(self.free * MIB))

    def measure(self, sizes: Any, slots: int, limit: int | None, then: Callable[..., None]) -> None:
        self.measured += 1
        then(replace(self.plan(), slots=min(slots, self.plan().slots)), "")

    def update_placement(self, division: Any, slots: int, used: int) -> int:
        self.placed += 1
        return slots

    @property
    def _awaits_slots(self) -> bool:
        return bool(JobExecutor._awaits_slots.fget(self.me))  # type: ignore[attr-defined]

    def look(self) -> int:
        self.carrier._awaits_slots = self._awaits_slots
        if JobExecutor.is_short_of_memory.fget(self.me):  # type: ignore[attr-defined]
            JobExecutor.replan_memory(self.me)
        return self.group.slot_limit


def test_less_than_two_slots_become_all_once_there_is_room_and_stay_where_others_take_it() -> None:
    job = Planned(free=2.5)
    assert (job.look(), job.group.refusal_reason != "") == (0, True)
    job.free = 3.5
    assert (job.look(), job.group.refusal_reason) == (1, "")
    job.free = 9.0
    assert job.look() == 3
    job.free = 0.0
    assert job.look() == 3
    measured = job.measured
    assert job.look() == 3
    assert job.measured == measured, "it has what it is to have"


def test_a_third_slot_that_was_not_there_at_the_first_save_comes_with_the_next_layout_only() -> None:
    job = Planned(free=4.5)
    job.free = 9.0
    assert (job.look(), job.measured) == (2, 0)
    job.group.record_layout()
    job.divide("e")
    assert job.look() == 3


def test_slots_that_a_start_from_memory_has_no_room_for_come_once_what_it_went_on_from_is_gone() -> None:
    job = Planned(free=4.5, kept=2.0)
    assert job.look() == 2
    job.free, job.kept = 6.5, 0.0
    assert job.look() == 3
    job.group.limit_slots(2, "one could not be had")
    job.free, job.kept = 9.0, 1.0
    assert job.look() == 2, "once"


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


def test_a_second_slot_that_could_not_be_had_is_tried_again_after_a_while_and_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(job_executor.time, "monotonic", lambda: now[0])
    job = Planned(free=9.0)
    job.group.record_arenas(0, (MIB,))
    for tries in range(1, 4):
        JobExecutor._reduce_slots(job.me, 1, "it is full")
        assert (job.look(), job.carrier.plan.slots) == (1, 1)
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
    job.group.limit_slots(1, "others took it")
    job.free = 2.5
    JobExecutor.request_replan(job.me)
    assert asked(4) == [0, 1, 3], "there is news"


def test_what_was_placed_while_there_was_little_memory_is_placed_again_once_there_is_as_much_as_before() -> None:
    """A memory-only node came or went just then, say."""
    job = Planned(free=3.5)
    assert job.look() == 1
    job.free = 2.5
    job.look()
    JobExecutor.replan_placement(job.me)
    placed = job.placed
    job.free = 3.5
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
    hold_snapshot(job.group, 0, Version(10), False)

    def copy(error: str) -> None:
        slot = job.group.slots[0]
        assert slot.attempt is not None
        job.group.begin_replication(slot.attempt)
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
        job.group.limit_slots(2, "another one could not be had")
    elif meanwhile == "the state has grown":
        job.group.record_layout()
        job.group.record_division(job.group.layouts_version, "e", (2 * MIB,), 3)
    failed[0]({}, "it is full")
    assert job.said == ([("memory.short", True)] if meanwhile == "nothing" else [])
    assert job.group.slot_limit == (3 if meanwhile == "the state has grown" else 2)
    assert (job.group.refusal_reason, job.group.slots[2].is_making_arenas) == ("", False)
