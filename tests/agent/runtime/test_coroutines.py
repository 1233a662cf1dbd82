"""Coroutines on the agent's main thread: each ends, its error is heard, and nothing of it runs afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckpt.agent.runtime.coroutines import (
    Cancelled,
    Promise,
    Semaphore,
    Task,
    gather,
    race,
    sleep,
    spawn,
    start,
    time_out,
)
from ckpt.errors import AgentError


async def value_of(promise: Promise[Any]) -> Any:
    return await promise


class Timers:
    def __init__(self) -> None:
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        self.calls.append((delay_s, what))

    def expire(self) -> None:
        calls, self.calls = self.calls, []
        for _, what in calls:
            what()


def test_a_coroutine_goes_on_within_the_call_that_settles_what_it_waits_for() -> None:
    promise, heard = Promise[int](), list[tuple[int | None, str]]()
    start(value_of(promise), lambda found, error: heard.append((found, error)))
    assert heard == []
    promise.set_result(7)
    promise.set_result(8)
    assert heard == [(7, "")]


def test_an_error_reaches_the_callback_and_an_unexpected_one_its_caller_too() -> None:
    heard: list[str] = []
    refused, mistaken = Promise[int](), Promise[int]()
    start(value_of(refused), lambda _, error: heard.append(error))
    refused.set_error(AgentError("refused"))
    start(value_of(mistaken), lambda _, error: heard.append(error))
    with pytest.raises(ZeroDivisionError):
        mistaken.set_error(ZeroDivisionError("a mistake"))
    assert heard == ["refused", "ZeroDivisionError: a mistake"]
    with pytest.raises(AgentError, match="refused"):
        spawn(value_of(refused))


def test_of_coroutines_that_run_together_the_first_error_cancels_the_others() -> None:
    promises, ended = [Promise[int]() for _ in range(3)], list[str]()

    async def child(number: int) -> int:
        try:
            return await promises[number]
        finally:
            ended.append(f"{number} ended")

    task = Task(gather(map(child, range(3))))
    promises[2].set_result(2)
    promises[0].set_error(AgentError("lost"))
    assert sorted(ended) == ["0 ended", "1 ended", "2 ended"]
    assert isinstance(task.error, AgentError)
    promises[1].set_result(1)
    assert len(ended) == 3


def test_results_are_in_order_whichever_comes_first() -> None:
    promises = [Promise[int]() for _ in range(3)]
    task = Task(gather(map(value_of, promises)))
    for number in (1, 2, 0):
        assert not task.is_settled
        promises[number].set_result(number)
    assert task.result() == [0, 1, 2]
    assert Task(gather(())).result() == []


@pytest.mark.parametrize("is_late", [False, True])
def test_what_takes_too_long_is_cancelled(is_late: bool) -> None:
    promise, timers, ended = Promise[int](), Timers(), list[str]()

    async def work() -> int:
        try:
            return await promise
        except Cancelled:
            ended.append("cancelled")
            raise

    task = Task(race(work(), time_out(timers.later, 5.0)))
    assert [delay_s for delay_s, _ in timers.calls] == [5.0]
    if is_late:
        timers.expire()
    promise.set_result(1)
    timers.expire()
    assert (isinstance(task.error, TimeoutError), ended) == ((True, ["cancelled"]) if is_late else (False, []))


def test_a_guard_that_runs_no_step_any_more_cancels_the_task_and_those_that_it_made() -> None:
    wanted, promise, ended, timers = [True], Promise[int](), list[str](), Timers()

    def guard(what: Callable[[], None]) -> None:
        if wanted:
            what()

    async def child() -> None:
        try:
            await promise
            ended.append("went on")
        finally:
            ended.append("child")

    async def parent() -> None:
        try:
            await gather([child(), sleep(timers.later, 1.0)])
        finally:
            ended.append("parent")

    task = spawn(parent(), guard)
    wanted.clear()
    promise.set_result(1)
    assert ended == ["child", "parent"]
    assert isinstance(task.error, Cancelled)


def test_a_task_that_others_wait_for_too_is_not_ended_by_the_guard_of_who_began_it() -> None:
    promise, shared, heard = Promise[int](), list[Task[int]](), list[str]()

    async def begin() -> int:
        shared.append(Task(value_of(promise)))
        return await shared[0]

    wanted = [True]
    spawn(begin(), lambda step: step() if wanted else None)
    start(shared[0], lambda found, error: heard.append(error))
    wanted.clear()
    promise.set_result(1)
    assert heard == [""]


def test_whoever_makes_a_mistake_on_a_result_keeps_no_one_else_from_it() -> None:
    promise, heard = Promise[int](), list[int]()
    promise.when_settled(lambda: 1 // 0)
    promise.when_settled(lambda: heard.append(promise.result()))
    with pytest.raises(ZeroDivisionError):
        promise.set_result(7)
    assert heard == [7]


@pytest.mark.parametrize("ended", [0, 1])
def test_a_semaphore_lets_so_many_in_and_one_that_is_cancelled_costs_no_place(ended: int) -> None:
    places, inside, go_on = Semaphore(1), list[int](), [Promise[None]() for _ in range(3)]

    async def work(number: int) -> None:
        async with places:
            inside.append(number)
            await go_on[number]

    tasks = [Task(work(number)) for number in range(3)]
    assert inside == [0]
    tasks[ended].cancel()
    go_on[0].set_result(None)
    go_on[1].set_result(None)
    assert inside == ([0, 1, 2] if ended == 0 else [0, 2])


def test_a_task_that_is_cancelled_while_it_runs_ends_at_its_next_wait() -> None:
    promise, steps = Promise[None](), list[str]()

    async def run() -> None:
        await promise
        task.cancel()
        steps.append("still runs")
        await Promise[None]()
        steps.append("never")

    task = Task(run())
    promise.set_result(None)
    assert (steps, task.is_settled) == (["still runs"], True)


def test_the_guard_of_a_task_that_nobody_awaits_hears_the_error_of_its_first_step() -> None:
    heard: list[str] = []

    def guard(what: Callable[[], None]) -> None:
        try:
            what()
        except AgentError as exc:
            heard.append(str(exc))

    async def fail() -> None:
        raise AgentError("at once")

    spawn(fail(), guard)
    assert heard == ["at once"]
