"""What a simulated run came to: where its time went, what was lost and restored, bytes, requests and dollars."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

RestoredFrom = Literal["local", "peer", "store", "nothing"]
Cause = Literal["crash", "loss", "rejoin"]
LEVELS: tuple[RestoredFrom, ...] = ("local", "peer", "store", "nothing")


@dataclass(frozen=True, slots=True)
class Recovery:
    """One restart. `time_s`: of the failure, or of leaving in order. `level`: where the state came from. `lost_steps`:
    whole steps to redo. `seconds`: from `time_s` until training went on, `waited_s` of them for want of nodes.
    `finished`: False if the trace ended first."""

    time_s: float
    cause: Cause
    level: RestoredFrom
    lost_steps: int
    seconds: float
    waited_s: float
    finished: bool = True


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The outcome of `simulate`. wall_s = useful_s + lost_s + stalled_s + recovering_s + waiting_s.

    useful_s: training of steps that were kept, at the speed of the nodes that were there. lost_s: the same of steps
    that were lost. stalled_s: stalls of snapshots and commits, and the slowdown by commits. recovering_s: detection,
    gang start and restore, the first start among them. waiting_s: fewer nodes than the minimum. useful_steps: whole
    steps. ideal_s: what these take on the wanted nodes, without saves and failures. finished: whether `work_steps` were
    made, True if there was no such number. notices_acted: appointments because of a notice. node_usd: of the nodes that
    the job had or could have had, up to the wanted number; None if no price is known.
    """

    wall_s: float
    useful_s: float
    lost_s: float
    stalled_s: float
    recovering_s: float
    waiting_s: float
    useful_steps: int
    ideal_s: float
    finished: bool
    snapshots: int
    commits: int
    replications: int
    notices_acted: int
    store_bytes_in: float
    store_bytes_out: float
    store_puts: int
    store_gets: int
    node_hours: float
    node_usd: float | None
    store_usd: float
    recoveries: tuple[Recovery, ...]

    @property
    def overhead(self) -> float:
        """H: wall time / useful time - 1; infinite without useful time."""
        return self.wall_s / self.useful_s - 1 if self.useful_s else float("inf")

    @property
    def slowdown(self) -> float:
        """Wall time / ideal time - 1; infinite without a useful step. Fewer nodes and waiting count, too."""
        return self.wall_s / self.ideal_s - 1 if self.ideal_s else float("inf")

    @property
    def recoveries_by_level(self) -> dict[RestoredFrom, int]:
        found = Counter(each.level for each in self.recoveries)
        return {level: found[level] for level in LEVELS}

    @property
    def lost_steps_by_level(self) -> dict[RestoredFrom, int]:
        return {level: sum(each.lost_steps for each in self.recoveries if each.level == level) for level in LEVELS}
