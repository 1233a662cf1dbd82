"""What the agent sees of a job's costs and failures, and how often it saves for that. Pure: every time is told.

Costs are read off what happens anyway: the ranks' stalls, the commits, and the steps that the ranks publish at the
beginning and the end of each commit; nothing is asked for, and nothing runs while nothing happens. What is learnt of
failures travels in the commit records (`about["learnt"]`), so that it is as old as the newest commit at most, and has
one writer and no deletion of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ckpt.policy.adaptive import Adaptive, Chosen, Decision
from ckpt.policy.failures import Failure
from ckpt.policy.history import Sources, merged, remember
from ckpt.policy.interval_solver import decide
from ckpt.policy.known import NOTHING, Measurements

PACE_STEPS_MIN = 2  # of fewer steps the time says more of where in a step one looked
PACE_S_MIN = 1.0
ABOUT = "learnt"  # its name in a record


class CostModel:
    """One job's, on so many `nodes`. `known`: what it has learnt. `peers`: whether other nodes' memory survives the
    loss of one. `slots`: for how many snapshots there is memory; 0: that is not known yet. `decision`: what follows
    now, under the `limits` and ckpt.Limits(unsaved_s=)."""

    def __init__(
        self, limits: Adaptive, known: Measurements = NOTHING, nodes: int = 1, unsaved_s: float | None = None
    ) -> None:
        self.limits = limits
        self.unsaved_s = unsaved_s
        self.known = known
        self.nodes = nodes
        self.peers = False
        self.slots = 0
        self.owed: Failure | None = None  # counted once what came before it is known
        self.decision: Decision = decide(known, limits, nodes, unsaved_s=unsaved_s)
        self._mark: tuple[float, int] | None = None  # since when nothing changed, and the step then
        self._stalls: list[tuple[int, float]] = []  # in which step, and for how long
        self._committing = False
        self._ran_s: float | None = None  # until when the run time is counted

    def started(self, now_s: float, step: int) -> None:
        """Training goes on after `step`."""
        self._mark, self._ran_s = (now_s, step), now_s

    def inherit(self, known: Measurements) -> None:
        """What an earlier start has learnt of failures."""
        self.known = merged(self.known, known)

    def pay(self) -> None:
        """What came before is known, or never will be."""
        owed, self.owed = self.owed, None
        if owed is not None:
            self.failed(owed)

    def failed(self, failure: Failure) -> None:
        self.known = self.known.failed(failure)

    def stalled(self, seconds: float, step: int) -> None:
        """All ranks have staged; the slowest stood still for so long, in that step."""
        self.known = self.known.stalled(seconds)
        self._stalls.append((step, seconds))

    def commit_began(self, entered_s: float, step: int) -> None:
        """`step`: that the hindmost rank is in, and since when: a commit begins soon after a step, and ends in the
        middle of one."""
        self._pace(entered_s, step)
        self._committing = True

    def commit_ended(self, entered_s: float, step: int, took: tuple[float, int] | None) -> None:
        """The same at its end. `took`: seconds, and the bytes that it put into the store; None where it failed."""
        self._pace(entered_s, step)
        self._committing = False
        if took is not None:
            self.known = self.known.committed(*took)

    def replicated(self, seconds: float) -> None:
        """So long after it was complete it was in other nodes' memory too."""
        self.known = self.known.replicated(seconds)

    def recovered(self, level: Literal["local", "peer", "store"], seconds: float) -> None:
        """From a failure until training went on."""
        self.known = self.known.recovered(level, seconds)

    def ran(self, now_s: float) -> None:
        """Until then, if it had begun."""
        if self._ran_s is not None and now_s > self._ran_s:  # a commit may have been counted past the end of its ranks
            self.known = self.known.ran(now_s - self._ran_s, self.nodes)
            self._ran_s = now_s

    def decide(self, now_s: float) -> Decision:
        """Anew, with all that is known. The same object as before where the intervals stay."""
        self.ran(now_s)
        before = self.decision
        found = decide(self.known, self.limits, self.nodes, self.peers, before, self.slots, self.unsaved_s)
        if _intervals(found) == _intervals(before):
            found = replace(found, local_by=before.local_by, store_by=before.store_by)
        self.decision = found
        return found

    def about(self, sources: Sources | None = None) -> dict[str, float]:
        """For a record. `sources`: of predictions."""
        return remember(self.known, sources)

    def _pace(self, entered_s: float, step: int) -> None:
        """How fast training went since the last mark, by whether a commit ran all the time."""
        if self._mark is not None:
            since_s, since = self._mark
            seconds = entered_s - since_s - sum(stall_s for at, stall_s in self._stalls if since <= at < step)
            if step - since >= PACE_STEPS_MIN and seconds >= PACE_S_MIN:
                observe = self.known.stepped_beside_commit if self._committing else self.known.stepped
                self.known = observe(step - since, seconds)
        self._mark = entered_s, step
        self._stalls = [(at, stall_s) for at, stall_s in self._stalls if at >= step]


def class_of(lost_nodes: int, peers: bool, from_store: bool, warned: bool) -> Failure:
    """What failed, as far as a start that goes on from it can tell. `lost_nodes`: how many had a part in the former
    start and have none in this one. `peers`: whether other nodes' memory was to survive that. `from_store`: it did not.
    `warned`: a notice had said so for certain; what was lost then came after what it had saved."""
    if not lost_nodes:
        return Failure.PROCESS
    if peers and from_store:
        return Failure.JOB
    return Failure.PREEMPTION if warned else Failure.NODE


def _intervals(choice: Chosen) -> tuple[float, int]:
    return choice.local_s, choice.snapshots
