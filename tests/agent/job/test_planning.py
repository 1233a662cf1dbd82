"""What a job has room for, planned anew where that was less than it is to have."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.agent.commit.store_client import JobOptions
from ckpt.agent.job import job_memory
from ckpt.agent.job.job_context import RankTable
from ckpt.agent.job.job_memory import REPLAN_PAUSE_S, JobMemory
from ckpt.agent.job.job_replication import JobReplication
from ckpt.agent.runtime import memory_plan
from ckpt.agent.runtime.coroutines import Promise, spawn
from ckpt.agent.scheduler.scheduler import Scheduler
from ckpt.agent.state.memory_pressure import PERIOD_S
from ckpt.errors import AgentError
from ckpt.placement.placement import Kept
from ckpt.policy.save_options import Every
from ckpt.types import Version
from tests.agent.scheduler.test_scheduler import hold_snapshot

MIB = 1 << 20


class Shares:
    """The nodes' shares: one node with `free` MiB, of which what earlier starts left takes `kept`."""

    def __init__(self, free: float, kept: float) -> None:
        self.free, self.kept, self.measured = free, kept, 0
        self.plans: dict[str, memory_plan.MemoryPlan] = {}
        self.made = Promise[dict[int, int]]()

    async def plan_memory(self, sizes: Any, slots: int, limit: int | None) -> memory_plan.MemoryPlan:
        self.measured += 1
        plan = memory_plan.make_plan(MIB, int(self.kept * MIB), 0, None, int(self.free * MIB))
        self.plans = {"": replace(plan, slots=min(slots, plan.slots))}
        return self.plans[""]

    async def make_arenas(self, slot: int, sizes: Any) -> dict[int, int]:
        return await self.made

    def sum_by_node(self, sizes: Any) -> dict[str, int]:
        return {}


class Planned:
    """A job on one node, or on more, whose slots take a MiB each. `free`: MiB of the machine. `kept`: MiB of what
    earlier starts left."""

    def __init__(self, free: float, nodes: int = 1, kept: float = 0.0) -> None:
        self.placed = 0
        self.said: list[tuple[str, bool]] = []
        self.shares = Shares(free, kept)
        self.group = Scheduler(1, Every(seconds=60))
        context = SimpleNamespace(
            scheduler=self.group,
            shares=self.shares,
            options=JobOptions(),
            spawn=spawn,
            emit=lambda name, text, loud, data=None: self.said.append((name, loud)),
            nodes=("",) * nodes,
            connections=RankTable(),
        )
        self.replication = JobReplication(cast(Any, context), cast(Any, None))
        self.replication.place = self.place  # type: ignore[assignment]
        self.memory = JobMemory(cast(Any, context), cast(Any, None), self.replication)
        self.divide("d")

    def divide(self, division: str) -> None:
        """The first plan, or that of a new layout."""
        self.group.arenas.record_layout()
        made = SimpleNamespace(id=division, frame_bytes=1, arena_bytes=(MIB,), differing_tensors=frozenset())
        spawn(self.memory._plan_division(self.group.arenas.layouts_version, cast(Any, made)))
        self.shares.measured = self.placed = 0
        self.said.clear()

    def place(self, sizes: Any, slots: int, used: int) -> int:
        self.placed += 1
        return slots

    def look(self) -> int:
        if self.memory.is_short:
            self.memory.replan()
        return self.group.arenas.slot_limit


def test_less_than_two_slots_become_all_once_there_is_room_and_stay_where_others_take_it() -> None:
    job = Planned(free=2.5)
    assert (job.look(), job.group.arenas.refusal_reason != "") == (0, True)
    job.shares.free = 3.5
    assert (job.look(), job.group.arenas.refusal_reason) == (1, "")
    job.shares.free = 9.0
    assert job.look() == 3
    job.shares.free = 0.0
    assert job.look() == 3
    measured = job.shares.measured
    assert job.look() == 3
    assert job.shares.measured == measured, "it has what it is to have"


def test_a_third_slot_that_was_not_there_at_the_first_save_comes_with_the_next_layout_only() -> None:
    job = Planned(free=4.5)
    job.shares.free = 9.0
    assert (job.look(), job.shares.measured) == (2, 0)
    job.divide("e")
    assert job.look() == 3


def test_slots_that_a_start_from_memory_has_no_room_for_come_once_what_it_went_on_from_is_gone() -> None:
    job = Planned(free=4.5, kept=2.0)
    assert job.look() == 2
    job.shares.free, job.shares.kept = 6.5, 0.0
    assert job.look() == 3
    job.group.arenas.limit_slots(2, "one could not be had")
    job.shares.free, job.shares.kept = 9.0, 1.0
    assert job.look() == 2, "once"


def test_nothing_is_decided_anew_as_long_as_there_is_about_as_much_memory() -> None:
    job = Planned(free=4.05)
    placed = job.placed
    for free in (4.06, 4.04, 4.05):
        job.shares.free = free
        job.look()
    assert (job.shares.measured, job.placed) == (3, placed)
    job.shares.free = 3.0
    job.look()
    assert job.placed == placed, "with less there is nothing to be had"


def test_a_second_slot_that_could_not_be_had_is_tried_again_after_a_while_and_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(job_memory.time, "monotonic", lambda: now[0])
    job = Planned(free=9.0)
    job.group.arenas.record_arenas(0, (MIB,))
    for tries in range(1, 4):
        job.memory._reduce_slots("it is full", 1)
        job.group.arenas.record_arenas(1, ())
        assert (job.look(), job.memory.plan.slots) == (1, 1)
        now[0] += REPLAN_PAUSE_S
        assert (job.look(), job.shares.measured) == (3, tries)
    assert [loud for name, loud in job.said if name == "memory.short"] == [True, False, False]


def test_as_long_as_there_is_no_more_memory_other_nodes_are_asked_less_and_less_often_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(job_memory.time, "monotonic", lambda: now[0])
    job = Planned(free=2.5, nodes=1000)

    def asked(looks: int) -> list[int]:
        """At which of so many looks."""
        found = []
        for number in range(looks):
            before = job.shares.measured
            job.look()
            found += [number] * (job.shares.measured - before)
            now[0] += PERIOD_S
        return found

    assert asked(60) == [0, 1, 3, 7, 15, 27, 39, 51]
    job.shares.free = 9.0
    assert len(asked(12)) == 1
    assert job.look() == 3
    job.group.arenas.limit_slots(1, "others took it")
    job.shares.free = 2.5
    job.memory.request_replan()
    assert asked(4) == [0, 1, 3], "there is news"


def test_what_was_placed_while_there_was_little_memory_is_placed_again_once_there_is_as_much_as_before() -> None:
    """A memory-only node came or went just then, say."""
    job = Planned(free=3.5)
    assert job.look() == 1
    job.shares.free = 2.5
    job.look()
    job.memory.replan_placement()
    placed = job.placed
    job.shares.free = 3.5
    job.look()
    assert job.placed > placed
    placed = job.placed
    job.look()
    assert job.placed == placed


def test_where_copies_fail_and_a_node_has_less_memory_than_was_planned_with_it_is_decided_anew_who_keeps_them() -> None:
    """It refuses copies for ever, and another one may have room."""
    job = Planned(free=9.0)
    job.replication.manager = cast(Any, SimpleNamespace(is_requested=True, placement_fields=lambda: None))
    job.group.replicas.is_replication_on, job.group.replicas.placement = True, (Kept("", 1, ("b",)),)
    hold_snapshot(job.group, 0, Version(10))

    def copy(error: str) -> None:
        slot = job.group.slots[0]
        assert slot.attempt is not None
        job.group.replicas.begin_replication(slot.attempt)
        job.group.replicas.record_replication(0, error, 0.0)

    copy("")
    job.shares.free = 7.0
    job.look()
    assert (job.shares.measured, job.placed) == (0, 0), "it has all copies that it is to have"
    copy("no memory for a copy")
    for _ in range(3):
        job.look()
        assert job.placed == 1, "once, as long as there is about as much"
    job.shares.free = 6.0
    job.look()
    assert (job.placed, job.group.arenas.slot_limit) == (2, 3)
    copy("")
    measured = job.shares.measured
    job.shares.free = 5.0
    job.look()
    assert job.shares.measured == measured


@pytest.mark.parametrize("meanwhile", ["nothing", "it is not in use any more", "the state has grown"])
def test_an_arena_that_is_not_needed_any_more_and_could_not_be_had_says_nothing_of_those_that_are(
    meanwhile: str,
) -> None:
    """Where the state had grown no slot at all was to be had, so it seemed, and saves were refused for a while."""
    job = Planned(free=9.0)
    for slot in range(2):
        job.group.arenas.record_arenas(slot, (MIB,))
    job.group.slots[2].is_making_arenas = True
    job.memory.make_arenas(2, (MIB,))
    if meanwhile == "it is not in use any more":
        job.group.arenas.limit_slots(2, "another one could not be had")
    elif meanwhile == "the state has grown":
        job.group.arenas.record_layout()
        job.group.arenas.record_division(job.group.arenas.layouts_version, "e", (2 * MIB,), 3)
    job.shares.made.set_error(AgentError("it is full"))
    assert job.said == ([("memory.short", True)] if meanwhile == "nothing" else [])
    assert job.group.arenas.slot_limit == (3 if meanwhile == "the state has grown" else 2)
    assert (job.group.arenas.refusal_reason, job.group.slots[2].is_making_arenas) == ("", False)
