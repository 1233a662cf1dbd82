"""What a user may ask of the adaptive policy, and what it answers.

The user gives limits, never intervals: within them the policy takes the intervals that cost least. `deciding.decide`
finds them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from ckpt.errors import UsageError
from ckpt.policy.levels import LevelCosts
from ckpt.policy.save_options import LEAST, MOST, is_limit
from ckpt.types import counted

LocalBy = Literal["start", "rates", "predictions", "overhead", "step", "replication", "least", "store"]
StoreBy = Literal["start", "rates", "overhead", "snapshot", "commit", "store_mb_s", "unsaved_s", "at_risk_s"]


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Save as often as what is measured and learnt says is best, within these limits.

    overhead: the most that saving may cost, as a part of the run's time (.05: 5 %): snapshots' stalls, and what commits
    slow training by. It lengthens both intervals.
    store_mb_s: the most that checkpoints may put into the store, in 10^6 bytes per second, averaged over time (None: no
    limit). It lengthens the store's interval. How fast one commit may run is ckpt.Limits(bandwidth=).
    at_risk_s: the most seconds of training that may be lost where only the store is left (None: what costs least). It
    shortens the store's interval: from the snapshot that one commit holds to the end of the next commit.

    Where they contradict each other store_mb_s is kept first, then ckpt.Limits(unsaved_s=), at_risk_s, and overhead;
    what could not be kept is named (`Decision.unmet`). A commit takes as long as it takes: at_risk_s below twice that
    cannot be kept, nor below four steps beside a commit, since snapshots are three steps apart at least, and wait for
    the end of one. There is no least or longest interval to give: overhead bounds from below, at_risk_s from above.
    Whoever wants a certain interval takes ckpt.Every. Errors: UsageError.
    """

    overhead: float = 0.05
    store_mb_s: float | None = None
    at_risk_s: float | None = None

    def __post_init__(self) -> None:
        if not is_limit(self.overhead, 1.0):
            raise UsageError(
                f"ckpt.Adaptive(overhead={self.overhead!r}): a part of the run's time, from {LEAST:g} to 1"
            )
        for name, unit in (("store_mb_s", "megabytes per second"), ("at_risk_s", "seconds")):
            value = getattr(self, name)
            if value is not None and not is_limit(value):
                raise UsageError(f"ckpt.Adaptive({name}={value!r}): {unit}, from {LEAST:g} to {MOST:g}, or None")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A snapshot every `local_s` seconds, counted from one to the next, and every `snapshots`-th of them committed.

    `local_by`, `store_by`: which term decided. "start": nothing is measured yet. "rates": the least expected loss for
    what is measured; "predictions": the same, with what proven sources predict. A limit's name: that limit. "step":
    snapshots are three steps apart at least. "replication": one snapshot is replicated at a time. "least": more often
    gains nothing. "store": no less often than the store asks for. "snapshot": there is no commit without a snapshot.
    "commit": a commit takes that long.
    """

    local_s: float
    snapshots: int
    local_by: LocalBy
    store_by: StoreBy
    local_from_s: float = field(default=0.0, kw_only=True)  # what it was before it last changed; 0: nothing
    store_from_s: float = field(default=0.0, kw_only=True)

    @property
    def store_s(self) -> float:
        """Seconds from one commit's snapshot to the next one's."""
        return self.local_s * self.snapshots


@dataclass(frozen=True, slots=True)
class Decision(Chosen):
    """What was chosen, what it is expected to cost, and what it was chosen by."""

    measured: LevelCosts
    overhead: float  # expected: wall time / useful time - 1, lost work and recoveries counted in
    saving: float  # the part of the run's time that saving takes, as far as that is measured
    store_mb_s: float  # expected traffic, 10^6 bytes per second
    at_risk_s: float  # the most seconds that are lost where only the store is left, as commits went so far
    unmet: tuple[str, ...]  # limits that cannot be kept, by name
    stalls: int  # how many snapshots, commits, and failures of either level were seen
    commits: int
    memory_failures: int
    store_failures: int

    def explain(self) -> str:
        """Two lines for people: per level the interval, which term decided, and what was measured."""
        m = self.measured
        local, store, costs = _WHY[self.local_by], _WHY[self.store_by], ""
        if self.local_by != "start":
            local += f"; it stalls {span(m.snapshot_stall_s)} ({self.stalls} measured)"
        if self.store_by != "start":
            slows = f"slows training by {_share(m.slowdown)}"
            store += f"; it takes {span(m.commit_s)}, {slows} ({self.commits} measured)"
            costs = f"; saving costs {_share(self.saving)}, with failures {_share(self.overhead)}"
        if self.unmet:
            costs += f"; cannot be kept: {', '.join(f'{name}=' for name in self.unmet)}"
        of_memory, of_store = (counted(each, "failure") for each in (self.memory_failures, self.store_failures))
        return (
            f"a snapshot every {span(self.local_s)}: {local}; "
            f"memory is needed every {span(1 / m.memory_rate)} ({of_memory} seen)\n"
            f"a commit every {span(self.store_s)}: {store}; "
            f"the store is needed every {span(1 / m.store_rate)} ({of_store} seen){costs}"
        )


_WHY = {
    "start": "none is measured yet",
    "rates": "the least expected loss",
    "predictions": "the least expected loss beside what is predicted",
    "overhead": "limited by overhead=",
    "step": "three steps take that long",
    "replication": "replicating one takes that long",
    "least": "more often gains nothing",
    "store": "as often as the store asks for",
    "snapshot": "with every snapshot",
    "commit": "one commit takes that long",
    "store_mb_s": "limited by store_mb_s=",
    "unsaved_s": "limited by ckpt.Limits(unsaved_s=)",
    "at_risk_s": "limited by at_risk_s=",
}


def span(seconds: float) -> str:
    """How long, for people: to two units at most."""
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
    return f"{100 * part:.2g} %" if part < math.inf else "so much that no work is left"
