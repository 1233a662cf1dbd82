"""`ckpt.Checkpointer`: wires the parts together for one rank, owns them, and says how a block ends.

The agent decides what is saved when and what is restored; the trainer side (ckpt/trainer) walks, copies and fills.
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
            checkpointer._parts.saver.wait(self.tick, level, timeout_s)

    def __repr__(self) -> str:
        return f"<ckpt.Handle step {self.tick.step} level {self.level}>"


@dataclass(slots=True)
class _Parts:
    """What lives between `__enter__` and `__exit__`."""

    tasks: Tasks
    saver: Saver
    updates: StepTracking
    steps: Steps
    due: DueSaves
    appointments: Appointments
    parting: Shutdown
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
    StateMismatch, StorageError, RunInUse, NoCheckpoint, DamagedData, AgentError; each on all ranks. Leave, a
    SystemExit, where a newer start of the run has taken its place.
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
        self._state = state  # theirs, so that what is assigned under either name is what is saved
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
        self._stored = True  # whether the store has what was restored
        self._hold_at = self._rehearsed = 0

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a Checkpointer cannot be copied or sent to another process: leave it out of what is (a loader's dataset, "
            "what a spawned process is given)"
        )

    @property
    def state(self) -> dict[str, Any]:
        """What is saved: the dict that was given. Assign to its keys to change it."""
        return self._state

    # -- the loop

    def steps(self, total: SupportsIndex) -> Iterator[int]:
        """Yields 1, 2, ... `total`, or from the step after the restored one; each round of the loop is one step (one
        optimizer update). Put it first in a zip: zip(ck.steps(n), loader). Errors: UsageError; as `step`."""
        self._check_use()
        if (last := whole(total)) is None:
            raise UsageError(f"ck.steps({total!r}): a whole number of steps")
        yield from self._parts.steps.loop(last, self.step)

    @_working
    def step(self, n: SupportsIndex | None = None) -> None:
        """Ends a step, in loops that count themselves. n, if given, must be the last step + 1. After an
        optimizer.step() that an exception has left nothing is saved any more.
        Errors: UsageError; Leave (a SystemExit) when the job is to go."""
        if n is not None and whole(n) != (last := self._parts.steps.ended) + 1:
            raise UsageError(
                f"ck.step({n!r}): the last ended step is {last}, so the next is {last + 1}; "
                "start counting from ck.restored.step + 1"
            )
        self._end_step()

    def _end_step(self) -> None:
        parts = self._entered or self._parts  # no call where it is entered: each step comes here
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
        parts.steps.next_tick()
        parts.updates.watch()
        parts.appointments.look()
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
        numbers, parts = check_metrics(metrics, self.events), self._parts
        steps, link = parts.steps, parts.saver.link
        if parts.updates.pending:
            raise UsageError(
                "ck.save() after an optimizer update that no step has ended: call ck.step() first, so that the "
                f"checkpoint is of step {steps.ended + 1} and not of half of it"
            )
        if steps.may_have_drawn:
            raise UsageError(
                f"ck.save() in step {steps.ended + 1}, which has not ended, after a batch may have been drawn for it, "
                "which a restart would skip: call ck.step() first, at the end of the step's body. Behind a loop that "
                "ended with its loader step() would count one step too many: have the body say ck.step() and ck.save()"
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
        """Returns when the newest snapshot taken here has reached `level`. Errors: SaveFailed."""
        saver = self._parts.saver
        if saver.last is not None:
            saver.wait(saver.last, level, timeout_s)

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
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself asks
            raise UsageError(
                "a process that multiprocessing has spawned is importing this script, and would take the place of the "
                'job that has spawned it: put what trains below `if __name__ == "__main__":`'
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
        """`last`: what is of use until nothing more happens. What is begun is appended to `ends`, each before anything
        of it would have to be ended: Ctrl-C may come in between."""
        lines = self._write_events(settings.events, last)
        tasks = Tasks("trainer", pool_size=4)
        ends.append(tasks.close)
        watch = LoaderWatch(self.state, self.events)
        try:
            saver, found = entry.enter(self._asked, settings, tasks, self.events, self._receipt, ends)
        except Superseded as exc:
            self._leave_superseded(str(exc))
        try:  # the agent has taken us in
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
        """From here on it is entered, and goes on from what was found."""
        link = parts.saver.link
        self._entered = parts
        self._was_entered = True
        _LIVE.add(self)
        self.restored = Restored(found.tick.step, found.level, found.identity, found.source)
        self._stored = found.stored
        self._receipt.start_step = parts.steps.start
        self._receipt.restored_from = self.restored.source
        self._receipt.entry_s = time.monotonic() - began_s
        link.levels.begin()  # what entering took is not unsaved time
        link.enter(parts.steps.start + 1)
        self._update_receipt()
        if self.restored.identity is not None:
            self.events.emit("restored", self._receipt.restored_line(), **self._receipt.to_dict())
        if link.terms is not None and link.terms.rank == 0:
            advise_interval(self._policy, self._limits, self.events)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        parts = self._entered or self._parts  # no call where it is entered: Ctrl-C is heard in one
        if parts.saver.forked:  # all that there is to close belongs to the parent
            self._entered = None
            return
        failure: CkptError | None = None
        # sys.exit(0) in the loop is a way to end it. Leave has a code of its own.
        ends_normally = error is None or (isinstance(error, SystemExit) and not error.code)
        self._at_work = True  # to the end
        try:
            if ends_normally:
                failure = self._finish_normally()
            else:
                parts.saver.quiet()  # takes no snapshot: the state may be half a step old
                failure = parts.parting.finish_early(self._limits.exit_s)
        except Leave:
            raise
        except BaseException:  # Ctrl-C
            parts.saver.link.give_up()  # else the agent would wait for us to come back
            raise
        finally:
            try:
                end_all(parts.ends)
            except KeyboardInterrupt:  # between two of them, maybe, or before the first
                end_all(parts.ends)
                raise
        if failure is not None:
            if not ends_normally and error is not None:
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
            text = f"ckpt: {pending} optimizer updates and not one ended step: nothing of them is saved. "
            text += "Loop over ck.steps(...), or call ck.step() after each update"
            self.events.emit("step.none", text, loud=True)
        return parting.leave("normal", deadline)

    def _save_last(self, deadline: float) -> CkptError | None:
        """Until then, on the monotonic clock. Errors: Leave."""
        parts = self._parts
        link, steps, parting, tries = parts.saver.link, parts.steps, parts.parting, 0
        # The last boundary may have been saved, and the state have moved on since: an epoch is counted behind it.
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
            if link.superseded_by is not None:  # which cuts off what waits
                self._leave_superseded(link.superseded_by)
            if isinstance(failure, NotStaged) and tries < EXIT_TRIES:
                tries += 1
                tick = steps.next_tick()  # all ranks see that it was given up, or that others ask for a later one
            elif not isinstance(failure, AgentError):
                return parting.leave("normal", deadline) or parting.unsaved(tick, failure)
            elif link.is_given_up:
                break
            else:  # it is being started again; what it held is handed over
                parts.tasks.stopping.wait(ASK_AGAIN_S)
                if link.restarts != restarts:
                    tick = steps.next_tick()
        return failure

    def _leave_torn(self, why: str) -> CkptError | None:
        """As by an exception: takes no snapshot. The last step is lost, unless it was saved before that update."""
        parts = self._parts
        parts.saver.quiet()
        failure = parts.parting.finish_early(self._limits.exit_s)
        newest, steps = parts.saver.link.levels.newest("store"), parts.steps
        is_saved = self._stored and not steps.any_ended if newest is None else newest.step == steps.ended
        return failure or (None if is_saved else CommitFailed(why))

    # -- inside

    def _save_due(self) -> None:
        """The save of the step that has just ended, which the policy names, asked for by all ranks. Where it fails
        training goes on: an event says so, and the receipt counts it. Errors: Leave."""
        parts = self._parts
        parts.due.take()
        link, tick, receipt = parts.saver.link, parts.steps.tick, self._receipt
        began_s, missed, until_s = time.monotonic(), receipt.missed, None
        if self._limits.unsaved_s is not None:  # beyond that the block is left
            until_s = min(began_s + self._limits.exit_s, link.levels.committed_s + self._limits.unsaved_s)
        try:
            self._save_now("due", tick, {}, until_s)
        except (SaveFailed, AgentError) as exc:
            receipt.missed = max(receipt.missed, missed + 1)
            if link.superseded_by is not None:
                self._leave_superseded(link.superseded_by)
            self.events.emit("save.failed", f"ckpt: step {tick.step} was not saved: {exc}", loud=True)

    def _rehearse(self) -> None:
        """Saves step 1, so that there is a checkpoint from before the kill to compare, and the step of the kill, which
        comes here however quick the script is. Goes on where nobody kills."""
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
        """Asks for a slot together with all ranks, and takes the snapshot. Which tick holds the state, as for
        `Saver.save`. Errors: CkptError; Leave."""
        parts = self._parts
        link = parts.saver.link
        until_s = time.monotonic() + self._limits.exit_s if deadline is None else deadline
        why_not = parts.updates.find_torn()
        if why == "save" and not why_not:
            why_not = parts.updates.gradients.lost(tick.step) or parts.updates.find_swapped(tick.step)
        if why_not:
            link.cannot_save(tick, why_not)  # the others would wait for this rank
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
        """As `Saver.wait`, asked for by the user on the training thread."""
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
        saver = (self._entered or self._parts).saver  # as in `_end_step`
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
        """Of the other Checkpointers that this process is in."""
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
