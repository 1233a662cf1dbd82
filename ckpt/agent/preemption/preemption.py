"""The preemption of one job: decides from the standing notices when the ranks leave, and what is saved before. Pure.

- A certain notice makes the job leave, as late as possible. One appointment of kind HOLD is made so early that its
  steps, replication and commit fit before the deadline, by measured times and a reserve. A signal or an
  operator's request means leave now: the appointment is made at once. The earliest of several deadlines counts.
- If the last snapshot cannot be committed in time but can be replicated to nodes that stay, this is done first. Those
  nodes then commit the snapshot. If it can be neither, and a complete checkpoint still can, no newer one is taken.
- A job restarted on a machine that it had left does not leave by the same notice again. It trains on until the machine
  goes, with one extra checkpoint just before.
- An uncertain notice costs one extra checkpoint. A notice withdrawn before the verdict costs at most the appointed
  checkpoint and one commit out of turn. The ranks leave by neither.
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
from ckpt.agent.preemption.notice_relay import StandingNotice
from ckpt.agent.state.actions import Acknowledge, Emit, WriteOutcome
from ckpt.agent.state.job_facts import REJOIN_S, Round, Slot, State, Store, Why
from ckpt.agent.state.rank_presence import RankState
from ckpt.agent.state.replica_state import ReplicaState
from ckpt.agent.state.step_timing import PACE_S
from ckpt.ipc.notice_sources import FORMER, SIGNAL
from ckpt.ipc.outcome_file import text_of
from ckpt.policy.save_options import STEPS_APART
from ckpt.types import Tick

# Kept free before a deadline: clocks differ, stores have slow moments, machines go early.
RESERVE_S = 10.0
# Assumed time for hashing and commit before one was measured: leave early rather than late.
SAVING_S = 60.0
STEPS_TO_HOLD = 3  # two that an appointment lies ahead, and the present one
# So long before a signal's deadline the ranks stop waiting and leave in order.
END_S = 2.0
# So long before a deadline the outcome is reported, even if work is under way. The ranks wait until one second before
# the deadline, and in a container the agent ends with them.
OUTCOME_S = 1.5
EXTRA_TRIES = 3
# So long before it is time to leave a notice counts as near, since a machine may go early: one complete checkpoint is
# committed out of turn, and a failure counts as warned. The lead of an EC2 spot notice.
NEAR_S = 120.0
NOTICES_MAX = 100


# Of a report: the newest checkpoint's level and version; the newest committed and replicated versions; an error.
Saved = tuple[str, Tick | None, Tick | None, Tick | None, str]


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a notice, reported once what was saved is settled.

    `how`: "left"; "ended" (the ranks were told to end where they are); "pushed" (time sufficed only for the complete
    checkpoint, and no rank left); "stayed" (the deadline passed, and no rank left). `why`: the reason of "ended"."""

    how: str
    why: str
    deadline_s: float
    sources: tuple[str, ...]
    told: Saved | None = None  # what was already reported


class Preemption(ReplicaState):
    """The facts of one job and its notices, and the decisions that follow from the notices."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.notices: dict[tuple[str, str], StandingNotice] = {}
        self.course = Course.STAY
        self._due: set[tuple[str, str]] = set()  # notices by which it is time to leave; see `_find_due`
        self._over: set[tuple[str, str]] = set()  # notices whose passing was reported
        self._saved: SaveTiming | None = None  # from all staged to committed
        self._committed_in: SaveTiming | None = None  # the commit alone
        self._copied: SaveTiming | None = None  # from all staged to replicated
        # Until this time the last snapshot is replicated to nodes that stay before it is committed.
        self._copy_by_s: float | None = None
        self._stall_s = 0.0
        self._extra_asked = False
        self._extra: Tick | None = None  # one extra checkpoint is wanted, of this version or a later one
        self._extra_tries = 0
        self._extra_alone = False  # the extra checkpoint was asked for without a notice
        # The first complete checkpoint from this version on is committed out of turn, as the extra one.
        self._away: Tick | None = None
        self._near: set[tuple[str, str]] = set()  # certain notices at most NEAR_S before it is time to leave
        self._early: Tick | None = None  # as `_away`, for these notices
        self._report: Report | None = None
        self._end_reported = False  # the leave of ranks at the end of their blocks was reported
        self.may_acknowledge = False  # the user allows acknowledgements; see event_ack.py
        self.acknowledging = False  # an acknowledgement is under way
        self._acknowledged: set[PlannedEvent] = set()  # events tried, also in vain
        self._all_said = False  # no event is left to acknowledge
        self._left_saved = False  # all ranks left by a notice, and their last snapshot is committed

    # -- facts

    def warn(self, told: StandingNotice) -> StandingNotice:
        """Records a new or moved notice; returns the notice as it stands now. A signal that several ranks got keeps its
        earliest deadline. Once the ranks leave by a notice they leave even if its deadline moves."""
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
        """Merges the newest notice with the same event heard by other nodes: none of them then counts as a node that
        stays. If there is none, the notice with the latest deadline is dropped."""
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
        """That notice stands no longer. Ranks that were told to leave still leave."""
        self.notices.pop((source, key), None)
        self._due.discard((source, key))
        self._over.discard((source, key))
        self._is_far((source, key))

    def goes_on(self, former: Preemption) -> None:
        """Takes the save times of the former start on this node, from which this one continues, until its own are
        measured."""
        self._saved, self._copied = self._saved or former._saved, self._copied or former._copied
        self._committed_in = self._committed_in or former._committed_in

    def acknowledged(self) -> None:
        """Outcome of `Acknowledge`: it has ended, successful or not, and is not tried again."""
        self.acknowledging = False

    def ask_extra(self) -> None:
        """A failure is predicted: one extra checkpoint is soon taken and committed. No rank leaves for that."""
        self._extra_asked = self._extra_alone = True

    def committed(self, slot: int, error: str, now_s: float, passes: bool = False) -> None:
        """As `JobFacts.committed`; also measures the commit time."""
        super().committed(slot, error, now_s, passes)
        round_ = self.slots[slot].round
        if round_ is not None and error and self._waits_for_agent(now_s):
            round_.last_try = False  # the lost node could not write its part
        if round_ is not None and round_.commit_began_s is not None and not error:
            took_s = now_s - round_.commit_began_s
            self._committed_in = SaveTiming.learnt(took_s, round_.bytes, self._committed_in)
            self._saved = SaveTiming.learnt(took_s + (round_.hashed_s or 0.0), round_.bytes, self._saved)
        if self._away is not None and self.committed_tick is not None and self.committed_tick >= self._away:
            self._away = None
        if self._early is not None and self.committed_tick is not None and self.committed_tick >= self._early:
            self._early = None

    def replicated(self, slot: int, error: str, now_s: float) -> str:
        """As `ReplicaState.replicated`; also measures the replication time."""
        why_not = super().replicated(slot, error, now_s)
        round_ = self.slots[slot].round
        if round_ is not None and round_.copy_began_s is not None and not error:
            took_s = now_s - round_.copy_began_s + (round_.hashed_s or 0.0)
            self._copied = SaveTiming.learnt(took_s, round_.bytes, self._copied)
        return why_not

    # -- queries

    def _late_commit_s(self) -> float:
        """As `JobFacts._late_commit_s`, later by the steps that an appointment lies ahead."""
        return super()._late_commit_s() + (STEPS_APART + 1) * self.pace.usual_s

    @property
    def _saving_s(self) -> float | None:
        """Measured seconds from all staged to committed, scaled to the present state; None: not measured."""
        return self._saved.seconds_of(sum(self._need)) if self._saved is not None else None

    @property
    def _copying_s(self) -> float | None:
        """Measured seconds from all staged to replicated, scaled to the present state; None: not measured."""
        return self._copied.seconds_of(sum(self._need)) if self._copied is not None else None

    @property
    def need_s(self) -> float:
        """Seconds before a deadline at which the last appointment has to be made."""
        return self._least_s() * SLACK + RESERVE_S

    def is_warned(self, now_s: float) -> bool:
        """Whether a machine is certain to go soon, or should just have gone. A notice that is days ahead (the end of an
        allocation, a maintenance) does not count yet."""
        certain = {n: each for n, each in self.notices.items() if each.certain and now_s < each.deadline_s + OUTLIVES_S}
        near = any(each.when is When.AT_ONCE or now_s >= self._near_from_s(each) for each in certain.values())
        return near or any(name in self._due for name in certain)

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to leave, or to take an extra checkpoint, by a notice whose deadline is ahead."""
        return any(self.notices[name].deadline_s > now_s for name in self._due)

    @property
    def doomed(self) -> frozenset[str]:
        """The nodes that go away by certain notices: those that are due, and those that go before they could commit the
        replicas that they hold; "" is this node."""
        due = {name: each for name, each in self.notices.items() if name in self._due}
        until_s = min((each.deadline_s for each in due.values()), default=-math.inf) + self.need_s
        going = [each for n, each in self.notices.items() if each.certain and (n in due or each.deadline_s <= until_s)]
        return frozenset(node for each in going for node in each.nodes)

    @property
    def left_to_others(self) -> frozenset[str]:
        """The nodes whose part of the last commit is written by holders of its replicas."""
        newest = self.newest
        copied = newest is not None and newest.round is not None and newest.round.peer is Store.DONE
        return self.doomed if copied and self._copy_by_s is not None else frozenset()

    @property
    def heeds_notices(self) -> bool:
        """Whether notices still matter to this job. They do until the outcome is reported and all events are
        acknowledged: the report depends on the deadline and on the nodes that go."""
        return not self.all_gone or self._report is not None or (self.may_acknowledge and not self._all_said)

    @property
    def wants_extra(self) -> bool:
        """Whether an extra checkpoint was asked for and is not on its way off this node. True also while an older
        commit delays it: more extra checkpoints meanwhile would cost their stall and protect nothing."""
        if self._extra_asked or self._extra is not None:
            return True
        round_ = self.newest.round if self.newest is not None else None
        if round_ is None or self._away is None or round_.tick < self._away:
            return False
        return round_.store in (Store.NEW, Store.FAILED) and round_.peer is not Store.DONE

    @property
    def safe_since_s(self) -> float:
        """When the newest checkpoint was appointed that is replicated, committed or being committed; -math.inf: there
        is none."""
        safe = self._safe_whole if self.replicates else None
        return max(self._committed_from_s, safe.opened_s if safe is not None else -math.inf)

    def safe_within_s(self, copied_s: float | None) -> float:
        """Seconds from asking for a checkpoint until it is safe off this node: replicated, which takes `copied_s`, or
        committed if that is None."""
        return self._least_s(copied_s)

    def _least_s(self, saving_s: float | None = None) -> float:
        """Expected seconds from an appointment until the snapshot is saved, without a reserve. `saving_s`: from all
        staged to saved; None: to committed."""
        if saving_s is None:
            saving_s = SAVING_S if self._saving_s is None else self._saving_s
        return STEPS_TO_HOLD * self.pace.step_s + 2 * self._latency_s + self._stall_s + saving_s

    def deadline_s(self, now_s: float) -> float | None:
        """The earliest deadline ahead by which the job leaves; None: there is none."""
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
            # The ranks may poll for long before they come to the appointed step.
            times.append(now_s + PACE_S)
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
        """Measures save times, and sets the course for this call of `decide`."""
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
        """Plans or cancels the report "pushed". If only the pending commit fits before the deadline, its outcome is
        reported just before the deadline. A hold has a report of its own, so it cancels this one."""
        pushed = self._report is not None and self._report.how == "pushed"
        is_over = self._leave_round or self._ended or self.superseded_by
        deadline_s = None if is_over else self.deadline_s(now_s)
        if self.course is Course.PUSH and self._report is None and deadline_s is not None:
            self._report = Report("pushed", "", deadline_s, self._certain())
        elif pushed and self.course in (Course.HOLD, Course.COPY, Course.STAY):
            self._report = None

    def _tend_end(self, now_s: float) -> None:
        """Plans the report "left" for ranks that had all ended their blocks before it was time to leave. They wait for
        the last commit, and leave in order at one step."""
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
        """Finds the due notices: time to leave, or to take an extra checkpoint if the job left by that notice before.
        A notice whose deadline passed long ago is not due. While no rank leaves, nor is one that became due too early:
        saving turned out quick, or a long step ended."""
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
        """Finds the near notices. For each, one checkpoint is committed out of turn, the newest or the next complete
        one, since a machine may go early. Only one: a notice may be withdrawn, and should cost no more."""
        for name, each in self.notices.items():
            near_s = self._near_from_s(each)
            # The deadline was moved: no estimate changes by so much.
            if not each.certain or now_s < near_s - NEAR_S:
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
        """When it is time to leave by that notice; None: never, or not known before training starts, since the former
        start's save times may not be known until then."""
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
        """Whether an extra snapshot has to be appointed: one is wanted, and none is staged."""
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
        # After a request to leave now this host's memory may outlive the job.
        goes_away = not any(each.when is When.AT_ONCE for each in live)
        left_s = min(each.deadline_s for each in live) - now_s
        pushes = may_reach and goes_away and self._saving_s is not None
        return choose(left_s, self._least_s(), self._copied_within_s(), pushes)

    def _copied_within_s(self) -> float | None:
        """Expected seconds from an appointment until nodes that stay have the replicas; None: no replicas would stay,
        or nothing was measured."""
        if self._copying_s is None or not (self.replicates and outlasts(self.kept, self.doomed)):
            return None
        # One replication runs at a time.
        before_s = self._copying_s if self.replicating is not None else 0.0
        return before_s + self._least_s(self._copying_s)

    def _would_delay_the_last(self, now_s: float) -> bool:
        """Whether committing the complete checkpoint would delay the last snapshot, which still fits, past the
        deadline."""
        deadline_s = self.deadline_s(now_s)
        if deadline_s is None or self._saving_s is None or self.course is Course.PUSH:
            return False
        left_s = deadline_s - now_s
        return self._last_within_s() <= left_s < self._least_s() + self._saving_s

    def _keeps_back_the_last(self, slot: Slot, now_s: float) -> bool:
        """Whether the commit of that slot delays the last snapshot's commit past the deadline, where that commit would
        fit if it began now. The last snapshot is complete, and all ranks leave at it. By measured times; the time that
        the slot's commit has taken already counts. If both fit, or neither does, the older one goes first: it may be
        all that is saved."""
        newest, deadline_s, took = self.newest, self.deadline_s(now_s), self._committed_in
        last, older = newest.round if newest is not None else None, slot.round
        if last is None or older is None or last is older or took is None or deadline_s is None:
            return False
        if not (last.why is Why.HOLD and last.verdict and last.store is Store.NEW) or self.superseded_by:
            return False
        if self._copies_first(now_s) or self._level_in_memory(last) == "peer":
            return False  # the last snapshot is replicated, or will be
        began_s = older.commit_began_s if older.store is Store.RUNNING else None
        before_s = max(0.0, took.seconds_of(older.bytes) - (0.0 if began_s is None else now_s - began_s))
        last_s = took.seconds_of(last.bytes)
        return last_s <= deadline_s - now_s < before_s + last_s

    def _last_within_s(self) -> float:
        """Seconds before a deadline at which a last snapshot still fits, by the present course."""
        copied_s = self._copied_within_s() if self.course is Course.COPY else None
        return self._least_s() if copied_s is None else copied_s

    def _waits_for_agent(self, now_s: float) -> bool:
        """Whether the last commit waits for a lost agent to restart. Its node has a rank that waits to leave, and a
        part to write. False if the checkpoint is replicated, or if the agent is late."""
        round_ = self.newest.round if self.newest is not None else None
        if round_ is None or round_.peer is Store.DONE or self._given_up:
            return False
        return any(now_s < self._returns_by_s(each) for each in self.members.seen.lost if each.leave is not None)

    def _returns_by_s(self, member: RankState) -> float:
        """The time until which a rank that waits to leave may rejoin; -math.inf: it is connected, or the job is
        superseded."""
        if member.lost_s is None:
            return -math.inf
        by_s = math.inf if self._leave_by_s is None else self._leave_by_s - END_S
        return -math.inf if self.superseded_by else min(member.lost_s + REJOIN_S, by_s)

    def _copies_first(self, now_s: float) -> bool:
        """Whether the last snapshot, which is complete, is replicated to nodes that stay before it is committed."""
        round_ = self.newest.round if self.newest is not None else None
        by_s = self._copy_by_s
        wanted = self.course is Course.COPY or (by_s is not None and now_s < by_s)
        if not wanted or not self.replicates or round_ is None or round_.why is not Why.HOLD:
            return False
        return round_.peer in (Store.NEW, Store.RUNNING) and outlasts(self.kept, self.doomed)

    def _tell_outcome(self, now_s: float) -> None:
        """Reports the outcome once what was saved is settled. If that takes up to the deadline, the report is made
        shortly before the deadline, and repeated when more is saved."""
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
        """Acknowledges the next planned event, after everything else is done; see event_ack.py."""
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

    # -- helpers

    def _live(self, now_s: float) -> list[StandingNotice]:
        return [each for each in self.notices.values() if each.sends_away and each.deadline_s > now_s]

    def _certain(self) -> tuple[str, ...]:
        return self._texts([(each.source, each.key) for each in self.notices.values() if each.sends_away])

    def _texts(self, names: Sequence[tuple[str, str]]) -> tuple[str, ...]:
        return tuple(f"{source} {key}"[:200] for source, key in sorted(names))
