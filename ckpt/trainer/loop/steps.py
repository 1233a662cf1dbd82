"""Where the training loop is: the steps that have ended, and what is appointed for there.

A step is one optimizer update. The training thread alone counts, and keeps appointments.
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
    """Counts from `start`, the restored step. `ended`: the last step that has. `sub`: how many polls and saves have
    come since."""

    def __init__(self, start: int, saver: Saver, updates: StepTracking, watch: LoaderWatch, events: Events) -> None:
        self.start = self.ended = start
        self.sub = 0
        self._saver = saver
        self._updates = updates
        self._watch = watch
        self._events = events
        self._loop: object = None  # the newest one
        self._in_body = False  # of a loop
        self._ended_in_body = False  # its step

    def end(self) -> int:
        """The next step has ended. Which it is."""
        updates, step = self._updates, self.ended + 1
        if updates.elsewhere is not None and updates.pending:
            updates.elsewhere = None  # a scaler has skipped the step of one that is in the state
        collected = updates.collect() if updates.scalers else ()
        if updates.ended or updates.scalers or not updates.is_idle:
            updates.note(step)
        # In one go: between here and a call no Ctrl-C comes, that a user may catch, and whose update would count twice.
        updates.ended, updates.fenced, updates.collected = 0, False, collected
        updates.strangers.boundaries += 1
        self.ended, self.sub, self._ended_in_body = step, 0, True
        if self._watch.is_open:
            self._watch.boundary()
        return step

    def loop(self, last: int, end: Callable[[], None]) -> Iterator[int]:
        """Yields each step up to `last`. `end` has one counted, which the body may have done. Errors: UsageError."""
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
        """Whether it was left after an update that no step has ended, which makes one. Where it was before the update,
        what was drawn for the step is lost, and said."""
        updates = self._updates
        begun, self._in_body = self._is_in_step, False
        # Before a step has ended here nothing tells that updates are steps.
        if (updates.pending and (begun or self.any_ended)) or (updates.fenced and updates.by_hand and begun):
            return True
        if begun and self._saver.walk.has_loaders:
            text = f"ckpt: left in step {self.ended + 1} before its update: a batch that was drawn for it is not "
            text += "trained, and is passed over after a restart (at the end of a loader none was drawn)"
            self._events.emit("step.unfinished", text, loud=True)
        return False

    def next_tick(self) -> Tick:
        """Of a poll, a save or the exit, which is begun."""
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
        """Whether a loader may be ahead of the last boundary."""
        return self._is_in_step and self._saver.walk.has_loaders

    @property
    def _is_in_step(self) -> bool:
        """Whether the body of a loop is in a step that has not ended."""
        return self._in_body and not self._ended_in_body


class Appointments:
    """Keeps what the control page appoints, or says that it was missed; each once."""

    def __init__(self, steps: Steps, saver: Saver, updates: StepTracking, parting: Shutdown) -> None:
        self._steps = steps
        self._saver = saver
        self._link = saver.link
        self._updates = updates
        self._parting = parting
        self._looked: list[int] = []  # words of the control page
        self._answered: set[int] = set()  # those of them that are done with
        self._due_step: float = math.inf  # before it no other is due

    def look(self) -> None:
        """The loop is at a boundary, or at a poll. Errors: Leave, where an appointment is to leave after."""
        steps = self._steps
        words = self._link.look(steps.ended, steps.sub)
        if words != self._looked or steps.ended >= self._due_step:
            self._serve(words)

    def _serve(self, words: list[int]) -> None:
        """Does what these appoint for now, and sees when the next is due."""
        steps, due_step = self._steps, math.inf
        if any(words):  # else there may be no agent just now, and the same one may be back
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
        self._looked, self._due_step = words, due_step  # after Ctrl-C they are looked at once more

    def _keep(self, told: ControlWord, place: RankPlace) -> None:
        """An appointment that is due, or past."""
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
        """Whether a poll is where nothing can be taken: as at all others up to the next boundary."""
        updates = self._updates
        begun = updates.pending or self._steps.may_have_drawn
        return bool(begun or updates.find_waiting(tick.step) or updates.find_swapped(tick.step))


def whole(number: SupportsIndex) -> int | None:
    """Of any kind that counts, NumPy's too, but no truth value; None: it is none."""
    try:
        return None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return None
