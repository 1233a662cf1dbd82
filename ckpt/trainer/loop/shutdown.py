"""Leaving, as one rank sees it: signals, the verdict on a last snapshot, and how long to wait at the exit.

A signal is told to the agent by a thread, since the training thread may sit in a collective for minutes. What follows
is decided there, for all ranks: a last appointment, which the training thread keeps at its next boundary; or that there
is none to be had. Then this thread ends the process where it is, with the code 143, for nothing in the training thread
could: torchrun sends SIGTERM to restart, too, and a rank in a collective with a dead one would sit there to the end.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from typing import Any

from ckpt.errors import AgentError, CkptError, CommitFailed, SaveFailed, UsageError
from ckpt.events import Events
from ckpt.ipc import outcome_file
from ckpt.ipc.client import places
from ckpt.ipc.notice_sources import FORMER, SIGNAL
from ckpt.preemption.notice import Notice, Word
from ckpt.preemption.signals import Signals
from ckpt.settings import Settings
from ckpt.threads import Condition, Flag, Tasks
from ckpt.trainer.link.link import End, Link
from ckpt.types import Tick

NOTICE_CODE = 143
RESERVE_S = 1.0  # before a deadline, for the interpreter to end
AGAIN_S = 0.2  # until a notice is told again that no agent heard
TELL_S = 10.0
LEAST_S = 1.0  # an agent is waited for so long at least


class Shutdown:
    """`begin` and `close` are for the training thread; it is the main thread of the process, or signals are not heard.
    `leave_by_s`: until when this rank has to be gone, on the monotonic clock; inf where nobody said so."""

    def __init__(self, link: Link, tasks: Tasks, events: Events, settings: Settings) -> None:
        self.leave_by_s = math.inf
        self._link = link
        self._tasks = tasks
        self._events = events
        self._settings = settings
        self._restart_follows = settings.restarts_left > 0
        self._signals: Signals | None = None
        self._came: dict[str, float] = {}  # signals by their names, and until when each leaves, on the monotonic clock
        self._stop = Flag()  # listening; other threads of `tasks` may still be needed then
        self._changed = Condition()
        self._at_work = False  # whether the thread that tells and ends is there
        self._exiting = False
        self._told_to_leave = False
        self._closed = False
        self._leaving = threading.Lock()  # the agent answers one request to leave of each rank

    def begin(self) -> None:
        self._link.on_end = self._on_end
        self._link.on_leave_by = self._on_leave_by
        if self._settings.notices == "off":
            return
        warnings_s = dict.fromkeys(self._settings.warnings, self._settings.sigusr1_s)
        leads_s = {signal.SIGTERM: self._settings.sigterm_s, **warnings_s}
        signals = self._signals = Signals(leads_s, events=self._events)
        try:
            signals.__enter__()
        except UsageError as exc:
            self._signals = None
            text = f"ckpt: {', '.join(each.name for each in leads_s)} are not taken for notices: {exc}"
            self._events.emit("signals.unheard", text, loud=True)
            return
        self._tasks.start("signals", lambda: signals.listen(self._stop, self._on_signal, self._on_repeat))

    def held(self, round_: int) -> bool:
        """Waits, without a bound of its own, for the verdict on a last appointment: a held rank never goes on by a
        time-out, since the others may have left. Whether to leave."""
        leave, by_s = self._verdict(round_)
        if not leave:
            return False
        if by_s is not None:
            self._told_to_leave = True
            self._bring_forward(by_s)
        if self._signals is not None:  # they have been acted upon, and are not delivered again
            for number in (signal.SIGTERM, *self._settings.warnings):
                self._signals.consume(number)
        return True

    def _verdict(self, round_: int) -> tuple[bool, float | None]:
        """Whether to leave, and until when. An agent that dies has told nobody to leave, or has written that it did;
        the next one knows nothing of that round, and says: go on. Where none comes any more, ranks on other nodes may
        have been told to leave: the job is broken anyway, and what this one has is staged."""
        while True:
            try:
                said = self._link.request("held", {"round": round_}, None).fields
            except AgentError:
                if self._link.is_verdict(round_):
                    return True, math.inf  # the deadline went with it
                while not self._link.is_back:
                    if self._link.is_given_up:
                        terms = self._link.terms
                        return (True, math.inf) if terms is not None and len(terms.nodes) > 1 else (False, None)
                    self._tasks.stopping.wait(AGAIN_S)
            else:
                return bool(said["leave"]), said.get("by_s")

    def exits(self, exit_s: float) -> float:
        """The training thread is at the end of the block. Until when it may wait there, on the monotonic clock."""
        with self._changed:
            self._exiting = True
        return min(time.monotonic() + exit_s, self.leave_by_s - RESERVE_S)

    def finish_early(self, exit_s: float) -> CkptError | None:
        """The block was left by an exception. Lets what is under way finish; what did not, if anything."""
        until_s = self.exits(exit_s)
        if self._restart_follows and not self._told_to_leave:
            return None  # the agent goes on without us, and a restart must not wait for it
        if self._link.levels.are_open:
            left_s = max(0.0, until_s - time.monotonic())
            text = f"ckpt: waiting up to {left_s:.0f} s for what is being saved (ckpt.Limits(exit_s=))"
            self._events.emit("exit.waiting", text, loud=True)
        return self.leave("notice" if self._told_to_leave else "exception", until_s)

    def leave(self, outcome: str, until_s: float) -> CkptError | None:
        """Tells the agent, and waits for what is under way. What did not reach the store, if anything."""
        try:
            if outcome == "notice":
                with self._leaving:  # for ever where the other thread ends the process
                    said = self._leave_saved("", until_s)
            else:
                said = self._link.leave(outcome, max(1.0, until_s - time.monotonic())).fields
        except CkptError as exc:
            return exc if outcome != "normal" or not isinstance(exc, AgentError) else None
        error = said.get("error")
        return SaveFailed(str(error)) if outcome != "normal" and error else None

    def unsaved(self, tick: Tick, failure: CkptError) -> CommitFailed | None:
        """What to raise where waiting for `tick` ended by that failure; None: it is in the store all the same."""
        levels = self._link.levels
        newest = levels.newest("store")
        if newest is not None and newest >= tick:
            return None
        text = str(failure)
        if self._link.has_agent and levels.is_staged(tick) and (keeps_s := self._settings.orphan_s):
            text += (
                f". This host's memory keeps step {tick.step}: the agent goes on trying for {keeps_s / 60:.3g} min "
                "(12 times CKPT_LINGER_S), and a start on this host goes on from that step"
            )
        return CommitFailed(text)

    def _leave_saved(self, why: str, until_s: float) -> dict[str, Any]:
        """What the agent answers. Where there is none any more rank 0 says what was saved, in its place."""
        by_s = self.leave_by_s if self.leave_by_s < math.inf else until_s
        try:
            return self._link.leave_saved(why, max(until_s, time.monotonic() + LEAST_S), by_s, self._names()).fields
        except AgentError as exc:
            if not self._link.has_agent:
                self._write_outcome(why, by_s - time.monotonic(), exc)
            raise

    def _names(self) -> list[str]:
        """Of what came here, as an outcome names them."""
        return sorted(f"{SIGNAL} {key}" for key in self._came)

    def _write_outcome(self, why: str, left_s: float, error: AgentError) -> None:
        terms, newest = self._link.terms, self._link.levels.newest("store")
        if terms is None or terms.rank:
            return
        step = newest.step if newest is not None else None
        body = {
            "how": "ended" if why else "left",
            "why": why,
            "notices": self._names() or [FORMER],
            "level": "none" if newest is None else "store",
            "tick": str(newest) if newest is not None else None,
            "step": step,
            "committed_step": step,
            "peer_step": None,
            "left_s": round(left_s, 3),
            "error": str(error),
        }
        try:
            path = self._settings.outcome_file
            path = path or places(self._link.url, self._settings).socket.with_suffix(".outcome.json")
            outcome_file.write(path, terms.epoch, terms.launch, body)
        except (OSError, CkptError) as exc:
            self._events.emit("outcome.failed", f"ckpt: what was saved could not be written: {exc}", loud=True, **body)
        self._events.emit("notice.outcome", outcome_file.text_of(body), loud=True, **body)

    def end_threads(self) -> None:
        """Before their owner waits for them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._stop.set()
        if self._signals is not None:
            self._signals.wake()

    def close(self) -> None:
        """The last thing of all: handlers are as they were, and a signal that nobody has acted upon is delivered."""
        if self._signals is not None:
            self._signals.__exit__(None, None, None)
            self._signals = None

    # -- threads

    def _on_signal(self, word: Word) -> None:
        if not isinstance(word, Notice):
            return
        if self._signals is not None and (number := signal.Signals[word.key]) in self._settings.warnings:
            self._signals.consume(number)  # it says nothing but that: to whom else should it be delivered?
        by_s = time.monotonic() + word.left_s
        self._bring_forward(by_s)
        with self._changed:
            self._came[word.key] = by_s
        self._attend()

    def _on_repeat(self, number: signal.Signals) -> None:
        _end_process(f"{number.name} came again")

    def _on_end(self, end: End) -> None:
        """On the thread that reads the socket."""
        self._bring_forward(end.by_s)
        self._attend()

    def _on_leave_by(self, by_s: float) -> None:
        """The same. The training thread may be waiting already, for longer."""
        self._bring_forward(by_s)
        self._attend()

    def _bring_forward(self, by_s: float) -> None:
        with self._changed:
            self.leave_by_s = min(self.leave_by_s, by_s)
            self._changed.notify_all()

    def _attend(self) -> None:
        with self._changed:
            self._changed.notify_all()
            if self._at_work or self._closed:
                return
            self._at_work = True
        with contextlib.suppress(CkptError):  # closed meanwhile
            self._tasks.start("parting", self._run)

    def _run(self) -> None:
        """Tells the agent what came, again after its restart, and ends the process where the agent says so, or where
        the deadline comes."""
        heard = (-1, 0)  # the restarts of the agent, and how many notices it was told
        while True:
            with self._changed:
                came, by_s, exiting, closed = dict(self._came), self.leave_by_s, self._exiting, self._closed
                end = self._link.end
            if closed:
                return
            if end is not None and not (end.wait and exiting):
                self._end_here(end)
            left_s = by_s - RESERVE_S - time.monotonic()
            if left_s <= 0:
                _end_process("the deadline has come")
            if heard != (self._link.restarts, len(came)):
                heard = self._tell(came, heard)
            with self._changed:
                if not self._closed and self._link.end is end and len(self._came) == len(came):
                    self._changed.wait(min(max(left_s, 0.0), AGAIN_S))

    def _tell(self, came: dict[str, float], heard: tuple[int, int]) -> tuple[int, int]:
        restarts = self._link.restarts
        try:
            for key, by_s in came.items():
                told = {"key": key, "left_s": by_s - time.monotonic()}  # other hosts have other clocks
                self._link.request("notice", told, TELL_S)
        except CkptError:
            return heard  # there is no agent just now
        return restarts, len(came)

    def _end_here(self, end: End) -> None:
        if end.wait and not self._restart_follows:
            with self._leaving, contextlib.suppress(CkptError):
                if self._exiting:
                    return  # the training thread came to the end of the block meanwhile, and has waited
                self._leave_saved(end.why, self.leave_by_s - RESERVE_S)
                _end_process(end.why)
        _end_process(end.why)


def _end_process(why: str) -> None:
    """At once, whatever the other threads do and hold: nothing here may wait for a lock."""
    with contextlib.suppress(OSError):
        os.write(2, f"ckpt: leaving at once: {why}\n".encode(errors="replace"))
    os._exit(NOTICE_CODE)
