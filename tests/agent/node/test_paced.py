"""What is decided is what happens: Group and Learning of one rank, on a manual clock, at steps of any length."""

from __future__ import annotations

import itertools
import statistics

import pytest

from ckpt.agent.state import actions as do
from ckpt.agent.state.cost_model import CostModel
from ckpt.agent.state.slots import SlotState
from ckpt.policy.adaptive import Adaptive
from ckpt.policy.interval_solver import START_S
from ckpt.policy.save_options import Every
from ckpt.types import Version
from tests.agent.scheduler.test_scheduler import Driver

STALL_S, HASH_S, BYTES = 0.5, 0.2, 10**9


class Job:
    """Steps that take `step_s`, commits that take `commit_s`. `snapshots`: when each was taken; `commits`: when what
    each holds was taken, and when it had ended; both since the intervals changed last."""

    def __init__(self, limits: Adaptive, step_s: float, commit_s: float, slots: int) -> None:
        self.driver = Driver(1, Every(seconds=START_S), slots)
        self.learning = CostModel(limits)
        self.learning.slots = slots
        self.learning.record_start(0.0, 0)
        self.step_s, self.commit_s = step_s, commit_s
        self.snapshots: list[float] = []
        self.commits: list[tuple[float, float]] = []
        self._taken_s: dict[int, float] = {}
        self._assembles: tuple[float, do.Assemble] | None = None
        self._commits: tuple[float, do.Commit] | None = None
        self._heard = 0
        self._entered_s = 0.0
        self.step, self._ends_s = 1, step_s
        self.driver.steps = [1]
        self._follow()

    def run(self, steps: int) -> None:
        driver = self.driver
        while self.step <= steps:
            wake_s = driver.group.next_wake_s(driver.now_s)
            times = [self._ends_s, *(each[0] for each in (self._assembles, self._commits) if each is not None)]
            driver.now_s = min([*times, *([wake_s] if wake_s is not None and wake_s > driver.now_s else [])])
            if self._assembles is not None and self._assembles[0] <= driver.now_s:
                made, self._assembles = self._assembles[1], None
                driver.group.save_attempts.record_assembly(made.slot, made.attempt_number, "")
            if self._commits is not None and self._commits[0] <= driver.now_s:
                self._committed()
            if self._ends_s <= driver.now_s:
                self._next_step()
            driver.decide()
            self._hear()
            driver.decide()
            self._hear()

    def _next_step(self) -> None:
        driver, ended, word = self.driver, self.step, self.driver.word()
        self._entered_s = self._ends_s
        self.step, self._ends_s = ended + 1, self._ends_s + self.step_s
        driver.steps = [self.step]
        granted = [attempt.number for attempt in driver.slots.attempts(SlotState.GRANTED)]
        if word is None or word.step != ended or word.attempt_number not in granted:
            return
        self._taken_s[ended] = driver.now_s
        self.snapshots.append(driver.now_s)
        self._ends_s += STALL_S
        driver.group.save_attempts.record_staging(
            0, word.attempt_number, Version(ended), word.slot, driver.arenas.division, STALL_S
        )
        self.learning.record_stall(STALL_S, self.step)
        self._follow()

    def _hear(self) -> None:
        for action in self.driver.said[self._heard :]:
            if isinstance(action, do.Assemble):
                self._assembles = self.driver.now_s + HASH_S, action
            elif isinstance(action, do.Commit):
                self.learning.record_commit_begin(self._entered_s, self.step)
                self._commits = self.driver.now_s + self.commit_s, action
            elif isinstance(action, do.OfferSlot):
                self.driver.arenas.record_warm_arena(0, action.slot, self.driver.arenas.division)
        self._heard = len(self.driver.said)

    def _committed(self) -> None:
        assert self._commits is not None
        made, self._commits = self._commits[1], None
        now_s = self.driver.now_s
        self.driver.group.commits.record_commit(made.slot, "", now_s)
        self.commits.append((self._taken_s[made.version.step], now_s))
        self.learning.record_commit_end(self._entered_s, self.step, (self.commit_s, BYTES))
        self._follow()

    def _follow(self) -> None:
        before = self.learning.decision
        decision = self.learning.decide(self.driver.now_s)
        if (before.local_s, before.snapshots) != (decision.local_s, decision.snapshots):
            self.snapshots.clear()
            self.commits.clear()
        self.driver.group.clock.set_intervals(decision.local_s, decision.store_s, self.driver.now_s)


LIMITS = [Adaptive(), Adaptive(at_risk_s=150), Adaptive(at_risk_s=400), Adaptive(store_mb_s=1), Adaptive(store_mb_s=3)]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("commit_s", [2.0, 90.0])
@pytest.mark.parametrize(("slots", "step_s"), [(3, 1.0), (3, 20.0), (3, 200.0), (1, 1.0), (1, 60.0)])
def test_what_is_decided_happens_and_a_limit_is_kept_or_named(
    slots: int, step_s: float, commit_s: float, limits: Adaptive
) -> None:
    """With room for one snapshot each has to be committed before the next is taken."""
    job = Job(limits, step_s, commit_s, slots)
    while len(job.commits) < 12:
        job.run(job.step + 50)
    found = job.learning.decision
    apart_s = [b - a for a, b in itertools.pairwise(job.snapshots[1:])]
    assert statistics.mean(apart_s) == pytest.approx(found.local_s, rel=0.2)
    assert max(apart_s) <= found.local_s + step_s + STALL_S
    job.commits = job.commits[2:]  # by then neither was appointed before
    apart_s = [b[0] - a[0] for a, b in itertools.pairwise(job.commits)]
    assert statistics.mean(apart_s) == pytest.approx(found.store_s, rel=0.2)
    if limits.store_mb_s is not None:
        assert BYTES / statistics.mean(apart_s) / 1e6 <= limits.store_mb_s
    if limits.at_risk_s is not None and "at_risk_s" not in found.unmet_limits:
        assert max(b[1] - a[0] for a, b in itertools.pairwise(job.commits)) <= limits.at_risk_s
