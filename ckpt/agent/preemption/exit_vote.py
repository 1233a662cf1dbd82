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

from ckpt.agent.preemption.deadline_strategy import Course, When
from ckpt.agent.preemption.notice_relay import StandingNotice
from ckpt.agent.preemption.preemption import END_S, Preemption, Report
from ckpt.agent.state.actions import AnswerRequest, LeftBy, Request, SetVerdict, Tell
from ckpt.agent.state.job_facts import REJOIN_S, Round, Why
from ckpt.agent.state.rank_presence import Presence
from ckpt.ipc.control_page import ControlWord, WordKind
from ckpt.ipc.notice_sources import SIGNAL
from ckpt.types import Tick

# A rank without a connection, not known to be dead, may be away for so long while its node's agent restarts. After
# that the node counts as dead.
AWAY_S = 5.0
# Delay before ranks are asked whether they are past the boundary at which others hold. It doubles each time.
ASK_LATE_S, ASK_LATE_S_MAX = 0.1, 5.0


@dataclass(slots=True)
class Unknown:
    """A rank's hold at a save attempt that this agent does not know. `since_s`: when `_judge_unknown` first saw it."""

    round: int
    request: Request
    since_s: float | None = None


class ExitVote(Preemption):
    """The facts and notices of one job, and the verdicts on its holds. Base class of the scheduler."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._ask_late_s: float | None = None  # when late ranks are asked next; None: no rank waits for them
        self._ask_late_every_s = ASK_LATE_S
        self._former_told = False  # ranks leave by a former agent's word, which this agent reports
        self.one_page = True  # all ranks are on one node, and read the verdict on one control page
        self._former_round = 0  # the save attempt by which a former agent told ranks to leave
        self._unknown: dict[int, Unknown] = {}  # by rank: holds at save attempts of a former agent

    # -- facts

    def told_before(self, round_: int) -> None:
        """A joining rank's control page says to leave by that save attempt of a dead agent; 0: it does not say so.
        A verdict is written to that page before any rank of another node hears of it."""
        self._former_round = round_ or self._former_round

    def sent_away(self, why: str, deadline_s: float, committed: Tick | None, notices: Collection[str] = ()) -> None:
        """A rank leaves because it was told to leave, or to end by reason `why`. If a dead agent told it, this agent
        reports the outcome. `committed`: the newest version that the rank knows to be committed. `notices`: those that
        the rank heard, perhaps before this agent."""
        if committed is not None:
            self.committed_tick = max(committed, self.committed_tick or committed)
        if self._leave_round or self._ended:
            return
        if not self._former_told:
            self._former_told = True
            self._report = Report("ended" if why else "left", why, deadline_s, ())
        if self._report is not None:
            self._report = replace(self._report, sources=tuple(sorted({*self._report.sources, *notices})))

    def lost(self, rank: int, now_s: float | None) -> None:
        super().lost(rank, now_s)
        self._unknown.pop(rank, None)

    def joined(self, rank: int) -> None:
        super().joined(rank)
        # The message may have been lost with the former connection.
        if self._leave_by_s is not None:
            self._tell_leave_by()

    def held(self, rank: int, number: int, request: Request) -> None:
        """The rank has staged and waits for the verdict on save attempt `number`. If the attempt is unknown the answer
        is: go on; unless other ranks may have been told to leave by it, see `_judge_unknown`."""
        slot = self._slot_of(number)
        round_ = slot.round if slot is not None else None
        if (number and self._leave_round == number) or self.is_lost_cause or self._ended:
            self._answer_held(request, True)
        elif round_ is None and not self.one_page:
            self._unknown[rank] = Unknown(number, request)
        elif round_ is None or round_.why is not Why.HOLD or round_.verdict is False:
            self._answer_held(request, False)
        else:
            round_.held[rank] = request

    def next_wake_s(self, now_s: float) -> float | None:
        times = [super().next_wake_s(now_s), self._ask_late_s]
        if (signals := self._signals) and not self._ended and not self._all_leave:
            times += [at_s for at_s in (self._last_s(signals, now_s), *self._away_from_s.values()) if at_s > now_s]
        times += [each.since_s + REJOIN_S for each in self._unknown.values() if each.since_s is not None]
        return min((each for each in times if each is not None), default=None)

    # -- decisions

    def _judge(self, round_: Round, leave: bool, now_s: float) -> None:
        """Sets the verdict on a hold: final, and the same for all ranks."""
        round_.verdict = leave
        if leave:
            self._all_leave = len(round_.held) == self.world
            self._leave_round = round_.number
            self._out.append(SetVerdict(round_.number))
            self._out += self._left_by()
            sources = self._certain()
            by_s = self.deadline_s(now_s)
            self._copy_by_s = by_s if self.course is Course.COPY else None
            if not (self._ended or self.is_lost_cause):
                self._leave_by_s = by_s
            if sources and not self._ended:
                deadline_s = now_s if by_s is None else by_s
                self._report = Report("left", "", deadline_s, sources)
        for request in round_.held.values():
            self._answer_held(request, leave)
        round_.held.clear()

    def _left_by(self) -> list[LeftBy]:
        """The machine notices because of which the ranks leave."""
        due = [self.notices[name] for name in sorted(self._due) if self.notices[name].when is When.IN_TIME]
        return [LeftBy(each.source, each.bare_key, node) for each in due for node in sorted(each.nodes)]

    def _judge_unknown(self, now_s: float) -> None:
        """Answers holds at save attempts of a former agent.

        That agent may have told only its own node's ranks to leave. Those report it when they rejoin (`told_before`) or
        leave (`sent_away`). So the other ranks wait for all living ranks to join. If one does not, they leave, since
        the job is broken."""
        if not self._unknown:
            return
        all_came = all(m.joined or m.presence is not Presence.HERE for m in self.members)
        for rank, asked in list(self._unknown.items()):
            asked.since_s = now_s if asked.since_s is None else asked.since_s
            told = asked.round == self._former_round or self._former_told or self.is_lost_cause or self._ended
            if told or all_came or now_s >= asked.since_s + REJOIN_S:
                del self._unknown[rank]
                if told or not all_came:
                    by_s = self._leave_by_s if self._leave_by_s is not None else self.deadline_s(now_s)
                    self._out.append(
                        AnswerRequest(asked.request, {"leave": True, "by_s": math.inf if by_s is None else by_s})
                    )
                else:
                    self._answer_held(asked.request, False)

    def _answer_held(self, request: Request, leave: bool) -> None:
        self._out.append(AnswerRequest(request, {"leave": leave, "by_s": self._leave_by_s if leave else None}))

    def _ask_who_is_late(self, now_s: float) -> None:
        """Asks the ranks that have not reached a boundary where others hold. A rank that passed it before it saw the
        appointment reports that only at its next boundary. It may never get there, stuck in a collective with the ranks
        that hold."""
        round_ = next((round_ for _, round_ in self._open() if round_.held and len(round_.staged) < self.world), None)
        if round_ is None:
            self._ask_late_s = None
        elif self._ask_late_s is None:
            self._ask_late_s, self._ask_late_every_s = now_s + ASK_LATE_S, ASK_LATE_S
        elif now_s >= self._ask_late_s:
            self._ask_late_every_s = min(2 * self._ask_late_every_s, ASK_LATE_S_MAX)
            self._ask_late_s = now_s + self._ask_late_every_s
            word = ControlWord(round_.number, round_.slot, WordKind.HOLD, round_.tick.step, round_.tick.sub)
            self._out.append(Tell({"t": "awaited", "word": word.pack()}))

    def _end_attempts(self, now_s: float) -> None:
        """Ends the wait of signalled ranks for a boundary once no boundary can come in time."""
        signals = self._signals
        if not signals or self._ended or self._all_leave or self.superseded_by:
            return
        gone, last_s = self.members.seen.gone, self._last_s(signals, now_s)
        away = [rank for rank, from_s in self._away_from_s.items() if now_s >= from_s]
        if gone is not None:
            self._end(f"rank {gone.rank} is gone, and without it no other comes to a boundary", False, signals)
        elif self.members.seen.any_left or self._at_end:
            # A rank has left in order, so the others will; or all ranks have ended, and wait for the commit.
            return
        elif away:
            self._end(f"nothing is heard of rank {away[0]}, and without it no other leaves", False, signals)
        elif now_s >= last_s:
            short = min(each.told_s for each in signals) >= last_s
            self._end(
                "there was no time to wait for a boundary" if short else "no boundary came in time", True, signals
            )

    def _end(self, why: str, wait: bool, signals: list[StandingNotice]) -> None:
        deadline_s = min(each.deadline_s for each in signals)
        self._ended, self._end_why, self._end_waits, self._leave_by_s = True, why, wait, deadline_s
        self._report = Report("ended", why, deadline_s, self._texts([(each.source, each.key) for each in signals]))
        self._tell_end()

    def _tell_end(self) -> None:
        self._out.append(Tell({"t": "end", "why": self._end_why, "wait": self._end_waits, "by_s": self._leave_by_s}))

    def _bring_forward(self, now_s: float) -> None:
        """Applies an earlier deadline, heard of after the ranks were told to leave: to them, to replication, and to the
        report."""
        by_s = self.deadline_s(now_s)
        if by_s is None:
            return
        if self._report is not None and by_s < self._report.deadline_s:
            self._report = replace(self._report, deadline_s=by_s)
        if self._copy_by_s is not None:
            self._copy_by_s = min(self._copy_by_s, by_s)
        if self._leave_by_s is not None and by_s < self._leave_by_s:
            self._leave_by_s = by_s
            self._tell_leave_by()

    def _tell_leave_by(self) -> None:
        if self._ended:
            self._tell_end()
        else:
            self._out.append(Tell({"t": "leave-by", "by_s": self._leave_by_s}))

    # -- helpers

    @property
    def _away_from_s(self) -> dict[int, float]:
        """By rank without a connection: the time from which the rank counts as silent."""
        return {m.rank: m.lost_s + AWAY_S for m in self.members.seen.lost if m.lost_s is not None}

    @property
    def _signals(self) -> list[StandingNotice]:
        return [each for each in self.notices.values() if each.certain and each.source == SIGNAL]

    def _last_s(self, signals: list[StandingNotice], now_s: float) -> float:
        """The time until which signalled ranks wait for a boundary."""
        return min(each.deadline_s for each in [*signals, *self._live(now_s)]) - END_S
