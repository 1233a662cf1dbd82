"""The report of what a run (or a restore) did: one line for people, one JSON object for programs."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ckpt.events import REPEATED_EVENTS, Event
from ckpt.types import format_count

# Events of fallbacks: the safe path was taken, or something older or smaller than wanted. Their messages say why.
FALLBACK_EVENTS = frozenset(
    {
        "claim.postponed",
        "memory.plan",
        "memory.short",
        "restore.mismatch",
        "restore.skipped",
        "snapshot.differs",
        "snapshot.unpinned",
        "store.lost",
    }
)
FALLBACK_MESSAGES_MAX = 50  # different messages that are kept
SHOWN_WAIT_S_MIN = 0.1  # a shorter wait in all is not mentioned
MESSAGE_CHARS_MAX = 500  # characters of each message


@dataclass(slots=True)
class ReportedEvents:
    """What events have told. An event sink, which runs on the thread that emits.

    `commits`, and the bytes of the state, as written, and as unchanged data that the commits refer to: known only on
    the rank to which the agent reports the job, the lowest one. `skipped_checkpoints`: due ones that the agent skipped,
    since no slot was free or the store failed. `repeat_counts`: how often each event was repeated without a further
    warning. `fallback_messages`: of fallback events."""

    commits: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    referred_bytes: int = 0
    skipped_checkpoints: int = 0
    agent_restarts: int = 0
    repeat_counts: Counter[str] = field(default_factory=Counter)
    fallback_messages: list[str] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        if event.name == "commit.done":
            self.commits += 1
            self.raw_bytes += int(event.data.get("raw_bytes", 0))
            self.stored_bytes += int(event.data.get("stored_bytes", 0))
            self.referred_bytes += int(event.data.get("referred_bytes", 0))
        elif event.name == "snapshot.passed":
            self.skipped_checkpoints += int(event.data.get("count", 0))
        elif event.name == "agent.restarted":
            self.agent_restarts += 1
        elif event.name in REPEATED_EVENTS and not event.loud:
            self.repeat_counts[event.name] += 1
        elif event.name in FALLBACK_EVENTS and event.loud:
            text = event.message.removeprefix("ckpt: ")
            text = text if len(text) <= MESSAGE_CHARS_MAX else f"{text[: MESSAGE_CHARS_MAX - 4]} ..."
            if text not in self.fallback_messages and len(self.fallback_messages) < FALLBACK_MESSAGES_MAX:
                self.fallback_messages.append(text)


@dataclass(slots=True)
class RunReport:
    """The figures of one rank's run.

    `steps_lost`: steps that the former run had ended and that have to be done again; None: no process is left that
    knows. `entry_s`: how long entering took. `snapshot_count`, `missed_snapshots`: snapshots asked for here that were
    taken, and that were not. `waited_s`: how long training waited in saves for a free slot, which depends on the
    store's speed. `stalls_s`: how long training paused for each snapshot. `staged_bytes`: bytes of this rank's
    snapshots in this host's memory. `read_bytes`: bytes restored on this rank, by the level they came from. `proven`:
    what was trusted because this run verified it (hashes, background copies, replicas). `fallbacks`: what was not
    trusted, and why."""

    start_step: int = 0
    end_step: int = 0
    restored_from: str = "nothing"
    steps_lost: int | None = None
    entry_s: float = 0.0
    snapshot_count: int = 0
    missed_snapshots: int = 0
    waited_s: float = 0.0
    stalls_s: list[float] = field(default_factory=list)
    staged_bytes: int = 0
    read_bytes: dict[str, int] = field(default_factory=dict)
    committed_step: int | None = None
    proven: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    told: ReportedEvents = field(default_factory=ReportedEvents)

    @property
    def bytes_by_level(self) -> dict[str, int]:
        """What reached each level, and what came from each."""
        found = {f"restored from {level}": count for level, count in sorted(self.read_bytes.items())}
        if self.snapshot_count:
            found["local"] = self.staged_bytes
        if self.told.commits:
            found["store"] = self.told.stored_bytes
        return found

    def to_dict(self) -> dict[str, Any]:
        stalls = sorted(self.stalls_s)
        return {
            "start_step": self.start_step,
            "end_step": self.end_step,
            "restored_from": self.restored_from,
            "steps_lost": self.steps_lost,
            "entry_s": round(self.entry_s, 3),
            "snapshots": self.snapshot_count,
            "missed": self.missed_snapshots,
            "passed": self.told.skipped_checkpoints,
            "waited_s": round(self.waited_s, 3),
            "stall_ms_median": round(1e3 * statistics.median(stalls), 3) if stalls else None,
            "stall_ms_max": round(1e3 * stalls[-1], 3) if stalls else None,
            "stall_s_total": round(sum(stalls), 6),
            "bytes": self.bytes_by_level,
            "commits": self.told.commits,
            "committed_raw_bytes": self.told.raw_bytes,
            "committed_referred_bytes": self.told.referred_bytes,
            "committed_step": self.committed_step,
            "proven": list(self.proven),
            "fell_back": list(self.fallbacks),
            "agent_restarts": self.told.agent_restarts,
            "repeated": dict(self.told.repeat_counts),
        }

    def restored_line(self) -> str:
        """One line at the start of a run that goes on, without a line break."""
        return self._one_line(f"ckpt: {self._start_text('to redo')}, in {self.entry_s:.2f} s{self._fallbacks_text()}")

    def line(self) -> str:
        """One line at the exit, without a line break."""
        ran = f"ended at step {self.end_step}" if self.end_step > self.start_step else "no step was made"
        newest = "nothing" if self.committed_step is None else f"step {self.committed_step}"
        stored = f", {_size(self.told.stored_bytes)} stored" if self.told.commits else ""
        again = [f"{name} {format_count(count, 'time')}" for name, count in sorted(self.told.repeat_counts.items())]
        repeated = f"; repeated: {', '.join(again)}" if again else ""
        return self._one_line(
            f"ckpt: {self._start_text('redone')}; {ran}; {self._snapshots_text()}; "
            f"{newest} is committed{stored}{self._fallbacks_text()}{repeated}"
        )

    def _start_text(self, lost_steps: str) -> str:
        if self.restored_from == "nothing":
            return f"started at step {self.start_step}"
        lost = "" if self.steps_lost is None else f", {format_count(self.steps_lost, 'step')} {lost_steps}"
        return f"{'resumed at' if self.start_step else 'started from'} {self.restored_from}{lost}"

    def _snapshots_text(self) -> str:
        paused = ""
        if stalls := [1e3 * stall for stall in self.stalls_s]:
            paused = f", training paused {statistics.median(stalls):.1f} ms each (at most {max(stalls):.1f} ms)"
        missed = f", {self.missed_snapshots} missed" if self.missed_snapshots else ""
        passed = f", {self.told.skipped_checkpoints} passed over" if self.told.skipped_checkpoints else ""
        waited = f", {self.waited_s:.1f} s of waiting for a free slot" if self.waited_s >= SHOWN_WAIT_S_MIN else ""
        return f"{format_count(self.snapshot_count, 'checkpoint')}{paused}{missed}{passed}{waited}"

    def _fallbacks_text(self) -> str:
        return f"; slow path: {'; '.join(self.fallbacks)}" if self.fallbacks else ""

    @staticmethod
    def _one_line(text: str) -> str:
        return " ".join(text.split("\n"))


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 // 10 else f"{count / 2**10:.1f} KiB"
