"""How a rank leaves, as its two threads see it: the training thread at the exit, and the one that ends the process."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.errors import AgentError
from ckpt.events import Events
from ckpt.ipc.messages import Message
from ckpt.preemption.notice import Notice
from ckpt.settings import read_settings
from ckpt.threads import Tasks
from ckpt.trainer.link.link import EndOrder, Link
from ckpt.trainer.loop.shutdown import ANSWER_S_MIN, NOTICE_EXIT_CODE, RESERVE_S, Shutdown

SAID = Message({"t": "reply", "id": 1, "committed": None, "error": None}, [], [])


class Waits:
    """A link to an agent that answers a request to leave when the test says so. `asked`: by which threads."""

    end_order: EndOrder | None = None
    agent = SimpleNamespace(restarts=0)

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_asked, self.answer = threading.Event(), threading.Event()
        self.levels = SimpleNamespace(has_pending_versions=False, newest=lambda level: None)

    def leave(self, outcome: str, timeout_s: float, **told: Any) -> Message:
        self.asked.append(threading.current_thread().name)
        self.is_asked.set()
        assert self.answer.wait(30)
        return SAID


def test_a_rank_asks_to_leave_once_though_it_is_told_to_end_while_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent answers one such request of a rank: whoever waited for another would wait for its death."""
    ended: list[tuple[int, int]] = []
    link = Waits()
    monkeypatch.setattr(os, "_exit", lambda code: ended.append((code, len(link.asked))))
    with Tasks("rank", pool_size=2) as tasks:
        shutdown = Shutdown(cast(Link, link), tasks, Events(), read_settings({}))
        end = EndOrder("no boundary came in time", True, time.monotonic() + 20.0)
        first = tasks.submit(shutdown._end_as_ordered, end)
        assert link.is_asked.wait(30)
        second = tasks.submit(shutdown.leave, "notice", time.monotonic() + 20.0)
        link.answer.set()
        first.result(30), second.result(30)
    assert ended[0] == (NOTICE_EXIT_CODE, 1), "it ends where it is, and nobody asked in between"


def test_a_rank_that_leaves_already_is_not_ended_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    link = Waits()
    with Tasks("rank", pool_size=2) as tasks:
        shutdown = Shutdown(cast(Link, link), tasks, Events(), read_settings({}))
        shutdown._restarts_at_hold = 0
        first: Any = tasks.submit(shutdown.finish_early, 20.0)
        assert link.is_asked.wait(30)
        second = tasks.submit(shutdown._end_as_ordered, EndOrder("", True, time.monotonic() + 20.0))
        link.answer.set()
        first.result(30), second.result(30)
    assert not ended
    assert len(link.asked) == 1


@pytest.mark.parametrize(("exit_s", "least_s"), [(0.0, ANSWER_S_MIN), (0.5, ANSWER_S_MIN), (3600.0, 1800.0)])
def test_the_answer_to_a_leave_is_waited_for_until_the_exit_is_over_or_for_a_second(
    exit_s: float, least_s: float
) -> None:
    waits: list[float] = []

    def leave(outcome: str, timeout_s: float) -> Message:
        waits.append(timeout_s)
        raise AgentError("no answer")

    link = cast(Link, SimpleNamespace(leave=leave))
    with Tasks("rank", pool_size=1) as tasks:
        shutdown = Shutdown(link, tasks, Events(), read_settings({}))
        assert shutdown.leave("normal", shutdown.begin_exit(exit_s)) is None
    (wait_s,) = waits
    assert least_s <= wait_s <= max(exit_s, ANSWER_S_MIN)


@pytest.mark.parametrize(("nodes", "leaves"), [(0, False), (1, False), (2, True)])
def test_a_held_rank_that_no_agent_answers_any_more_does_not_go_on_alone(nodes: int, leaves: bool) -> None:
    """The agent has died, and none comes back. Ranks on other nodes may have left. On one node nobody was told anything
    else."""

    def request(kind: str, fields: dict[str, Any], timeout_s: float | None) -> Message:
        raise AgentError("the agent is gone")

    link = SimpleNamespace(
        agent=SimpleNamespace(is_rejoined=False, is_given_up=True, restarts=0),
        view=SimpleNamespace(leave_attempt=0),
        terms=SimpleNamespace(nodes=[{"name": str(n)} for n in range(nodes)]),
        request=request,
    )
    with Tasks("rank", pool_size=1) as tasks:
        shutdown = Shutdown(cast(Link, link), tasks, Events(), read_settings({}))
        assert shutdown.wait_for_verdict(1) is leaves


class Hears:
    """A link to an agent that answers at once. `heard`: what this rank told it of its signals."""

    end_order: EndOrder | None = None

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.told = threading.Event()
        self.agent = SimpleNamespace(restarts=0)

    def request(self, kind: str, fields: dict[str, Any], timeout_s: float | None) -> Message:
        self.heard.append({"t": kind, **fields})
        self.told.set()
        return SAID


@pytest.mark.parametrize("by_s", [20.0, -3600.0])
def test_a_signal_is_told_by_the_time_that_is_left_whatever_clocks_say_meanwhile(
    monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    """The coordinator may have another clock. An agent that is started again is told of the signal as well."""
    link = Hears()
    with Tasks("rank", pool_size=1) as tasks:
        shutdown = Shutdown(cast(Link, link), tasks, Events(), read_settings({}))
        shutdown._on_signal(Notice(time.time() + 30.0, "signal", True, "SIGTERM", ""))
        assert link.told.wait(30)
        link.told.clear()
        right_s = time.time
        monkeypatch.setattr(time, "time", lambda: right_s() + by_s)
        link.agent.restarts += 1
        assert link.told.wait(30)
        shutdown.end_threads()
    first, again = link.heard
    assert (first["t"], first["key"], set(first)) == ("notice", "SIGTERM", {"t", "key", "left_s"})
    assert 0.0 < first["left_s"] <= 30.0
    assert first["left_s"] - 9.0 < again["left_s"] <= first["left_s"]


def test_a_rank_that_leaves_is_gone_by_a_deadline_that_comes_nearer_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, is_ended = list[int](), threading.Event()
    settings = read_settings({"CKPT_NOTICES": "off"})

    def end(code: int) -> None:
        ended.append(code)
        shutdown.end_threads()
        is_ended.set()

    monkeypatch.setattr(os, "_exit", end)
    with Tasks("rank", pool_size=1) as tasks:
        nothing: Any = lambda *given: None  # noqa: E731
        link = Link("url", settings, Events(), tasks, nothing, nothing, nothing)
        shutdown = Shutdown(link, tasks, Events(), settings)
        shutdown.start_listening()
        shutdown._advance_deadline(time.monotonic() + 100.0)
        link._on_message(Message({"t": "leave-deadline", "leave_deadline_s": time.monotonic() + RESERVE_S}, [], []))
        assert is_ended.wait(30)
    assert ended == [NOTICE_EXIT_CODE]
