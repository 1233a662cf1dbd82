"""The cost model of one job: measures its costs and failures, and gets the intervals from policy/interval_solver.py.
Pure: the caller passes every time.

The costs come from events that happen anyway: stalls, commits, and the steps published when a commit begins and ends.
Nothing is polled. The failure statistics travel in the commit records (`about["learnt"]`): they are as old as the
newest commit at most, have one writer, and are deleted with their record.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ckpt.policy.adaptive import Adaptive, Decision
from ckpt.policy.failures import Failure
from ckpt.policy.history import Sources, merged, remember
from ckpt.policy.interval_solver import decide
from ckpt.policy.known import PRIORS_ONLY, Measurements

# The step time is measured over at least so many steps: over fewer, the moment of the look decides the result.
PACE_STEPS_MIN = 2
PACE_S_MIN = 1.0
# Keys in a commit record: what the next start inherits, and what people and `ckpt simulate advise` read.
ABOUT, COSTS = "learnt", "costs"


class CostModel:
    """The measurements of one job on `nodes` nodes, and the save intervals chosen from them.
    `known`: the measurements. `peers`: whether replicas survive the loss of one node. `slots`: snapshots that memory
    has room for; 0: not known yet. `decision`: the present intervals, under `limits` and ckpt.Limits(unsaved_s=)."""

    def __init__(
        self, limits: Adaptive, known: Measurements = PRIORS_ONLY, nodes: int = 1, unsaved_s: float | None = None
    ) -> None:
        self.limits = limits
        self.unsaved_s = unsaved_s
        self.measurements = known
        self.nodes = nodes
        self.has_replicas = False
        self.slots = 0
        # A failure that is counted once the statistics before it are known.
        self.pending_failure: Failure | None = None
        self.decision: Decision = decide(known, limits, nodes, unsaved_s=unsaved_s)
        self._pace_origin: tuple[float, int] | None = None  # (time, step) of the last begin or end of a commit
        self._stalls: list[tuple[int, float]] = []  # (step, seconds)
        self._is_committing = False
        self._counted_until_s: float | None = None  # run time is counted up to here

    def record_start(self, now_s: float, step: int) -> None:
        """Training goes on after `step`."""
        self._pace_origin, self._counted_until_s = (now_s, step), now_s

    def merge_measurements(self, known: Measurements) -> None:
        """Merges the measurements of an earlier start."""
        self.measurements = merged(self.measurements, known)

    def count_pending_failure(self) -> None:
        """Counts the owed failure: the statistics before it are known, or never will be."""
        owed, self.pending_failure = self.pending_failure, None
        if owed is not None:
            self.record_failure(owed)

    def record_failure(self, failure: Failure) -> None:
        self.measurements = self.measurements.with_failure(failure)

    def record_stall(self, seconds: float, step: int) -> None:
        """All ranks have staged. `seconds`: pause of the slowest rank, in that step."""
        self.measurements = self.measurements.with_stall(seconds)
        self._stalls.append((step, seconds))

    def record_commit_begin(self, entered_s: float, step: int) -> None:
        """A commit has begun. `step`: the step of the slowest rank, entered at `entered_s`. Times count from that
        entry, since a commit begins soon after a step and ends in the middle of one."""
        self._measure_pace(entered_s, step)
        self._is_committing = True

    def record_commit_end(self, entered_s: float, step: int, took: tuple[float, int] | None) -> None:
        """The commit has ended; see `record_commit_begin`. `took`: its seconds, and the bytes put into the store; None
        if it failed."""
        self._measure_pace(entered_s, step)
        self._is_committing = False
        if took is not None:
            self.measurements = self.measurements.with_commit(*took)

    def record_replication(self, seconds: float) -> None:
        """A checkpoint was replicated `seconds` after it was complete."""
        self.measurements = self.measurements.with_replication(seconds)

    def record_recovery(self, level: Literal["local", "peer", "store"], seconds: float) -> None:
        """A restart took `seconds` from the failure until training went on, restored from `level`."""
        self.measurements = self.measurements.with_recovery(level, seconds)

    def record_run_time(self, now_s: float) -> None:
        """Counts the run time up to `now_s`, if training has started."""
        # A commit may have counted time past the end of its ranks.
        if self._counted_until_s is not None and now_s > self._counted_until_s:
            self.measurements = self.measurements.with_uptime(now_s - self._counted_until_s, self.nodes)
            self._counted_until_s = now_s

    def decide(self, now_s: float) -> Decision:
        """Decides the intervals anew from all measurements. If they stay, so do the reasons given for them."""
        self.record_run_time(now_s)
        before = self.decision
        found = decide(
            self.measurements, self.limits, self.nodes, self.has_replicas, before, self.slots, self.unsaved_s
        )
        if (found.local_s, found.snapshots) == (before.local_s, before.snapshots):
            found = replace(found, local_by=before.local_by, store_by=before.store_by)
        self.decision = found
        return found

    def record_fields(self, sources: Sources | None = None) -> dict[str, float]:
        """The measurements for a commit record. `sources`: those of predictions."""
        return remember(self.measurements, sources)

    def cost_fields(self) -> dict[str, float]:
        """The measured costs for a commit record, each the usual value, in seconds or bytes; without those that were
        not measured. `local_s`, `snapshots`: the adaptive intervals of now."""
        known = self.measurements
        found = {
            "stall_s": known.stall.mean,
            "commit_s": known.commit.mean,
            "commit_bytes": known.commit_bytes.mean,
            "replication_s": known.replication.mean,
            "step_s": known.step.mean,
            "step_beside_commit_s": known.step_beside_commit.mean,
            "local_recovery_s": known.local_recovery.mean,
            "peer_recovery_s": known.peer_recovery.mean,
            "store_recovery_s": known.store_recovery.mean,
            "nodes": self.nodes,
            "local_s": self.decision.local_s,
            "snapshots": self.decision.snapshots,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _measure_pace(self, entered_s: float, step: int) -> None:
        """Measures the step time since the last mark, apart for time with and without a commit."""
        if self._pace_origin is not None:
            since_s, since = self._pace_origin
            seconds = entered_s - since_s - sum(stall_s for at, stall_s in self._stalls if since <= at < step)
            if step - since >= PACE_STEPS_MIN and seconds >= PACE_S_MIN:
                observe = (
                    self.measurements.with_steps_beside_commit if self._is_committing else self.measurements.with_steps
                )
                self.measurements = observe(step - since, seconds)
        self._pace_origin = entered_s, step
        self._stalls = [(at, stall_s) for at, stall_s in self._stalls if at >= step]


def classify_failure(lost_nodes: int, peers: bool, from_store: bool, warned: bool) -> Failure:
    """The class of the failure before a restart, as far as the new start can tell. `lost_nodes`: nodes of the former
    start that the new one lacks. `peers`: whether replicas should have survived the loss of a node. `from_store`:
    whether they did not. `warned`: whether a certain notice preceded; only work after its last save was lost then."""
    if not lost_nodes:
        return Failure.PROCESS
    if peers and from_store:
        return Failure.JOB
    return Failure.PREEMPTION if warned else Failure.NODE
