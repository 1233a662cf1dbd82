"""The commit queue of one job: which complete checkpoint is committed next. Pure.

- At most one commit runs. Explicit saves, holds and the newest attempt wait their turn. An appointed attempt that a
  newer one overtakes skips the store.
- A running commit is cancelled only if the last snapshot before a deadline would otherwise be stored too late.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckpt.agent.preemption.exit_vote import END_S
from ckpt.agent.preemption.preemption import ExitOrder, Preemption
from ckpt.agent.state.actions import CancelCommit, Commit
from ckpt.agent.state.job_facts import JobFacts, SnapshotClock
from ckpt.agent.state.rank_presence import REJOIN_S, RankState
from ckpt.agent.state.replica_state import ReplicaState
from ckpt.agent.state.slots import Backoff, SaveAttempt, SaveReason, SlotState, WorkState
from ckpt.policy.save_options import STEPS_APART
from ckpt.types import Version


@dataclass(eq=False)
class CommitQueue:
    """The commits of one job."""

    _facts: JobFacts
    _clock: SnapshotClock
    _order: ExitOrder
    _preemption: Preemption
    _replicas: ReplicaState
    is_stopped: bool = False  # no last commit begins any more
    _is_orphaned: bool = False  # superseded, but its newest complete snapshot is to be committed once
    _is_cancelled: bool = False  # the newest commit, for the last snapshot before a deadline
    _backoff: Backoff = field(default_factory=Backoff)
    _last_opened_s: float = -math.inf  # when the snapshot of the newest commit was appointed

    # -- facts

    def record_commit(self, slot: int, error: str, now_s: float, passes: bool = False) -> None:
        """Outcome of `Commit`. `error`: "" if the record is in the store. `passes`: the error is transient.
        Ranks that wait for this commit at their end then hear of no failure: the commit is tried again, and they decide
        how long to wait."""
        facts, attempt = self._facts, self._facts.slots[slot].attempt
        assert attempt is not None  # the slot was leased
        facts.slots.release_lease(slot)
        self._backoff.record(bool(error), now_s)
        attempt.commit_state = WorkState.FAILED if error else WorkState.DONE
        is_tried_again = error and passes and attempt.reason is SaveReason.EXIT and not facts.any_gone
        if not is_tried_again:
            self.report(attempt.version, error)
        # After a success the error stays while the newest checkpoint's commit has failed.
        if error or facts.slots.newest_commit_state is not WorkState.FAILED:
            facts.last_error = error
        if error and self.waits_for_agent(now_s):
            attempt.is_last_try = False  # the lost node could not write its part
        if not error:
            facts.record_committed(attempt.version)
            facts.save_estimate.record_commit(attempt, now_s)

    def retry(self) -> None:
        """Tries the last commit once more: all trainers are gone, and that commit failed or may fail. A superseded
        job commits too: the start that superseded it was given up, and this checkpoint is the newest."""
        self._is_orphaned = bool(self._facts.superseded_by)
        if self._facts.slots.newest is not None:
            self._facts.slots.newest.is_last_try = False

    def stop(self) -> None:
        """Begins no further last commit: what is uncommitted stays uncommitted."""
        self.is_stopped = True

    def report(self, version: Version, error: str) -> None:
        """Tells the ranks that the version is committed; `error`: or why it is not."""
        self._facts.levels.report(version, "store", not error, error)
        # Without replication nothing else answers a rank that waits for "peer".
        if error and not self._replicas.is_replication_on:
            why = f"no other node keeps copies, and the store has none: {error}"
            self._facts.levels.report(version, "peer", False, why)

    # -- queries

    @property
    def is_failing(self) -> bool:
        """Whether the last commit failed."""
        return self._backoff.failures > 0

    @property
    def has_uncommitted_newest(self) -> bool:
        """Whether this job is superseded and its newest complete checkpoint may still have to be committed."""
        is_open = self._facts.slots.newest_commit_state not in (None, WorkState.DONE)
        return bool(self._facts.superseded_by) and not self.is_stopped and is_open

    @property
    def is_awaited(self) -> bool:
        """Whether no slot becomes free before the newest checkpoint is committed: there is one slot only; or, of two,
        the other holds the newest replicated checkpoint, and replication of the newest failed or is off."""
        newest, safe, slot_limit = self._facts.slots.newest, self._replicas.replicated, self._facts.arenas.slot_limit
        if slot_limit != 2 or newest is None or safe is None or safe is newest:
            return slot_limit == 1
        return newest.replication_state is WorkState.FAILED or not self._replicas.is_replication_on

    def is_waiting(self, attempt: SaveAttempt) -> bool:
        """Whether the attempt waits to be committed and must not be skipped."""
        is_new = attempt.state is SlotState.COMPLETE and attempt.commit_state is WorkState.NEW
        return is_new and self.must_be_stored(attempt)

    def must_be_stored(self, attempt: SaveAttempt) -> bool:
        """Whether the attempt must reach the store even if newer ones exist. A policy-due save need not while the store
        fails or it is time to leave, since training would wait for its slot."""
        is_spared = attempt.reason is SaveReason.DUE and (self.is_failing or self._preemption.is_time_to_leave)
        return attempt.is_explicit and not is_spared

    def waits_for_agent(self, now_s: float) -> bool:
        """Whether the last commit waits for a lost agent to restart. Its node has a rank that waits to leave, and a
        part to write. False if the checkpoint is replicated, or if the agent is late."""
        attempt = self._facts.slots.newest
        if attempt is None or attempt.replication_state is WorkState.DONE or self.is_stopped:
            return False
        return any(now_s < at_s for at_s in self._rejoin_deadlines_s)

    @property
    def _rejoin_deadlines_s(self) -> list[float]:
        lost = self._facts.rank_states.summary.disconnected
        return [self.rejoin_deadline_s(member) for member in lost if member.leave_request is not None]

    def rejoin_deadline_s(self, member: RankState) -> float:
        """The time until which a rank that waits to leave may rejoin; -math.inf: it is connected, or the job is
        superseded."""
        if member.disconnected_s is None or self._facts.superseded_by:
            return -math.inf
        by_s = math.inf if self._order.deadline_s is None else self._order.deadline_s - END_S
        return min(member.disconnected_s + REJOIN_S, by_s)

    @property
    def _due_s(self) -> float:
        """Snapshots appointed from this time on are committed. Half a local interval early: no interval is exact."""
        return self._last_opened_s + self._clock.commit_interval_s - (self._clock.policy.seconds or 0.0) / 2

    @property
    def _overdue_s(self) -> float:
        """The time from which an earlier appointed snapshot is committed, because no later one came. The later one is
        appointed some steps ahead."""
        ahead_s = (STEPS_APART + 1) * self._facts.step_timing.usual_step_s
        return self._due_s + (self._clock.policy.seconds or 0.0) + ahead_s

    def wake_times(self) -> Iterator[float]:
        """When a decision may be due without a new fact."""
        yield self._backoff.retry_s
        yield from self._rejoin_deadlines_s
        if self._clock.commit_interval_s and self._facts.slots.committing_slot is None:
            yield self._overdue_s

    # -- decisions

    def cancel_blocking(self, now_s: float) -> None:
        """Cancels the running commit if it keeps the last snapshot from being stored in time."""
        slot = self._facts.slots.committing_slot
        running = self._facts.slots[slot].attempt if slot is not None else None
        if running is not None and not self._is_cancelled and self._delays_last_commit(running, now_s):
            self._is_cancelled = True
            self._facts.actions.append(CancelCommit())

    def _delays_last_commit(self, older: SaveAttempt, now_s: float) -> bool:
        """Whether the commit of `older` keeps the last snapshot, at which all ranks leave, out of the store. The last
        commit would fit alone and not behind the other, by measured times. If both fit, or neither, the older one goes
        first: it may be all that is saved."""
        last, deadline_s = self._facts.slots.newest, self._preemption.deadline_s(now_s)
        took = self._facts.save_estimate.save
        if last is None or last is older or took is None or deadline_s is None or self._facts.superseded_by:
            return False
        if last.reason is not SaveReason.HOLD or not last.verdict or last.commit_state is not WorkState.NEW:
            return False
        began_s = older.times.commit_began_s if older.commit_state is WorkState.RUNNING else None
        before_s = max(0.0, took.estimate_s(older.memory_bytes) - (0.0 if began_s is None else now_s - began_s))
        last_s = took.estimate_s(last.memory_bytes)
        return last_s <= deadline_s - now_s < before_s + last_s

    def commit_next(self, now_s: float) -> None:
        """Begins the next commit."""
        facts, newest = self._facts, self._facts.slots.newest
        if facts.slots.committing_slot is not None or (facts.superseded_by and not self._is_orphaned):
            return
        if self._is_orphaned:
            self._is_orphaned = False
            if self.has_uncommitted_newest and newest is not None:
                self._begin(newest, now_s)
            return
        waiting = [attempt for attempt in facts.slots.attempts() if self.is_waiting(attempt)]
        chosen = min(waiting, key=lambda each: each.version, default=None)
        if chosen is not None and self._delays_last_commit(chosen, now_s):
            chosen = newest
        if chosen is None and newest is not None and self._is_newest_due(newest, now_s):
            chosen = newest
        if chosen is not None:
            chosen.is_last_try = chosen.is_last_try or facts.any_gone
            self._begin(chosen, now_s)

    def _is_newest_due(self, newest: SaveAttempt, now_s: float) -> bool:
        """Whether the newest attempt is committed now, or once more."""
        any_gone = self._facts.any_gone
        no_more = any_gone and not self._facts.slots.attempts(SlotState.GRANTED, SlotState.STAGED)
        if newest.commit_state is WorkState.NEW:
            return no_more or self._is_commit_due(newest, now_s)
        if newest.commit_state is not WorkState.FAILED:
            return False
        if no_more and not newest.is_last_try and not self.is_stopped and not self.waits_for_agent(now_s):
            return True
        soon = self.is_awaited or not (any_gone or self._preemption.would_delay_last_snapshot(now_s))
        # An older one may have been stored since.
        return soon and (now_s >= self._backoff.retry_s or not self.is_failing)

    def _is_commit_due(self, attempt: SaveAttempt, now_s: float) -> bool:
        """Whether the policy wants this appointed attempt committed. Each attempt is, if slots are stuck or it is time
        to leave."""
        if self.is_awaited or self.must_be_stored(attempt):
            return True
        if self._preemption.would_delay_last_snapshot(now_s):
            return False
        if not self._clock.commit_interval_s or self._preemption.is_due(now_s):
            return True
        if self._preemption.extra.is_commit_due(attempt.version, self._facts.committed_version):
            return True
        late = now_s >= min(self._overdue_s, self._backoff.retry_s)  # the commit whose turn it was has failed
        return late or attempt.times.opened_s >= self._due_s

    def _begin(self, attempt: SaveAttempt, now_s: float) -> None:
        attempt.commit_state, attempt.times.commit_began_s = WorkState.RUNNING, now_s
        self._is_cancelled = False
        self._last_opened_s = attempt.times.opened_s
        self._facts.slots.take_lease(attempt.slot)
        self._facts.actions.append(Commit(attempt.slot, attempt.version))

    def check(self) -> None:
        """Asserts the invariants of commits."""
        slots = self._facts.slots
        running = [each for each in slots.attempts() if each.commit_state is WorkState.RUNNING]
        assert len(running) <= 1, "two commits at once"
        assert all(slots[each.slot].leases for each in running), "what is committed may be overwritten"
        assert not self._is_cancelled or self._order.is_given, "a commit was cancelled, and no rank leaves"
