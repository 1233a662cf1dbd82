"""The training of a simulated job: turns of work and stalls, with replication and commits in the background.

A turn is the work up to a snapshot, and the snapshot's stall. Nothing else happens while no node event comes, so turns
repeat. `Training` goes from event to event through one cycle of turns. When its state is the same as some turns before,
relative to now, it jumps over as many further cycles as fit (`_jump`): the result is the same as without jumps.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import replace

from ckpt.policy.interval import ROUNDING
from ckpt.policy.save_options import STEPS_APART
from ckpt.simulate.memory import Home, SavedState
from ckpt.simulate.saves import FixedSaves, LearntSaves
from ckpt.simulate.scenario import Scenario
from ckpt.simulate.turns import BOOKS, SAME, Books, TurnBegin, TurnState, relative_to

NEVER = math.inf
# Of `Every(seconds=)` and Adaptive: the least work of a turn, as a part of its interval, however long the stall.
WORK_LEAST = 0.05
# Turns that are compared with the present one. Cycles are as long as a commit at most, unless steps never fit in.
TURNS_COMPARED = 512


class Doing(enum.Enum):
    """What the trainers do."""

    NOTHING = "nothing"  # they are down
    WORKING = "working"
    BLOCKED = "blocked"  # the snapshot waits for a commit, as a save of ckpt.Every(steps=) does
    STALLED = "stalled"  # by the snapshot
    DONE = "done"  # all steps are made, or it left in order


class Training:
    """The trainers, and the agents' work beside them. `steps`: at the beginning of the turn. `kept_s`: when each of the
    first commits that the store keeps was made."""

    def __init__(self, scenario: Scenario, saves: FixedSaves | LearntSaves, jumps: bool) -> None:
        self.scenario, self.saves, self.books, self._jumps = scenario, saves, Books(), jumps
        self.now_s = 0.0
        self.doing = Doing.NOTHING
        self.steps = 0
        self.ordinal = 0
        self.began_s = 0.0  # of this start
        self.home: Home | None = None
        self.newest: SavedState | None = None
        self.replicated: SavedState | None = None
        self.committed: SavedState | None = None
        self.waiting: SavedState | None = None  # it must be committed next
        self.committing: SavedState | None = None
        self.replicating: SavedState | None = None
        self._completing: SavedState | None = None
        self.commit_ends_s = self.replication_ends_s = self._completes_s = self._turn_ends_s = NEVER
        self.kept_s: list[float] = []
        self.must_leave = False  # after the next snapshot
        self._commit_bytes_s = (0.0, 0.0)
        self._worked_s = 0.0  # in this turn
        self._due_s = NEVER
        self._turn_steps = 0
        self._hurried = False
        self._commits_after_stall = self._commits_at_once = self._commits_last = False
        self._pace_from_s = 0.0
        self._turns: dict[TurnState, TurnBegin] = {}
        self._idle_turns: dict[TurnState, TurnBegin] = {}  # while no commit runs

    # -- time

    def next_s(self) -> float:
        return min(self._turn_ends_s, self._completes_s, self.commit_ends_s, self.replication_ends_s)

    def advance(self, to_s: float) -> None:
        """Time passes, in which no event happens."""
        seconds = to_s - self.now_s
        self.now_s = to_s
        if self.doing is Doing.WORKING:
            worked_s = seconds * self._speed
            self._worked_s += worked_s
            self.books.useful_s += worked_s
            self.books.stalled_s += seconds - worked_s
        elif self.doing in (Doing.STALLED, Doing.BLOCKED):
            self.books.stalled_s += seconds

    def step(self, until_s: float) -> None:
        """Handles the event that is due now. Nothing from outside happens before `until_s`."""
        now_s = self.now_s
        if self.commit_ends_s <= now_s:
            self._end_commit()
        elif self.replication_ends_s <= now_s:
            self._end_replication()
        elif self._completes_s <= now_s:
            self._complete()
        elif self.doing is Doing.WORKING:
            self._end_work()
        else:
            self._end_stall(until_s)

    @property
    def _speed(self) -> float:
        store = self.scenario.store
        return 1.0 - store.slowdown if store is not None and self.committing is not None else 1.0

    @property
    def uptime_s(self) -> float:
        return self.now_s - self.began_s if self.doing is not Doing.NOTHING else 0.0

    @property
    def is_finished(self) -> bool:
        return self.steps == self.scenario.work_steps

    @property
    def unsaved_s(self) -> float:
        """Work that neither memory nor the store has."""
        return self.books.useful_s - max((each.useful_s for each in (self.newest, self.committed) if each), default=0.0)

    @property
    def whole_steps(self) -> int:
        """Steps made so far, without the one under way."""
        return self.steps + (math.floor(self._worked_s / self._step_s + ROUNDING) if self._worked_s else 0)

    # -- from outside

    def rewind(self, saved: SavedState | None) -> None:
        """The trainers are to go on from `saved`; None: from the beginning. Nothing newer is left anywhere."""
        self.steps, self.ordinal, self.books.useful_s = (
            (saved.steps, saved.ordinal, saved.useful_s) if saved is not None else (0, 0, 0.0)
        )
        if saved is None or saved.home is None:
            self.newest = self.replicated = self.waiting = self.replicating = self.committing = None
            self.replication_ends_s = self.commit_ends_s = NEVER
        else:
            self.newest = saved

    def start(self, home: Home) -> None:
        """Training goes on, on the nodes of `home`."""
        self.home, self.began_s, self.must_leave, self._commits_last = home, self.now_s, False, False
        self._nodes = len(home.ids)
        self._step_s = self.scenario.step_s_on(self._nodes)
        self._replication_s = self.scenario.replication_s_on(self._nodes)
        self._pace_from_s = self.books.useful_s
        self.saves.start(self._nodes, home.placement is not None)
        self._begin_turn()
        self._replicate_newest()
        self._commit_next()

    def stop(self) -> None:
        """The trainers are down. The agents go on with what is under way."""
        self.saves.fail(self.uptime_s)
        self.steps = self.whole_steps
        self.doing = Doing.NOTHING
        self._turn_ends_s = self._completes_s = NEVER
        self._completing = None
        self._worked_s = 0.0
        self._forget_turns()
        local = self.scenario.local
        if local is not None and not local.survives_crash:
            self.newest = self.replicated = self.waiting = self.replicating = self.committing = None
            self.replication_ends_s = self.commit_ends_s = NEVER

    def drop_lost(self) -> None:
        """Nodes are gone from the homes: forgets what memory has lost. Replication under way does not count then."""
        self.newest, self.replicated, self.waiting = (
            each if each is not None and each.survives else None
            for each in (self.newest, self.replicated, self.waiting)
        )
        self.replicating, self.replication_ends_s = None, NEVER
        self._forget_turns()
        if self.committing is not None and not self.committing.survives:
            self._abort_commit()
        # Where training goes on: nodes were lost that only held what an earlier start saved.
        if self.doing is not Doing.NOTHING:
            self._replicate_newest()

    def _abort_commit(self) -> None:
        self.committing, self.commit_ends_s = None, NEVER
        self._pace_from_s = self.books.useful_s
        if self.doing is Doing.WORKING:
            self._plan()
        self._commit_next()

    def hurry(self) -> bool:
        """An appointment because of a notice: a snapshot at the next step's end, which is committed at once if no
        replicas are made. Whether there was any work in this turn."""
        if self.doing is Doing.WORKING and self._worked_s > 0:
            self._hurried = True
            self._forget_turns()
            self._plan()
            return True
        return False

    def leave(self, commits: bool) -> None:
        """The job leaves in order, after a last snapshot, which the agents commit if `commits`."""
        self.must_leave, self._commits_last = True, commits
        if self.doing is Doing.WORKING and self._worked_s == 0 and self._completing is None:
            self._leave()
        self.hurry()

    # -- turns

    def _begin_turn(self) -> None:
        self.doing = Doing.WORKING
        self._worked_s, self._hurried = 0.0, False
        seconds = self.saves.seconds
        local = self.scenario.local
        stall_s = local.stall_s if local is not None else 0.0
        self._due_s = NEVER if seconds is None else self.now_s + max(seconds - stall_s, WORK_LEAST * seconds)
        self._plan()

    def _plan(self) -> None:
        """Computes when this turn's work ends: with a step, at the present speed."""
        step_s, every = self._step_s, self.saves.steps
        most = NEVER if self.scenario.work_steps is None else self.scenario.work_steps - self.steps
        wanted: float
        if self._hurried:
            wanted = max(1, math.ceil(self._worked_s / step_s - ROUNDING))
        elif not self.scenario.saves:
            wanted = NEVER
        elif every is not None:
            wanted = every - self.steps % every
        else:
            due_s = self._worked_s + max(0.0, self._due_s - self.now_s) * self._speed
            wanted = max(STEPS_APART, math.ceil(due_s / step_s - ROUNDING))
        wanted = min(wanted, most)
        self._turn_steps = 0 if wanted == NEVER else int(wanted)
        self._turn_ends_s = (
            NEVER if wanted == NEVER else self.now_s + max(0.0, wanted * step_s - self._worked_s) / self._speed
        )

    def _end_work(self) -> None:
        self.steps += self._turn_steps
        # The work of whole steps, whatever rounding made of it.
        self._worked_s = 0.0
        if self.is_finished:
            self._turn_ends_s, self.doing = NEVER, Doing.DONE
        elif self.waiting is not None and self._is_commit_turn:
            self._turn_ends_s, self.doing = NEVER, Doing.BLOCKED
        else:
            self._begin_stall()

    @property
    def _is_commit_turn(self) -> bool:
        """Whether the snapshot that is taken next is one to commit."""
        last = self.waiting or self.committing or self.committed
        since = self.ordinal + 1 - (last.ordinal if last is not None else 0)
        return self.scenario.store is not None and since >= self.saves.snapshots

    def _begin_stall(self) -> None:
        local, store = self.scenario.local, self.scenario.store
        stall_s = local.stall_s if local is not None else 0.0
        must = self.saves.steps is not None
        self._commits_after_stall = self._is_commit_turn and (must or self.committing is None)
        if self._commits_after_stall and store is not None:
            stall_s += store.stall_s
            if store.synchronous:
                stall_s += self.scenario.commit_s_on(self._nodes)
        self.doing, self._turn_ends_s = Doing.STALLED, self.now_s + stall_s
        self.saves.observe(("stall", (stall_s,)))

    def _end_stall(self, until_s: float) -> None:
        self.books.snapshots += 1
        self.ordinal += 1
        state = SavedState(self.steps, self.books.useful_s, self.ordinal, self.home)
        local, hurried = self.scenario.local, self._hurried
        if self.scenario.is_synchronous and self._commits_after_stall:
            self._record_commit(state)
        self._begin_turn()
        if local is not None:
            self._completing = state
            self._commits_at_once = hurried and not self.must_leave and (self.home is None or not self.home.placement)
            self._completes_s = self.now_s + self._step_s / self._speed
            # Who leaves takes no further step that the copy could run under.
            if not local.deferred or self.must_leave:
                self._complete()
        elif self.must_leave:
            self._leave()
        if self.saves.is_due(self.uptime_s):
            self._forget_turns()
            if self.saves.ask(self.uptime_s):
                self._begin_turn()
        elif self._jumps and self.doing is Doing.WORKING:
            self._jump(until_s)

    def _complete(self) -> None:
        """The snapshot is whole."""
        assert self._completing is not None
        self.newest, self._completing, self._completes_s = self._completing, None, NEVER
        if self.must_leave:
            self._leave()
        self._replicate_newest()
        must = self._commits_after_stall and self.saves.steps is not None
        must = must or self._commits_at_once or self._commits_last
        if self.scenario.store is not None and not self.scenario.is_synchronous and must:
            self.waiting = self.newest
        self._commit_next()

    def _leave(self) -> None:
        self.doing, self._turn_ends_s = Doing.DONE, NEVER

    # -- the agents' work

    def _replicate_newest(self) -> None:
        """One at a time, as the agent does: what is overtaken meanwhile is not replicated."""
        newest = self.newest
        if self.home is None or self.home.placement is None or newest is None or self.replicating is not None:
            return
        if newest.is_replicated and newest.home is self.home and not self.home.gone:
            return
        self.replicating, self.replication_ends_s = newest, self.now_s + self._replication_s
        if not self._replication_s:
            self._end_replication()

    def _end_replication(self) -> None:
        state = self.replicating
        assert state is not None
        state.home, state.is_replicated = self.home, True
        self.replicated, self.replicating, self.replication_ends_s = state, None, NEVER
        self.books.replications += 1
        self.saves.observe(("replication", (self._replication_s,)))
        if self.doing is not Doing.NOTHING:
            self._replicate_newest()

    def _commit_next(self) -> None:
        """One at a time. ckpt.Every(steps=) has each of its saves committed, in order; else the newest is, when it is
        due."""
        store = self.scenario.store
        if store is None or store.synchronous or self.committing is not None:
            return
        state = self.waiting
        if state is None and self.saves.steps is None and self.newest is not None:
            last = self.committed.ordinal if self.committed is not None else 0
            state = self.newest if self.newest.ordinal - last >= self.saves.snapshots else None
        if state is None:
            return
        self._observe_pace("step")
        self.committing, self.waiting = state, None
        self._idle_turns.clear()
        seconds = self.scenario.commit_s_on(self._nodes)
        self._commit_bytes_s = seconds, self.scenario.stored_bytes
        self.commit_ends_s = self.now_s + seconds
        if self.doing is Doing.WORKING:
            self._plan()
        elif self.doing is Doing.BLOCKED:
            self._begin_stall()

    def _end_commit(self) -> None:
        assert self.committing is not None
        self._observe_pace("step_beside_commit")
        self.saves.observe(("commit", self._commit_bytes_s))
        state, self.committing, self.commit_ends_s = self.committing, None, NEVER
        self._record_commit(state)
        if self.doing is Doing.WORKING:
            self._plan()
        self._commit_next()

    def _record_commit(self, state: SavedState) -> None:
        self.committed = SavedState(state.steps, state.useful_s, state.ordinal, None)
        self._idle_turns.clear()
        self.books.commits += 1
        self.books.bytes_in += self.scenario.stored_bytes
        self.books.puts += self.scenario.requests_on(self._nodes)
        assert self.scenario.store is not None
        if len(self.kept_s) < self.scenario.store.kept:
            self.kept_s.append(self.now_s)

    def _observe_pace(self, kind: str) -> None:
        """As the agent: the seconds of a step since the last begin or end of a commit, from two steps on."""
        if self.books.useful_s - self._pace_from_s >= 2 * self._step_s:
            beside = kind == "step_beside_commit"
            self.saves.observe((kind, (self._step_s / self._speed if beside else self._step_s,)))  # type: ignore[arg-type]
        self._pace_from_s = self.books.useful_s

    # -- jumps

    def _jump(self, until_s: float) -> None:
        """A turn begins. Skips whole cycles of turns before `until_s`, if the state is that of an earlier turn."""
        memory = self.newest, self.replicated, self.replicating, self._completing
        is_idle = self.waiting is None and self.committing is None
        if self.scenario.store is not None and is_idle:
            # Between two commits the turns repeat, whatever the store has.
            since = self.ordinal - (self.committed.ordinal if self.committed is not None else 0)
            self._skip(self._idle_turns, memory, until_s, self.saves.snapshots - 1 - since)
        if self.scenario.store is None or len(self.kept_s) == self.scenario.store.kept:
            self._skip(self._turns, (*memory, self.committed, self.waiting, self.committing), until_s)

    def _skip(
        self,
        turns: dict[TurnState, TurnBegin],
        states: Sequence[SavedState | None],
        until_s: float,
        turns_most: float = NEVER,
    ) -> None:
        """`states`: those that move on with the turns. `turns_most`: how many turns may be skipped."""
        now_s, useful_s, seen = self.now_s, self.books.useful_s, self.saves.seen
        has_commits = turns is self._turns
        ends = self._turn_ends_s, self._completes_s, self.replication_ends_s, self.commit_ends_s
        state: TurnState = (
            self._turn_steps,
            round(useful_s - self._pace_from_s, SAME) if seen is not None and has_commits else None,
            *(None if at == NEVER else round(at - now_s, SAME) for at in ends),
            *(relative_to(useful_s, self.ordinal, self.home, each) for each in states),
        )
        before = turns.get(state)
        if before is None:
            if len(turns) < TURNS_COMPARED:
                turns[state] = TurnBegin(now_s, self.steps, self.ordinal, replace(self.books), dict(seen or {}))
            return
        cycle_s, cycle_steps = now_s - before.time_s, self.steps - before.steps
        cycle_ordinal, cycle_useful_s = self.ordinal - before.ordinal, useful_s - before.books.useful_s
        until_s = min(until_s, now_s + self.saves.due_in_s(self.uptime_s))
        cycles = min((until_s - now_s) / cycle_s, turns_most / cycle_ordinal)
        if self.scenario.work_steps is not None:
            cycles = min(cycles, (self.scenario.work_steps - self._turn_steps - self.steps) / cycle_steps)
        if not 1 <= cycles < NEVER:
            return
        n = math.floor(cycles)
        turns.clear()
        self._idle_turns.clear()
        for name in BOOKS:
            now = getattr(self.books, name)
            setattr(self.books, name, now + n * (now - getattr(before.books, name)))
        for saved in {id(each): each for each in states if each is not None}.values():
            saved.steps += n * cycle_steps
            saved.ordinal += n * cycle_ordinal
            saved.useful_s += n * cycle_useful_s
        self.steps += n * cycle_steps
        self.ordinal += n * cycle_ordinal
        self.now_s += n * cycle_s
        self._turn_ends_s += n * cycle_s
        self._completes_s += n * cycle_s
        self._due_s += n * cycle_s
        self.replication_ends_s += n * cycle_s
        if has_commits:
            self.commit_ends_s += n * cycle_s
            self._pace_from_s += n * cycle_useful_s
        if seen is not None:
            for what, count in seen.items():
                seen[what] = count + n * (count - before.seen.get(what, 0))

    def _forget_turns(self) -> None:
        self._turns.clear()
        self._idle_turns.clear()

    def states(self) -> tuple[SavedState | None, ...]:
        memory = self.newest, self.replicated, self.replicating, self._completing
        return (*memory, self.committed, self.waiting, self.committing)
