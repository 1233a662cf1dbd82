"""The exports of a job: one at a time, the newest first of those that wait, and the last one before the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ckpt.agent.commit.exports import Exports
from ckpt.agent.runtime.coroutines import Promise, spawn
from ckpt.errors import AgentError
from ckpt.policy.export_rule import ExportRule
from ckpt.types import Epoch, Identity, Version

RULE = ExportRule("/out", 1, (), "", (), None, "sharded", "")


class Lane:
    """Runs what is given to it when a test says so, and keeps what was exported and reported."""

    def __init__(self) -> None:
        self.queue: deque[tuple[Promise[bool], Callable[[], bool]]] = deque()
        self.exported: list[tuple[int, bool]] = []
        self.events: list[tuple[str, int]] = []
        self.fails = False
        self.at_end: list[int] = []

    async def export(self, rule: ExportRule, identity: Identity, is_wanted: bool) -> bool:
        assert not self.queue, "two exports at once"
        done = Promise[bool]()
        self.queue.append((done, lambda: self._write(identity.version.step, is_wanted)))
        return await done

    def _write(self, step: int, is_wanted: bool) -> bool:
        if step in {each for each, _ in self.exported}:
            return False
        self.exported.append((step, is_wanted))
        return True

    def go_on(self) -> None:
        done, write = self.queue.popleft()
        if self.fails:
            done.set_error(AgentError("no space"))
        else:
            done.set_result(write())

    def emit(self, name: str, message: str, loud: bool, data: dict[str, Any]) -> None:
        self.events.append((name, int(data["path"].rpartition("-")[2])))


def an_identity(step: int) -> Identity:
    return Identity(Epoch(1, "a" * 16), Version(step))


@given(st.lists(st.sampled_from(["commit", "go on"]), max_size=40), st.booleans())
def test_exports_run_one_at_a_time_and_the_last_commit_always_is(what: list[str], fails: bool) -> None:
    lane = Lane()
    lane.fails = fails
    exports, step = Exports(RULE, lane.export, spawn, lane.emit), 0
    for each in what:
        if each == "commit":
            step += 1
            exports.note_commit(an_identity(step))
        elif lane.queue:
            lane.go_on()
    exports.finish(None, lambda: lane.at_end.append(step))
    while lane.queue:
        assert not lane.at_end, "ended before the last export"
        lane.go_on()
    assert lane.at_end == [step]
    steps = [each for each, _ in lane.exported]
    assert steps == sorted(set(steps))
    assert fails or not step or steps[-1] == step
    assert all(name == ("export.failed" if fails else "export.done") for name, _ in lane.events)


def test_a_job_that_committed_nothing_exports_what_it_began_from() -> None:
    lane = Lane()
    exports = Exports(RULE, lane.export, spawn, lane.emit)
    exports.finish(an_identity(7), lambda: lane.at_end.append(7))
    lane.go_on()
    assert (lane.exported, lane.at_end) == ([(7, True)], [7])


def test_a_commit_that_is_not_due_takes_no_place_of_one_that_is() -> None:
    """Only the first commit at or after a multiple of 20 is due. Of those of several multiples the newest waits."""
    lane, rule = Lane(), replace(RULE, every=20)
    exports = Exports(rule, lane.export, spawn, lane.emit)
    for step in (10, 20, 30):
        exports.note_commit(an_identity(step))
    lane.go_on()
    exports.note_commit(an_identity(40))
    exports.note_commit(an_identity(60))
    lane.go_on()
    lane.go_on()
    assert [step for step, _ in lane.exported] == [10, 20, 60]
