"""What checkpoints and failures cost a run, and what they saved: an account kept from facts that the agent has anyway.
Pure: every time is told, in seconds on one clock that does not go back; nothing is measured for it.

Each second since the run's first start on this agent is booked under exactly one part:

- productive: training ran, and what it did in that time is still there (kept, or not lost so far);
- stall: training stood still for a snapshot, as the slowest rank says;
- lost: training ran, and a failure threw that work back. Between two snapshots work is taken to go evenly;
- recovery: from a failure until training went on;
- starting: the same where nothing had failed: listing the store, restoring;
- ending: a rank had come to its end, and the last checkpoint was waited for.

They sum to `elapsed`; goodput is productive / elapsed, the usual definition (time spent on steps that were kept, over
wall time). Not counted are the time between a run's end in order and the next start, and whatever came before this
agent. A commit that runs beside training slows it: those steps take longer, and are productive all the same. How much
that is says the policy (`Decision.saving`). A job that hangs counts as productive until it is ended.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.types import Epoch, Tick, counted

MARKS_MAX = 4096  # snapshots whose place in the work is remembered; of older ones every other
PARTS = ("productive", "stall", "lost", "recovery", "starting", "ending")


class Phase(enum.Enum):
    """IDLE: no start so far, or the run ended in order. DOWN: it failed, or was told to leave, and nobody has started
    it again."""

    IDLE = "idle"
    STARTING = "starting"
    TRAINING = "training"
    ENDING = "ending"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Mark:
    """A snapshot: how much work was kept by then, and when that was (None: not known)."""

    tick: Tick
    kept_s: float
    at_s: float | None


@dataclass(slots=True)
class Count:
    """Of one kind of event: how many, how many seconds of them, and how long the newest took."""

    number: int = 0
    seconds: float = 0.0
    last_s: float | None = None

    def add(self, seconds: float) -> None:
        self.number += 1
        self.seconds += seconds
        self.last_s = seconds

    def facts(self) -> dict[str, Any]:
        return {"number": self.number, "seconds": self.seconds, "last_s": self.last_s}


@dataclass(slots=True)
class Accounting:
    """One agent's, over all starts of its run. `look` first, whenever something may have happened; then what did."""

    phase: Phase = Phase.IDLE
    starts: int = 0
    failures: int = 0  # of a job that trained: each is one, however many ranks died
    lost_steps: int = 0
    snapshots: Count = field(default_factory=Count)  # complete in memory; seconds: that training stood still
    given_up: int = 0  # snapshots that were begun and abandoned
    commits: Count = field(default_factory=Count)
    commits_failed: int = 0
    recoveries: Count = field(default_factory=Count)
    raw_bytes: int = 0  # of the checkpoints that were committed, before coding and whatever was in the store already
    saved_bytes: dict[str, int] = field(default_factory=dict)  # that reached a level
    restored_bytes: dict[str, int] = field(default_factory=dict)  # that starts read from it
    restores: dict[str, int] = field(default_factory=dict)
    safe: dict[str, tuple[Tick, float | None]] = field(default_factory=dict)  # newest on the line, and when taken
    _seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    _elapsed_s: float = 0.0  # counted by itself: a sum of parts that moved may be smaller by rounding than it was
    _now_s: float | None = None
    _phase_s: float | None = None  # since when it is this phase
    _recovering: bool = False  # what is being started had failed
    _down_s: float | None = None  # when
    _room_s: float = 0.0  # work since the last snapshot: no stall is longer
    _ended_step: int = 0  # the newest step that all ranks have ended
    _marks: list[Mark] = field(default_factory=list)  # of the line that is being trained, oldest first
    _epoch: Epoch | None = None
    _from: Tick = field(default_factory=lambda: Tick(0))  # what this epoch goes on from
    _stall_s: dict[Tick, float] = field(default_factory=dict)  # of snapshots that are not complete yet

    # -- what is seen

    def look(self, now_s: float, phase: Phase | None, ended_step: int = 0) -> None:
        """What goes on now; None: nothing, a start that did not come about among others. `ended_step`: as far as the
        ranks have published it, 0: not yet."""
        self._advance(now_s)
        if phase is None:
            phase = self._fallen_back() if self.phase is Phase.STARTING else self.phase
        at_work = (Phase.TRAINING, Phase.ENDING)
        if phase in at_work or self.phase in at_work:  # also what was ended between the last look and a failure
            self._ended_step = max(self._ended_step, ended_step)
        if phase is not self.phase:
            self._enter(now_s, phase)
        if phase in at_work and not self._marks:  # the agent was started again beside a job at work
            self._marks = [Mark(Tick(self._ended_step), 0.0, None)]

    def follow(self, epoch: Epoch, parent: Tick | None = None) -> None:
        """An epoch that this agent has not started, but came to when it was running. `parent`: what it goes on from, as
        far as that is known."""
        self._epoch = self._epoch or epoch
        if epoch == self._epoch and parent is not None:
            self._from = parent

    def started(
        self,
        now_s: float,
        epoch: Epoch,
        tick: Tick,
        level: str,
        read_bytes: Mapping[str, int],
        age_s: float | None,
        steps_lost: int,
    ) -> None:
        """Training goes on after `tick`, from what `level` held ("none": from the beginning). `read_bytes`: by level.
        `age_s`: how long ago that was taken, as far as anybody has written it down. `steps_lost`: ended ones beyond it,
        which count where it is by a failure that it is gone back."""
        self._advance(now_s)
        self._go_back(tick)
        if self._recovering:
            self.lost_steps += steps_lost
        if self._recovering and self._down_s is not None:
            self.recoveries.add(now_s - self._down_s)
        self._down_s, self._recovering = None, False
        self.starts += 1
        self.restores[level] = self.restores.get(level, 0) + 1
        for each, count in read_bytes.items():
            self.restored_bytes[each] = self.restored_bytes.get(each, 0) + count
        self._now_safe(now_s, tick, level, age_s)
        self._epoch, self._from, self._ended_step, self._room_s = epoch, tick, tick.step, 0.0
        self._stall_s.clear()
        self._enter(now_s, Phase.TRAINING)

    def staged(self, now_s: float, tick: Tick, stall_s: float) -> None:
        """All ranks have taken that snapshot; the slowest stood still for so long."""
        self._advance(now_s)
        moved = min(max(0.0, stall_s), self._room_s)
        self._seconds["productive"] -= moved
        self._seconds["stall"] += moved
        self._room_s = 0.0
        self._stall_s[tick] = max(0.0, stall_s)
        if self._marks and tick <= self._marks[-1].tick:
            return  # taken again, after it had been given up
        self._marks.append(Mark(tick, self._seconds["productive"], now_s))
        if len(self._marks) > MARKS_MAX:
            del self._marks[1:-1:2]

    def complete(self, epoch: Epoch, tick: Tick, count_bytes: int) -> None:
        """It is whole in memory."""
        self.snapshots.add(self._stall_s.pop(tick, 0.0))
        self._reached("local", epoch, tick, count_bytes)

    def replicated(self, epoch: Epoch, tick: Tick, count_bytes: int) -> None:
        """Other nodes keep it, too. `count_bytes`: once, however many copies there are."""
        self._reached("peer", epoch, tick, count_bytes)

    def found(self, level: str, epoch: Epoch, tick: Tick) -> None:
        """It is there, and an agent before this one brought it there."""
        self._reached(level, epoch, tick, 0)

    def unprotected(self) -> Tick | None:
        """What other nodes kept may be gone: the newest that was safe there is not, until that is said again. Which it
        was; None: there was none."""
        found = self.safe.pop("peer", None)
        return found[0] if found is not None else None

    def abandoned(self) -> None:
        self.given_up += 1

    def committed(self, epoch: Epoch, tick: Tick, seconds: float, raw_bytes: int, stored_bytes: int) -> None:
        self.commits.add(seconds)
        self.raw_bytes += raw_bytes
        self._reached("store", epoch, tick, stored_bytes)

    def commit_failed(self) -> None:
        self.commits_failed += 1

    # -- what follows from it

    @property
    def ended(self) -> tuple[Epoch, int] | None:
        """The newest start that trained, and the newest step that all its ranks have ended; None: there was none."""
        return (self._epoch, self._ended_step) if self._epoch is not None else None

    @property
    def lost_s(self) -> float:
        return self._seconds["lost"]

    def facts(self, now_s: float) -> dict[str, Any]:
        """All of it, as one JSON object may hold it."""
        self._advance(now_s)
        elapsed_s = self._elapsed_s
        return {
            "epoch": str(self._epoch) if self._epoch is not None else None,
            "phase": self.phase.value,
            "phase_s": 0.0 if self._phase_s is None else now_s - self._phase_s,
            "elapsed_s": elapsed_s,
            **{f"{name}_s": seconds for name, seconds in self._seconds.items()},
            "goodput": self._seconds["productive"] / elapsed_s if elapsed_s > 0 else None,
            "starts": self.starts,
            "failures": self.failures,
            "lost_steps": self.lost_steps,
            "ended_step": self._ended_step,
            "snapshots": self.snapshots.facts(),
            "given_up": self.given_up,
            "commits": self.commits.facts(),
            "commits_failed": self.commits_failed,
            "recoveries": self.recoveries.facts(),
            "raw_bytes": self.raw_bytes,
            "saved_bytes": dict(self.saved_bytes),
            "restored_bytes": dict(self.restored_bytes),
            "restores": dict(self.restores),
            "safe": {level: self._safe(now_s, *found) for level, found in self.safe.items()},
        }

    def text(self, now_s: float) -> str:
        """One line for people."""
        found = self.facts(now_s)
        goodput = "nothing yet" if found["goodput"] is None else f"{found['goodput']:.1%}"
        return (
            f"goodput {goodput} of {found['elapsed_s']:.0f} s: stalled {found['stall_s']:.2f} s by "
            f"{counted(self.snapshots.number, 'snapshot')}, lost {found['lost_s']:.1f} s "
            f"({counted(self.lost_steps, 'step')}) and recovering {found['recovery_s']:.1f} s by "
            f"{counted(self.failures, 'failure')}; {counted(self.commits.number, 'commit')}"
        )

    # -- small steps

    def _advance(self, now_s: float) -> None:
        """Books the time since the last call."""
        passed_s = 0.0 if self._now_s is None else max(0.0, now_s - self._now_s)
        self._now_s = now_s if self._now_s is None else max(now_s, self._now_s)
        if self.phase is not Phase.IDLE:
            self._elapsed_s += passed_s
        match self.phase:
            case Phase.TRAINING:
                self._seconds["productive"] += passed_s
                self._room_s += passed_s
            case Phase.ENDING:
                self._seconds["ending"] += passed_s
            case Phase.DOWN:
                self._seconds["recovery"] += passed_s
            case Phase.STARTING:
                self._seconds["recovery" if self._recovering else "starting"] += passed_s

    def _enter(self, now_s: float, phase: Phase) -> None:
        trained = self.phase in (Phase.TRAINING, Phase.ENDING)
        failed = phase is Phase.DOWN or (phase is Phase.STARTING and self.phase is Phase.TRAINING)
        if failed and trained:
            self.failures += 1
            self._recovering, self._down_s = True, now_s
        self.phase, self._phase_s = phase, now_s

    def _fallen_back(self) -> Phase:
        return Phase.DOWN if self._recovering else Phase.IDLE

    def _go_back(self, tick: Tick) -> None:
        """Training goes on after `tick`: the work beyond it is lost, if it is by a failure that it is gone back."""
        kept_s = self._seconds["productive"]
        if self._recovering:
            then_s = self._kept_at(tick)
            self._seconds["lost"] += kept_s - then_s
            self._seconds["productive"] = kept_s = then_s
        found = [mark for mark in self._marks if mark.tick == tick]
        before = [mark for mark in self._marks if mark.tick < tick] if self._recovering else []
        self._marks = [*before, Mark(tick, kept_s, found[-1].at_s if found else None)]

    def _kept_at(self, tick: Tick) -> float:
        """Of the work kept now, what had been done by `tick`. None of it, where it lies before all that is known."""
        marks, kept_s = self._marks, self._seconds["productive"]
        at = bisect.bisect_left([mark.tick for mark in marks], tick)
        if at < len(marks) and marks[at].tick == tick:
            return min(kept_s, marks[at].kept_s)
        if at == 0:
            return 0.0
        before = marks[at - 1]
        to_step, to_s = (
            (marks[at].tick.step, marks[at].kept_s) if at < len(marks) else (max(self._ended_step, tick.step), kept_s)
        )
        part = (tick.step - before.tick.step) / max(1, to_step - before.tick.step)
        return min(kept_s, before.kept_s + part * (to_s - before.kept_s))

    def _now_safe(self, now_s: float, tick: Tick, level: str, age_s: float | None) -> None:
        at_s = self._marks[-1].at_s
        if at_s is None and age_s is not None:
            at_s = now_s - age_s
        safe = {each: found for each, found in self.safe.items() if found[0] < tick and each != "local"}
        if level != "none":
            safe[level] = (tick, at_s)
        store = self.safe.get("store")
        if store is not None and store[0] == tick:
            safe["store"] = store
        self.safe = safe

    def _reached(self, level: str, epoch: Epoch, tick: Tick, count_bytes: int) -> None:
        self.saved_bytes[level] = self.saved_bytes.get(level, 0) + count_bytes
        if epoch != self._epoch and tick > self._from:
            return  # an earlier start's, and not what the present one goes on from
        known = self.safe.get(level)
        if known is None or known[0] < tick:
            at_s = next((mark.at_s for mark in reversed(self._marks) if mark.tick == tick), None)
            self.safe[level] = (tick, at_s)

    def _safe(self, now_s: float, tick: Tick, at_s: float | None) -> dict[str, Any]:
        age_s = None if at_s is None else max(0.0, now_s - at_s)
        return {"step": tick.step, "tick": str(tick), "age_s": age_s}
