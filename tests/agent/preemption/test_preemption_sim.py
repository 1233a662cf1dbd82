"""Notices under random schedules: they arrive, move, are taken back, come several at once, uncertain, far ahead or too
late; some when the ranks leave already, for an earlier time; ranks are signalled, because the machine goes or because a
rank is dead; the agent dies and another takes over.

What is added here to the faults of test_scheduler_sim: whoever is told to leave is not alone, nobody stays past its
bound, what was taken back makes nobody leave, and who leaves is told of the earliest deadline, before which what was
saved is said. A schedule is one seed; `run(seed)` replays it.
"""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from typing import Any

import pytest

from ckpt.agent.preemption.notice_relay import ExitTiming, StandingNotice
from ckpt.agent.scheduler.scheduler import Scheduler
from ckpt.agent.state import actions as do
from ckpt.agent.state.slots import WorkState
from ckpt.ipc.notice_sources import SIGNAL_SOURCE
from ckpt.placement.placement import Kept
from ckpt.types import Version
from tests.agent.scheduler import test_scheduler_sim as base
from tests.agent.scheduler.test_scheduler_sim import Rank, Sim

SCHEDULES = max(100, int(os.environ.get("CKPT_SIM_SCHEDULES", "4000")) // 10)
DAY_S = 86400.0
RING = (Kept("", 1, ("b",)), Kept("b", 1, ("",)))  # of two nodes, each keeps what the other has
LEAD_S = 30.0
RESTART_S = 12.0  # signalled ranks with a dead one among them are gone so soon: late and repeated words included


class Noticed(Sim):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        if self.random.random() < 0.7:
            self.group.replicas.placement = RING  # else who keeps what is not known, as with parity
        self.commit_s = self.random.choice((None, None, None, 0.5, 2.0, 6.0))
        self.standing: dict[tuple[str, str], StandingNotice] = {}  # what the machine's owner says
        self.signals: dict[int, tuple[float, float]] = {}  # rank -> (when, deadline)
        self.restarts = 0
        self.sizes: dict[int, tuple[int, ...]] | None = None  # of a former agent's arenas, by slot
        self.end_told = False
        self.told: set[int] = set()  # ranks that were told to leave by a notice, or read that on the page
        self.by_s, self.told_by_s = math.inf, math.inf  # since the verdict: the earliest deadline; what ranks were told
        self.told_store: set[Version] = set()  # of which it was said what became of it in the store
        self.nearer = False  # whether they were told of an earlier one

    # -- what happens

    def begin(self) -> None:
        super().begin()
        rng = self.random
        for number in range(rng.choice((0, 1, 1, 2, 4))):
            self.after(rng.uniform(0, 8), self.notice, f"n{number}")
        if rng.random() < 0.25:
            self.after(rng.uniform(0, 10), self.signal_all)
        if rng.random() < 0.25:
            for _ in range(rng.choice((1, 2))):
                self.after(rng.uniform(0, 15), self.kill_agent)

    @property
    def broken(self) -> bool:
        """Whether the job cannot go on as it was, so that each rank ends as it can."""
        return self.hung or bool(self.group.facts.superseded_by) or self.end_told

    def notice(self, key: str) -> None:
        rng = self.random
        lead_s = rng.choice((-5.0, 0.3, 2.0, 10.0, 40.0, 2 * DAY_S))
        node = frozenset({rng.choice(("", "b"))})
        certain, when = (
            rng.random() < 0.7,
            rng.choice((ExitTiming.AT_ONCE, ExitTiming.IN_TIME, ExitTiming.IN_TIME, ExitTiming.NOT_AGAIN)),
        )
        self.say(StandingNotice("cloud", key, self.now_s + lead_s, self.now_s, certain, when, node))
        what = rng.random()
        if what < 0.25:
            self.after(rng.uniform(0, 5), self.move, key)
        elif what < 0.6 or lead_s > DAY_S:
            self.after(rng.uniform(0, 12), self.take_back, key)

    def say(self, told: StandingNotice) -> None:
        if self.gone():
            return
        self.standing[told.source, told.key] = told
        self.group.preemption.add_notice(told)
        self.decide()

    def notice_nearer(self) -> None:
        """While the ranks leave."""
        rng = self.random
        lead_s, when = rng.choice((0.3, 2.0, 6.0)), rng.choice((ExitTiming.AT_ONCE, ExitTiming.IN_TIME))
        self.say(StandingNotice("cloud", "nearer", self.now_s + lead_s, self.now_s, exit_timing=when))

    def notice_beside_a_commit(self, takes_s: float) -> None:
        """One or two more may fit, or none."""
        lead_s = takes_s * self.random.uniform(0.8, 2.5)
        if self.faults and not self.verdict:
            self.say(StandingNotice("cloud", "beside", self.now_s + lead_s, self.now_s, exit_timing=ExitTiming.AT_ONCE))

    def move(self, key: str) -> None:
        told = self.standing.get(("cloud", key))
        if told is not None:
            deadline_s = self.now_s + self.random.choice((-1.0, 1.0, 15.0))
            self.say(StandingNotice("cloud", key, deadline_s, self.now_s, self.random.random() < 0.8, told.exit_timing))

    def take_back(self, key: str) -> None:
        if self.standing.pop(("cloud", key), None) is not None:
            self.group.preemption.withdraw_notice("cloud", key)
            self.decide()

    def signal_all(self) -> None:
        """As torchrun does, to stop or to restart; or somebody signals one rank."""
        alive = [rank for rank in self.ranks if rank.alive and not rank.left]
        chosen = alive if self.random.random() < 0.7 else alive[:1]
        for rank in chosen:
            self.after(self.random.uniform(0, 0.2), self.signal, rank)

    def signal(self, rank: Rank) -> None:
        if rank.alive and not rank.left and rank.number not in self.signals:
            deadline_s = self.now_s + 30.0
            self.signals[rank.number] = (self.now_s, deadline_s)
            self.tell_signal(rank)
            self.after(29.0, self.at_deadline, rank)

    def tell_signal(self, rank: Rank) -> None:
        """A request, which is sent again after a lost connection."""
        deadline_s = self.signals[rank.number][1]
        self.after(self.delay_s(rank), self.hear_signal, rank, rank.connection, deadline_s)

    def hear_signal(self, rank: Rank, connection: int, deadline_s: float) -> None:
        if connection == rank.connection and rank.alive:
            self.group.preemption.add_notice(
                StandingNotice(SIGNAL_SOURCE, "SIGTERM", deadline_s, self.now_s, exit_timing=ExitTiming.AT_ONCE)
            )
            self.decide()

    def at_deadline(self, rank: Rank) -> None:
        if rank.alive and not rank.left:
            self.die(rank)

    def kill(self, rank: Rank) -> None:
        first = not self.hung and rank.alive and not rank.left
        super().kill(rank)
        if first and self.random.random() < 0.6:  # the launcher restarts
            for other in self.ranks:
                self.after(self.random.uniform(0.1, 0.5), self.signal_to_restart, other)

    def signal_to_restart(self, rank: Rank) -> None:
        if rank.alive and not rank.left and rank.number not in self.signals:
            self.signal(rank)
            self.after(RESTART_S, self.must_be_gone, rank, self.restarts)

    def must_be_gone(self, rank: Rank, restarts: int) -> None:
        ended = not rank.alive or rank.left or any(k[0] == "leave" and k[1] == rank.number for k in self.unanswered)
        if self.restarts == restarts:  # the next agent knows nothing of the dead: the deadline bounds it then
            assert ended, f"rank {rank.number} is not ended {RESTART_S} s after the signal, with a dead one"

    def decide(self) -> None:
        super().decide()
        if self.verdict and not (self.restarts or self.broken):
            self.by_s = min(self.by_s, self.group.preemption.deadline_s(self.now_s) or math.inf)
            assert self.told_by_s in (math.inf, self.by_s), "the ranks were told of another deadline than the earliest"

    # -- the agent's death, and the next one

    def kill_agent(self) -> None:
        if self.closed or self.gone() or not self.faults or self.group.facts.superseded_by:
            return
        self.restarts += 1
        self.completed, self.readers, self.commits, self.words = [], {}, 0, [{}, {}]
        self.sizes = {slot.number: slot.arena_bytes for slot in self.group.slots if slot.arena_bytes}
        verdict, self.verdict = self.verdict, 0
        self.group = Scheduler(self.world, self.policy, first_attempt=self.random.randrange(1, 1 << 20))
        self.group.appointments.record_agent_restart(self.now_s)
        self.wake_s = None
        for rank in self.ranks:
            rank.connection += 1
            holds = (
                rank.blocked and rank.waits_for is not None and rank.asks == "rank-holds"
            )  # the answer may be on its way
            if verdict and verdict in rank.seen and holds and rank.alive:  # it reads on the page what it was to be told
                self.verdicts.setdefault(verdict, set()).add(True)
                self.told.add(rank.number)
                rank.waits_for = functools.partial(self.leave, rank)
            rank.shows, rank.division, rank.seen = False, "", set()
            rank.warm.clear()
            for key in [k for k in self.unanswered if k[1] == rank.number]:
                del self.unanswered[key]
                if key[0] == "leave" and rank.alive and rank.number not in self.told:
                    rank.left = True  # else it comes to the next agent with what it has staged
            if rank.asks == "save" and rank.waits_for is not None:  # the answer may be on its way, and is lost
                # It fails; at the end the rank tries again at the next version, else it goes on.
                rank.waits_for, rank.blocked = None, False
                rank.gave_up = Version(rank.ended, rank.sub)
                self.after(1.5, self.proceed, rank)
            self.after(self.random.uniform(0.1, 1.0), self.rejoin, rank)
        self.in_agent(60.0, self.give_up_takeover)

    def proceed(self, rank: Rank) -> None:
        if rank.alive and not rank.left:
            super().proceed(rank)

    def answer(self, request: Any, rank: Rank, body: Any) -> None:
        is_heard = rank.alive and rank.blocked and not rank.left and request[3] == rank.connection
        if is_heard and request[0] == "rank-holds" and body["leave"] and body["leave_deadline_s"] is not None:
            self.told.add(rank.number)
        super().answer(request, rank, body)

    def deliver(self, rank: Rank, request: Any, what: str, arg: Any) -> None:
        is_heard = rank.alive and request[3] == rank.connection
        if is_heard and what == "leave" and rank.number in self.told:
            self.group.exit_vote.record_exit_order("", self.now_s + LEAD_S, None)
        super().deliver(rank, request, what, arg)

    def rejoin(self, rank: Rank) -> None:
        super().rejoin(rank)
        if rank.alive and not rank.left:
            if rank.number in self.signals:
                self.tell_signal(rank)
            if all(member.has_joined for member in self.group.rank_states):
                self.end_takeover()
            for told in self.standing.values():  # the listeners begin anew
                self.group.preemption.add_notice(told)
            self.decide()

    def left_saved(self) -> bool:
        """Whether the newest that is whole in memory is in the store, or the store did not take it."""
        if self.group.slots.newest_commit_state in (None, WorkState.DONE, WorkState.FAILED):
            return True
        return any(not rank.alive for rank in self.ranks)

    def give_up_takeover(self) -> None:
        if self.sizes is not None:
            self.sizes = None
            self.group.end_takeover(self.now_s)
            self.decide()

    def end_takeover(self) -> None:
        if self.sizes is None:
            return
        inherited: dict[int, Version] = {}
        for number, sizes in self.sizes.items():
            self.group.arenas.record_arenas(number, sizes)
            held = self.contents(number)
            if held[0] is not None and len(set(held)) == 1:
                inherited[number] = Version.parse(held[0][1])
        self.sizes = None
        self.group.end_takeover(self.now_s, inherited)

    def do_NotifyRanks(self, action: do.NotifyRanks) -> None:
        self.end_told = self.end_told or action.body["t"] == "end-process"
        if action.body["t"] == "leave-deadline":
            self.nearer, self.told_by_s = True, action.body["leave_deadline_s"]
        if action.body["t"] == "checkpoint-level" and action.body["level"] == "store":
            self.told_store.add(Version.parse(action.body["version"]))
        super().do_NotifyRanks(action)

    def do_AnswerRequest(self, action: do.AnswerRequest) -> None:
        super().do_AnswerRequest(action)
        if action.request[0] == "rank-holds" and action.body["leave"] and action.body["leave_deadline_s"] is not None:
            self.told_by_s = action.body["leave_deadline_s"]

    def do_WriteOutcome(self, action: do.WriteOutcome) -> None:
        super().do_WriteOutcome(action)
        if self.verdict and not (self.restarts or self.broken):
            assert self.now_s <= self.by_s, "what was saved is said when the earliest deadline has passed"

    def do_Commit(self, action: do.Commit) -> None:
        super().do_Commit(action)
        if self.commit_s is not None and self.random.random() < 0.2:
            self.in_agent(self.commit_s * self.random.random(), self.notice_beside_a_commit, self.commit_s)

    def do_SetVerdict(self, action: do.SetVerdict) -> None:
        super().do_SetVerdict(action)
        live = [n for n in self.group.preemption.notices.values() if n.causes_exit and n.deadline_s > self.now_s]
        assert live or self.group.facts.is_lost_cause or self.end_told, "they leave though nothing stands to leave by"
        if self.random.random() < 0.4:
            self.in_agent(self.random.uniform(0, 3), self.notice_nearer)


def run(seed: int) -> Noticed:
    sim = Noticed(seed)
    sim.start()
    sim.run_until(2.0 + sim.random.choice((3.0, 30.0)))
    sim.faults = False
    for key in [key for source, key in sim.standing]:
        sim.take_back(key)
    for rank in sim.ranks:
        sim.after(0.0, sim.rejoin, rank)
    sim.last_step = 1 << 30
    sim.run_until(sim.now_s + 40.0)  # whoever was signalled is gone
    assert all(not r.alive or r.left for r in sim.ranks if r.number in sim.signals)
    before = len(sim.completed)
    sim.last_step = max(r.step for r in sim.ranks) + 15
    sim.run_until(sim.now_s + 10 * base.CALM_S, sim.gone)
    sim.run_until(sim.now_s + 60.0)
    assert sim.gone(), f"somebody hangs: {[(r.number, r.step, r.blocked) for r in sim.ranks]}, {sim.unanswered}"
    for number, verdicts in sim.verdicts.items():
        assert len(verdicts) == 1 or sim.broken, f"round {number}: some leave, some go on"
    if not (sim.broken or sim.signals or sim.preempted or sim.verdict or sim.restarts):
        assert len(sim.completed) > before, "nothing became complete after the faults were over"
        assert sim.group.facts.committed_version == max(sim.completed), "the last one did not reach the store"
    if sim.verdict and not sim.broken:
        assert not any(r.alive and not r.left for r in sim.ranks)
    if not sim.restarts:
        assert sim.gave_way <= sim.told_store, "nobody was told that a commit gave way"
    if sim.told and not sim.broken:
        assert [each for each in sim.outcomes if each["how"] == "left"], "they left, and nobody said what was saved"
        assert sim.left_saved(), "what they had all staged is not in the store"
    return sim


@pytest.mark.timeout(300 * max(1, SCHEDULES // 1000))
@pytest.mark.parametrize("part", range(2))
def test_no_notice_splits_the_ranks_or_keeps_one_past_its_bound(part: int, seed: int) -> None:
    first = seed
    count = SCHEDULES // 2
    reached = Counter[str]()
    # The schedules have to reach what they are there for: some of it one in two hundred does.
    all_of_it = ("left", "ended", "agents", "restarted", "stayed", "nearer", "gave way")
    wanted = all_of_it if SCHEDULES >= 1000 else ()
    for seed in range(first, first + 10 * count):
        if seed >= first + count and all(reached[what] for what in wanted):
            break
        try:
            sim = run(seed)
        except AssertionError as exc:
            raise AssertionError(f"seed {seed}: {exc}") from exc
        reached["left"] += bool(sim.verdict)
        reached["ended"] += sim.end_told
        reached["agents"] += bool(sim.restarts)
        reached["nearer"] += sim.nearer
        reached["gave way"] += bool(sim.gave_way)
        reached["restarted"] += bool(sim.restarts and sim.completed)
        reached.update(each["how"] for each in sim.outcomes)
    assert all(reached[what] for what in wanted), reached
