"""The exit report of one job: the outcome of a notice, for people and launchers, and the acknowledgement of the events.

The outcome is reported once what was saved is settled. Planned events are acknowledged after everything else. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ckpt.agent.preemption.notice_relay import Name, event_to_acknowledge
from ckpt.agent.preemption.preemption import ExitOrder, Preemption, Report, notice_texts
from ckpt.agent.state.actions import Acknowledge, Emit, WriteOutcome
from ckpt.agent.state.job_facts import JobFacts
from ckpt.agent.state.replica_state import ReplicaState
from ckpt.agent.state.retention_rule import survives_nodes
from ckpt.agent.state.slots import SaveAttempt, WorkState
from ckpt.ipc.notice_sources import FORMER_NOTICE
from ckpt.ipc.outcome_file import describe_outcome

# So long before a deadline the outcome is reported, even if work is under way. The ranks wait until one second before
# the deadline, and in a container the agent ends with them.
OUTCOME_S = 1.5


@dataclass(eq=False)
class ExitReport:
    """The exit report of one job. `can_acknowledge`: the user allows acknowledgements; see `event_to_acknowledge`.
    `is_acknowledging`: one is under way."""

    _facts: JobFacts
    _order: ExitOrder
    _preemption: Preemption
    _replicas: ReplicaState
    can_acknowledge: bool = False
    is_acknowledging: bool = False
    _tried_events: set[Name] = field(default_factory=set)  # also in vain
    _is_acknowledging_done: bool = False  # no event is left to acknowledge
    _passed: set[tuple[Name, float]] = field(default_factory=set)  # notices whose deadline has passed, with it
    _is_end_reported: bool = False  # the leave of ranks at the end of their blocks was reported
    _is_exit_committed: bool = False  # all ranks left by a notice, and their last snapshot is committed

    def record_acknowledgement(self) -> None:
        """Outcome of `Acknowledge`: it has ended, successful or not, and is not tried again."""
        self.is_acknowledging = False

    @property
    def heeds_notices(self) -> bool:
        """Whether notices still matter to this job. They do until the outcome is reported and all events are
        acknowledged: the report depends on the deadline and on the nodes that go."""
        is_owed = self._order.report is not None or (self.can_acknowledge and not self._is_acknowledging_done)
        return not self._facts.all_gone or is_owed

    def wake_times(self) -> Iterator[float]:
        """When a decision may be due without a new fact."""
        if self._order.report is not None:
            yield self._order.report.deadline_s - OUTCOME_S
            yield self._order.report.deadline_s

    def plan(self, now_s: float) -> None:
        """Plans the report for ranks that were not told to leave. "left": all had ended their blocks before it was time
        to leave; they wait for the last commit, and leave in order at one step. "stayed": a deadline has passed."""
        notices, order = self._preemption.notices, self._order
        passed = {(n, each.deadline_s) for n, each in notices.items() if each.causes_exit and each.deadline_s <= now_s}
        new, self._passed = passed - self._passed, passed
        if order.is_given or self._facts.all_gone or self._facts.superseded_by:
            return
        deadline_s = self._preemption.deadline_s(now_s) if self._preemption.is_time_to_leave else None
        is_at_end = self._facts.slots.is_at_end and not self._is_end_reported
        if is_at_end and deadline_s is not None and order.report is None:
            self._is_end_reported = True
            order.report = Report("left", "", deadline_s, self._preemption.exit_texts())
        if new:
            last_s = max(deadline_s for _, deadline_s in new)
            order.report = Report("stayed", "", last_s, notice_texts(name for name, _ in new))

    def decide(self, now_s: float) -> None:
        """Reports the outcome once what was saved is settled. If that takes up to the deadline, the report is made
        shortly before the deadline, and repeated when more is saved."""
        facts, report, attempt = self._facts, self._order.report, self._facts.slots.newest
        if report is None:
            return
        store = attempt.commit_state if attempt is not None else WorkState.DONE
        is_last = attempt is None or attempt.is_last_try or report.outcome == "stayed"
        is_working = facts.slots.is_at_work or self._replicas.replicating_slot is not None
        under_way = (
            bool(facts.slots.open_attempts)
            or is_working
            or store in (WorkState.NEW, WorkState.RUNNING)
            or (store is WorkState.FAILED and not is_last)
        )
        may_change = under_way and now_s < report.deadline_s and not facts.superseded_by
        if may_change and now_s < report.deadline_s - OUTCOME_S:
            return
        level = "none" if attempt is None else "store" if store is WorkState.DONE else self._level_in_memory(attempt)
        version = attempt.version if attempt is not None else None
        committed, safe = facts.committed_version, self._replicas.replicated
        on_peers = safe.version if safe is not None and self._level_in_memory(safe) == "peer" else None
        saved = level, version, committed, on_peers, facts.last_error
        self._is_exit_committed = report.outcome == "left" and level == "store"
        self._order.report = replace(report, last_reported=saved) if may_change else None
        if saved == report.last_reported:
            return
        body = {
            "how": report.outcome,
            "why": report.reason,
            "notices": list(report.sources or self._preemption.exit_texts() or (FORMER_NOTICE,)),
            "level": level,
            "version": str(version) if version is not None else None,
            "step": version.step if version is not None else None,
            "committed_step": committed.step if committed is not None else None,
            "peer_step": on_peers.step if on_peers is not None else None,
            "left_s": round(report.deadline_s - now_s, 3),
            "error": facts.last_error,
        }
        facts.actions.append(WriteOutcome(body))
        facts.actions.append(Emit("notice.outcome", describe_outcome(body), True, body))

    def _level_in_memory(self, attempt: SaveAttempt) -> str:
        gone = self._preemption.doomed_nodes | self._replicas.lost_holders
        is_replicated = attempt.version == self._replicas.replicated_version
        return "peer" if is_replicated and survives_nodes(self._replicas.replicated_placement, gone) else "local"

    def acknowledge_next(self, now_s: float) -> None:
        """Acknowledges the next planned event, after everything else is done."""
        facts = self._facts
        answered = facts.is_closed_in_store and not facts.rank_states.summary.waiting_to_leave
        if self.is_acknowledging or not (answered or facts.superseded_by):
            return
        may = self.can_acknowledge and self._is_exit_committed and not facts.superseded_by
        notices = self._preemption.notices.values()
        found = event_to_acknowledge(notices, self._tried_events, now_s) if may else None
        self._is_acknowledging_done = found is None
        if found is not None:
            event, node = found
            self._tried_events.add(event)
            self.is_acknowledging = True
            facts.actions.append(Acknowledge(*event, node))
