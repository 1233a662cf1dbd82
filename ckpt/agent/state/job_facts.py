"""The facts of one job that every part of its scheduler reads: its ranks, its slots, the messages to the ranks, and
when the policy wants the next snapshot.

Facts may be repeated, late, or stale. Each part records its own facts and appends what it decides to `actions`. All
decisions are made in one place, `Scheduler.decide` in agent/scheduler/scheduler.py. Pure; not thread-safe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ckpt.agent.state.actions import Action, Emit, NotifyRanks
from ckpt.agent.state.arenas import Arenas
from ckpt.agent.state.rank_presence import Presence, RankStates
from ckpt.agent.state.slots import FAILURES_MAX, RETRY_S_MAX, JobSlots, SaveAttempt, SaveReason
from ckpt.agent.state.step_timing import SaveEstimate, StepTiming
from ckpt.policy.save_options import Every
from ckpt.types import Version, format_count

MISSING_ANSWER_S = 5.0  # wait for an answer from ranks that are past the version
# Level messages repeated to a rank that reconnects: far more than the slots hold versions.
LEVEL_MESSAGES_MAX = 64


class LevelMessages:
    """What the ranks were told of the levels that versions reached: the newest message by version and level."""

    def __init__(self, actions: list[Action]) -> None:
        self._actions = actions
        self._messages: dict[tuple[Version, str], dict[str, Any]] = {}  # the newest last

    def report(self, version: Version, level: str, ok: bool, message: str) -> None:
        """Tells all ranks whether that version has reached that level."""
        body = {
            "t": "checkpoint-level",
            "version": str(version),
            "level": level,
            "ok": ok,
            "message": message,
            "step": version.step,
        }
        self._actions.append(NotifyRanks(body))
        self._messages.pop((version, level), None)
        self._messages[version, level] = body
        if len(self._messages) > LEVEL_MESSAGES_MAX:
            del self._messages[next(iter(self._messages))]

    def find(self, version: Version, level: str) -> dict[str, Any] | None:
        """The newest message; None: there is none."""
        return self._messages.get((version, level))

    def forget(self, version: Version, level: str | None = None) -> None:
        """Forgets what was reported of that version at that level; None: at every level."""
        self._messages = {
            key: body for key, body in self._messages.items() if key[0] != version or level not in (None, key[1])
        }

    @property
    def versions(self) -> set[Version]:
        return {version for version, _ in self._messages}

    def repeated(self) -> list[dict[str, Any]]:
        """The messages for a rank that may have missed them."""
        return [{**body, "repeated": True} for body in self._messages.values()]


class JobFacts:
    """The facts of one job. `actions`: what is asked for in the decision under way. `superseded_by`: the newer start
    that owns the run; "": none."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.actions: list[Action] = []
        self.rank_states = RankStates(world)
        self.slots = JobSlots()
        self.arenas = Arenas(world, self.slots)
        self.step_timing = StepTiming()
        self.save_estimate = SaveEstimate(self.step_timing, self.arenas)
        self.levels = LevelMessages(self.actions)
        self.start_step: int | None = None  # None: not restored yet, nothing is appointed
        self.superseded_by = ""
        # A start surveys this memory: no slot is freed or overwritten until that start has its outcome.
        self.is_frozen = False
        self.is_closed_in_store = False
        self.is_single_node = True  # all ranks are on one node, and read the verdict on one control page
        self.committed_version: Version | None = None  # the newest
        self.last_error = ""  # of the newest failed commit or last save

    def record_committed(self, version: Version) -> None:
        """That version is committed. The newest counts: an older one may be committed after a newer one."""
        self.committed_version = max(version, self.committed_version or version)

    @property
    def any_gone(self) -> bool:
        """Whether a rank is gone: then no new save attempt can become complete."""
        return self.rank_states.summary.any_gone

    @property
    def all_gone(self) -> bool:
        """Whether every trainer that joined has left or died."""
        return self.rank_states.summary.all_gone

    @property
    def is_lost_cause(self) -> bool:
        """Whether training cannot go on: a rank is dead, or a newer start owns the run."""
        return bool(self.superseded_by) or self.rank_states.summary.any_dead

    def report_skipped(self, count: int, why: str) -> None:
        """Reports checkpoints that were due and were not taken or not committed."""
        text = f"{format_count(count, 'checkpoint')} passed over: {why}"
        self.actions.append(Emit("snapshot.passed", text, False, {"count": count}))

    def describe_absence(self, rank: int) -> str:
        """Why that rank is not here, as the end of a sentence."""
        member = self.rank_states[rank]
        return f"rank {rank} " + (
            "died" if member.presence is Presence.DEAD else "is away" if member.is_away else "left"
        )


@dataclass(eq=False)
class SnapshotClock:
    """When snapshots are due."""

    _facts: JobFacts
    policy: Every  # when to appoint
    commit_interval_s: float = 0.0  # from commit to commit of appointed snapshots; 0: each in its turn
    due_s: float = math.inf  # when the next snapshot is due
    _retry_count: int = 0  # appointed snapshots abandoned since one was complete

    @property
    def interval_s(self) -> float:
        """Seconds between appointments. Steps named by `Every(steps=)` are not appointed: the ranks ask for them."""
        return math.inf if self.policy.seconds is None else self.policy.seconds

    def start(self, now_s: float) -> None:
        """Training goes on."""
        # An adaptive policy takes the first snapshot at once, to measure its cost.
        self.due_s = now_s if self.commit_interval_s else now_s + self.interval_s

    def set_policy(self, policy: Every, now_s: float) -> None:
        """Appoints by this policy from now on."""
        self.policy = policy
        if self._facts.start_step is not None:
            self.record_appointment(now_s)

    def set_intervals(self, local_s: float, store_s: float, now_s: float) -> None:
        """From now on a snapshot is appointed every `local_s`, and one is committed about every `store_s`."""
        self.policy = Every(seconds=local_s)
        self.commit_interval_s = store_s
        if self._facts.start_step is not None and not self._retry_count:
            self.due_s = min(self.due_s, now_s + local_s)

    def set_due(self, now_s: float) -> None:
        """A snapshot is due now, if the policy has any appointed."""
        if self.policy.seconds is not None:
            self.due_s = now_s

    def record_appointment(self, now_s: float) -> None:
        """The interval to the next snapshot begins."""
        self.due_s = now_s + self.interval_s

    def record_drop(self, attempt: SaveAttempt) -> None:
        """The attempt was abandoned or withdrawn. An appointed one is repeated, later with each failure."""
        if attempt.reason is SaveReason.STEP and self.policy.seconds is not None:
            self._retry_count = min(self._retry_count + 1, FAILURES_MAX)
            self.due_s = attempt.times.opened_s + min(2.0 ** (self._retry_count - 1), RETRY_S_MAX, self.interval_s)

    def record_completion(self) -> None:
        """A snapshot became complete."""
        self._retry_count = 0

    def skip_due(self, now_s: float) -> None:
        """Skips due snapshots for which no slot is free, once the next one is due too."""
        if now_s >= self.due_s + self.interval_s:
            count = int((now_s - self.due_s) / self.interval_s)
            self.due_s += count * self.interval_s
            self._facts.report_skipped(count, "no slot was free when a snapshot was due")
