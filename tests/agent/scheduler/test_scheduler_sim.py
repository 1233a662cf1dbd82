"""The job's state machine under random schedules: ranks of random pace, messages lost, late and repeated, deaths,
failing and slow commits and copies, layouts that change on one rank, saves, holds, a superseding start.

The simulation keeps the arenas' content itself and checks every action against it. A schedule is one seed; the failing
seed is in the assertion, and `run(seed)` replays it.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from ckpt.agent.preemption.notice_relay import ExitTiming, StandingNotice
from ckpt.agent.scheduler.scheduler import Scheduler
from ckpt.agent.state import actions as do
from ckpt.agent.state.slots import SaveReason, SlotState
from ckpt.errors import SaveFailed
from ckpt.ipc.control_page import MID_STEP, ControlWord, RankPlace, WordKind
from ckpt.placement.placement import Kept
from ckpt.policy.save_options import Every
from ckpt.trainer.link.levels import Levels
from ckpt.types import Version

SCHEDULES = int(os.environ.get("CKPT_SIM_SCHEDULES", "4000"))
CALM_S = 120.0  # so long after the last fault a checkpoint has to be complete
Content = tuple[int, str] | None  # (round, version) that a rank's arena holds; None while it is being written


class Rank:
    def __init__(self, number: int) -> None:
        self.number = number
        self.alive = True
        self.left = False
        self.step = 0  # entered
        self.since_s = 0.0  # when
        self.ended = 0
        self.sub = 0
        self.saved = False  # whether the save of this step was asked for
        self.gave_up: Version | None = None  # the newest save that failed by the agent's death
        self.then: Callable[[], None] = lambda: None  # where it goes on after a hold
        self.layout = 1  # what it holds now
        self.division = ""  # what it was sent last
        self.division_layout = 0
        self.warm: dict[int, str] = {}
        self.arenas: set[int] = set()  # slots of which its node has one
        self.seen: set[int] = set()  # the rounds it answered
        self.waits_for: Callable[[], None] | None = None  # its request, to be sent again after a lost connection
        self.asks = ""  # which one
        self.blocked = False
        self.asked_at = 0  # the newest step that the policy names, of which it has asked for a save
        self.filling = 0  # copies under way
        self.heard_s = 0.0  # when its last message arrives
        self.connection = 0
        self.connected = True
        self.shows = True  # whether its step is on the control page of the present agent

    @property
    def shown(self) -> tuple[int, int]:
        return (self.step, self.sub) if self.shows else (0, 0)


class Sim:
    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        self.world = rng.choice((1, 1, 2, 2, 3, 4, 8))
        self.slots = rng.choice((1, 2, 3, 3, 4, 4))
        self.policy = (
            Every(steps=rng.choice((1, 2, 5))) if rng.random() < 0.6 else Every(seconds=rng.choice((1.0, 4.0)))
        )
        self.group = Scheduler(self.world, self.policy, first_attempt=rng.choice((1, (1 << 20) - 3)))
        if self.policy.seconds is not None and rng.random() < 0.5:
            self.group.clock.set_intervals(self.policy.seconds, rng.choice((1, 3, 20)) * self.policy.seconds, 0.0)
        self.ranks = [Rank(n) for n in range(self.world)]
        self.now_s = 0.0
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = itertools.count()
        self.step_s = rng.choice((0.02, 0.1, 0.5))
        self.faults = True
        self.fault_rate = rng.choice((0.0, 0.02, 0.1))
        self.last_step = rng.randint(8, 20)
        self.save_steps = {s for s in range(1, self.last_step) if rng.random() < 0.08}
        every = self.policy.steps  # the ranks ask for these by themselves
        self.due_steps = set(range(every, self.last_step, every)) if every is not None else set()
        self.evaluations = {s: rng.randint(1, 40) for s in range(1, self.last_step) if rng.random() < 0.1}
        self.amid = {s for s in self.evaluations if rng.random() < 0.3}  # behind an update that no boundary has ended
        self.polled = 0  # snapshots appointed at polls
        self.content: dict[tuple[int, int], Content] = {}
        self.readers: dict[int, list[tuple[Content, ...]]] = {}
        self.group.replicas.is_replication_on = self.slots > 1 and rng.random() < 0.6
        self.group.replicas.placement = Kept("", 1), Kept("b", 1)
        self.safe: tuple[Scheduler, Version, int] | None = (
            None  # the newest that others keep; who knows it, and its slot
        )
        self.safe_whole = False  # whether they keep each node's part of it
        self.told_unsafe: Version | None = None
        self.levels = Levels()  # as who waits for one knows them
        self.copied = self.unkept = self.shrunk = 0
        self.copying: Scheduler | None = None  # the agent that has copies under way
        self.words: list[dict[int, ControlWord]] = [{}, {}]  # by slot: on the page here, and on another node's
        self.told_s = 0.0  # when the last one came there
        self.completed: list[Version] = []
        self.commits = 0
        self.commit_s: float | None = None  # what each takes, about; None: that differs
        self.committing = 0  # which of all; what ends an earlier one is late
        self.gave_way: set[Version] = set()  # whose commit was cancelled
        self.unanswered: dict[Any, str] = {}
        self.answered: dict[Any, Any] = {}
        self.closed = False
        self.layouts = [1] * self.world  # as the agent knows them
        self.wake_s: float | None = None
        self.verdicts: dict[int, set[bool]] = {}
        self.hung = False
        self.preempted = False
        self.verdict = 0  # on the control page
        self.outcomes: list[dict[str, Any]] = []

    # -- time and messages

    def in_agent(self, delay_s: float, what: Callable[..., None], *args: Any) -> None:
        """Something that the agent does; it ends with it."""
        agent = self.group
        self.after(delay_s, lambda: what(*args) if self.group is agent else None)

    def after(self, delay_s: float, what: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.queue, (self.now_s + delay_s, next(self.order), what, args))

    def fault(self, times: float = 1.0) -> bool:
        return self.faults and self.random.random() < self.fault_rate * times

    def send(self, rank: Rank, fact: Callable[..., None], *args: Any) -> None:
        """A message to the agent: now and then lost (mostly with its connection), late, or twice."""
        if self.fault(0.5):
            if self.random.random() < 0.8 or fact == self.group.arenas.record_warm_arena:
                self.after(0.001, self.lose, rank)
            return
        self.after(self.delay_s(rank), self.arrive, rank, rank.connection, fact, *args)
        if self.fault():
            again_s = self.delay_s(rank) + self.random.uniform(0, 2)
            self.after(again_s, self.arrive, rank, rank.connection, fact, *args)

    def arrive(self, rank: Rank, connection: int, fact: Callable[..., None], *args: Any) -> None:
        if connection == rank.connection:  # else it went down with its connection
            self.tell(fact, *args)

    def delay_s(self, rank: Rank) -> float:
        """One connection keeps the order of its messages, however late they are."""
        late_s = self.random.uniform(0, 3) if self.fault() else self.random.uniform(0, 0.004)
        rank.heard_s = max(rank.heard_s, self.now_s + late_s)
        return rank.heard_s - self.now_s

    def way_s(self, rank: int, most_s: float) -> float:
        """From the agent to that rank. To one on another node it goes behind what its page is to say."""
        return max(self.random.uniform(0, most_s), self.told_s - self.now_s if rank % 2 else 0.0)

    def tell(self, fact: Callable[..., None], *args: Any) -> None:
        fact(*args)
        self.decide()

    def lose(self, rank: Rank) -> None:
        if rank.alive and not rank.left:
            rank.connection += 1
            rank.connected = False
            self.group.record_disconnect(rank.number, self.now_s)
            self.decide()
            self.after(self.random.uniform(0, 2), self.rejoin, rank)

    def rejoin(self, rank: Rank) -> None:
        if rank.alive and not rank.left:
            rank.connection += 1
            rank.connected = True
            rank.shows = True
            self.group.record_join(rank.number)
            self.layouts[rank.number] = rank.layout
            self.group.arenas.record_layout()
            self.decide()
            if rank.gave_up is not None:
                self.send(rank, self.group.save_requests.record_unsavable, rank.number, rank.gave_up, "its agent died")
            if rank.waits_for:
                rank.waits_for()

    # -- the agent's side

    def decide(self) -> None:
        shown = zip(*[r.shown for r in self.ranks], strict=True)
        since_s = [r.since_s if r.shows and not r.number % 2 else None for r in self.ranks]  # the others are elsewhere
        for action in self.group.decide(self.now_s, *shown, since_s):
            getattr(self, "do_" + type(action).__name__)(action)
        self.group.check()
        wake_s = self.group.next_wake_s(self.now_s)
        if wake_s is not None and (self.wake_s is None or wake_s < self.wake_s or self.wake_s <= self.now_s):
            self.wake_s = wake_s
            self.after(max(0.0, wake_s - self.now_s), self.wake, wake_s)

    def wake(self, at_s: float) -> None:
        if self.wake_s == at_s:
            self.wake_s = None
            self.decide()

    def contents(self, slot: int) -> tuple[Content, ...]:
        return tuple(self.content.get((slot, r)) for r in range(self.world))

    def granted(self, slot: int, number: int, version: Version) -> None:
        assert slot not in self.readers, "a slot was granted while it was read"
        assert len(self.group.slots.attempts()) <= self.group.arenas.slot_limit
        entry = self.group.slots[slot]
        assert entry.leases == 0
        assert entry.attempt in self.group.slots.attempts(SlotState.GRANTED)
        assert (entry.attempt.number, entry.attempt.version) == (number, version)
        if self.completed and self.slots > 1 and max(self.completed):
            assert self.group.slots.newest is not None, "the newest complete one was given away"
        self.not_safe(slot)

    def do_SetWord(self, action: do.SetWord) -> None:
        self.set_word(0, action)
        self.told_s = max(self.told_s, self.now_s + self.random.choice((0.0, 0.005, 0.05)))  # in order
        self.in_agent(self.told_s - self.now_s, self.set_word, 1, action)
        if action.control_word:
            self.granted(
                action.control_word.slot,
                action.control_word.attempt_number,
                Version(action.control_word.step, action.control_word.sub),
            )
            assert ControlWord.unpack(action.control_word.pack()) is not None
            self.polled += action.control_word.sub > 0

    def set_word(self, page: int, action: do.SetWord) -> None:
        self.words[page].pop(action.slot, None)
        if action.control_word is not None:
            self.words[page][action.slot] = action.control_word

    def do_Divide(self, action: do.Divide) -> None:
        self.in_agent(self.random.uniform(0, 0.5), self.divided, action.layouts_version, tuple(self.layouts))

    def divided(self, version: int, layouts: tuple[int, ...]) -> None:
        division = "d" + ".".join(map(str, layouts))
        if self.fault(3):
            self.place()
        slots = self.slots - (self.slots > 2 and self.fault(5))  # or others' processes have taken the last one's memory
        if self.group.arenas.record_division(version, division, tuple(10 * n for n in layouts), slots):
            for rank in self.ranks:
                self.in_agent(self.random.uniform(0, 0.01), self.got_plan, rank, division, layouts[rank.number])
        self.decide()

    def place(self) -> None:
        """There is room for copies, of all or of a part, or none any more."""
        if self.slots > 1:
            self.group.replicas.is_replication_on = not self.group.replicas.is_replication_on
            self.group.replicas.placement = Kept("", self.random.choice((0, 1, 1))), Kept("b", 1)
            self.group.arenas.limit_slots(self.random.randint(2, self.slots), "one could not be had")
            self.group.arenas.raise_slot_limit(self.random.randint(2, self.slots))
            self.decide()

    def got_plan(self, rank: Rank, division: str, layout: int) -> None:
        if not rank.alive:
            return
        rank.division, rank.division_layout = division, layout
        rank.warm.clear()

    def do_MakeArenas(self, action: do.MakeArenas) -> None:
        assert action.slot not in self.readers
        assert self.group.slots[action.slot].state is SlotState.FREE
        for r in range(self.world):
            self.content.pop((action.slot, r), None)
        self.in_agent(self.random.uniform(0, 1), self.made, action.slot, action.arena_bytes)

    def made(self, slot: int, arena_bytes: tuple[int, ...]) -> None:
        for rank in self.ranks:
            rank.arenas.add(slot)  # also where its connection is broken meanwhile
        self.group.arenas.record_arenas(slot, arena_bytes)
        self.decide()

    def do_OfferSlot(self, action: do.OfferSlot) -> None:
        assert action.slot not in self.readers
        assert self.group.slots[action.slot].state is SlotState.FREE, "offered although it holds something"
        for rank in self.ranks:
            self.in_agent(0.01 + self.way_s(rank.number, 0.01), self.warmed, rank, action.slot)

    def do_CloseArenas(self, action: do.CloseArenas) -> None:
        assert action.slot not in {slot.number for slot in self.group.arenas.used_slots}
        assert action.slot not in self.readers, "a slot was closed while it was read"
        assert self.group.slots[action.slot].state is SlotState.FREE, "closed although it holds something"
        self.shrunk += 1
        for rank in self.ranks:
            if rank.connected:
                rank.arenas.discard(action.slot)
            self.content.pop((action.slot, rank.number), None)
            self.in_agent(self.way_s(rank.number, 0.01), rank.warm.pop, action.slot, None)

    def warmed(self, rank: Rank, slot: int) -> None:
        if rank.alive and rank.division and rank.division_layout == rank.layout:
            rank.warm[slot] = rank.division
            if self.group.slots[slot].state is SlotState.FREE:
                self.content[slot, rank.number] = None  # warming an arena clears its header
            self.send(rank, self.group.arenas.record_warm_arena, rank.number, slot, rank.division)

    def do_Assemble(self, action: do.Assemble) -> None:
        held = self.contents(action.slot)
        assert held == ((action.attempt_number, str(action.version)),) * self.world, (
            f"a mixture was taken for complete: {held}"
        )
        self.read(action.slot, self.assembled, action.slot, action.attempt_number, action.version)

    def read(self, slot: int, then: Callable[..., None], *args: Any, takes_s: float | None = None) -> None:
        self.readers.setdefault(slot, []).append(self.contents(slot))
        delay_s = self.random.uniform(0, 0.3) if self.random.random() < 0.8 else self.random.uniform(0, 20)
        self.in_agent(delay_s if takes_s is None else takes_s, then, *args)

    def end_read(self, slot: int) -> None:
        assert self.readers[slot].pop() == self.contents(slot), "a slot was overwritten while it was read"
        if not self.readers[slot]:
            del self.readers[slot]

    def assembled(self, slot: int, number: int, version: Version) -> None:
        self.end_read(slot)
        error = "incomplete" if self.fault() else ""
        if not error:
            self.completed.append(version)
        self.group.save_attempts.record_assembly(slot, number, error)
        self.decide()

    def do_Commit(self, action: do.Commit) -> None:
        self.commits += 1
        assert self.commits == 1, "two commits at once"
        assert self.contents(action.slot) == (self.contents(action.slot)[0],) * self.world
        self.committing += 1
        takes_s = self.commit_s * self.random.uniform(0.8, 1.2) if self.commit_s is not None else None
        self.read(action.slot, self.committed, action.slot, self.committing, takes_s=takes_s)

    def do_CancelCommit(self, action: do.CancelCommit) -> None:
        """It ends soon; by then it may be in the store all the same."""
        assert self.commits == 1
        slot, newest, took = (
            self.group.slots.committing_slot,
            self.group.slots.newest,
            self.group.facts.save_estimate.save,
        )
        assert slot is not None
        older = self.group.slots[slot].attempt
        assert older is not None
        assert newest is not None
        assert took is not None
        last, left_s = newest, (self.group.preemption.deadline_s(self.now_s) or 0.0) - self.now_s
        assert last.version > older.version, "the last one itself was given up"
        assert (last.reason, last.verdict, self.verdict) == (SaveReason.HOLD, True, last.number), (
            "not all leave at the last one"
        )
        assert took.estimate_s(last.memory_bytes) <= left_s, "it was given up though the last one does not fit either"
        ends_s = (older.times.commit_began_s or 0.0) + took.estimate_s(older.memory_bytes)
        assert max(ends_s - self.now_s, 0.0) + took.estimate_s(last.memory_bytes) > left_s, "both would have fitted"
        assert older.version not in self.gave_way, "told twice"
        self.gave_way.add(older.version)
        if self.random.random() < 0.9:
            self.in_agent(self.random.uniform(0, 0.5), self.committed, slot, self.committing, True)

    def do_Replicate(self, action: do.Replicate) -> None:
        assert self.group.replicas.is_replication_on
        assert self.copying is not self.group, "two generations at once"
        is_again = self.safe is not None and self.safe[:2] == (self.group, action.version)
        assert not is_again or (self.group.replicas.is_placement_complete and not self.safe_whole), (
            "it is copied again for nothing"
        )
        self.copying, is_whole = self.group, self.group.replicas.is_placement_complete
        held = self.contents(action.slot)
        assert held == (held[0],) * self.world
        assert held[0] is not None
        assert held[0][1] == str(action.version)
        self.read(action.slot, self.replicated, action.slot, action.version, is_whole)

    def replicated(self, slot: int, version: Version, is_whole: bool) -> None:
        self.copying = None
        self.end_read(slot)
        error = "a node hangs" if self.fault(3) else ""
        if not error:
            assert self.safe is None or self.safe[1] <= version or self.safe[0] is not self.group, (
                "an older one took the place of a newer one"
            )
            self.safe, self.safe_whole = (self.group, version, slot), is_whole
            self.copied += 1
        self.group.replicas.record_replication(slot, error, self.now_s)
        self.decide()

    def lend(self) -> None:
        """Somebody reads the newest complete one for a while, as a start that restores from it does."""
        newest = self.group.slots.newest
        if newest is not None and newest.slot not in self.readers:
            self.group.slots.take_lease(newest.slot)
            self.read(newest.slot, self.give_back, newest.slot)

    def give_back(self, slot: int) -> None:
        self.end_read(slot)
        self.group.slots.release_lease(slot)
        self.decide()

    def committed(self, slot: int, number: int, broken_off: bool = False) -> None:
        if number != self.committing or not self.commits:
            return
        self.commits -= 1
        self.end_read(slot)
        down = "the store is down" if self.fault(3) else ""
        self.group.commits.record_commit(slot, "it was broken off" if broken_off else down, self.now_s)
        self.decide()

    def do_ClearSlot(self, action: do.ClearSlot) -> None:
        assert action.slot not in self.readers, "a slot was freed while it was read"
        self.not_safe(action.slot)

    def not_safe(self, slot: int) -> None:
        """Whether what a slot held may be given away: it is not the newest that others keep; with two slots it may be,
        once a newer one is in the store."""
        if self.safe is None or self.safe[0] is not self.group or self.safe[2] != slot:
            return
        committed = self.group.facts.committed_version
        assert self.group.arenas.slot_limit == 2 or not self.group.replicas.is_replication_on, (
            "the newest that others keep was given away"
        )
        assert committed is not None, "the newest that others keep was given away"
        assert committed > self.safe[1], "the newest that others keep was given away"
        assert self.told_unsafe == self.safe[1], "and nobody was told that it is not as safe any more"
        self.safe = None

    def do_DropReplicas(self, action: do.DropReplicas) -> None:
        assert not self.group.replicas.is_replication_on
        assert self.copying is not self.group, "what is on its way"
        safe, committed = self.safe, self.group.facts.committed_version
        assert committed is not None, "what attempts that failed have left may be all that there is"
        if safe is not None and safe[0] is self.group:
            assert committed > safe[1], "nobody has anything newer"
            self.safe = None
        self.unkept += 1

    def do_ReplicaDegraded(self, action: do.ReplicaDegraded) -> None:
        self.told_unsafe = action.version

    def do_AnswerRequest(self, action: do.AnswerRequest) -> None:
        self.answered[action.request] = action.body
        self.unanswered.pop(action.request, None)
        what, rank, number = action.request[:3]
        if what == "rank-holds":
            self.verdicts.setdefault(number, set()).add(action.body["leave"])
        self.after(self.way_s(rank, 0.01), self.answer, action.request, self.ranks[rank], action.body)

    def do_Refuse(self, action: do.Refuse) -> None:
        self.answered[action.request] = action.kind
        self.unanswered.pop(action.request, None)
        rank = action.request[1]
        self.after(self.way_s(rank, 0.0), self.answer, action.request, self.ranks[rank], None)

    def do_ReportProgress(self, action: do.ReportProgress) -> None:
        pass  # who waits for a slot here waits as long as it takes

    def do_NotifyRanks(self, action: do.NotifyRanks) -> None:
        assert action.body["t"] in (
            "checkpoint-level",
            "superseded",
            "end-process",
            "leave-deadline",
            "known-versions",
            "hold-awaited",
        )
        if action.body["t"] == "checkpoint-level":
            told = action.body
            self.levels.record(Version.parse(told["version"]), told["level"], told["ok"], told["message"])
        if action.body["t"] == "hold-awaited" and not self.fault(0.2):
            for rank in self.ranks:
                late_s = max(self.delay_s(rank), self.way_s(rank.number, 0.0))
                self.after(late_s, self.awaited, rank, rank.connection, action.body["word"])
        if action.body["t"] == "end-process":
            for rank in self.ranks:
                self.after(self.way_s(rank.number, 0.01), self.told_to_end, rank, rank.connection, action.body)
        if action.body["t"] == "superseded":  # they leave where they are, if the agent does not let them go before
            for rank in self.ranks:
                self.after(self.random.uniform(1, 10), self.kill, rank)

    def do_SetVerdict(self, action: do.SetVerdict) -> None:
        assert self.verdict == 0, "two verdicts"
        self.verdict = action.attempt_number

    def do_WriteOutcome(self, action: do.WriteOutcome) -> None:
        self.outcomes.append(action.body)

    def do_RecordExit(self, action: do.RecordExit) -> None:
        assert self.verdict, "the ranks were not told to leave"

    def do_Emit(self, action: do.Emit) -> None:
        assert action.name

    def do_Close(self, action: do.Close) -> None:
        assert not self.closed, "closed twice"
        self.closed = True
        self.in_agent(self.random.uniform(0, 1), self.tell, self.group.leave_requests.record_close)

    # -- the trainers' side

    def start(self) -> None:
        for rank in self.ranks:
            self.after(self.random.uniform(0, 1), self.join, rank)
        self.after(1.5, self.begin)

    def join(self, rank: Rank) -> None:
        self.group.record_join(rank.number)
        self.group.arenas.record_layout()
        self.decide()

    def begin(self) -> None:
        self.group.appointments.record_start(0, self.now_s)
        self.decide()
        for rank in self.ranks:
            self.enter(rank, 1)
        if self.faults and self.random.random() < 0.15:
            self.after(self.random.uniform(0, 5), self.preempt)
        for _ in range(self.random.choice((0, 0, 3))):
            self.after(self.random.uniform(0, 10), self.lend)
        for _ in range(self.random.choice((0, 0, 6))):
            self.after(self.random.uniform(0, 10), self.place)
        if self.faults and self.random.random() < 0.1 and self.fault_rate:
            self.after(self.random.uniform(0, 10), self.kill, self.random.choice(self.ranks))
        if self.faults and self.random.random() < 0.05:
            self.after(self.random.uniform(0, 10), self.tell, self.group.supersede, "00000002-x")

    def preempt(self) -> None:
        self.preempted = True
        deadline_s = self.now_s + self.random.choice((0.5, 20.0))
        self.group.preemption.add_notice(
            StandingNotice("operator", "1", deadline_s, self.now_s, exit_timing=ExitTiming.AT_ONCE)
        )
        self.decide()

    def told_to_end(self, rank: Rank, connection: int, body: dict[str, Any]) -> None:
        """The rank's process ends where it is; only one that is at its end anyway goes on waiting there."""
        if connection == rank.connection:
            self.die(rank)

    def awaited(self, rank: Rank, connection: int, packed: int) -> None:
        word = ControlWord.unpack(packed)
        assert word is not None
        past = word.place_for(rank.ended, rank.sub) is not RankPlace.EARLY
        if connection == rank.connection and rank.alive and past and word.attempt_number not in rank.seen:
            self.send(rank, self.group.save_attempts.record_miss, rank.number, word.attempt_number, "late")

    def die(self, rank: Rank) -> None:
        rank.alive = False
        for key in [k for k in self.unanswered if k[1] == rank.number]:
            del self.unanswered[key]
        self.in_agent(self.random.uniform(0, 0.01), self.seen_dead, rank.number)

    def seen_dead(self, rank: int) -> None:
        self.tell(self.group.record_death, rank)

    def kill(self, rank: Rank) -> None:
        if rank.alive and not rank.left:
            self.die(rank)
            for other in self.ranks:  # the launcher sees it and ends the rest
                if other is not rank and not self.hung:
                    self.after(self.random.uniform(1, 30), self.kill, other)
            self.hung = True

    def enter(self, rank: Rank, step: int) -> None:
        if not rank.alive:
            return
        rank.step, rank.sub, rank.saved, rank.shows = step, 0, False, True
        rank.since_s = self.now_s
        if step - 1 in self.evaluations:
            self.after(self.step_s * self.random.uniform(0.1, 0.5), self.poll, rank, self.evaluations[step - 1])
        else:
            self.after(self.step_s * self.random.uniform(0.5, 2.0), self.end, rank)

    def poll(self, rank: Rank, left: int) -> None:
        """One batch of an evaluation between two steps."""
        if not rank.alive:
            return
        if rank.filling:  # a poll waits for copies
            self.after(self.step_s / 4, self.poll, rank, left)
            return
        rank.sub += 1
        next_s = self.step_s * self.random.uniform(0.1, 0.5)
        if left > 1:
            rank.then = lambda: self.after(next_s, self.poll, rank, left - 1)
        else:
            rank.then = lambda: self.after(next_s, self.end, rank)
        if not self.serve(rank, rank.step - 1):
            rank.then()

    def end(self, rank: Rank) -> None:
        """A step ends where all ranks are in it, or have ended it: training is a chain of collectives, and who waits at
        a boundary is in none."""
        if not rank.alive:
            return
        inside = all(r.alive and (r.ended >= rank.step or (r.step == rank.step and not r.blocked)) for r in self.ranks)
        if not inside or (self.hung and self.world > 1):
            self.after(0.5 if self.hung else self.step_s, self.end, rank)
            return
        rank.ended = rank.step
        if rank.filling:
            self.after(self.step_s / 4, self.end, rank)
            return
        if self.fault(0.3):
            rank.layout += 1
            self.send(rank, self.new_layout, rank.number, rank.layout)
            self.after(8.0, self.new_layout, rank.number, rank.layout)
        self.boundary(rank)

    def new_layout(self, rank: int, layout: int) -> None:
        if layout > self.layouts[rank]:
            self.layouts[rank] = layout
            self.group.arenas.record_layout()
            self.decide()

    def boundary(self, rank: Rank) -> None:
        rank.sub, rank.step, rank.shows = 0, rank.ended + 1, True  # published before the word is read
        rank.since_s = self.now_s
        rank.then = lambda: self.proceed(rank)
        if not self.serve(rank, rank.ended):
            rank.then()

    def serve(self, rank: Rank, ended: int) -> bool:
        """Answers the appointments; whether it holds."""
        held = [self.keep(rank, ended, word) for word in list(self.words[rank.number % 2].values())]
        return any(held)

    def keep(self, rank: Rank, ended: int, told: ControlWord) -> bool:
        word = ControlWord.unpack(told.pack())
        assert word is not None
        if word.attempt_number in rank.seen or word.place_for(ended, rank.sub) is RankPlace.EARLY:
            return False
        rank.seen.add(word.attempt_number)
        if word.place_for(ended, rank.sub) is RankPlace.LATE:
            self.send(rank, self.group.save_attempts.record_miss, rank.number, word.attempt_number, "late")
        elif rank.sub and ended in self.amid:
            self.send(rank, self.group.save_attempts.record_miss, rank.number, word.attempt_number, MID_STEP)
        elif rank.layout != rank.division_layout or rank.warm.get(word.slot) != rank.division or self.fault(0.3):
            self.send(rank, self.group.save_attempts.record_miss, rank.number, word.attempt_number, "layout")
        else:
            self.fill(rank, word.attempt_number, word.slot, Version(ended, rank.sub), rank.division)
            if word.kind is WordKind.HOLD:
                self.ask(rank, "rank-holds", word.attempt_number)
                return True
        return False

    def proceed(self, rank: Rank) -> None:
        if rank.ended in self.due_steps and not rank.sub and rank.asked_at != rank.ended:
            rank.asked_at = rank.ended
            self.ask(rank, "save", SaveReason.DUE)
        elif rank.ended in self.save_steps and not rank.saved:
            rank.saved = True
            rank.sub += 2 if self.fault(0.3) else 1
            self.ask(rank, "save", SaveReason.SAVE)
        elif rank.ended >= self.last_step and not self.faults:
            rank.sub += 1
            self.ask(rank, "save", SaveReason.EXIT)
        else:
            self.enter(rank, rank.ended + 1)

    def fill(self, rank: Rank, number: int, slot: int, version: Version, division: str) -> None:
        self.content[slot, rank.number] = None
        assert slot not in self.readers, "a rank fills what is read"
        rank.filling += 1
        self.after(self.random.uniform(0, self.step_s), self.filled, rank, number, slot, version, division)

    def filled(self, rank: Rank, number: int, slot: int, version: Version, division: str) -> None:
        rank.filling -= 1
        if not rank.alive:
            return
        self.content[slot, rank.number] = (number, str(version))
        self.send(rank, self.group.save_attempts.record_staging, rank.number, number, version, slot, division, 0.01)

    def ask(self, rank: Rank, what: str, arg: Any = None) -> None:
        """A request: the client sends it again when its connection is back, so it is not lost for good."""
        rank.blocked = True
        if not rank.alive:
            return
        if rank.filling:  # a save, a hold and the exit wait for the copy under way
            self.after(self.step_s / 4, self.ask, rank, what, arg)
            return
        name = arg if what == "rank-holds" else str(Version(rank.ended, rank.sub)) if what == "save" else 0

        def again() -> None:
            for old in [k for k in self.unanswered if k[1] == rank.number]:
                del self.unanswered[old]  # its connection is gone
            request = (what, rank.number, name, rank.connection, next(self.order))
            self.unanswered[request] = what
            self.after(self.delay_s(rank), self.deliver, rank, request, what, arg)

        rank.waits_for, rank.asks = again, what
        again()

    def deliver(self, rank: Rank, request: Any, what: str, arg: Any) -> None:
        if not rank.alive or request[3] != rank.connection:
            return
        if what == "rank-holds":
            self.group.exit_vote.record_hold(rank.number, arg, request)
        elif what == "leave":
            self.group.rank_states.record_leave_request(rank.number, request)
        else:
            self.group.save_requests.record_save_request(rank.number, Version(rank.ended, rank.sub), arg, request)
        self.decide()

    def answer(self, request: Any, rank: Rank, body: Any) -> None:
        what = request[0]
        if not rank.alive or not rank.blocked or rank.left or request[3] != rank.connection:
            return
        if what == "leave":
            rank.left, rank.blocked, rank.waits_for = True, False, None
            return
        rank.blocked, rank.waits_for = False, None
        if what == "rank-holds":
            self.leave(rank) if body["leave"] else rank.then()
            return
        at_end = rank.ended >= self.last_step and not self.faults
        if body is None and not at_end:
            rank.gave_up = Version(rank.ended, rank.sub)
            self.send(rank, self.group.save_requests.record_unsavable, rank.number, rank.gave_up, "it was refused")
        if body and not body["saved"]:
            assert rank.layout == rank.division_layout or self.faults
            version = Version(rank.ended, rank.sub)
            self.granted_rank(rank, body, version)
        self.leave(rank) if at_end else self.proceed(rank)

    def granted_rank(self, rank: Rank, body: dict[str, Any], version: Version) -> None:
        if rank.warm.get(body["slot"]) == body["division"] == rank.division:
            self.fill(rank, body["attempt"], body["slot"], version, rank.division)
        else:
            self.send(rank, self.group.save_attempts.record_miss, rank.number, body["attempt"], "layout")

    def leave(self, rank: Rank) -> None:
        self.ask(rank, "leave")

    # -- the whole

    def run_until(self, end_s: float, done: Callable[[], bool] = lambda: False) -> None:
        while self.queue and self.queue[0][0] <= end_s and not done():
            self.now_s, _, what, args = heapq.heappop(self.queue)
            what(*args)

    def waits(self, version: Version) -> bool:
        """Whether it is still to be said what became of its copies."""
        try:
            self.levels.wait(version, "peer", 0.0)
        except SaveFailed as exc:
            return "within" in str(exc)
        return False

    def check_arenas(self) -> None:
        """No node has memory in a slot that is not in use and holds nothing."""
        arenas = self.group.arenas
        if self.group.facts.any_gone or self.group.facts.superseded_by or not arenas.has_division:
            return
        for slot in arenas.slots_by_use[arenas.slot_limit :]:
            is_kept = slot.attempt is not None or slot.leases or slot.is_making_arenas
            left = [rank.number for rank in self.ranks if slot.number in rank.arenas]
            assert is_kept or not left, f"ranks {left} have arenas of slot {slot.number}, which is not in use"

    def gone(self) -> bool:
        return all(not r.alive or r.left for r in self.ranks)


def run(seed: int) -> Sim:
    sim = Sim(seed)
    sim.start()
    sim.run_until(2.0 + sim.random.choice((3.0, 30.0)))
    sim.faults = False
    for rank in sim.ranks:  # what was lost silently is found at the next connection
        sim.after(0.0, sim.rejoin, rank)
    sim.last_step = 1 << 30
    sim.run_until(sim.now_s + 3.0)  # the last late message has landed
    sim.decide()  # an agent decides again after each action, and what was just freed is closed then
    sim.check_arenas()
    before = len(sim.completed)
    sim.last_step = max(r.step for r in sim.ranks) + 15
    sim.run_until(sim.now_s + 10 * CALM_S, sim.gone)
    sim.run_until(sim.now_s + 60.0)
    assert sim.gone(), f"somebody hangs: {[(r.number, r.step, r.blocked) for r in sim.ranks]}, {sim.unanswered}"
    assert not sim.unanswered, sim.unanswered
    if not sim.closed:  # the last commit failed with nobody there: as an orphan the agent tries again
        sim.group.commits.retry()
        sim.decide()
        sim.run_until(sim.now_s + 60.0)
    assert sim.closed, "the epoch was not closed"
    assert not sim.readers
    if not sim.hung and not sim.group.facts.superseded_by and not sim.preempted:
        assert len(sim.completed) > before, "nothing became complete after the faults were over"
        assert sim.group.facts.committed_version == max(sim.completed), "the last one did not reach the store"
        endless = [version for version in sim.completed if sim.waits(version)]
        assert not endless, f"nothing ends the wait for copies of {endless}"
    for number, verdicts in sim.verdicts.items():
        assert len(verdicts) == 1 or sim.hung or sim.group.facts.superseded_by, (
            f"round {number}: some leave, some go on"
        )
    return sim


@pytest.mark.timeout(300 * max(1, SCHEDULES // 4000))
@pytest.mark.parametrize("part", range(4))
def test_no_schedule_mixes_loses_or_hangs(part: int, seed: int) -> None:
    first = seed
    totals = {"completed": 0, "hung": 0, "held": 0, "polled": 0, "copied": 0, "unkept": 0, "shrunk": 0}
    for seed in range(first, first + SCHEDULES // 4):
        try:
            sim = run(seed)
        except AssertionError as exc:
            raise AssertionError(f"seed {seed}: {exc}") from exc
        totals["completed"] += len(sim.completed)
        totals["hung"] += sim.hung
        totals["copied"] += sim.copied
        totals["unkept"] += sim.unkept
        totals["shrunk"] += sim.shrunk
        totals["held"] += bool(sim.verdicts)
        totals["polled"] += any(version.sub for version in sim.completed) and sim.polled
    assert totals["completed"] > SCHEDULES // 4, totals
    if SCHEDULES >= 4000:  # the schedules have to reach what they are there for
        assert totals["hung"]
        assert totals["held"]
        assert totals["copied"] > SCHEDULES // 8
        assert totals["unkept"]
        assert totals["shrunk"]
        assert totals["polled"]
