"""The facts of one job that this node coordinates: its ranks, its slots, their save attempts, and the open requests.

Each method records one fact and decides nothing. Facts may be repeated, late, or stale. All decisions are made in one
place, `Scheduler.decide` in agent/job/scheduler.py, whose base class this is. Pure; not thread-safe.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.agent.state.actions import Action, Emit, NotifyRanks, Refuse, Request
from ckpt.agent.state.rank_presence import LEAVE_RETRY, Presence, RankStates
from ckpt.agent.state.step_timing import StepTiming
from ckpt.ipc.control_page import GRADIENTS_WAIT, MID_STEP, SLOTS_MAX
from ckpt.placement.placement import Kept
from ckpt.policy.adaptive import format_duration
from ckpt.policy.save_options import Every
from ckpt.types import Version

LATENCY_S = 0.01  # of an announcement; doubled at each late rank, up to LATENCY_S_MAX
LATENCY_S_MAX = 2.5
RETRY_S_MAX = 60.0
ARENA_SLACK_PARTS = 16  # an arena that is too large by one part in so many is kept
MISSING_ANSWER_S = 5.0  # wait for an answer from ranks that are past the version
# Level messages repeated to a rank that reconnects: far more than the slots hold versions.
LEVEL_MESSAGES_MAX = 64
# Time for a rank whose connection broke to rejoin: a new agent has to start and connect.
REJOIN_S = 60.0


class SaveReason(enum.Enum):
    """Why a save attempt was made."""

    STEP = "appointed"
    DUE = "due"  # the policy names that step, and all ranks ask for it
    HOLD = "hold"  # the last snapshot before a deadline, at which the ranks wait
    SAVE = "save"  # ck.save()
    EXIT = "exit"  # the end of the block


class SlotState(enum.Enum):
    """The state of a slot: that of the save attempt in it, or FREE."""

    FREE = "free"
    GRANTED = "granted"  # announced or granted: ranks may be filling it
    STAGED = "staged"
    COMPLETE = "complete"


class WorkState(enum.Enum):
    """The outcome of a complete save attempt at the store, or on peers."""

    NEW = "new"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class SaveAttempt:
    """One save attempt: a version, in one slot, under one division."""

    number: int
    slot: int
    reason: SaveReason
    version: Version
    division: str
    opened_s: float
    memory_bytes: int = 0  # memory of all ranks' arenas
    state: SlotState = SlotState.GRANTED
    staged_ranks: dict[int, float] = field(default_factory=dict)  # rank -> stall in seconds
    is_announced: bool = False  # by a control word
    miss_reason: str = ""  # reason to abandon the attempt
    held_requests: dict[int, Request] = field(default_factory=dict)  # by rank: requests that wait for the verdict
    metrics: dict[str, float] = field(default_factory=dict)
    commit_state: WorkState = WorkState.NEW  # its commit
    replication_state: WorkState = WorkState.NEW  # its replication
    is_last_try: bool = False  # its last commit was begun
    is_commit_cancelled: bool = False  # for the last snapshot before a deadline
    verdict: bool | None = None  # of a hold: True: leave; False: go on
    all_staged_s: float | None = None  # time
    hash_duration_s: float | None = None  # duration
    commit_began_s: float | None = None
    placement: tuple[Kept, ...] = ()  # holders of its replicas, as planned when replication last began

    @property
    def is_explicit(self) -> bool:
        """Whether anything but an ordinary appointment made this attempt."""
        return self.reason is not SaveReason.STEP

    @property
    def is_verdict_pending(self) -> bool:
        """Whether this is a hold without a verdict yet."""
        return self.reason is SaveReason.HOLD and self.verdict is None


@dataclass(slots=True)
class Slot:
    """One slot: an arena on each rank. `bytes`: the sizes of the arenas, by rank; () if there are none."""

    number: int
    attempt: SaveAttempt | None = None
    leases: int = 0
    arena_bytes: tuple[int, ...] = ()
    is_making_arenas: bool = False
    is_handed_out: bool = False  # some rank or its agent may have an arena of the slot
    is_offered: bool = False  # to all ranks, since the last division
    warm_ranks: set[int] = field(default_factory=set)  # ranks whose arena is bound for the present division

    @property
    def state(self) -> SlotState:
        return SlotState.FREE if self.attempt is None else self.attempt.state


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """One rank's request to save. `same`: a version already staged whose bytes equal the rank's present state."""

    version: Version
    reason: SaveReason
    metrics: dict[str, float]
    request: Request
    equal_version: Version | None = None


@dataclass(frozen=True, slots=True)
class AnsweredSave:
    """The newest answered save. `kind`, `message`: the error for a rank that repeats the request when its snapshot is
    gone."""

    version: Version
    kind: str
    message: str


class JobFacts:
    """The facts of one job. `policy`: when to appoint. `first_round`: the number of the first save attempt; random, so
    that a restarted agent does not soon repeat a number."""

    def __init__(self, world: int, policy: Every, first_attempt: int = 1) -> None:
        self.world = world
        self.policy = policy
        self.rank_states = RankStates(world)
        self.step_timing = StepTiming()
        self.slots = [Slot(n) for n in range(SLOTS_MAX)]
        self.slot_limit = 0  # the number that memory allows; 0 until the first division
        self.division = ""
        self.superseded_by = ""
        self.committing_slot: int | None = None  # the slot
        # A start surveys this memory: no slot is freed or overwritten until that start has its outcome.
        self.is_frozen = False
        self.is_closed_in_store = False
        self.refusal_reason = ""  # reason why nothing can be saved
        self.last_error = ""  # of the newest failed commit or last save
        self.committed_version: Version | None = None
        self._next_attempt_number = first_attempt
        self._needed_arena_bytes: tuple[int, ...] = ()  # arena bytes per rank under the current division
        # By slot: the sizes of its arenas and those needed as last compared, and whether they fit.
        self._arena_fits: dict[int, tuple[tuple[int, ...], tuple[int, ...], bool]] = {}
        self.layouts_version = 0
        self._divided_layouts_version = 0
        self._is_dividing = False
        self._save_requests: dict[int, SaveRequest] = {}
        # By rank: the newest version that it cannot save, and the reason.
        self._unsavable_versions: dict[int, tuple[Version, str]] = {}
        self._all_saving_since_s: float | None = None  # since when all ranks wait in a save
        self._last_progress_s = -math.inf  # last progress message to ranks that wait for a slot
        # Since when some ranks wait in a save for others; inf: the others were named in an event.
        self._partial_save_since_s: float | None = None
        self._answered_save: AnsweredSave | None = None  # saves up to its version are answered
        self._start_step: int | None = None  # None: not restored yet, nothing is appointed
        # The agent restarted beside running ranks: nothing is appointed before each rank has published its step.
        self._is_resumed = False
        self._appoint_due_s = math.inf
        # Interval between commits of appointed snapshots; 0: each one whose turn comes is committed.
        self._commit_interval_s = 0.0
        self._has_reported_first = False  # the event that the first checkpoint is complete was emitted
        self._last_commit_opened_s = -math.inf  # when the snapshot of the newest commit was appointed
        self._retry_count = 0
        self._latency_s = LATENCY_S
        self._step_rate_origin: tuple[float, int] = (0.0, 0)  # (time, step) from which the rate is counted
        self._steps_per_s = 0.0
        self._retry_commit_s = math.inf
        self._commit_failures = 0
        self._leave_attempt_number = 0  # the save attempt whose verdict was: leave
        # All ranks held when the verdict was given. Else the others may be stuck, and have to be ended.
        self._is_leave_unanimous = False
        self._leave_deadline_s: float | None = None  # the earliest deadline at the verdict, or since
        self._is_end_ordered = False  # the ranks were told to end where they are
        self._end_reason = ""
        self._can_end_wait = False
        self._is_commit_stopped = False
        self._is_orphaned = False  # superseded, but its newest complete snapshot is to be committed once
        # A former job still commits the checkpoint that this job continued from. Ranks that leave wait for it.
        self.is_former_committing = False
        self._abandoned_attempts: deque[int] = deque(maxlen=64)  # numbers of abandoned save attempts
        self._is_closing = False
        self.is_taking_over = False  # ranks bring their arenas from a former agent, and not all have come yet
        # By slot: the version of a former agent's complete snapshot. The slot is leased until a newer one is safe.
        self.inherited_versions: dict[int, Version] = {}
        # By version and level: the newest level message, the newest last.
        self._level_messages: dict[tuple[Version, str], dict[str, Any]] = {}
        self._actions: list[Action] = []

    # -- facts

    def record_join(self, rank: int) -> None:
        """A rank has joined, for the first time or again. Save attempts that it may have answered on a lost connection
        count as missed."""
        member = self.rank_states[rank]
        if member.is_away and self.may_join(rank):
            member.presence, member.is_away = Presence.HERE, False
        if member.presence is not Presence.HERE:
            # Its request to leave came on the lost connection, and cannot be answered there.
            member.disconnected_s, member.leave_request = None, LEAVE_RETRY
            # A commit may have begun without this rank's node.
            self.retry_commit()
            return
        self.record_disconnect(rank, None)
        for slot in self.slots:
            slot.is_offered = False
            # Arenas closed or made meanwhile may still be at that rank.
            slot.is_handed_out |= member.has_joined
        member.has_joined = True
        member.disconnected_s = None

    def may_join(self, rank: int) -> bool:
        """Whether the rank still belongs to the job. A rank that was away for long does until the epoch is being
        closed: before that nothing takes its place."""
        member = self.rank_states[rank]
        # It waits to leave and has a new connection: its node's agent was restarted.
        waits = member.presence is Presence.LEFT and member.leave_request is not None
        returns = member.is_away and not self._is_closing
        return waits or ((member.presence is Presence.HERE or returns) and not self.is_closed_in_store)

    def record_disconnect(self, rank: int, now_s: float | None) -> None:
        """The rank's connection ended, its process did not: it may rejoin. `now_s`: None where it has rejoined."""
        member = self.rank_states[rank]
        member.disconnected_s = now_s
        self._save_requests.pop(rank, None)
        # The refusal may come from that node being unreachable: plan anew once the rank is back.
        if self.refusal_reason:
            self.record_layout()
        for attempt in self._open_attempts():
            if rank not in attempt.staged_ranks:
                attempt.miss_reason = attempt.miss_reason or f"the connection of rank {rank} was lost"
        for attempt in self.attempts():
            attempt.held_requests.pop(rank, None)

    def record_death(self, rank: int) -> None:
        """The rank's process is dead."""
        member = self.rank_states[rank]
        member.leave_request = None
        self._save_requests.pop(rank, None)
        if member.presence is Presence.HERE or member.is_away:
            member.presence, member.is_away = Presence.DEAD, False

    def record_layout(self) -> None:
        """A rank's state has another structure, or needs larger arenas: a new division is due, and saves wait."""
        self.layouts_version += 1
        self.refusal_reason = ""

    def record_division(self, layouts_version: int, division: str, arena_bytes: tuple[int, ...], slots: int) -> bool:
        """Outcome of `Divide`: the division of the layouts of that version. `slots`: the number that fits into memory.
        Returns whether the division is current: then send each rank its part; else another one is made."""
        self._is_dividing = False
        if layouts_version != self.layouts_version:
            return False
        self._divided_layouts_version = layouts_version
        self.division = division
        for slot in self.slots:
            slot.is_offered = False
            slot.warm_ranks.clear()
        self._needed_arena_bytes = arena_bytes
        self.slot_limit = slots
        self.refusal_reason = (
            "" if slots else "not one arena fits into memory: free some, save less, or raise Limits(memory=)"
        )
        return True

    def record_division_failure(self, layouts_version: int, message: str) -> None:
        """Outcome of `Divide`: there is no division. `message`: the reason, for ranks that ask to save."""
        self._is_dividing = False
        if layouts_version != self.layouts_version:
            return
        self._divided_layouts_version = layouts_version
        self.division = ""
        self.refusal_reason = message

    def record_arenas(self, slot: int, arena_bytes: tuple[int, ...]) -> None:
        """Outcome of `MakeArenas`: the sizes by rank; () if it failed: then call `limit_slots` before."""
        self.slots[slot].is_making_arenas = False
        self.slots[slot].is_offered = False
        self.slots[slot].arena_bytes = arena_bytes
        self.slots[slot].is_handed_out |= bool(arena_bytes)

    def record_lost_arenas(self, slot: int) -> None:
        """A node lost its arenas of that slot. All arenas of the slot are made anew once the slot is free."""
        entry = self.slots[slot]
        entry.is_offered = False
        if entry.attempt is None and not entry.leases:
            entry.arena_bytes = ()

    def limit_slots(self, slots: int, message: str) -> None:
        """Memory allows at most `slots` slots. `message`: the reason to refuse saves if that is none."""
        self.slot_limit = min(self.slot_limit, slots)
        if not self.slot_limit:
            self.refusal_reason = message

    def raise_slot_limit(self, slots: int) -> None:
        """Memory now allows `slots` slots. Ignored if there are as many, or if there is no current division."""
        if slots > self.slot_limit and self.has_division:
            self.slot_limit, self.refusal_reason = slots, ""

    def record_warm_arena(self, rank: int, slot: int, division: str) -> None:
        """The rank has mapped its arena of this slot, and bound it for this division."""
        if 0 <= slot < len(self.slots) and not self.slots[slot].is_making_arenas and division == self.division:
            self.slots[slot].warm_ranks.add(rank)

    def record_start(self, step: int, now_s: float) -> None:
        """The restore has ended, and training goes on after `step`. From now on snapshots are appointed."""
        if self._start_step is None:
            self._start_step = step
            self._step_rate_origin = (now_s, step)
            # An adaptive policy takes the first snapshot at once, to measure its cost.
            self._appoint_due_s = now_s if self._commit_interval_s else now_s + self._interval_s

    def set_policy(self, policy: Every, now_s: float) -> None:
        """Appoints by this policy from now on."""
        self.policy = policy
        if self._start_step is not None:
            self._appoint_due_s = now_s + self._interval_s

    def set_intervals(self, local_s: float, store_s: float, now_s: float) -> None:
        """From now on a snapshot is appointed every `local_s`, and one is committed about every `store_s`."""
        self.policy = Every(seconds=local_s)
        self._commit_interval_s = store_s
        if self._start_step is not None and not self._retry_count:
            self._appoint_due_s = min(self._appoint_due_s, now_s + local_s)

    def require_commit(self, version: Version, why: SaveReason = SaveReason.SAVE) -> None:
        """A rank waits for the commit of that snapshot: it is not skipped. `why`: EXIT at the end of the block."""
        for attempt in self.attempts():
            if attempt.version == version and attempt.reason in (SaveReason.STEP, SaveReason.SAVE, SaveReason.DUE):
                attempt.reason = why

    def record_agent_restart(self, now_s: float) -> None:
        """This agent was restarted beside trainers at work."""
        self._is_resumed = True
        self.record_start(0, now_s)

    def end_takeover(self, now_s: float, inherited: Mapping[int, Version] | None = None) -> None:
        """After an agent restart: all ranks have joined, or are waited for no longer. The ranks hear that what they
        took for the former agent is lost, and a snapshot is appointed at the next boundary. `inherited`: see
        `inherited_versions`."""
        self.is_taking_over, self.inherited_versions = False, dict(inherited or {})
        for slot in self.inherited_versions:
            self.take_lease(slot)
        if self.policy.seconds is not None:
            self._appoint_due_s = now_s
        self._actions.append(NotifyRanks({"t": "known-versions", "versions": []}))

    def reconnect_messages(self) -> list[dict[str, Any]]:
        """The messages for a rank that reconnects: the versions still held, and the level messages that it may have
        missed."""
        # In a takeover there are none: `end_takeover` tells all ranks.
        if self.is_taking_over:
            return []
        versions = {attempt.version for attempt in self.attempts() if not attempt.miss_reason}
        versions |= {version for version, _ in self._level_messages}
        known = {"t": "known-versions", "versions": sorted(map(str, versions))}
        return [known, *({**body, "repeated": True} for body in self._level_messages.values())]

    def record_staging(
        self, rank: int, number: int, version: Version, slot: int, division: str, stall_s: float
    ) -> None:
        """The rank has staged its snapshot for that save attempt. `stall_s`: the pause of its training."""
        attempt = self._attempt_of(number, SlotState.GRANTED)
        if attempt is None:
            # The attempt was withdrawn while this rank staged: only this rank expects a result.
            if number in self._abandoned_attempts:
                self._report_level(version, "local", False, "it was given up meanwhile")
            return
        if (attempt.version, attempt.slot, attempt.division) != (version, slot, division):
            attempt.miss_reason = (
                attempt.miss_reason or f"rank {rank} staged {version} in slot {slot} under another plan"
            )
        attempt.staged_ranks.setdefault(rank, stall_s)

    def record_miss(self, rank: int, number: int, why: str, updates: tuple[int, int] = (0, 0)) -> None:
        """The rank cannot stage that save attempt. `why`: "late", WAITING or AMID, or a text. `updates`: a step with an
        optimizer update, and the steps from one update to the next; 0: unknown."""
        attempt = self._attempt_of(number, SlotState.GRANTED)
        if attempt is None:
            return
        if why == "late":
            self._latency_s = min(2 * self._latency_s, LATENCY_S_MAX)
        elif why == GRADIENTS_WAIT:
            self.step_timing.update_cycle = updates
        elif why == MID_STEP:
            self.step_timing.unpollable_step = attempt.version.step + 1
        if why in ("late", MID_STEP) and attempt.version.sub:
            self.step_timing.record_missed_poll(attempt.version.step + 1)
        attempt.miss_reason = attempt.miss_reason or f"rank {rank} missed it ({why})"

    def record_save_request(
        self,
        rank: int,
        version: Version,
        why: SaveReason,
        metrics: dict[str, float],
        request: Request,
        same: Version | None = None,
    ) -> None:
        """The rank asks to save that version; see `SaveRequest`."""
        former = self._save_requests.get(rank)
        # The rank has gone on from its former request, which is refused.
        if former is not None and former.request != request:
            self._actions.append(Refuse(former.request, "not-staged", f"the rank asks for {version} now"))
        self._save_requests[rank] = SaveRequest(version, why, metrics, request, same)

    def record_unsavable(self, rank: int, version: Version, why: str) -> None:
        """The rank cannot save that version, or has given it up; the others ask for it."""
        self._unsavable_versions[rank] = version, why
        for attempt in self._open_attempts():
            if attempt.version == version and rank not in attempt.staged_ranks:
                attempt.miss_reason = attempt.miss_reason or f"rank {rank} missed it ({why})"

    def record_leave_request(self, rank: int, request: Request, in_order: bool = True, insists: bool = False) -> None:
        """The rank asks to leave. `in_order`: it ended its block or was told to leave; else by an exception. Only the
        first call for the rank counts for that. `insists`: if its connection breaks, it comes back for the answer."""
        member = self.rank_states[rank]
        member.leave_request, member.can_retry_leave = request, insists
        if member.presence is Presence.HERE:
            member.presence, member.has_failed = Presence.LEFT, not in_order

    def record_assembly(self, slot: int, number: int, error: str) -> None:
        """Outcome of `Assemble`. `error`: "" if the checkpoint is complete."""
        attempt = self.slots[slot].attempt
        if attempt is None or attempt.state is not SlotState.STAGED or attempt.number != number:
            return
        if error:
            attempt.state, attempt.miss_reason = SlotState.GRANTED, error
            return
        attempt.state = SlotState.COMPLETE
        self._latency_s = max(self._latency_s / 2, LATENCY_S)
        self._retry_count = 0
        self.step_timing.record_completion()
        self._report_level(attempt.version, "local", True, "")
        if self._commit_interval_s and not self._has_reported_first:
            self._has_reported_first = True
            step, next_s = attempt.version.step, self._interval_s
            text = f"ckpt: step {step} is the first checkpoint; the next one is due {format_duration(next_s)} later"
            self._actions.append(Emit("policy.first", text, False, {"step": step, "next_s": next_s}))

    def record_commit(self, slot: int, error: str, now_s: float, passes: bool = False) -> None:
        """Outcome of `Commit`. `error`: "" if the record is in the store. `passes`: the error is transient.
        Ranks that wait for this commit at their end then hear of no failure: the commit is tried again, and they decide
        how long to wait."""
        attempt = self.slots[slot].attempt
        assert attempt is not None  # the slot was leased
        self.committing_slot = None
        self.release_lease(slot)
        self._commit_failures = min(self._commit_failures + 1, 16) if error else 0
        self._retry_commit_s = now_s + min(2.0**self._commit_failures, RETRY_S_MAX) if error else math.inf
        attempt.commit_state = WorkState.FAILED if error else WorkState.DONE
        is_tried_again = error and passes and attempt.reason is SaveReason.EXIT and not self._is_rank_gone()
        if not is_tried_again:
            self._report_level(attempt.version, "store", not error, error)
        # The newest counts: an older checkpoint may be committed after a newer one.
        if not error:
            self.committed_version = max(attempt.version, self.committed_version or attempt.version)
        # After a success the error stays while the newest checkpoint's commit has failed.
        if error or self.newest_commit_state is not WorkState.FAILED:
            self.last_error = error

    def take_lease(self, slot: int) -> None:
        """Takes a lease on that slot, which is not reused before `release_lease`."""
        self.slots[slot].leases += 1

    def release_lease(self, slot: int) -> None:
        """Ends one lease on that slot."""
        self.slots[slot].leases -= 1

    def supersede(self, by: str) -> None:
        """The newer start `by` owns the run: this job saves nothing new."""
        if not self.superseded_by:
            self.superseded_by = by
            self._actions.append(NotifyRanks({"t": "superseded", "by": by}))

    def retry_commit(self) -> None:
        """Tries the last commit once more: all trainers are gone, and that commit failed or may fail. A superseded
        job commits too: the start that superseded it was given up, and this checkpoint is the newest."""
        self._is_orphaned = bool(self.superseded_by)
        if self.newest is not None:
            self.newest.is_last_try = False

    def stop_commits(self) -> None:
        """Begins no further last commit: what is uncommitted stays uncommitted."""
        self._is_commit_stopped = True

    def record_close(self) -> None:
        """Outcome of `Close`."""
        self.is_closed_in_store = True

    # -- queries

    @property
    def is_commit_failing(self) -> bool:
        """Whether the last commit failed."""
        return self._commit_failures > 0

    @property
    def usable_slot_count(self) -> int:
        """The number of slots in use that have fitting arenas or hold a snapshot."""
        return sum(slot.attempt is not None or self._has_fitting_arenas(slot) for slot in self._used_slots)

    def needs_arenas(self, slot: int, arena_bytes: tuple[int, ...]) -> bool:
        """Whether that slot is in use, and needs arenas of exactly these sizes."""
        return self.slots[slot] in self._used_slots and arena_bytes == self._needed_arena_bytes

    def attempts(self, *states: SlotState) -> list[SaveAttempt]:
        """The save attempts in the slots; if `states` are given, those in one of these states."""
        held = [slot.attempt for slot in self.slots if slot.attempt is not None]
        return [attempt for attempt in held if not states or attempt.state in states]

    @property
    def newest(self) -> SaveAttempt | None:
        """The newest complete checkpoint; None: there is none."""
        return max(self.attempts(SlotState.COMPLETE), key=lambda each: (each.version, each.slot), default=None)

    @property
    def has_uncommitted_newest(self) -> bool:
        """Whether this job is superseded and its newest complete checkpoint may still have to be committed."""
        return (
            bool(self.superseded_by)
            and not self._is_commit_stopped
            and self.newest_commit_state not in (None, WorkState.DONE)
        )

    @property
    def newest_commit_state(self) -> WorkState | None:
        """The outcome of the newest complete checkpoint's commit; None: there is no such checkpoint."""
        return self.newest.commit_state if self.newest is not None else None

    @property
    def all_gone(self) -> bool:
        """Whether every trainer that joined has left or died."""
        return self.rank_states.summary.all_gone

    @property
    def is_lost_cause(self) -> bool:
        """Whether training cannot go on: a rank is dead, or a newer start owns the run."""
        return bool(self.superseded_by) or self.rank_states.summary.any_dead

    @property
    def is_at_work(self) -> bool:
        """Whether work is under way that ends by itself: hashing, making arenas, a commit."""
        staged = any(slot.state is SlotState.STAGED or slot.is_making_arenas for slot in self.slots)
        return self.committing_slot is not None or staged

    def next_wake_s(self, now_s: float) -> float | None:
        """When `decide` has to run next without a new fact; None: not before one."""
        times = [now_s + MISSING_ANSWER_S for _ in self._open_attempts()]
        times += [now_s + 1.0] if self._save_requests or self._is_resumed else []
        lost = [m.disconnected_s for m in self.rank_states.summary.disconnected if m.presence is Presence.HERE]
        times += [lost_s + REJOIN_S for lost_s in lost if lost_s is not None]
        if now_s < self._appoint_due_s < math.inf and self._can_appoint() and not self._open_attempts():
            times.append(self._appoint_due_s)
        if now_s < self._retry_commit_s < math.inf:
            times.append(self._retry_commit_s)
        if self._commit_interval_s and self.committing_slot is None and self._commit_overdue_s() > now_s:
            times.append(self._commit_overdue_s())
        return min(times, default=None)

    # -- helpers

    @property
    def _slots_by_use(self) -> list[Slot]:
        """The slots, first those that hold something, then those with arenas. The last ones are closed first."""
        return sorted(
            self.slots,
            key=lambda slot: (
                slot.attempt is None and not slot.leases,
                not (slot.arena_bytes or slot.is_making_arenas),
                slot.number,
            ),
        )

    @property
    def _used_slots(self) -> list[Slot]:
        return self._slots_by_use[: self.slot_limit]

    def _has_fitting_arenas(self, slot: Slot) -> bool:
        """Whether the slot's arenas are large enough but not too large: the excess would never be freed."""
        # Asked at each decision, and there may be thousands of ranks: compared once per pair of tuples.
        has, need = slot.arena_bytes, self._needed_arena_bytes
        known = self._arena_fits.get(slot.number)
        if known is None or known[0] is not has or known[1] is not need:
            known = self._arena_fits[slot.number] = has, need, self._do_arenas_fit(has, need)
        return known[2]

    def _do_arenas_fit(self, arena_bytes: tuple[int, ...], needed_bytes: tuple[int, ...]) -> bool:
        if not len(arena_bytes) == len(needed_bytes) == self.world:
            return False
        sizes = zip(arena_bytes, needed_bytes, strict=True)
        return all(need <= has <= need + need // ARENA_SLACK_PARTS for has, need in sizes)

    @property
    def _interval_s(self) -> float:
        """Seconds between appointments. Steps named by `Every(steps=)` are not appointed: the ranks ask for them."""
        return math.inf if self.policy.seconds is None else self.policy.seconds

    def _commit_due_s(self) -> float:
        """Snapshots appointed from this time on are committed. Half a local interval early: no interval is exact."""
        return self._last_commit_opened_s + self._commit_interval_s - (self.policy.seconds or 0.0) / 2

    def _commit_overdue_s(self) -> float:
        """The time from which an earlier appointed snapshot is committed, because no later one came."""
        return self._commit_due_s() + (self.policy.seconds or 0.0)

    def _open_attempts(self) -> list[SaveAttempt]:
        """The save attempts that may still be abandoned."""
        return self.attempts(SlotState.GRANTED)

    def _attempt_of(self, number: int, *states: SlotState) -> SaveAttempt | None:
        return next((attempt for attempt in self.attempts(*states) if number and attempt.number == number), None)

    def _is_rank_gone(self) -> bool:
        """Whether a rank is gone: then no new save attempt can become complete."""
        return self.rank_states.summary.any_gone

    @property
    def _is_at_end(self) -> bool:
        """Whether all ranks have ended their blocks and staged their last snapshot: no further boundary comes."""
        staged = self.attempts(SlotState.STAGED, SlotState.COMPLETE)
        return any(attempt.reason is SaveReason.EXIT for attempt in staged)

    @property
    def has_division(self) -> bool:
        """Whether there is a division of the ranks' present layouts."""
        return bool(self.division) and self._divided_layouts_version == self.layouts_version

    def _can_appoint(self) -> bool:
        """Whether the job's state allows an appointment. Due times, free slots and other attempts are checked apart."""
        if (
            self._start_step is None
            or self._is_resumed
            or self._is_rank_gone()
            or self.superseded_by
            or self._leave_attempt_number
        ):
            return False
        if self._is_end_ordered or self._is_at_end:
            return False
        if self.rank_states.summary.disconnected:
            return False  # a rank without a connection could not answer
        return self.has_division and not any(attempt.is_verdict_pending for attempt in self.attempts())

    def _report_level(self, version: Version, level: str, ok: bool, message: str) -> None:
        body = {
            "t": "checkpoint-level",
            "version": str(version),
            "level": level,
            "ok": ok,
            "message": message,
            "step": version.step,
        }
        self._actions.append(NotifyRanks(body))
        self._level_messages.pop((version, level), None)
        self._level_messages[version, level] = body
        if len(self._level_messages) > LEVEL_MESSAGES_MAX:
            del self._level_messages[next(iter(self._level_messages))]
