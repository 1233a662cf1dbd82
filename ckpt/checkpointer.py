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

from ckpt.errors import CkptError, CommitFailed, Leave, Superseded, UsageError
from ckpt.events import Events, JsonLines, Sink
from ckpt.placement.placement import ONE_REPLICA, Parity, Replicas
from ckpt.policy.adaptive import Adaptive
from ckpt.policy.export_rule import Export
from ckpt.policy.save_options import Every, Keep, Limits
from ckpt.settings import Settings, read_settings
from ckpt.storage.names import redact_url
from ckpt.threads import Tasks, run_cleanups
from ckpt.trainer.link.export_plan import plan_export
from ckpt.trainer.link.levels import Level
from ckpt.trainer.link.options import UserOptions, advise_interval, check_metrics, find_init, find_url, make_options
from ckpt.trainer.loop import calling_framework, entry
from ckpt.trainer.loop.block import Block, leave_superseded
from ckpt.trainer.loop.loader_watch import LoaderWatch
from ckpt.trainer.loop.run_report import RunReport
from ckpt.trainer.loop.shutdown import Shutdown
from ckpt.trainer.loop.step_tracking import StepTracking
from ckpt.trainer.loop.steps import Steps, as_whole_number
from ckpt.trainer.state.state_nodes import check_state
from ckpt.types import Version

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

    def __init__(self, checkpointer: Checkpointer, version: Version) -> None:
        self._checkpointer = checkpointer
        self._levels = checkpointer._block.saver.link.levels
        self.version = version

    @property
    def step(self) -> int:
        return self.version.step

    @property
    def level(self) -> Level:
        """The furthest level that the checkpoint is known to have reached: "none", "local", "peer" or "store". After
        the block: the last one known in it."""
        return self._levels.level(self.version)

    def wait(self, level: Level = "store", timeout_s: float | None = None) -> None:
        """Waits until the checkpoint has reached `level`. timeout_s: in seconds; None: no limit. After the block it
        returns or raises at once, by what was last known in the block.
        Errors: SaveFailed if the checkpoint will not reach the level, or not in time; UsageError for an unknown level.
        """
        checkpointer = self._checkpointer
        if checkpointer._entered_block is None:
            self._levels.wait(self.version, level, timeout_s)
        elif threading.current_thread() is checkpointer._block.saver.training_thread:
            checkpointer._wait_for_level(self.version, level, timeout_s)
        else:
            checkpointer._block.saver.wait(self.version, level, timeout_s)

    def __repr__(self) -> str:
        return f"<ckpt.Handle step {self.version.step} level {self.level}>"


def _exclusive(
    method: Callable[Concatenate[Checkpointer, P], R],
) -> Callable[Concatenate[Checkpointer, P], R]:
    """Decorates a method that users call. Until the method returns no other one may be called, as by a signal handler
    or a sink."""

    @functools.wraps(method)
    def work(self: Checkpointer, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._check_use()
        self._is_busy = True
        # A plain `try`: before the body of a context manager Ctrl-C could come in between.
        try:
            return method(self, *args, **kwargs)
        finally:
            self._is_busy = False

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
    trainable_only: leave out the frozen parameters (requires_grad False) of modules that have trainable ones, as for
        PEFT. The script loads the frozen ones at each start, or init= names their file.
    take_over: begin even if another living job writes to the URL.
    notices: "auto" (the sources that CKPT_NOTICES allows: signals, the cloud, Slurm, a file) or "off" (only an
        operator's).
    sinks: functions that are called with every ckpt.Event.
    export: weights for other tools, written from committed checkpoints while training goes on (ckpt.Export).

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
        peers: Replicas | Parity | None = ONE_REPLICA,
        codec: str = "auto",
        mesh: Any = None,
        process_group: Any = None,
        init: str | os.PathLike[str] | None = None,
        limits: Limits | None = None,
        lazy: bool = True,
        strict: bool = True,
        generators: bool = True,
        trainable_only: bool = False,
        take_over: bool = False,
        notices: Literal["auto", "off"] = "auto",
        sinks: tuple[Sink, ...] = (),
        export: Export | None = None,
    ) -> None:
        check_state(state)
        if notices not in ("auto", "off"):
            raise UsageError(f'notices={notices!r}: "auto" or "off"')
        if not isinstance(sinks, tuple | list) or not all(map(callable, sinks)):
            raise UsageError(f"sinks={sinks!r}: a tuple of functions, such as (print,)")
        self._notices = notices
        self._limits = Limits() if limits is None else limits
        self.url = find_url(url, read_settings())
        self.restored = Restored()
        self.events = Events(*sinks)
        self._policy = Adaptive() if policy is None else policy
        self._options = UserOptions(
            url=self.url,
            state=state,
            options=make_options(self._policy, Keep() if keep is None else keep, self._limits, codec, peers)
            | {"export": plan_export(export, state)},
            mesh=mesh,
            process_group=process_group,
            init=find_init(init),
            lazy=lazy,
            strict=strict,
            generators=generators,
            take_over=take_over,
            export=export,
            trainable_only=trainable_only,
        )
        self._receipt = RunReport()
        self.events.add(self._receipt.told)
        self._entered_block: Block | None = None
        self._was_entered = False
        self._is_busy = False

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a Checkpointer cannot be copied or sent to another process: do not keep it in a loader's dataset, and do "
            "not pass it to a spawned process"
        )

    @property
    def state(self) -> dict[str, Any]:
        """The dict that is saved: the one that was given. Assign to its keys to change what is saved."""
        return self._options.state

    # -- the loop

    def steps(self, total: SupportsIndex) -> Iterator[int]:
        """Yields the step numbers 1, 2, ... `total`, or from the step after the restored one. Each round of the loop is
        one step, that is one optimizer update. In a zip it comes first: zip(ck.steps(n), loader). Errors: UsageError;
        those of `step`."""
        self._check_use()
        if (last := as_whole_number(total)) is None:
            raise UsageError(f"ck.steps({total!r}): a whole number of steps")
        yield from self._block.steps.iterate(last, self.step)

    @_exclusive
    def step(self, n: SupportsIndex | None = None) -> None:
        """Ends a step, in a loop that does its own counting. n: if given, it must be the last step + 1. Once an
        exception has left an optimizer.step(), nothing is saved any more.
        Errors: UsageError; Leave (a SystemExit) if the job has to leave; SaveFailed if no commit landed for
        Limits(unsaved_s=)."""
        if n is not None and as_whole_number(n) != (last := self._block.steps.last_ended) + 1:
            raise UsageError(
                f"ck.step({n!r}): the last ended step is {last}, so the next is {last + 1}; "
                "start counting from ck.restored.step + 1"
            )
        (self._entered_block or self._block).end_step()

    @_exclusive
    def poll(self) -> None:
        """Serves the agent at a point that all ranks pass in the same order but where no step ends, such as an
        evaluation batch. It takes the snapshot that is appointed there. It also waits for copies in the background, so
        that the state may be changed by hand afterwards.
        No snapshot is taken if an optimizer has stepped since the last step ended. Nor is one, if a loader is
        registered, in the body of a step of ck.steps() that has not ended. Errors: UsageError; Leave (a SystemExit) if
        the job has to leave."""
        self._block.poll()

    @_exclusive
    def fence(self) -> None:
        """Waits for copies in the background. Call it before you change parameters or optimizer state by hand (outside
        optimizer.step()) in the middle of a step. If no optimizer has ever stepped, a step of ck.steps() that a break
        leaves after the fence counts as ended, as after an update."""
        self._block.fence()

    @contextlib.contextmanager
    def swapped(self, average: Any, model: Any = None) -> Iterator[None]:
        """A context in which the model's weights are those of an average (EMA, SWA), for an evaluation. Nothing is
        saved in it, and afterwards the weights are bit for bit what they were. It copies the weights meanwhile.

        average: a module (also torch's AveragedModel), an object with `shadow_params` (diffusers, torch_ema), or a dict
        of tensors by name. model: the module to change (default: the one of the state that the average fits).
        Errors: UsageError; in the context also from `step` and `save`."""
        self._check_use()
        with self._block.swapped(average, model):
            yield

    @_exclusive
    def save(self, metrics: dict[str, float] | None = None) -> Handle:
        """Saves the last ended step now, and returns a handle. All ranks call it at the same step. It waits for a free
        slot. metrics: numbers that are kept with the checkpoint (for Keep(best=)). A failed save raises where its
        handle is waited for, not here.

        Errors: UsageError after an update that no step has ended. UsageError too, if a loader is registered, in the
        body of a step of ck.steps() that has not ended: a restore would skip the batch that was drawn for that step."""
        return Handle(self, self._block.save(check_metrics(metrics, self.events)))

    @_exclusive
    def wait(self, level: Level = "store", timeout_s: float | None = None) -> None:
        """Waits until the newest snapshot that this rank took has reached `level`; returns at once if there is none.
        Errors: SaveFailed; UsageError for an unknown level."""
        saver = self._block.saver
        if saver.newest_taken is not None:
            saver.wait(saver.newest_taken, level, timeout_s)

    @property
    def receipt(self) -> dict[str, Any]:
        """The figures of this run so far. They are also logged in one line at the end."""
        self._update_receipt()
        return self._receipt.to_dict()

    # -- entering and leaving

    def __enter__(self) -> Self:
        self._check_entry()
        settings, began_s = read_settings(), time.monotonic()
        if self._notices == "off":
            settings = replace(settings, notices="off")
        last, ends = contextlib.ExitStack(), list[Callable[[], object]]()
        try:
            self._enter_job(settings, last, ends, began_s)
        except BaseException as exc:
            run_cleanups([last.close, *ends] if self._entered_block is None else self._entered_block.cleanups)
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
        if self._entered_block is not None:
            raise UsageError("this Checkpointer is entered already; make one for each `with`")
        if self._was_entered:
            raise UsageError("this Checkpointer was entered before; make one for each `with`, with objects made anew")
        if any(other.url == self.url and other._entered_block is not None for other in _ENTERED_CHECKPOINTERS):
            raise UsageError(
                f"this process has a Checkpointer on {redact_url(self.url)} already: put all of the state into one, "
                "or give "
                "each a URL of its own"
            )

    def _enter_job(
        self, settings: Settings, last: contextlib.ExitStack, ends: list[Callable[[], object]], began_s: float
    ) -> None:
        """Enters the job. `last`: closed after everything else. `ends`: gets the function that ends each part, before
        that part begins: Ctrl-C may come in between."""
        lines = self._add_events_file(settings.events, last)
        tasks = Tasks("trainer", pool_size=4)
        ends.append(tasks.close)
        watch = LoaderWatch(self.state, self.events)
        try:
            job = entry.JobEntry(self._options, settings, tasks, self.events, self._receipt, ends)
            saver, found = job.saver, job.enter()
        except Superseded as exc:
            leave_superseded(self.url, str(exc), self.events)
        # From here on this rank is a member of the job.
        try:
            updates = StepTracking(self.state, lambda: saver.walk, self.events)
            ends.append(updates.close)
            updates.install_hooks(found.version.step)
            is_told = saver.link.terms is not None and saver.link.terms.rank == 0
            watch.begin_watch(is_told)
            if is_told:
                calling_framework.report_unsaved(self.state, self.events)
            shutdown = Shutdown(saver.link, tasks, self.events, settings)
            fail_all = functools.partial(saver.link.levels.fail_all, "the block was left before that was known")
            ends = [shutdown.close, last.close, fail_all, *ends, shutdown.end_threads, self._mark_exited]
            if lines is not None and (terms := saver.link.terms) is not None:
                lines.add_entries(rank=terms.rank, epoch=terms.epoch, launch=terms.launch)
            is_rehearsal = settings.redirect is not None and self.url == settings.redirect[1]
            block = Block(
                self.url,
                self._limits,
                self.events,
                tasks,
                saver,
                updates,
                Steps(found.version.step, saver, updates, watch, self.events),
                shutdown,
                is_restored_in_store=found.is_stored,
                save_every=self._policy.steps if isinstance(self._policy, Every) else None,
                rehearsal_steps=(1, settings.hold_at_step) if is_rehearsal else (),
                others=self._other_blocks,
                cleanups=ends,
            )
            self._mark_entered(block, found, began_s)
            last.callback(lambda: self.events.emit("receipt", self._receipt.line(), **self._receipt.to_dict()))
            shutdown.start_listening()
        except BaseException:
            saver.link.give_up()
            raise

    def _mark_entered(self, block: Block, found: entry.RestoreResult, began_s: float) -> None:
        """Marks this object as entered, and records what was restored."""
        link = block.saver.link
        self._entered_block = block
        self._was_entered = True
        _ENTERED_CHECKPOINTERS.add(self)
        self.restored = Restored(found.version.step, found.level, found.identity, found.source)
        self._receipt.start_step = block.steps.start_step
        self._receipt.restored_from = self.restored.source
        self._receipt.entry_s = time.monotonic() - began_s
        # The time that entering took does not count as unsaved.
        link.levels.begin()
        link.view.enter(block.steps.start_step + 1)
        self._update_receipt()
        if self.restored.identity is not None:
            self.events.emit("restored", self._receipt.restored_line(), **self._receipt.to_dict())
        if link.terms is not None and link.terms.rank == 0:
            advise_interval(self._policy, self._limits, self.events)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # `self._block` is a call, in which Ctrl-C could be raised.
        block = self._entered_block or self._block
        # In a forked child all resources belong to the parent.
        if block.saver.is_forked:
            self._entered_block = None
            return
        failure: CkptError | None = None
        # sys.exit(0) in the loop is a normal end. Leave has another code.
        ends_normally = error is None or (isinstance(error, SystemExit) and not error.code)
        # Stays set: from here on users call nothing any more.
        self._is_busy = True
        try:
            failure = block.finish() if ends_normally else block.finish_early()
        except Leave:
            raise
        except BaseException:
            # Ctrl-C. Else the agent would wait for this rank to come back.
            block.saver.link.give_up()
            raise
        finally:
            try:
                run_cleanups(block.cleanups)
            except KeyboardInterrupt:
                # It may have come before the first call or between two: the rest is still in the list.
                run_cleanups(block.cleanups)
                raise
        if failure is not None:
            if not ends_normally and error is not None:
                error.add_note(f"ckpt: {failure}")
            else:
                raise CommitFailed(str(failure)) from failure

    def _add_events_file(self, path: Path | None, closing: contextlib.ExitStack) -> JsonLines | None:
        """Adds a sink for the file that CKPT_EVENTS names, until `closing` is closed. The agent writes its own events
        there."""
        if path is None:
            return None
        about = {"by": "trainer", "url": redact_url(self.url), "host": socket.gethostname(), "pid": os.getpid()}
        lines = JsonLines(path, about)
        closing.callback(lines.close)
        self.events.add(lines)
        closing.callback(self.events.remove, lines)
        return lines

    @_exclusive
    def _wait_for_level(self, version: Version, level: Level, timeout_s: float | None) -> None:
        """`Saver.wait`, called by the user on the training thread."""
        self._block.saver.wait(version, level, timeout_s)

    @property
    def _block(self) -> Block:
        if self._entered_block is None:
            raise UsageError("used outside the `with ckpt.Checkpointer(...)` block")
        return self._entered_block

    def _check_use(self) -> None:
        # `self._block` is a call, which each step would pay for.
        saver = (self._entered_block or self._block).saver
        if saver.is_forked:
            raise UsageError(
                "a Checkpointer belongs to the process that entered it, not to a forked child: leave saving to the "
                "parent, or construct another one in the child, with a URL of its own"
            )
        if threading.current_thread() is not saver.training_thread:
            raise UsageError("a Checkpointer is used by the thread that entered it")
        if self._is_busy or saver.snapshotter.is_ending_copy:
            raise UsageError(
                "called by a signal's handler or a sink while ckpt is at work: set a flag there, and call it in a step"
            )

    def _other_blocks(self) -> list[Block]:
        """The blocks of the other Checkpointers that this process has entered."""
        blocks = (each._entered_block for each in _ENTERED_CHECKPOINTERS if each is not self)
        return [block for block in blocks if block is not None]

    def _mark_exited(self) -> None:
        try:
            self._update_receipt()
        finally:
            self._entered_block = None
            _ENTERED_CHECKPOINTERS.discard(self)

    def _update_receipt(self) -> None:
        if self._entered_block is not None:
            saver = self._entered_block.saver
            self._receipt.end_step = self._entered_block.steps.last_ended
            newest = saver.link.levels.newest("store")
            self._receipt.committed_step = newest.step if newest else self._receipt.committed_step
            saver.fill_report(self._receipt)


_ENTERED_CHECKPOINTERS: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _abandon_in_child() -> None:
    for checkpointer in list(_ENTERED_CHECKPOINTERS):
        if checkpointer._entered_block is not None:
            checkpointer._entered_block.saver.abandon_in_child()


os.register_at_fork(after_in_child=_abandon_in_child)
