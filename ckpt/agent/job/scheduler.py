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
- A running commit is given up only if the last snapshot before a deadline would otherwise be stored too late. Its
  checkpoint stays until a newer one is stored, and its commit is tried once more if the newer one fails.
- No decision rests on a time-out alone; an observed fact is always part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ckpt.agent.preemption.deadline_strategy import Course
from ckpt.agent.preemption.exit_vote import ExitVote
from ckpt.agent.state.actions import (
    Action,
    AnswerRequest,
    Assemble,
    Close,
    CloseArenas,
    Commit,
    Divide,
    Emit,
    GiveUp,
    MakeArenas,
    OfferSlot,
    Recycle,
    Refuse,
    ReplicaDegraded,
    Replicate,
    ReportProgress,
    SetWord,
    Unkeep,
)
from ckpt.agent.state.job_facts import LATENCY_S, LOST_S, REJOIN_S, RETRY_S_MAX, Round, Settled, Slot, State, Store, Why
from ckpt.agent.state.rank_presence import AGAIN, Presence
from ckpt.agent.state.replica_state import UNKEPT
from ckpt.agent.state.step_timing import TOLD_S
from ckpt.ipc.control_page import ROUND_MAX, SUB_MAX, ControlWord, WordKind
from ckpt.policy.save_options import STEPS_APART
from ckpt.types import Tick, counted

# In steps or polls: two announcements may be late before a rank misses one.
LEAD_MIN = STEPS_APART - 1
NEAR_MARGIN = 0.1  # of a step: steps vary in time
MOVING_S = 1.0  # between two progress reports to ranks that wait for a slot
# Ranks wait this long in a save for others before the others are named.
AWAITED_S = 10.0
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
        saved = self._settled.tick if self._settled is not None else None
        self.pace.see(now_s, steps, polls, since_s, saved)
        self._tend_notices(now_s, steps)
        self._end_attempts(now_s)
        self._bring_forward(now_s)
        self._abandon_hopeless(now_s, steps)
        self._judge_holds(now_s)
        self._ask_who_is_late(now_s)
        self._judge_unknown(now_s)
        self._assemble_staged()
        if not (self.frozen or self.unsure):
            self._free_older()
            self._give_up_copies()
        if not self.frozen:
            self._replicate_newest(now_s)
        self._make_way(now_s)
        self._commit_next(now_s)
        if not self.frozen:
            self._divide_and_make(now_s)
            self._grant_saves(now_s, steps)
            self._appoint(now_s, steps)
        self._tell_outcome(now_s)
        self._let_go(now_s)
        self._acknowledge(now_s)
        out, self._out = self._out, []
        return out

    def _abandon_hopeless(self, now_s: float, steps: Sequence[int]) -> None:
        for member in self.members.seen.lost:
            for_long = self.superseded_by or (member.lost_s is not None and now_s >= member.lost_s + REJOIN_S)
            if for_long and member.presence is Presence.HERE:
                member.presence, member.away = Presence.LEFT, True
        for slot, round_ in self._open():
            waiting = [r for r in range(self.world) if r not in round_.staged]
            away = waiting if self.members.seen.any_gone else ()
            gone = next((r for r in away if self.members[r].presence is not Presence.HERE), None)
            if round_.missed:
                self._abandon(slot, round_, round_.missed, now_s)
            elif self.superseded_by:
                self._abandon(slot, round_, f"a newer start, {self.superseded_by}, owns the run", now_s)
            elif gone is not None:
                self._abandon(slot, round_, f"rank {gone} {self._fate(gone)} before it had staged it", now_s)
            elif waiting and now_s - round_.opened_s >= LOST_S:
                silent = [r for r in waiting if steps[r] >= round_.tick.step + LOST_STEPS]
                if silent:
                    self._abandon(slot, round_, f"rank {silent[0]} has passed that step without an answer", now_s)

    def _judge_holds(self, now_s: float) -> None:
        """Decides for each open hold whether the ranks leave or go on. In this order:

        - A rank is dead, the ranks were told to end, or another start owns the run: leave, since the job cannot go on.
        - The notice was withdrawn: go on; the staging continues.
        - All ranks held and staged it: leave.
        - The deadline passed, or all held but not all staged: go on, and abandon it. No rank could leave by it any
          more."""
        for slot in self.slots:
            round_ = slot.round
            if round_ is None or not round_.unjudged:
                continue
            all_held = len(round_.held) == self.world
            if self.is_lost_cause or self._ended:
                self._judge(round_, True, now_s)
            elif self.course is Course.STAY:
                self._judge(round_, False, now_s)
            elif all_held and len(round_.staged) == self.world:
                self._judge(round_, True, now_s)
            elif all_held or self.course is Course.OVER:
                self._judge(round_, False, now_s)
                if slot.state is State.GRANTED:
                    why = "not every rank had staged it, or reached it before the deadline"
                    self._abandon(slot, round_, why, now_s)

    def _assemble_staged(self) -> None:
        for slot, round_ in self._open():
            if len(round_.staged) == self.world:
                slot.state = State.STAGED
                self._clear_word(round_)
                self._out.append(Assemble(slot.number, round_.number, round_.tick))

    def _free_older(self) -> None:
        newest, safe = self.newest, self.safe
        # The replicated attempt then stays until a newer one is replicated.
        waits = self.replicates and not self._is_stuck
        if not waits and self._safe_is_outdone:
            safe = None
        for slot in self.slots:
            round_ = slot.round
            if slot.state is not State.COMPLETE or slot in (newest, safe) or slot.leases or round_ is None:
                continue
            if not round_.unjudged and not self._waits(slot) and not self._may_be_all(round_):
                if round_.store is Store.NEW:
                    self._tell_level(round_.tick, "store", False, "skipped: a newer one was complete before its turn")
                    if round_.why is Why.DUE:
                        self._tell_passed(1, f"step {round_.tick.step} is not committed, while the store fails")
                untold = round_.peer is not Store.DONE and (round_.tick, "peer") not in self._told
                if untold and (self.replicates or round_.store is Store.FAILED):
                    self._tell_level(round_.tick, "peer", False, "skipped: a newer one was complete before its turn")
                self._free(slot)

    def _give_up_copies(self) -> None:
        """Lets peers drop their replicas if no node has room for new ones. They go once the store has a checkpoint at
        least as new as any replica, and the replicated slot is free. Until then they stay, including those of failed
        attempts: they may be all that survives this node."""
        copied, stored = self._copied_tick, self.committed_tick
        if self.replicates or self.replicating is not None or self.superseded_by or copied is None:
            return
        is_outdone = self.safe_tick is None or self._safe_is_outdone
        if self.safe is None and is_outdone and stored is not None and stored >= copied:
            self.safe_tick, self._copied_tick, self.given_up_tick = None, None, copied
            self._out.append(Unkeep())

    def _replicate_newest(self, now_s: float) -> None:
        """Begins to replicate the newest attempt, one at a time; an attempt that is overtaken meanwhile is not
        replicated. It is repeated after a failure, and when a node returns that may have lost its replicas or has
        memory for more. The first call has peers surveyed for what is replicated, even if none of them keeps replicas
        now."""
        newest = self.newest
        if not (self.replicates or self.unsure) or self.replicating is not None or self.superseded_by:
            return
        if self.unsure and not self.division:
            return  # the placement is not known before the first division
        if self.all_gone and not self._copies_first(now_s):
            return
        if newest is None or newest.round is None:
            return
        peer = newest.round.peer
        more = newest.round.tick == self.safe_tick and self._keeps_more
        short = (bool(self._lost_with) or more) and not self.members.seen.lost
        waits = self._copy_failures > 0 and now_s < self._retry_copy_s
        again = peer is Store.FAILED or (peer is Store.DONE and short)
        if peer is not Store.NEW and (not again or waits or self._broken()):
            return
        # A replication now would reduce the protection of the replicated version. If a survey is still due, more may be
        # lost of that version than is known, and replication goes on.
        if self.undoes_safe and not self.unsure:
            if peer is Store.NEW:
                newest.round.peer = Store.FAILED
                self._tell_level(newest.round.tick, "peer", False, UNKEPT)
            return
        self.unsure = self.unsure or self._may_undo_safe
        if self._safe_gives_way and self.safe_tick is not None:
            self._out.append(ReplicaDegraded(self.safe_tick))
        self.begin_copies(newest, newest.round, now_s)
        self._out.append(Replicate(newest.number, newest.round.number, newest.round.tick))

    def _make_way(self, now_s: float) -> None:
        """Gives up the running commit if it keeps the last snapshot from being stored in time."""
        newest, slot = self.newest, self.slots[self.committing] if self.committing is not None else None
        if slot is None or slot.round is None or slot.round.gave_way or newest is None or newest.round is None:
            return
        if self._keeps_back_the_last(slot, now_s):
            last = newest.round.tick.step
            slot.round.gave_way = f"its commit was given up for that of step {last}, which would have come too late"
            self._out.append(GiveUp(slot.number))

    def _commit_next(self, now_s: float) -> None:
        if self.committing is not None or (self.superseded_by and not self._left_over):
            return
        newest = self.newest
        if self._left_over:
            self._left_over = False
            if self.leaves_uncommitted and newest is not None and newest.round is not None:
                self._begin_commit(newest, newest.round, now_s)
            return
        waiting = [slot for slot in self.slots if self._waits(slot)]
        chosen = min(waiting, key=lambda s: s.round.tick, default=None)  # type: ignore[union-attr]
        if chosen is not None and self._keeps_back_the_last(chosen, now_s):
            chosen = newest
        if chosen is None and newest is not None and newest.round is not None:
            round_ = newest.round
            no_more = self._broken() and not any(s.state in (State.GRANTED, State.STAGED) for s in self.slots)
            last = no_more and not round_.last_try and not self._given_up and not self._waits_for_agent(now_s)
            soon = self._is_stuck or not (self._broken() or self._would_delay_the_last(now_s))
            due = now_s >= self._retry_commit_s or not self.store_fails  # an older one may have been stored since
            again = round_.store is Store.FAILED and (last or (soon and due))
            if again or (round_.store is Store.NEW and (no_more or self._is_its_turn(round_, now_s))):
                chosen = newest
        if chosen is newest and self._copies_first(now_s):
            return
        chosen = chosen or self._gave_way_in_vain()
        if chosen is not None and chosen.round is not None:
            chosen.round.gave_way = ""
            if self._broken():
                chosen.round.last_try = True
            self._begin_commit(chosen, chosen.round, now_s)

    def _begin_commit(self, slot: Slot, round_: Round, now_s: float) -> None:
        round_.store = Store.RUNNING
        round_.commit_began_s = now_s
        self._committed_from_s = round_.opened_s
        slot.leases += 1
        self.committing = slot.number
        self._out.append(Commit(slot.number, round_.number, round_.tick, round_.metrics))

    def _is_its_turn(self, round_: Round, now_s: float) -> bool:
        """True if the policy wants this appointed attempt committed. Each attempt is, if slots are stuck or it is time
        to leave."""
        if self._is_stuck or self._insists(round_):
            return True
        if self._would_delay_the_last(now_s):
            return False
        if not self._commit_every_s or self.is_due(now_s):
            return True
        if any(tick is not None and round_.tick >= tick for tick in (self._away, self._early)):
            return True
        late = now_s >= min(self._late_commit_s(), self._retry_commit_s)  # the commit whose turn it was has failed
        return late or round_.opened_s >= self._commit_due_s()

    def _divide_and_make(self, now_s: float) -> None:
        if self._broken() or self.superseded_by or not self.members.seen.all_joined:
            return
        if self._planned_version != self._layouts_version:
            if not self._dividing:
                self._dividing = True
                self._out.append(Divide(self._layouts_version))
            return
        # Appointments of another division are withdrawn and made anew under this one.
        self._withdraw(now_s, lambda r: r.division != self.division)
        self._close_unused()
        making = any(slot.making for slot in self.slots)  # one slot at a time, so that the first can be used soon
        if self.division:
            for slot in self._in_use:
                if slot.leases or slot.making:
                    continue
                fits = self._fits(slot)
                if not (fits and slot.offered) and self._gives_way(slot):
                    self._free(slot)
                if slot.state is State.FREE and not fits and not making:
                    making = slot.making = True
                    slot.warm.clear()
                    slot.bytes = ()
                    self._out.append(MakeArenas(slot.number, self._need))
                elif slot.state is State.FREE and fits and not slot.offered:
                    slot.offered = True
                    slot.warm.clear()
                    self._out.append(OfferSlot(slot.number))

    def _close_unused(self) -> None:
        """Closes the arenas of slots that are no longer in use; their memory would count as free for ever."""
        for slot in self._by_use[self.slots_in_use :] if self.division else ():
            if slot.handed and slot.state is State.FREE and not slot.leases and not slot.making:
                slot.handed, slot.bytes = False, ()
                self._out.append(CloseArenas(slot.number))

    def _grant_saves(self, now_s: float, steps: Sequence[int]) -> None:
        self._settle_unsavable()
        self._repeat_saves()
        saves = self._saves
        if len(saves) < self.world:
            self._asked_s = None
        elif self._asked_s is None:
            self._asked_s = now_s
        self._name_awaited(now_s)
        if not saves:
            return
        if self.superseded_by:
            self._refuse_saves("superseded", f"a newer start, {self.superseded_by}, owns the run")
        elif self._broken():
            rank = next(m.rank for m in self.members if m.presence is not Presence.HERE)
            self._refuse_saves("save-failed", f"rank {rank} {self._fate(rank)}: no rank can save without it")
        elif (away := self._away_for_dues(now_s)) is not None:
            self._refuse_saves("save-failed", f"rank {away} cannot be reached, and training does not wait for it")
        elif self._is_exit_behind():
            self._refuse_behind()
        elif len({save.tick for save in saves.values()}) > 1:
            asked = ", ".join(f"rank {rank} {save.tick}" for rank, save in sorted(saves.items()))
            what = "the block has to be ended" if self._all_exit() else "ck.save() has to be called"
            self._refuse_saves("usage", f"{what} by all ranks at the same step; asked: {asked}")
        elif len(saves) < self.world:
            tick = next(iter(saves.values())).tick
            passed = [r for r in range(self.world) if r not in saves and steps[r] > tick.step + 1]
            astray = self._gone_on_from(tick)
            if astray is not None:
                failed, _ = self._unsavable[astray]
                gone_on = f"rank {astray} has gone on from {failed}, which failed, and not to {tick}"
                self._refuse_saves("usage", f"ck.save() has to be called by all ranks at the same step; {gone_on}")
            elif passed:
                went, first = f"rank {passed[0]} went past", next(iter(saves))
                ended = f"rank {first} ended the block after step {tick.step}, and {went} that"
                self._refuse_saves("usage", ended if self._all_exit() else f"{went} {tick} without calling ck.save()")
        elif self.refusal:
            self._refuse_saves("save-failed", self.refusal)
        else:
            self._grant(now_s)
        self._say_that_dues_wait(now_s)

    def _say_that_dues_wait(self, now_s: float) -> None:
        """Once a second tells ranks in a policy-due save that it is still under way. Without that message they train
        on."""
        if now_s >= self._said_s + MOVING_S:
            self._said_s = now_s
            self._out += [ReportProgress(save.request) for save in self._saves.values() if save.why is Why.DUE]

    def _away_for_dues(self, now_s: float) -> int | None:
        """A rank that has been unreachable for LOST_S while policy-due saves wait; else None."""
        if not any(save.why is Why.DUE for save in self._saves.values()):
            return None
        lost = ((m.rank, m.lost_s) for m in self.members.seen.lost)
        return next((rank for rank, lost_s in lost if lost_s is not None and now_s >= lost_s + LOST_S), None)

    def _gone_on_from(self, tick: Tick) -> int | None:
        """A rank that saw another save of this step fail and apparently went on; else None. The ranks that wait may
        keep that rank inside the next step for ever. Saves at the end of the block are excluded: all ranks ask for them
        again, however long it takes."""
        told = self._awaited_s == math.inf and not self._all_exit()
        gave_up = ((rank, at) for rank, (at, _) in self._unsavable.items() if told and rank not in self._saves)
        return next((rank for rank, at in gave_up if at.step == tick.step and at < tick), None)

    def _is_exit_behind(self) -> bool:
        """True if ranks at the end of their blocks ask for different versions of one step. Some then saw an attempt
        fail that others did not, for example since one node's agent restarted."""
        ticks = {save.tick for save in self._saves.values()}
        return len(ticks) > 1 and self._all_exit() and len({tick.step for tick in ticks}) == 1

    def _all_exit(self) -> bool:
        return all(save.why is Why.EXIT for save in self._saves.values())

    def _settle_unsavable(self) -> None:
        """Settles the version that a rank cannot save: no rank waits for it, now or later."""
        for rank, (tick, why) in self._unsavable.items():
            if self._settled is None or tick > self._settled.tick:
                self._settled = Settled(tick, "save-failed", f"rank {rank} cannot save {tick}: {why}")

    def _name_awaited(self, now_s: float) -> None:
        """Reports once which ranks have not come to a save that others wait in. They may never come."""
        absent = [rank for rank in range(self.world) if rank not in self._saves]
        if not self._saves or not absent:
            self._awaited_s = None
        elif self._awaited_s is None:
            self._awaited_s = now_s
        elif now_s - self._awaited_s >= AWAITED_S:
            self._awaited_s = math.inf
            tick, more = next(iter(self._saves.values())).tick, f" and {len(absent) - 8} more" * (len(absent) > 8)
            who = f"rank {absent[0]} has" if len(absent) == 1 else f"ranks {absent[:8]}{more} have"
            what = "ck.save() and the end of the block are for all ranks, at the same step"
            text = f"the other ranks wait to save {tick}: {who} not come to it for {AWAITED_S:.0f} s. {what}"
            self._out.append(Emit("save.awaited", text, True, {"tick": str(tick), "ranks": absent[:100]}))

    def _refuse_behind(self) -> None:
        """Refuses the saves of older versions; those ranks then ask for the next version."""
        newest = max(save.tick for save in self._saves.values())
        for rank in [rank for rank, save in self._saves.items() if save.tick < newest]:
            save = self._saves.pop(rank)
            message = f"the snapshot at {save.tick} was given up: other ranks ask for {newest}"
            self._out.append(Refuse(save.request, "not-staged", message))

    def _repeat_saves(self) -> None:
        """Answers a rank that asks again with the same outcome: its first answer was lost, or it comes after a
        refusal."""
        for rank, save in list(self._saves.items()):
            if self._settled is None or save.tick > self._settled.tick:
                continue
            del self._saves[rank]
            slot = next((s for s in self.slots if s.round is not None and s.round.tick in (save.tick, save.same)), None)
            if slot is None or slot.round is None or slot.round.missed:
                why = self._settled.message if save.tick == self._settled.tick else ""
                message = why or f"the snapshot at {save.tick} was given up"
                self._out.append(Refuse(save.request, self._settled.kind, message))
            elif slot.state is State.GRANTED and rank not in slot.round.staged:
                self._out.append(AnswerRequest(save.request, self._stage_now(slot, slot.round)))
            else:
                self._out.append(AnswerRequest(save.request, self._is_saved(slot.round)))

    def _grant(self, now_s: float) -> None:
        tick, same = self._saves[0].tick, {save.same for save in self._saves.values()}
        holding = {tick, *same} if len(same) == 1 else {tick}  # snapshots of these versions equal the present state
        for slot in self.slots:
            if slot.round and slot.round.tick in holding and slot.state in (State.STAGED, State.COMPLETE):
                self._adopt(slot.round)
                return
        waited = self._asked_s is not None and now_s - self._asked_s >= LOST_S
        # All ranks wait in this save, so answers about earlier versions that are still missing were lost.
        for _, earlier in self._open():
            if waited and earlier.tick <= tick:
                earlier.missed = "all ranks are past it"
        appointed = next((round_ for _, round_ in self._open() if round_.tick == tick), None)
        if appointed is not None and appointed.staged:
            return  # this version is being staged: it need not be taken twice
        waiting = [s.round for s in self.slots if s.round and self._insists(s.round) and s.round.store is Store.NEW]
        # Later attempts that no rank has staged do not count: they wait for the ranks, which wait here.
        queued = [round_ for round_ in waiting if round_.tick <= tick or round_.staged]
        if queued or not self.is_planned:
            return
        free = self._grantable()
        if (free is None or appointed is not None) and self._withdraw(now_s, lambda _: True):
            # All ranks wait in this save, so none has acted on that appointment, or will.
            free = self._grantable()
        if free is None:
            return
        round_ = self._open_round(free, self._saves[0].why, tick, now_s)
        round_.metrics = self._metrics()
        self._answer_saves(self._stage_now(free, round_))

    def _adopt(self, round_: Round) -> None:
        """Uses a snapshot that is staged already for the save that all ranks ask for. It must now reach the store like
        any explicit save."""
        if round_.why is not Why.HOLD:
            round_.why = self._saves[0].why
        if round_.store is Store.FAILED:
            round_.store = Store.NEW
        if round_.peer is Store.FAILED:
            round_.peer = Store.NEW
        # The saving rank forgets earlier failures, so an earlier success is reported again.
        for level, state in (("store", round_.store), ("peer", round_.peer)):
            told = self._told.pop((round_.tick, level), None)
            if told is not None and state is Store.DONE:
                self._tell_level(round_.tick, level, told["ok"], told["message"])
        round_.metrics.update(self._metrics())
        self._answer_saves(self._is_saved(round_))

    def _appoint(self, now_s: float, steps: Sequence[int]) -> None:
        hold, extra = self.course in (Course.HOLD, Course.COPY), self._wants_extra()
        self._resumed = self._resumed and not all(steps)
        if self._at_end:
            self._withdraw(now_s, lambda _: True)
        if hold or self.course is Course.PUSH:
            self._withdraw(now_s, lambda r: not r.unjudged)  # all other appointments give way to the last one
        elif extra:
            far = max(steps, default=0) + LEAD_MIN
            self._withdraw(now_s, lambda r: r.tick.step > far)
        at_polls = self.pace.all_poll and self.pace.is_long
        if at_polls and self._withdraw(now_s, lambda r: not r.tick.sub):
            # This step's end is unknown, and no appointment was missed.
            self._extra_tries += self._extra is not None
        if self.course is Course.PUSH or not self._may_appoint() or self._saves or self._open():
            return
        by_clock = now_s >= self._due_s
        if self._start_step is None or not (hold or extra or by_clock):
            return
        slot = self._grantable()
        if slot is None or not (hold or extra or self._can_spare(slot)):
            self._pass_over(now_s)
            return
        at = max(self._start_step, *steps)
        if at_polls or (hold and self.pace.is_poll_next):
            tick = self._next_poll()
        else:
            near = self._near_step(now_s) if hold else None
            tick = self.pace.with_update(near or self._next_step(now_s, at))
        round_ = self._open_round(slot, Why.HOLD if hold else Why.STEP, tick, now_s)
        self._extra_tries -= extra
        round_.announced = True
        kind = WordKind.HOLD if hold else WordKind.TAKE
        self._out.append(SetWord(slot.number, ControlWord(round_.number, slot.number, kind, tick.step, tick.sub)))
        self._due_s = now_s + self._interval_s

    def _pass_over(self, now_s: float) -> None:
        """Skips due snapshots for which no slot is free, once the next one is due too."""
        if now_s >= self._due_s + self._interval_s:
            count = int((now_s - self._due_s) / self._interval_s)
            self._due_s += count * self._interval_s
            self._tell_passed(count, "no slot was free when a snapshot was due")

    def _tell_passed(self, count: int, why: str) -> None:
        """Reports checkpoints that were due and were not taken or not committed."""
        text = f"{counted(count, 'checkpoint')} passed over: {why}"
        self._out.append(Emit("snapshot.passed", text, False, {"count": count}))

    def _next_step(self, now_s: float, at: int) -> Tick:
        """The end of a step far enough ahead of `at`, the foremost rank's step, that two announcements may be late. It
        uses the pace seen since the last call."""
        since_s, since = self._steps_from
        if now_s - since_s >= LATENCY_S:
            self._steps_per_s = (at - since) / (now_s - since_s)
            self._steps_from = (now_s, at)
        return Tick(at + self._lead(self._steps_per_s))

    def _near_step(self, now_s: float) -> Tick | None:
        """An earlier version than `_next_step`: the end of the foremost rank's step, or of the next one; else None. A
        step may take a minute, and a deadline may be as close. It is None if the pace is unknown, this step takes
        unusually long, or announcements were late recently."""
        at, step_s = self.pace.step, self.pace.measured_s
        if not at or not self.pace.is_shown or step_s is None or self._latency_s > LATENCY_S:
            return None
        left_s = self.pace.entered_s + step_s - now_s
        margin_s = max(LATENCY_S, NEAR_MARGIN * step_s)
        if not margin_s - step_s <= left_s <= step_s + margin_s:  # this step is unlike the usual ones
            return None
        return Tick(at if left_s >= margin_s else at + 1)

    def _next_poll(self) -> Tick:
        """The next poll that an announcement can reach, for ranks that all poll within one step, as in a long
        evaluation. If the step ends sooner, the ranks answer "late". Polls of different ranks need not keep pace. So
        the lead includes the polls that ranks of other nodes may have made since their last report."""
        pace = self.pace
        unseen = 0 if self.one_page else math.ceil(TOLD_S * pace.polls_per_s)
        return Tick(pace.step - 1, min(SUB_MAX, pace.poll + unseen + self._lead(pace.polls_per_s)))

    def _lead(self, per_s: float) -> int:
        return max(LEAD_MIN, math.ceil(2 * self._latency_s * per_s))

    def _let_go(self, now_s: float) -> None:
        newest = self.newest.round if self.newest else None
        busy = self.at_work and not (self.only_copies and self._is_all_stored(newest))
        if busy or self._open() or (self.former_saves and self.newest is None):
            return
        unsaved = newest is not None and newest.store is not Store.DONE and not (self.superseded_by or self._given_up)
        if unsaved and self._waits_for_agent(now_s):
            return  # the commit is tried again
        if self.all_gone and not self._closing and not unsaved:
            self._closing = True
            dead = [m.rank for m in self.members if m.presence is Presence.DEAD]
            self._out.append(Close(f"ranks {dead[:8]} died" if dead else "left"))
        for member in self.members.seen.leaving:
            returns = member.insists and now_s < self._returns_by_s(member)
            if returns or (member.lost_s is None and member.leave is AGAIN):
                continue  # the rank gets its answer on its next connection
            if member.lost_s is not None:
                member.leave = None  # no rank waits for this answer any more
            elif self.closed_in_store or unsaved or not self.all_gone:
                error = self.last_error or (f"superseded by {self.superseded_by}" if self.superseded_by else "")
                committed = str(self.committed_tick) if self.committed_tick else None
                self._out.append(AnswerRequest(member.leave, {"committed": committed, "error": error or None}))
                member.leave = None

    # -- small steps

    def _is_all_stored(self, newest: Round | None) -> bool:
        """True if all ranks left without a notice, none died, and the last step is stored: replicas are not needed any
        more."""
        have_left = self.all_gone and not self.members.seen.any_dead and self._report is None
        return have_left and newest is not None and newest.store is Store.DONE

    def _fate(self, rank: int) -> str:
        member = self.members[rank]
        return "died" if member.presence is Presence.DEAD else "is away" if member.away else "left"

    def _waits(self, slot: Slot) -> bool:
        """True if the slot's attempt waits to be committed and must not be skipped."""
        round_ = slot.round
        is_new = slot.state is State.COMPLETE and round_ is not None and round_.store is Store.NEW
        return is_new and round_ is not None and self._insists(round_)

    def _insists(self, round_: Round) -> bool:
        """True if the attempt must reach the store even if newer ones exist. A policy-due save need not while the store
        fails or a notice stands, since training would wait for its slot."""
        is_spared = round_.why is Why.DUE and (self.store_fails or self.course is not Course.STAY)
        return round_.explicit and not is_spared

    def _may_be_all(self, round_: Round) -> bool:
        """True if the attempt's commit was given up for a newer one that is not known to be stored yet."""
        committed = self.committed_tick
        return bool(round_.gave_way) and (committed is None or committed < round_.tick)

    def _gave_way_in_vain(self) -> Slot | None:
        """The slot whose commit was given up for a newer one, if that one failed and is not tried again now."""
        newest = self.newest.round if self.newest is not None else None
        if newest is None or newest.store is not Store.FAILED or not newest.last_try:
            return None
        return next((slot for slot in self.slots if slot.round is not None and self._may_be_all(slot.round)), None)

    def _grantable(self, slots: Sequence[Slot] | None = None) -> Slot | None:
        """A slot, of `slots` if given, that is free and warm on all ranks; else None. A job's only slot counts if its
        attempt is committed; it is then freed."""
        for slot in self._in_use if slots is None else slots:
            if slot.making or slot.leases or not self._fits(slot):
                continue
            if len(slot.warm) < self.world or set(slot.warm.values()) != {self.division}:
                continue
            if slot.state is State.FREE:
                return slot
            if self._gives_way(slot):
                self._free(slot)
                return slot
        return None

    def _can_spare(self, slot: Slot) -> bool:
        """True if a hold would still find a slot after this one is taken. Other slots may still be in the making, which
        may take as long as a commit beside training. The hold might then have to wait for a slot that is being
        committed."""
        others = [each for each in self._in_use if each is not slot]
        if not any(each.state is State.FREE for each in others) or self._grantable(others) is not None:
            return True
        rest = [s.round for s in others if s.state in (State.STAGED, State.COMPLETE) and not s.leases and s.round]
        next_one = self.committing is None and any(round_.store is Store.NEW for round_ in rest)
        return len(rest) > next_one  # a newer complete attempt frees the others

    def _gives_way(self, slot: Slot) -> bool:
        """True if this is the only slot in use and its attempt is in the store. It is False while a retired slot still
        holds an older attempt, which would become the newest again."""
        done = slot.round is not None and slot.round.store is Store.DONE and not slot.round.unjudged
        alone = self.slots_in_use == 1 and all(each.state is State.FREE for each in self.slots if each is not slot)
        return alone and slot.state is State.COMPLETE and done

    def _open_round(self, slot: Slot, why: Why, tick: Tick, now_s: float) -> Round:
        number = self._next_round
        self._next_round = number % ROUND_MAX + 1
        # Forget what was reported of a failed attempt at this version.
        self._told = {key: body for key, body in self._told.items() if key[0] != tick}
        slot.state = State.GRANTED
        slot.round = Round(number, slot.number, why, tick, self.division, now_s, sum(self._need))
        return slot.round

    def _withdraw(self, now_s: float, which: Callable[[Round], bool]) -> bool:
        """Withdraws announced appointments that no rank has staged, so nothing is lost. Returns False if there are
        none."""
        found = [(slot, r) for slot, r in self._open() if r.announced and not r.staged and which(r)]
        for slot, round_ in found:
            self._drop(slot, round_, now_s)
        return bool(found)

    def _abandon(self, slot: Slot, round_: Round, why: str, now_s: float) -> None:
        message = f"the snapshot at {round_.tick} was given up: {why}"
        if round_.staged or round_.missed or round_.explicit:  # else no rank had reached it: nothing is lost
            self._out.append(Emit("save.abandoned", message, round_.explicit))
        if round_.staged or round_.explicit:  # else no rank waits for it, except one that is just staging it
            self._tell_level(round_.tick, "local", False, why)
        if round_.explicit:
            self.last_error = message
        self._drop(slot, round_, now_s)

    def _drop(self, slot: Slot, round_: Round, now_s: float) -> None:
        self._clear_word(round_)
        self._abandoned.append(round_.number)
        if round_.unjudged:
            self._judge(round_, self.is_lost_cause or self._ended, now_s)
        if round_.why is Why.STEP and self.policy.seconds is not None:
            self._retries = min(self._retries + 1, 16)
            self._due_s = round_.opened_s + min(2.0 ** (self._retries - 1), RETRY_S_MAX, self._interval_s)
        self._free(slot)

    def _free(self, slot: Slot) -> None:
        if slot.round is not None and slot is self.safe:
            self._out.append(ReplicaDegraded(slot.round.tick))
        slot.state = State.FREE
        slot.round = None
        self._out.append(Recycle(slot.number))

    def _clear_word(self, round_: Round) -> None:
        if round_.announced:
            round_.announced = False
            self._out.append(SetWord(round_.slot, None))

    def _metrics(self) -> dict[str, float]:
        """The metrics of all ranks' requests; if ranks differ, the lowest rank's value counts."""
        merged: dict[str, float] = {}
        for rank in sorted(self._saves, reverse=True):
            merged.update(self._saves[rank].metrics)
        return merged

    def _stage_now(self, slot: Slot, round_: Round) -> dict[str, Any]:
        return {"saved": False, "round": round_.number, "slot": slot.number, "division": round_.division}

    def _is_saved(self, round_: Round) -> dict[str, Any]:
        level = "store" if round_.store is Store.DONE else "local"
        return {"saved": True, "round": round_.number, "level": level, "tick": str(round_.tick)}

    def _answer_saves(self, body: dict[str, Any]) -> None:
        self._settled = Settled(max(save.tick for save in self._saves.values()), "save-failed", "")
        for save in self._saves.values():
            self._out.append(AnswerRequest(save.request, body))
        self._saves.clear()

    def _refuse_saves(self, kind: str, message: str) -> None:
        self._settled = Settled(max(save.tick for save in self._saves.values()), kind, message)
        for save in self._saves.values():
            self._out.append(Refuse(save.request, kind, message))
        self._saves.clear()
