"""What one job on this node is known to be doing: its ranks, its slots, the rounds in them, and who waits for what.

Facts come in as method calls. They may be repeated, late, or about what is long gone; they only record. What follows
from them is decided in one place, `group.Group.decide`.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ckpt.agent.state.actions import Action, Emit, Refuse, Request, Tell
from ckpt.agent.state.rank_presence import AGAIN, Presence, RankStates
from ckpt.agent.state.step_timing import StepTiming
from ckpt.ipc.control_page import AMID, SLOTS_MAX, WAITING
from ckpt.placement.placement import Kept
from ckpt.policy.adaptive import span
from ckpt.policy.save_options import Every
from ckpt.types import Tick

LATENCY_S = 0.01  # of one announcement, doubled at each late rank up to LATENCY_S_MAX
LATENCY_S_MAX = 2.5
RETRY_S_MAX = 60.0
SLACK_PARTS = 16  # an arena that is too large by one part in so many is not made anew
LOST_S = 5.0  # how long what nobody answers is waited for, once the ranks are seen to be past it
TOLD_MAX = 64  # words on levels that are said again to a rank that was away: far more than slots hold ticks
REJOIN_S = 60.0  # how long a rank whose connection broke may take to come back: a new agent starts, and connects


class Why(enum.Enum):
    STEP = "appointed"
    DUE = "due"  # the policy names that step, and all ranks ask for it
    HOLD = "hold"
    SAVE = "save"
    EXIT = "exit"


class State(enum.Enum):
    FREE = "free"
    GRANTED = "granted"  # announced or answered; ranks may be filling it
    STAGED = "staged"
    COMPLETE = "complete"


class Store(enum.Enum):
    """What became of a complete round at a level beyond this node's memory."""

    NEW = "new"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class Round:
    number: int
    slot: int
    why: Why
    tick: Tick
    division: str
    opened_s: float
    bytes: int = 0  # of memory that it may take, all ranks' together
    staged: dict[int, float] = field(default_factory=dict)  # rank -> stall in seconds
    announced: bool = False  # a word of the control page says so
    missed: str = ""  # why it is to be abandoned
    held: dict[int, Request] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    store: Store = Store.NEW
    peer: Store = Store.NEW  # what became of it in other nodes' memory, where there are such
    last_try: bool = False
    gave_way: str = ""  # its commit was given up, and why
    verdict: bool | None = None  # of a hold: leave, or go on
    all_staged_s: float | None = None  # when
    hashed_s: float | None = None  # how long that took
    commit_began_s: float | None = None
    copy_began_s: float | None = None
    kept: tuple[Kept, ...] = ()  # who is to keep copies of it, since these were begun last

    @property
    def explicit(self) -> bool:
        return self.why is not Why.STEP

    @property
    def unjudged(self) -> bool:
        return self.why is Why.HOLD and self.verdict is None


@dataclass(slots=True)
class Slot:
    number: int
    state: State = State.FREE
    round: Round | None = None
    leases: int = 0
    bytes: tuple[int, ...] = ()
    making: bool = False
    handed: bool = False  # some rank, or its agent, may have an arena of it
    offered: bool = False  # to all ranks, since the last division
    warm: dict[int, str] = field(default_factory=dict)  # rank -> division


@dataclass(frozen=True, slots=True)
class Save:
    tick: Tick
    why: Why
    metrics: dict[str, float]
    request: Request
    same: Tick | None = None  # the state of that rank is, byte for byte, what it has staged for that tick


@dataclass(frozen=True, slots=True)
class Settled:
    """The newest save that was answered; `kind`, `message`: what to tell who asks for it again and finds it gone."""

    tick: Tick
    kind: str
    message: str


class JobFacts:
    """One job. `policy`: when to appoint. `first_round`: random, so that a restarted agent repeats no number soon."""

    def __init__(self, world: int, policy: Every, first_round: int = 1) -> None:
        self.world = world
        self.policy = policy
        self.members = RankStates(world)
        self.pace = StepTiming()
        self.slots = [Slot(n) for n in range(SLOTS_MAX)]
        self.slots_in_use = 0  # how many of them memory allows; 0 until the first division
        self.division = ""
        self.superseded_by = ""
        self.committing: int | None = None  # the slot
        self.frozen = False  # a start asks what lies here: nothing of it goes, or is written over, until its outcome
        self.closed_in_store = False
        self.refusal = ""  # why nothing can be saved at all
        self.last_error = ""  # of the newest failed commit or last save
        self.committed_tick: Tick | None = None
        self._next_round = first_round
        self._need: tuple[int, ...] = ()  # arena bytes per rank under the current division
        self._layouts_version = 0
        self._planned_version = 0
        self._dividing = False
        self._saves: dict[int, Save] = {}
        self._unsavable: dict[int, tuple[Tick, str]] = {}  # by rank: the newest tick that it does not ask for, and why
        self._asked_s: float | None = None  # since when all ranks wait in a save
        self._said_s = -math.inf  # when ranks that wait for a slot were last told that it comes
        self._awaited_s: float | None = None  # since when some wait there for others; inf: that was told
        self._settled: Settled | None = None  # saves up to that tick have their outcome
        self._start_step: int | None = None  # None: not restored yet, nothing is appointed
        self._resumed = False  # the ranks are somewhere in the middle: nothing is appointed before each said where
        self._due_s = math.inf
        self._commit_every_s = 0.0  # appointed rounds are committed this far apart; 0: each whose turn comes
        self._has_said_first = False  # where the policy finds its interval: when the next one is due
        self._committed_from_s = -math.inf  # when the newest round that was to be committed was appointed
        self._retries = 0
        self._latency_s = LATENCY_S
        self._steps_from: tuple[float, int] = (0.0, 0)  # what follows is counted from there on
        self._steps_per_s = 0.0
        self._retry_commit_s = math.inf
        self._commit_failures = 0
        self._leave_round = 0  # the round whose verdict was: leave
        self._all_leave = False  # all ranks held then; else those that did not may be stuck, and are to be ended
        self._leave_by_s: float | None = None  # the earliest deadline then, or since
        self._ended = False  # the ranks were told to end where they are
        self._end_why = ""
        self._end_waits = False
        self._given_up = False
        self._left_over = False  # superseded, and what it has made complete is to be committed once
        self.former_saves = False  # a former job commits what this one went on from: who leaves waits for that
        self._abandoned: deque[int] = deque(maxlen=64)
        self._closing = False
        self.recovering = False  # what the trainers bring from a former agent is not looked at yet
        self._told: dict[tuple[Tick, str], dict[str, Any]] = {}  # the newest word on each tick and level, newest last
        self._out: list[Action] = []

    # -- facts

    def joined(self, rank: int) -> None:
        """A trainer is there, for the first time or again. What it may have said on a lost connection is missed."""
        member = self.members[rank]
        if member.away and self.may_join(rank):
            member.presence, member.away = Presence.HERE, False
        if member.presence is not Presence.HERE:
            member.lost_s, member.leave = None, AGAIN  # what it asked on the lost connection cannot be answered
            self.retry_commit()  # of what began without that
            return
        self.lost(rank, None)
        for slot in self.slots:
            slot.offered = False
            slot.handed |= member.joined  # what went meanwhile, or was asked for, may be there
        member.joined = True
        member.lost_s = None

    def may_join(self, rank: int) -> bool:
        """Whether it is still one of the job. One that was away for long is, as long as the epoch is not being closed:
        nothing else takes its place before."""
        member = self.members[rank]
        waits = member.presence is Presence.LEFT and member.leave is not None  # its node's agent was started again
        returns = member.away and not self._closing
        return waits or ((member.presence is Presence.HERE or returns) and not self.closed_in_store)

    def lost(self, rank: int, now_s: float | None) -> None:
        """Its connection ended, its process did not: it may come back and join again."""
        member = self.members[rank]
        member.lost_s = now_s
        self._saves.pop(rank, None)
        if self.refusal:  # maybe since its node could not be asked any more: that is seen anew once it is back
            self.layout(rank)
        for _, round_ in self._open():
            if rank not in round_.staged:
                round_.missed = round_.missed or f"the connection of rank {rank} was lost"
        for slot in self.slots:
            if slot.round is not None:
                slot.round.held.pop(rank, None)

    def died(self, rank: int) -> None:
        member = self.members[rank]
        member.leave = None
        self._saves.pop(rank, None)
        if member.presence is Presence.HERE or member.away:
            member.presence, member.away = Presence.DEAD, False

    def layout(self, rank: int) -> None:
        """A rank holds another state, or needs larger arenas: a new division is due, and saves wait for it."""
        self._layouts_version += 1
        self.refusal = ""

    def planned(self, version: int, division: str, arena_bytes: tuple[int, ...], slots: int) -> bool:
        """The division of those layouts. `slots`: how many fit into memory. Returns whether it still holds: then each
        rank is to be sent its share; else another one is made."""
        self._dividing = False
        if version != self._layouts_version:
            return False
        self._planned_version = version
        self.division = division
        for slot in self.slots:
            slot.offered = False
            slot.warm.clear()
        self._need = arena_bytes
        self.slots_in_use = slots
        self.refusal = "" if slots else "not one arena fits into memory: free some, save less, or raise Limits(memory=)"
        return True

    def unplannable(self, version: int, message: str) -> None:
        self._dividing = False
        if version != self._layouts_version:
            return
        self._planned_version = version
        self.division = ""
        self.refusal = message

    def made(self, slot: int, arena_bytes: tuple[int, ...]) -> None:
        """The arenas are there; () where that failed: then `fewer_slots` was called before."""
        self.slots[slot].making = False
        self.slots[slot].offered = False
        self.slots[slot].bytes = arena_bytes
        self.slots[slot].handed |= bool(arena_bytes)

    def lacks(self, slot: int) -> None:
        """The arenas of a node are gone: they are made anew, once nothing that is needed lies in the others."""
        entry = self.slots[slot]
        entry.offered = False
        if entry.state is State.FREE and not entry.leases:
            entry.bytes = ()

    def fewer_slots(self, slots: int, message: str) -> None:
        self.slots_in_use = min(self.slots_in_use, slots)
        if not self.slots_in_use:
            self.refusal = message

    def use_slots(self, slots: int) -> None:
        """There is other memory than when they were planned. It is no answer to what could not be planned at all."""
        if slots and self.is_planned:
            self.slots_in_use, self.refusal = slots, ""

    def warm(self, rank: int, slot: int, division: str) -> None:
        """Rank has mapped and bound its arena of this slot for this division."""
        if 0 <= slot < len(self.slots) and not self.slots[slot].making and division == self.division:
            self.slots[slot].warm[rank] = division

    def started(self, step: int, now_s: float) -> None:
        """The restore is over; training goes on after `step`. From here on snapshots are appointed."""
        if self._start_step is None:
            self._start_step = step
            self._steps_from = (now_s, step)
            # Where the policy finds its interval itself the first one is taken at once: it measures what one costs.
            self._due_s = now_s if self._commit_every_s else now_s + self._interval_s

    def follow(self, policy: Every, now_s: float) -> None:
        """Appoint by this policy from now on."""
        self.policy = policy
        if self._start_step is not None:
            self._due_s = now_s + self._interval_s

    def paced(self, local_s: float, store_s: float, now_s: float) -> None:
        """From now on: an appointment every local_s, and of these a commit about every store_s."""
        self.policy = Every(seconds=local_s)
        self._commit_every_s = store_s
        if self._start_step is not None and not self._retries:
            self._due_s = min(self._due_s, now_s + local_s)

    def wanted(self, tick: Tick, why: Why = Why.SAVE) -> None:
        """Somebody waits until that snapshot is in the store: it does not skip the level. `why`: EXIT at the end."""
        for slot in self.slots:
            if slot.round is not None and slot.round.tick == tick and slot.round.why in (Why.STEP, Why.SAVE, Why.DUE):
                slot.round.why = why

    def resumed(self, now_s: float) -> None:
        """The agent was started again beside trainers that are at work."""
        self._resumed = True
        self.started(0, now_s)

    def holds(self, slot: int, tick: Tick, committed: bool) -> None:
        """After a restart of the agent: this slot is known to hold that complete round."""
        found = Round(0, slot, Why.STEP, tick, self.division, 0.0)
        found.store = Store.DONE if committed else Store.NEW
        self.slots[slot].state = State.COMPLETE
        self.slots[slot].round = found
        self._tell_level(tick, "local", True, "")
        if committed:
            self.committed_tick = max(tick, self.committed_tick or tick)
            self._tell_level(tick, "store", True, "")

    def recovered(self) -> None:
        """After a restart of the agent: `holds` was called for all that there is."""
        self.recovering = False
        ticks = [str(s.round.tick) for s in self.slots if s.state is State.COMPLETE and s.round is not None]
        self._out.append(Tell({"t": "recovered", "ticks": ticks}))

    def again(self) -> list[dict[str, Any]]:
        """What is said to a rank that was away, and may not have heard what became of its snapshots meanwhile."""
        if self.recovering:
            return []  # `recovered` says it to all
        ticks = {s.round.tick for s in self.slots if s.round is not None and not s.round.missed}
        ticks |= {tick for tick, _ in self._told}
        known = {"t": "recovered", "ticks": sorted(map(str, ticks))}
        return [known, *({**body, "again": True} for body in self._told.values())]

    def staged(self, rank: int, number: int, tick: Tick, slot: int, division: str, stall_s: float) -> None:
        round_ = self._open_round_of(number)
        if round_ is None:
            if number in self._abandoned:  # it was withdrawn while this rank took it: nobody else knows
                self._tell_level(tick, "local", False, "it was given up meanwhile")
            return
        if (round_.tick, round_.slot, round_.division) != (tick, slot, division):
            round_.missed = round_.missed or f"rank {rank} staged {tick} in slot {slot} under another plan"
        round_.staged.setdefault(rank, stall_s)

    def missed(self, rank: int, number: int, why: str, updates: tuple[int, int] = (0, 0)) -> None:
        """`updates`: a step with one, and how many steps there are from one to the next; 0: unknown."""
        round_ = self._open_round_of(number)
        if round_ is None:
            return
        if why == "late":
            self._latency_s = min(2 * self._latency_s, LATENCY_S_MAX)
        elif why == WAITING:
            self.pace.updates = updates
        elif why == AMID:
            self.pace.amid_step = round_.tick.step + 1
        if why in ("late", AMID) and round_.tick.sub:
            self.pace.missed_poll(round_.tick.step + 1)
        round_.missed = round_.missed or f"rank {rank} missed it ({why})"

    def save(
        self,
        rank: int,
        tick: Tick,
        why: Why,
        metrics: dict[str, float],
        request: Request,
        same: Tick | None = None,
    ) -> None:
        former = self._saves.get(rank)
        if former is not None and former.request != request:  # the rank waits for it no longer, and has gone on
            self._out.append(Refuse(former.request, "not-staged", f"the rank asks for {tick} now"))
        self._saves[rank] = Save(tick, why, metrics, request, same)

    def unsavable(self, rank: int, tick: Tick, why: str) -> None:
        """That rank does not ask for a snapshot at that tick, as the others do, or has given it up."""
        self._unsavable[rank] = tick, why
        for _, round_ in self._open():
            if round_.tick == tick and rank not in round_.staged:
                round_.missed = round_.missed or f"rank {rank} missed it ({why})"

    def leave(self, rank: int, request: Request, in_order: bool = True, insists: bool = False) -> None:
        """`in_order`: it came to its end, or was told to leave; else an exception made it. The first word counts.
        `insists`: where its connection breaks it comes back to hear the answer."""
        member = self.members[rank]
        member.leave, member.insists = request, insists
        if member.presence is Presence.HERE:
            member.presence, member.broke = Presence.LEFT, not in_order

    def assembled(self, slot: int, number: int, error: str) -> None:
        """`error`: "" when it is complete."""
        entry = self.slots[slot]
        round_ = entry.round
        if entry.state is not State.STAGED or round_ is None or round_.number != number:
            return
        if error:
            entry.state = State.GRANTED
            round_.missed = error
            return
        entry.state = State.COMPLETE
        self._latency_s = max(self._latency_s / 2, LATENCY_S)
        self._retries = 0
        self.pace.completed()
        self._tell_level(round_.tick, "local", True, "")
        if self._commit_every_s and not self._has_said_first:
            self._has_said_first = True
            step, next_s = round_.tick.step, self._interval_s
            text = f"ckpt: step {step} is the first checkpoint; the next one is due {span(next_s)} later"
            self._out.append(Emit("policy.first", text, False, {"step": step, "next_s": next_s}))

    def committed(self, slot: int, error: str, now_s: float, passes: bool = False) -> None:
        """The commit that `Commit` asked for has ended. `error`: "" when the record is in the store. `passes`: the
        store may take it later. Ranks that wait for it at their end are then not told of the failure: it is tried
        again, and how long they wait is up to them."""
        entry = self.slots[slot]
        self.committing = None
        entry.leases -= 1
        gave_way = entry.round.gave_way if entry.round is not None and error else ""
        if not gave_way:  # else the store has not failed
            self._commit_failures = min(self._commit_failures + 1, 16) if error else 0
            self._retry_commit_s = now_s + min(2.0**self._commit_failures, RETRY_S_MAX) if error else math.inf
        if entry.round is not None:
            entry.round.store = Store.FAILED if error else Store.DONE
            is_tried_again = error and passes and entry.round.why is Why.EXIT and not self._broken()
            if not is_tried_again:
                self._tell_level(entry.round.tick, "store", not error, gave_way or error)
            if not error:  # an older one may have had to wait
                self.committed_tick = max(entry.round.tick, self.committed_tick or entry.round.tick)
        if error or self.newest_store is not Store.FAILED:  # else that one's is what counts
            self.last_error = gave_way or error

    def lease(self, slot: int) -> None:
        self.slots[slot].leases += 1

    def release(self, slot: int) -> None:
        self.slots[slot].leases -= 1

    def supersede(self, by: str) -> None:
        """A newer start owns the run: nothing is decided here any more."""
        if not self.superseded_by:
            self.superseded_by = by
            self._out.append(Tell({"t": "superseded", "by": by}))

    def retry_commit(self) -> None:
        """All trainers are gone, and the last commit failed or may yet: try once more. So where it is superseded, and
        the start that did it came to nothing: what is newest here is still the run's newest."""
        self._left_over = bool(self.superseded_by)
        if self.newest and self.newest.round:
            self.newest.round.last_try = False

    def give_up(self) -> None:
        """What is not committed by now never will be."""
        self._given_up = True

    def closed(self) -> None:
        self.closed_in_store = True

    # -- what others ask

    @property
    def store_fails(self) -> bool:
        """Whether the last commit has."""
        return self._commit_failures > 0

    @property
    def slots_had(self) -> int:
        """How many of those in use have arenas that will do, or hold something."""
        return sum(slot.state is not State.FREE or self._fits(slot) for slot in self._in_use)

    def needs(self, slot: int, arena_bytes: tuple[int, ...]) -> bool:
        """Whether that slot is in use, and its arenas are to be as large as that."""
        return self.slots[slot] in self._in_use and arena_bytes == self._need

    @property
    def newest(self) -> Slot | None:
        """The slot of the newest complete round."""
        complete = [(s.round.tick, s.number) for s in self.slots if s.state is State.COMPLETE and s.round is not None]
        return self.slots[max(complete)[1]] if complete else None

    @property
    def leaves_uncommitted(self) -> bool:
        """Whether it is superseded, and its newest complete round may have to be committed all the same."""
        return bool(self.superseded_by) and not self._given_up and self.newest_store not in (None, Store.DONE)

    @property
    def newest_store(self) -> Store | None:
        """What became of the newest complete round in the store; None: there is none."""
        return self.newest.round.store if self.newest is not None and self.newest.round is not None else None

    @property
    def layouts_version(self) -> int:
        return self._layouts_version

    @property
    def all_gone(self) -> bool:
        """Whether every trainer that ever came has left or died."""
        return self.members.seen.all_gone

    @property
    def is_lost_cause(self) -> bool:
        """Whether training cannot go on as it is: a rank is dead, or the run is another's."""
        return bool(self.superseded_by) or self.members.seen.any_dead

    @property
    def at_work(self) -> bool:
        """Whether something is under way that ends by itself."""
        staged = any(slot.state is State.STAGED or slot.making for slot in self.slots)
        return self.committing is not None or staged

    def next_wake_s(self, now_s: float) -> float | None:
        """When `decide` has to look again though no fact came; None: not before one comes."""
        times = [now_s + LOST_S for _ in self._open()]
        times += [now_s + 1.0] if self._saves or self._resumed else []
        lost = [m.lost_s for m in self.members.seen.lost if m.presence is Presence.HERE]
        times += [lost_s + REJOIN_S for lost_s in lost if lost_s is not None]
        if now_s < self._due_s < math.inf and self._may_appoint() and not self._open():
            times.append(self._due_s)
        if now_s < self._retry_commit_s < math.inf:
            times.append(self._retry_commit_s)
        if self._commit_every_s and self.committing is None and self._late_commit_s() > now_s:
            times.append(self._late_commit_s())
        return min(times, default=None)

    # -- small steps

    @property
    def _by_use(self) -> list[Slot]:
        """Those that hold something, then those that have arenas. Where fewer are in use it is the others that go."""
        return sorted(
            self.slots,
            key=lambda slot: (
                slot.state is State.FREE and not slot.leases,
                not (slot.bytes or slot.making),
                slot.number,
            ),
        )

    @property
    def _in_use(self) -> list[Slot]:
        return self._by_use[: self.slots_in_use]

    def _fits(self, slot: Slot) -> bool:
        """Whether its arenas are large enough, and not too large: what they have more would count as free for ever."""
        if not len(slot.bytes) == len(self._need) == self.world:
            return False
        return all(need <= has <= need + need // SLACK_PARTS for has, need in zip(slot.bytes, self._need, strict=True))

    @property
    def _interval_s(self) -> float:
        """From one appointment to the next. The steps that a policy names are not appointed: the ranks ask for them."""
        return math.inf if self.policy.seconds is None else self.policy.seconds

    def _commit_due_s(self) -> float:
        """Rounds appointed from then on are committed: half a local interval early, since neither is exact."""
        return self._committed_from_s + self._commit_every_s - (self.policy.seconds or 0.0) / 2

    def _late_commit_s(self) -> float:
        """When one is committed that was appointed before, since no later one came."""
        return self._commit_due_s() + (self.policy.seconds or 0.0)

    def _open(self) -> list[tuple[Slot, Round]]:
        """Rounds that may still be abandoned."""
        return [(slot, slot.round) for slot in self.slots if slot.state is State.GRANTED and slot.round is not None]

    def _slot_of(self, number: int) -> Slot | None:
        return next((s for s in self.slots if number and s.round is not None and s.round.number == number), None)

    def _open_round_of(self, number: int) -> Round | None:
        return next((round_ for _, round_ in self._open() if number and round_.number == number), None)

    def _broken(self) -> bool:
        """A rank is gone: no new round can become complete."""
        return self.members.seen.any_gone

    @property
    def _at_end(self) -> bool:
        """Whether all ranks have come to the end of their blocks and staged what they end with: none comes to another
        boundary."""
        staged = [slot.round for slot in self.slots if slot.state in (State.STAGED, State.COMPLETE)]
        return any(round_ is not None and round_.why is Why.EXIT for round_ in staged)

    @property
    def is_planned(self) -> bool:
        """Whether there is a division of what the ranks hold now."""
        return bool(self.division) and self._planned_version == self._layouts_version

    def _may_appoint(self) -> bool:
        """Whether a round may be announced, were one due and a slot free, and did no other stand in its way."""
        if self._start_step is None or self._resumed or self._broken() or self.superseded_by or self._leave_round:
            return False
        if self._ended or self._at_end:
            return False
        if self.members.seen.lost:
            return False  # it could not answer
        rounds = [slot.round for slot in self.slots if slot.round is not None]
        holding = any(round_.unjudged for round_ in rounds)
        return self.is_planned and not holding

    def _tell_level(self, tick: Tick, level: str, ok: bool, message: str) -> None:
        body = {"t": "level", "tick": str(tick), "level": level, "ok": ok, "message": message, "step": tick.step}
        self._out.append(Tell(body))
        self._told.pop((tick, level), None)
        self._told[tick, level] = body
        if len(self._told) > TOLD_MAX:
            del self._told[next(iter(self._told))]
