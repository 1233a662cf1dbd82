"""When a simulated job saves: by ckpt.Every, or as ckpt.Adaptive decides from what the simulated run measures."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from ckpt.policy.adaptive import Adaptive, Decision
from ckpt.policy.failures import Failure
from ckpt.policy.interval_solver import decide
from ckpt.policy.known import PRIORS_ONLY, Measurements
from ckpt.policy.robust_mean import LONG, WINDOW
from ckpt.policy.save_options import Every
from ckpt.simulate.scenario import Scenario

# The solver is asked again when the exposure of a rate has grown by this part. It moves an interval only by a seventh
# or more, so asking after each snapshot would give the same answers.
EXPOSURE_GROWTH = 0.02

# (what was measured, its values)
Observation = tuple[Literal["stall", "replication", "commit", "step", "step_beside_commit"], tuple[float, ...]]


@dataclass(slots=True)
class FixedSaves:
    """ckpt.Every. `steps`: saved at each multiple of it; `seconds`: saved by the clock; one of the two is None."""

    steps: int | None
    seconds: float | None
    snapshots: int  # per commit
    seen = None  # nothing is measured

    def observe(self, what: Observation) -> None: ...
    def is_due(self, uptime_s: float) -> bool:
        return False

    def due_in_s(self, uptime_s: float) -> float:
        return float("inf")

    def ask(self, uptime_s: float) -> bool:
        return False

    def start(self, nodes: int, peers: bool) -> None: ...
    def fail(self, uptime_s: float) -> None: ...
    def recover(self, failure: Failure | None, level: str, seconds: float) -> None: ...


class LearntSaves:
    """ckpt.Adaptive. `seen`: measurements since the last question, with how often each was made."""

    steps = None

    def __init__(self, limits: Adaptive) -> None:
        self.limits = limits
        self.known: Measurements = PRIORS_ONLY
        self.seen: Counter[Observation] = Counter()
        self.nodes, self.peers = 1, False
        self.decision: Decision = decide(PRIORS_ONLY, limits)
        self._told_s = 0.0  # uptime of this start that is counted
        self._ask_after_s = 0.0
        self._is_new = False  # a measurement came that may move an interval

    @property
    def seconds(self) -> float:
        return self.decision.local_s

    @property
    def snapshots(self) -> int:
        return self.decision.snapshots

    def observe(self, what: Observation) -> None:
        self.seen[what] += 1
        kind, values = what
        known = getattr(self.known, kind)
        # A value that the window is not yet full of may move an interval.
        self._is_new = self._is_new or known.count < WINDOW or known.recent[0] != values[0]

    def is_due(self, uptime_s: float) -> bool:
        return self._is_new or uptime_s - self._told_s >= self._ask_after_s

    def due_in_s(self, uptime_s: float) -> float:
        return self._told_s + self._ask_after_s - uptime_s

    def ask(self, uptime_s: float) -> bool:
        """Decides anew after `uptime_s` of this start. Whether the intervals changed."""
        self._take_in(uptime_s)
        before = self.decision
        self.decision = decide(self.known, self.limits, self.nodes, self.peers, before)
        rates = [self.known.rate_of(each) for each in Failure]
        exposures = zip(Failure, (each.current_rate.total_s for each in rates), strict=True)
        self._ask_after_s = EXPOSURE_GROWTH * min(s / (self.nodes if f.is_per_node else 1) for f, s in exposures)
        return (before.local_s, before.snapshots) != (self.decision.local_s, self.decision.snapshots)

    def start(self, nodes: int, peers: bool) -> None:
        """Training goes on, on so many nodes. `peers`: whether replicas survive the loss of one."""
        self.nodes, self.peers, self._told_s = nodes, peers, 0.0
        self.ask(0.0)

    def fail(self, uptime_s: float) -> None:
        """This start ended after `uptime_s`."""
        self._take_in(uptime_s)

    def recover(self, failure: Failure | None, level: str, seconds: float) -> None:
        """The next start has restored. `failure`: None if nothing was lost."""
        if failure is not None:
            self.known = self.known.with_failure(failure)
        if level in ("local", "peer", "store"):
            self.known = self.known.with_recovery(level, seconds)  # type: ignore[arg-type]

    def _take_in(self, uptime_s: float) -> None:
        known = self.known.with_uptime(uptime_s - self._told_s, self.nodes)
        self._told_s = uptime_s
        for (kind, values), count in self.seen.items():
            for _ in range(min(count, LONG)):
                known = _with(known, kind, values)
            # Equal values beyond the window change no statistic but their number.
            if count > LONG:
                mean = getattr(known, kind)
                known = replace(known, **{kind: replace(mean, count=mean.count + count - LONG)})
        self.known, self._is_new = known, False
        self.seen.clear()


def _with(known: Measurements, kind: str, values: tuple[float, ...]) -> Measurements:
    if kind == "stall":
        return known.with_stall(*values)
    if kind == "replication":
        return known.with_replication(*values)
    if kind == "commit":
        return known.with_commit(*values)
    if kind == "step":
        return known.with_steps(1, *values)
    return known.with_steps_beside_commit(1, *values)


def saves_of(scenario: Scenario) -> FixedSaves | LearntSaves:
    policy = scenario.policy
    if isinstance(policy, Every):
        return FixedSaves(policy.steps, policy.seconds, scenario.commit_every)
    return LearntSaves(policy)
