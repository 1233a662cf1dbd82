"""The scheduler of one job: decides when to take a snapshot, into which slot, and what to replicate and commit.

It is a pure state machine without I/O, threads or a clock. Facts come in as method calls that only record.
`decide(now_s, steps)` looks at all facts and returns a list of actions. The agent carries them out and reports their
outcomes as facts. How often to save comes from state/cost_model.py. No decision rests on a time-out alone; an observed
fact is always part of it.

The scheduler owns its parts as values. Each part knows only those above it in this list, and states its invariants:
- state/job_facts.py: what every part reads: ranks, slots (state/slots.py), arenas (state/arenas.py), the times of steps
  and saves (state/step_timing.py), and when the policy wants the next snapshot.
- state/replica_state.py: what peers keep, and what is replicated next.
- preemption/preemption.py: the notices, and when to leave by them.
- preemption/exit_report.py: the outcome of a notice. preemption/exit_vote.py: the verdicts on holds.
- commit_queue.py: what is committed next.
- slot_allocator.py: which slot is used, and which is freed.
- save_attempts.py: how one save attempt begins and ends.
- rank_requests.py: the ranks' requests to save and to leave.
- appointments.py: the snapshots that the policy or a notice wants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt.agent.preemption.exit_report import ExitReport
from ckpt.agent.preemption.exit_vote import ExitVote
from ckpt.agent.preemption.preemption import ExitOrder, Preemption
from ckpt.agent.scheduler.appointments import AppointmentPlanner
from ckpt.agent.scheduler.commit_queue import CommitQueue
from ckpt.agent.scheduler.rank_requests import LeaveRequests, SaveRequests
from ckpt.agent.scheduler.save_attempts import SaveAttempts
from ckpt.agent.scheduler.slot_allocator import SlotAllocator
from ckpt.agent.state.actions import Action, Divide, NotifyRanks
from ckpt.agent.state.job_facts import MISSING_ANSWER_S, JobFacts, SnapshotClock
from ckpt.agent.state.rank_presence import LEAVE_RETRY, REJOIN_S, Presence
from ckpt.agent.state.replica_state import ReplicaState
from ckpt.policy.save_options import Every
from ckpt.types import Version


class Scheduler:
    """The scheduler of one job of `world` ranks: its facts, and the decisions that follow. Not thread-safe; for the
    agent's main thread. `policy`: when to appoint. `first_attempt`: the number of the first save attempt; random, so
    that a restarted agent does not soon repeat a number."""

    def __init__(self, world: int, policy: Every, first_attempt: int = 1) -> None:
        facts, order = JobFacts(world), ExitOrder()
        self.facts = facts
        self.rank_states = facts.rank_states
        self.slots = facts.slots
        self.arenas = facts.arenas
        self.clock = SnapshotClock(facts, policy)
        self.replicas = ReplicaState(facts)
        self.preemption = Preemption(facts, order)
        self.exit_report = ExitReport(facts, order, self.preemption, self.replicas)
        self.exit_vote = ExitVote(facts, order, self.preemption)
        self.commits = CommitQueue(facts, self.clock, order, self.preemption, self.replicas)
        self._allocator = SlotAllocator(facts, self.replicas, self.commits)
        self.save_attempts = SaveAttempts(
            facts, self.clock, self.preemption, self.exit_vote, self._allocator, first_attempt
        )
        self.save_requests = SaveRequests(facts, self._allocator, self.commits, self.save_attempts)
        self.appointments = AppointmentPlanner(
            facts, self.clock, order, self.preemption, self._allocator, self.save_attempts, self.save_requests
        )
        self.leave_requests = LeaveRequests(facts, order, self.commits, self.replicas)

    # -- facts that concern several parts

    def record_join(self, rank: int) -> None:
        """A rank has joined, for the first time or again. Save attempts that it may have answered on a lost connection
        count as missed."""
        member = self.rank_states[rank]
        if member.is_away and self.leave_requests.may_join(rank):
            member.presence, member.is_away = Presence.HERE, False
        if member.presence is Presence.HERE:
            self.record_disconnect(rank, None)
            for slot in self.slots:
                slot.is_offered = False
                # Arenas closed or made meanwhile may still be at that rank.
                slot.is_handed_out |= member.has_joined
            member.has_joined = True
        else:
            # Its request to leave came on the lost connection, and cannot be answered there.
            member.disconnected_s, member.leave_request = None, LEAVE_RETRY
            # A commit may have begun without this rank's node.
            self.commits.retry()
        self.exit_vote.repeat_deadline()

    def record_disconnect(self, rank: int, now_s: float | None) -> None:
        """The rank's connection ended, its process did not: it may rejoin. `now_s`: None where it has rejoined."""
        self.rank_states[rank].disconnected_s = now_s
        # The refusal may come from that node being unreachable: plan anew once the rank is back.
        if self.arenas.refusal_reason:
            self.arenas.record_layout()
        self.save_requests.forget_request(rank)
        self.save_attempts.record_disconnect(rank)
        self.exit_vote.forget_request(rank)

    def record_death(self, rank: int) -> None:
        """The rank's process is dead."""
        self.rank_states.record_death(rank)
        self.save_requests.forget_request(rank)

    def supersede(self, by: str) -> None:
        """The newer start `by` owns the run: this job saves nothing new."""
        if not self.facts.superseded_by:
            self.facts.superseded_by = by
            self.facts.actions.append(NotifyRanks({"t": "superseded", "by": by}))

    def end_takeover(self, now_s: float, inherited: Mapping[int, Version] | None = None) -> None:
        """After an agent restart: all ranks have joined, or are waited for no longer. The ranks hear that what they
        took for the former agent is lost, and a snapshot is appointed at the next boundary. `inherited`: see
        `JobSlots.inherited_versions`, the most needed one first."""
        self.slots.is_taking_over = False
        self.slots.inherited_versions = dict(inherited or {})
        for slot in self.slots.inherited_versions:
            self.slots.take_lease(slot)
        self.clock.set_due(now_s)
        self.facts.actions.append(NotifyRanks({"t": "known-versions", "versions": []}))

    def reconnect_messages(self) -> list[dict[str, Any]]:
        """The messages for a rank that reconnects: the versions still held, and the level messages that it may have
        missed."""
        # In a takeover there are none: `end_takeover` tells all ranks.
        if self.slots.is_taking_over:
            return []
        held = {attempt.version for attempt in self.slots.attempts() if not attempt.miss_reason}
        versions = sorted(map(str, held | self.facts.levels.versions))
        return [{"t": "known-versions", "versions": versions}, *self.facts.levels.repeated()]

    # -- queries

    @property
    def is_at_work(self) -> bool:
        """Whether work is under way that ends by itself: hashing, making arenas, a commit, a replication."""
        return self.slots.is_at_work or self.replicas.replicating_slot is not None

    def next_wake_s(self, now_s: float) -> float | None:
        """When `decide` has to run next without a new fact; None: not before one."""
        return min((at_s for at_s in self._wake_times(now_s) if now_s < at_s < float("inf")), default=None)

    def _wake_times(self, now_s: float) -> Iterator[float]:
        if self.slots.open_attempts:
            yield now_s + MISSING_ANSWER_S
        if self.save_requests.is_any_waiting:
            yield now_s + 1.0
        for member in self.rank_states.summary.disconnected:
            if member.presence is Presence.HERE and member.disconnected_s is not None:
                yield member.disconnected_s + REJOIN_S
        yield self.replicas.backoff.retry_s
        yield from self.commits.wake_times()
        yield from self.appointments.wake_times(now_s)
        yield from self.preemption.wake_times(now_s)
        yield from self.exit_vote.wake_times(now_s)
        yield from self.exit_report.wake_times()

    # -- decisions

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
        facts, answered = self.facts, self.save_requests.answered
        facts.step_timing.record_progress(now_s, steps, polls, since_s, answered.version if answered else None)
        facts.save_estimate.record_progress(self.slots, now_s)
        self.preemption.update(now_s)
        self.exit_report.plan(now_s)
        self.exit_vote.end_hopeless_waits(now_s)
        self.exit_vote.apply_earlier_deadline(now_s)
        self.rank_states.record_absences(now_s, 0.0 if facts.superseded_by else REJOIN_S)
        self.save_attempts.abandon_hopeless(now_s, steps)
        self.save_attempts.judge_holds(now_s)
        self.exit_vote.query_late_ranks(now_s)
        self.exit_vote.answer_unknown_holds(now_s)
        self.save_attempts.assemble_staged()
        self._allocator.release_inherited()
        if not (facts.is_frozen or self.replicas.is_survey_pending):
            self._allocator.free_superseded()
            self.replicas.drop_replicas()
        if not facts.is_frozen:
            self.replicas.replicate_newest(now_s)
        self.commits.cancel_blocking(now_s)
        self.commits.commit_next(now_s)
        if not facts.is_frozen:
            self._plan_arenas(now_s)
            self.save_requests.grant(now_s, steps)
            self.appointments.appoint(now_s, steps)
        self.exit_report.decide(now_s)
        self.leave_requests.release(now_s)
        self.exit_report.acknowledge_next(now_s)
        out = list(facts.actions)
        facts.actions.clear()
        return out

    def _plan_arenas(self, now_s: float) -> None:
        """Has the ranks' layouts divided once all ranks are here, then arenas made for the division."""
        facts, arenas = self.facts, self.arenas
        if facts.any_gone or facts.superseded_by or not self.rank_states.summary.all_joined:
            return
        if not arenas.is_division_due:
            # Appointments of another division are withdrawn and made anew under this one.
            self.save_attempts.withdraw(now_s, lambda attempt: attempt.division != arenas.division)
            self._allocator.make_arenas()
        elif not arenas.is_dividing:
            arenas.is_dividing = True
            facts.actions.append(Divide(arenas.layouts_version))

    def check(self) -> None:
        """Asserts the invariants of all parts, between two decisions."""
        self.slots.check(self.facts.world)
        for part in (
            *(self.arenas, self.replicas, self.preemption, self.exit_vote, self.commits),
            *(self._allocator, self.save_attempts, self.save_requests, self.leave_requests),
        ):
            part.check()
