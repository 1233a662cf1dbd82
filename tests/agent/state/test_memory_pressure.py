"""What is given back while the machine runs out of memory: no more than is missing, the oldest first, and never the
only complete checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.agent.job.job_context import JobContext
from ckpt.agent.node.node_memory import MemoryRelief, NodeMemory
from ckpt.agent.runtime import memory_plan
from ckpt.agent.scheduler.scheduler import Scheduler
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.agent.state.memory_pressure import PERIOD_S, StartMemory, choose_evictions, missing_bytes
from ckpt.agent.state.retention_rule import NewestStart
from ckpt.events import Event
from ckpt.ipc.arena import Arena
from ckpt.placement.placement import Kept
from ckpt.policy.save_options import Every
from ckpt.types import Epoch, Identity, Version
from tests.agent.nodes.staged import close_arenas
from tests.agent.parts import bare_context
from tests.agent.scheduler.test_scheduler import hold_snapshot

GIB = 1 << 30
ONE, TWO, THREE = (Epoch(number, f"{number:016x}") for number in (1, 2, 3))


def test_nothing_is_missing_while_a_fiftieth_is_left() -> None:
    assert missing_bytes(GIB, 50 * GIB) == 0
    assert missing_bytes(GIB - 5, 50 * GIB) == 5
    assert missing_bytes(0, 100 * GIB) == 2 * GIB


@pytest.mark.parametrize(
    ("missing", "gone"), [(0, []), (1, [ONE]), (GIB, [ONE]), (GIB + 1, [ONE, TWO]), (9 * GIB, [ONE, TWO])]
)
def test_the_oldest_go_and_no_more_than_is_missing(missing: int, gone: list[Epoch]) -> None:
    held = [StartMemory(epoch, GIB, True, True) for epoch in (ONE, TWO, THREE)]
    assert choose_evictions(held, missing) == gone


def test_whatever_is_held_what_goes_is_idle_and_leaves_something_newer_that_is_complete() -> None:
    for flags in itertools.product([False, True], repeat=6):
        held = [StartMemory(epoch, 1, flags[at], flags[3 + at]) for at, epoch in enumerate((ONE, TWO, THREE))]
        gone = choose_evictions(held, 99)
        left = [each for each in held if each.epoch not in gone]
        for each in held:
            if each.epoch in gone:
                assert each.is_idle
                assert any(newer.is_durable and newer.epoch > each.epoch for newer in left)


def test_what_a_start_went_on_from_stays_and_what_it_did_not_goes_though_nothing_newer_is_complete() -> None:
    """Two was whole on its nodes, and never safe: one of them was lost, and three went on from one."""
    held = [StartMemory(ONE, GIB, True, True), StartMemory(TWO, GIB, False, True)]
    assert choose_evictions(held, 9 * GIB) == [], "nobody has gone on yet"
    assert choose_evictions(held, 9 * GIB, NewestStart(THREE, Identity(ONE, Version(5)))) == [TWO]
    assert choose_evictions(held, 9 * GIB, NewestStart(THREE, Identity(TWO, Version(5)))) == [ONE]
    assert choose_evictions(held, 9 * GIB, NewestStart(THREE, None)) == [], "why it began afresh is not known"
    assert choose_evictions(held, 9 * GIB, NewestStart(TWO, Identity(ONE, Version(5)))) == [], "its own"


def test_all_there_is_counts_within_our_control_groups_limit(tmp_path: Path) -> None:
    text = "MemTotal:       65536000 kB\nMemAvailable:   33554432 kB\n"
    assert memory_plan.total_bytes(text, tmp_path) == 65536000 << 10
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_plan.total_bytes(text, tmp_path) == 65536000 << 10
    (tmp_path / "memory.max").write_text(f"{3 * GIB}\n")
    assert memory_plan.total_bytes(text, tmp_path) == 3 * GIB


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that are free, of 50 GiB."""
    found = [0]
    monkeypatch.setattr(memory_plan, "total_bytes", lambda: 50 * GIB)
    monkeypatch.setattr(memory_plan, "free_bytes", lambda: found[0])
    return found


class Former:
    """A job of an earlier start, as far as its memory is concerned."""

    def __init__(self, epoch: Epoch, complete: bool = True) -> None:
        self.epoch, self.is_idle, self.dropped = epoch, True, False
        self.local_share = SimpleNamespace(arena_bytes=GIB)
        self.context = SimpleNamespace(has_complete=complete)

    def drop(self, leave_others: bool = False) -> None:
        self.dropped = True


class Node:
    """The memory of a node, and its relief. `begun`: the newest start that it has a part in."""

    def __init__(self, former: list[Any], begun: NewestStart | None = None) -> None:
        self.told: list[Event] = []
        workers = SimpleNamespace(close_arenas=close_arenas, free_bytes=lambda: memory_plan.free_bytes())
        context = bare_context(workers=workers, emit_event=self.told.append)
        self.jobs = context.jobs
        self.jobs.former = former
        self.memory = NodeMemory(context)
        self.replicas = self.memory.replicas
        self.begun = begun
        self.memory.retention_rule = lambda: self.begun  # type: ignore[method-assign]
        self.relief = MemoryRelief(context, self.memory, lambda which: False)

    def look(self, now_s: float) -> float | None:
        return self.relief.relieve_pressure(now_s)


def test_an_agent_gives_back_what_is_only_warm_and_then_the_older_checkpoint_and_says_so(
    free: list[int],
) -> None:
    free[0] = 49 * GIB
    agent = Node([Former(ONE), Former(TWO)])
    agent.replicas.arenas._spare_arenas.append(Arena.create(1 << 20))
    assert agent.look(100.0) == 100.0 + PERIOD_S
    assert len(agent.replicas.arenas._spare_arenas) == 1
    free[0] = GIB - (1 << 20)
    assert agent.look(101.0) == 100.0 + PERIOD_S, "not sooner than that"
    agent.look(110.0)
    assert (agent.replicas.arenas._spare_arenas, len(agent.jobs.former)) == ([], 2)
    old, new = agent.jobs.former
    free[0] = GIB // 2
    agent.look(120.0)
    assert (agent.jobs.former, old.dropped, new.dropped) == ([new], True, False)
    free[0] = 0
    agent.look(130.0)
    assert agent.jobs.former == [new], "the only complete one"
    assert [(event.name, event.loud) for event in agent.told] == [("memory.released", False), ("memory.released", True)]
    assert agent.told[-1].message.endswith(" are given back, 1 older checkpoint among them")
    agent.jobs.former = []
    assert agent.look(140.0) is None


def test_a_node_that_follows_gives_back_copies_of_earlier_starts_before_its_own_part_and_keeps_what_is_gone_on_from(
    free: list[int],
) -> None:
    free[0] = GIB - 1
    parent, older, failed = Identity(TWO, Version(9)), Identity(ONE, Version(5)), Identity(TWO, Version(12))
    agent = Node([], NewestStart(THREE, parent))
    for epoch in (ONE, TWO, THREE):
        share = SimpleNamespace(arena_bytes=GIB // 2)
        agent.jobs.followed.append(
            SimpleNamespace(epoch=epoch, local_share=share, is_idle=epoch is not THREE, is_over=False)
        )
    for identity in (parent, older, failed, Identity(THREE, Version(13))):
        agent.replicas.add_rebuilt((identity, 0), Arena.create(1 << 20))
    agent.look(100.0)
    assert agent.replicas.kept.identities == {parent, failed, Identity(THREE, Version(13))}, "no more than is missing"
    free[0] = GIB - (1 << 20) - 1
    agent.look(110.0)
    assert agent.replicas.kept.identities == {parent, Identity(THREE, Version(13))}
    assert [each.is_over for each in agent.jobs.followed] == [True, False, False]
    free[0] = 0
    agent.look(120.0)
    assert agent.replicas.kept.identities == {parent, Identity(THREE, Version(13))}
    assert [each.is_over for each in agent.jobs.followed] == [True, False, False]
    agent.replicas.close()


def test_a_start_that_asks_what_lies_here_finds_it(free: list[int]) -> None:
    agent = Node([], NewestStart(TWO, Identity(ONE, Version(9))))
    agent.replicas.add_rebuilt((Identity(ONE, Version(5)), 0), Arena.create(1 << 20))
    agent.memory.inventory_lease.take_lease("a", TWO)
    agent.look(100.0)
    assert len(agent.replicas.kept.identities) == 1
    agent.memory.inventory_lease.end_lease("a")
    agent.look(110.0)
    assert not agent.replicas.kept.identities
    agent.replicas.close()


def test_what_is_whole_on_several_nodes_counts_once_it_is_safe_or_in_the_store() -> None:
    group = Scheduler(2, Every(steps=1))
    group.replicas.is_replication_on = True
    job = SimpleNamespace(scheduler=group, checkpoints={0: object()}, nodes=("a", "b"))
    complete = lambda: cast(Any, JobContext.has_complete).fget(job)  # noqa: E731
    hold_snapshot(group, 0, Version(5))
    assert not complete(), "it is gone with one of them"
    group.replicas.record_survey(Version(5), [Kept("", 1), Kept("b", 1)], True)
    assert complete()
    group.replicas.record_lost_holder("b", group.replicas.peer_versions)
    assert not complete()
    group.facts.committed_version = Version(5)
    assert complete()
    job.nodes, group.facts.committed_version = (), None
    assert complete()


def test_a_node_keeps_its_part_of_what_is_safe_until_something_newer_is_though_the_job_went_on_from_newer() -> None:
    """That lies on one node each, and is gone with any of them."""
    parent, safe, older = (Identity(TWO, Version(step)) for step in (15, 10, 5))
    agent = Node([], NewestStart(THREE, parent, safe))
    left = [older, safe, parent]

    def give_back(outdated: Callable[[Identity], bool]) -> None:
        left[:] = [each for each in left if not outdated(each)]

    before = SimpleNamespace(
        epoch=TWO, has_ranks=False, pending_commit=None, local_share=SimpleNamespace(free_outdated_slots=give_back)
    )
    agent.jobs.followed = [
        before,
        SimpleNamespace(epoch=THREE, pending_commit=None, local_share=SimpleNamespace(is_memory_short=True)),
    ]
    agent.relief.replan_cramped_job(100.0)
    assert left == [safe, parent]


def test_neither_for_want_of_room_nor_of_memory_does_what_is_safe_go_for_what_a_start_went_on_from(
    free: list[int],
) -> None:
    """That lies on one node each, and is gone with any of them."""
    parent, safe, older = (Identity(TWO, Version(step)) for step in (15, 10, 5))
    agent = Node([])
    agent.replicas.announced_replicated = safe
    agent.jobs.current = cast(Any, SimpleNamespace(claim=SimpleNamespace(epoch=THREE, parent=parent)))
    agent.memory.inventory = lambda whole: Inventory()  # type: ignore[method-assign]
    agent.begun = NodeMemory.retention_rule(agent.memory)
    assert [agent.memory.eviction_predicate()(each) for each in (older, safe, parent)] == [True, False, False]
    agent.jobs.current = None
    for identity in (older, safe):
        agent.replicas.add_rebuilt((identity, 0), Arena.create(1 << 20))
    before = SimpleNamespace(epoch=TWO, local_share=SimpleNamespace(arena_bytes=GIB), is_idle=True, is_over=False)
    agent.jobs.followed = [before]
    agent.look(100.0)
    assert (agent.replicas.kept.identities, before.is_over) == ({safe}, False)
    agent.begun = NewestStart(THREE, Identity(ONE, Version(9)), safe)
    agent.look(110.0)
    assert (agent.replicas.kept.identities, before.is_over) == ({safe}, False)
    agent.replicas.close()


def test_a_job_that_a_newer_start_took_the_place_of_gives_its_memory_back_as_one_before_it_does() -> None:
    """It is the current one where another node coordinates the newer one."""
    given: list[Epoch] = []
    agent = Node([], NewestStart(THREE, Identity(TWO, Version(9))))
    jobs = [
        SimpleNamespace(epoch=epoch, free_outdated_slots=lambda _, epoch=epoch: given.append(epoch))
        for epoch in (ONE, TWO)
    ]
    agent.jobs.former = cast(Any, jobs)
    agent.jobs.followed = [SimpleNamespace(epoch=THREE, local_share=SimpleNamespace(is_memory_short=True))]
    agent.jobs.current = None
    agent.relief.replan_cramped_job(100.0)
    assert given == [ONE, TWO]
