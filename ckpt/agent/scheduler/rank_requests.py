"""The requests of one job's ranks, to save and to leave. Pure.

- All ranks ask to save one version, and get one answer: by a call of ck.save(), at a step that the policy names, or at
  the end of the block. Answers are repeated to a rank that asks again.
- Ranks that leave are answered once what they staged is settled. When all are gone the epoch is closed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt.agent.preemption.preemption import ExitOrder
from ckpt.agent.scheduler.commit_queue import CommitQueue
from ckpt.agent.scheduler.save_attempts import SaveAttempts
from ckpt.agent.scheduler.slot_allocator import SlotAllocator
from ckpt.agent.state.actions import AnswerRequest, Close, Emit, Refuse, ReportProgress, Request
from ckpt.agent.state.job_facts import MISSING_ANSWER_S, JobFacts
from ckpt.agent.state.rank_presence import LEAVE_RETRY, Presence
from ckpt.agent.state.replica_state import ReplicaState
from ckpt.agent.state.slots import SaveAttempt, SaveReason, SlotState, WorkState
from ckpt.types import Version

PROGRESS_PERIOD_S = 1.0  # between two progress reports to ranks that wait for a slot
# Ranks wait this long in a save for others before the others are named.
MISSING_RANKS_S = 10.0


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """One rank's request to save. `equal_version`: a version already staged whose bytes equal the rank's present
    state."""

    version: Version
    reason: SaveReason
    request: Request
    equal_version: Version | None = None


@dataclass(frozen=True, slots=True)
class AnsweredSave:
    """The newest answered save. `kind`, `message`: the error for a rank that repeats the request when its snapshot is
    gone."""

    version: Version
    kind: str
    message: str


@dataclass(eq=False)
class SaveRequests:
    """The save requests of one job, by rank."""

    _facts: JobFacts
    _allocator: SlotAllocator
    _commits: CommitQueue
    _attempts: SaveAttempts
    answered: AnsweredSave | None = None  # saves up to its version are answered
    _requests: dict[int, SaveRequest] = field(default_factory=dict)  # by rank
    # By rank: the newest version that it cannot save, and the reason.
    _unsavable: dict[int, tuple[Version, str]] = field(default_factory=dict)
    _all_saving_since_s: float | None = None  # since when all ranks wait in a save
    # Since when some ranks wait in a save for others; inf: the others were named in an event.
    _partial_since_s: float | None = None
    _last_progress_s: float = -math.inf  # last progress message to ranks that wait for a slot

    @property
    def is_any_waiting(self) -> bool:
        """Whether a rank waits in a save."""
        return bool(self._requests)

    # -- facts

    def record_save_request(
        self, rank: int, version: Version, why: SaveReason, request: Request, same: Version | None = None
    ) -> None:
        """The rank asks to save that version. `same`: see `SaveRequest.equal_version`."""
        former = self._requests.get(rank)
        # The rank has gone on from its former request, which is refused.
        if former is not None and former.request != request:
            self._facts.actions.append(Refuse(former.request, "not-staged", f"the rank asks for {version} now"))
        self._requests[rank] = SaveRequest(version, why, request, same)

    def record_unsavable(self, rank: int, version: Version, why: str) -> None:
        """The rank cannot save that version, or has given it up; the others ask for it. None waits for it any more."""
        self._unsavable[rank] = version, why
        if self.answered is None or version > self.answered.version:
            self.answered = AnsweredSave(version, "save-failed", f"rank {rank} cannot save {version}: {why}")
        for attempt in self._facts.slots.open_attempts:
            if attempt.version == version and rank not in attempt.staged_ranks:
                attempt.miss(f"rank {rank} missed it ({why})")

    def forget_request(self, rank: int) -> None:
        """The connection of that rank's request has ended."""
        self._requests.pop(rank, None)

    # -- decisions

    def grant(self, now_s: float, steps: Sequence[int]) -> None:
        """Answers what can be answered. `steps`: see `Scheduler.decide`."""
        self._repeat_answers()
        if len(self._requests) < self._facts.world:
            self._all_saving_since_s = None
        elif self._all_saving_since_s is None:
            self._all_saving_since_s = now_s
        self._report_missing_ranks(now_s)
        if not self._requests:
            return
        refusal = self._refusal(now_s, steps)
        if refusal is not None:
            self._refuse(*refusal)
        elif self._has_differing_exits():
            self._refuse_older()
        elif len(self._requests) == self._facts.world:
            self._grant_all(now_s)
        self._report_due_progress(now_s)

    def _refusal(self, now_s: float, steps: Sequence[int]) -> tuple[str, str] | None:
        """Why no rank can save now: the kind of error and the message; None: all may."""
        facts, requests = self._facts, self._requests
        if facts.superseded_by:
            return "superseded", f"a newer start, {facts.superseded_by}, owns the run"
        if facts.any_gone:
            gone = next(m.rank for m in facts.rank_states if m.presence is not Presence.HERE)
            return "save-failed", f"{facts.describe_absence(gone)}: no rank can save without it"
        if (away := self._unreachable_rank(now_s)) is not None:
            return "save-failed", f"rank {away} cannot be reached, and training does not wait for it"
        if self._has_differing_exits():
            return None
        if len({save.version for save in requests.values()}) > 1:
            asked = ", ".join(f"rank {rank} {save.version}" for rank, save in sorted(requests.items()))
            what = "the block has to be ended" if self._has_only_exits() else "ck.save() has to be called"
            return "usage", f"{what} by all ranks at the same step; asked: {asked}"
        if len(requests) < facts.world:
            return self._stray_refusal(steps)
        return ("save-failed", facts.arenas.refusal_reason) if facts.arenas.refusal_reason else None

    def _stray_refusal(self, steps: Sequence[int]) -> tuple[str, str] | None:
        """As `_refusal`, where some ranks ask for one version: because of a rank that has passed that version."""
        first, version = next((rank, save.version) for rank, save in self._requests.items())
        astray = self._rank_past_failed_save(version)
        if astray is not None:
            gone_on = f"rank {astray} has gone on from {self._unsavable[astray][0]}, which failed, and not to {version}"
            return "usage", f"ck.save() has to be called by all ranks at the same step; {gone_on}"
        absent = (rank for rank in range(self._facts.world) if rank not in self._requests)
        passed = next((rank for rank in absent if steps[rank] > version.step + 1), None)
        if passed is None:
            return None
        if self._has_only_exits():
            return "usage", f"rank {first} ended the block after step {version.step}, and rank {passed} went past that"
        return "usage", f"rank {passed} went past {version} without calling ck.save()"

    def _report_due_progress(self, now_s: float) -> None:
        """Once a second tells ranks in a policy-due save that it is still under way. Without that message they train
        on."""
        if now_s >= self._last_progress_s + PROGRESS_PERIOD_S:
            self._last_progress_s = now_s
            due = (save for save in self._requests.values() if save.reason is SaveReason.DUE)
            self._facts.actions.extend(ReportProgress(save.request) for save in due)

    def _unreachable_rank(self, now_s: float) -> int | None:
        """A rank that has been unreachable for MISSING_ANSWER_S while policy-due saves wait; else None."""
        if not any(save.reason is SaveReason.DUE for save in self._requests.values()):
            return None
        lost = ((m.rank, m.disconnected_s) for m in self._facts.rank_states.summary.disconnected)
        return next((rank for rank, lost_s in lost if lost_s is not None and now_s >= lost_s + MISSING_ANSWER_S), None)

    def _rank_past_failed_save(self, version: Version) -> int | None:
        """A rank that saw another save of this step fail and apparently went on; else None. The ranks that wait may
        keep that rank inside the next step for ever. Saves at the end of the block are excluded: all ranks ask for them
        again, however long it takes."""
        if self._partial_since_s != math.inf or self._has_only_exits():
            return None
        gave_up = ((rank, at) for rank, (at, _) in self._unsavable.items() if rank not in self._requests)
        return next((rank for rank, at in gave_up if at.step == version.step and at < version), None)

    def _has_differing_exits(self) -> bool:
        """Whether ranks at the end of their blocks ask for different versions of one step. Some then saw an attempt
        fail that others did not, for example since one node's agent restarted."""
        versions = {save.version for save in self._requests.values()}
        return len(versions) > 1 and self._has_only_exits() and len({version.step for version in versions}) == 1

    def _has_only_exits(self) -> bool:
        return all(save.reason is SaveReason.EXIT for save in self._requests.values())

    def _report_missing_ranks(self, now_s: float) -> None:
        """Reports once which ranks have not come to a save that others wait in. They may never come."""
        requests = self._requests
        absent = [rank for rank in range(self._facts.world) if rank not in requests] if requests else []
        if not absent:
            self._partial_since_s = None
        elif self._partial_since_s is None:
            self._partial_since_s = now_s
        elif now_s - self._partial_since_s >= MISSING_RANKS_S:
            self._partial_since_s = math.inf
            version = next(iter(requests.values())).version
            more = f" and {len(absent) - 8} more" * (len(absent) > 8)
            who = f"rank {absent[0]} has" if len(absent) == 1 else f"ranks {absent[:8]}{more} have"
            what = "ck.save() and the end of the block are for all ranks, at the same step"
            text = f"the other ranks wait to save {version}: {who} not come to it for {MISSING_RANKS_S:.0f} s. {what}"
            data = {"version": str(version), "ranks": absent[:100]}
            self._facts.actions.append(Emit("save.awaited", text, True, data))

    def _refuse_older(self) -> None:
        """Refuses the saves of older versions; those ranks then ask for the next version."""
        newest = max(save.version for save in self._requests.values())
        for rank in [rank for rank, save in self._requests.items() if save.version < newest]:
            save = self._requests.pop(rank)
            message = f"the snapshot at {save.version} was given up: other ranks ask for {newest}"
            self._facts.actions.append(Refuse(save.request, "not-staged", message))

    def _repeat_answers(self) -> None:
        """Answers a rank that asks again with the same outcome: its first answer was lost, or it comes after a
        refusal."""
        answered, actions = self.answered, self._facts.actions
        for rank, save in list(self._requests.items()):
            if answered is None or save.version > answered.version:
                continue
            del self._requests[rank]
            wanted = save.version, save.equal_version
            attempt = next((each for each in self._facts.slots.attempts() if each.version in wanted), None)
            if attempt is None or attempt.miss_reason:
                why = answered.message if save.version == answered.version else ""
                message = why or f"the snapshot at {save.version} was given up"
                actions.append(Refuse(save.request, answered.kind, message))
            elif attempt.state is SlotState.GRANTED and rank not in attempt.staged_ranks:
                actions.append(AnswerRequest(save.request, _stage_answer(attempt)))
            else:
                actions.append(AnswerRequest(save.request, _saved_answer(attempt)))

    def _grant_all(self, now_s: float) -> None:
        """Grants the version that all ranks ask for, or adopts its snapshot, or has the ranks wait for a slot."""
        slots, first = self._facts.slots, self._requests[0]
        version, same = first.version, {save.equal_version for save in self._requests.values()}
        # Snapshots of these versions equal the present state.
        holding = {version, *same} if len(same) == 1 else {version}
        for attempt in slots.attempts(SlotState.STAGED, SlotState.COMPLETE):
            if attempt.version in holding:
                self._adopt(attempt)
                return
        waited = self._all_saving_since_s is not None and now_s - self._all_saving_since_s >= MISSING_ANSWER_S
        # All ranks wait in this save, so answers about earlier versions that are still missing were lost.
        for earlier in slots.open_attempts:
            if waited and earlier.version <= version:
                earlier.miss("all ranks are past it")
        appointed = next((attempt for attempt in slots.open_attempts if attempt.version == version), None)
        if appointed is not None and appointed.staged_ranks:
            return  # this version is being staged: it need not be taken twice
        waiting = [
            each
            for each in slots.attempts()
            if self._commits.must_be_stored(each) and each.commit_state is WorkState.NEW
        ]
        # Later attempts that no rank has staged do not count: they wait for the ranks, which wait here.
        if any(each.version <= version or each.staged_ranks for each in waiting) or not self._facts.arenas.has_division:
            return
        free = self._allocator.find_free()
        if (free is None or appointed is not None) and self._attempts.withdraw(now_s, lambda _: True):
            # All ranks wait in this save, so none has acted on that appointment, or will.
            free = self._allocator.find_free()
        if free is None:
            return
        self._answer(_stage_answer(self._attempts.open(free, first.reason, version, now_s)))

    def _adopt(self, attempt: SaveAttempt) -> None:
        """Uses a snapshot that is staged already for the save that all ranks ask for. It must now reach the store like
        any explicit save."""
        levels = self._facts.levels
        if attempt.reason is not SaveReason.HOLD:
            attempt.reason = self._requests[0].reason
        if attempt.commit_state is WorkState.FAILED:
            attempt.commit_state = WorkState.NEW
        if attempt.replication_state is WorkState.FAILED:
            attempt.replication_state = WorkState.NEW
        # The saving rank forgets earlier failures, so an earlier success is reported again.
        for level, state in (("store", attempt.commit_state), ("peer", attempt.replication_state)):
            told = levels.find(attempt.version, level)
            levels.forget(attempt.version, level)
            if told is not None and state is WorkState.DONE:
                levels.report(attempt.version, level, told["ok"], told["message"])
        self._answer(_saved_answer(attempt))

    def _answer(self, body: dict[str, Any]) -> None:
        self._settle("save-failed", "")
        self._facts.actions.extend(AnswerRequest(save.request, body) for save in self._requests.values())
        self._requests.clear()

    def _refuse(self, kind: str, message: str) -> None:
        self._settle(kind, message)
        self._facts.actions.extend(Refuse(save.request, kind, message) for save in self._requests.values())
        self._requests.clear()

    def _settle(self, kind: str, message: str) -> None:
        self.answered = AnsweredSave(max(save.version for save in self._requests.values()), kind, message)

    def check(self) -> None:
        """Asserts the invariants of save requests between two decisions."""
        for rank, save in self._requests.items():
            assert 0 <= rank < self._facts.world
            is_new = self.answered is None or save.version > self.answered.version
            assert is_new or self._facts.is_frozen, f"rank {rank} waits for {save.version}, which is answered"


@dataclass(eq=False)
class LeaveRequests:
    """The leave requests of one job, which the ranks' states hold. `is_former_committing`: a former job still commits
    the checkpoint that this job continued from. Ranks that leave wait for it."""

    _facts: JobFacts
    _order: ExitOrder
    _commits: CommitQueue
    _replicas: ReplicaState
    is_former_committing: bool = False
    _is_closing: bool = False

    def may_join(self, rank: int) -> bool:
        """Whether the rank still belongs to the job. A rank that was away for long does until the epoch is being
        closed: before that nothing takes its place."""
        member = self._facts.rank_states[rank]
        # It waits to leave and has a new connection: its node's agent was restarted.
        waits = member.presence is Presence.LEFT and member.leave_request is not None
        returns = member.is_away and not self._is_closing
        return waits or ((member.presence is Presence.HERE or returns) and not self._facts.is_closed_in_store)

    def record_close(self) -> None:
        """Outcome of `Close`."""
        self._facts.is_closed_in_store = True

    def release(self, now_s: float) -> None:
        """Closes the epoch once all ranks are gone and everything is settled, and answers the ranks that leave."""
        facts, newest = self._facts, self._facts.slots.newest
        is_replicating = self._replicas.replicating_slot is not None and not self._needs_no_replicas
        if facts.slots.is_at_work or is_replicating or facts.slots.open_attempts:
            return
        if self.is_former_committing and newest is None:
            return
        is_stored = newest is None or newest.commit_state is WorkState.DONE
        unsaved = not (is_stored or facts.superseded_by or self._commits.is_stopped)
        if unsaved and self._commits.waits_for_agent(now_s):
            return  # the commit is tried again
        if facts.all_gone and not self._is_closing and not unsaved:
            self._is_closing = True
            dead = [m.rank for m in facts.rank_states if m.presence is Presence.DEAD]
            facts.actions.append(Close(f"ranks {dead[:8]} died" if dead else "left"))
        is_settled = facts.is_closed_in_store or unsaved or not facts.all_gone
        for member in facts.rank_states.summary.waiting_to_leave:
            returns = member.can_retry_leave and now_s < self._commits.rejoin_deadline_s(member)
            if returns or (member.disconnected_s is None and member.leave_request is LEAVE_RETRY):
                continue  # the rank gets its answer on its next connection
            if member.disconnected_s is not None:
                member.leave_request = None  # no rank waits for this answer any more
            elif is_settled:
                facts.actions.append(AnswerRequest(member.leave_request, self._answer()))
                member.leave_request = None

    @property
    def _needs_no_replicas(self) -> bool:
        """Whether all ranks left without a notice, none died, and the last step is stored."""
        facts = self._facts
        have_left = facts.all_gone and not facts.rank_states.summary.any_dead and self._order.report is None
        return have_left and facts.slots.newest_commit_state is WorkState.DONE

    def _answer(self) -> dict[str, str | None]:
        facts = self._facts
        error = facts.last_error or (f"superseded by {facts.superseded_by}" if facts.superseded_by else "")
        committed = str(facts.committed_version) if facts.committed_version else None
        return {"committed": committed, "error": error or None}

    def check(self) -> None:
        """Asserts the invariants of the end of the epoch."""
        facts = self._facts
        assert not self._is_closing or not facts.slots.open_attempts, "the epoch is closed, and ranks may be staging"


def _stage_answer(attempt: SaveAttempt) -> dict[str, Any]:
    return {"saved": False, "attempt": attempt.number, "slot": attempt.slot, "division": attempt.division}


def _saved_answer(attempt: SaveAttempt) -> dict[str, Any]:
    level = "store" if attempt.commit_state is WorkState.DONE else "local"
    return {"saved": True, "attempt": attempt.number, "level": level, "version": str(attempt.version)}
