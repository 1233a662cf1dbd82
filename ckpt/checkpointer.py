"""`ckpt.Checkpointer`: the public context manager. It owns the parts of one rank and decides how the block ends.

The agent decides which version is saved and what is restored; the packages of ckpt/trainer walk, copy and fill the
state. Methods are for the thread that entered the block. Only `Handle.wait` and `Handle.level` are for any thread.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
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

from ckpt.errors import AgentError, CkptError, CommitFailed, Leave, NotStaged, SaveFailed, Superseded, UsageError
from ckpt.events import Events, JsonLines, Sink
from ckpt.placement.placement import ONE_COPY, Parity, Replicas
from ckpt.policy.adaptive import Adaptive
from ckpt.policy.save_options import Every, Keep, Limits
from ckpt.settings import Settings, read
from ckpt.storage.names import shown
from ckpt.threads import Tasks, end_all
from ckpt.trainer.link.levels import Level
from ckpt.trainer.link.options import UserOptions, advise_interval, check_state, find_init, find_url, make_options
from ckpt.trainer.loop import entry
from ckpt.trainer.loop.due_saves import DueSaves
from ckpt.trainer.loop.loader_watch import LoaderWatch
from ckpt.trainer.loop.run_report import RunReport
from ckpt.trainer.loop.saver import Saver, check_metrics
from ckpt.trainer.loop.shutdown import Shutdown
from ckpt.trainer.loop.step_tracking import StepTracking
from ckpt.trainer.loop.steps import Appointments, Steps, whole
from ckpt.types import Tick

# EX_TEMPFAIL: this process did nothing wrong, but a newer start has taken its place.
SUPERSEDED_CODE = 75
ASK_AGAIN_S = 0.2
HOLD_S = 600.0  # how long a rehearsed process waits to be killed
EXIT_TRIES = 3  # further attempts at the exit, after a snapshot of the last step was given up
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Restored:
    """What a start restored. `level`: "local", "peer" or "store". `source`: the same in words, with the step.

    A fresh start has step 0, level "none", identity None, and source "nothing" (or the weights that init= named)."""

    step: int = 0
    level: Level = "none"
    identity: str | None = None
    source: str = "nothing"


class Handle:
    """A checkpoint that ck.save() asked for: its step, and how far it has come."""

    def __init__(self, checkpointer: Checkpointer, tick: Tick) -> None:
        self._checkpointer = checkpointer
        self._levels = checkpointer._parts.saver.link.levels
        self.tick = tick

    @property
    def step(self) -> int:
        return self.tick.step

    @property
    def level(self) -> Level:
        """The furthest level that the checkpoint is known to have reached: "none", "local", "peer" or "store". After
        the block: the last one known in it."""
        return self._levels.level(self.tick)

    def wait(self, level: Level = "store", timeout_s: float | None = None) -> None:
        """Waits until the checkpoint has reached `level`. timeout_s: in seconds; None: no limit. After the block it
        returns or raises at once, by what was last known in the block.
        Errors: SaveFailed if the checkpoint will not reach the level, or not in time; UsageError for an unknown level.
        """
        checkpointer = self._checkpointer
        if checkpointer._entered is None:
            self._levels.wait(self.tick, level, timeout_s)
        elif threading.current_thread() is checkpointer._parts.saver.thread:
            checkpointer._wait_here(self.tick, level, timeout_s)
        else:
            checkpointer._parts.saver.wait(self.tick, level, timeout_s)

    def __repr__(self) -> str:
        return f"<ckpt.Handle step {self.tick.step} level {self.level}>"


@dataclass(slots=True)
class _Parts:
    """The parts that exist from `__enter__` to `__exit__`."""

    tasks: Tasks
    saver: Saver
    updates: StepTracking
    steps: Steps
    due: DueSaves
    appointments: Appointments
    parting: Shutdown
    # One function for each part that was begun, in that order: it ends that part.
    ends: list[Callable[[], object]]


def _working(
    method: Callable[Concatenate[Checkpointer, P], R],
) -> Callable[Concatenate[Checkpointer, P], R]:
    """Decorates a method that users call. Until the method returns no other one may be called, as by a signal handler
    or a sink."""

    @functools.wraps(method)
    def work(self: Checkpointer, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._check_use()
        self._at_work = True
        # A plain `try`: before the body of a context manager Ctrl-C could come in between.
        try:
            return method(self, *args, **kwargs)
        finally:
            self._at_work = False

    return work


class Checkpointer:
    """Saves and restores the state of a training loop: a context manager that restores the newest checkpoint on entry.

    url: where checkpoints are stored: a folder, s3://, gs://, az://, or any fsspec URL.
    state: a dict of modules, optimizers, schedulers, scalers, loaders, generators, tensors and plain values. `ck.state`
        is the same dict: what is assigned to its keys is saved.
    policy: when to save (default Adaptive()). keep: which checkpoints stay in the store (default: all).
    peers: Replicas or Parity in other nodes' memory, if the job has several nodes (default Replicas(1); None: none).
    codec: "auto", "raw", "zstd" or "planes". limits: bounds on memory, bandwidth and times (default Limits()).
    mesh: a DeviceMesh that names the ranks (default: that of the state's DTensors, else the rank number).
    process_group: the ranks that save together (default: all).
    init: weights to begin with if the run has no checkpoint: a .safetensors file, a folder of them, or a ckpt URL.
    lazy: copy in the background during the next step, where ckpt has verified that this is safe.
    strict: a state that does not match the checkpoint is an error.
    generators: save Python's, NumPy's and torch's random generators too.
    take_over: begin even if another living job writes to the URL.
    notices: "auto" (the sources that CKPT_NOTICES allows: signals, the cloud, Slurm, a file) or "off" (only an
        operator's).
    sinks: functions that are called with every ckpt.Event.

    All ranks construct it with the same options and enter it together, once. Errors on entry, on all ranks: UsageError,
    StateMismatch, StorageError, RunInUse, NoCheckpoint, DamagedData, AgentError; Leave, a SystemExit, if a newer start
    of the run has replaced this one.
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
        if not isinstance(sinks, tuple | list) or not all(map(callable, sinks)):
            raise UsageError(f"sinks={sinks!r}: a tuple of functions, such as (print,)")
        self._notices = notices
        self._limits = Limits() if limits is None else limits
        self.url = find_url(url, read())
        # The user's dict itself: what is assigned under either name is saved.
        self._state = state
        self.restored = Restored()
        self.events = Events(*sinks)
        self._policy = Adaptive() if policy is None else policy
        self._asked = UserOptions(
            url=self.url,
            state=self._state,
            options=make_options(self._policy, Keep() if keep is None else keep, self._limits, codec, peers),
            mesh=mesh,
            process_group=process_group,
            init=find_init(init),
            lazy=lazy,
            strict=strict,
            generators=generators,
            take_over=take_over,
        )
        self._receipt = RunReport()
        self.events.add(self._receipt.hear)
        self._entered: _Parts | None = None
        self._was_entered = False
        self._at_work = False
        self._stored = True  # whether the restored checkpoint is in the store
        self._hold_at = self._rehearsed = 0

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a Checkpointer cannot be copied or sent to another process: do not keep it in a loader's dataset, and do "
            "not pass it to a spawned process"
        )

    @property
    def state(self) -> dict[str, Any]:
        """The dict that is saved: the one that was given. Assign to its keys to change what is saved."""
        return self._state

    # -- the loop

    def steps(self, total: SupportsIndex) -> Iterator[int]:
        """Yields the step numbers 1, 2, ... `total`, or from the step after the restored one. Each round of the loop is
        one step, that is one optimizer update. In a zip it comes first: zip(ck.steps(n), loader). Errors: UsageError;
        those of `step`."""
        self._check_use()
        if (last := whole(total)) is None:
            raise UsageError(f"ck.steps({total!r}): a whole number of steps")
        yield from self._parts.steps.loop(last, self.step)

    @_working
    def step(self, n: SupportsIndex | None = None) -> None:
        """Ends a step, in a loop that does its own counting. n: if given, it must be the last step + 1. Once an
        exception has left an optimizer.step(), nothing is saved any more.
        Errors: UsageError; Leave (a SystemExit) if the job has to leave; SaveFailed if no commit landed for
        Limits(unsaved_s=)."""
        if n is not None and whole(n) != (last := self._parts.steps.ended) + 1:
            raise UsageError(
                f"ck.step({n!r}): the last ended step is {last}, so the next is {last + 1}; "
                "start counting from ck.restored.step + 1"
            )
        self._end_step()

    def _end_step(self) -> None:
        # `self._parts` is a call, which each step would pay for.
        parts = self._entered or self._parts
        link, step = parts.saver.link, parts.steps.end()
        parts.saver.boundary(step)
        link.enter(step + 1)
        parts.appointments.look()
        if parts.updates.is_torn:
            parts.updates.find_torn()
        if parts.updates.elsewhere is not None:
            parts.updates.find_elsewhere(each.updates for each in self._beside())
        if parts.updates.strangers.due:
            parts.updates.strangers.look(
                [parts.saver.walker.state, *(each.saver.walker.state for each in self._beside())]
            )
        if parts.updates.strangers.open:
            self._name_strangers()
        if step == self._rehearsed:
            self._rehearse()
        if link.superseded_by is not None:
            self._leave_superseded(link.superseded_by)
        if parts.due.end(step) and not parts.updates.find_waiting(step):
            self._save_due()
        unsaved_s = self._limits.unsaved_s
        if unsaved_s is not None and time.monotonic() - link.levels.committed_s > unsaved_s:
            raise SaveFailed(
                f"nothing reached the store for {unsaved_s:g} s (ckpt.Limits(unsaved_s=)): the store does not "
                f"answer, or one commit takes longer than that; run `ckpt doctor {shown(self.url)}`"
            )

    @_working
    def poll(self) -> None:
        """Serves the agent at a point that all ranks pass in the same order but where no step ends, such as an
        evaluation batch. It takes the snapshot that is appointed there. It also waits for copies in the background, so
        that the state may be changed by hand afterwards.
        No snapshot is taken if an optimizer has stepped since the last step ended. Nor is one, if a loader is
        registered, in the body of a step of ck.steps() that has not ended. Errors: UsageError; Leave (a SystemExit) if
        the job has to leave."""
        parts = self._parts
        parts.saver.poll()
        parts.steps.next_tick()
        parts.updates.watch()
        parts.appointments.look()
        if parts.saver.link.superseded_by is not None:
            self._leave_superseded(parts.saver.link.superseded_by)

    @_working
    def fence(self) -> None:
        """Waits for copies in the background. Call it before you change parameters or optimizer state by hand (outside
        optimizer.step()) in the middle of a step. If no optimizer has ever stepped, a step of ck.steps() that a break
        leaves after the fence counts as ended, as after an update."""
        parts = self._parts
        parts.saver.fence()
        parts.updates.fenced = True

    @_working
    def save(self, metrics: dict[str, float] | None = None) -> Handle:
        """Saves the last ended step now, and returns a handle. All ranks call it at the same step. It waits for a free
        slot. metrics: numbers that are kept with the checkpoint (for Keep(best=)). A failed save raises where its
        handle is waited for, not here.

        Errors: UsageError after an update that no step has ended. UsageError too, if a loader is registered, in the
        body of a step of ck.steps() that has not ended: a restore would skip the batch that was drawn for that step."""
        numbers, parts = check_metrics(metrics, self.events), self._parts
        steps, link = parts.steps, parts.saver.link
        if parts.updates.pending:
            raise UsageError(
                "ck.save() after an optimizer update that no step has ended: call ck.step() first, so that the "
                f"checkpoint is of step {steps.ended + 1} and not of half of it"
            )
        if steps.may_have_drawn:
            raise UsageError(
                f"ck.save() in step {steps.ended + 1}, which has not ended. A batch may have been drawn for that step, "
                "and a restart would skip it: call ck.step() first, at the end of the step's body. After a loop that "
                "ended with its loader, ck.step() would count one step too many: call ck.step() and ck.save() in the "
                "loop's body"
            )
        tick = steps.next_tick()
        parts.updates.watch()
        try:
            self._save_now("save", tick, numbers)
        except (SaveFailed, AgentError) as exc:
            if link.superseded_by is not None:
                self._leave_superseded(link.superseded_by)
            link.levels.put(tick, "local", False, str(exc))
            self.events.emit("save.failed", f"ckpt: step {tick.step} was not saved: {exc}", loud=True)
        return Handle(self, tick)

    @_working
    def wait(self, level: Level = "store", timeout_s: float | None = None) -> None:
        """Waits until the newest snapshot that this rank took has reached `level`; returns at once if there is none.
        Errors: SaveFailed; UsageError for an unknown level."""
        saver = self._parts.saver
        if saver.last is not None:
            saver.wait(saver.last, level, timeout_s)

    @property
    def receipt(self) -> dict[str, Any]:
        """The figures of this run so far. They are also logged in one line at the end."""
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
        except BaseException as exc:
            end_all([last.close, *ends] if self._entered is None else self._entered.ends)
            # The message says all: people see their own line and the message, not how ckpt came to it.
            if isinstance(exc, UsageError):
                raise exc.with_traceback(None) from exc.__cause__
            raise
        return self

    def _check_entry(self) -> None:
        # The same test as in multiprocessing itself.
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise UsageError(
                "a process that multiprocessing has spawned is importing this script, and would start the job a second "
                'time: put the training code below `if __name__ == "__main__":`'
            )
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
        """Enters the job. `last`: closed after everything else. `ends`: gets the function that ends each part, before
        that part begins: Ctrl-C may come in between."""
        lines = self._write_events(settings.events, last)
        tasks = Tasks("trainer", pool_size=4)
        ends.append(tasks.close)
        watch = LoaderWatch(self.state, self.events)
        try:
            saver, found = entry.enter(self._asked, settings, tasks, self.events, self._receipt, ends)
        except Superseded as exc:
            self._leave_superseded(str(exc))
        # From here on this rank is a member of the job.
        try:
            updates = StepTracking(self.state, lambda: saver.walk, self.events)
            ends.append(updates.close)
            updates.begin(found.tick.step)
            watch.begin(is_told=saver.link.terms is not None and saver.link.terms.rank == 0)
            steps = Steps(found.tick.step, saver, updates, watch, self.events)
            parting = Shutdown(saver.link, tasks, self.events, settings)
            appointments = Appointments(steps, saver, updates, parting)
            fail_all = functools.partial(saver.link.levels.fail_all, "the block was left before that was known")
            ends = [parting.close, last.close, fail_all, *ends, parting.end_threads, self._forget]
            if lines is not None and (terms := saver.link.terms) is not None:
                lines.also(rank=terms.rank, epoch=terms.epoch, launch=terms.launch)
            due = DueSaves(self._policy)
            self._take_up(_Parts(tasks, saver, updates, steps, due, appointments, parting, ends), found, began_s)
            last.callback(lambda: self.events.emit("receipt", self._receipt.line(), **self._receipt.to_dict()))
            parting.begin()
        except BaseException:
            saver.link.give_up()
            raise

    def _take_up(self, parts: _Parts, found: entry.RestoreResult, began_s: float) -> None:
        """Marks this object as entered, and records what was restored."""
        link = parts.saver.link
        self._entered = parts
        self._was_entered = True
        _LIVE.add(self)
        self.restored = Restored(found.tick.step, found.level, found.identity, found.source)
        self._stored = found.stored
        self._receipt.start_step = parts.steps.start
        self._receipt.restored_from = self.restored.source
        self._receipt.entry_s = time.monotonic() - began_s
        # The time that entering took does not count as unsaved.
        link.levels.begin()
        link.enter(parts.steps.start + 1)
        self._update_receipt()
        if self.restored.identity is not None:
            self.events.emit("restored", self._receipt.restored_line(), **self._receipt.to_dict())
        if link.terms is not None and link.terms.rank == 0:
            advise_interval(self._policy, self._limits, self.events)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # `self._parts` is a call, in which Ctrl-C could be raised.
        parts = self._entered or self._parts
        # In a forked child all resources belong to the parent.
        if parts.saver.forked:
            self._entered = None
            return
        failure: CkptError | None = None
        # sys.exit(0) in the loop is a normal end. Leave has another code.
        ends_normally = error is None or (isinstance(error, SystemExit) and not error.code)
        # Stays set: from here on users call nothing any more.
        self._at_work = True
        try:
            if ends_normally:
                failure = self._finish_normally()
            else:
                # No snapshot is taken: half a step may be in the state.
                parts.saver.quiet()
                failure = parts.parting.finish_early(self._limits.exit_s)
        except Leave:
            raise
        except BaseException:
            # Ctrl-C. Else the agent would wait for this rank to come back.
            parts.saver.link.give_up()
            raise
        finally:
            try:
                end_all(parts.ends)
            except KeyboardInterrupt:
                # It may have come before the first call or between two: the rest is still in the list.
                end_all(parts.ends)
                raise
        if failure is not None:
            if not ends_normally and error is not None:
                error.add_note(f"ckpt: {failure}")
            else:
                raise CommitFailed(str(failure)) from failure

    def _write_events(self, path: Path | None, closing: contextlib.ExitStack) -> JsonLines | None:
        """Adds a sink for the file that CKPT_EVENTS names, until `closing` is closed. The agent writes its own events
        there."""
        if path is None:
            return None
        about = {"by": "trainer", "url": shown(self.url), "host": socket.gethostname(), "pid": os.getpid()}
        lines = JsonLines(path, about)
        closing.callback(lines.close)
        self.events.add(lines)
        closing.callback(self.events.remove, lines)
        return lines

    def _finish_normally(self) -> CkptError | None:
        """Saves the last step unless it is saved, and waits for its commit. Returns the failure, if any. Errors: Leave.

        A step that was restored from memory and is not in the store is saved too: no other process may be left to
        commit it."""
        parts = self._parts
        parting, steps = parts.parting, parts.steps
        try:
            if torn := parts.updates.find_torn():
                return self._leave_torn(torn)
            if steps.leave_loop():
                self._end_step()
            deadline, pending = parting.exits(self._limits.exit_s), parts.updates.pending
            trained = steps.any_ended or parts.saver.last is not None
            if not pending and (trained or not self._stored):
                return self._save_last(deadline)
        except Leave:
            parting.finish_early(self._limits.exit_s)
            raise
        if pending:
            text = f"ckpt: {pending} optimizer updates, but not one ended step: none of them is saved. "
            text += "Loop over ck.steps(...), or call ck.step() after each update"
            self.events.emit("step.none", text, loud=True)
        return parting.leave("normal", deadline)

    def _save_last(self, deadline: float) -> CkptError | None:
        """Saves the last step. `deadline`: on the monotonic clock. Returns the failure, if any. Errors: Leave."""
        parts = self._parts
        link, steps, parting, tries = parts.saver.link, parts.steps, parts.parting, 0
        # The state may have changed since the last boundary was saved, for example by an epoch counter behind the loop.
        saver = parts.saver
        is_behind = steps.sub or saver.asked == steps.tick or saver.has_moved(steps.tick, deadline)
        tick = steps.next_tick() if is_behind else steps.tick
        failure: CkptError = CommitFailed("no attempt was made")
        if lost := parts.updates.gradients.lost(tick.step):
            text = f"ckpt: the last step is saved without its gradients: {lost}"
            self.events.emit("gradients.waiting", text, loud=True)
        while time.monotonic() < deadline:
            restarts = link.restarts
            try:
                held = self._save_now("exit", tick, {}, deadline)
                parts.saver.wait(held, "store", max(0.0, deadline - time.monotonic()), "exit")
                return parting.leave("normal", deadline)
            except CkptError as exc:
                failure = exc
            # Being superseded ends the wait above, too.
            if link.superseded_by is not None:
                self._leave_superseded(link.superseded_by)
            if isinstance(failure, NotStaged) and tries < EXIT_TRIES:
                tries += 1
                # All ranks see that the snapshot was given up, or that others ask for a later version.
                tick = steps.next_tick()
            elif not isinstance(failure, AgentError):
                return parting.leave("normal", deadline) or parting.unsaved(tick, failure)
            elif link.is_given_up:
                break
            else:
                # The agent is being started again, and the arenas are handed over to it.
                parts.tasks.stopping.wait(ASK_AGAIN_S)
                if link.restarts != restarts:
                    tick = steps.next_tick()
        return failure

    def _leave_torn(self, why: str) -> CkptError | None:
        """Leaves without a snapshot, as after an exception: half an update may be in the state. Returns the failure, if
        any: CommitFailed if the last step was not saved before that update."""
        parts = self._parts
        parts.saver.quiet()
        failure = parts.parting.finish_early(self._limits.exit_s)
        newest, steps = parts.saver.link.levels.newest("store"), parts.steps
        is_saved = self._stored and not steps.any_ended if newest is None else newest.step == steps.ended
        return failure or (None if is_saved else CommitFailed(why))

    # -- inside

    def _save_due(self) -> None:
        """Saves the step that has just ended, because the policy names it; all ranks do. If the save fails, training
        goes on: an event reports the failure, and the receipt counts it. Errors: Leave."""
        parts = self._parts
        parts.due.take()
        link, tick, receipt = parts.saver.link, parts.steps.tick, self._receipt
        began_s, missed, until_s = time.monotonic(), receipt.missed, None
        # After unsaved_s without a commit the block is left anyway.
        if self._limits.unsaved_s is not None:
            until_s = min(began_s + self._limits.exit_s, link.levels.committed_s + self._limits.unsaved_s)
        try:
            self._save_now("due", tick, {}, until_s)
        except (SaveFailed, AgentError) as exc:
            receipt.missed = max(receipt.missed, missed + 1)
            if link.superseded_by is not None:
                self._leave_superseded(link.superseded_by)
            self.events.emit("save.failed", f"ckpt: step {tick.step} was not saved: {exc}", loud=True)

    def _rehearse(self) -> None:
        """For `ckpt rehearse`: saves step 1, to compare with after the kill, and later the step at which the process is
        killed. It waits there for the kill, so that the script does not run past it. Training goes on if no kill comes.
        """
        parts, tick = self._parts, self._parts.steps.next_tick()
        self._rehearsed = self._hold_at
        try:
            self._save_now("save", tick, {})
            parts.saver.wait(tick, "store", self._limits.exit_s)
        except (SaveFailed, AgentError) as exc:
            self.events.emit("save.failed", f"ckpt: step {tick.step} was not saved: {exc}", loud=True)
        else:
            if tick.step == self._hold_at:
                parts.tasks.stopping.wait(HOLD_S)

    def _save_now(self, why: str, tick: Tick, metrics: dict[str, float], deadline: float | None = None) -> Tick:
        """Asks for a slot together with all ranks, and takes the snapshot. Returns the version that holds the state, as
        `Saver.save` does. Errors: CkptError; Leave."""
        parts = self._parts
        link = parts.saver.link
        until_s = time.monotonic() + self._limits.exit_s if deadline is None else deadline
        why_not = parts.updates.find_torn()
        if why == "save" and not why_not:
            why_not = parts.updates.gradients.lost(tick.step) or parts.updates.find_swapped(tick.step)
        if why_not:
            # Else the other ranks would wait for this one.
            link.cannot_save(tick, why_not)
            raise SaveFailed(why_not)
        try:
            held = parts.saver.save(why, tick, metrics, until_s)
        except Superseded as exc:
            self._leave_superseded(link.superseded_by or str(exc))
        if parts.updates.strangers.open:
            self._name_strangers()
        return held

    @_working
    def _wait_here(self, tick: Tick, level: Level, timeout_s: float | None) -> None:
        """`Saver.wait`, called by the user on the training thread."""
        self._parts.saver.wait(tick, level, timeout_s)

    def _leave_superseded(self, by: str) -> NoReturn:
        text = (
            f"ckpt: a newer start owns {shown(self.url)} now ({by}); this job leaves and saves nothing more. "
            "Jobs that are to run beside each other need a URL each"
        )
        self.events.emit("superseded", text, loud=True)
        raise Leave(SUPERSEDED_CODE)

    @property
    def _parts(self) -> _Parts:
        if self._entered is None:
            raise UsageError("used outside the `with ckpt.Checkpointer(...)` block")
        return self._entered

    def _check_use(self) -> None:
        # For speed, as in `_end_step`.
        saver = (self._entered or self._parts).saver
        if saver.forked:
            raise UsageError(
                "a Checkpointer belongs to the process that entered it, not to a forked child: leave saving to the "
                "parent, or construct another one in the child, with a URL of its own"
            )
        if threading.current_thread() is not saver.thread:
            raise UsageError("a Checkpointer is used by the thread that entered it")
        if self._at_work or saver.is_looking:
            raise UsageError(
                "called by a signal's handler or a sink while ckpt is at work: set a flag there, and call it in a step"
            )

    def _name_strangers(self) -> None:
        parts = self._parts
        if parts.saver.settled == parts.steps.ended:
            parts.updates.strangers.name(parts.saver.walk, [each.saver.walk for each in self._beside()])

    def _beside(self) -> list[_Parts]:
        """The parts of the other Checkpointers that this process has entered."""
        return [each._entered for each in _LIVE if each is not self and each._entered is not None]

    def _forget(self) -> None:
        try:
            self._update_receipt()
        finally:
            self._entered = None
            _LIVE.discard(self)

    def _update_receipt(self) -> None:
        if self._entered is not None:
            saver = self._entered.saver
            self._receipt.end_step = self._entered.steps.ended
            newest = saver.link.levels.newest("store")
            self._receipt.committed_step = newest.step if newest else self._receipt.committed_step
            self._receipt.agent_restarts = saver.link.restarts
            saver.prove(self._receipt)


_LIVE: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _in_child() -> None:
    for checkpointer in list(_LIVE):
        if checkpointer._entered is not None:
            checkpointer._entered.saver.abandon_in_child()


os.register_at_fork(after_in_child=_in_child)
