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
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from ckpt.agent.preemption.notice_relay import ExitTiming, StandingNotice
from ckpt.agent.preemption.preemption import END_S, Preemption, Report
from ckpt.agent.state.actions import AnswerRequest, NotifyRanks, RecordExit, Request, SetVerdict
from ckpt.agent.state.job_facts import REJOIN_S, SaveAttempt, SaveReason
from ckpt.agent.state.rank_presence import Presence
from ckpt.ipc.control_page import ControlWord, WordKind
from ckpt.ipc.notice_sources import SIGNAL_SOURCE
from ckpt.types import Version

# A rank without a connection, not known to be dead, may be away for so long while its node's agent restarts. After
# that the node counts as dead.
AWAY_S = 5.0
# Delay before ranks are asked whether they are past the boundary at which others hold. It doubles each time.
ASK_LATE_S, ASK_LATE_S_MAX = 0.1, 5.0


@dataclass(slots=True)
class UnknownHold:
    """A rank's hold at a save attempt that this agent does not know. `since_s`: when `_answer_unknown_holds` first saw
    it."""

    attempt_number: int
    request: Request
    since_s: float | None = None


class ExitVote(Preemption):
    """The facts and notices of one job, and the verdicts on its holds. Base class of the scheduler."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._next_late_query_s: float | None = None  # when late ranks are asked next; None: no rank waits for them
        self._late_query_interval_s = ASK_LATE_S
        self._has_former_order = False  # ranks leave by a former agent's word, which this agent reports
        self.is_single_node = True  # all ranks are on one node, and read the verdict on one control page
        self._former_attempt_number = 0  # the save attempt by which a former agent told ranks to leave
        self._unknown_holds: dict[int, UnknownHold] = {}  # by rank: holds at save attempts of a former agent

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
            self.committed_version = max(committed, self.committed_version or committed)
        if self._leave_attempt_number or self._is_end_ordered:
            return
        if not self._has_former_order:
            self._has_former_order = True
            self._pending_report = Report("ended" if why else "left", why, deadline_s, ())
        if self._pending_report is not None:
            self._pending_report = replace(
                self._pending_report, sources=tuple(sorted({*self._pending_report.sources, *notices}))
            )

    def record_disconnect(self, rank: int, now_s: float | None) -> None:
        super().record_disconnect(rank, now_s)
        self._unknown_holds.pop(rank, None)

    def record_join(self, rank: int) -> None:
        super().record_join(rank)
        # The message may have been lost with the former connection.
        if self._leave_deadline_s is not None:
            self._send_leave_deadline()

    def record_hold(self, rank: int, number: int, request: Request) -> None:
        """The rank has staged and waits for the verdict on save attempt `number`. If the attempt is unknown the answer
        is: go on; unless other ranks may have been told to leave by it, see `_answer_unknown_holds`."""
        attempt = self._attempt_of(number)
        if (number and self._leave_attempt_number == number) or self.is_lost_cause or self._is_end_ordered:
            self._answer_hold(request, True)
        elif attempt is None and not self.is_single_node:
            self._unknown_holds[rank] = UnknownHold(number, request)
        elif attempt is None or attempt.reason is not SaveReason.HOLD or attempt.verdict is False:
            self._answer_hold(request, False)
        else:
            attempt.held_requests[rank] = request

    def next_wake_s(self, now_s: float) -> float | None:
        times = [super().next_wake_s(now_s), self._next_late_query_s]
        if (signals := self._signal_notices) and not self._is_end_ordered and not self._is_leave_unanimous:
            times += [
                at_s
                for at_s in (self._boundary_deadline_s(signals, now_s), *self._silent_from_s.values())
                if at_s > now_s
            ]
        times += [each.since_s + REJOIN_S for each in self._unknown_holds.values() if each.since_s is not None]
        return min((each for each in times if each is not None), default=None)

    # -- decisions

    def _set_verdict(self, attempt: SaveAttempt, leave: bool, now_s: float) -> None:
        """Sets the verdict on a hold: final, and the same for all ranks."""
        attempt.verdict = leave
        if leave:
            self._is_leave_unanimous = len(attempt.held_requests) == self.world
            self._leave_attempt_number = attempt.number
            self._actions.append(SetVerdict(attempt.number))
            self._actions += self._left_by_actions()
            sources = self._exit_notice_texts()
            by_s = self.deadline_s(now_s)
            if not (self._is_end_ordered or self.is_lost_cause):
                self._leave_deadline_s = by_s
            if sources and not self._is_end_ordered:
                deadline_s = now_s if by_s is None else by_s
                self._pending_report = Report("left", "", deadline_s, sources)
        for request in attempt.held_requests.values():
            self._answer_hold(request, leave)
        attempt.held_requests.clear()

    def _left_by_actions(self) -> list[RecordExit]:
        """The machine notices because of which the ranks leave."""
        due = [
            self.notices[name]
            for name in sorted(self._due_notices)
            if self.notices[name].exit_timing is ExitTiming.IN_TIME
        ]
        return [RecordExit(each.source, each.source_key, node) for each in due for node in sorted(each.nodes)]

    def _answer_unknown_holds(self, now_s: float) -> None:
        """Answers holds at save attempts of a former agent.

        That agent may have told only its own node's ranks to leave. Those report it when they rejoin
        (`record_former_verdict`) or leave (`record_exit_order`). So the other ranks wait for all living ranks to join.
        If one does not, they leave, since the job is broken."""
        if not self._unknown_holds:
            return
        all_came = all(m.has_joined or m.presence is not Presence.HERE for m in self.rank_states)
        for rank, asked in list(self._unknown_holds.items()):
            asked.since_s = now_s if asked.since_s is None else asked.since_s
            told = (
                asked.attempt_number == self._former_attempt_number
                or self._has_former_order
                or self.is_lost_cause
                or self._is_end_ordered
            )
            if told or all_came or now_s >= asked.since_s + REJOIN_S:
                del self._unknown_holds[rank]
                if told or not all_came:
                    by_s = self._leave_deadline_s if self._leave_deadline_s is not None else self.deadline_s(now_s)
                    self._actions.append(
                        AnswerRequest(
                            asked.request, {"leave": True, "leave_deadline_s": math.inf if by_s is None else by_s}
                        )
                    )
                else:
                    self._answer_hold(asked.request, False)

    def _answer_hold(self, request: Request, leave: bool) -> None:
        self._actions.append(
            AnswerRequest(request, {"leave": leave, "leave_deadline_s": self._leave_deadline_s if leave else None})
        )

    def _query_late_ranks(self, now_s: float) -> None:
        """Asks the ranks that have not reached a boundary where others hold. A rank that passed it before it saw the
        appointment reports that only at its next boundary. It may never get there, stuck in a collective with the ranks
        that hold."""
        attempt = next(
            (
                attempt
                for attempt in self._open_attempts()
                if attempt.held_requests and len(attempt.staged_ranks) < self.world
            ),
            None,
        )
        if attempt is None:
            self._next_late_query_s = None
        elif self._next_late_query_s is None:
            self._next_late_query_s, self._late_query_interval_s = now_s + ASK_LATE_S, ASK_LATE_S
        elif now_s >= self._next_late_query_s:
            self._late_query_interval_s = min(2 * self._late_query_interval_s, ASK_LATE_S_MAX)
            self._next_late_query_s = now_s + self._late_query_interval_s
            word = ControlWord(attempt.number, attempt.slot, WordKind.HOLD, attempt.version.step, attempt.version.sub)
            self._actions.append(NotifyRanks({"t": "hold-awaited", "word": word.pack()}))

    def _end_hopeless_waits(self, now_s: float) -> None:
        """Ends the wait of signalled ranks for a boundary once no boundary can come in time."""
        signals = self._signal_notices
        if not signals or self._is_end_ordered or self._is_leave_unanimous or self.superseded_by:
            return
        gone, last_s = self.rank_states.summary.first_failed, self._boundary_deadline_s(signals, now_s)
        away = [rank for rank, from_s in self._silent_from_s.items() if now_s >= from_s]
        if gone is not None:
            self._order_end(f"rank {gone.rank} is gone, and without it no other comes to a boundary", False, signals)
        elif self.rank_states.summary.any_left or self._is_at_end:
            # A rank has left in order, so the others will; or all ranks have ended, and wait for the commit.
            return
        elif away:
            self._order_end(f"nothing is heard of rank {away[0]}, and without it no other leaves", False, signals)
        elif now_s >= last_s:
            short = min(each.received_s for each in signals) >= last_s
            self._order_end(
                "there was no time to wait for a boundary" if short else "no boundary came in time", True, signals
            )

    def _order_end(self, why: str, wait: bool, signals: list[StandingNotice]) -> None:
        deadline_s = min(each.deadline_s for each in signals)
        self._is_end_ordered, self._end_reason, self._can_end_wait, self._leave_deadline_s = True, why, wait, deadline_s
        self._pending_report = Report(
            "ended", why, deadline_s, self._notice_texts([(each.source, each.key) for each in signals])
        )
        self._send_end()

    def _send_end(self) -> None:
        self._actions.append(
            NotifyRanks(
                {
                    "t": "end-process",
                    "why": self._end_reason,
                    "wait_for_saves": self._can_end_wait,
                    "leave_deadline_s": self._leave_deadline_s,
                }
            )
        )

    def _apply_earlier_deadline(self, now_s: float) -> None:
        """Applies an earlier deadline, heard of after the ranks were told to leave: to them, and to the report."""
        by_s = self.deadline_s(now_s)
        if by_s is None:
            return
        if self._pending_report is not None and by_s < self._pending_report.deadline_s:
            self._pending_report = replace(self._pending_report, deadline_s=by_s)
        if self._leave_deadline_s is not None and by_s < self._leave_deadline_s:
            self._leave_deadline_s = by_s
            self._send_leave_deadline()

    def _send_leave_deadline(self) -> None:
        if self._is_end_ordered:
            self._send_end()
        else:
            self._actions.append(NotifyRanks({"t": "leave-deadline", "leave_deadline_s": self._leave_deadline_s}))

    # -- helpers

    @property
    def _silent_from_s(self) -> dict[int, float]:
        """By rank without a connection: the time from which the rank counts as silent."""
        return {
            m.rank: m.disconnected_s + AWAY_S
            for m in self.rank_states.summary.disconnected
            if m.disconnected_s is not None
        }

    @property
    def _signal_notices(self) -> list[StandingNotice]:
        return [each for each in self.notices.values() if each.certain and each.source == SIGNAL_SOURCE]

    def _boundary_deadline_s(self, signals: list[StandingNotice], now_s: float) -> float:
        """The time until which signalled ranks wait for a boundary."""
        return min(each.deadline_s for each in [*signals, *self._exit_notices(now_s)]) - END_S
