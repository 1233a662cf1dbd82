"""One rank's snapshots: what is copied at the boundary, and what under the next step.

Guarantees:
- The bytes of a snapshot that is done and not abandoned are those that the tensors held when `take` was called.
- A tensor is copied after `take` returned only if that is proven (ckpt/trainer/snapshot/deferred_copy.py), and then the
  next optimizer step waits for it. Whether it really stayed unchanged is looked at once the copy is over: in the
  tensors as they are then, and in the arena; on a device, when the wait ends. Only then is such a snapshot done; a
  change abandons it. What that look can miss is said in docs/guides/loops.md.
- Failing to copy fails no training: the snapshot is abandoned, with an event.
- A snapshot is done at last, however the wait for it ends: one that Ctrl-C ends is abandoned, once nothing writes into
  the arena any more.

The training thread calls `take`, `boundary`, `poll` and `fence`; what it takes was bound before, maybe on another
thread (ckpt/trainer/snapshot/bindings.py). Whoever waits for a snapshot on the training thread uses `Snapshot.wait`,
which is a `poll`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import Enum, auto

from torch.optim.optimizer import Optimizer

from ckpt.errors import CkptError, UsageError, is_from_outside
from ckpt.events import Events
from ckpt.threads import Outcome, Tasks
from ckpt.trainer.snapshot.bindings import Binding, Bindings, CopyPlan, plain
from ckpt.trainer.snapshot.cpu_copier import Copier, Ticket
from ckpt.trainer.snapshot.deferred_copy import DeferredTrust, Key, StepHook, owns_any
from ckpt.trainer.state.names import some
from ckpt.trainer.state.pieces import CopyPiece

LOOK_S, LOOK_S_MAX = 0.001, 0.05  # between looks whether the training thread has gone on


class Snapshot:
    """One rank's state in one arena, as of one call of `take`.

    `done`: resolved once nothing more will be written and the bytes were checked; never an exception. `abandoned`: why
    the content must not be used, or None. `stall_s`: how long training stood still for it, complete once done.
    `lazy`: whether anything was copied after `take`."""

    def __init__(self, slot: int, settle: Callable[[Snapshot], None]) -> None:
        self.slot = slot
        self.done = Outcome[None]()
        self.abandoned: str | None = None
        self.stall_s = 0.0
        self.lazy = False
        self._settle = settle

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns once it is done. On the training thread this ends a copy that still runs; on any other it waits for
        the copy and sees whether that is whole. On a device, and where it is not, it waits for the training thread to
        end it, at the latest at the end of the step. Errors: TimeoutError, after timeout_s of that."""
        self._settle(self)
        self.done.result(timeout_s)


class Cause(Enum):
    """What ended the wait for a late copy."""

    HOOK = auto()  # an optimizer that owns a late tensor is about to step
    FENCE = auto()  # the user is about to change things by hand
    POLL = auto()  # nothing is about to change; proves nothing
    BOUNDARY = auto()  # a step ended, and none of the above happened in it


class Snapshotter:
    """Takes the snapshots of one rank, one at a time. Owns the copier, its own threads, and one optimizer hook.

    `lazy=False`: everything is copied at the boundary. Leaving (`close`) ends what still runs, in order."""

    def __init__(self, copier: Copier, lazy: bool, events: Events) -> None:
        self._copier = copier
        self._events = events
        self._trust = DeferredTrust(events, lazy)
        self.bindings = Bindings(copier, self._trust, events)
        self._pending: _Pending | None = None
        self._reading: _PendingRead | None = None  # was looked at, and a device may still read
        self._taken = 0
        self._trainer: int | None = None  # the thread that takes
        self._settling = threading.RLock()  # the hook may run on a thread of autograd
        self._tasks = Tasks("snapshot", pool_size=1)
        self._hook = StepHook(self._is_waiting, self._on_step) if lazy else None

    def take(self, slot: int) -> Snapshot:
        """Takes a snapshot of what is bound to `slot`, at a boundary. A former one that still runs is ended first.

        Errors: UsageError if nothing is bound to the slot."""
        self.boundary()
        started_s = time.perf_counter()
        binding = self.bindings.get(slot)
        if binding is None:
            raise UsageError(f"nothing is bound to slot {slot}: bind the present walk to it before a snapshot")
        self._trainer = threading.get_ident()
        snapshot = Snapshot(slot, self._settle_for_waiter)
        try:
            with self._settling, plain():
                self._copy(binding, snapshot, started_s)
        except BaseException as exc:
            begun, self._pending = self._pending, None
            if is_from_outside(exc):  # nobody may wait for it, whoever catches this
                self._interrupt(snapshot, begun)
                snapshot.done.result()  # the caller has no snapshot to ask when the slot may be used again
                raise
            self._give_up(snapshot, begun, exc)  # whatever torch raised: training has not failed, and both are said
        return snapshot

    def boundary(self) -> None:
        """A step has ended. Cheap when nothing is pending."""
        if self._pending is not None:
            self._settle(Cause.BOUNDARY)

    def fence(self) -> None:
        """Returns when tensors may be changed by hand; counts as the optimizer's own announcement of a step."""
        if self._is_waiting():
            self._settle(Cause.FENCE)

    def poll(self) -> None:
        """Ends a copy that still runs, between steps or in the middle of one. Unlike `fence` it proves nothing."""
        if self._is_waiting():
            self._settle(Cause.POLL)

    def is_same(self, slot: int) -> bool:
        """Whether the tensors that are bound to that slot have, byte for byte, what lies in its arena. Any copy has
        ended."""
        binding = self.bindings.get(slot)
        with self._settling, plain():
            return binding is not None and not self._copier.same(binding.pieces)()

    @property
    def is_looking(self) -> bool:
        """Whether this thread is in the middle of ending a copy: then a signal's handler asks, or a sink."""
        pending = self._pending
        return pending is not None and pending.looker == threading.get_ident()

    def proven(self) -> list[str]:
        """What was relied on because this run showed it, in words."""
        return self._trust.proven()

    def fell_back(self) -> list[str]:
        """What was found not to hold, and so is copied at the boundary, in words."""
        return self._trust.fell_back()

    def close(self) -> None:
        """Ends what still runs, removes the hook, drops all views; each of it, where Ctrl-C ends a wait. A second call
        does nothing."""
        with ExitStack() as ends:
            ends.callback(self._copier.close)
            ends.callback(self._drop)
            ends.callback(self._tasks.close)
            if self._hook is not None:
                ends.callback(self._hook.remove)
            ends.callback(self._end_tasks)
            self.poll()

    def _end_tasks(self) -> None:
        """What they are to abandon is waited for by others."""
        if not self._tasks.stopping.is_set():
            self._tasks.submit(lambda: None).result()  # after all that a device still works on

    def _drop(self) -> None:
        self._reading = None
        self.bindings.close()

    # -- taking

    def _copy(self, binding: Binding, snapshot: Snapshot, started_s: float) -> None:
        if binding.last is not None:
            binding.last.result()  # its buffers are used again now
        binding.last = snapshot.done
        plan = binding.plan(self._trust, self._copier)
        spot = None
        if plan.watch is not None:
            plan.watch.remember()
            spot = plan.spot.remember(self._taken) if plan.spot is not None else None
        eager = plan.eager.eager()
        pending = _Pending(snapshot, plan, eager, None, spot)
        if plan.watch is not None:
            self._pending = pending  # before anything runs by itself, so that Ctrl-C finds what to wait for
        if plan.late_keys:
            pending.late = plan.late.late()
        self._taken += 1
        snapshot.lazy = pending.late is not None
        snapshot.stall_s += time.perf_counter() - started_s
        if pending.late is None:
            self._when_there(pending, lambda: self._finish(pending))

    # -- the end of a late copy, and the proof

    def _end_aside(self, pending: _Pending) -> None:
        """On the thread of who waits: the snapshot is done once it is copied, and not when the next optimizer steps:
        until then other nodes could have it. What is wrong with it is left to the training thread, which sees it when
        the wait ends; so is what cannot be looked at here, while that thread is in the middle of an operation: it may
        be one that writes, and neither counts as a write nor has come to a canary before it is over."""
        assert pending.late is not None
        with suppress(Exception):
            pending.late.wait()
            with plain():
                torn = self._torn(pending)
            if pending.looker is None:  # else the training thread helped, and may not have been done
                pending.torn = torn  # so that it need not look while it stands still
            before, delay_s = self._trainer_is_at(), LOOK_S
            while before is not None and self._trainer_is_at() == before:
                with suppress(TimeoutError):
                    pending.snapshot.done.result(delay_s)
                    return
                delay_s = min(2 * delay_s, LOOK_S_MAX)
            with self._settling, plain():
                if before is not None and self._pending is pending and not self._damage(pending, torn):
                    self._finish(pending)
                    if not pending.plan.unproven_pieces:
                        self._pending = None  # no step has to wait for anything

    def _trainer_is_at(self) -> tuple[int, int] | None:
        """Which instruction the training thread is in. Where it is in another one than before, all that it was in the
        middle of then is over. None: it runs no Python."""
        frame = sys._current_frames().get(self._trainer) if self._trainer is not None else None
        return (id(frame), frame.f_lasti) if frame is not None else None

    def _damage(self, pending: _Pending, torn: set[Key]) -> set[Key]:
        """What has changed in the tensors or is torn in the arena, now that all is copied."""
        return torn.union(*(answer() for answer in self._ask(pending)))

    def _is_waiting(self) -> bool:
        return self._pending is not None or self._reading is not None

    def _on_step(self, optimizer: Optimizer) -> None:
        pending, reading = self._pending, self._reading
        known = pending.plan.storages if pending is not None else reading.storages if reading is not None else None
        if known is not None and owns_any(optimizer, known):
            self._settle(Cause.HOOK)

    def _settle_for_waiter(self, snapshot: Snapshot) -> None:
        pending = self._pending
        if pending is None or pending.snapshot is not snapshot or pending.late is None:
            return
        if threading.get_ident() == self._trainer:
            self.poll()
        elif self._copier.blocking:
            self._end_aside(pending)

    def _settle(self, cause: Cause) -> None:
        with self._settling, plain():
            pending = self._pending
            if pending is None:
                self._hold_back()  # another optimizer was first, maybe on another thread or stream
                return
            if pending.looker is not None:
                return  # a signal's handler, in the middle of the look: which sees what it changes, if it may matter
            pending.looker = threading.get_ident()
            try:
                judged = self._look(pending, cause)
                if judged is not None:
                    self._reading = _PendingRead(self._copier.barrier(), judged, pending.plan.storages)
            except BaseException as exc:  # as in `take`
                if is_from_outside(exc):
                    self._interrupt(pending.snapshot, pending)
                    raise
                if pending.late is not None:
                    self._give_up(pending.snapshot, pending, exc)
                else:  # it ends without us
                    self._trust.turn_off(f"the comparison failed: {exc}")
            finally:
                if self._pending is pending:  # until here, so that optimizers of other threads wait for this as well
                    self._pending = None

    def _hold_back(self) -> None:
        """One stream reads, or waits for what does, and whoever comes now may be on another one."""
        reading = self._reading
        if reading is None:
            return
        if reading.judged.done():  # so the reads are over
            self._reading = None
        else:
            reading.barrier()

    def _look(self, pending: _Pending, cause: Cause) -> Future[None] | None:
        """Asks all questions on the training thread; the answers may come later, where a device works on them. Then it
        returns what is resolved when they are there."""
        started_s = time.perf_counter()
        plan = pending.plan
        watch = plan.watch
        assert watch is not None
        if pending.late is not None:
            try:
                pending.late.fence()
            except CkptError as exc:  # freed meanwhile; by now it may be back where it was, so that nobody knows what
                self._trust.turn_off(f"a late copy failed: {exc}. Say ck.fence() before a tensor's storage is freed")
                raise
        asked = self._ask(pending)
        if cause in (Cause.HOOK, Cause.FENCE) and plan.unproven_pieces:
            asked.append(_keys(plan, plan.unproven_pieces, self._copier.same(plan.unproven_pieces)))
        pending.snapshot.stall_s += time.perf_counter() - started_s

        def judge() -> None:
            began_s = time.perf_counter()
            changed = set().union(*(answer() for answer in asked))
            torn: set[Key] = set()
            if pending.late is not None and not pending.snapshot.done.done():
                pending.eager.wait()
                pending.late.wait()
                torn = self._torn(pending) if pending.torn is None else pending.torn
            if self._copier.blocking:  # else training does not stand still for this
                pending.snapshot.stall_s += time.perf_counter() - began_s
            self._judge(pending, cause, changed, torn)

        return self._when_there(pending, judge)

    def _ask(self, pending: _Pending) -> list[Callable[[], set[Key]]]:
        """What is other now than it was at the boundary, of all that is watched."""
        assert pending.plan.watch is not None
        asked = [pending.plan.watch.look()]
        if pending.spot is not None:
            live = [pending.spot[0]]
            asked.append(_keys(pending.plan, live, self._copier.same(live)))
        return asked

    def _torn(self, pending: _Pending) -> set[Key]:
        """What is other in the arena; before anybody else may write there."""
        assert pending.plan.watch is not None
        torn = pending.plan.watch.torn()
        if pending.spot is not None:
            staged = [pending.spot[1]]
            torn |= _keys(pending.plan, staged, self._copier.same(staged))()
        return torn

    def _judge(self, pending: _Pending, cause: Cause, changed: set[Key], torn: set[Key]) -> None:
        """`changed`: now other than at the boundary. `torn`: other in the arena, whatever the tensor holds now."""
        plan = pending.plan
        if cause is Cause.BOUNDARY and changed:
            names = ", ".join(sorted({key[0] for key in changed})[:3])
            self._trust.turn_off(f"{names} changed in a step in which no optimizer announced itself")
        elif changed or torn:
            self._trust.distrust(changed | torn)
        if cause in (Cause.HOOK, Cause.FENCE):
            self._trust.prove(plan.unproven_keys - changed)
        if self._trust.version != plan.version:
            with suppress(CkptError):  # closed
                self._tasks.submit(self.bindings.plan_anew)
        if pending.late is None or pending.snapshot.done.done():
            return
        if lost := sorted({key[0] for key in (changed | torn) & plan.late_keys}):
            self._abandon(pending.snapshot, f"{some(lost)} changed while the copy was under way")
        else:
            self._finish(pending)

    def _when_there(self, pending: _Pending, then: Callable[[], None]) -> Future[None] | None:
        """Runs it now, or on a thread of ours where the device is still at work."""

        def guarded() -> None:
            try:
                with self._copier.aside(pending.plan.devices), plain():
                    then()
            except BaseException as exc:  # as in `take`
                if is_from_outside(exc):
                    raise
                self._fail(pending.snapshot, exc)

        if not self._copier.blocking:
            return self._tasks.submit(guarded)
        guarded()
        return None

    def _finish(self, pending: _Pending) -> None:
        snapshot = pending.snapshot
        device_s = 0.0
        for ticket in (pending.eager, pending.late):
            if ticket is not None:
                ticket.wait()
                device_s += ticket.stall_s()
        snapshot.stall_s = max(snapshot.stall_s, device_s)  # a device stands still while the host enqueues, or longer
        if not snapshot.done.done():
            snapshot.done.set_result(None)

    def _fail(self, snapshot: Snapshot, error: BaseException) -> None:
        if snapshot.done.done():
            self._trust.turn_off(f"the comparison failed: {error}")
        else:
            self._abandon(snapshot, f"it could not be copied: {error}")

    def _give_up(self, snapshot: Snapshot, begun: _Pending | None, error: BaseException) -> None:
        """As `_fail`, where a device may still write what was begun."""
        if begun is None or self._copier.blocking or snapshot.done.done():
            self._fail(snapshot, error)
        else:
            self._interrupt(snapshot, begun, f"it could not be copied: {error}")

    def _interrupt(self, snapshot: Snapshot, begun: _Pending | None, why: str = "interrupted") -> None:
        """Abandons it once nothing writes any more; a thread of ours waits for that, which nothing interrupts."""

        def end() -> None:
            try:
                if begun is not None:
                    with self._copier.aside(begun.plan.devices):
                        for ticket in (begun.eager, begun.late):
                            if ticket is not None:
                                ticket.wait()
            finally:
                if not snapshot.done.done():
                    self._abandon(snapshot, why)

        self._tasks.submit(end)

    def _abandon(self, snapshot: Snapshot, why: str) -> None:
        snapshot.abandoned = why
        self._events.emit("snapshot.abandoned", f"a snapshot was abandoned: {why}", loud=True, reason=why)
        if not snapshot.done.done():
            snapshot.done.set_result(None)


@dataclass(slots=True)
class _Pending:
    """A snapshot whose late copy runs (`late`), or whose eager copy is kept to be compared (`late` is None)."""

    snapshot: Snapshot
    plan: CopyPlan
    eager: Ticket
    late: Ticket | None
    spot: tuple[CopyPiece, CopyPiece] | None
    looker: int | None = None  # the thread that looks at it
    torn: set[Key] | None = None  # see `Snapshotter._torn`, once that was looked at


@dataclass(frozen=True, slots=True)
class _PendingRead:
    """What is left of a look until it is judged. It holds no view of the arena. `barrier`: see Copier."""

    barrier: Callable[[], None]
    judged: Future[None]
    storages: frozenset[int]


def _keys(plan: CopyPlan, pieces: list[CopyPiece], differing: Callable[[], list[int]]) -> Callable[[], set[Key]]:
    return lambda: {plan.key_of[pieces[n].entry, pieces[n].box] for n in differing()}
