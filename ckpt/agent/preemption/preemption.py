"""When a job leaves because its machine goes away: what follows from the notices that stand. Pure, as `group` is.

- A certain notice makes the job leave, no earlier than it has to: one appointment of kind HOLD, so long before the
  deadline that the steps up to it, the copy and the commit fit, by what was measured, with a reserve. A signal or an
  operator's word is a request to go now: then it is made at once. Of several, the earliest deadline counts.
- Where a last snapshot cannot reach the store any more but can reach the memory of nodes that stay, it goes there
  first, and those nodes commit it. Where it can reach neither and a complete one still may, nothing newer is taken.
- A job that a launcher starts again on a machine that it has left does not leave by the same notice again: it trains on
  until the machine goes, with one checkpoint more just before.
- An uncertain notice costs one extra checkpoint; one that is taken back before the verdict costs at most that of the
  appointment, and a commit out of its turn. Nobody leaves by either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt.agent.preemption import event_ack
from ckpt.agent.preemption.deadline_strategy import (
    OUTLIVES_S,
    PAST_S,
    SLACK,
    Course,
    SaveTiming,
    When,
    choose,
    outlasts,
)
from ckpt.agent.preemption.event_ack import PlannedEvent
from ckpt.agent.preemption.notice_relay import bare
from ckpt.agent.state.actions import Acknowledge, Emit, WriteOutcome
from ckpt.agent.state.job_facts import REJOIN_S, Round, Slot, State, Store, Why
from ckpt.agent.state.rank_presence import RankState
from ckpt.agent.state.replica_state import ReplicaState
from ckpt.agent.state.step_timing import PACE_S
from ckpt.ipc.notice_sources import FORMER, SIGNAL
from ckpt.ipc.outcome_file import text_of
from ckpt.policy.save_options import STEPS_APART
from ckpt.preemption.notice import MOVED_S
from ckpt.types import Tick

RESERVE_S = 10.0  # kept free before a deadline: clocks differ, stores have slow moments, machines go early
SAVING_S = 60.0  # hashing and commit, before one was measured: leave early rather than late
STEPS_TO_HOLD = 3  # the two that an appointment is made ahead, and the one under way
END_S = 2.0  # before a signal's deadline, whatever is still waited for: to leave in order
# Before a deadline, whatever is still under way: ranks wait until a second before it, and in a container the agent ends
# with them.
OUTCOME_S = 1.5
EXTRA_TRIES = 3
# So long before it is time to leave by a notice it counts already, since a machine may go early: what is complete is
# committed out of its turn, once, and what goes wrong is no failure that nobody knew of. The lead of an EC2 spot
# notice.
NEAR_S = 120.0
NOTICES_MAX = 100


@dataclass(frozen=True, slots=True)
class StandingNotice:
    """A notice that stands. `deadline_s`, `told_s`: on the clock of `decide`. (source, key) names it: told again it
    replaces the former. `nodes`: those that it is about; "" is this one."""

    source: str
    key: str
    deadline_s: float
    told_s: float
    certain: bool = True
    when: When = When.IN_TIME
    nodes: frozenset[str] = frozenset({""})

    @property
    def sends_away(self) -> bool:
        """Whether the job leaves by it."""
        return self.certain and self.when is not When.NOT_AGAIN

    @property
    def bare_key(self) -> str:
        """The key as its source gave it, on whichever of these nodes it was told first."""
        return next((key for node in self.nodes if (key := bare(self.key, node)) != self.key), self.key)

    def is_that_of(self, other: StandingNotice) -> bool:
        """Whether it is the same event, which each node hears of by itself: the end of an allocation, say."""
        same = (self.source, self.bare_key, self.certain, self.when)
        same_time = abs(self.deadline_s - other.deadline_s) <= MOVED_S
        return same_time and same == (other.source, other.bare_key, other.certain, other.when)


# The level of the newest one, its tick, the newest committed, the newest in other nodes' memory, an error.
Saved = tuple[str, Tick | None, Tick | None, Tick | None, str]


@dataclass(frozen=True, slots=True)
class Report:
    """What is to be reported once it is settled. `how`: "left"; "ended" (the ranks were told to end where they are);
    "pushed" (there was no time for more than what was complete, and nobody left); "stayed" (the deadline has passed and
    nobody left). `why`: of an end."""

    how: str
    why: str
    deadline_s: float
    sources: tuple[str, ...]
    told: Saved | None = None  # what was told of it already


class Preemption(ReplicaState):
    """The facts of one job, and what follows from the notices among them."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.notices: dict[tuple[str, str], StandingNotice] = {}
        self.course = Course.STAY
        self._due: set[tuple[str, str]] = set()  # it is time to leave by them; see `_find_due`
        self._over: set[tuple[str, str]] = set()  # whose passing was reported
        self._saved: SaveTiming | None = None  # from all staged to committed
        self._committed_in: SaveTiming | None = None  # of that, the commit alone
        self._copied: SaveTiming | None = None  # from all staged to copied
        self._copy_by_s: float | None = None  # the last one goes to nodes that stay first, and until then
        self._stall_s = 0.0
        self._extra_asked = False
        self._extra: Tick | None = None  # a checkpoint of that tick or a later one is wanted once
        self._extra_tries = 0
        self._extra_alone = False  # no notice asks for it
        self._away: Tick | None = None  # the first complete one from that tick on is committed, whoever's turn it is
        self._near: set[tuple[str, str]] = set()  # certain ones that count already, though it is not time to leave
        self._early: Tick | None = None  # the same as `_away`, for their sake
        self._report: Report | None = None
        self._end_reported = False  # that they left since they had come to their end: said once
        self.may_acknowledge = False  # whether the user lets planned events begin at once when all is safe
        self.acknowledging = False  # one is being told so
        self._acknowledged: set[PlannedEvent] = set()  # or tried in vain
        self._all_said = False  # nothing is left to be acknowledged
        self._left_saved = False  # all ranks left by a notice, and what they staged last is in the store

    # -- facts

    def warn(self, told: StandingNotice) -> StandingNotice:
        """A notice, new or moved; as it stands now. A signal that another rank got as well keeps its first deadline. By
        what this start leaves it leaves also where its time moves meanwhile."""
        name = (told.source, told.key)
        before = self.notices.get(name)
        if told.deadline_s <= told.told_s:
            told = replace(told, deadline_s=told.told_s + PAST_S)
        if before is not None:
            first_s = min(before.deadline_s, told.deadline_s) if told.source == SIGNAL else told.deadline_s
            nodes = told.nodes | before.nodes
            when = before.when if self._leave_round and before.sends_away and told.certain else told.when
            told = replace(told, when=when, told_s=before.told_s, deadline_s=first_s, nodes=nodes)
            if told.deadline_s > before.deadline_s or not told.certain:
                self._due.discard(name)
                self._over.discard(name)
        elif not told.certain:
            self._extra_asked = True
        self.notices[name] = told
        if len(self.notices) > NOTICES_MAX:
            self._make_room(name)
        return told

    def _make_room(self, newest: tuple[str, str]) -> None:
        """Of what many nodes hear alike one counts for all of them: none of those is taken for a node that stays. Else
        the one that is farthest ahead is forgotten."""
        told = self.notices[newest]
        alike = [name for name, each in self.notices.items() if name != newest and each.is_that_of(told)]
        if not alike:
            self.withdrawn(*max(self.notices, key=lambda each: self.notices[each].deadline_s))
            return
        kept = self.notices[alike[0]]
        until_s = min(kept.deadline_s, told.deadline_s)
        self.notices[alike[0]] = replace(kept, deadline_s=until_s, nodes=kept.nodes | told.nodes)
        self.withdrawn(*newest)

    def withdrawn(self, source: str, key: str) -> None:
        """It stands no longer. Once the ranks were told to leave they leave."""
        self.notices.pop((source, key), None)
        self._due.discard((source, key))
        self._over.discard((source, key))
        self._is_far((source, key))

    def goes_on(self, former: Preemption) -> None:
        """This start goes on from that one, which was here: saving takes as long as it took there, until it is
        measured."""
        self._saved, self._copied = self._saved or former._saved, self._copied or former._copied
        self._committed_in = self._committed_in or former._committed_in

    def acknowledged(self) -> None:
        """What `Acknowledge` asked for has ended, whatever came of it: it is not tried again."""
        self.acknowledging = False

    def ask_extra(self) -> None:
        """A failure is predicted: one checkpoint more, soon, and into the store. Nobody leaves by it."""
        self._extra_asked = self._extra_alone = True

    def committed(self, slot: int, error: str, now_s: float, passes: bool = False) -> None:
        """How long it took is remembered, a slow one for longer than a quick one."""
        super().committed(slot, error, now_s, passes)
        round_ = self.slots[slot].round
        if round_ is not None and error and self._waits_for_agent(now_s):
            round_.last_try = False  # that node could not do its part
        if round_ is not None and round_.commit_began_s is not None and not error:
            took_s = now_s - round_.commit_began_s
            self._committed_in = SaveTiming.learnt(took_s, round_.bytes, self._committed_in)
            self._saved = SaveTiming.learnt(took_s + (round_.hashed_s or 0.0), round_.bytes, self._saved)
        if self._away is not None and self.committed_tick is not None and self.committed_tick >= self._away:
            self._away = None
        if self._early is not None and self.committed_tick is not None and self.committed_tick >= self._early:
            self._early = None

    def replicated(self, slot: int, error: str, now_s: float) -> str:
        """The same of copies."""
        why_not = super().replicated(slot, error, now_s)
        round_ = self.slots[slot].round
        if round_ is not None and round_.copy_began_s is not None and not error:
            took_s = now_s - round_.copy_began_s + (round_.hashed_s or 0.0)
            self._copied = SaveTiming.learnt(took_s, round_.bytes, self._copied)
        return why_not

    # -- what others ask

    def _late_commit_s(self) -> float:
        """One that is appointed when a commit is due is announced so many steps ahead, and waits for the end of one."""
        return super()._late_commit_s() + (STEPS_APART + 1) * self.pace.usual_s

    @property
    def _saving_s(self) -> float | None:
        """From all staged to committed, by what was measured, for what is saved now."""
        return self._saved.seconds_of(sum(self._need)) if self._saved is not None else None

    @property
    def _copying_s(self) -> float | None:
        """From all staged to copied, as well."""
        return self._copied.seconds_of(sum(self._need)) if self._copied is not None else None

    @property
    def need_s(self) -> float:
        """How long before a deadline the last appointment has to be made."""
        return self._least_s() * SLACK + RESERVE_S

    def is_warned(self, now_s: float) -> bool:
        """Whether a machine is certain to go soon, or should just have gone. One may also be told of days ahead (the
        end of an allocation, a maintenance): until then that changes nothing."""
        certain = {n: each for n, each in self.notices.items() if each.certain and now_s < each.deadline_s + OUTLIVES_S}
        near = any(each.when is When.AT_ONCE or now_s >= self._near_from_s(each) for each in certain.values())
        return near or any(name in self._due for name in certain)

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to leave, or for one checkpoint more, by a notice whose deadline is ahead."""
        return any(self.notices[name].deadline_s > now_s for name in self._due)

    @property
    def doomed(self) -> frozenset[str]:
        """The nodes that go away, as far as notices are certain, and before one that stays longer could have committed
        what it keeps; "" is this one."""
        due = {name: each for name, each in self.notices.items() if name in self._due}
        until_s = min((each.deadline_s for each in due.values()), default=-math.inf) + self.need_s
        going = [each for n, each in self.notices.items() if each.certain and (n in due or each.deadline_s <= until_s)]
        return frozenset(node for each in going for node in each.nodes)

    @property
    def left_to_others(self) -> frozenset[str]:
        """The nodes whose part of the last commit is written by those that keep copies of it."""
        newest = self.newest
        copied = newest is not None and newest.round is not None and newest.round.peer is Store.DONE
        return self.doomed if copied and self._copy_by_s is not None else frozenset()

    @property
    def heeds_notices(self) -> bool:
        """Whether it matters still what is told of its machines: also until it is said what was saved, since that is
        said before a deadline, and by which nodes go."""
        return not self.all_gone or self._report is not None or (self.may_acknowledge and not self._all_said)

    @property
    def wants_extra(self) -> bool:
        """Whether one checkpoint more was asked for and is not on its way off this node yet: while the commit of an
        older one keeps the store busy, another of each few seconds would cost its stall and be no safer."""
        if self._extra_asked or self._extra is not None:
            return True
        round_ = self.newest.round if self.newest is not None else None
        if round_ is None or self._away is None or round_.tick < self._away:
            return False
        return round_.store in (Store.NEW, Store.FAILED) and round_.peer is not Store.DONE

    @property
    def safe_since_s(self) -> float:
        """When the newest was appointed that is in the store or in other nodes' memory, or on its way to the store;
        -math.inf: there is none."""
        safe = self._safe_whole if self.replicates else None
        return max(self._committed_from_s, safe.opened_s if safe is not None else -math.inf)

    def safe_within_s(self, copied_s: float | None) -> float:
        """From asking for a checkpoint until it is safe off this node. `copied_s`: in other nodes' memory after so
        long; None: that is the store's."""
        return self._least_s(copied_s)

    def _least_s(self, saving_s: float | None = None) -> float:
        """From making an appointment to its commit, by what was measured, and nothing in reserve."""
        if saving_s is None:
            saving_s = SAVING_S if self._saving_s is None else self._saving_s
        return STEPS_TO_HOLD * self.pace.step_s + 2 * self._latency_s + self._stall_s + saving_s

    def deadline_s(self, now_s: float) -> float | None:
        """The earliest that is certain and still ahead."""
        return min((each.deadline_s for each in self._live(now_s)), default=None)

    def next_wake_s(self, now_s: float) -> float | None:
        times = [super().next_wake_s(now_s)]
        for name, each in self.notices.items():
            if each.certain and each.deadline_s > now_s:
                times.append(each.deadline_s)
                due_s = self._due_from_s(each) if name not in self._due else None
                times += [max(now_s, due_s)] if due_s is not None else []
                near_s = self._near_from_s(each)
                times += [near_s] if near_s > now_s and name not in self._due | self._near else []
                last_s = each.deadline_s - self._last_within_s()
                times += [last_s] if last_s > now_s else []
        if any(round_.announced and not round_.tick.sub for _, round_ in self._open()):
            times.append(now_s + PACE_S)  # the ranks may poll before they come to that step, and for long
        back_s = [self._returns_by_s(member) for member in self.members.seen.lost if member.leave is not None]
        times += [at_s for at_s in back_s if at_s > now_s]
        if self._copy_by_s is not None and self._copy_by_s > now_s:
            times.append(self._copy_by_s)
        if self._report is not None:
            ends_s = self._report.deadline_s
            times += [at_s for at_s in (ends_s - OUTCOME_S, ends_s) if at_s > now_s]
        return min((each for each in times if each is not None), default=None)

    # -- decisions

    def _tend_notices(self, now_s: float, steps: Sequence[int]) -> None:
        """Measures, and settles which course holds for this round of decisions."""
        self._measure(now_s)
        self._find_due(now_s)
        self._find_near(now_s)
        self._tend_extra(steps)
        self.course = self._choose(now_s)
        self._tend_push(now_s)
        self._tend_end(now_s)
        passed = [n for n, each in self.notices.items() if each.sends_away and each.deadline_s <= now_s]
        new = [name for name in passed if name not in self._over]
        self._over.update(new)
        if new and not (self._leave_round or self._ended or self.all_gone or self.superseded_by):
            deadline_s = max(self.notices[name].deadline_s for name in new)
            self._report = Report("stayed", "", deadline_s, self._texts(new))

    def _tend_push(self, now_s: float) -> None:
        """Where there is time for nothing else, what came of it is said shortly before the deadline; else a hold
        follows, and what comes of that is said. So it is where the ranks were told to go before, or the run is
        another's."""
        pushed = self._report is not None and self._report.how == "pushed"
        is_over = self._leave_round or self._ended or self.superseded_by
        deadline_s = None if is_over else self.deadline_s(now_s)
        if self.course is Course.PUSH and self._report is None and deadline_s is not None:
            self._report = Report("pushed", "", deadline_s, self._certain())
        elif pushed and self.course in (Course.HOLD, Course.COPY, Course.STAY):
            self._report = None

    def _tend_end(self, now_s: float) -> None:
        """All ranks had come to their end before it was time to leave, and wait for the last commit: they leave at one
        step and in order, whatever is heard of meanwhile."""
        if not self._at_end or self._leave_round or self._ended or self.all_gone or self.superseded_by:
            return
        due = [each for each in self._live(now_s) if (each.source, each.key) in self._due]
        if due and not self._end_reported and (self._report is None or self._report.how == "pushed"):
            self._end_reported = True
            self._report = Report("left", "", min(each.deadline_s for each in due), self._certain())

    def _measure(self, now_s: float) -> None:
        for slot in self.slots:
            round_ = slot.round
            if round_ is None or not round_.staged:
                continue
            if slot.state is State.STAGED and round_.all_staged_s is None:
                round_.all_staged_s = now_s
                self._stall_s = max(round_.staged.values())
            elif slot.state is State.COMPLETE and round_.hashed_s is None and round_.all_staged_s is not None:
                round_.hashed_s = now_s - round_.all_staged_s

    def _find_due(self, now_s: float) -> None:
        """By which it is time to leave; by what a start has left before it is time for one checkpoint more. One that
        proves false is due no more; nor is one that was early, before anybody leaves: saving turns out to be quick, or
        a long step ends that might have gone on for as long again."""
        leaves = bool(self._leave_round) or self._ended or self._report is not None
        for name, each in self.notices.items():
            early = each.when is not When.AT_ONCE and now_s < each.deadline_s - 2 * self.need_s
            if now_s >= each.deadline_s + OUTLIVES_S or (early and not leaves):
                self._due.discard(name)
            due_s = self._due_from_s(each)
            if due_s is not None and due_s <= now_s < each.deadline_s and name not in self._due:
                self._due.add(name)
                self._extra_asked = self._extra_asked or not each.sends_away

    def _find_near(self, now_s: float) -> None:
        """The first that is complete from then on, or is already, is committed for each: a machine may go early. Not
        all that follow: a notice may be taken back, and is to cost no more than that."""
        for name, each in self.notices.items():
            near_s = self._near_from_s(each)
            if not each.certain or now_s < near_s - NEAR_S:  # put off; no estimate moves by so much
                self._is_far(name)
            elif near_s <= now_s < each.deadline_s and name not in self._near and name not in self._due:
                self._near.add(name)
                newest = self.newest.round if self.newest is not None else None
                if newest is None:
                    self._early = Tick(0)
                elif newest.store is not Store.DONE:
                    self._early = newest.tick

    def _is_far(self, name: tuple[str, str]) -> None:
        self._near.discard(name)
        if not self._near:
            self._early = None

    def _near_from_s(self, each: StandingNotice) -> float:
        return each.deadline_s - self.need_s - NEAR_S

    def _due_from_s(self, each: StandingNotice) -> float | None:
        """When it is time to leave by it. None: that is not known before this start trains, since until then what it
        goes on from may not have told how long saving takes."""
        if each.when is When.AT_ONCE and each.certain:
            return -math.inf
        return each.deadline_s - self.need_s if each.certain and self._start_step is not None else None

    def _tend_extra(self, steps: Sequence[int]) -> None:
        if self._extra_asked:
            self._extra_asked = False
            self._extra, self._extra_tries = Tick(max(steps, default=0)), EXTRA_TRIES
            self._away = self._extra
        newest = self.newest
        if self._extra is None:
            return
        reached = newest is not None and newest.round is not None and newest.round.tick >= self._extra
        in_vain = self._extra_tries <= 0 and not self._open()
        asked = self._extra_alone or not all(each.sends_away for each in self.notices.values())
        self._away = self._away if asked else None
        if reached or in_vain or not asked:
            self._extra, self._extra_alone = None, False

    def _wants_extra(self) -> bool:
        """Whether a checkpoint is to be taken soon that no appointment would bring, and none is on its way."""
        extra = self._extra
        if extra is None or self._extra_tries <= 0:
            return False
        return not any(s.state is State.STAGED and s.round is not None and s.round.tick >= extra for s in self.slots)

    def _choose(self, now_s: float) -> Course:
        live = self._live(now_s)
        if not live:
            return Course.OVER if any(each.sends_away for each in self.notices.values()) else Course.STAY
        if not any((each.source, each.key) in self._due for each in live):
            return Course.STAY
        if any(s.round is not None and s.round.unjudged for s in self.slots):
            return Course.COPY if self.course is Course.COPY else Course.HOLD
        newest = self.newest
        may_reach = newest is not None and newest.round is not None and newest.round.store in (Store.NEW, Store.RUNNING)
        goes_away = not any(each.when is When.AT_ONCE for each in live)  # else this host's memory may outlive the job
        left_s = min(each.deadline_s for each in live) - now_s
        pushes = may_reach and goes_away and self._saving_s is not None
        return choose(left_s, self._least_s(), self._copied_within_s(), pushes)

    def _copied_within_s(self) -> float | None:
        """From making an appointment until nodes that stay have what it brings, by what was measured; None: nobody
        will, or nothing was measured."""
        if self._copying_s is None or not (self.replicates and outlasts(self.kept, self.doomed)):
            return None
        before_s = self._copying_s if self.replicating is not None else 0.0  # one at a time
        return before_s + self._least_s(self._copying_s)

    def _would_delay_the_last(self, now_s: float) -> bool:
        """Whether the commit of what is complete would keep a last snapshot, which still fits, from being saved before
        the deadline."""
        deadline_s = self.deadline_s(now_s)
        if deadline_s is None or self._saving_s is None or self.course is Course.PUSH:
            return False
        left_s = deadline_s - now_s
        return self._last_within_s() <= left_s < self._least_s() + self._saving_s

    def _keeps_back_the_last(self, slot: Slot, now_s: float) -> bool:
        """Whether the commit of what that slot holds keeps the last snapshot, at which all leave and which is complete,
        from being in the store before the deadline, where it would be if its own began now. By what was measured; the
        time that the former has taken already counts. Where both fit, or neither does, the older one goes first: it may
        be all that is saved."""
        newest, deadline_s, took = self.newest, self.deadline_s(now_s), self._committed_in
        last, older = newest.round if newest is not None else None, slot.round
        if last is None or older is None or last is older or took is None or deadline_s is None:
            return False
        if not (last.why is Why.HOLD and last.verdict and last.store is Store.NEW) or self.superseded_by:
            return False
        if self._copies_first(now_s) or self._level_in_memory(last) == "peer":
            return False  # it is safe without that commit, or will be
        began_s = older.commit_began_s if older.store is Store.RUNNING else None
        before_s = max(0.0, took.seconds_of(older.bytes) - (0.0 if began_s is None else now_s - began_s))
        last_s = took.seconds_of(last.bytes)
        return last_s <= deadline_s - now_s < before_s + last_s

    def _last_within_s(self) -> float:
        """So long before a deadline a last snapshot still fits, the way it is to be saved."""
        copied_s = self._copied_within_s() if self.course is Course.COPY else None
        return self._least_s() if copied_s is None else copied_s

    def _waits_for_agent(self, now_s: float) -> bool:
        """Whether the agent of a rank that waits to leave is gone, and with it what that node was to write of the last
        commit. Another one comes soon, if any does; nobody needs it where other nodes keep copies."""
        round_ = self.newest.round if self.newest is not None else None
        if round_ is None or round_.peer is Store.DONE or self._given_up:
            return False
        return any(now_s < self._returns_by_s(each) for each in self.members.seen.lost if each.leave is not None)

    def _returns_by_s(self, member: RankState) -> float:
        """Until when a rank that waits to leave is taken to come back; -math.inf: its connection is not gone."""
        if member.lost_s is None:
            return -math.inf
        by_s = math.inf if self._leave_by_s is None else self._leave_by_s - END_S
        return -math.inf if self.superseded_by else min(member.lost_s + REJOIN_S, by_s)

    def _copies_first(self, now_s: float) -> bool:
        """Whether the last snapshot, which is complete, goes to nodes that stay before it is committed."""
        round_ = self.newest.round if self.newest is not None else None
        by_s = self._copy_by_s
        wanted = self.course is Course.COPY or (by_s is not None and now_s < by_s)
        if not wanted or not self.replicates or round_ is None or round_.why is not Why.HOLD:
            return False
        return round_.peer in (Store.NEW, Store.RUNNING) and outlasts(self.kept, self.doomed)

    def _tell_outcome(self, now_s: float) -> None:
        """Once what was saved is settled. Where that takes up to the deadline, shortly before it as it is then, and
        again when more of it has come to be."""
        report, newest = self._report, self.newest
        round_ = newest.round if newest is not None else None
        if report is None:
            return
        store = round_.store if round_ is not None else Store.DONE
        again = store is Store.FAILED and round_ is not None and not round_.last_try and report.how != "stayed"
        under_way = bool(self._open()) or self.at_work or store in (Store.NEW, Store.RUNNING) or again
        may_change = under_way and now_s < report.deadline_s and not self.superseded_by
        if may_change and now_s < report.deadline_s - OUTCOME_S:
            return
        level = "none" if round_ is None else "store" if store is Store.DONE else self._level_in_memory(round_)
        tick = round_.tick if round_ is not None else None
        safe = self.safe.round if self.safe is not None else None
        peer_tick = safe.tick if safe is not None and self._level_in_memory(safe) == "peer" else None
        saved = level, tick, self.committed_tick, peer_tick, self.last_error
        self._left_saved = report.how == "left" and level == "store"
        self._report = replace(report, told=saved) if may_change else None
        if saved == report.told:
            return
        left_s = report.deadline_s - now_s
        body = {
            "how": report.how,
            "why": report.why,
            "notices": list(report.sources or self._certain() or (FORMER,)),
            "level": level,
            "tick": str(tick) if tick is not None else None,
            "step": tick.step if tick is not None else None,
            "committed_step": self.committed_tick.step if self.committed_tick is not None else None,
            "peer_step": peer_tick.step if peer_tick is not None else None,
            "left_s": round(left_s, 3),
            "error": self.last_error,
        }
        self._out.append(WriteOutcome(body))
        self._out.append(Emit("notice.outcome", text_of(body), True, body))

    def _level_in_memory(self, round_: Round) -> str:
        gone = self.doomed | self._lost_with
        copied = round_.tick == self.safe_tick and outlasts(self.safe_kept, gone)
        return "peer" if copied else "local"

    def _acknowledge(self, now_s: float) -> None:
        """The last of all: see `acknowledging`."""
        answered = self.closed_in_store and not self.members.seen.leaving
        if self.acknowledging or not (answered or self.superseded_by):
            return
        may = self.may_acknowledge and self._left_saved and not self.superseded_by
        found = event_ack.next_of(self.notices.values(), self._acknowledged, now_s) if may else None
        self._all_said = found is None
        if found is not None:
            planned, node = found
            self._acknowledged.add(planned)
            self.acknowledging = True
            self._out.append(Acknowledge(planned.source, planned.key, node))

    # -- small steps

    def _live(self, now_s: float) -> list[StandingNotice]:
        return [each for each in self.notices.values() if each.sends_away and each.deadline_s > now_s]

    def _certain(self) -> tuple[str, ...]:
        return self._texts([(each.source, each.key) for each in self.notices.values() if each.sends_away])

    def _texts(self, names: Sequence[tuple[str, str]]) -> tuple[str, ...]:
        return tuple(f"{source} {key}"[:200] for source, key in sorted(names))
