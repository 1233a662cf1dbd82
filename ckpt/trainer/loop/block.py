"""The block of one rank, from its entry to its end: it ends steps, saves, and decides how the block is left.

The agent decides which version is saved. All methods are for the training thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ckpt.errors import AgentError, CkptError, CommitFailed, Leave, NotStaged, SaveFailed, Superseded, UsageError
from ckpt.events import Events
from ckpt.policy.save_options import Limits
from ckpt.storage.names import redact_url
from ckpt.threads import Tasks
from ckpt.trainer.loop.saver import Saver
from ckpt.trainer.loop.shutdown import Shutdown
from ckpt.trainer.loop.step_tracking import StepTracking
from ckpt.trainer.loop.steps import Appointments, Steps
from ckpt.trainer.loop.swapped_weights import find_pairs, swap
from ckpt.trainer.state.state_nodes import ModuleNode
from ckpt.types import Version

# EX_TEMPFAIL: this process did nothing wrong, but a newer start has taken its place.
SUPERSEDED_EXIT_CODE = 75
RETRY_INTERVAL_S = 0.2
REHEARSAL_WAIT_S = 600.0  # how long a rehearsed process waits to be killed
EXIT_RETRIES = 3  # further attempts at the exit, after a snapshot of the last step was given up


@dataclass(slots=True)
class Block:
    """Owns the parts that exist in the block. `is_restored_in_store`: whether the restored checkpoint is in the store.
    `save_every`: the N of `ckpt.Every(steps=N)`; None: no step is due by itself. `rehearsal_steps`: for
    `ckpt rehearse`, the steps to save; at the last one the process waits to be killed. `others()`: the blocks of the
    other Checkpointers of this process. `cleanups`: one function for each part that was begun, in that order: it ends
    that part."""

    url: str
    limits: Limits
    events: Events
    tasks: Tasks
    saver: Saver
    step_tracking: StepTracking
    steps: Steps
    shutdown: Shutdown
    is_restored_in_store: bool
    save_every: int | None
    rehearsal_steps: tuple[int, ...]
    others: Callable[[], list[Block]]
    cleanups: list[Callable[[], object]]
    appointments: Appointments = field(init=False)
    _is_due: bool = False  # a step that is due has ended, and its save was not asked for yet

    def __post_init__(self) -> None:
        self.appointments = Appointments(self.steps, self.saver, self.step_tracking, self.shutdown)
        self.shutdown.save_again = self._save_again

    # -- the loop: what the methods of Checkpointer promise

    def end_step(self) -> None:
        tracking, saver = self.step_tracking, self.saver
        if tracking.is_swapped:
            raise UsageError("a step ends inside ck.swapped(), where nothing is saved: leave the context before")
        link, step = saver.link, self.steps.end_step()
        saver.note_boundary(step)
        link.view.enter(step + 1)
        self.appointments.serve_due()
        if tracking.is_torn:
            tracking.report_torn()
        unregistered = tracking.unregistered
        if unregistered.foreign is not None:
            unregistered.report_foreign([each.step_tracking.counted for each in (self, *self.others())])
        if unregistered.due_by_role:
            self._report_unregistered()
        if step in self.rehearsal_steps:
            self._rehearse()
        if link.superseded_by is not None:
            self._check_superseded()
        if self.save_every is not None and step % self.save_every == 0:
            self._is_due = True
        # If nothing may be saved at this boundary, the save happens at the next one.
        if self._is_due and not tracking.report_waiting_gradients(step):
            self._save_due()
        unsaved_s = self.limits.unsaved_s
        if unsaved_s is not None and time.monotonic() - link.levels.committed_s > unsaved_s:
            raise SaveFailed(
                f"nothing reached the store for {unsaved_s:g} s (ckpt.Limits(unsaved_s=)): the store does not "
                f"answer, or one commit takes longer than that; run `ckpt doctor {redact_url(self.url)}`"
            )

    def poll(self) -> None:
        self.saver.snapshotter.poll()
        self.steps.begin_version()
        self.step_tracking.note_poll()
        self.appointments.serve_due()
        self._check_superseded()

    def fence(self) -> None:
        self.saver.snapshotter.fence()
        self.step_tracking.is_fenced = True

    @contextlib.contextmanager
    def swapped(self, average: Any, model: Any) -> Iterator[None]:
        saver, tracking = self.saver, self.step_tracking
        if tracking.is_swapped:
            raise UsageError("ck.swapped() inside ck.swapped(): leave the first one before")
        held = [node.value for node in saver.walk.scan.nodes if isinstance(node, ModuleNode)]
        module, pairs = find_pairs(average, held if model is None else [model])
        saver.snapshotter.fence()
        tracking.is_swapped = True
        try:
            with swap(module, pairs):
                yield
        finally:
            tracking.is_swapped = False

    # -- saves

    def save(self, metrics: dict[str, float]) -> Version:
        """Returns the version. A failure is recorded for that version."""
        steps, tracking = self.steps, self.step_tracking
        if tracking.is_swapped:
            raise UsageError("ck.save() inside ck.swapped(), where nothing is saved: leave the context before")
        if tracking.pending_updates:
            raise UsageError(
                "ck.save() after an optimizer update that no step has ended: call ck.step() first, so that the "
                f"checkpoint is of step {steps.last_ended + 1} and not of half of it"
            )
        if steps.may_have_drawn_batch:
            raise UsageError(
                f"ck.save() in step {steps.last_ended + 1}, which has not ended. A batch may have been drawn for that "
                "step, and a restart would skip it: call ck.step() first, at the end of the step's body. After a loop "
                "that ended with its loader, ck.step() would count one step too many: call ck.step() and ck.save() in "
                "the loop's body"
            )
        version = steps.begin_version()
        tracking.note_poll()
        try:
            self._save_now("save", version, metrics)
        except (SaveFailed, AgentError) as exc:
            self.saver.link.levels.record(version, "local", False, str(exc))
            self._report_failed(version, exc)
        return version

    def _save_due(self) -> None:
        """Saves the step that has just ended, because the policy names it; all ranks do. If the save fails, training
        goes on: an event reports the failure, and the receipt counts it. The next save is that of a later step. Errors:
        Leave."""
        self._is_due = False
        version, receipt = self.steps.version, self.saver.receipt
        began_s, missed, until_s = time.monotonic(), receipt.missed_snapshots, None
        # After unsaved_s without a commit the block is left anyway.
        if self.limits.unsaved_s is not None:
            committed_s = self.saver.link.levels.committed_s
            until_s = min(began_s + self.limits.exit_s, committed_s + self.limits.unsaved_s)
        try:
            self._save_now("due", version, {}, until_s)
        except (SaveFailed, AgentError) as exc:
            receipt.missed_snapshots = max(receipt.missed_snapshots, missed + 1)
            self._report_failed(version, exc)

    def _rehearse(self) -> None:
        """Saves a step of a rehearsal. At the last one it waits for the kill, so that the script does not run past it.
        Training goes on if no kill comes."""
        version = self.steps.begin_version()
        try:
            self._save_now("save", version, {})
            self.saver.wait(version, "store", self.limits.exit_s)
        except (SaveFailed, AgentError) as exc:
            self._report_failed(version, exc)
        else:
            if version.step == self.rehearsal_steps[-1]:
                self.tasks.stopping.wait(REHEARSAL_WAIT_S)

    def _save_now(
        self, why: str, version: Version, metrics: dict[str, float], deadline: float | None = None
    ) -> Version:
        """Asks for a slot together with all ranks, and takes the snapshot. Returns the version that holds the state, as
        `Saver.save` does. Errors: CkptError; Leave."""
        link, tracking = self.saver.link, self.step_tracking
        until_s = time.monotonic() + self.limits.exit_s if deadline is None else deadline
        why_not = tracking.report_torn()
        if why == "save" and not why_not:
            why_not = tracking.gradients.waiting_reason(version.step) or tracking.report_swapped_weights(version.step)
        if why_not:
            # Else the other ranks would wait for this one.
            link.report_unsavable(version, why_not)
            raise SaveFailed(why_not)
        try:
            held = self.saver.save(why, version, metrics, until_s)
        except Superseded as exc:
            leave_superseded(self.url, link.superseded_by or str(exc), self.events)
        if tracking.unregistered.due_by_role:
            self._report_unregistered()
        return held

    def _report_failed(self, version: Version, error: CkptError) -> None:
        """Reports a save that has failed, while training goes on. Errors: Leave, if a newer start is why."""
        self._check_superseded()
        self.events.emit("save.failed", f"ckpt: step {version.step} was not saved: {error}", loud=True)

    def _report_unregistered(self) -> None:
        if self.saver.offered.checked_step == self.steps.last_ended:
            walks = [self.saver.walk, *(each.saver.walk for each in self.others())]
            self.step_tracking.unregistered.report_unsaved(walks)

    # -- the end

    def finish(self) -> CkptError | None:
        """Saves the last step unless it is saved, and waits for its commit. Returns the failure, if any. Errors: Leave.

        A step that was restored from memory and is not in the store is saved too: no other process may be left to
        commit it."""
        shutdown, steps = self.shutdown, self.steps
        try:
            if torn := self.step_tracking.report_torn():
                return self._leave_torn(torn)
            if steps.leave_loop():
                self.end_step()
            deadline, pending = shutdown.begin_exit(self.limits.exit_s), self.step_tracking.pending_updates
            trained = steps.has_ended_step or self.saver.newest_taken is not None
            steps.report_none()
            if not pending and (trained or not self.is_restored_in_store):
                return self._save_last(deadline)
        except Leave:
            shutdown.finish_early(self.limits.exit_s)
            raise
        if pending:
            text = f"ckpt: {pending} optimizer updates, but not one ended step: none of them is saved. "
            text += "Loop over ck.steps(...), or call ck.step() after each update"
            self.events.emit("step.none", text, loud=True)
        return shutdown.leave("normal", deadline)

    def finish_early(self) -> CkptError | None:
        """Takes no snapshot, since half a step may be in the state, and lets what is under way finish. Returns the
        failure, if any."""
        self.saver.wait_for_copies()
        return self.shutdown.finish_early(self.limits.exit_s)

    def _save_last(self, deadline: float) -> CkptError | None:
        """Saves the last step. `deadline`: on the monotonic clock. Returns the failure, if any. Errors: Leave."""
        saver, steps, shutdown, tries = self.saver, self.steps, self.shutdown, 0
        # The state may have changed since that version was saved, for example by an epoch counter behind the loop.
        is_used = steps.version in (saver.requested_version, saver.newest_taken)
        version = steps.begin_version() if steps.sub or is_used else steps.version
        failure: CkptError = CommitFailed("no attempt was made")
        if lost := self.step_tracking.gradients.waiting_reason(version.step):
            text = f"ckpt: the last step is saved without its gradients: {lost}"
            self.events.emit("gradients.waiting", text, loud=True)
        while time.monotonic() < deadline:
            agent = saver.link.agent
            restarts = agent.restarts
            try:
                held = self._save_now("exit", version, {}, deadline)
                saver.wait(held, "store", max(0.0, deadline - time.monotonic()), "exit")
                return shutdown.leave("normal", deadline)
            except CkptError as exc:
                failure = exc
            # Being superseded ends the wait above, too.
            self._check_superseded()
            if isinstance(failure, NotStaged) and tries < EXIT_RETRIES:
                tries += 1
                # All ranks see that the snapshot was given up, or that others ask for a later version.
                version = steps.begin_version()
            elif not isinstance(failure, AgentError):
                return shutdown.leave("normal", deadline) or shutdown.unsaved_error(version, failure)
            elif agent.is_given_up:
                break
            else:
                # The agent is being started again, and the arenas are handed over to it.
                self.tasks.stopping.wait(RETRY_INTERVAL_S)
                if agent.restarts != restarts:
                    version = steps.begin_version()
        return failure

    def _save_again(self, until_s: float) -> None:
        """Saves the last step anew: the ranks leave, and the agent that had its snapshot is dead. `until_s`: on the
        monotonic clock. A failure shows in what the next agent says of the store."""
        with contextlib.suppress(CkptError):
            self._save_now("exit", self.steps.begin_version(), {}, until_s)
            self.saver.wait_for_copies(max(1.0, until_s - time.monotonic()))

    def _leave_torn(self, why: str) -> CkptError | None:
        """Leaves without a snapshot, as after an exception: half an update may be in the state. Returns the failure, if
        any: CommitFailed if the last step was not saved before that update."""
        failure, newest = self.finish_early(), self.saver.link.levels.newest("store")
        is_saved = (
            self.is_restored_in_store and not self.steps.has_ended_step
            if newest is None
            else newest.step == self.steps.last_ended
        )
        return failure or (None if is_saved else CommitFailed(why))

    def _check_superseded(self) -> None:
        if (by := self.saver.link.superseded_by) is not None:
            leave_superseded(self.url, by, self.events)


def leave_superseded(url: str, by: str, events: Events) -> NoReturn:
    """Leaves, since a newer start of the run has replaced this one. Errors: Leave."""
    text = (
        f"ckpt: a newer start owns {redact_url(url)} now ({by}); this job leaves and saves nothing more. "
        "Jobs that are to run beside each other need a URL each"
    )
    events.emit("superseded", text, loud=True)
    raise Leave(SUPERSEDED_EXIT_CODE)
