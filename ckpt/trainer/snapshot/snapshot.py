"""The snapshots of one rank: which tensors are copied at the boundary, and which during the next step.

Guarantees:
- A snapshot that is done and not abandoned has the bytes that the tensors held when `take` was called.
- A tensor is copied after `take` has returned only if that is proven safe (deferred_copy.py). The next optimizer step
  then waits for the copy. When the copy is over (on a device, when that wait ends), the tensors and the arena are
  checked for changes. Only then is the snapshot done; a change abandons it. docs/guides/loops.md says what this check
  can miss.
- A failed copy fails no training: the snapshot is abandoned, with an event.
- Every snapshot is done at last, however the wait for it ends. One whose wait is ended by Ctrl-C is abandoned, once
  nothing writes into the arena any more.

The training thread calls `take`, `note_boundary`, `poll` and `fence`. The slot was bound before, maybe on another
thread (bindings.py). To wait for a snapshot, call `Snapshot.wait`; on the training thread it includes a `poll`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from enum import Enum, auto
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ckpt.errors import CkptError, UsageError, is_injected
from ckpt.events import Events
from ckpt.threads import Tasks
from ckpt.trainer.snapshot.bindings import Binding, Bindings, ordinary_mode
from ckpt.trainer.snapshot.cpu_copier import Copier
from ckpt.trainer.snapshot.deferred_copy import DeferredTrust, Key, owns_any_storage
from ckpt.trainer.snapshot.pending_copy import PendingCopy, PendingRead, Snapshot
from ckpt.trainer.state.names import shorten_names
from ckpt.trainer.state.pieces import is_cuda_used

CHECK_INTERVAL_S, CHECK_INTERVAL_S_MAX = 0.001, 0.05  # between two checks whether the training thread has gone on


class Cause(Enum):
    """What ended the wait for a deferred copy."""

    UPDATE = auto()  # an optimizer that owns a late tensor is about to step, or the user to change things by hand
    POLL = auto()  # nothing is about to change; proves nothing
    BOUNDARY = auto()  # a step ended, and none of the above happened in it


class Snapshotter:
    """Takes the snapshots of one rank, one at a time. Owns the copier, its own threads, and one optimizer hook.
    `lazy=False`: everything is copied at the boundary. `close` ends what still runs, in order. `trust`: what this run
    has proven, and disproven, of deferred copies."""

    def __init__(self, copier: Copier, lazy: bool, events: Events) -> None:
        self._copier = copier
        self._events = events
        self.trust = DeferredTrust(events, lazy)
        self.bindings = Bindings(copier, self.trust, events)
        self._pending_copy: PendingCopy | None = None
        self._pending_read: PendingRead | None = None  # checked, but a device may still read the tensors
        self._snapshot_count = 0
        self._training_thread = 0
        # The hook may run on a thread of autograd.
        self._copy_lock = threading.RLock()
        self._tasks = Tasks("snapshot", pool_size=1)
        self._hook = register_optimizer_step_pre_hook(self._on_step) if lazy else None

    def take(self, slot: int) -> Snapshot:
        """Takes a snapshot of the walk that is bound to `slot`, at a boundary. A copy that still runs is ended first.
        Errors: UsageError if nothing is bound to the slot."""
        self.note_boundary()
        started_s = time.perf_counter()
        binding = self.bindings.get(slot)
        if binding is None:
            raise UsageError(f"nothing is bound to slot {slot}: bind the present walk to it before a snapshot")
        self._training_thread = threading.get_ident()
        snapshot = Snapshot(slot, self._end_copy_for_waiter)
        try:
            with self._copy_lock, ordinary_mode():
                self._start_copy(binding, snapshot, started_s)
        except BaseException as exc:
            begun, self._pending_copy = self._pending_copy, None
            if is_injected(exc):
                self._abandon_after_writes(snapshot, begun, "interrupted")
                # The caller gets no snapshot, so it could not ask later when the slot may be used again.
                snapshot.done.result()
                raise
            # Any error of torch. Training has not failed: the snapshot is abandoned, and returned.
            self._fail_snapshot(snapshot, exc, begun)
        return snapshot

    def note_boundary(self) -> None:
        """A step has ended. Cheap if no copy is pending."""
        if self._pending_copy is not None:
            self._end_copy(Cause.BOUNDARY)

    def fence(self) -> None:
        """Returns when tensors may be changed by hand. It counts as an optimizer step that announces itself."""
        if self._is_copy_pending():
            self._end_copy(Cause.UPDATE)

    def poll(self) -> None:
        """Ends a copy that still runs, between steps or in the middle of one. Unlike `fence` it proves nothing."""
        if self._is_copy_pending():
            self._end_copy(Cause.POLL)

    def is_unchanged(self, slot: int) -> bool:
        """Whether the tensors that are bound to that slot have the same bytes as its arena. No copy may be running."""
        binding = self.bindings.get(slot)
        with self._copy_lock, ordinary_mode():
            return binding is not None and not self._copier.start_comparison(binding.pieces)()

    @property
    def is_ending_copy(self) -> bool:
        """Whether this thread is in the middle of ending a copy: the caller is a signal handler or an event sink."""
        pending = self._pending_copy
        return pending is not None and pending.checking_thread == threading.get_ident()

    def close(self) -> None:
        """Ends what still runs, removes the hook, and drops all views. Each part is done, also if Ctrl-C ends a wait in
        another. A second call does nothing."""
        with ExitStack() as ends:
            ends.callback(self._copier.close)
            ends.callback(self.bindings.close)
            ends.callback(self._tasks.close)
            if self._hook is not None:
                ends.callback(self._hook.remove)
            ends.callback(self._end_tasks)
            self.poll()

    def abandon_in_child(self) -> None:
        """In a forked child: no optimizer there waits for a copy."""
        if self._hook is not None:
            self._hook.remove()

    def _end_tasks(self) -> None:
        """Waits for all begun tasks: other threads wait for the snapshots that these abandon."""
        if not self._tasks.stopping.is_set():
            # The one thread runs this task after all others, which may wait for a device.
            self._tasks.submit(lambda: None).result()

    # -- taking

    def _start_copy(self, binding: Binding, snapshot: Snapshot, started_s: float) -> None:
        if binding.last_done is not None:
            # The plan's buffers are used again now.
            binding.last_done.result()
        binding.last_done = snapshot.done
        plan = binding.plan()
        if plan.watch is not None:
            plan.watch.remember(self._snapshot_count)
        pending = PendingCopy(snapshot, plan, plan.eager_job.start_eager())
        if plan.watch is not None:
            # Set before a deferred copy starts, so that Ctrl-C finds the copy to wait for.
            self._pending_copy = pending
        if plan.deferred_keys:
            pending.deferred_ticket = plan.deferred_job.start_deferred()
        self._snapshot_count += 1
        snapshot.is_deferred = pending.deferred_ticket is not None
        snapshot.stall_s += time.perf_counter() - started_s
        if pending.deferred_ticket is None:
            self._run_when_copied(pending, lambda: self._finish_snapshot(pending))

    # -- the end of a deferred copy, and the proof

    def _end_copy_on_waiter(self, pending: PendingCopy) -> None:
        """Ends a deferred copy on the thread of a waiter. So the snapshot is done, and other nodes can have it, once it
        is copied, not only when the next optimizer steps. A damaged copy is left to the training thread, which sees the
        damage when its own wait ends. So is a copy throughout which that thread stays in one operation. This operation
        may be a write that neither moves a version counter, nor reaches a canary, before it is over."""
        watch = pending.plan.watch
        assert watch is not None
        assert pending.deferred_ticket is not None
        with suppress(Exception):
            pending.deferred_ticket.wait()
            with ordinary_mode():
                torn = watch.find_torn()
            # Otherwise the training thread helped to copy, and may not have finished.
            if pending.checking_thread is None:
                # So the training thread need not check this while it pauses.
                pending.torn_keys = torn
            before, delay_s = self._training_position(), CHECK_INTERVAL_S
            while before is not None and self._training_position() == before:
                with suppress(TimeoutError):
                    pending.snapshot.done.result(delay_s)
                    return
                delay_s = min(2 * delay_s, CHECK_INTERVAL_S_MAX)
            with self._copy_lock, ordinary_mode():
                is_sure = before is not None and self._pending_copy is pending and not torn
                if is_sure and not watch.start_comparison()():
                    self._finish_snapshot(pending)
                    if not pending.plan.unproven_pieces:
                        # No step has to wait for this snapshot.
                        self._pending_copy = None

    def _training_position(self) -> tuple[int, int] | None:
        """The instruction that the training thread is at. Once it is at another one, every operation of before is over.
        None if it runs no Python."""
        frame = sys._current_frames().get(self._training_thread)
        return (id(frame), frame.f_lasti) if frame is not None else None

    def _is_copy_pending(self) -> bool:
        return self._pending_copy is not None or self._pending_read is not None

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Comes before every step of any optimizer. A step that is captured in a graph, or traced by the compiler, is
        none."""
        if torch.compiler.is_compiling() or not self._is_copy_pending() or _is_capturing():
            return
        pending, reading = self._pending_copy, self._pending_read
        known = pending.plan.storages if pending is not None else reading.storages if reading is not None else None
        if known is not None and owns_any_storage(optimizer, known):
            self._end_copy(Cause.UPDATE)

    def _end_copy_for_waiter(self, snapshot: Snapshot) -> None:
        pending = self._pending_copy
        if pending is None or pending.snapshot is not snapshot or pending.deferred_ticket is None:
            return
        if threading.get_ident() == self._training_thread:
            self.poll()
        elif self._copier.is_blocking:
            self._end_copy_on_waiter(pending)

    def _end_copy(self, cause: Cause) -> None:
        with self._copy_lock, ordinary_mode():
            pending, reading = self._pending_copy, self._pending_read
            if pending is None:
                # Another optimizer was first, maybe on another stream: the current streams wait for its reads, too.
                if reading is not None and reading.judged_future.done():
                    self._pending_read = None
                elif reading is not None:
                    reading.barrier()
                return
            if pending.checking_thread is not None:
                # A signal handler in the middle of the check. The check sees what the handler changes, if that matters.
                return
            pending.checking_thread = threading.get_ident()
            try:
                judged = self._start_checks(pending, cause)
                if judged is not None:
                    self._pending_read = PendingRead(self._copier.barrier(), judged, pending.plan.storages)
            except BaseException as exc:  # as in `take`
                if is_injected(exc):
                    self._abandon_after_writes(pending.snapshot, pending, "interrupted")
                    raise
                if pending.deferred_ticket is not None:
                    self._fail_snapshot(pending.snapshot, exc, pending)
                else:
                    # The eager copy ends by itself; only its comparison has failed.
                    self.trust.turn_off(f"the comparison failed: {exc}")
            finally:
                # Kept until here, so that optimizers on other threads wait for this copy, too.
                if self._pending_copy is pending:
                    self._pending_copy = None

    def _start_checks(self, pending: PendingCopy, cause: Cause) -> Future[None] | None:
        """Starts all checks, on the training thread. If a device works on them, the outcome comes later. Then this
        returns a future that is resolved once the outcome was judged; else None."""
        started_s = time.perf_counter()
        plan = pending.plan
        watch = plan.watch
        assert watch is not None
        if pending.deferred_ticket is not None:
            try:
                pending.deferred_ticket.fence()
            except CkptError as exc:
                # A storage was freed during the copy. It may be back by now, so the tensor cannot be named.
                self.trust.turn_off(f"a deferred copy failed: {exc}. Call ck.fence() before a storage is freed")
                raise
        asked = [watch.start_comparison()]
        if cause is Cause.UPDATE:
            asked.append(watch.compare_pieces(plan.unproven_pieces))
        pending.snapshot.stall_s += time.perf_counter() - started_s

        def judge() -> None:
            began_s = time.perf_counter()
            changed = set().union(*(answer() for answer in asked))
            torn: set[Key] = set()
            if pending.deferred_ticket is not None and not pending.snapshot.done.done():
                pending.wait_for_writes()
                torn = watch.find_torn() if pending.torn_keys is None else pending.torn_keys
            # Training pauses for this only if the copier blocks.
            if self._copier.is_blocking:
                pending.snapshot.stall_s += time.perf_counter() - began_s
            self._judge_checks(pending, cause, changed, torn)

        return self._run_when_copied(pending, judge)

    def _judge_checks(self, pending: PendingCopy, cause: Cause, changed: set[Key], torn: set[Key]) -> None:
        """Draws the conclusions. `changed`: tensors that differ now from the boundary. `torn`: tensors whose bytes in
        the arena differ from the boundary, whatever the tensor holds now."""
        plan = pending.plan
        if cause is Cause.BOUNDARY and changed:
            names = ", ".join(sorted({key[0] for key in changed})[:3])
            self.trust.turn_off(f"{names} changed in a step in which no optimizer announced itself")
        elif changed or torn:
            self.trust.distrust(changed | torn)
        if cause is Cause.UPDATE:
            self.trust.add_proofs(plan.unproven_keys - changed)
        if self.trust.version != plan.version:
            with suppress(CkptError):  # already closed
                self._tasks.submit(self.bindings.replan_all)
        if pending.deferred_ticket is None or pending.snapshot.done.done():
            return
        if lost := sorted({key[0] for key in (changed | torn) & plan.deferred_keys}):
            self._abandon(pending.snapshot, f"{shorten_names(lost)} changed while the copy was under way")
        else:
            self._finish_snapshot(pending)

    def _run_when_copied(self, pending: PendingCopy, then: Callable[[], None]) -> Future[None] | None:
        """Runs `then` now; if a device may still be at work, on a thread of ours, and returns its future."""

        def guarded() -> None:
            try:
                with self._copier.background_context(pending.plan.devices), ordinary_mode():
                    then()
            except BaseException as exc:  # as in `take`
                if is_injected(exc):
                    raise
                self._fail_snapshot(pending.snapshot, exc)

        if not self._copier.is_blocking:
            return self._tasks.submit(guarded)
        guarded()
        return None

    def _finish_snapshot(self, pending: PendingCopy) -> None:
        snapshot = pending.snapshot
        pending.wait_for_writes()
        # A device is kept from work while the host enqueues, or longer.
        snapshot.stall_s = max(snapshot.stall_s, sum(ticket.stall_s() for ticket in pending.tickets))
        if not snapshot.done.done():
            snapshot.done.set_result(None)

    def _fail_snapshot(self, snapshot: Snapshot, error: BaseException, begun: PendingCopy | None = None) -> None:
        """Abandons the snapshot because of `error`. `begun`: the copy, if a device may still write."""
        if snapshot.done.done():
            self.trust.turn_off(f"the comparison failed: {error}")
        elif begun is None or self._copier.is_blocking:
            self._abandon(snapshot, f"it could not be copied: {error}")
        else:
            self._abandon_after_writes(snapshot, begun, f"it could not be copied: {error}")

    def _abandon_after_writes(self, snapshot: Snapshot, begun: PendingCopy | None, why: str) -> None:
        """Abandons the snapshot once nothing writes into its arena. A thread of ours waits for that, so no Ctrl-C ends
        it."""

        def end() -> None:
            try:
                if begun is not None:
                    with self._copier.background_context(begun.plan.devices):
                        begun.wait_for_writes()
            finally:
                if not snapshot.done.done():
                    self._abandon(snapshot, why)

        self._tasks.submit(end)

    def _abandon(self, snapshot: Snapshot, why: str) -> None:
        snapshot.abandon_reason = why
        self._events.emit("snapshot.abandoned", f"a snapshot was abandoned: {why}", loud=True, reason=why)
        if not snapshot.done.done():
            snapshot.done.set_result(None)


def _is_capturing() -> bool:
    return is_cuda_used() and torch.cuda.is_current_stream_capturing()
