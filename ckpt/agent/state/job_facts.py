"""The facts of one job that this node coordinates: its ranks, its slots, their save attempts, and the open requests.

Each method records one fact and decides nothing. Facts may be repeated, late, or stale. All decisions are made in one
place, `Scheduler.decide` in agent/job/scheduler.py, whose base class this is. Pure; not thread-safe.
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

LATENCY_S = 0.01  # of an announcement; doubled at each late rank, up to LATENCY_S_MAX
LATENCY_S_MAX = 2.5
RETRY_S_MAX = 60.0
SLACK_PARTS = 16  # an arena that is too large by one part in so many is kept
LOST_S = 5.0  # wait for an answer from ranks that are past the version
# Level messages repeated to a rank that reconnects: far more than the slots hold versions.
TOLD_MAX = 64
# Time for a rank whose connection broke to rejoin: a new agent has to start and connect.
REJOIN_S = 60.0


class Why(enum.Enum):
    """Why a save attempt was made."""

    STEP = "appointed"
    DUE = "due"  # the policy names that step, and all ranks ask for it
    HOLD = "hold"  # the last snapshot before a deadline, at which the ranks wait
    SAVE = "save"  # ck.save()
    EXIT = "exit"  # the end of the block


class State(enum.Enum):
    """The state of a slot."""

    FREE = "free"
    GRANTED = "granted"  # announced or granted: ranks may be filling it
    STAGED = "staged"
    COMPLETE = "complete"


class Store(enum.Enum):
    """The outcome of a complete save attempt at the store, or on peers."""

    NEW = "new"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class Round:
    """One save attempt: a version, in one slot, under one division."""

    number: int
    slot: int
    why: Why
    tick: Tick
    division: str
    opened_s: float
    bytes: int = 0  # memory of all ranks' arenas
    staged: dict[int, float] = field(default_factory=dict)  # rank -> stall in seconds
    announced: bool = False  # by a control word
    missed: str = ""  # reason to abandon the attempt
    held: dict[int, Request] = field(default_factory=dict)  # by rank: requests that wait for the verdict
    metrics: dict[str, float] = field(default_factory=dict)
    store: Store = Store.NEW  # its commit
    peer: Store = Store.NEW  # its replication
    last_try: bool = False  # its last commit was begun
    gave_way: str = ""  # reason why its commit was given up
    verdict: bool | None = None  # of a hold: True: leave; False: go on
    all_staged_s: float | None = None  # time
    hashed_s: float | None = None  # duration
    commit_began_s: float | None = None
    copy_began_s: float | None = None
    kept: tuple[Kept, ...] = ()  # holders of its replicas, as planned when replication last began

    @property
    def explicit(self) -> bool:
        """Whether anything but an ordinary appointment made this attempt."""
        return self.why is not Why.STEP

    @property
    def unjudged(self) -> bool:
        """Whether this is a hold without a verdict yet."""
        return self.why is Why.HOLD and self.verdict is None


@dataclass(slots=True)
class Slot:
    """One slot: an arena on each rank. `bytes`: the sizes of the arenas, by rank; () if there are none."""

    number: int
    state: State = State.FREE
    round: Round | None = None
    leases: int = 0
    bytes: tuple[int, ...] = ()
    making: bool = False
    handed: bool = False  # some rank or its agent may have an arena of the slot
    offered: bool = False  # to all ranks, since the last division
    warm: dict[int, str] = field(default_factory=dict)  # rank -> division its arena is bound for


@dataclass(frozen=True, slots=True)
class Save:
    """One rank's request to save. `same`: a version already staged whose bytes equal the rank's present state."""

    tick: Tick
    why: Why
    metrics: dict[str, float]
    request: Request
    same: Tick | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """The newest answered save. `kind`, `message`: the error for a rank that repeats the request when its snapshot is
    gone."""

    tick: Tick
    kind: str
    message: str


class JobFacts:
    """The facts of one job. `policy`: when to appoint. `first_round`: the number of the first save attempt; random, so
    that a restarted agent does not soon repeat a number."""

    def __init__(self, world: int, policy: Every, first_round: int = 1) -> None:
        self.world = world
        self.policy = policy
        self.members = RankStates(world)
        self.pace = StepTiming()
        self.slots = [Slot(n) for n in range(SLOTS_MAX)]
        self.slots_in_use = 0  # the number that memory allows; 0 until the first division
        self.division = ""
        self.superseded_by = ""
        self.committing: int | None = None  # the slot
        # A start surveys this memory: no slot is freed or overwritten until that start has its outcome.
        self.frozen = False
        self.closed_in_store = False
        self.refusal = ""  # reason why nothing can be saved
        self.last_error = ""  # of the newest failed commit or last save
        self.committed_tick: Tick | None = None
        self._next_round = first_round
        self._need: tuple[int, ...] = ()  # arena bytes per rank under the current division
        self._layouts_version = 0
        self._planned_version = 0
        self._dividing = False
        self._saves: dict[int, Save] = {}
        # By rank: the newest version that it cannot save, and the reason.
        self._unsavable: dict[int, tuple[Tick, str]] = {}
        self._asked_s: float | None = None  # since when all ranks wait in a save
        self._said_s = -math.inf  # last progress message to ranks that wait for a slot
        # Since when some ranks wait in a save for others; inf: the others were named in an event.
        self._awaited_s: float | None = None
        self._settled: Settled | None = None  # saves up to its version are answered
        self._start_step: int | None = None  # None: not restored yet, nothing is appointed
        # The agent restarted beside running ranks: nothing is appointed before each rank has published its step.
        self._resumed = False
        self._due_s = math.inf
        # Interval between commits of appointed snapshots; 0: each one whose turn comes is committed.
        self._commit_every_s = 0.0
        self._has_said_first = False  # the event that the first checkpoint is complete was emitted
        self._committed_from_s = -math.inf  # when the snapshot of the newest commit was appointed
        self._retries = 0
        self._latency_s = LATENCY_S
        self._steps_from: tuple[float, int] = (0.0, 0)  # (time, step) from which the rate is counted
        self._steps_per_s = 0.0
        self._retry_commit_s = math.inf
        self._commit_failures = 0
        self._leave_round = 0  # the save attempt whose verdict was: leave
        # All ranks held when the verdict was given. Else the others may be stuck, and have to be ended.
        self._all_leave = False
        self._leave_by_s: float | None = None  # the earliest deadline at the verdict, or since
        self._ended = False  # the ranks were told to end where they are
        self._end_why = ""
        self._end_waits = False
        self._given_up = False
        self._left_over = False  # superseded, but its newest complete snapshot is to be committed once
        # A former job still commits the checkpoint that this job continued from. Ranks that leave wait for it.
        self.former_saves = False
        self._abandoned: deque[int] = deque(maxlen=64)  # numbers of abandoned save attempts
        self._closing = False
        self.recovering = False  # arenas brought by the ranks from a former agent are not examined yet
        # By version and level: the newest level message, the newest last.
        self._told: dict[tuple[Tick, str], dict[str, Any]] = {}
        self._out: list[Action] = []

    # -- facts

    def joined(self, rank: int) -> None:
        """A rank has joined, for the first time or again. Save attempts that it may have answered on a lost connection
        count as missed."""
        member = self.members[rank]
        if member.away and self.may_join(rank):
            member.presence, member.away = Presence.HERE, False
        if member.presence is not Presence.HERE:
            # Its request to leave came on the lost connection, and cannot be answered there.
            member.lost_s, member.leave = None, AGAIN
            # A commit may have begun without this rank's node.
            self.retry_commit()
            return
        self.lost(rank, None)
        for slot in self.slots:
            slot.offered = False
            # Arenas closed or made meanwhile may still be at that rank.
            slot.handed |= member.joined
        member.joined = True
        member.lost_s = None

    def may_join(self, rank: int) -> bool:
        """Whether the rank still belongs to the job. A rank that was away for long does until the epoch is being
        closed: before that nothing takes its place."""
        member = self.members[rank]
        # It waits to leave and has a new connection: its node's agent was restarted.
        waits = member.presence is Presence.LEFT and member.leave is not None
        returns = member.away and not self._closing
        return waits or ((member.presence is Presence.HERE or returns) and not self.closed_in_store)

    def lost(self, rank: int, now_s: float | None) -> None:
        """The rank's connection ended, its process did not: it may rejoin. `now_s`: None where it has rejoined."""
        member = self.members[rank]
        member.lost_s = now_s
        self._saves.pop(rank, None)
        # The refusal may come from that node being unreachable: plan anew once the rank is back.
        if self.refusal:
            self.layout(rank)
        for _, round_ in self._open():
            if rank not in round_.staged:
                round_.missed = round_.missed or f"the connection of rank {rank} was lost"
        for slot in self.slots:
            if slot.round is not None:
                slot.round.held.pop(rank, None)

    def died(self, rank: int) -> None:
        """The rank's process is dead."""
        member = self.members[rank]
        member.leave = None
        self._saves.pop(rank, None)
        if member.presence is Presence.HERE or member.away:
            member.presence, member.away = Presence.DEAD, False

    def layout(self, rank: int) -> None:
        """The rank's state has another structure, or needs larger arenas: a new division is due, and saves wait."""
        self._layouts_version += 1
        self.refusal = ""

    def planned(self, version: int, division: str, arena_bytes: tuple[int, ...], slots: int) -> bool:
        """Outcome of `Divide`: the division of the layouts of that version. `slots`: the number that fits into memory.
        Returns whether the division is current: then send each rank its part; else another one is made."""
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
        """Outcome of `Divide`: there is no division. `message`: the reason, for ranks that ask to save."""
        self._dividing = False
        if version != self._layouts_version:
            return
        self._planned_version = version
        self.division = ""
        self.refusal = message

    def made(self, slot: int, arena_bytes: tuple[int, ...]) -> None:
        """Outcome of `MakeArenas`: the sizes by rank; () if it failed: then call `fewer_slots` before."""
        self.slots[slot].making = False
        self.slots[slot].offered = False
        self.slots[slot].bytes = arena_bytes
        self.slots[slot].handed |= bool(arena_bytes)

    def lacks(self, slot: int) -> None:
        """A node lost its arenas of that slot. All arenas of the slot are made anew once the slot is free."""
        entry = self.slots[slot]
        entry.offered = False
        if entry.state is State.FREE and not entry.leases:
            entry.bytes = ()

    def fewer_slots(self, slots: int, message: str) -> None:
        """Memory allows at most `slots` slots. `message`: the reason to refuse saves if that is none."""
        self.slots_in_use = min(self.slots_in_use, slots)
        if not self.slots_in_use:
            self.refusal = message

    def use_slots(self, slots: int) -> None:
        """Memory now allows `slots` slots. Ignored if that is none, or if there is no current division."""
        if slots and self.is_planned:
            self.slots_in_use, self.refusal = slots, ""

    def warm(self, rank: int, slot: int, division: str) -> None:
        """The rank has mapped its arena of this slot, and bound it for this division."""
        if 0 <= slot < len(self.slots) and not self.slots[slot].making and division == self.division:
            self.slots[slot].warm[rank] = division

    def started(self, step: int, now_s: float) -> None:
        """The restore has ended, and training goes on after `step`. From now on snapshots are appointed."""
        if self._start_step is None:
            self._start_step = step
            self._steps_from = (now_s, step)
            # An adaptive policy takes the first snapshot at once, to measure its cost.
            self._due_s = now_s if self._commit_every_s else now_s + self._interval_s

    def follow(self, policy: Every, now_s: float) -> None:
        """Appoints by this policy from now on."""
        self.policy = policy
        if self._start_step is not None:
            self._due_s = now_s + self._interval_s

    def paced(self, local_s: float, store_s: float, now_s: float) -> None:
        """From now on a snapshot is appointed every `local_s`, and one is committed about every `store_s`."""
        self.policy = Every(seconds=local_s)
        self._commit_every_s = store_s
        if self._start_step is not None and not self._retries:
            self._due_s = min(self._due_s, now_s + local_s)

    def wanted(self, tick: Tick, why: Why = Why.SAVE) -> None:
        """A rank waits for the commit of that snapshot: it is not skipped. `why`: EXIT at the end of the block."""
        for slot in self.slots:
            if slot.round is not None and slot.round.tick == tick and slot.round.why in (Why.STEP, Why.SAVE, Why.DUE):
                slot.round.why = why

    def resumed(self, now_s: float) -> None:
        """This agent was restarted beside trainers at work."""
        self._resumed = True
        self.started(0, now_s)

    def holds(self, slot: int, tick: Tick, committed: bool) -> None:
        """After an agent restart: this slot holds the complete snapshot of that version."""
        found = Round(0, slot, Why.STEP, tick, self.division, 0.0)
        found.store = Store.DONE if committed else Store.NEW
        self.slots[slot].state = State.COMPLETE
        self.slots[slot].round = found
        self._tell_level(tick, "local", True, "")
        if committed:
            self.committed_tick = max(tick, self.committed_tick or tick)
            self._tell_level(tick, "store", True, "")

    def recovered(self) -> None:
        """After an agent restart: `holds` was called for every complete snapshot."""
        self.recovering = False
        ticks = [str(s.round.tick) for s in self.slots if s.state is State.COMPLETE and s.round is not None]
        self._out.append(Tell({"t": "recovered", "ticks": ticks}))

    def again(self) -> list[dict[str, Any]]:
        """The messages for a rank that reconnects: the versions still held, and the level messages that it may have
        missed."""
        # While recovering there are none: `recovered` tells all ranks.
        if self.recovering:
            return []
        ticks = {s.round.tick for s in self.slots if s.round is not None and not s.round.missed}
        ticks |= {tick for tick, _ in self._told}
        known = {"t": "recovered", "ticks": sorted(map(str, ticks))}
        return [known, *({**body, "again": True} for body in self._told.values())]

    def staged(self, rank: int, number: int, tick: Tick, slot: int, division: str, stall_s: float) -> None:
        """The rank has staged its snapshot for that save attempt. `stall_s`: the pause of its training."""
        round_ = self._open_round_of(number)
        if round_ is None:
            # The attempt was withdrawn while this rank staged: only this rank expects a result.
            if number in self._abandoned:
                self._tell_level(tick, "local", False, "it was given up meanwhile")
            return
        if (round_.tick, round_.slot, round_.division) != (tick, slot, division):
            round_.missed = round_.missed or f"rank {rank} staged {tick} in slot {slot} under another plan"
        round_.staged.setdefault(rank, stall_s)

    def missed(self, rank: int, number: int, why: str, updates: tuple[int, int] = (0, 0)) -> None:
        """The rank cannot stage that save attempt. `why`: "late", WAITING or AMID, or a text. `updates`: a step with an
        optimizer update, and the steps from one update to the next; 0: unknown."""
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
        """The rank asks to save that version; see `Save`."""
        former = self._saves.get(rank)
        # The rank has gone on from its former request, which is refused.
        if former is not None and former.request != request:
            self._out.append(Refuse(former.request, "not-staged", f"the rank asks for {tick} now"))
        self._saves[rank] = Save(tick, why, metrics, request, same)

    def unsavable(self, rank: int, tick: Tick, why: str) -> None:
        """The rank cannot save that version, or has given it up; the others ask for it."""
        self._unsavable[rank] = tick, why
        for _, round_ in self._open():
            if round_.tick == tick and rank not in round_.staged:
                round_.missed = round_.missed or f"rank {rank} missed it ({why})"

    def leave(self, rank: int, request: Request, in_order: bool = True, insists: bool = False) -> None:
        """The rank asks to leave. `in_order`: it ended its block or was told to leave; else by an exception. Only the
        first call for the rank counts for that. `insists`: if its connection breaks, it comes back for the answer."""
        member = self.members[rank]
        member.leave, member.insists = request, insists
        if member.presence is Presence.HERE:
            member.presence, member.broke = Presence.LEFT, not in_order

    def assembled(self, slot: int, number: int, error: str) -> None:
        """Outcome of `Assemble`. `error`: "" if the checkpoint is complete."""
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
        """Outcome of `Commit`. `error`: "" if the record is in the store. `passes`: the error is transient.
        Ranks that wait for this commit at their end then hear of no failure: the commit is tried again, and they decide
        how long to wait."""
        entry = self.slots[slot]
        self.committing = None
        entry.leases -= 1
        gave_way = entry.round.gave_way if entry.round is not None and error else ""
        # A commit that was given up is no failure of the store.
        if not gave_way:
            self._commit_failures = min(self._commit_failures + 1, 16) if error else 0
            self._retry_commit_s = now_s + min(2.0**self._commit_failures, RETRY_S_MAX) if error else math.inf
        if entry.round is not None:
            entry.round.store = Store.FAILED if error else Store.DONE
            is_tried_again = error and passes and entry.round.why is Why.EXIT and not self._broken()
            if not is_tried_again:
                self._tell_level(entry.round.tick, "store", not error, gave_way or error)
            # The newest counts: an older checkpoint may be committed after a newer one.
            if not error:
                self.committed_tick = max(entry.round.tick, self.committed_tick or entry.round.tick)
        # After a success the error stays while the newest checkpoint's commit has failed.
        if error or self.newest_store is not Store.FAILED:
            self.last_error = gave_way or error

    def lease(self, slot: int) -> None:
        """Takes a lease on that slot, which is not reused before `release`."""
        self.slots[slot].leases += 1

    def release(self, slot: int) -> None:
        """Ends one lease on that slot."""
        self.slots[slot].leases -= 1

    def supersede(self, by: str) -> None:
        """The newer start `by` owns the run: this job saves nothing new."""
        if not self.superseded_by:
            self.superseded_by = by
            self._out.append(Tell({"t": "superseded", "by": by}))

    def retry_commit(self) -> None:
        """Tries the last commit once more: all trainers are gone, and that commit failed or may fail. A superseded
        job commits too: the start that superseded it was given up, and this checkpoint is the newest."""
        self._left_over = bool(self.superseded_by)
        if self.newest and self.newest.round:
            self.newest.round.last_try = False

    def give_up(self) -> None:
        """Begins no further last commit: what is uncommitted stays uncommitted."""
        self._given_up = True

    def closed(self) -> None:
        """Outcome of `Close`."""
        self.closed_in_store = True

    # -- queries

    @property
    def store_fails(self) -> bool:
        """Whether the last commit failed."""
        return self._commit_failures > 0

    @property
    def slots_had(self) -> int:
        """The number of slots in use that have fitting arenas or hold a snapshot."""
        return sum(slot.state is not State.FREE or self._fits(slot) for slot in self._in_use)

    def needs(self, slot: int, arena_bytes: tuple[int, ...]) -> bool:
        """Whether that slot is in use, and needs arenas of exactly these sizes."""
        return self.slots[slot] in self._in_use and arena_bytes == self._need

    @property
    def newest(self) -> Slot | None:
        """The slot of the newest complete checkpoint; None: there is none."""
        complete = [(s.round.tick, s.number) for s in self.slots if s.state is State.COMPLETE and s.round is not None]
        return self.slots[max(complete)[1]] if complete else None

    @property
    def leaves_uncommitted(self) -> bool:
        """Whether this job is superseded and its newest complete checkpoint may still have to be committed."""
        return bool(self.superseded_by) and not self._given_up and self.newest_store not in (None, Store.DONE)

    @property
    def newest_store(self) -> Store | None:
        """The outcome of the newest complete checkpoint's commit; None: there is no such checkpoint."""
        return self.newest.round.store if self.newest is not None and self.newest.round is not None else None

    @property
    def layouts_version(self) -> int:
        return self._layouts_version

    @property
    def all_gone(self) -> bool:
        """Whether every trainer that joined has left or died."""
        return self.members.seen.all_gone

    @property
    def is_lost_cause(self) -> bool:
        """Whether training cannot go on: a rank is dead, or a newer start owns the run."""
        return bool(self.superseded_by) or self.members.seen.any_dead

    @property
    def at_work(self) -> bool:
        """Whether work is under way that ends by itself: hashing, making arenas, a commit."""
        staged = any(slot.state is State.STAGED or slot.making for slot in self.slots)
        return self.committing is not None or staged

    def next_wake_s(self, now_s: float) -> float | None:
        """When `decide` has to run next without a new fact; None: not before one."""
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

    # -- helpers

    @property
    def _by_use(self) -> list[Slot]:
        """The slots, first those that hold something, then those with arenas. The last ones are closed first."""
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
        """Whether the slot's arenas are large enough but not too large: the excess would never be freed."""
        if not len(slot.bytes) == len(self._need) == self.world:
            return False
        return all(need <= has <= need + need // SLACK_PARTS for has, need in zip(slot.bytes, self._need, strict=True))

    @property
    def _interval_s(self) -> float:
        """Seconds between appointments. Steps named by `Every(steps=)` are not appointed: the ranks ask for them."""
        return math.inf if self.policy.seconds is None else self.policy.seconds

    def _commit_due_s(self) -> float:
        """Snapshots appointed from this time on are committed. Half a local interval early: no interval is exact."""
        return self._committed_from_s + self._commit_every_s - (self.policy.seconds or 0.0) / 2

    def _late_commit_s(self) -> float:
        """The time from which an earlier appointed snapshot is committed, because no later one came."""
        return self._commit_due_s() + (self.policy.seconds or 0.0)

    def _open(self) -> list[tuple[Slot, Round]]:
        """The save attempts that may still be abandoned, with their slots."""
        return [(slot, slot.round) for slot in self.slots if slot.state is State.GRANTED and slot.round is not None]

    def _slot_of(self, number: int) -> Slot | None:
        return next((s for s in self.slots if number and s.round is not None and s.round.number == number), None)

    def _open_round_of(self, number: int) -> Round | None:
        return next((round_ for _, round_ in self._open() if number and round_.number == number), None)

    def _broken(self) -> bool:
        """Whether a rank is gone: then no new save attempt can become complete."""
        return self.members.seen.any_gone

    @property
    def _at_end(self) -> bool:
        """Whether all ranks have ended their blocks and staged their last snapshot: no further boundary comes."""
        staged = [slot.round for slot in self.slots if slot.state in (State.STAGED, State.COMPLETE)]
        return any(round_ is not None and round_.why is Why.EXIT for round_ in staged)

    @property
    def is_planned(self) -> bool:
        """Whether there is a division of the ranks' present layouts."""
        return bool(self.division) and self._planned_version == self._layouts_version

    def _may_appoint(self) -> bool:
        """Whether the job's state allows an appointment. Due times, free slots and other attempts are checked apart."""
        if self._start_step is None or self._resumed or self._broken() or self.superseded_by or self._leave_round:
            return False
        if self._ended or self._at_end:
            return False
        if self.members.seen.lost:
            return False  # a rank without a connection could not answer
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
