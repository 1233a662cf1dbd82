"""The values of the adaptive policy: the user's limits, and the decision as it is shown.

The user gives limits, never intervals. `interval_solver.decide` takes the cheapest intervals within the limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from ckpt.errors import UsageError
from ckpt.policy.levels import LevelCosts
from ckpt.policy.save_options import LEAST, MOST, is_limit
from ckpt.types import format_count

LocalBy = Literal["start", "rates", "predictions", "overhead", "step", "replication", "least", "store"]
StoreBy = Literal["start", "rates", "overhead", "snapshot", "commit", "store_mb_s", "unsaved_s", "at_risk_s"]


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Save as often as the measured costs and failure rates make best, within these limits.

    overhead: the largest part of the run's time that saving may cost (.05: 5 %): the stalls of snapshots, and the
    slowdown of training by commits. It lengthens both intervals.
    store_mb_s: the most that checkpoints may write to the store, in 10^6 bytes per second, averaged over time (None: no
    limit). It lengthens the store's interval. ckpt.Limits(bandwidth=) limits the speed of one commit.
    at_risk_s: the most seconds of training that may be lost if only the store is left (None: what costs least). It
    shortens the store's interval. It is counted from the snapshot of one commit to the end of the next commit.

    If limits conflict, store_mb_s is kept first, then ckpt.Limits(unsaved_s=), at_risk_s, and overhead.
    `Decision.unmet_limits` names the limits that cannot be kept. at_risk_s cannot be kept below twice the time of a
    commit. Nor can it be kept below a commit plus four steps: snapshots are at least three steps apart, and one waits
    for the end of a step. There is no shortest or longest interval to give: overhead bounds from below, at_risk_s from
    above. Use ckpt.Every for a fixed interval. Errors: UsageError if a limit is out of range.
    """

    overhead: float = 0.05
    store_mb_s: float | None = None
    at_risk_s: float | None = None

    def __post_init__(self) -> None:
        if not is_limit(self.overhead, 1.0):
            raise UsageError(
                f"ckpt.Adaptive(overhead={self.overhead!r}): give a fraction of the run's time, from {LEAST:g} to 1"
            )
        for name, unit in (("store_mb_s", "megabytes per second"), ("at_risk_s", "seconds")):
            value = getattr(self, name)
            if value is not None and not is_limit(value):
                raise UsageError(f"ckpt.Adaptive({name}={value!r}): give {unit}, from {LEAST:g} to {MOST:g}, or None")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A pair of intervals: a snapshot every `local_s` seconds, and every `snapshots`-th snapshot committed.

    `local_by`, `store_by`: the term that decided the interval.
    - "start": nothing is measured yet.
    - "rates": the least expected loss by the measurements. "predictions": the same, with proven sources of predictions.
    - A limit's name: that limit.
    - "step": snapshots are at least three steps apart. "replication": one snapshot is replicated at a time.
    - "least": more frequent snapshots gain nothing. "store": the snapshot interval follows the store's.
    - "snapshot": each commit needs a snapshot. "commit": a commit takes that long.
    """

    local_s: float
    snapshots: int
    local_by: LocalBy
    store_by: StoreBy
    # The intervals before the last change; 0 for none.
    local_from_s: float = field(default=0.0, kw_only=True)
    store_from_s: float = field(default=0.0, kw_only=True)

    @property
    def store_s(self) -> float:
        """Seconds from one commit's snapshot to the next one's."""
        return self.local_s * self.snapshots


@dataclass(frozen=True, slots=True)
class Decision(Chosen):
    """The chosen intervals, their expected cost, and the measurements that they rest on."""

    level_costs: LevelCosts
    overhead: float  # expected: wall time / useful time - 1, with lost work and recoveries
    saving_share: float  # the part of the run's time that saving takes, as far as measured
    store_mb_s: float  # expected traffic, 10^6 bytes per second
    # The most seconds that are lost if only the store is left, by the commits so far.
    at_risk_s: float
    unmet_limits: tuple[str, ...]  # names of the limits that cannot be kept
    # How many snapshots, commits, and failures of each level were seen.
    stalls: int
    commits: int
    memory_failures: int
    store_failures: int

    def explain(self) -> str:
        """Two lines for people, one per level: the interval, the term that decided it, and the measurements."""
        m = self.level_costs
        local, store, costs = _WHY[self.local_by], _WHY[self.store_by], ""
        if self.local_by != "start":
            local += f"; it stalls {format_duration(m.snapshot_stall_s)} ({self.stalls} measured)"
        if self.store_by != "start":
            slows = f"slows training by {_share(m.slowdown)}"
            store += f"; it takes {format_duration(m.commit_s)}, {slows} ({self.commits} measured)"
            costs = f"; saving costs {_share(self.saving_share)}, with failures {_share(self.overhead)}"
        if self.unmet_limits:
            costs += f"; limits that cannot be met: {', '.join(f'{name}=' for name in self.unmet_limits)}"
        of_memory, of_store = (format_count(each, "failure") for each in (self.memory_failures, self.store_failures))
        return (
            f"a snapshot every {format_duration(self.local_s)}: {local}; "
            f"expected: one restore from memory per {format_duration(1 / m.memory_rate)} ({of_memory} seen)\n"
            f"a commit every {format_duration(self.store_s)}: {store}; "
            f"expected: one restore from the store per {format_duration(1 / m.store_rate)} ({of_store} seen){costs}"
        )


_WHY = {
    "start": "no measurement yet",
    "rates": "the least expected loss",
    "predictions": "the least expected loss, given the predictions",
    "overhead": "limited by overhead=",
    "step": "the time of three steps",
    "replication": "the time of one replication",
    "least": "a shorter interval gains nothing",
    "store": "set by the commit interval",
    "snapshot": "with every snapshot",
    "commit": "the time of one commit",
    "store_mb_s": "limited by store_mb_s=",
    "unsaved_s": "limited by ckpt.Limits(unsaved_s=)",
    "at_risk_s": "limited by at_risk_s=",
}


def format_duration(seconds: float) -> str:
    """A duration for people, in at most two units."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms" if seconds else "0 s"
    if seconds < 100:
        return f"{seconds:.3g} s"
    for small, large, unit, units in ((1, 60, "s", "min"), (60, 3600, "min", "h"), (3600, 86_400, "h", "d")):
        if seconds < 10 * large:
            whole, rest = divmod(round(seconds / small), large // small)
            return f"{whole} {units}" + (f" {rest} {unit}" if rest else "")
        if seconds < 100 * large or units == "d":
            return f"{round(seconds / large)} {units}"
    raise AssertionError("unreachable")


def _share(part: float) -> str:
    return f"{100 * part:.2g} %" if part < math.inf else "all of the time"
