"""The exit vote: one final verdict for all ranks on whether they leave at the appointed step or go on. Pure.

- The ranks stage a snapshot at the appointed step and wait there for the verdict. If all hold and all staged: leave.
- A signal to a rank may come from a launcher that is restarting: some ranks may be dead, and the others stuck in a
  collective. So the attempt to leave at one step ends for all ranks once one is known to be gone, or is silent.
- While all ranks are known alive they wait for the boundary until shortly before the deadline, however long the step
  lasts: a rank may be in a long backward pass, an evaluation, or a long call into C.
- Ranks that were told to leave hear of a deadline that moves nearer.
- A verdict that a dead agent may have told some ranks holds for the others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.agent.preemption.notice_relay import StandingNotice
from ckpt.agent.preemption.preemption import ExitOrder, Preemption, Report, notice_texts
from ckpt.agent.state.actions import AnswerRequest, NotifyRanks, Request, SetVerdict
from ckpt.agent.state.job_facts import JobFacts
from ckpt.agent.state.rank_presence import REJOIN_S, Presence
from ckpt.agent.state.slots import SaveAttempt, SaveReason
from ckpt.ipc.control_page import ControlWord, WordKind
from ckpt.types import Version

# So long before a signal's deadline the ranks stop waiting and leave in order.
END_S = 2.0
# A rank without a connection, not known to be dead, may be away for so long while its node's agent restarts. After
# that the node counts as dead.
AWAY_S = 5.0
# Delay before ranks are asked whether they are past the boundary at which others hold. It doubles each time.
ASK_LATE_S, ASK_LATE_S_MAX = 0.1, 5.0


@dataclass(slots=True)
class UnknownHold:
    """A rank's hold at a save attempt that this agent does not know. `since_s`: when `answer_unknown_holds` first saw
    it."""

    attempt_number: int
    request: Request
    since_s: float | None = None


@dataclass(eq=False)
class ExitVote:
    """The verdicts on the holds of one job, and the orders to end."""

    _facts: JobFacts
    _order: ExitOrder
    _preemption: Preemption
    _next_late_query_s: float | None = None  # when late ranks are asked next; None: no rank waits for them
    _late_query_interval_s: float = ASK_LATE_S
    _has_former_order: bool = False  # ranks leave by a former agent's word, which this agent reports
    _former_attempt_number: int = 0  # the save attempt by which a former agent told ranks to leave
    _holds: dict[int, Request] = field(default_factory=dict)  # by rank: holds that wait for the verdict
    # By rank: holds at save attempts of a former agent.
    _unknown_holds: dict[int, UnknownHold] = field(default_factory=dict)

    # -- facts

    def record_former_verdict(self, attempt: int) -> None:
        """A joining rank's control page says to leave by that save attempt of a dead agent; 0: it does not say so.
        A verdict is written to that page before any rank of another node hears of it."""
        self._former_attempt_number = attempt or self._former_attempt_number

    def record_exit_order(
        self, why: str, deadline_s: float, committed: Version | None, notices: Collection[str] = ()
    ) -> None:
        """A rank leaves because it was told to leave, or to end by reason `why`. If a dead agent told it, this agent
        reports the outcome. `committed`: the newest version that the rank knows to be committed. `notices`: those that
        the rank heard, perhaps before this agent."""
        if committed is not None:
            self._facts.record_committed(committed)
        if self._order.is_given:
            return
        if not self._has_former_order:
            self._has_former_order = True
            self._order.report = Report("ended" if why else "left", why, deadline_s, ())
        if self._order.report is not None:
            sources = tuple(sorted({*self._order.report.sources, *notices}))
            self._order.report = replace(self._order.report, sources=sources)

    def record_hold(self, rank: int, number: int, request: Request) -> None:
        """The rank has staged and waits for the verdict on save attempt `number`. If the attempt is unknown the answer
        is: go on; unless other ranks may have been told to leave by it, see `answer_unknown_holds`."""
        attempt = self._facts.slots.attempt_of(number)
        if (number and self._order.attempt_number == number) or self.must_leave:
            self._answer_hold(request, True)
        elif attempt is None and not self._facts.is_single_node:
            self._unknown_holds[rank] = UnknownHold(number, request)
        elif attempt is None or attempt.reason is not SaveReason.HOLD or attempt.verdict is False:
            self._answer_hold(request, False)
        else:
            self._holds[rank] = request

    def forget_request(self, rank: int) -> None:
        """The connection of that rank's hold has ended."""
        self._unknown_holds.pop(rank, None)
        self._holds.pop(rank, None)

    def repeat_deadline(self) -> None:
        """A rank has joined: the message may have been lost with its former connection."""
        if self._order.deadline_s is not None:
            self._send_deadline()

    # -- queries

    @property
    def holding_ranks(self) -> int:
        """How many ranks wait for the verdict."""
        return len(self._holds)

    @property
    def must_leave(self) -> bool:
        """Whether each hold ends with the verdict to leave: the job cannot go on."""
        return self._facts.is_lost_cause or self._order.is_end

    def wake_times(self, now_s: float) -> Iterator[float]:
        """When a decision may be due without a new fact."""
        if self._next_late_query_s is not None:
            yield self._next_late_query_s
        if (signals := self._preemption.signals) and not self._order.is_end and not self._order.is_unanimous:
            yield self._boundary_deadline_s(signals, now_s)
            yield from self._silent_from_s.values()
        yield from (each.since_s + REJOIN_S for each in self._unknown_holds.values() if each.since_s is not None)

    @property
    def _silent_from_s(self) -> dict[int, float]:
        """By rank without a connection: the time from which the rank counts as silent."""
        return {
            m.rank: m.disconnected_s + AWAY_S
            for m in self._facts.rank_states.summary.disconnected
            if m.disconnected_s is not None
        }

    def _boundary_deadline_s(self, signals: list[StandingNotice], now_s: float) -> float:
        """The time until which signalled ranks wait for a boundary."""
        return min(each.deadline_s for each in [*signals, *self._preemption.exit_notices(now_s)]) - END_S

    # -- decisions

    def end_hopeless_waits(self, now_s: float) -> None:
        """Ends the wait of signalled ranks for a boundary once no boundary can come in time."""
        facts, signals = self._facts, self._preemption.signals
        if not signals or self._order.is_end or self._order.is_unanimous or facts.superseded_by:
            return
        gone, last_s = facts.rank_states.summary.first_failed, self._boundary_deadline_s(signals, now_s)
        away = [rank for rank, from_s in self._silent_from_s.items() if now_s >= from_s]
        if gone is not None:
            self._order_end(f"rank {gone.rank} is gone, and without it no other comes to a boundary", False, signals)
        elif facts.rank_states.summary.any_left or facts.slots.is_at_end:
            # A rank has left in order, so the others will; or all ranks have ended, and wait for the commit.
            return
        elif away:
            self._order_end(f"nothing is heard of rank {away[0]}, and without it no other leaves", False, signals)
        elif now_s >= last_s:
            short = min(each.received_s for each in signals) >= last_s
            self._order_end(
                "there was no time to wait for a boundary" if short else "no boundary came in time", True, signals
            )

    def apply_earlier_deadline(self, now_s: float) -> None:
        """Applies an earlier deadline, heard of after the ranks were told to leave: to them, and to the report."""
        order, by_s = self._order, self._preemption.deadline_s(now_s)
        if by_s is None:
            return
        if order.report is not None and by_s < order.report.deadline_s:
            order.report = replace(order.report, deadline_s=by_s)
        if order.deadline_s is not None and by_s < order.deadline_s:
            order.deadline_s = by_s
            self._send_deadline()

    def set_verdict(self, attempt: SaveAttempt, leave: bool, now_s: float) -> None:
        """Sets the verdict on a hold: final, and the same for all ranks."""
        attempt.verdict = leave
        if leave:
            order, actions = self._order, self._facts.actions
            order.is_unanimous = len(self._holds) == self._facts.world
            order.attempt_number = attempt.number
            actions.append(SetVerdict(attempt.number))
            actions += self._preemption.exit_records()
            sources, by_s = self._preemption.exit_texts(), self._preemption.deadline_s(now_s)
            if not self.must_leave:
                order.deadline_s = by_s
            if sources and not order.is_end:
                order.report = Report("left", "", now_s if by_s is None else by_s, sources)
        for request in self._holds.values():
            self._answer_hold(request, leave)
        self._holds.clear()

    def query_late_ranks(self, now_s: float) -> None:
        """Asks the ranks that have not reached a boundary where others hold. A rank that passed it before it saw the
        appointment reports that only at its next boundary. It may never get there, stuck in a collective with the ranks
        that hold."""
        held = (each for each in self._facts.slots.open_attempts if each.is_verdict_pending and self._holds)
        attempt = next((each for each in held if len(each.staged_ranks) < self._facts.world), None)
        if attempt is None:
            self._next_late_query_s = None
        elif self._next_late_query_s is None:
            self._next_late_query_s, self._late_query_interval_s = now_s + ASK_LATE_S, ASK_LATE_S
        elif now_s >= self._next_late_query_s:
            self._late_query_interval_s = min(2 * self._late_query_interval_s, ASK_LATE_S_MAX)
            self._next_late_query_s = now_s + self._late_query_interval_s
            word = ControlWord(attempt.number, attempt.slot, WordKind.HOLD, attempt.version.step, attempt.version.sub)
            self._facts.actions.append(NotifyRanks({"t": "hold-awaited", "word": word.pack()}))

    def answer_unknown_holds(self, now_s: float) -> None:
        """Answers holds at save attempts of a former agent.

        That agent may have told only its own node's ranks to leave. Those report it when they rejoin
        (`record_former_verdict`) or leave (`record_exit_order`). So the other ranks wait for all living ranks to join.
        If one does not, they leave, since the job is broken."""
        if not self._unknown_holds:
            return
        all_came = all(m.has_joined or m.presence is not Presence.HERE for m in self._facts.rank_states)
        for rank, asked in list(self._unknown_holds.items()):
            asked.since_s = now_s if asked.since_s is None else asked.since_s
            told = asked.attempt_number == self._former_attempt_number or self._has_former_order or self.must_leave
            if told or all_came or now_s >= asked.since_s + REJOIN_S:
                del self._unknown_holds[rank]
                by_s = (
                    self._order.deadline_s if self._order.deadline_s is not None else self._preemption.deadline_s(now_s)
                )
                self._answer_hold(asked.request, told or not all_came, math.inf if by_s is None else by_s)

    def _answer_hold(self, request: Request, leave: bool, deadline_s: float | None = None) -> None:
        """`deadline_s`: that of ranks that leave; None: that of the order."""
        by_s = self._order.deadline_s if deadline_s is None else deadline_s
        self._facts.actions.append(
            AnswerRequest(request, {"leave": leave, "leave_deadline_s": by_s if leave else None})
        )

    def _order_end(self, why: str, wait: bool, signals: list[StandingNotice]) -> None:
        order, deadline_s = self._order, min(each.deadline_s for each in signals)
        order.end_reason, order.waits_for_saves, order.deadline_s = why, wait, deadline_s
        order.report = Report("ended", why, deadline_s, notice_texts((each.source, each.key) for each in signals))
        self._send_deadline()

    def _send_deadline(self) -> None:
        order = self._order
        body: dict[str, Any] = {"t": "leave-deadline"}
        if order.is_end:
            body = {"t": "end-process", "why": order.end_reason, "wait_for_saves": order.waits_for_saves}
        self._facts.actions.append(NotifyRanks({**body, "leave_deadline_s": order.deadline_s}))

    def check(self) -> None:
        """Asserts the invariants of holds and orders."""
        holds = [each for each in self._facts.slots.attempts() if each.reason is SaveReason.HOLD]
        pending = sum(each.is_verdict_pending for each in holds)
        assert pending <= 1, "ranks may hold at two attempts"
        assert pending or not self._holds, "ranks hold, and get no verdict"
        left_by = {each.number for each in holds if each.verdict}
        assert left_by <= {self._order.attempt_number}, "the ranks were told to leave by two attempts"
        for hold in holds:
            is_whole = len(hold.staged_ranks) == self._facts.world
            assert not hold.verdict or is_whole or self.must_leave, "ranks leave at a step that is not staged by all"
