"""The position of the training loop: which steps have ended, and which appointments are due there.

A step is one optimizer update. Only the training thread counts steps and keeps appointments.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import SupportsIndex

from ckpt.errors import Leave, UsageError
from ckpt.events import Events
from ckpt.ipc.control_page import GRADIENTS_WAIT, MID_STEP, ControlWord, RankPlace, WordKind
from ckpt.trainer.loop.loader_watch import LoaderWatch
from ckpt.trainer.loop.saver import Saver
from ckpt.trainer.loop.shutdown import NOTICE_EXIT_CODE, Shutdown
from ckpt.trainer.loop.step_tracking import StepTracking
from ckpt.types import Version


class Steps:
    """Counts the steps from `start_step`, the restored one. `last_ended`: the last ended step. `sub`: how many polls
    and saves have come since that step ended."""

    def __init__(self, start: int, saver: Saver, updates: StepTracking, watch: LoaderWatch, events: Events) -> None:
        self.start_step = self.last_ended = start
        self.sub = 0
        self._saver = saver
        self._step_tracking = updates
        self._loader_watch = watch
        self._events = events
        self._loop_token: object = None  # the newest one
        self._had_none_left = False  # whether that loop had no step
        self._is_in_step = False  # whether the loop's body is running, and has not ended its step

    def end_step(self) -> int:
        """Counts the end of the next step. Returns its number."""
        updates, step = self._step_tracking, self.last_ended + 1
        scalers, unregistered = updates.counted.scalers, updates.unregistered
        if unregistered.foreign is not None and updates.pending_updates:
            # A registered optimizer trains, too: a scaler has skipped its step.
            unregistered.foreign = None
        collected = updates.read_scaler_states() if scalers else ()
        if updates.finished_updates or scalers or not updates.is_idle:
            updates.note_step_end(step)
        # No call in these lines, so no Ctrl-C between them: if the user caught it, an update would count twice.
        updates.finished_updates, updates.is_fenced, updates.scaler_states = 0, False, collected
        unregistered.boundary_count += 1
        self.last_ended, self.sub, self._is_in_step = step, 0, False
        if self._loader_watch.is_open:
            self._loader_watch.note_boundary()
        return step

    def iterate(self, last: int, end: Callable[[], None]) -> Iterator[int]:
        """Yields each step up to `last`. `end` counts the end of a step; the loop's body may have called it already.
        Errors: UsageError."""
        if self.leave_loop():
            end()
        self._loop_token = loop = object()
        self._had_none_left = self.last_ended >= last
        while self.last_ended < last:
            self._is_in_step = True
            yield self.last_ended + 1
            if self._loop_token is not loop:
                raise UsageError("a loop over ck.steps() has run within this one: give each step to one of them")
            is_in_step, self._is_in_step = self._is_in_step, False
            if is_in_step:
                end()

    def leave_loop(self) -> bool:
        """Whether the loop was left after an update that no step has ended; that update then counts as a step. If the
        loop was left before the update, the data that was drawn for the step is lost, and an event says so."""
        updates = self._step_tracking
        begun, self._is_in_step = self._is_in_step, False
        # Until a first step has ended, an update outside ck.steps() need not be a step.
        if (updates.pending_updates and (begun or self.has_ended_step)) or (
            updates.is_fenced and updates.has_manual_updates and begun
        ):
            return True
        if begun and self._saver.walk.has_loaders:
            text = (
                f"ckpt: the loop was left in step {self.last_ended + 1}, before its update. A batch that was drawn for "
            )
            text += "that step is not trained, and a restart skips it (at the end of a loader none was drawn)"
            self._events.emit("step.unfinished", text, loud=True)
        return False

    def begin_version(self) -> Version:
        """Begins the version of a poll, a save or the exit, and returns it."""
        self._loader_watch.note_poll()
        self.sub += 1
        self._saver.link.view.enter(self.last_ended + 1, self.sub)
        return self.version

    @property
    def version(self) -> Version:
        return Version(self.last_ended, self.sub)

    @property
    def has_ended_step(self) -> bool:
        """Whether a step has ended since the start."""
        return self.last_ended != self.start_step

    def report_none(self) -> None:
        """Tells, at the end of the block, that the loops over ck.steps() had no step left."""
        terms = self._saver.link.terms
        is_told = terms is not None and terms.rank == 0
        if is_told and self._had_none_left and self.start_step > 0 and not self.has_ended_step:
            text = f"ckpt: the restored run was at step {self.start_step}, so no step of ck.steps() was left: nothing "
            text += "was trained. To go on, give more steps; for a new run, another URL"
            self._events.emit("run.finished", text, loud=True)

    @property
    def may_have_drawn_batch(self) -> bool:
        """Whether a registered loader may be ahead of the last boundary."""
        return self._is_in_step and self._saver.walk.has_loaders


class Appointments:
    """Keeps each appointment of the control page once, or answers that it was missed."""

    def __init__(self, steps: Steps, saver: Saver, updates: StepTracking, shutdown: Shutdown) -> None:
        self._steps = steps
        self._saver = saver
        self._link = saver.link
        self._step_tracking = updates
        self._shutdown = shutdown
        self._last_words: list[int] = []  # the control words as last read
        self._answered_words: set[int] = set()  # control words that were answered
        self._next_due_step: float = math.inf  # no other appointment is due before this step

    def serve_due(self) -> None:
        """Reads the control page, at a boundary or a poll. Errors: Leave, if the job leaves after an appointment."""
        steps = self._steps
        words = self._link.view.read_words(steps.last_ended, steps.sub)
        if words != self._last_words or steps.last_ended >= self._next_due_step:
            self._serve_words(words)

    def _serve_words(self, words: list[int]) -> None:
        """Keeps the appointments that are due, and notes when the next one is."""
        steps, due_step = self._steps, math.inf
        # All zero: there may be no agent just now, and the same words may come back with it.
        if any(words):
            self._answered_words &= set(words)
        for word in words:
            told = ControlWord.unpack(word) if word not in self._answered_words else None
            if told is None:
                continue
            place = told.place_for(steps.last_ended, steps.sub)
            if place is RankPlace.EARLY:
                due_step = min(due_step, 0 if told.sub else told.step)
                continue
            self._answered_words.add(word)
            self._answer_appointment(told, place)
        # Set last, so that after a Ctrl-C the words are served again.
        self._last_words, self._next_due_step = words, due_step

    def _answer_appointment(self, told: ControlWord, place: RankPlace) -> None:
        """Answers one appointment that is due or past."""
        saver, version, updates = self._saver, self._steps.version, self._step_tracking
        if place is RankPlace.LATE:
            saver.report_missed(told.attempt_number, Version(version.step), "late")
        elif updates.torn_reason:
            saver.report_missed(told.attempt_number, version, updates.torn_reason)
        elif version.sub and self._is_mid_step(version):
            saver.report_missed(told.attempt_number, version, MID_STEP)
        elif updates.report_waiting_gradients(version.step):
            saver.report_missed(
                told.attempt_number,
                version,
                GRADIENTS_WAIT,
                (updates.gradients.last_update_step, updates.gradients.update_interval_steps),
            )
        elif not saver.take(told.attempt_number, told.slot, version) and told.kind is WordKind.HOLD:
            saver.wait_for_copies()
            if self._shutdown.wait_for_verdict(told.attempt_number):
                raise Leave(NOTICE_EXIT_CODE)

    def _is_mid_step(self, version: Version) -> bool:
        """Whether no snapshot can be taken at this poll, nor at any other poll before the next boundary."""
        updates = self._step_tracking
        begun = updates.pending_updates or self._steps.may_have_drawn_batch
        return bool(
            begun or updates.report_waiting_gradients(version.step) or updates.report_swapped_weights(version.step)
        )


def as_whole_number(number: SupportsIndex) -> int | None:
    """`number` as an int; None if it is no whole number. NumPy's integers count, booleans do not."""
    try:
        return None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return None
