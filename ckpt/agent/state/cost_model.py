"""The cost model of one job: measures its costs and failures, and gets the intervals from policy/interval_solver.py.
Pure: the caller passes every time.

The costs come from events that happen anyway: stalls, commits, and the steps published when a commit begins and ends.
Nothing is polled. The failure statistics travel in the commit records (`about["learnt"]`): they are as old as the
newest commit at most, have one writer, and are deleted with their record.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ckpt.policy.adaptive import Adaptive, Chosen, Decision
from ckpt.policy.failures import Failure
from ckpt.policy.history import Sources, merged, remember
from ckpt.policy.interval_solver import decide
from ckpt.policy.known import NOTHING, Measurements

# The step time is measured over at least so many steps: over fewer, the moment of the look decides the result.
PACE_STEPS_MIN = 2
PACE_S_MIN = 1.0
ABOUT = "learnt"  # key in a commit record


class CostModel:
    """The measurements of one job on `nodes` nodes, and the save intervals chosen from them.
    `known`: the measurements. `peers`: whether replicas survive the loss of one node. `slots`: snapshots that memory
    has room for; 0: not known yet. `decision`: the present intervals, under `limits` and ckpt.Limits(unsaved_s=)."""

    def __init__(
        self, limits: Adaptive, known: Measurements = NOTHING, nodes: int = 1, unsaved_s: float | None = None
    ) -> None:
        self.limits = limits
        self.unsaved_s = unsaved_s
        self.known = known
        self.nodes = nodes
        self.peers = False
        self.slots = 0
        # A failure that is counted once the statistics before it are known.
        self.owed: Failure | None = None
        self.decision: Decision = decide(known, limits, nodes, unsaved_s=unsaved_s)
        self._mark: tuple[float, int] | None = None  # (time, step) of the last begin or end of a commit
        self._stalls: list[tuple[int, float]] = []  # (step, seconds)
        self._committing = False
        self._ran_s: float | None = None  # run time is counted up to here

    def started(self, now_s: float, step: int) -> None:
        """Training goes on after `step`."""
        self._mark, self._ran_s = (now_s, step), now_s

    def inherit(self, known: Measurements) -> None:
        """Merges the measurements of an earlier start."""
        self.known = merged(self.known, known)

    def pay(self) -> None:
        """Counts the owed failure: the statistics before it are known, or never will be."""
        owed, self.owed = self.owed, None
        if owed is not None:
            self.failed(owed)

    def failed(self, failure: Failure) -> None:
        self.known = self.known.failed(failure)

    def stalled(self, seconds: float, step: int) -> None:
        """All ranks have staged. `seconds`: pause of the slowest rank, in that step."""
        self.known = self.known.stalled(seconds)
        self._stalls.append((step, seconds))

    def commit_began(self, entered_s: float, step: int) -> None:
        """A commit has begun. `step`: the step of the slowest rank, entered at `entered_s`. Times count from that
        entry, since a commit begins soon after a step and ends in the middle of one."""
        self._pace(entered_s, step)
        self._committing = True

    def commit_ended(self, entered_s: float, step: int, took: tuple[float, int] | None) -> None:
        """The commit has ended; see `commit_began`. `took`: its seconds, and the bytes put into the store; None if it
        failed."""
        self._pace(entered_s, step)
        self._committing = False
        if took is not None:
            self.known = self.known.committed(*took)

    def replicated(self, seconds: float) -> None:
        """A checkpoint was replicated `seconds` after it was complete."""
        self.known = self.known.replicated(seconds)

    def recovered(self, level: Literal["local", "peer", "store"], seconds: float) -> None:
        """A restart took `seconds` from the failure until training went on, restored from `level`."""
        self.known = self.known.recovered(level, seconds)

    def ran(self, now_s: float) -> None:
        """Counts the run time up to `now_s`, if training has started."""
        # A commit may have counted time past the end of its ranks.
        if self._ran_s is not None and now_s > self._ran_s:
            self.known = self.known.ran(now_s - self._ran_s, self.nodes)
            self._ran_s = now_s

    def decide(self, now_s: float) -> Decision:
        """Decides the intervals anew from all measurements. If they stay, so do the reasons given for them."""
        self.ran(now_s)
        before = self.decision
        found = decide(self.known, self.limits, self.nodes, self.peers, before, self.slots, self.unsaved_s)
        if _intervals(found) == _intervals(before):
            found = replace(found, local_by=before.local_by, store_by=before.store_by)
        self.decision = found
        return found

    def about(self, sources: Sources | None = None) -> dict[str, float]:
        """The measurements for a commit record. `sources`: those of predictions."""
        return remember(self.known, sources)

    def _pace(self, entered_s: float, step: int) -> None:
        """Measures the step time since the last mark, apart for time with and without a commit."""
        if self._mark is not None:
            since_s, since = self._mark
            seconds = entered_s - since_s - sum(stall_s for at, stall_s in self._stalls if since <= at < step)
            if step - since >= PACE_STEPS_MIN and seconds >= PACE_S_MIN:
                observe = self.known.stepped_beside_commit if self._committing else self.known.stepped
                self.known = observe(step - since, seconds)
        self._mark = entered_s, step
        self._stalls = [(at, stall_s) for at, stall_s in self._stalls if at >= step]


def class_of(lost_nodes: int, peers: bool, from_store: bool, warned: bool) -> Failure:
    """The class of the failure before a restart, as far as the new start can tell. `lost_nodes`: nodes of the former
    start that the new one lacks. `peers`: whether replicas should have survived the loss of a node. `from_store`:
    whether they did not. `warned`: whether a certain notice preceded; only work after its last save was lost then."""
    if not lost_nodes:
        return Failure.PROCESS
    if peers and from_store:
        return Failure.JOB
    return Failure.PREEMPTION if warned else Failure.NODE


def _intervals(choice: Chosen) -> tuple[float, int]:
    return choice.local_s, choice.snapshots
