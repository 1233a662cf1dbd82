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
from ckpt.ipc.control_page import AMID, WAITING, ControlWord, RankPlace, WordKind
from ckpt.trainer.loop.loader_watch import LoaderWatch
from ckpt.trainer.loop.saver import Saver
from ckpt.trainer.loop.shutdown import NOTICE_CODE, Shutdown
from ckpt.trainer.loop.step_tracking import StepTracking
from ckpt.types import Tick


class Steps:
    """Counts the steps from `start`, the restored one. `ended`: the last ended step. `sub`: how many polls and saves
    have come since that step ended."""

    def __init__(self, start: int, saver: Saver, updates: StepTracking, watch: LoaderWatch, events: Events) -> None:
        self.start = self.ended = start
        self.sub = 0
        self._saver = saver
        self._updates = updates
        self._watch = watch
        self._events = events
        self._loop: object = None  # the newest one
        self._in_body = False  # whether the loop's body is running
        self._ended_in_body = False  # whether that body has ended its step

    def end(self) -> int:
        """Counts the end of the next step. Returns its number."""
        updates, step = self._updates, self.ended + 1
        if updates.elsewhere is not None and updates.pending:
            # A registered optimizer trains, too: a scaler has skipped its step.
            updates.elsewhere = None
        collected = updates.collect() if updates.scalers else ()
        if updates.ended or updates.scalers or not updates.is_idle:
            updates.note(step)
        # No call in these lines, so no Ctrl-C between them: if the user caught it, an update would count twice.
        updates.ended, updates.fenced, updates.collected = 0, False, collected
        updates.strangers.boundaries += 1
        self.ended, self.sub, self._ended_in_body = step, 0, True
        if self._watch.is_open:
            self._watch.boundary()
        return step

    def loop(self, last: int, end: Callable[[], None]) -> Iterator[int]:
        """Yields each step up to `last`. `end` counts the end of a step; the loop's body may have called it already.
        Errors: UsageError."""
        if self.leave_loop():
            end()
        self._loop = loop = object()
        while self.ended < last:
            self._ended_in_body = False
            self._in_body = True
            yield self.ended + 1
            if self._loop is not loop:
                raise UsageError("a loop over ck.steps() has run within this one: give each step to one of them")
            self._in_body = False
            if not self._ended_in_body:
                end()

    def leave_loop(self) -> bool:
        """Whether the loop was left after an update that no step has ended; that update then counts as a step. If the
        loop was left before the update, the data that was drawn for the step is lost, and an event says so."""
        updates = self._updates
        begun, self._in_body = self._is_in_step, False
        # Until a first step has ended, an update outside ck.steps() need not be a step.
        if (updates.pending and (begun or self.any_ended)) or (updates.fenced and updates.by_hand and begun):
            return True
        if begun and self._saver.walk.has_loaders:
            text = f"ckpt: the loop was left in step {self.ended + 1}, before its update. A batch that was drawn for "
            text += "that step is not trained, and a restart skips it (at the end of a loader none was drawn)"
            self._events.emit("step.unfinished", text, loud=True)
        return False

    def next_tick(self) -> Tick:
        """Begins the version of a poll, a save or the exit, and returns it."""
        self._watch.between()
        self.sub += 1
        self._saver.link.enter(self.ended + 1, self.sub)
        return self.tick

    @property
    def tick(self) -> Tick:
        return Tick(self.ended, self.sub)

    @property
    def any_ended(self) -> bool:
        """Whether a step has ended since the start."""
        return self.ended != self.start

    @property
    def may_have_drawn(self) -> bool:
        """Whether a registered loader may be ahead of the last boundary."""
        return self._is_in_step and self._saver.walk.has_loaders

    @property
    def _is_in_step(self) -> bool:
        """Whether the loop's body is in a step that has not ended."""
        return self._in_body and not self._ended_in_body


class Appointments:
    """Keeps each appointment of the control page once, or answers that it was missed."""

    def __init__(self, steps: Steps, saver: Saver, updates: StepTracking, parting: Shutdown) -> None:
        self._steps = steps
        self._saver = saver
        self._link = saver.link
        self._updates = updates
        self._parting = parting
        self._looked: list[int] = []  # the control words as last read
        self._answered: set[int] = set()  # control words that were answered
        self._due_step: float = math.inf  # no other appointment is due before this step

    def look(self) -> None:
        """Reads the control page, at a boundary or a poll. Errors: Leave, if the job leaves after an appointment."""
        steps = self._steps
        words = self._link.look(steps.ended, steps.sub)
        if words != self._looked or steps.ended >= self._due_step:
            self._serve(words)

    def _serve(self, words: list[int]) -> None:
        """Keeps the appointments that are due, and notes when the next one is."""
        steps, due_step = self._steps, math.inf
        # All zero: there may be no agent just now, and the same words may come back with it.
        if any(words):
            self._answered &= set(words)
        for word in words:
            told = ControlWord.unpack(word) if word not in self._answered else None
            if told is None:
                continue
            place = told.place(steps.ended, steps.sub)
            if place is RankPlace.EARLY:
                due_step = min(due_step, 0 if told.sub else told.step)
                continue
            self._answered.add(word)
            self._keep(told, place)
        # Set last, so that after a Ctrl-C the words are served again.
        self._looked, self._due_step = words, due_step

    def _keep(self, told: ControlWord, place: RankPlace) -> None:
        """Answers one appointment that is due or past."""
        saver, tick, updates = self._saver, self._steps.tick, self._updates
        if place is RankPlace.LATE:
            saver.late(told.round, tick.step)
        elif updates.torn:
            saver.missed(told.round, tick, updates.torn)
        elif tick.sub and self._is_amid(tick):
            saver.missed(told.round, tick, AMID)
        elif updates.find_waiting(tick.step):
            saver.missed(told.round, tick, WAITING, (updates.gradients.last, updates.gradients.every))
        elif not saver.take(told.round, told.slot, tick) and told.kind is WordKind.HOLD:
            saver.quiet()
            if self._parting.held(told.round):
                raise Leave(NOTICE_CODE)

    def _is_amid(self, tick: Tick) -> bool:
        """Whether no snapshot can be taken at this poll, nor at any other poll before the next boundary."""
        updates = self._updates
        begun = updates.pending or self._steps.may_have_drawn
        return bool(begun or updates.find_waiting(tick.step) or updates.find_swapped(tick.step))


def whole(number: SupportsIndex) -> int | None:
    """`number` as an int; None if it is no whole number. NumPy's integers count, booleans do not."""
    try:
        return None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return None
