"""The measurements of one job: its costs and failure rates, as a value that grows with each observation.

Nothing here has a clock or does I/O: the caller gives the durations. The same observations in the same order give the
same value. Costs that are not measured yet are taken from the priors below, rates from `failures.PRIORS`.
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

# Priors: the seconds of a commit, and the part of training's speed that it takes.
COMMIT_S = 60.0
SLOWDOWN = 0.05
# The most that a run's first snapshot counts: it writes to cold memory and may take a hundred times as long.
FIRST_STALL_S = 1.0
# Nothing is free. Below these minima a measurement cannot be told from zero. An interval computed from zero would
# commit without a pause, whatever the store charges for it.
STALL_MIN_S = 1e-3
SLOWDOWN_MIN = 0.01
# The least failure rate of a level, per second, however long the level was not needed.
RARE = 1 / (90 * DAY_S)

UNMEASURED = RobustMean()


@dataclass(frozen=True, slots=True)
class Measurements:
    """Costs in seconds, and the failure rate of each class. Methods return the value after one more observation.
    Errors: UsageError for negative numbers."""

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
    # Recall and precision of the predictions that are acted on: cautious bounds.
    recall: float = 0.0
    precision: float = 1.0

    def rate_of(self, failure: Failure) -> FailureRate:
        rate: FailureRate = getattr(self, failure.value)
        return rate

    # -- observations

    def with_stall(self, seconds: float) -> Measurements:
        """A snapshot stopped training for `seconds`, on the slowest rank. The first snapshot of a run says little about
        the others: it counts as FIRST_STALL_S at most. After the second, the smaller of the two counts as one
        measurement."""
        if not self.stall.count:
            stall = self.stall.with_value(min(seconds, FIRST_STALL_S))
            return replace(self, stall=stall, first_stall_s=seconds)
        if self.stall.count == 1:
            least_s = min(self.first_stall_s, seconds)
            return replace(self, stall=replace(self.stall, values=()).with_value(least_s))
        return replace(self, stall=self.stall.with_value(seconds))

    def with_commit(self, seconds: float, count_bytes: float) -> Measurements:
        """A commit took `seconds` and wrote `count_bytes` to the store."""
        not_negative("count_bytes", count_bytes)
        return replace(
            self, commit=self.commit.with_value(seconds), commit_bytes=self.commit_bytes.with_value(count_bytes)
        )

    def with_replication(self, seconds: float) -> Measurements:
        """A snapshot was replicated `seconds` after it was taken."""
        return replace(self, replication=self.replication.with_value(seconds))

    def with_steps(self, steps: int, seconds: float) -> Measurements:
        """`steps` steps ended in `seconds`, without a snapshot and while no commit ran."""
        return replace(self, step=self.step.with_value(_step_time_s(steps, seconds)))

    def with_steps_beside_commit(self, steps: int, seconds: float) -> Measurements:
        """`steps` steps ended in `seconds`, without a snapshot and while a commit ran all the time."""
        return replace(self, step_beside_commit=self.step_beside_commit.with_value(_step_time_s(steps, seconds)))

    def with_recovery(self, level: Literal["local", "peer", "store"], seconds: float) -> Measurements:
        """Training continued from a checkpoint of that level `seconds` after a failure."""
        name = f"{level}_recovery"
        recovery: RobustMean = getattr(self, name)
        return self._replace_fields({name: recovery.with_value(seconds)})

    def with_uptime(self, seconds: float, nodes: int = 1) -> Measurements:
        """Training ran for `seconds` on `nodes` nodes. Call it before `with_failure` for the failure that ended the
        run."""
        return self._replace_fields(
            {each.value: self.rate_of(each).with_exposure(seconds * _exposure_factor(each, nodes)) for each in Failure}
        )

    def with_failure(self, failure: Failure) -> Measurements:
        """A failure of that class lost work. A failure of several ranks or nodes at once counts once."""
        return self._replace_fields({failure.value: self.rate_of(failure).with_failure()})

    def with_predictor(self, recall: float, precision: float) -> Measurements:
        """Sets the predictor's quality. `recall`: the part of the failures survived by memory that is predicted and
        acted on. `precision`: the part of the predictions that come true. Both are cautious bounds: 0 and 1 if no
        source is proven. Errors: UsageError outside [0, 1) and (0, 1]."""
        if not 0 <= recall < 1 or not 0 < precision <= 1:
            raise UsageError(f"recall={recall}, precision={precision}: give numbers in [0, 1) and in (0, 1]")
        return replace(self, recall=recall, precision=precision)

    def _replace_fields(self, changes: dict[str, Any]) -> Measurements:
        return replace(self, **changes)

    # -- what the formulas need

    def with_long_window(self) -> Measurements:
        """The same, with costs over four times as many measurements: more certain, and slower to show a change."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        costs = {name: value for name, value in values.items() if isinstance(value, RobustMean)}
        return self._replace_fields({name: replace(cost, window=LONG) for name, cost in costs.items()})

    @property
    def stall_s(self) -> float:
        """The stall of a snapshot. Of two measurements the smaller counts: a single outlier would delay the snapshots
        that are to outvote it. From three on the mean leaves out an outlier."""
        stall_s = min(self.stall.recent) if len(self.stall.recent) == 2 else self.stall.mean
        return max(STALL_MIN_S, stall_s or 0.0)

    @property
    def slowdown(self) -> float:
        """The part of training's speed that a commit takes while it runs."""
        return max(SLOWDOWN_MIN, self._slowdown()[0])

    @property
    def slowdown_error(self) -> float:
        """The standard deviation of `slowdown`."""
        return self._slowdown()[1]

    def _slowdown(self) -> tuple[float, float]:
        """The slowdown and its standard deviation. The difference of two noisy paces is often smaller than their noise.
        So the prior, with a deviation of its own size, counts as one more measurement, each weighted by its precision
        (the normal posterior)."""
        alone, beside = self.step.mean, self.step_beside_commit.mean
        if not alone or not beside:
            return SLOWDOWN, SLOWDOWN
        seen = 1 - alone / beside
        error = alone / beside * math.hypot(self.step.error / alone, self.step_beside_commit.error / beside)
        weight = SLOWDOWN**2 / (SLOWDOWN**2 + error**2)
        return weight * seen + (1 - weight) * SLOWDOWN, error * math.sqrt(weight)

    def level_costs(self, nodes: int, peers: bool) -> LevelCosts:
        """The input of the model in `levels`. `peers`: whether other hosts' memory survives the loss of a node."""
        memory, store = self.failures_by_level(peers)
        return LevelCosts(
            snapshot_stall_s=self.stall_s,
            commit_s=COMMIT_S if self.commit.mean is None else self.commit.mean,
            slowdown=self.slowdown,
            replication_s=self.replication.mean or 0.0,
            local_rate=max(RARE, self.process.current_rate.mean),
            peer_rate=self._rate([each for each in memory if each is not Failure.PROCESS], nodes),
            store_rate=max(RARE, self._rate(store, nodes)),
            local_recovery_s=self.local_recovery.mean or 0.0,
            peer_recovery_s=self.peer_recovery.mean or 0.0,
            store_recovery_s=self.store_recovery.mean or 0.0,
        )

    def failures_by_level(self, peers: bool) -> tuple[tuple[Failure, ...], tuple[Failure, ...]]:
        """The classes of failures that memory survives, and those that only the store survives."""
        if peers:
            return (Failure.PROCESS, Failure.NODE, Failure.PREEMPTION), (Failure.JOB,)
        return (Failure.PROCESS,), (Failure.NODE, Failure.PREEMPTION, Failure.JOB)

    def deviation(self, failures: Iterable[Failure], nodes: int) -> float:
        """The standard deviation of the sum of these rates, per second of the job."""
        return math.hypot(
            *(self.rate_of(each).current_rate.deviation * _exposure_factor(each, nodes) for each in failures)
        )

    def _rate(self, failures: Iterable[Failure], nodes: int) -> float:
        return math.fsum(self.rate_of(each).current_rate.mean * _exposure_factor(each, nodes) for each in failures)


def _exposure_factor(failure: Failure, nodes: int) -> int:
    """Seconds of exposure per second of the job. Errors: UsageError if nodes is below 1."""
    if nodes < 1:
        raise UsageError(f"nodes={nodes}: give at least 1")
    return nodes if failure.is_per_node else 1


def _step_time_s(steps: int, seconds: float) -> float:
    return not_negative("seconds", seconds) / positive("steps", steps)


# Only the priors.
PRIORS_ONLY = Measurements()
