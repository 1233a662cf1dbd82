"""Memory that goes: on a thread, and counted until it has gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import cast

import pytest

from ckpt.agent.runtime import memory_plan
from ckpt.agent.runtime.coroutines import start
from ckpt.agent.runtime.memory_plan import MemoryPlan, MemoryUse
from ckpt.agent.snapshots import local_share as ranks_module
from ckpt.agent.snapshots.local_share import LocalShare
from ckpt.ipc.arena import Arena
from tests.agent.nodes.staged import Turned

GIB = 1 << 30


class Slow:
    """An arena with which the kernel is done when the test says so."""

    def __init__(self, size: int = GIB) -> None:
        self.size_bytes = size
        self.begun, self.done = threading.Event(), threading.Event()
        self.closed: set[str] = set()

    def close(self) -> None:
        self.begun.set()
        assert self.done.wait(30)
        self.closed.add(threading.current_thread().name)


@pytest.fixture
def turned() -> Iterator[Turned]:
    made = Turned()
    yield made
    made.close()


def test_the_main_thread_does_not_wait_for_arenas_that_are_closed(turned: Turned) -> None:
    first, second = Slow(), Slow(2 * GIB)
    turned.workers.close_arenas(cast(list[Arena], [first, second]))
    assert turned.workers.closing_bytes == 3 * GIB
    first.done.set()
    turned.until(lambda: turned.workers.closing_bytes == 2 * GIB)
    second.done.set()
    turned.until(lambda: turned.workers.closing_bytes == 0)
    assert "ckpt-agent-closing-0" in first.closed & second.closed


def test_an_arena_whose_turn_has_not_come_is_closed_with_the_agent() -> None:
    turned, held, arena = Turned(), Slow(), Arena.create(4096)
    turned.workers.close_arenas([cast(Arena, held), arena])
    threading.Timer(0.05, held.done.set).start()
    turned.close()
    assert arena.fd == -1


def test_what_is_being_closed_counts_as_memory_that_a_job_may_have_and_who_takes_it_waits(
    turned: Turned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job would have fewer slots, or be refused, for what is there a moment later."""
    held, free, plans = Slow(8 * GIB), [GIB], list[MemoryPlan | None]()
    monkeypatch.setattr(memory_plan, "free_bytes", lambda: free[0])
    monkeypatch.setattr(ranks_module, "RELEASE_TIMEOUT_S", 0.1)
    ranks = LocalShare(1, turned.workers, MemoryUse)
    heard: list[str] = []
    try:
        turned.workers.close_arenas([cast(Arena, held)])
        start(ranks.plan_memory({0: 2 * GIB}, 3, None), lambda plan, _: plans.append(plan))
        assert [plan.slots for plan in plans if plan is not None] == [3]
        free[0] = 0
        start(ranks.make_arenas(0, {0: 4096}), lambda sizes, error: heard.append(error))
        time.sleep(5 * ranks_module.RELEASE_TIMEOUT_S)
        assert turned.is_idle, "it waits, however long that takes"
        free[0] = GIB
        held.done.set()
        turned.until(lambda: heard and not turned.workers.closing_bytes)
        assert heard == [""]
    finally:
        ranks.drop()


def test_what_the_kernel_has_given_back_of_an_arena_is_not_counted_as_what_it_will_give_back(
    turned: Turned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so bit by bit: a copy would be taken into memory that is not there."""
    held, next_, free, plans = Slow(8 * GIB), Slow(2 * GIB), [GIB], list[MemoryPlan | None]()
    monkeypatch.setattr(memory_plan, "free_bytes", lambda: free[0])
    ranks = LocalShare(1, turned.workers, MemoryUse)

    def allowed() -> int:
        start(ranks.plan_memory({0: GIB}, 3, None), lambda plan, _: plans.append(plan))
        assert plans[-1] is not None
        return plans[-1].allowed_bytes

    try:
        before = allowed()
        turned.workers.close_arenas(cast(list[Arena], [held, next_]))
        all_of_it = before + (10 * GIB - 10 * GIB // memory_plan.SPARE_PARTS)
        assert held.begun.wait(30)
        for count in (1, 5, 9):
            free[0] = count * GIB
            assert allowed() == all_of_it
        held.done.set()
        assert next_.begun.wait(30)
        assert allowed() == all_of_it, "though the main thread has not heard of it"
        free[0] = 11 * GIB
        next_.done.set()
        turned.until(lambda: not turned.workers.closing_bytes)
        assert allowed() == all_of_it
    finally:
        ranks.drop()
