"""`ckpt.Checkpointer`: wires the parts together for one rank, and owns them. It decides nothing itself.

The agent decides what is saved when and what is restored; the trainer side (ckpt/trainer) walks, copies and fills.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, Self, SupportsIndex, TypeVar

from ckpt.agent.control import Kind, Place, Word
from ckpt.errors import AgentError, CkptError, CommitFailed, Leave, NotStaged, SaveFailed, Superseded, UsageError
from ckpt.events import Events, JsonLines, Sink
from ckpt.plan.placement import ONE_COPY, Parity, Replicas
from ckpt.policy.adaptive import Adaptive
from ckpt.policy.every import Every, Keep, Limits
from ckpt.settings import Settings, read
from ckpt.storage.names import shown
from ckpt.tasks import Tasks, end_all
from ckpt.trainer import entry, loaders
from ckpt.trainer.asked import Asked, check_state, find_url, make_options
from ckpt.trainer.levels import Level
from ckpt.trainer.parting import NOTICE_CODE, Parting
from ckpt.trainer.receipt import Receipt
from ckpt.trainer.saver import Saver, check_metrics
from ckpt.trainer.updates import Updates
from ckpt.types import Tick

SUPERSEDED_CODE = 75  # EX_TEMPFAIL: nothing is wrong with this process, its place is taken
ASK_AGAIN_S = 0.2
HOLD_S = 600.0  # how long a rehearsal may take to kill what is held for it
EXIT_TRIES = 3  # snapshots of the last step that are given up before the exit is
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Restored:
    """Where the state came from. At a fresh start: step 0, level "none", identity None, source "nothing"."""

    step: int = 0
    level: Level = "none"
    identity: str | None = None
    source: str = "nothing"


class Handle:
    """One saved checkpoint on its way."""

    def __init__(self, checkpointer: Checkpointer, tick: Tick) -> None:
        self._checkpointer = checkpointer
        self._levels = checkpointer._parts.saver.link.levels
        self.tick = tick

    @property
    def step(self) -> int:
        return self.tick.step

    @property
    def level(self) -> Level:
        """The furthest level it is known to have reached: "none", "local", "peer", "store". After the block: what was
        last known in it."""
        return self._levels.level(self.tick)

    def wait(self, level: Level = "store", timeout_s: float | None = None) -> None:
        """Returns when it has reached `level`. Errors: SaveFailed when it will not, or not in time. After the block at
        once, by what was last known in it."""
        checkpointer = self._checkpointer
        if checkpointer._entered is None:
            self._levels.wait(self.tick, level, timeout_s)
        elif threading.current_thread() is checkpointer._parts.saver.thread:
            checkpointer._wait_here(self.tick, level, timeout_s)
        else:
            checkpointer._wait_for(self.tick, level, timeout_s)

    def __repr__(self) -> str:
        return f"<ckpt.Handle step {self.tick.step} level {self.level}>"


@dataclass(slots=True)
class _Parts:
    """What lives between `__enter__` and `__exit__`."""

    tasks: Tasks
    saver: Saver
    updates: Updates
    parting: Parting
    ends: list[Callable[[], object]]  # of all that was begun, in that order


def _working(
    method: Callable[Concatenate[Checkpointer, P], R],
) -> Callable[Concatenate[Checkpointer, P], R]:
    """Of what users call: until it returns nothing else may be, as by a signal's handler or a sink."""

    @functools.wraps(method)
    def work(self: Checkpointer, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._check_use()
        self._at_work = True
        try:  # here, where Ctrl-C cannot come in between, and not in a context manager
            return method(self, *args, **kwargs)
        finally:
            self._at_work = False

    return work


class Checkpointer:
    """Keeps the state of a training loop safe, as a context manager.

    url: a folder, or s3://, gs://, az://, or any fsspec URL. state: a dict of modules, optimizers, schedulers,
    scalers, loaders, generators, tensors, and plain values; `ck.state[...]` is live. policy: when to save
    (default Adaptive()). keep: what stays in the store (default: everything). peers: Replicas or Parity,
    in other nodes' memory, where the job has several (default Replicas(1); None: none). codec: "auto", "raw", "zstd" or
    "planes". mesh: a DeviceMesh that names the ranks (default: the DTensors' own, else the rank). process_group: the
    ranks that save together (default: all). init: weights to begin with (.safetensors, a folder of them, or a ckpt
    URL), used only where the run has no checkpoint. lazy: let proven copies run under the next step. strict: a state
    that does not match the checkpoint is an error. generators: include Python's, NumPy's and torch's. take_over:
    begin even though another living job writes to the URL. notices: "auto" (what CKPT_NOTICES says; else signals,
    the cloud's word, Slurm's, a file) or "off": nobody's but an operator's. sinks: called with every ckpt Event.

    All ranks construct it with the same options and enter it together, once. Errors on entry: UsageError,
    StateMismatch, StorageError, RunInUse, NoCheckpoint, DamagedData, AgentError; each on all ranks.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        state: dict[str, Any],
        *,
        policy: Every | Adaptive | None = None,
        keep: Keep | None = None,
        peers: Replicas | Parity | None = ONE_COPY,
        codec: str = "auto",
        mesh: Any = None,
        process_group: Any = None,
        init: str | os.PathLike[str] | None = None,
        limits: Limits | None = None,
        lazy: bool = True,
        strict: bool = True,
        generators: bool = True,
        take_over: bool = False,
        notices: Literal["auto", "off"] = "auto",
        sinks: tuple[Sink, ...] = (),
    ) -> None:
        check_state(state)
        if notices not in ("auto", "off"):
            raise UsageError(f'notices={notices!r}: "auto" or "off"')
        self._notices = notices
        self._limits = limits or Limits()
        self.url = find_url(url, read())
        self._state = dict(state)
        self.restored = Restored()
        self.events = Events(*sinks)
        self._policy = Adaptive() if policy is None else policy
        self._asked = Asked(
            url=self.url,
            state=self._state,
            options=make_options(self._policy, keep or Keep(), self._limits, codec, peers),
            mesh=mesh,
            process_group=process_group,
            init=None if init is None else os.fspath(init),
            lazy=lazy,
            strict=strict,
            generators=generators,
            take_over=take_over,
        )
        self._receipt = Receipt()
        self.events.add(self._receipt.hear)
        self._entered: _Parts | None = None
        self._was_entered = False
        self._at_work = False
        self._said_torn = False
        self._loop: object = None  # the newest one over `steps`
        self._step = 0
        self._stored = True  # whether the store has what was restored
        self._sub = 0
        self._stepped = False
        self._in_body = False
        self._is_first_step = True
        self._looked: list[int] = []  # words of the control page
        self._answered: set[int] = set()  # those of them that are done with
        self._due_step: float = math.inf  # before it no other is due
        self._hold_at = self._rehearsed = 0

    @property
    def state(self) -> dict[str, Any]:
        """What is saved. Assign to its keys to change it."""
        return self._state

    # -- the loop

    def steps(self, total: SupportsIndex) -> Iterator[int]:
        """Yields 1, 2, ... `total`, or from the step after the restored one; each round of the loop is one step (one
        optimizer update). Put it first in a zip: zip(ck.steps(n), loader). Errors: UsageError; as `step`."""
        self._check_use()
        last = _whole(total)
        if last is None:
            raise UsageError(f"ck.steps({total!r}): a whole number of steps")
        if self._leave_loop():
            self.step()
        self._loop = loop = object()
        while self._step < last:
            self._stepped = False
            self._in_body = True
            yield self._step + 1
            if self._loop is not loop:
                raise UsageError("a loop over ck.steps() has run within this one: give each step to one of them")
            self._in_body = False
            if not self._stepped:
                self.step()

    @_working
    def step(self, n: SupportsIndex | None = None) -> None:
        """Ends a step, in loops that count themselves. n, if given, must be the last step + 1. After an
        optimizer.step() that an exception has left nothing is saved any more.
        Errors: UsageError; Leave (a SystemExit) when the job is to go."""
        if n is not None and _whole(n) != self._step + 1:
            raise UsageError(
                f"ck.step({n}): the last ended step is {self._step}, so the next is {self._step + 1}; "
                "start counting from ck.restored.step + 1"
            )
        self._end_step()

    def _end_step(self) -> None:
        parts = self._parts
        updates, step = parts.updates, self._step + 1
        collected = updates.collect() if updates.scalers else ()
        # In one go: between here and a call no Ctrl-C comes, that a user may catch, and whose update would count twice.
        updates.ended, updates.fenced, updates.collected = 0, False, collected
        self._step, self._sub, self._stepped = step, 0, True
        parts.saver.boundary()
        link = parts.saver.link
        if self._is_first_step:  # an optimizer's state appears in it, and what began the same on all ranks differs
            parts.saver.doubt()
            self._is_first_step = False
            with contextlib.suppress(SaveFailed):  # the next snapshot will say it
                parts.saver.settle(Tick(step))
        link.enter(step + 1)
        words = link.look(step, 0)
        if words != self._looked or step >= self._due_step:
            self._serve(words)
        if updates.is_torn:
            self._find_torn()
        if step == self._rehearsed:
            self._rehearse()
        if link.superseded_by is not None:
            self._leave_superseded(link.superseded_by)
        unsaved_s = self._limits.unsaved_s
        if unsaved_s is not None and time.monotonic() - link.levels.committed_s > unsaved_s:
            raise SaveFailed(
                f"nothing reached the store for {unsaved_s:g} s (ckpt.Limits(unsaved_s=)): it is away, or one commit "
                f"takes longer than that; run `ckpt doctor {shown(self.url)}`"
            )

    @_working
    def poll(self) -> None:
        """Serves the agent where all ranks pass in the same order but no step ends (evaluation batches): takes the
        snapshot that is appointed there, and waits for copies that still run, so that after it the state may be
        changed by hand. Nothing is taken once an optimizer has stepped since the last boundary; nor, where a loader is
        registered, in the body of a step of ck.steps() that has not ended.
        Errors: UsageError; Leave (a SystemExit) when the job is to go."""
        parts = self._parts
        parts.saver.poll()
        tick = self._next_tick()
        self._serve(parts.saver.link.look(tick.step, tick.sub))
        if parts.saver.link.superseded_by is not None:
            self._leave_superseded(parts.saver.link.superseded_by)

    @_working
    def fence(self) -> None:
        """Waits for copies that still run under the step; call it before changing parameters or optimizer state by
        hand (outside optimizer.step()) in the middle of a step. Where no optimizer has stepped so far, a step of
        ck.steps() that is left by a break after it counts as ended, as after an update."""
        parts = self._parts
        parts.saver.fence()
        parts.updates.fenced = True

    @_working
    def save(self, metrics: dict[str, float] | None = None) -> Handle:
        """Saves the last ended step, now; called by all ranks at the same step. metrics: numbers kept with it (for
        Keep(best=)). A failed save raises where its handle is waited for, not here.

        Errors: UsageError after an update without a boundary; and, where a loader is registered, in the body of a
        step of ck.steps() that has not ended: the batch that was drawn for it would be skipped after a restore."""
        numbers = check_metrics(metrics, self.events)
        if self._parts.updates.pending:
            raise UsageError(
                "ck.save() after an optimizer update that no step has ended: call ck.step() first, so that the "
                f"checkpoint is of step {self._step + 1} and not of half of it"
            )
        if self._has_drawn():
            raise UsageError(
                f"ck.save() in step {self._step + 1}, which has not ended, after a batch may have been drawn for it, "
                "which a restart would skip: call ck.step() first, at the end of the step's body. Behind a loop that "
                "ended with its loader step() would count one step too many: have the body say ck.step() and ck.save()"
            )
        tick = self._next_tick()
        try:
            self._save_now("save", tick, numbers)
        except (SaveFailed, AgentError) as exc:
            link = self._parts.saver.link
            if link.superseded_by is not None:
                self._leave_superseded(link.superseded_by)
            link.levels.put(tick, "local", False, str(exc))
            self.events.emit("save.failed", f"ckpt: step {tick.step} was not saved: {exc}", loud=True)
        return Handle(self, tick)

    @_working
    def wait(self, level: Level = "store", timeout_s: float | None = None) -> None:
        """Returns when the newest snapshot taken here has reached `level`. Errors: SaveFailed."""
        last = self._parts.saver.last
        if last is not None:
            self._wait_for(last, level, timeout_s)

    @property
    def receipt(self) -> dict[str, Any]:
        """What this run came to so far; also logged in one line at the end."""
        self._update_receipt()
        return self._receipt.to_dict()

    # -- entering and leaving

    def __enter__(self) -> Self:
        self._check_entry()
        settings, began_s = read(), time.monotonic()
        is_rehearsal = settings.redirect is not None and self.url == settings.redirect[1]
        self._hold_at, self._rehearsed = (settings.hold_at, 1) if is_rehearsal else (0, 0)
        if self._notices == "off":
            settings = replace(settings, notices="off")
        last, ends = contextlib.ExitStack(), list[Callable[[], object]]()
        try:
            self._begin(settings, last, ends, began_s)
        except BaseException:
            end_all([last.close, *ends] if self._entered is None else self._entered.ends)
            raise
        return self

    def _check_entry(self) -> None:
        if self._entered is not None:
            raise UsageError("this Checkpointer is entered already; make one for each `with`")
        if self._was_entered:
            raise UsageError("this Checkpointer was entered before; make one for each `with`, with objects made anew")
        if any(other.url == self.url and other._entered is not None for other in _LIVE):
            raise UsageError(
                f"this process has a Checkpointer on {shown(self.url)} already: put all of the state into one, or give "
                "each a URL of its own"
            )

    def _begin(
        self, settings: Settings, last: contextlib.ExitStack, ends: list[Callable[[], object]], began_s: float
    ) -> None:
        """`last`: what is of use until nothing more happens. What is begun is appended to `ends`, each before anything
        of it would have to be ended: Ctrl-C may come in between."""
        lines = self._write_events(settings.events, last)
        tasks = Tasks("trainer", pool_size=4)
        ends.append(tasks.close)
        saver, found = entry.enter(self._asked, settings, tasks, self.events, self._receipt, ends)
        try:  # the agent has taken us in
            updates = Updates(self.state, lambda: saver.walk)
            ends.append(updates.close)
            updates.begin()
            parting = Parting(saver.link, tasks, self.events, settings)
            fail_all = functools.partial(saver.link.levels.fail_all, "the block was left before that was known")
            ends = [parting.close, last.close, fail_all, *ends, parting.end_threads, self._forget]
            if lines is not None and saver.link.terms is not None:
                terms = saver.link.terms
                lines.also(rank=terms.rank, epoch=terms.epoch, launch=terms.launch)
            self._take_up(_Parts(tasks, saver, updates, parting, ends), found, began_s)
            last.callback(lambda: self.events.emit("receipt", self._receipt.line(), **self._receipt.to_dict()))
            parting.begin()
        except BaseException:
            saver.link.give_up()
            raise

    def _take_up(self, parts: _Parts, found: entry.Found, began_s: float) -> None:
        """From here on it is entered, and goes on from what was found."""
        link = parts.saver.link
        self._entered = parts
        self._was_entered = True
        _LIVE.add(self)
        self.restored = Restored(found.tick.step, found.level, found.identity, found.source)
        self._step = self.restored.step
        self._stored = found.stored
        self._receipt.start_step = self._step
        self._receipt.restored_from = self.restored.source
        self._receipt.entry_s = time.monotonic() - began_s
        link.levels.begin()  # what entering took is not unsaved time
        link.enter(self._step + 1)
        self._update_receipt()
        if self.restored.identity is not None:
            self.events.emit("restored", self._receipt.restored_line(), **self._receipt.to_dict())
        if link.terms is not None and link.terms.rank == 0:
            loaders.advise(parts.saver.walk.scan.nodes, self.events)
            self._advise_interval()

    def _advise_interval(self) -> None:
        """ckpt.Adaptive keeps to it; an interval that the user gave is left as it is."""
        seconds = self._policy.seconds if isinstance(self._policy, Every) else None
        unsaved_s = self._limits.unsaved_s
        if unsaved_s is not None and seconds is not None and seconds >= unsaved_s:
            every = f"a commit every {seconds:g} s (ckpt.Every), and this job leaves after {unsaved_s:g} s without one"
            text = f"ckpt: {every} (ckpt.Limits(unsaved_s=)): give a shorter interval, or ckpt.Adaptive()"
            self.events.emit("policy.seldom", text, loud=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        parts = self._entered or self._parts  # no call where it is entered: Ctrl-C is heard in one
        if parts.saver.forked:  # all that there is to close belongs to the parent
            self._entered = None
            return
        failure: CkptError | None = None
        self._at_work = True  # to the end
        try:
            if error is None:
                failure = self._finish_normally()
            else:
                parts.saver.quiet()  # takes no snapshot: the state may be half a step old
                failure = parts.parting.finish_early(self._limits.exit_s)
        except KeyboardInterrupt:
            parts.saver.link.give_up()  # else the agent would wait for us to come back
            raise
        finally:
            try:
                end_all(parts.ends)
            except KeyboardInterrupt:  # between two of them, maybe, or before the first
                end_all(parts.ends)
                raise
        if failure is not None:
            if error is not None:
                error.add_note(f"ckpt: {failure}")
            else:
                raise CommitFailed(str(failure)) from failure

    def _write_events(self, path: Path | None, closing: contextlib.ExitStack) -> JsonLines | None:
        """To the file that CKPT_EVENTS names, until `closing`. What the agent tells it writes there itself."""
        if path is None:
            return None
        about = {"by": "trainer", "url": shown(self.url), "host": socket.gethostname(), "pid": os.getpid()}
        lines = JsonLines(path, about)
        closing.callback(lines.close)
        self.events.add(lines)
        closing.callback(self.events.remove, lines)
        return lines

    def _finish_normally(self) -> CkptError | None:
        """Saves the last step unless it is saved, and waits for its commit. A step that was restored from memory, and
        that the store does not have, is saved: nobody else may be left to commit it."""
        parting = self._parts.parting
        try:
            if torn := self._find_torn():
                return self._leave_torn(torn)
            if self._leave_loop():
                self._end_step()
            deadline, pending = parting.exits(self._limits.exit_s), self._parts.updates.pending
            trained = self._step != self.restored.step or self._parts.saver.last is not None
            if not pending and (trained or not self._stored):
                return self._save_last(deadline)
        except Leave:
            parting.finish_early(self._limits.exit_s)
            raise
        if pending:
            text = (
                f"ckpt: {pending} optimizer updates and not one ended step: nothing of them is "
                "saved. Loop over ck.steps(...), or call ck.step() after each update"
            )
            self.events.emit("steps.none", text, loud=True)
        return parting.leave("normal", deadline)

    def _save_last(self, deadline: float) -> CkptError | None:
        """Until then, on the monotonic clock. Errors: Leave."""
        # The end of the last step may have been appointed; after a poll or a save the state may have moved on.
        tick = self._next_tick() if self._sub else Tick(self._step)
        failure: CkptError = CommitFailed("no attempt was made")
        link, parting, tries = self._parts.saver.link, self._parts.parting, 0
        while time.monotonic() < deadline:
            restarts = link.restarts
            try:
                self._save_now("exit", tick, {}, deadline)
                self._wait_for(tick, "store", max(0.0, deadline - time.monotonic()))
                return parting.leave("normal", deadline)
            except CkptError as exc:
                failure = exc
            if link.superseded_by is not None:  # which cuts off what waits
                self._leave_superseded(link.superseded_by)
            if isinstance(failure, NotStaged) and not link.levels.is_staged(tick) and tries < EXIT_TRIES:
                tries += 1
                tick = self._next_tick()  # all ranks see that it was given up, and all ask for this one
            elif not isinstance(failure, AgentError):
                return parting.leave("normal", deadline) or CommitFailed(str(failure))
            elif link.is_given_up:
                break
            else:  # it is being started again; what it held is handed over
                self._parts.tasks.stopping.wait(ASK_AGAIN_S)
                if link.restarts != restarts:
                    tick = self._next_tick()
        return failure

    def _leave_torn(self, why: str) -> CkptError | None:
        """As by an exception: takes no snapshot. The last step is lost, unless it was saved before that update."""
        saver = self._parts.saver
        saver.quiet()
        failure = self._parts.parting.finish_early(self._limits.exit_s)
        newest = saver.link.levels.newest("store")
        is_saved = self._stored and self._step == self.restored.step if newest is None else newest.step == self._step
        return failure or (None if is_saved else CommitFailed(why))

    def _leave_loop(self) -> bool:
        """Whether it was left after an update that no step has ended, which makes one. Where it was before the update,
        what was drawn for the step is lost, and said."""
        updates = self._parts.updates
        begun, self._in_body = self._in_body and not self._stepped, False
        has_ended = self._step != self.restored.step  # else nothing tells that updates are steps here
        if (updates.pending and (begun or has_ended)) or (updates.fenced and updates.by_hand and begun):
            return True
        if begun and self._parts.saver.walk.has_loaders:
            text = f"ckpt: left in step {self._step + 1} before its update: a batch that was drawn for it is not "
            text += "trained, and is passed over after a restart (at the end of a loader none was drawn)"
            self.events.emit("step.unfinished", text, loud=True)
        return False

    # -- inside

    def _find_torn(self) -> str:
        """Why the state must not be saved, said once; "" where it may."""
        torn = self._parts.updates.torn
        if torn and not self._said_torn:
            self._said_torn = True
            self.events.emit("step.torn", f"ckpt: {torn}", loud=True)
        return torn

    def _serve(self, words: list[int]) -> None:
        """Does what these appoint for now, and sees when the next is due."""
        due_step: float = math.inf
        if any(words):  # else there may be no agent just now, and the same one may be back
            self._answered &= set(words)
        for word in words:
            told = Word.unpack(word) if word not in self._answered else None
            if told is None:
                continue
            place = told.place(self._step, self._sub)
            if place is Place.EARLY:
                due_step = min(due_step, 0 if told.sub else told.step)
                continue
            self._answered.add(word)
            self._keep(told, place)
        self._looked, self._due_step = words, due_step  # after Ctrl-C they are looked at once more

    def _keep(self, told: Word, place: Place) -> None:
        """An appointment that is due, or past."""
        saver, tick = self._parts.saver, Tick(self._step, self._sub)
        if place is Place.LATE:
            saver.late(told.round, tick.step)
            return
        updates = self._parts.updates
        if updates.torn or (tick.sub and (updates.pending or self._has_drawn())):
            saver.missed(told.round, tick, updates.torn or "in the middle of a step")
            return
        missed = saver.take(told.round, told.slot, tick)
        if not missed and told.kind is Kind.HOLD:
            saver.quiet()
            if self._parts.parting.held(told.round):
                raise Leave(NOTICE_CODE)

    def _rehearse(self) -> None:
        """Saves step 1, so that there is a checkpoint from before the kill to compare, and the step of the kill, which
        comes here however quick the script is. Goes on where nobody kills."""
        tick, parts = self._next_tick(), self._parts
        self._rehearsed = self._hold_at
        try:
            self._save_now("save", tick, {})
            self._wait_for(tick, "store", self._limits.exit_s)
        except (SaveFailed, AgentError) as exc:
            self.events.emit("save.failed", f"ckpt: step {tick.step} was not saved: {exc}", loud=True)
        else:
            if tick.step == self._hold_at:
                parts.tasks.stopping.wait(HOLD_S)

    def _save_now(self, why: str, tick: Tick, metrics: dict[str, float], deadline: float | None = None) -> None:
        """Asks for a slot together with all ranks, and takes the snapshot. Errors: CkptError; Leave."""
        saver = self._parts.saver
        until_s = time.monotonic() + self._limits.exit_s if deadline is None else deadline
        try:
            if torn := self._find_torn():
                raise SaveFailed(torn)
            # What was taken before is reported before: the agent may give its slot to this one.
            saver.quiet(max(1.0, until_s - time.monotonic()))
            saver.settle(tick)
        except SaveFailed as exc:  # the others would wait for this rank
            saver.link.cannot_save(tick, str(exc))
            raise
        fields = {"tick": str(tick), "why": why, "metrics": metrics, "values_bytes": 0}
        saver.link.levels.retry(tick)
        try:
            answer = saver.link.request("save", fields, max(1.0, until_s - time.monotonic())).fields
        except Superseded as exc:
            self._leave_superseded(saver.link.superseded_by or str(exc))
        except CkptError as exc:
            if why == "save":  # the others may come to it only now, and to another agent; at the end all ask again
                saver.link.cannot_save(tick, str(exc))
            raise
        saver.link.levels.expect(tick)
        if answer["saved"]:
            return  # an appointment came first: all ranks have staged that very tick
        if why := saver.take(int(answer["round"]), int(answer["slot"]), tick, metrics):
            raise NotStaged(f"step {tick.step} was not staged: {why}")

    def _wait_for(self, tick: Tick, level: Level, timeout_s: float | None) -> None:
        """The training thread ends copies that run under the step first: nobody else could, while it waits here."""
        saver, began_s = self._parts.saver, time.monotonic()
        if threading.current_thread() is saver.thread:
            saver.quiet(timeout_s)
        if level == "store":
            saver.link.want(tick)
        left_s = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began_s))
        saver.link.levels.wait(tick, level, left_s)

    @_working
    def _wait_here(self, tick: Tick, level: Level, timeout_s: float | None) -> None:
        """As `_wait_for`, asked for by the user on the training thread."""
        self._wait_for(tick, level, timeout_s)

    def _has_drawn(self) -> bool:
        """Whether a loader may be ahead of the last boundary: in the body of a step that has not ended."""
        return self._in_body and not self._stepped and self._parts.saver.walk.has_loaders

    def _next_tick(self) -> Tick:
        self._sub += 1
        self._parts.saver.link.enter(self._step + 1, self._sub)
        return Tick(self._step, self._sub)

    def _leave_superseded(self, by: str) -> NoReturn:
        self.events.emit(
            "superseded", f"ckpt: {by} owns {shown(self.url)} now; this job leaves and saves nothing more", loud=True
        )
        raise Leave(SUPERSEDED_CODE)

    @property
    def _parts(self) -> _Parts:
        if self._entered is None:
            raise UsageError("used outside the `with ckpt.Checkpointer(...)` block")
        return self._entered

    def _check_use(self) -> _Parts:
        parts = self._parts
        if parts.saver.forked:
            raise UsageError("a Checkpointer belongs to the process that entered it, not to a forked child")
        if threading.current_thread() is not parts.saver.thread:
            raise UsageError("a Checkpointer is used by the thread that entered it")
        if self._at_work or parts.saver.is_looking:
            raise UsageError(
                "called by a signal's handler or a sink while ckpt is at work: set a flag there, and call it in a step"
            )
        return parts

    def _forget(self) -> None:
        try:
            self._update_receipt()
        finally:
            self._entered = None
            _LIVE.discard(self)

    def _update_receipt(self) -> None:
        self._receipt.end_step = self._step
        if self._entered is not None:
            saver = self._entered.saver
            newest = saver.link.levels.newest("store")
            self._receipt.committed_step = newest.step if newest else self._receipt.committed_step
            self._receipt.agent_restarts = saver.link.restarts
            saver.prove(self._receipt)


def _whole(number: SupportsIndex) -> int | None:
    """Of any kind that counts, NumPy's too, but no truth value; None: it is none."""
    try:
        return None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return None


_LIVE: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _in_child() -> None:
    for checkpointer in list(_LIVE):
        if checkpointer._entered is not None:
            checkpointer._entered.saver.abandon_in_child()


os.register_at_fork(after_in_child=_in_child)
