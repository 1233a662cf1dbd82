"""The time account of one run: what its checkpoints and failures cost, and what the checkpoints saved.
Pure: the caller passes every time, in seconds of one clock that never goes back. Nothing is measured for the account.

Each second since the run's first start on this agent is booked under exactly one part:

- productive: training ran, and its work has not been lost so far;
- stall: training paused for a snapshot, as long as the slowest rank reports;
- lost: training ran, and a failure undid that work. Work is assumed to be even between two snapshots;
- recovery: from a failure until training went on;
- starting: from a start without a failure before it until training went on: listing the store, restoring;
- ending: a rank had ended its block, and the last checkpoint was awaited.

The parts sum to `elapsed`. Goodput is productive / elapsed, the usual definition: time spent on steps that were kept,
over wall time. Time between an orderly end and the next start is not counted, nor is any time before this agent. A
commit beside training slows the steps, which count as productive; `Decision.saving_share` of the policy tells how much.
A job that hangs counts as productive until it is ended.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpt.types import Epoch, Version, format_count

# Snapshots whose work is remembered. When there are more, every other one of them is forgotten.
MARKS_MAX = 4096
PARTS = ("productive", "stall", "lost", "recovery", "starting", "ending")


class Phase(enum.Enum):
    """What the run is doing. IDLE: no start so far, or the run ended in order. DOWN: the run failed or had to leave,
    and has not been started again."""

    IDLE = "idle"
    STARTING = "starting"
    TRAINING = "training"
    ENDING = "ending"
    DOWN = "down"


_PARTS = {
    Phase.STARTING: "starting",
    Phase.TRAINING: "productive",
    Phase.ENDING: "ending",
    Phase.DOWN: "recovery",
}


@dataclass(frozen=True, slots=True)
class Mark:
    """A snapshot in the account: the productive seconds up to it, and when it was taken (None: unknown)."""

    version: Version
    productive_s: float
    taken_s: float | None


@dataclass(slots=True)
class Count:
    """The number, the total seconds and the last duration of one kind of event."""

    number: int = 0
    seconds: float = 0.0
    last_s: float | None = None

    def add(self, seconds: float) -> None:
        self.number += 1
        self.seconds += seconds
        self.last_s = seconds


@dataclass(slots=True)
class Totals:
    """What is counted over all starts of a run. `failures`: of a job that was training; each counts once, however many
    ranks died. `snapshots`: complete in memory; their seconds are the training pauses. `given_up`: abandoned snapshots.
    `raw_bytes`: the size of the committed checkpoints before encoding and deduplication. By level: the bytes saved to
    it, the bytes that starts read from it, and the restores from it."""

    starts: int = 0
    failures: int = 0
    lost_steps: int = 0
    snapshots: Count = field(default_factory=Count)
    given_up: int = 0
    commits: Count = field(default_factory=Count)
    commits_failed: int = 0
    recoveries: Count = field(default_factory=Count)
    raw_bytes: int = 0
    saved_bytes: dict[str, int] = field(default_factory=dict)
    restored_bytes: dict[str, int] = field(default_factory=dict)
    restores: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Accounting:
    """The account of one agent, over all starts of its run. Whenever something may have happened, call `update` first,
    then the method for the event."""

    phase: Phase = Phase.IDLE
    totals: Totals = field(default_factory=Totals)
    # Per level: the newest checkpoint of the branch history there, and when it was taken.
    newest_by_level: dict[str, tuple[Version, float | None]] = field(default_factory=dict)
    _seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    # Counted on its own: rounding could make a sum of the parts go back.
    _elapsed_s: float = 0.0
    _now_s: float | None = None
    _phase_s: float | None = None  # start of the phase
    _failed_s: float | None = None  # time of the failure that the present start follows
    # Work since the last snapshot, which bounds the stall of the next one.
    _stall_limit_s: float = 0.0
    _ended_step: int = 0  # newest step ended by all ranks
    _marks: list[Mark] = field(default_factory=list)  # of the present branch, oldest first
    _epoch: Epoch | None = None
    _parent_version: Version = field(default_factory=lambda: Version(0))  # the version that the epoch continues from
    _pending_stalls_s: dict[Version, float] = field(default_factory=dict)  # of snapshots not complete yet

    # -- events

    def update(self, now_s: float, phase: Phase | None, ended_step: int = 0) -> None:
        """Books the time up to now and enters `phase`. None: no job is at work, for instance after a start that was
        given up. `ended_step`: the newest ended step that the ranks published, 0 before the first."""
        self._advance(now_s)
        if phase is None:
            phase = self.phase
            if phase is Phase.STARTING:
                phase = Phase.DOWN if self._failed_s is not None else Phase.IDLE
        at_work = (Phase.TRAINING, Phase.ENDING)
        # The old phase counts too: steps may have ended between the last look and a failure.
        if phase in at_work or self.phase in at_work:
            self._ended_step = max(self._ended_step, ended_step)
        if phase is not self.phase:
            self._enter(now_s, phase)
        # No mark while a job is at work: the agent was restarted beside the job.
        if phase in at_work and not self._marks:
            self._marks = [Mark(Version(self._ended_step), 0.0, None)]

    def adopt_epoch(self, epoch: Epoch, parent: Version | None = None) -> None:
        """Adopts an epoch that was running before this agent. `parent`: the version that the epoch continues from;
        None: unknown."""
        self._epoch = self._epoch or epoch
        if epoch == self._epoch and parent is not None:
            self._parent_version = parent

    def record_start(
        self,
        now_s: float,
        epoch: Epoch,
        version: Version,
        level: str,
        read_bytes: Mapping[str, int],
        age_s: float | None,
        steps_lost: int,
    ) -> None:
        """Training goes on after version `version`, restored from `level` ("none": from the beginning).
        `read_bytes`: by level. `age_s`: age of the restored checkpoint; None: unknown. `steps_lost`: ended steps beyond
        that version; they count as lost only after a failure."""
        self._advance(now_s)
        self._rewind_to(version)
        if self._failed_s is not None:
            self.totals.lost_steps += steps_lost
            self.totals.recoveries.add(now_s - self._failed_s)
        self._failed_s = None
        self.totals.starts += 1
        _add(self.totals.restores, level, 1)
        for each, count in read_bytes.items():
            _add(self.totals.restored_bytes, each, count)
        self._reset_levels(now_s, version, level, age_s)
        self._epoch, self._parent_version, self._ended_step, self._stall_limit_s = epoch, version, version.step, 0.0
        self._pending_stalls_s.clear()
        self._enter(now_s, Phase.TRAINING)

    def record_staging(self, now_s: float, version: Version, stall_s: float) -> None:
        """All ranks have taken that snapshot. `stall_s`: pause of the slowest rank."""
        self._advance(now_s)
        moved = min(max(0.0, stall_s), self._stall_limit_s)
        self._seconds["productive"] -= moved
        self._seconds["stall"] += moved
        self._stall_limit_s = 0.0
        self._pending_stalls_s[version] = max(0.0, stall_s)
        if self._marks and version <= self._marks[-1].version:
            return  # retaken after it was abandoned
        self._marks.append(Mark(version, self._seconds["productive"], now_s))
        if len(self._marks) > MARKS_MAX:
            del self._marks[1:-1:2]

    def record_completion(self, epoch: Epoch, version: Version, count_bytes: int) -> None:
        """That checkpoint is complete in this node's memory, or in that of all the job's nodes."""
        self.totals.snapshots.add(self._pending_stalls_s.pop(version, 0.0))
        self.record_level("local", epoch, version, count_bytes)

    def record_level(self, level: str, epoch: Epoch, version: Version, count_bytes: int = 0) -> None:
        """That checkpoint is at `level`. `count_bytes`: its size once, however many replicas there are; 0: an earlier
        agent saved it."""
        _add(self.totals.saved_bytes, level, count_bytes)
        if epoch != self._epoch and version > self._parent_version:
            return  # on another branch: not part of the present epoch's history
        known = self.newest_by_level.get(level)
        if known is None or known[0] < version:
            at_s = next((mark.taken_s for mark in reversed(self._marks) if mark.version == version), None)
            self.newest_by_level[level] = (version, at_s)

    def clear_replicated(self) -> Version | None:
        """Replicas may be gone: no checkpoint counts as replicated until the next `record_level`.
        Returns the version that counted until now; None: there was none."""
        found = self.newest_by_level.pop("peer", None)
        return found[0] if found is not None else None

    def record_commit(self, epoch: Epoch, version: Version, seconds: float, raw_bytes: int, stored_bytes: int) -> None:
        self.totals.commits.add(seconds)
        self.totals.raw_bytes += raw_bytes
        self.record_level("store", epoch, version, stored_bytes)

    # -- results

    @property
    def newest_ended_step(self) -> tuple[Epoch, int] | None:
        """The newest start that trained, and the newest step that all its ranks have ended; None: no start trained."""
        return (self._epoch, self._ended_step) if self._epoch is not None else None

    @property
    def lost_s(self) -> float:
        return self._seconds["lost"]

    def facts(self, now_s: float) -> dict[str, Any]:
        """The whole account as a JSON object."""
        self._advance(now_s)
        elapsed_s = self._elapsed_s
        return {
            "epoch": str(self._epoch) if self._epoch is not None else None,
            "phase": self.phase.value,
            "phase_s": 0.0 if self._phase_s is None else now_s - self._phase_s,
            "elapsed_s": elapsed_s,
            **{f"{name}_s": seconds for name, seconds in self._seconds.items()},
            "goodput": self._seconds["productive"] / elapsed_s if elapsed_s > 0 else None,
            "ended_step": self._ended_step,
            **asdict(self.totals),
            "safe": {
                level: {
                    "step": version.step,
                    "version": str(version),
                    "age_s": None if at_s is None else max(0.0, now_s - at_s),
                }
                for level, (version, at_s) in self.newest_by_level.items()
            },
        }

    def text(self, now_s: float) -> str:
        """The account as one line for people."""
        found = self.facts(now_s)
        goodput = "nothing yet" if found["goodput"] is None else f"{found['goodput']:.1%}"
        return (
            f"goodput {goodput} of {found['elapsed_s']:.0f} s: stalled {found['stall_s']:.2f} s by "
            f"{format_count(self.totals.snapshots.number, 'snapshot')}, lost {found['lost_s']:.1f} s "
            f"({format_count(self.totals.lost_steps, 'step')}) and recovering {found['recovery_s']:.1f} s by "
            f"{format_count(self.totals.failures, 'failure')}; {format_count(self.totals.commits.number, 'commit')}"
        )

    # -- helpers

    def _advance(self, now_s: float) -> None:
        """Books the time since the last call."""
        passed_s = 0.0 if self._now_s is None else max(0.0, now_s - self._now_s)
        self._now_s = now_s if self._now_s is None else max(now_s, self._now_s)
        if self.phase is Phase.IDLE:
            return
        self._elapsed_s += passed_s
        part = "recovery" if self.phase is Phase.STARTING and self._failed_s is not None else _PARTS[self.phase]
        self._seconds[part] += passed_s
        if self.phase is Phase.TRAINING:
            self._stall_limit_s += passed_s

    def _enter(self, now_s: float, phase: Phase) -> None:
        trained = self.phase in (Phase.TRAINING, Phase.ENDING)
        failed = phase is Phase.DOWN or (phase is Phase.STARTING and self.phase is Phase.TRAINING)
        if failed and trained:
            self.totals.failures += 1
            self._failed_s = now_s
        self.phase, self._phase_s = phase, now_s

    def _rewind_to(self, version: Version) -> None:
        """Training goes on after `version`. After a failure the work beyond that version is booked as lost."""
        kept_s = self._seconds["productive"]
        if self._failed_s is not None:
            then_s = self._productive_at_s(version)
            self._seconds["lost"] += kept_s - then_s
            self._seconds["productive"] = kept_s = then_s
        found = [mark for mark in self._marks if mark.version == version]
        before = [mark for mark in self._marks if mark.version < version] if self._failed_s is not None else []
        self._marks = [*before, Mark(version, kept_s, found[-1].taken_s if found else None)]

    def _productive_at_s(self, version: Version) -> float:
        """The seconds of kept work up to `version`; 0 if that version is older than every mark."""
        marks, kept_s = self._marks, self._seconds["productive"]
        at = bisect.bisect_left([mark.version for mark in marks], version)
        if at < len(marks) and marks[at].version == version:
            return min(kept_s, marks[at].productive_s)
        if at == 0:
            return 0.0
        before = marks[at - 1]
        to_step, to_s = (
            (marks[at].version.step, marks[at].productive_s)
            if at < len(marks)
            else (max(self._ended_step, version.step), kept_s)
        )
        part = (version.step - before.version.step) / max(1, to_step - before.version.step)
        return min(kept_s, before.productive_s + part * (to_s - before.productive_s))

    def _reset_levels(self, now_s: float, version: Version, level: str, age_s: float | None) -> None:
        at_s = self._marks[-1].taken_s
        if at_s is None and age_s is not None:
            at_s = now_s - age_s
        # What other nodes still have of older checkpoints is not known: a node may have been lost.
        store = self.newest_by_level.get("store")
        self.newest_by_level = {"store": store} if store is not None and store[0] <= version else {}
        if level != "none" and self.newest_by_level.get(level, (None, None))[0] != version:
            self.newest_by_level[level] = (version, at_s)


def _add(counts: dict[str, int], key: str, number: int) -> None:
    counts[key] = counts.get(key, 0) + number
