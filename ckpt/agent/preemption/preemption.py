"""The preemption of one job: decides from the standing notices when the ranks leave, and what is saved before. Pure.

- A certain notice makes the job leave, as late as possible. One appointment of kind HOLD is made so early that its
  steps, replication and commit fit before the deadline, by measured times and a reserve. A signal or an
  operator's request means leave now: the appointment is made at once. The earliest of several deadlines counts.
- The last snapshot is replicated and committed like any other. Nodes that stay commit what they keep. A commit that
  would keep the last snapshot out of the store does not begin, or is cancelled. Once the time left is too short for the
  last snapshot, the newest complete checkpoint is committed.
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

from ckpt.agent.preemption.notice_relay import (
    OUTLIVES_S,
    PAST_S,
    ExitTiming,
    PlannedEvent,
    StandingNotice,
    event_to_acknowledge,
)
from ckpt.agent.state.actions import Acknowledge, Emit, WriteOutcome
from ckpt.agent.state.job_facts import REJOIN_S, SaveAttempt, SaveReason, SlotState, WorkState
from ckpt.agent.state.rank_presence import RankState
from ckpt.agent.state.replica_state import ReplicaState
from ckpt.agent.state.retention_rule import survives_nodes
from ckpt.agent.state.step_timing import MEASURE_S_MIN, SaveTiming
from ckpt.ipc.notice_sources import FORMER_NOTICE, SIGNAL_SOURCE
from ckpt.ipc.outcome_file import describe_outcome
from ckpt.policy.save_options import STEPS_APART, exit_lead_s
from ckpt.types import Version

# Assumed time for hashing and commit before one was measured: leave early rather than late.
SAVING_S = 60.0
# So long before a signal's deadline the ranks stop waiting and leave in order.
END_S = 2.0
# So long before a deadline the outcome is reported, even if work is under way. The ranks wait until one second before
# the deadline, and in a container the agent ends with them.
OUTCOME_S = 1.5
EXTRA_TRIES = 3
# So long before it is time to leave, a failure counts as warned: the lead of an EC2 spot notice.
WARNED_S = 120.0
NOTICES_MAX = 100


# Of a report: the newest checkpoint's level and version; the newest committed and replicated versions; an error.
Saved = tuple[str, Version | None, Version | None, Version | None, str]


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a notice, reported once what was saved is settled.

    `outcome`: "left"; "ended" (the ranks were told to end where they are); "stayed" (the deadline passed, and no rank
    left). `reason`: the reason of "ended"."""

    outcome: str
    reason: str
    deadline_s: float
    sources: tuple[str, ...]
    last_reported: Saved | None = None  # what was already reported


class Preemption(ReplicaState):
    """The facts of one job and its notices, and the decisions that follow from the notices."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.notices: dict[tuple[str, str], StandingNotice] = {}
        self.is_time_to_leave = False  # a last snapshot is due or taken, and a deadline is ahead
        self._due_notices: set[tuple[str, str]] = (
            set()
        )  # notices by which it is time to leave; see `_update_due_notices`
        self._passed_notices: set[tuple[str, str]] = set()  # notices whose passing was reported
        self._save_timing: SaveTiming | None = None  # from all staged to committed
        self._last_stall_s = 0.0
        self._is_extra_requested = False
        self._extra_version: Version | None = None  # one extra checkpoint is wanted, of this version or a later one
        self._extra_tries_left = 0
        # The first complete checkpoint from this version on is committed out of turn, as the extra one.
        self._extra_commit_version: Version | None = None
        self._pending_report: Report | None = None
        self._is_end_reported = False  # the leave of ranks at the end of their blocks was reported
        self.can_acknowledge = False  # the user allows acknowledgements; see event_to_acknowledge
        self.is_acknowledging = False  # an acknowledgement is under way
        self._tried_events: set[PlannedEvent] = set()  # events tried, also in vain
        self._is_acknowledging_done = False  # no event is left to acknowledge
        self._is_exit_committed = False  # all ranks left by a notice, and their last snapshot is committed

    # -- facts

    def add_notice(self, told: StandingNotice) -> StandingNotice:
        """Records a new or moved notice; returns the notice as it stands now. A signal that several ranks got keeps its
        earliest deadline. Once the ranks leave by a notice they leave even if its deadline moves."""
        name = (told.source, told.key)
        before = self.notices.get(name)
        if told.deadline_s <= told.received_s:
            told = replace(told, deadline_s=told.received_s + PAST_S)
        if before is not None:
            first_s = min(before.deadline_s, told.deadline_s) if told.source == SIGNAL_SOURCE else told.deadline_s
            nodes = told.nodes | before.nodes
            when = (
                before.exit_timing
                if self._leave_attempt_number and before.causes_exit and told.certain
                else told.exit_timing
            )
            told = replace(told, exit_timing=when, received_s=before.received_s, deadline_s=first_s, nodes=nodes)
            if told.deadline_s > before.deadline_s or not told.certain:
                self._due_notices.discard(name)
                self._passed_notices.discard(name)
        elif not told.certain:
            self._is_extra_requested = True
        self.notices[name] = told
        if len(self.notices) > NOTICES_MAX:
            self._limit_notices(name)
        return told

    def _limit_notices(self, newest: tuple[str, str]) -> None:
        """Merges the newest notice with the same event heard by other nodes: none of them then counts as a node that
        stays. If there is none, the notice with the latest deadline is dropped."""
        told = self.notices[newest]
        alike = [name for name, each in self.notices.items() if name != newest and each.is_same_event(told)]
        if not alike:
            self.withdraw_notice(*max(self.notices, key=lambda each: self.notices[each].deadline_s))
            return
        kept = self.notices[alike[0]]
        until_s = min(kept.deadline_s, told.deadline_s)
        self.notices[alike[0]] = replace(kept, deadline_s=until_s, nodes=kept.nodes | told.nodes)
        self.withdraw_notice(*newest)

    def withdraw_notice(self, source: str, key: str) -> None:
        """That notice stands no longer. Ranks that were told to leave still leave."""
        self.notices.pop((source, key), None)
        self._due_notices.discard((source, key))
        self._passed_notices.discard((source, key))

    def inherit_timing(self, former: Preemption) -> None:
        """Takes the save time of the former start on this node, from which this one continues, until its own is
        measured."""
        self._save_timing = self._save_timing or former._save_timing

    def record_acknowledgement(self) -> None:
        """Outcome of `Acknowledge`: it has ended, successful or not, and is not tried again."""
        self.is_acknowledging = False

    def record_commit(self, slot: int, error: str, now_s: float, passes: bool = False) -> None:
        """As `JobFacts.record_commit`; also measures the commit time."""
        super().record_commit(slot, error, now_s, passes)
        attempt = self.slots[slot].attempt
        if attempt is not None and error and self._waits_for_agent(now_s):
            attempt.is_last_try = False  # the lost node could not write its part
        if attempt is not None and attempt.commit_began_s is not None and not error:
            took_s = now_s - attempt.commit_began_s + (attempt.hash_duration_s or 0.0)
            self._save_timing = SaveTiming.from_save(took_s, attempt.memory_bytes, self._save_timing)
        if (
            self._extra_commit_version is not None
            and self.committed_version is not None
            and self.committed_version >= self._extra_commit_version
        ):
            self._extra_commit_version = None

    # -- queries

    def _commit_overdue_s(self) -> float:
        """As `JobFacts._commit_overdue_s`, later by the steps that an appointment lies ahead."""
        return super()._commit_overdue_s() + (STEPS_APART + 1) * self.step_timing.usual_step_s

    @property
    def _save_estimate_s(self) -> float | None:
        """Measured seconds from all staged to committed, scaled to the present state; None: not measured."""
        return self._save_timing.estimate_s(sum(self._needed_arena_bytes)) if self._save_timing is not None else None

    @property
    def lead_time_s(self) -> float:
        """Seconds before a deadline at which the last appointment has to be made."""
        return exit_lead_s(self.expected_save_s())

    def is_warned(self, now_s: float) -> bool:
        """Whether a machine is certain to go soon, or should just have gone. A notice that is days ahead (the end of an
        allocation, a maintenance) does not count yet."""
        certain = {n: each for n, each in self.notices.items() if each.certain and now_s < each.deadline_s + OUTLIVES_S}
        near = any(
            each.exit_timing is ExitTiming.AT_ONCE or now_s >= each.deadline_s - self.lead_time_s - WARNED_S
            for each in certain.values()
        )
        return near or any(name in self._due_notices for name in certain)

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to leave, or to take an extra checkpoint, by a notice whose deadline is ahead."""
        return any(self.notices[name].deadline_s > now_s for name in self._due_notices)

    @property
    def doomed_nodes(self) -> frozenset[str]:
        """The nodes that go away by certain notices: those that are due, and those that go before they could commit the
        replicas that they hold; "" is this node."""
        due = {name: each for name, each in self.notices.items() if name in self._due_notices}
        until_s = min((each.deadline_s for each in due.values()), default=-math.inf) + self.lead_time_s
        going = [each for n, each in self.notices.items() if each.certain and (n in due or each.deadline_s <= until_s)]
        return frozenset(node for each in going for node in each.nodes)

    @property
    def heeds_notices(self) -> bool:
        """Whether notices still matter to this job. They do until the outcome is reported and all events are
        acknowledged: the report depends on the deadline and on the nodes that go."""
        return (
            not self.all_gone
            or self._pending_report is not None
            or (self.can_acknowledge and not self._is_acknowledging_done)
        )

    def expected_save_s(self, saving_s: float | None = None) -> float:
        """Expected seconds from an appointment until the snapshot is saved, without a reserve. `saving_s`: from all
        staged to saved; None: to committed."""
        if saving_s is None:
            saving_s = SAVING_S if self._save_estimate_s is None else self._save_estimate_s
        return STEPS_APART * self.step_timing.boundary_interval_s + 2 * self._latency_s + self._last_stall_s + saving_s

    def deadline_s(self, now_s: float) -> float | None:
        """The earliest deadline ahead by which the job leaves; None: there is none."""
        return min((each.deadline_s for each in self._exit_notices(now_s)), default=None)

    def next_wake_s(self, now_s: float) -> float | None:
        times = [super().next_wake_s(now_s)]
        for name, each in self.notices.items():
            if each.certain and each.deadline_s > now_s:
                times.append(each.deadline_s)
                due_s = self._due_from_s(each) if name not in self._due_notices else None
                times += [max(now_s, due_s)] if due_s is not None else []
                last_s = each.deadline_s - self.expected_save_s()
                times += [last_s] if last_s > now_s else []
        if any(attempt.is_announced and not attempt.version.sub for attempt in self._open_attempts()):
            # The ranks may poll for long before they come to the appointed step.
            times.append(now_s + MEASURE_S_MIN)
        back_s = [
            self._rejoin_deadline_s(member)
            for member in self.rank_states.summary.disconnected
            if member.leave_request is not None
        ]
        times += [at_s for at_s in back_s if at_s > now_s]
        if self._pending_report is not None:
            ends_s = self._pending_report.deadline_s
            times += [at_s for at_s in (ends_s - OUTCOME_S, ends_s) if at_s > now_s]
        return min((each for each in times if each is not None), default=None)

    # -- decisions

    def _update_notices(self, now_s: float, steps: Sequence[int]) -> None:
        """Measures save times, and finds what the notices ask for in this call of `decide`."""
        self._measure_saves(now_s)
        self._update_due_notices(now_s)
        self._update_extra(steps)
        self.is_time_to_leave = any((each.source, each.key) in self._due_notices for each in self._exit_notices(now_s))
        self._plan_end_report(now_s)
        passed = [n for n, each in self.notices.items() if each.causes_exit and each.deadline_s <= now_s]
        new = [name for name in passed if name not in self._passed_notices]
        self._passed_notices.update(new)
        if new and not (self._leave_attempt_number or self._is_end_ordered or self.all_gone or self.superseded_by):
            deadline_s = max(self.notices[name].deadline_s for name in new)
            self._pending_report = Report("stayed", "", deadline_s, self._notice_texts(new))

    def _plan_end_report(self, now_s: float) -> None:
        """Plans the report "left" for ranks that had all ended their blocks before it was time to leave. They wait for
        the last commit, and leave in order at one step."""
        if (
            not self._is_at_end
            or self._leave_attempt_number
            or self._is_end_ordered
            or self.all_gone
            or self.superseded_by
        ):
            return
        deadline_s = self.deadline_s(now_s) if self.is_time_to_leave else None
        if deadline_s is not None and not self._is_end_reported and self._pending_report is None:
            self._is_end_reported = True
            self._pending_report = Report("left", "", deadline_s, self._exit_notice_texts())

    def _measure_saves(self, now_s: float) -> None:
        for attempt in self.attempts(SlotState.STAGED, SlotState.COMPLETE):
            if not attempt.staged_ranks:
                continue
            if attempt.state is SlotState.STAGED and attempt.all_staged_s is None:
                attempt.all_staged_s = now_s
                self._last_stall_s = max(attempt.staged_ranks.values())
            elif (
                attempt.state is SlotState.COMPLETE
                and attempt.hash_duration_s is None
                and attempt.all_staged_s is not None
            ):
                attempt.hash_duration_s = now_s - attempt.all_staged_s

    def _update_due_notices(self, now_s: float) -> None:
        """Finds the due notices: time to leave, or to take an extra checkpoint if the job left by that notice before.
        A notice whose deadline passed long ago is not due. While no rank leaves, nor is one that became due too early:
        saving turned out quick, or a long step ended."""
        leaves = bool(self._leave_attempt_number) or self._is_end_ordered or self._pending_report is not None
        for name, each in self.notices.items():
            early = each.exit_timing is not ExitTiming.AT_ONCE and now_s < each.deadline_s - 2 * self.lead_time_s
            if now_s >= each.deadline_s + OUTLIVES_S or (early and not leaves):
                self._due_notices.discard(name)
            due_s = self._due_from_s(each)
            if due_s is not None and due_s <= now_s < each.deadline_s and name not in self._due_notices:
                self._due_notices.add(name)
                self._is_extra_requested = self._is_extra_requested or not each.causes_exit

    def _due_from_s(self, each: StandingNotice) -> float | None:
        """When it is time to leave by that notice; None: never, or not known before training starts, since the former
        start's save times may not be known until then."""
        if each.exit_timing is ExitTiming.AT_ONCE and each.certain:
            return -math.inf
        return each.deadline_s - self.lead_time_s if each.certain and self._start_step is not None else None

    def _update_extra(self, steps: Sequence[int]) -> None:
        if self._is_extra_requested:
            self._is_extra_requested = False
            self._extra_version, self._extra_tries_left = Version(max(steps, default=0)), EXTRA_TRIES
            self._extra_commit_version = self._extra_version
        if self._extra_version is None:
            return
        reached = self.newest is not None and self.newest.version >= self._extra_version
        in_vain = self._extra_tries_left <= 0 and not self._open_attempts()
        asked = not all(each.causes_exit for each in self.notices.values())
        self._extra_commit_version = self._extra_commit_version if asked else None
        if reached or in_vain or not asked:
            self._extra_version = None

    def _must_appoint_extra(self) -> bool:
        """Whether an extra snapshot has to be appointed: one is wanted, and none is staged."""
        extra = self._extra_version
        if extra is None or self._extra_tries_left <= 0:
            return False
        return not any(attempt.version >= extra for attempt in self.attempts(SlotState.STAGED))

    def _would_delay_last_snapshot(self, now_s: float) -> bool:
        """Whether committing the complete checkpoint would delay the last snapshot, which still fits, past the
        deadline."""
        deadline_s = self.deadline_s(now_s)
        if deadline_s is None or self._save_estimate_s is None:
            return False
        return 0 <= deadline_s - now_s - self.expected_save_s() < self._save_estimate_s

    def _delays_last_commit(self, older: SaveAttempt, now_s: float) -> bool:
        """Whether the commit of `older` keeps the last snapshot, at which all ranks leave, out of the store. The last
        commit would fit alone and not behind the other, by measured times. If both fit, or neither, the older one goes
        first: it may be all that is saved."""
        last, deadline_s, took = self.newest, self.deadline_s(now_s), self._save_timing
        if last is None or last is older or took is None or deadline_s is None or self.superseded_by:
            return False
        if last.reason is not SaveReason.HOLD or not last.verdict or last.commit_state is not WorkState.NEW:
            return False
        began_s = older.commit_began_s if older.commit_state is WorkState.RUNNING else None
        before_s = max(0.0, took.estimate_s(older.memory_bytes) - (0.0 if began_s is None else now_s - began_s))
        last_s = took.estimate_s(last.memory_bytes)
        return last_s <= deadline_s - now_s < before_s + last_s

    def _waits_for_agent(self, now_s: float) -> bool:
        """Whether the last commit waits for a lost agent to restart. Its node has a rank that waits to leave, and a
        part to write. False if the checkpoint is replicated, or if the agent is late."""
        attempt = self.newest
        if attempt is None or attempt.replication_state is WorkState.DONE or self._is_commit_stopped:
            return False
        return any(
            now_s < self._rejoin_deadline_s(each)
            for each in self.rank_states.summary.disconnected
            if each.leave_request is not None
        )

    def _rejoin_deadline_s(self, member: RankState) -> float:
        """The time until which a rank that waits to leave may rejoin; -math.inf: it is connected, or the job is
        superseded."""
        if member.disconnected_s is None:
            return -math.inf
        by_s = math.inf if self._leave_deadline_s is None else self._leave_deadline_s - END_S
        return -math.inf if self.superseded_by else min(member.disconnected_s + REJOIN_S, by_s)

    def _report_outcome(self, now_s: float) -> None:
        """Reports the outcome once what was saved is settled. If that takes up to the deadline, the report is made
        shortly before the deadline, and repeated when more is saved."""
        report, attempt = self._pending_report, self.newest
        if report is None:
            return
        store = attempt.commit_state if attempt is not None else WorkState.DONE
        again = (
            store is WorkState.FAILED and attempt is not None and not attempt.is_last_try and report.outcome != "stayed"
        )
        under_way = (
            bool(self._open_attempts()) or self.is_at_work or store in (WorkState.NEW, WorkState.RUNNING) or again
        )
        may_change = under_way and now_s < report.deadline_s and not self.superseded_by
        if may_change and now_s < report.deadline_s - OUTCOME_S:
            return
        level = "none" if attempt is None else "store" if store is WorkState.DONE else self._level_in_memory(attempt)
        version = attempt.version if attempt is not None else None
        safe = self.replicated
        peer_tick = safe.version if safe is not None and self._level_in_memory(safe) == "peer" else None
        saved = level, version, self.committed_version, peer_tick, self.last_error
        self._is_exit_committed = report.outcome == "left" and level == "store"
        self._pending_report = replace(report, last_reported=saved) if may_change else None
        if saved == report.last_reported:
            return
        left_s = report.deadline_s - now_s
        body = {
            "how": report.outcome,
            "why": report.reason,
            "notices": list(report.sources or self._exit_notice_texts() or (FORMER_NOTICE,)),
            "level": level,
            "version": str(version) if version is not None else None,
            "step": version.step if version is not None else None,
            "committed_step": self.committed_version.step if self.committed_version is not None else None,
            "peer_step": peer_tick.step if peer_tick is not None else None,
            "left_s": round(left_s, 3),
            "error": self.last_error,
        }
        self._actions.append(WriteOutcome(body))
        self._actions.append(Emit("notice.outcome", describe_outcome(body), True, body))

    def _level_in_memory(self, attempt: SaveAttempt) -> str:
        gone = self.doomed_nodes | self._lost_holders
        copied = attempt.version == self.replicated_version and survives_nodes(self.replicated_placement, gone)
        return "peer" if copied else "local"

    def _acknowledge_next(self, now_s: float) -> None:
        """Acknowledges the next planned event, after everything else is done."""
        answered = self.is_closed_in_store and not self.rank_states.summary.waiting_to_leave
        if self.is_acknowledging or not (answered or self.superseded_by):
            return
        may = self.can_acknowledge and self._is_exit_committed and not self.superseded_by
        found = event_to_acknowledge(self.notices.values(), self._tried_events, now_s) if may else None
        self._is_acknowledging_done = found is None
        if found is not None:
            planned, node = found
            self._tried_events.add(planned)
            self.is_acknowledging = True
            self._actions.append(Acknowledge(planned.source, planned.key, node))

    # -- helpers

    def _exit_notices(self, now_s: float) -> list[StandingNotice]:
        return [each for each in self.notices.values() if each.causes_exit and each.deadline_s > now_s]

    def _exit_notice_texts(self) -> tuple[str, ...]:
        return self._notice_texts([(each.source, each.key) for each in self.notices.values() if each.causes_exit])

    def _notice_texts(self, names: Sequence[tuple[str, str]]) -> tuple[str, ...]:
        return tuple(f"{source} {key}"[:200] for source, key in sorted(names))
