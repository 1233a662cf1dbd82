"""The engine: what becomes of a job under a trace of its nodes. Deterministic, and event-driven.

`simulate` merges the node events of the trace, the notices, and the events of the job itself, and goes from one to the
next. Semantics, as in ckpt:
- A crash loses the steps since the newest snapshot. The job restores it from memory, on the same nodes.
- A loss of nodes goes back to the newest snapshot that other nodes' memory survives by the placement of its replicas,
  else to the newest commit, else to the beginning. A snapshot whose replication was under way is lost.
- The job restarts on the nodes that are left, if they are at least the minimum, else it waits. It never gets more than
  the wanted number. Nodes that come later join as `Rejoin` says.
- A failure during gang start or restore begins the recovery anew. A crash during detection changes nothing, since all
  trainers are going down; a loss of nodes then is a loss of their memory.
- A commit under way goes on through a crash, and through a loss that its snapshot survives in memory.
- All events of one instant are one failure.
- By a certain notice the job leaves as late as the measured times and a reserve allow, as in ckpt. Its last snapshot is
  replicated and committed before it starts on the nodes that have no notice.
- By an uncertain notice the job takes one more snapshot, as late as the measured times allow, and stays. The steps from
  there to a loss are lost. An announced loss needs no detection.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Iterator
from itertools import groupby

from ckpt.policy.save_options import STEPS_APART, exit_lead_s
from ckpt.simulate.memory import SavedState, lose_nodes, make_home
from ckpt.simulate.notices import SimulatedNotice, draw_notices
from ckpt.simulate.outcome import Cause, RestoredFrom, RunOutcome
from ckpt.simulate.restarts import Interruption, JobTimes, outcome_of
from ckpt.simulate.saves import saves_of
from ckpt.simulate.scenario import Rejoin, Scenario
from ckpt.simulate.trace import EventKind, Trace, TraceEvent
from ckpt.simulate.training import NEVER, Doing, Training


def simulate(scenario: Scenario, trace: Trace, seed: int = 0) -> RunOutcome:
    """The outcome of the job on the nodes of the trace, up to its end or the trace's. `seed`: of the notices; nothing
    else is drawn."""
    return SimulatedJob(scenario, trace, seed).run()


class JobPhase(enum.Enum):
    """Where a job is between two times of training. Each begins when the one above ends."""

    DETECTING = "detecting"
    WAITING = "waiting"  # for nodes
    STARTING = "starting"
    RESTORING = "restoring"
    TRAINING = "training"


class SimulatedJob:
    """One run. `jumps` False: no cycle of turns is skipped, which takes longer and gives the same outcome."""

    def __init__(self, scenario: Scenario, trace: Trace, seed: int, jumps: bool = True) -> None:
        self.scenario, self.trace = scenario, trace
        self.saves = saves_of(scenario)
        self.training = Training(scenario, self.saves, jumps)
        self.times = JobTimes()
        self.phase = JobPhase.WAITING
        self.phase_ends_s = NEVER
        self.present: dict[str, str] = {}  # node -> pool, in order of arrival
        self.job: frozenset[str] = frozenset()  # nodes of this start, or of the one before
        self.interruption: Interruption | None = None
        self.warned: dict[str, float] = {}  # node -> deadline
        self.end_s = trace.span_s
        self._spent_s = 0.0  # nodes are counted up to here
        self._notices: list[SimulatedNotice] = draw_notices(scenario.notices, trace, seed)
        self._appointments: list[tuple[float, str, float]] = []
        heapq.heapify(self._notices)
        events = (each for each in trace.events if each.time_s < self.end_s)
        self._groups: Iterator[tuple[float, list[TraceEvent]]] = (
            (time_s, list(group)) for time_s, group in groupby(events, key=lambda each: each.time_s)
        )
        self._next_group = next(self._groups, None)

    # -- the loop

    def run(self) -> RunOutcome:
        training = self.training
        while True:
            outside_s = self._outside_s()
            own_s = min(training.next_s(), self.phase_ends_s)
            if min(own_s, outside_s) >= self.end_s:
                break
            # What the job does at an instant comes before what happens to it.
            if own_s <= outside_s:
                self._advance(own_s)
                if self.phase_ends_s <= own_s:
                    self._end_phase()
                else:
                    training.step(min(outside_s, self.end_s))
                    if training.doing is Doing.DONE and not self._has_left():
                        break
            else:
                self._advance(outside_s)
                self._happen()
        if training.doing is not Doing.DONE:
            self._advance(self.end_s)
            self._end_unfinished()
        self._spend_nodes()
        return outcome_of(self.scenario, self.training, self.times, self.trace.price_node_hour)

    def _outside_s(self) -> float:
        group_s = self._next_group[0] if self._next_group is not None else NEVER
        notice_s = self._notices[0].time_s if self._notices else NEVER
        appointment_s = self._appointments[0][0] if self._appointments else NEVER
        return min(group_s, notice_s, appointment_s)

    def _advance(self, to_s: float) -> None:
        seconds = to_s - self.training.now_s
        if self.phase is JobPhase.WAITING:
            self.times.waiting_s += seconds
            if self.interruption is not None:
                self.interruption.waited_s += seconds
        elif self.phase is not JobPhase.TRAINING:
            self.times.recovering_s += seconds
        self.training.advance(to_s)

    def _happen(self) -> None:
        """The events from outside that are due now."""
        now_s = self.training.now_s
        if self._notices and self._notices[0].time_s <= now_s:
            self._hear(heapq.heappop(self._notices))
        elif self._appointments and self._appointments[0][0] <= now_s:
            self._appoint(*heapq.heappop(self._appointments)[1:])
        elif self._next_group is not None:
            group, self._next_group = self._next_group[1], next(self._groups, None)
            self._change_nodes(group)

    # -- nodes

    def _change_nodes(self, events: list[TraceEvent]) -> None:
        self._spend_nodes()
        lost, crashed = set[str](), set[str]()
        for event in events:
            if event.kind is EventKind.ADD:
                self.present[event.node] = event.pool
            elif event.kind is EventKind.REMOVE:
                self.present.pop(event.node, None)
                lost.add(event.node)
            else:
                crashed.add(event.node)
        training = self.training
        if lost and lose_nodes(training.states(), training.home, lost):
            training.drop_lost()
        if self.phase is JobPhase.WAITING:
            self._start_if_enough()
        elif self.phase is not JobPhase.DETECTING and (hit := (lost | crashed) & self.job):
            gone = lost & self.job
            self._fail("loss" if gone else "crash", bool(gone) and gone.issuperset(hit) and self._were_warned(gone))
        else:
            self._grow()

    def _spend_nodes(self) -> None:
        now_s = self.training.now_s
        self.times.node_s += (now_s - self._spent_s) * min(len(self.present), self.scenario.nodes)
        self._spent_s = now_s

    def _grow(self) -> None:
        """Has the job leave, to restart on more nodes, if it waits for that and they are there."""
        if (
            self.scenario.rejoin is Rejoin.AT_WANTED
            and self.phase is JobPhase.TRAINING
            and len(self.job) < self.scenario.nodes <= len(self._usable_nodes())
            and self.scenario.saves
            and not self.training.must_leave
        ):
            self.training.leave(commits=False)
            self._has_left()

    # -- restarts

    def _fail(self, cause: Cause, warned: bool) -> None:
        now_s = self.training.now_s
        if self.phase is JobPhase.TRAINING:
            self.training.stop()
            self.interruption = Interruption(now_s, cause, self.job, warned)
        self._begin_phase(JobPhase.DETECTING, 0.0 if warned else self.scenario.detect_s)

    def _has_left(self) -> bool:
        """Whether the trainers left, to restart on more nodes or without those that go; that restart then begins."""
        training = self.training
        if training.doing is not Doing.DONE or training.is_finished:
            return False
        training.stop()
        by_notice = not self.job <= set(self._usable_nodes())
        self.interruption = Interruption(training.now_s, "loss" if by_notice else "rejoin", self.job, by_notice)
        if by_notice:
            self._begin_phase(JobPhase.DETECTING, self._save_s())
        else:
            self._start_if_enough()
        return True

    def _begin_phase(self, phase: JobPhase, seconds: float) -> None:
        self.phase, self.phase_ends_s = phase, self.training.now_s + seconds

    def _end_phase(self) -> None:
        if self.phase is JobPhase.DETECTING:
            self._start_if_enough()
        elif self.phase is JobPhase.STARTING:
            self._begin_phase(JobPhase.RESTORING, self._restore())
        else:
            self._train()

    def _start_if_enough(self) -> None:
        usable = self._usable_nodes()
        if len(usable) < self.scenario.nodes_least:
            self._begin_phase(JobPhase.WAITING, NEVER)
            return
        # Nodes of the former start hold its snapshots.
        stay = [node for node in usable if node in self.job]
        others = [node for node in usable if node not in self.job]
        self.job = frozenset((stay + others)[: self.scenario.nodes])
        self._begin_phase(JobPhase.STARTING, self.scenario.gang_start_s)

    def _choose(self) -> tuple[RestoredFrom, SavedState | None]:
        """The newest checkpoint of what is left; memory comes before the store."""
        training, same = self.training, self.scenario.peers is None
        found = [
            each
            for each in training.states()
            if each is not None and each.survives and each.home is not None
            if not same or each.home.ids.keys() == self.job
        ]
        newest = max(found, key=lambda each: each.ordinal, default=None)
        stored = training.committed
        if stored is not None and (newest is None or stored.ordinal > newest.ordinal):
            return "store", stored
        if newest is None or newest.home is None:
            return "nothing", None
        return ("local" if newest.home.ids.keys() == self.job else "peer"), newest

    def _go_back(self) -> tuple[RestoredFrom, SavedState | None]:
        level, saved = self._choose()
        training, books = self.training, self.training.books
        before_steps, before_s = training.steps, books.useful_s
        training.rewind(saved)
        self.times.lost_s += before_s - books.useful_s
        if self.interruption is not None:
            self.interruption.lost_steps += before_steps - training.steps
            self.interruption.level = level
        return level, saved

    def _restore(self) -> float:
        """Chooses the checkpoint. Returns the seconds of its restore."""
        level, saved = self._go_back()
        n = len(self.job)
        if level == "store":
            self.times.bytes_out += self.scenario.stored_bytes
            self.times.gets += self.scenario.requests_on(n)
            return self.scenario.store_restore_s_on(n)
        if level == "peer" and saved is not None and saved.home is not None:
            return self.scenario.peer_restore_s_on(n, len(saved.home.ids))
        return self.scenario.local_restore_s_on(n) if level == "local" else 0.0

    def _train(self) -> None:
        training, was = self.training, self.interruption
        if was is not None and was.level is not None:
            seconds = training.now_s - was.time_s
            self.times.record(was, True, training.now_s)
            self.saves.recover(was.failure(self.job, self.scenario.peers is not None), was.level, seconds)
        self.interruption = None
        home = training.home
        if home is None or home.gone or home.ids.keys() != self.job:
            option = self.scenario.peers.option if self.scenario.peers is not None else None
            home = make_home({node: self.present[node] for node in self.present if node in self.job}, option)
        self._begin_phase(JobPhase.TRAINING, NEVER)
        training.start(home)
        for node in self.job & self.warned.keys():
            self._plan_appointment(node, self.warned[node])
        self._grow()

    # -- notices

    def _hear(self, notice: SimulatedNotice) -> None:
        if notice.node in self.present:
            self.warned[notice.node] = notice.deadline_s
            self._plan_appointment(notice.node, notice.deadline_s)

    def _plan_appointment(self, node: str, deadline_s: float) -> None:
        """The appointment is as late as step, stall and what makes the snapshot safe allow."""
        scenario, n, now_s = self.scenario, max(1, len(self.job)), self.training.now_s
        slowdown = scenario.store.slowdown if scenario.store is not None else 0.0
        step_s = scenario.step_s_on(n) / (1 - slowdown)
        stall_s = scenario.local.stall_s if scenario.local is not None else scenario.commit_s_on(n)
        if scenario.notices.certain:
            needed_s = exit_lead_s(STEPS_APART * step_s + stall_s + self._save_s())
            # A false alarm is over then, and the node can be used again.
            heapq.heappush(self._appointments, (math.nextafter(deadline_s, math.inf), node, deadline_s))
        else:
            steps = 2 if scenario.local is not None and scenario.local.deferred else 1
            safe_s = scenario.replication_s_on(n) if scenario.peers is not None else scenario.commit_s_on(n)
            needed_s = steps * step_s + stall_s + safe_s
        heapq.heappush(self._appointments, (max(now_s, deadline_s - needed_s), node, deadline_s))

    def _appoint(self, node: str, deadline_s: float) -> None:
        training = self.training
        if training.now_s > deadline_s and self.phase is JobPhase.WAITING:
            self._start_if_enough()
        elif training.now_s > deadline_s:
            self._grow()
        elif self.phase is not JobPhase.TRAINING or node not in self.job or training.must_leave:
            return
        elif self.scenario.notices.certain:
            self.times.acted += 1
            training.leave(commits=True)
            self._has_left()
        elif training.unsaved_s >= self.scenario.notices.act_above_s:
            self.times.acted += training.hurry()

    def _usable_nodes(self) -> list[str]:
        """The nodes that a start may use: all that are there, but for those that a certain notice says will go."""
        now_s, certain = self.training.now_s, self.scenario.notices.certain
        return [node for node in self.present if not (certain and now_s <= self.warned.get(node, -math.inf))]

    def _save_s(self) -> float:
        """From a whole snapshot until it is replicated and committed, which the agents do at the same time."""
        n = max(1, len(self.job))
        return max(self.scenario.replication_s_on(n), self.scenario.commit_s_on(n))

    def _were_warned(self, nodes: set[str]) -> bool:
        return all(self.training.now_s <= self.warned.get(node, -math.inf) for node in nodes)

    # -- the end

    def _end_unfinished(self) -> None:
        """The trace ends. What a job in recovery cannot restore is lost."""
        was = self.interruption
        if was is not None:
            if was.level is None:
                self._go_back()
            self.times.record(was, False, self.training.now_s)
