"""The scheduler of one job: decides when to take a snapshot, into which slot, and what to replicate and commit.

It is a pure state machine without I/O, threads or a clock. Facts come in as method calls that only record.
`decide(now_s, steps)` looks at all facts and returns a list of actions. The agent carries them out and reports their
outcomes as facts. How often to save comes from state/cost_model.py. Invariants:
- A slot holds one save attempt, and an attempt one version. A new attempt gets only a free slot. A slot is not free
  while its attempt is open or a lease on it is held.
- An attempt is complete only when every rank staged it for the same version, slot and division, and it was assembled.
- A version that one rank missed, or can no longer stage, is abandoned for all ranks at once. A rank that asks later is
  told so.
- The newest complete attempt stays until a newer one is complete; with one slot, until it is committed itself.
- The newest replicated attempt stays until a newer one is replicated. If replication is off, or slots run out after it
  failed, it stays until a newer one is committed.
- At most one commit runs. Explicit saves, holds and the newest attempt wait their turn. An appointed attempt that a
  newer one overtakes skips the store.
- A running commit is cancelled only if the last snapshot before a deadline would otherwise be stored too late.
- No decision rests on a time-out alone; an observed fact is always part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ckpt.agent.preemption.exit_vote import ExitVote
from ckpt.agent.state.actions import (
    Action,
    AnswerRequest,
    Assemble,
    CancelCommit,
    ClearSlot,
    Close,
    CloseArenas,
    Commit,
    Divide,
    DropReplicas,
    Emit,
    MakeArenas,
    OfferSlot,
    Refuse,
    ReplicaDegraded,
    Replicate,
    ReportProgress,
    SetWord,
)
from ckpt.agent.state.job_facts import (
    LATENCY_S,
    MISSING_ANSWER_S,
    REJOIN_S,
    RETRY_S_MAX,
    AnsweredSave,
    SaveAttempt,
    SaveReason,
    Slot,
    SlotState,
    WorkState,
)
from ckpt.agent.state.rank_presence import LEAVE_RETRY, Presence
from ckpt.agent.state.replica_state import NO_PEER_MEMORY
from ckpt.agent.state.step_timing import REPORT_DELAY_S
from ckpt.ipc.control_page import ATTEMPT_MAX, SUB_MAX, ControlWord, WordKind
from ckpt.policy.save_options import STEPS_APART
from ckpt.types import Version, format_count

# In steps or polls: two announcements may be late before a rank misses one.
LEAD_MIN = STEPS_APART - 1
NEAR_MARGIN = 0.1  # of a step: steps vary in time
PROGRESS_PERIOD_S = 1.0  # between two progress reports to ranks that wait for a slot
# Ranks wait this long in a save for others before the others are named.
MISSING_RANKS_S = 10.0
# A silent rank this many steps past a version has staged it or never will.
LOST_STEPS = 3


class Scheduler(ExitVote):
    """The scheduler of one job: its facts, and the decisions that follow. Not thread-safe; for the agent's main
    thread."""

    def decide(
        self,
        now_s: float,
        steps: Sequence[int],
        polls: Sequence[int] = (),
        since_s: Sequence[float | None] = (),
    ) -> list[Action]:
        """All actions that follow from the known facts. `steps`: the step that each rank has published as entered; 0:
        none yet. `polls`: each rank's polls and saves since its last ended step; empty: none. `since_s`: when each rank
        entered its step; None or empty: unknown."""
        saved = self._answered_save.version if self._answered_save is not None else None
        self.step_timing.record_progress(now_s, steps, polls, since_s, saved)
        self._update_notices(now_s, steps)
        self._end_hopeless_waits(now_s)
        self._apply_earlier_deadline(now_s)
        self._abandon_hopeless(now_s, steps)
        self._judge_holds(now_s)
        self._query_late_ranks(now_s)
        self._answer_unknown_holds(now_s)
        self._assemble_staged()
        self._release_inherited_slots()
        if not (self.is_frozen or self.is_survey_pending):
            self._free_superseded_slots()
            self._release_peer_replicas()
        if not self.is_frozen:
            self._replicate_newest(now_s)
        self._cancel_blocking_commit(now_s)
        self._commit_next(now_s)
        if not self.is_frozen:
            self._plan_and_make_arenas(now_s)
            self._grant_saves(now_s, steps)
            self._appoint_snapshot(now_s, steps)
        self._report_outcome(now_s)
        self._release_leaving_ranks(now_s)
        self._acknowledge_next(now_s)
        out, self._actions = self._actions, []
        return out

    def _abandon_hopeless(self, now_s: float, steps: Sequence[int]) -> None:
        for member in self.rank_states.summary.disconnected:
            for_long = self.superseded_by or (
                member.disconnected_s is not None and now_s >= member.disconnected_s + REJOIN_S
            )
            if for_long and member.presence is Presence.HERE:
                member.presence, member.is_away = Presence.LEFT, True
        for attempt in self._open_attempts():
            any_gone, is_late = self._is_rank_gone(), now_s - attempt.opened_s >= MISSING_ANSWER_S
            waiting = [r for r in range(self.world) if r not in attempt.staged_ranks] if any_gone or is_late else []
            away = waiting if any_gone else ()
            gone = next((r for r in away if self.rank_states[r].presence is not Presence.HERE), None)
            silent = [r for r in waiting if is_late and steps[r] >= attempt.version.step + LOST_STEPS]
            why = attempt.miss_reason
            if not why and self.superseded_by:
                why = f"a newer start, {self.superseded_by}, owns the run"
            elif not why and gone is not None:
                why = f"rank {gone} {self._describe_absence(gone)} before it had staged it"
            elif not why and silent:
                why = f"rank {silent[0]} has passed that step without an answer"
            if why:
                self._abandon_attempt(attempt, why, now_s)

    def _judge_holds(self, now_s: float) -> None:
        """Decides for each open hold whether the ranks leave or go on. In this order:

        - A rank is dead, the ranks were told to end, or another start owns the run: leave, since the job cannot go on.
        - The notice was withdrawn, or the deadline passed: go on; the staging continues.
        - All ranks held and staged it: leave.
        - All held but not all staged: go on, and abandon it."""
        for attempt in self.attempts():
            if not attempt.is_verdict_pending:
                continue
            all_held = len(attempt.held_requests) == self.world
            if self.is_lost_cause or self._is_end_ordered:
                self._set_verdict(attempt, True, now_s)
            elif not self.is_time_to_leave:
                self._set_verdict(attempt, False, now_s)
            elif all_held and len(attempt.staged_ranks) == self.world:
                self._set_verdict(attempt, True, now_s)
            elif all_held:
                self._set_verdict(attempt, False, now_s)
                self._abandon_attempt(attempt, "not every rank had staged it", now_s)

    def _assemble_staged(self) -> None:
        for attempt in self._open_attempts():
            if len(attempt.staged_ranks) == self.world:
                attempt.state = SlotState.STAGED
                self._clear_control_word(attempt)
                self._actions.append(Assemble(attempt.slot, attempt.number, attempt.version))

    def _release_inherited_slots(self) -> None:
        """Lets slots be used that have complete snapshots of a former agent. Before this agent's first one, one slot is
        needed. Once it is known which version is replicated, only that one stays until a newer one is safe. None stays
        where no newer one can come."""
        newest = self.newest
        stays = sorted(self.inherited_versions, key=lambda slot: self.inherited_versions[slot], reverse=True)
        if self._is_rank_gone() or self.superseded_by:
            stays = []
        elif newest is None:
            stays = stays[: max(0, self.slot_limit - 1)] if self.has_division else stays
        elif newest.commit_state is WorkState.DONE:
            stays = []
        elif not self.is_survey_pending:
            stays = [slot for slot in stays if self.inherited_versions[slot] == self.replicated_version]
        for slot in self.inherited_versions.keys() - stays:
            self.release_lease(slot)
            del self.inherited_versions[slot]

    def _free_superseded_slots(self) -> None:
        newest, safe = self.newest, self.replicated
        # The replicated attempt then stays until a newer one is replicated.
        waits = self.is_replication_on and not self._is_blocked_on_commit
        if not waits and self._is_replicated_superseded:
            safe = None
        for attempt in self.attempts(SlotState.COMPLETE):
            is_held = attempt in (newest, safe) or self.slots[attempt.slot].leases or attempt.is_verdict_pending
            if is_held or self._awaits_commit(attempt):
                continue
            why = "a newer one was complete before its turn"
            if attempt.commit_state is WorkState.NEW:
                self._report_level(attempt.version, "store", False, f"skipped: {why}")
                if attempt.reason is SaveReason.DUE:
                    self._report_skipped(1, f"step {attempt.version.step} is not committed: {why}")
            is_told = attempt.replication_state is WorkState.DONE or (attempt.version, "peer") in self._level_messages
            if not is_told and (self.is_replication_on or attempt.commit_state is WorkState.FAILED):
                self._report_level(attempt.version, "peer", False, f"skipped: {why}")
            self._free_slot(attempt)

    def _release_peer_replicas(self) -> None:
        """Lets peers drop their replicas if no node has room for new ones. They go once the store has a checkpoint at
        least as new as any replica, and the replicated slot is free. Until then they stay, including those of failed
        attempts: they may be all that survives this node."""
        copied, stored = self._sent_version, self.committed_version
        if self.is_replication_on or self.replicating_slot is not None or self.superseded_by or copied is None:
            return
        is_outdone = self.replicated_version is None or self._is_replicated_superseded
        if self.replicated is None and is_outdone and stored is not None and stored >= copied:
            self.replicated_version, self._sent_version, self.dropped_version = None, None, copied
            self._actions.append(DropReplicas())

    def _replicate_newest(self, now_s: float) -> None:
        """Begins to replicate the newest attempt, one at a time; an attempt that is overtaken meanwhile is not
        replicated. It is repeated after a failure, and when a node returns that may have lost its replicas or has
        memory for more. The first call has peers surveyed for what is replicated, even if none of them keeps replicas
        now."""
        newest = self.newest
        if newest is None or self.replicating_slot is not None or self.superseded_by:
            return
        # Before the first division the placement is not known.
        if not (self.is_replication_on or self.is_survey_pending) or (self.is_survey_pending and not self.division):
            return
        if self.all_gone and newest.reason is not SaveReason.HOLD:
            return
        peer = newest.replication_state
        more = newest.version == self.replicated_version and self._would_improve_replication
        short = (bool(self._lost_holders) or more) and not self.rank_states.summary.disconnected
        waits = self._replication_failures > 0 and now_s < self._retry_replication_s
        again = peer is WorkState.FAILED or (peer is WorkState.DONE and short)
        if peer is not WorkState.NEW and (not again or waits or self._is_rank_gone()):
            return
        # A replication now would reduce the protection of the replicated version. If a survey is still due, more may be
        # lost of that version than is known, and replication goes on.
        if self.would_reduce_protection and not self.is_survey_pending:
            if peer is WorkState.NEW:
                newest.replication_state = WorkState.FAILED
                self._report_level(newest.version, "peer", False, NO_PEER_MEMORY)
            return
        self.is_survey_pending = self.is_survey_pending or self._may_reduce_protection
        if self._can_evict_replicated and self.replicated_version is not None:
            self._actions.append(ReplicaDegraded(self.replicated_version))
        self.begin_replication(newest)
        self._actions.append(Replicate(newest.slot, newest.number, newest.version))

    def _cancel_blocking_commit(self, now_s: float) -> None:
        """Cancels the running commit if it keeps the last snapshot from being stored in time."""
        running = self.slots[self.committing_slot].attempt if self.committing_slot is not None else None
        if running is None or running.is_commit_cancelled:
            return
        if self._delays_last_commit(running, now_s):
            running.is_commit_cancelled = True
            self._actions.append(CancelCommit())

    def _commit_next(self, now_s: float) -> None:
        if self.committing_slot is not None or (self.superseded_by and not self._is_orphaned):
            return
        newest = self.newest
        if self._is_orphaned:
            self._is_orphaned = False
            if self.has_uncommitted_newest and newest is not None:
                self._begin_commit(newest, now_s)
            return
        waiting = [attempt for attempt in self.attempts() if self._awaits_commit(attempt)]
        chosen = min(waiting, key=lambda each: each.version, default=None)
        if chosen is not None and self._delays_last_commit(chosen, now_s):
            chosen = newest
        if chosen is None and newest is not None:
            no_more = self._is_rank_gone() and not self.attempts(SlotState.GRANTED, SlotState.STAGED)
            last = (
                no_more and not newest.is_last_try and not self._is_commit_stopped and not self._waits_for_agent(now_s)
            )
            soon = self._is_blocked_on_commit or not (self._is_rank_gone() or self._would_delay_last_snapshot(now_s))
            due = now_s >= self._retry_commit_s or not self.is_commit_failing  # an older one may have been stored since
            again = newest.commit_state is WorkState.FAILED and (last or (soon and due))
            if again or (newest.commit_state is WorkState.NEW and (no_more or self._is_commit_due(newest, now_s))):
                chosen = newest
        if chosen is not None:
            chosen.is_last_try = chosen.is_last_try or self._is_rank_gone()
            self._begin_commit(chosen, now_s)

    def _begin_commit(self, attempt: SaveAttempt, now_s: float) -> None:
        attempt.commit_state, attempt.commit_began_s = WorkState.RUNNING, now_s
        self._last_commit_opened_s = attempt.opened_s
        self.take_lease(attempt.slot)
        self.committing_slot = attempt.slot
        self._actions.append(Commit(attempt.slot, attempt.number, attempt.version, attempt.metrics))

    def _is_commit_due(self, attempt: SaveAttempt, now_s: float) -> bool:
        """True if the policy wants this appointed attempt committed. Each attempt is, if slots are stuck or it is time
        to leave."""
        if self._is_blocked_on_commit or self._must_be_stored(attempt):
            return True
        if self._would_delay_last_snapshot(now_s):
            return False
        if not self._commit_interval_s or self.is_due(now_s):
            return True
        if self._extra_commit_version is not None and attempt.version >= self._extra_commit_version:
            return True
        late = now_s >= min(self._commit_overdue_s(), self._retry_commit_s)  # the commit whose turn it was has failed
        return late or attempt.opened_s >= self._commit_due_s()

    def _plan_and_make_arenas(self, now_s: float) -> None:
        if self._is_rank_gone() or self.superseded_by or not self.rank_states.summary.all_joined:
            return
        if self._divided_layouts_version != self.layouts_version:
            if not self._is_dividing:
                self._is_dividing = True
                self._actions.append(Divide(self.layouts_version))
            return
        # Appointments of another division are withdrawn and made anew under this one.
        self._withdraw_appointments(now_s, lambda r: r.division != self.division)
        self._close_unused()
        # One slot at a time, so that the first can be used soon.
        making = any(slot.is_making_arenas for slot in self.slots)
        for slot in self._used_slots if self.division else ():
            if slot.leases or slot.is_making_arenas:
                continue
            fits = self._has_fitting_arenas(slot)
            if slot.attempt is not None and not (fits and slot.is_offered) and self._can_reuse_only_slot(slot):
                self._free_slot(slot.attempt)
            if slot.attempt is None and not fits and not making:
                making = slot.is_making_arenas = True
                slot.warm_ranks.clear()
                slot.arena_bytes = ()
                self._actions.append(MakeArenas(slot.number, self._needed_arena_bytes))
            elif slot.attempt is None and fits and not slot.is_offered:
                slot.is_offered = True
                slot.warm_ranks.clear()
                self._actions.append(OfferSlot(slot.number))

    def _close_unused(self) -> None:
        """Closes the arenas of slots that are no longer in use; their memory would count as free for ever."""
        for slot in self._slots_by_use[self.slot_limit :] if self.division else ():
            if slot.is_handed_out and slot.attempt is None and not slot.leases and not slot.is_making_arenas:
                slot.is_handed_out, slot.arena_bytes = False, ()
                self._actions.append(CloseArenas(slot.number))

    def _grant_saves(self, now_s: float, steps: Sequence[int]) -> None:
        self._settle_unsavable()
        self._repeat_save_answers()
        saves = self._save_requests
        if len(saves) < self.world:
            self._all_saving_since_s = None
        elif self._all_saving_since_s is None:
            self._all_saving_since_s = now_s
        self._report_missing_ranks(now_s)
        if not saves:
            return
        if self.superseded_by:
            self._refuse_saves("superseded", f"a newer start, {self.superseded_by}, owns the run")
        elif self._is_rank_gone():
            rank = next(m.rank for m in self.rank_states if m.presence is not Presence.HERE)
            self._refuse_saves(
                "save-failed", f"rank {rank} {self._describe_absence(rank)}: no rank can save without it"
            )
        elif (away := self._unreachable_rank(now_s)) is not None:
            self._refuse_saves("save-failed", f"rank {away} cannot be reached, and training does not wait for it")
        elif self._has_differing_exits():
            self._refuse_older_saves()
        elif len({save.version for save in saves.values()}) > 1:
            asked = ", ".join(f"rank {rank} {save.version}" for rank, save in sorted(saves.items()))
            what = "the block has to be ended" if self._has_only_exits() else "ck.save() has to be called"
            self._refuse_saves("usage", f"{what} by all ranks at the same step; asked: {asked}")
        elif len(saves) < self.world:
            version = next(iter(saves.values())).version
            passed = [r for r in range(self.world) if r not in saves and steps[r] > version.step + 1]
            astray = self._rank_past_failed_save(version)
            if astray is not None:
                failed, _ = self._unsavable_versions[astray]
                gone_on = f"rank {astray} has gone on from {failed}, which failed, and not to {version}"
                self._refuse_saves("usage", f"ck.save() has to be called by all ranks at the same step; {gone_on}")
            elif passed:
                went, first = f"rank {passed[0]} went past", next(iter(saves))
                ended = f"rank {first} ended the block after step {version.step}, and {went} that"
                self._refuse_saves(
                    "usage", ended if self._has_only_exits() else f"{went} {version} without calling ck.save()"
                )
        elif self.refusal_reason:
            self._refuse_saves("save-failed", self.refusal_reason)
        else:
            self._grant_save(now_s)
        self._report_due_progress(now_s)

    def _report_due_progress(self, now_s: float) -> None:
        """Once a second tells ranks in a policy-due save that it is still under way. Without that message they train
        on."""
        if now_s >= self._last_progress_s + PROGRESS_PERIOD_S:
            self._last_progress_s = now_s
            self._actions += [
                ReportProgress(save.request) for save in self._save_requests.values() if save.reason is SaveReason.DUE
            ]

    def _unreachable_rank(self, now_s: float) -> int | None:
        """A rank that has been unreachable for MISSING_ANSWER_S while policy-due saves wait; else None."""
        if not any(save.reason is SaveReason.DUE for save in self._save_requests.values()):
            return None
        lost = ((m.rank, m.disconnected_s) for m in self.rank_states.summary.disconnected)
        return next((rank for rank, lost_s in lost if lost_s is not None and now_s >= lost_s + MISSING_ANSWER_S), None)

    def _rank_past_failed_save(self, version: Version) -> int | None:
        """A rank that saw another save of this step fail and apparently went on; else None. The ranks that wait may
        keep that rank inside the next step for ever. Saves at the end of the block are excluded: all ranks ask for them
        again, however long it takes."""
        told = self._partial_save_since_s == math.inf and not self._has_only_exits()
        gave_up = (
            (rank, at) for rank, (at, _) in self._unsavable_versions.items() if told and rank not in self._save_requests
        )
        return next((rank for rank, at in gave_up if at.step == version.step and at < version), None)

    def _has_differing_exits(self) -> bool:
        """True if ranks at the end of their blocks ask for different versions of one step. Some then saw an attempt
        fail that others did not, for example since one node's agent restarted."""
        versions = {save.version for save in self._save_requests.values()}
        return len(versions) > 1 and self._has_only_exits() and len({version.step for version in versions}) == 1

    def _has_only_exits(self) -> bool:
        return all(save.reason is SaveReason.EXIT for save in self._save_requests.values())

    def _settle_unsavable(self) -> None:
        """Settles the version that a rank cannot save: no rank waits for it, now or later."""
        for rank, (version, why) in self._unsavable_versions.items():
            if self._answered_save is None or version > self._answered_save.version:
                self._answered_save = AnsweredSave(version, "save-failed", f"rank {rank} cannot save {version}: {why}")

    def _report_missing_ranks(self, now_s: float) -> None:
        """Reports once which ranks have not come to a save that others wait in. They may never come."""
        requests = self._save_requests
        absent = [rank for rank in range(self.world) if rank not in requests] if requests else []
        if not absent:
            self._partial_save_since_s = None
        elif self._partial_save_since_s is None:
            self._partial_save_since_s = now_s
        elif now_s - self._partial_save_since_s >= MISSING_RANKS_S:
            self._partial_save_since_s = math.inf
            version = next(iter(self._save_requests.values())).version
            more = f" and {len(absent) - 8} more" * (len(absent) > 8)
            who = f"rank {absent[0]} has" if len(absent) == 1 else f"ranks {absent[:8]}{more} have"
            what = "ck.save() and the end of the block are for all ranks, at the same step"
            text = f"the other ranks wait to save {version}: {who} not come to it for {MISSING_RANKS_S:.0f} s. {what}"
            self._actions.append(Emit("save.awaited", text, True, {"version": str(version), "ranks": absent[:100]}))

    def _refuse_older_saves(self) -> None:
        """Refuses the saves of older versions; those ranks then ask for the next version."""
        newest = max(save.version for save in self._save_requests.values())
        for rank in [rank for rank, save in self._save_requests.items() if save.version < newest]:
            save = self._save_requests.pop(rank)
            message = f"the snapshot at {save.version} was given up: other ranks ask for {newest}"
            self._actions.append(Refuse(save.request, "not-staged", message))

    def _repeat_save_answers(self) -> None:
        """Answers a rank that asks again with the same outcome: its first answer was lost, or it comes after a
        refusal."""
        for rank, save in list(self._save_requests.items()):
            if self._answered_save is None or save.version > self._answered_save.version:
                continue
            del self._save_requests[rank]
            wanted = save.version, save.equal_version
            attempt = next((attempt for attempt in self.attempts() if attempt.version in wanted), None)
            if attempt is None or attempt.miss_reason:
                why = self._answered_save.message if save.version == self._answered_save.version else ""
                message = why or f"the snapshot at {save.version} was given up"
                self._actions.append(Refuse(save.request, self._answered_save.kind, message))
            elif attempt.state is SlotState.GRANTED and rank not in attempt.staged_ranks:
                self._actions.append(AnswerRequest(save.request, self._stage_answer(attempt)))
            else:
                self._actions.append(AnswerRequest(save.request, self._saved_answer(attempt)))

    def _grant_save(self, now_s: float) -> None:
        version, same = self._save_requests[0].version, {save.equal_version for save in self._save_requests.values()}
        # Snapshots of these versions equal the present state.
        holding = {version, *same} if len(same) == 1 else {version}
        for attempt in self.attempts(SlotState.STAGED, SlotState.COMPLETE):
            if attempt.version in holding:
                self._adopt_attempt(attempt)
                return
        waited = self._all_saving_since_s is not None and now_s - self._all_saving_since_s >= MISSING_ANSWER_S
        # All ranks wait in this save, so answers about earlier versions that are still missing were lost.
        for earlier in self._open_attempts():
            if waited and earlier.version <= version:
                earlier.miss_reason = "all ranks are past it"
        appointed = next((attempt for attempt in self._open_attempts() if attempt.version == version), None)
        if appointed is not None and appointed.staged_ranks:
            return  # this version is being staged: it need not be taken twice
        waiting = [a for a in self.attempts() if self._must_be_stored(a) and a.commit_state is WorkState.NEW]
        # Later attempts that no rank has staged do not count: they wait for the ranks, which wait here.
        if any(a.version <= version or a.staged_ranks for a in waiting) or not self.has_division:
            return
        free = self._find_free_slot()
        if (free is None or appointed is not None) and self._withdraw_appointments(now_s, lambda _: True):
            # All ranks wait in this save, so none has acted on that appointment, or will.
            free = self._find_free_slot()
        if free is None:
            return
        attempt = self._open_attempt(free, self._save_requests[0].reason, version, now_s)
        attempt.metrics = self._merge_metrics()
        self._answer_saves(self._stage_answer(attempt))

    def _adopt_attempt(self, attempt: SaveAttempt) -> None:
        """Uses a snapshot that is staged already for the save that all ranks ask for. It must now reach the store like
        any explicit save."""
        if attempt.reason is not SaveReason.HOLD:
            attempt.reason = self._save_requests[0].reason
        if attempt.commit_state is WorkState.FAILED:
            attempt.commit_state = WorkState.NEW
        if attempt.replication_state is WorkState.FAILED:
            attempt.replication_state = WorkState.NEW
        # The saving rank forgets earlier failures, so an earlier success is reported again.
        for level, state in (("store", attempt.commit_state), ("peer", attempt.replication_state)):
            told = self._level_messages.pop((attempt.version, level), None)
            if told is not None and state is WorkState.DONE:
                self._report_level(attempt.version, level, told["ok"], told["message"])
        attempt.metrics.update(self._merge_metrics())
        self._answer_saves(self._saved_answer(attempt))

    def _appoint_snapshot(self, now_s: float, steps: Sequence[int]) -> None:
        hold, extra = self.is_time_to_leave, self._must_appoint_extra()
        self._is_resumed = self._is_resumed and not all(steps)
        if self._is_at_end:
            self._withdraw_appointments(now_s, lambda _: True)
        if hold:
            # All other appointments give way to the last one.
            self._withdraw_appointments(now_s, lambda r: not r.is_verdict_pending)
        elif extra:
            far = max(steps, default=0) + LEAD_MIN
            self._withdraw_appointments(now_s, lambda r: r.version.step > far)
        at_polls = self.step_timing.all_poll and self.step_timing.is_long
        if at_polls and self._withdraw_appointments(now_s, lambda r: not r.version.sub):
            # This step's end is unknown, and no appointment was missed.
            self._extra_tries_left += self._extra_version is not None
        if not self._can_appoint() or self._save_requests or self._open_attempts():
            return
        if self._start_step is None or not (hold or extra or now_s >= self._appoint_due_s):
            return
        slot = self._find_free_slot()
        if slot is None or not (hold or extra or self._can_spare_slot(slot)):
            self._skip_due_snapshots(now_s)
            return
        at = max(self._start_step, *steps)
        if at_polls or (hold and self.step_timing.is_poll_next):
            version = self._next_poll_version()
        else:
            near = self._near_step_version(now_s) if hold else None
            version = self.step_timing.next_update_version(near or self._next_step_version(now_s, at))
        attempt = self._open_attempt(slot, SaveReason.HOLD if hold else SaveReason.STEP, version, now_s)
        self._extra_tries_left -= extra
        attempt.is_announced = True
        kind = WordKind.HOLD if hold else WordKind.TAKE
        word = ControlWord(attempt.number, slot.number, kind, version.step, version.sub)
        self._actions.append(SetWord(slot.number, word))
        self._appoint_due_s = now_s + self._interval_s

    def _skip_due_snapshots(self, now_s: float) -> None:
        """Skips due snapshots for which no slot is free, once the next one is due too."""
        if now_s >= self._appoint_due_s + self._interval_s:
            count = int((now_s - self._appoint_due_s) / self._interval_s)
            self._appoint_due_s += count * self._interval_s
            self._report_skipped(count, "no slot was free when a snapshot was due")

    def _report_skipped(self, count: int, why: str) -> None:
        """Reports checkpoints that were due and were not taken or not committed."""
        text = f"{format_count(count, 'checkpoint')} passed over: {why}"
        self._actions.append(Emit("snapshot.passed", text, False, {"count": count}))

    def _next_step_version(self, now_s: float, at: int) -> Version:
        """The end of a step far enough ahead of `at`, the foremost rank's step, that two announcements may be late. It
        uses the pace seen since the last call."""
        since_s, since = self._step_rate_origin
        if now_s - since_s >= LATENCY_S:
            self._steps_per_s = (at - since) / (now_s - since_s)
            self._step_rate_origin = (now_s, at)
        return Version(at + self._lead(self._steps_per_s))

    def _near_step_version(self, now_s: float) -> Version | None:
        """An earlier version than `_next_step_version`: the end of the foremost rank's step, or of the next one; else
        None. A step may take a minute, and a deadline may be as close. It is None if the pace is unknown, this step
        takes unusually long, or announcements were late recently."""
        at, step_s = self.step_timing.step, self.step_timing.measured_step_s
        if not at or not self.step_timing.is_entry_published or step_s is None or self._latency_s > LATENCY_S:
            return None
        left_s = self.step_timing.entered_s + step_s - now_s
        margin_s = max(LATENCY_S, NEAR_MARGIN * step_s)
        if not margin_s - step_s <= left_s <= step_s + margin_s:  # this step is unlike the usual ones
            return None
        return Version(at if left_s >= margin_s else at + 1)

    def _next_poll_version(self) -> Version:
        """The next poll that an announcement can reach, for ranks that all poll within one step, as in a long
        evaluation. If the step ends sooner, the ranks answer "late". Polls of different ranks need not keep pace. So
        the lead includes the polls that ranks of other nodes may have made since their last report."""
        pace = self.step_timing
        unseen = 0 if self.is_single_node else math.ceil(REPORT_DELAY_S * pace.polls_per_s)
        return Version(pace.step - 1, min(SUB_MAX, pace.poll + unseen + self._lead(pace.polls_per_s)))

    def _lead(self, per_s: float) -> int:
        return max(LEAD_MIN, math.ceil(2 * self._latency_s * per_s))

    def _release_leaving_ranks(self, now_s: float) -> None:
        newest = self.newest
        busy = self.is_at_work and not (self.is_only_replicating and self._is_all_stored(newest))
        if busy or self._open_attempts() or (self.is_former_committing and newest is None):
            return
        unsaved = (
            newest is not None
            and newest.commit_state is not WorkState.DONE
            and not (self.superseded_by or self._is_commit_stopped)
        )
        if unsaved and self._waits_for_agent(now_s):
            return  # the commit is tried again
        if self.all_gone and not self._is_closing and not unsaved:
            self._is_closing = True
            dead = [m.rank for m in self.rank_states if m.presence is Presence.DEAD]
            self._actions.append(Close(f"ranks {dead[:8]} died" if dead else "left"))
        for member in self.rank_states.summary.waiting_to_leave:
            returns = member.can_retry_leave and now_s < self._rejoin_deadline_s(member)
            if returns or (member.disconnected_s is None and member.leave_request is LEAVE_RETRY):
                continue  # the rank gets its answer on its next connection
            if member.disconnected_s is not None:
                member.leave_request = None  # no rank waits for this answer any more
            elif self.is_closed_in_store or unsaved or not self.all_gone:
                error = self.last_error or (f"superseded by {self.superseded_by}" if self.superseded_by else "")
                committed = str(self.committed_version) if self.committed_version else None
                self._actions.append(
                    AnswerRequest(member.leave_request, {"committed": committed, "error": error or None})
                )
                member.leave_request = None

    # -- small steps

    def _is_all_stored(self, newest: SaveAttempt | None) -> bool:
        """True if all ranks left without a notice, none died, and the last step is stored: replicas are not needed any
        more."""
        have_left = self.all_gone and not self.rank_states.summary.any_dead and self._pending_report is None
        return have_left and newest is not None and newest.commit_state is WorkState.DONE

    def _describe_absence(self, rank: int) -> str:
        member = self.rank_states[rank]
        return "died" if member.presence is Presence.DEAD else "is away" if member.is_away else "left"

    def _awaits_commit(self, attempt: SaveAttempt) -> bool:
        """True if the attempt waits to be committed and must not be skipped."""
        is_new = attempt.state is SlotState.COMPLETE and attempt.commit_state is WorkState.NEW
        return is_new and self._must_be_stored(attempt)

    def _must_be_stored(self, attempt: SaveAttempt) -> bool:
        """True if the attempt must reach the store even if newer ones exist. A policy-due save need not while the store
        fails or it is time to leave, since training would wait for its slot."""
        is_spared = attempt.reason is SaveReason.DUE and (self.is_commit_failing or self.is_time_to_leave)
        return attempt.is_explicit and not is_spared

    def _find_free_slot(self, slots: Sequence[Slot] | None = None) -> Slot | None:
        """A slot, of `slots` if given, that is free and warm on all ranks; else None. A job's only slot counts if its
        attempt is committed; it is then freed."""
        for slot in self._used_slots if slots is None else slots:
            if slot.is_making_arenas or slot.leases or len(slot.warm_ranks) < self.world:
                continue
            if not (self.division and self._has_fitting_arenas(slot)):
                continue
            if slot.attempt is not None:
                if not self._can_reuse_only_slot(slot):
                    continue
                self._free_slot(slot.attempt)
            return slot
        return None

    def _can_spare_slot(self, slot: Slot) -> bool:
        """True if a hold would still find a slot after this one is taken. Other slots may still be in the making, which
        may take as long as a commit beside training. The hold might then have to wait for a slot that is being
        committed."""
        others = [each for each in self._used_slots if each is not slot]
        if all(each.attempt or each.leases for each in others) or self._find_free_slot(others) is not None:
            return True
        staged = (SlotState.STAGED, SlotState.COMPLETE)
        rest = [each.attempt for each in others if each.attempt and each.attempt.state in staged and not each.leases]
        next_one = self.committing_slot is None and any(attempt.commit_state is WorkState.NEW for attempt in rest)
        return len(rest) > next_one  # a newer complete attempt frees the others

    def _can_reuse_only_slot(self, slot: Slot) -> bool:
        """True if this is the only slot in use and its attempt is in the store. It is False while a retired slot still
        holds an older attempt, which would become the newest again."""
        alone = self.slot_limit == 1 and not any(each.attempt for each in self.slots if each is not slot)
        attempt = slot.attempt
        if not alone or attempt is None or attempt.state is not SlotState.COMPLETE:
            return False
        return attempt.commit_state is WorkState.DONE and not attempt.is_verdict_pending

    def _open_attempt(self, slot: Slot, why: SaveReason, version: Version, now_s: float) -> SaveAttempt:
        number = self._next_attempt_number
        self._next_attempt_number = number % ATTEMPT_MAX + 1
        # Forget what was reported of a failed attempt at this version.
        self._level_messages = {key: body for key, body in self._level_messages.items() if key[0] != version}
        size = sum(self._needed_arena_bytes)
        slot.attempt = SaveAttempt(number, slot.number, why, version, self.division, now_s, size)
        return slot.attempt

    def _withdraw_appointments(self, now_s: float, which: Callable[[SaveAttempt], bool]) -> bool:
        """Withdraws announced appointments that no rank has staged, so nothing is lost. Returns False if there are
        none."""
        found = [r for r in self._open_attempts() if r.is_announced and not r.staged_ranks and which(r)]
        for attempt in found:
            self._drop_attempt(attempt, now_s)
        return bool(found)

    def _abandon_attempt(self, attempt: SaveAttempt, why: str, now_s: float) -> None:
        message = f"the snapshot at {attempt.version} was given up: {why}"
        is_awaited = bool(attempt.staged_ranks) or attempt.is_explicit
        # Else no rank had reached it: nothing is lost.
        if is_awaited or attempt.miss_reason:
            self._actions.append(Emit("save.abandoned", message, attempt.is_explicit))
        # Else no rank waits for it, except one that is just staging it.
        if is_awaited:
            self._report_level(attempt.version, "local", False, why)
        if attempt.is_explicit:
            self.last_error = message
        self._drop_attempt(attempt, now_s)

    def _drop_attempt(self, attempt: SaveAttempt, now_s: float) -> None:
        self._clear_control_word(attempt)
        self._abandoned_attempts.append(attempt.number)
        if attempt.is_verdict_pending:
            self._set_verdict(attempt, self.is_lost_cause or self._is_end_ordered, now_s)
        if attempt.reason is SaveReason.STEP and self.policy.seconds is not None:
            self._retry_count = min(self._retry_count + 1, 16)
            self._appoint_due_s = attempt.opened_s + min(2.0 ** (self._retry_count - 1), RETRY_S_MAX, self._interval_s)
        self._free_slot(attempt)

    def _free_slot(self, attempt: SaveAttempt) -> None:
        if attempt is self.replicated:
            self._actions.append(ReplicaDegraded(attempt.version))
        self.slots[attempt.slot].attempt = None
        self._actions.append(ClearSlot(attempt.slot))

    def _clear_control_word(self, attempt: SaveAttempt) -> None:
        if attempt.is_announced:
            attempt.is_announced = False
            self._actions.append(SetWord(attempt.slot, None))

    def _merge_metrics(self) -> dict[str, float]:
        """The metrics of all ranks' requests; if ranks differ, the lowest rank's value counts."""
        merged: dict[str, float] = {}
        for rank in sorted(self._save_requests, reverse=True):
            merged.update(self._save_requests[rank].metrics)
        return merged

    def _stage_answer(self, attempt: SaveAttempt) -> dict[str, Any]:
        return {"saved": False, "attempt": attempt.number, "slot": attempt.slot, "division": attempt.division}

    def _saved_answer(self, attempt: SaveAttempt) -> dict[str, Any]:
        level = "store" if attempt.commit_state is WorkState.DONE else "local"
        return {"saved": True, "attempt": attempt.number, "level": level, "version": str(attempt.version)}

    def _answer_saves(self, body: dict[str, Any]) -> None:
        self._answered_save = AnsweredSave(
            max(save.version for save in self._save_requests.values()), "save-failed", ""
        )
        for save in self._save_requests.values():
            self._actions.append(AnswerRequest(save.request, body))
        self._save_requests.clear()

    def _refuse_saves(self, kind: str, message: str) -> None:
        self._answered_save = AnsweredSave(max(save.version for save in self._save_requests.values()), kind, message)
        for save in self._save_requests.values():
            self._actions.append(Refuse(save.request, kind, message))
        self._save_requests.clear()
