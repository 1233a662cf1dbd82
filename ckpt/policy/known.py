"""What a job has learnt of its own costs and failures: a value that grows by what it is told.

Nothing here has a clock or does I/O: who observes says how long it took. The same observations in the same order give
the same value. What was not measured yet is taken from the priors below, and from `failures.PRIORS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from ckpt.errors import UsageError
from ckpt.policy.failures import DAY_S, PRIORS, Failure, FailureRate
from ckpt.policy.interval import not_negative, positive
from ckpt.policy.levels import LevelCosts
from ckpt.policy.robust_mean import LONG, RobustMean

COMMIT_S = 60.0  # priors of what a commit takes, and of what it slows training by
SLOWDOWN = 0.05
FIRST_STALL_S = 1.0  # a run's first snapshot, which writes to memory that is cold, may take a hundred times as long
STALL_MIN_S = 1e-3  # nothing is free: below these a measurement cannot be told from none, and an interval that follows
SLOWDOWN_MIN = 0.01  # from nothing would commit without a pause, whatever the store may charge for it
RARE = 1 / (90 * DAY_S)  # failures per second: no level is taken to be needed more seldom, however long it was not

UNMEASURED = RobustMean()


@dataclass(frozen=True, slots=True)
class Measurements:
    """Costs in seconds; per class the failure rate. Methods return the value after one observation more. UsageError."""

    stall: RobustMean = UNMEASURED
    commit: RobustMean = UNMEASURED
    commit_bytes: RobustMean = UNMEASURED
    replication: RobustMean = UNMEASURED
    step: RobustMean = UNMEASURED  # seconds of a step while no commit runs
    step_beside_commit: RobustMean = UNMEASURED
    first_stall_s: float = math.inf
    local_recovery: RobustMean = UNMEASURED
    peer_recovery: RobustMean = UNMEASURED
    store_recovery: RobustMean = UNMEASURED
    process: FailureRate = PRIORS[Failure.PROCESS]
    node: FailureRate = PRIORS[Failure.NODE]
    preemption: FailureRate = PRIORS[Failure.PREEMPTION]
    job: FailureRate = PRIORS[Failure.JOB]
    recall: float = 0.0  # of the predictions that are acted on, and their precision: cautious ends
    precision: float = 1.0

    def rate_of(self, failure: Failure) -> FailureRate:
        rate: FailureRate = getattr(self, failure.value)
        return rate

    # -- observations

    def stalled(self, seconds: float) -> Measurements:
        """A snapshot kept training from going on for so long, the slowest rank's. The first of a run says little of
        those that follow: it counts as FIRST_STALL_S at most, and with the second the lesser of the two counts as one.
        """
        if not self.stall.seen:
            stall = self.stall.observed(min(seconds, FIRST_STALL_S))
            return replace(self, stall=stall, first_stall_s=seconds)
        if self.stall.seen == 1:
            least_s = min(self.first_stall_s, seconds)
            return replace(self, stall=replace(self.stall, values=()).observed(least_s))
        return replace(self, stall=self.stall.observed(seconds))

    def committed(self, seconds: float, count_bytes: float) -> Measurements:
        """A commit took so long and put so many bytes into the store."""
        not_negative("count_bytes", count_bytes)
        return replace(self, commit=self.commit.observed(seconds), commit_bytes=self.commit_bytes.observed(count_bytes))

    def replicated(self, seconds: float) -> Measurements:
        """A snapshot was safe in peers' memory so long after it was taken."""
        return replace(self, replication=self.replication.observed(seconds))

    def stepped(self, steps: int, seconds: float) -> Measurements:
        """So many steps ended in so many seconds, without a snapshot, while no commit ran."""
        return replace(self, step=self.step.observed(_pace(steps, seconds)))

    def stepped_beside_commit(self, steps: int, seconds: float) -> Measurements:
        """The same while one ran all the time."""
        return replace(self, step_beside_commit=self.step_beside_commit.observed(_pace(steps, seconds)))

    def recovered(self, level: Literal["local", "peer", "store"], seconds: float) -> Measurements:
        """From a failure until training went on from what that level held: so long."""
        name = f"{level}_recovery"
        recovery: RobustMean = getattr(self, name)
        return self._with({name: recovery.observed(seconds)})

    def ran(self, seconds: float, nodes: int = 1) -> Measurements:
        """Training ran for so long on so many nodes. Say so before what ended it."""
        return self._with({each.value: self.rate_of(each).ran(seconds * _times(each, nodes)) for each in Failure})

    def failed(self, failure: Failure) -> Measurements:
        """Work was lost by a failure of that class. What strikes several ranks or nodes at once is one failure."""
        return self._with({failure.value: self.rate_of(failure).failed()})

    def foreseen(self, recall: float, precision: float) -> Measurements:
        """That part of the failures that memory survives is predicted, and acted on; and so often a prediction comes
        true. Both the cautious ends: 0 and 1 where no source is proven."""
        if not 0 <= recall < 1 or not 0 < precision <= 1:
            raise UsageError(f"recall={recall}, precision={precision}: in [0, 1) and (0, 1]")
        return replace(self, recall=recall, precision=precision)

    def _with(self, changes: dict[str, Any]) -> Measurements:
        return replace(self, **changes)

    # -- what the formulas need

    def long_run(self) -> Measurements:
        """The same, with costs over four times as many measurements: surer, and later to see a change."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        costs = {name: value for name, value in values.items() if isinstance(value, RobustMean)}
        return self._with({name: replace(cost, window=LONG) for name, cost in costs.items()})

    @property
    def stall_s(self) -> float:
        """What a snapshot stalls. Of two the lesser: a wild one would hold the next ones off, which are to outvote it,
        and once there are three it is left out."""
        stall_s = min(self.stall.recent) if len(self.stall.recent) == 2 else self.stall.mean
        return max(STALL_MIN_S, stall_s or 0.0)

    @property
    def slowdown(self) -> float:
        """The part of training's speed that a commit takes while it runs."""
        return max(SLOWDOWN_MIN, self._slowdown()[0])

    @property
    def slowdown_error(self) -> float:
        """Its standard deviation."""
        return self._slowdown()[1]

    def _slowdown(self) -> tuple[float, float]:
        """A difference of two noisy paces, often smaller than their noise: so the prior, wrong by as much as itself,
        counts as one more measurement, each weighed by its precision (the normal posterior)."""
        alone, beside = self.step.mean, self.step_beside_commit.mean
        if not alone or not beside:
            return SLOWDOWN, SLOWDOWN
        seen = 1 - alone / beside
        error = alone / beside * math.hypot(self.step.error / alone, self.step_beside_commit.error / beside)
        weight = SLOWDOWN**2 / (SLOWDOWN**2 + error**2)
        return weight * seen + (1 - weight) * SLOWDOWN, error * math.sqrt(weight)

    def measured(self, nodes: int, peers: bool) -> LevelCosts:
        """For `levels`. `peers`: whether other hosts' memory survives the loss of a node."""
        memory, store = self.failures_by_level(peers)
        return LevelCosts(
            snapshot_stall_s=self.stall_s,
            commit_s=COMMIT_S if self.commit.mean is None else self.commit.mean,
            slowdown=self.slowdown,
            replication_s=self.replication.mean or 0.0,
            local_rate=max(RARE, self.process.now.mean),
            peer_rate=self._rate([each for each in memory if each is not Failure.PROCESS], nodes),
            store_rate=max(RARE, self._rate(store, nodes)),
            local_recovery_s=self.local_recovery.mean or 0.0,
            peer_recovery_s=self.peer_recovery.mean or 0.0,
            store_recovery_s=self.store_recovery.mean or 0.0,
        )

    def failures_by_level(self, peers: bool) -> tuple[tuple[Failure, ...], tuple[Failure, ...]]:
        """Which failures memory survives, and which only the store does."""
        if peers:
            return (Failure.PROCESS, Failure.NODE, Failure.PREEMPTION), (Failure.JOB,)
        return (Failure.PROCESS,), (Failure.NODE, Failure.PREEMPTION, Failure.JOB)

    def deviation(self, failures: Iterable[Failure], nodes: int) -> float:
        """The standard deviation of the sum of these rates, per second of the job."""
        return math.hypot(*(self.rate_of(each).now.deviation * _times(each, nodes) for each in failures))

    def _rate(self, failures: Iterable[Failure], nodes: int) -> float:
        return math.fsum(self.rate_of(each).now.mean * _times(each, nodes) for each in failures)


def _times(failure: Failure, nodes: int) -> int:
    """Seconds of exposure per second of the job. Errors: UsageError."""
    if nodes < 1:
        raise UsageError(f"nodes={nodes}: at least 1")
    return nodes if failure.per_node else 1


def _pace(steps: int, seconds: float) -> float:
    return not_negative("seconds", seconds) / positive("steps", steps)


NOTHING = Measurements()  # but for the priors
