"""The shutdown of one rank: signals, the verdict on a last snapshot, and how long to wait at the exit.

A thread tells the agent of a signal, since the training thread may sit in a collective for minutes. The agent then
decides for all ranks. Either it appoints a last snapshot, which the training thread keeps at its next boundary. Or it
says that no boundary can be expected: then the thread ends the process where it is, with code 143. The training thread
could not: torchrun sends SIGTERM to restart, too, and a rank would sit for ever in a collective with a dead rank.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from ckpt.errors import AgentError, CkptError, CommitFailed, SaveFailed, UsageError
from ckpt.events import Events
from ckpt.ipc.notice_sources import SIGNAL_SOURCE
from ckpt.preemption.notice import Notice, NoticeChange
from ckpt.preemption.signals import Signals
from ckpt.settings import Settings
from ckpt.threads import Condition, Flag, Tasks
from ckpt.trainer.link.link import EndOrder, Link
from ckpt.types import Version

NOTICE_EXIT_CODE = 143
RESERVE_S = 1.0  # kept before a deadline, for the interpreter to end
RETRY_INTERVAL_S = 0.2  # between attempts to reach an agent
NOTICE_TIMEOUT_S = 10.0
ANSWER_S_MIN = 1.0  # the shortest wait for an agent's answer


class Shutdown:
    """`start_listening` and `close` are for the training thread. Signals are heard only if that is the main thread of
    the process. `leave_by_s`: when this rank must be gone, on the monotonic clock; inf if there is no deadline.
    `save_again(until_s)`: saves the last step anew, at another agent; training thread only."""

    def __init__(self, link: Link, tasks: Tasks, events: Events, settings: Settings) -> None:
        self.leave_by_s = math.inf
        self.save_again: Callable[[float], None] = lambda until_s: None
        self._link = link
        self._tasks = tasks
        self._events = events
        self._settings = settings
        self._signals: Signals | None = None
        # The deadline of each signal that came, by its name, on the monotonic clock.
        self._signal_deadlines: dict[str, float] = {}
        self._is_closed = Flag()  # ends only the threads of this object; others of `tasks` may still be needed
        self._changed = Condition()
        self._is_running = False  # whether the thread of `_watch_deadline` exists
        self._is_exiting = False
        # The restarts of the agent when this rank held for the verdict that it leaves; None: there is no such verdict.
        self._restarts_at_hold: int | None = None
        self._leave_lock = threading.Lock()  # the agent answers only one request to leave per rank

    def start_listening(self) -> None:
        """Starts to listen for signals (unless notices are off), and for what the agent says of the end."""
        self._link.on_deadline = self._on_deadline
        if self._settings.notices == "off":
            return
        warnings_s = dict.fromkeys(self._settings.warning_signals, self._settings.sigusr1_s)
        leads_s = {signal.SIGTERM: self._settings.sigterm_s, **warnings_s}
        signals = self._signals = Signals(leads_s, events=self._events)
        try:
            signals.__enter__()
        except UsageError as exc:
            self._signals = None
            text = f"ckpt: {', '.join(each.name for each in leads_s)} are not taken for notices: {exc}"
            self._events.emit("signals.unheard", text, loud=True)
            return
        self._tasks.start("signals", lambda: signals.listen(self._is_closed, self._on_signal, self._on_repeat))

    def wait_for_verdict(self, attempt: int) -> bool:
        """Waits for the verdict on the last appointment. Returns whether to leave. The wait has no time-out: the other
        ranks may have left, so a held rank never goes on by itself."""
        restarts = self._link.agent.restarts
        leave, by_s = self._request_verdict(attempt)
        if not leave:
            return False
        if by_s is not None:
            self._restarts_at_hold = restarts
            self._advance_deadline(by_s)
        # These signals were acted on, and are not delivered again.
        if self._signals is not None:
            for number in (signal.SIGTERM, *self._settings.warning_signals):
                self._signals.consume(number)
        return True

    def _request_verdict(self, attempt: int) -> tuple[bool, float | None]:
        """(whether to leave, the deadline). An agent that dies has told no rank to leave, or has written on the control
        page that it did. The next agent knows nothing of that save attempt, and answers: go on. If no agent comes any
        more, ranks on other nodes may have been told to leave. The job is broken then, and this rank's state is staged:
        it leaves."""
        while True:
            try:
                said = self._link.request("rank-holds", {"attempt": attempt}, None).fields
            except AgentError:
                if self._link.view.leave_attempt == attempt:
                    return True, math.inf  # the deadline is lost with the agent
                while not self._link.agent.is_rejoined:
                    if self._link.agent.is_given_up:
                        terms = self._link.terms
                        return (True, math.inf) if terms is not None and len(terms.nodes) > 1 else (False, None)
                    self._tasks.stopping.wait(RETRY_INTERVAL_S)
            else:
                return bool(said["leave"]), said.get("leave_deadline_s")

    def begin_exit(self, exit_s: float) -> float:
        """Notes that the training thread is at the end of the block. Returns until when it may wait there, on the
        monotonic clock."""
        with self._changed:
            self._is_exiting = True
        return min(time.monotonic() + exit_s, self.leave_by_s - RESERVE_S)

    def finish_early(self, exit_s: float) -> CkptError | None:
        """Lets running saves finish, after an exception has left the block. Returns the failure, if any."""
        began_s = time.monotonic()
        until_s = self.begin_exit(exit_s)
        if self._settings.restarts_left > 0 and self._restarts_at_hold is None:
            # The agent goes on without this rank, and a restart must not be delayed.
            return None
        if self._link.levels.has_pending_versions:
            left_s = max(0.0, until_s - time.monotonic())
            bound = "the notice's deadline" if until_s < began_s + exit_s else "ckpt.Limits(exit_s=)"
            text = f"ckpt: waiting up to {left_s:.0f} s for what is being saved (by {bound})"
            self._events.emit("exit.waiting", text, loud=True)
        return self.leave("exception" if self._restarts_at_hold is None else "notice", until_s)

    def leave(self, outcome: str, until_s: float) -> CkptError | None:
        """Tells the agent that this rank leaves, and waits for running saves. Returns the failure if something did not
        reach the store."""
        try:
            if outcome == "notice":
                # If the other thread holds the lock, it ends the process, and this wait never returns.
                with self._leave_lock:
                    if self._link.agent.restarts != self._restarts_at_hold:
                        self.save_again(until_s)  # the present agent does not have the last snapshot
                    said = self._leave_after_notice("", until_s, self.save_again)
            else:
                said = self._link.leave(outcome, max(1.0, until_s - time.monotonic())).fields
        except CkptError as exc:
            return exc if outcome != "normal" or not isinstance(exc, AgentError) else None
        error = said.get("error")
        return SaveFailed(str(error)) if outcome != "normal" and error else None

    def unsaved_error(self, version: Version, failure: CkptError) -> CommitFailed | None:
        """The error to raise if the wait for `version` ended with `failure`; None if the version is in the store all
        the same."""
        levels = self._link.levels
        newest = levels.newest("store")
        if newest is not None and newest >= version:
            return None
        text = str(failure)
        if self._link.agent.is_open and levels.level(version) != "none" and (keeps_s := self._settings.orphan_s):
            text += (
                f". This host's memory keeps step {version.step}: the agent goes on trying for {keeps_s / 60:.3g} min "
                "(12 times CKPT_LINGER_S), and a start on this host goes on from that step"
            )
        return CommitFailed(text)

    def _leave_after_notice(self, why: str, until_s: float, save_again: Callable[[float], None]) -> dict[str, Any]:
        """The agent's answer to a leave after a notice: the machine may be gone soon, so nobody comes later for what is
        staged. If the agent dies meanwhile another one is started, and `save_again(until_s)` is called. `why`: why the
        process is ended; "" if it leaves in order. Errors: as `Link.leave`; AgentError too if no other agent can be
        had."""
        link, by_s = self._link, self.leave_by_s if self.leave_by_s < math.inf else until_s
        until_s = max(until_s, time.monotonic() + ANSWER_S_MIN)
        notices = sorted(f"{SIGNAL_SOURCE} {key}" for key in self._signal_deadlines)
        while True:
            newest, now_s = link.levels.newest("store"), time.monotonic()
            committed = str(newest) if newest is not None else None
            told = {"why": why, "left_s": by_s - now_s, "committed": committed, "notices": notices}
            try:
                return link.leave("notice", max(0.0, until_s - now_s), **told).fields
            except AgentError as exc:
                if link.agent.is_open or link.superseded_by is not None or time.monotonic() >= until_s:
                    # The agent lives, and is too slow or refuses; or no other one is wanted.
                    raise
                link.agent.await_another(until_s, exc)
                save_again(until_s)

    def end_threads(self) -> None:
        """Ends the threads of this object, before their owner waits for them."""
        self._is_closed.set()
        with self._changed:
            self._changed.notify_all()
        if self._signals is not None:
            self._signals.wake()

    def close(self) -> None:
        """Comes after everything else: restores the signal handlers, and delivers a signal on which nobody has
        acted."""
        if self._signals is not None:
            self._signals.__exit__(None, None, None)
            self._signals = None

    # -- threads

    def _on_signal(self, word: NoticeChange) -> None:
        if not isinstance(word, Notice):
            return
        if self._signals is not None and (number := signal.Signals[word.key]) in self._settings.warning_signals:
            # The signal has no other meaning, so it is not delivered again.
            self._signals.consume(number)
        by_s = time.monotonic() + word.remaining_s
        self._advance_deadline(by_s)
        with self._changed:
            self._signal_deadlines[word.key] = by_s
        self._wake_thread()

    def _on_repeat(self, number: signal.Signals) -> None:
        _end_process(f"{number.name} came again")

    def _on_deadline(self, by_s: float) -> None:
        """The agent gives a deadline, or says that no boundary can be expected. Runs on the thread that reads the
        socket. The training thread may already be in a longer wait."""
        self._advance_deadline(by_s)
        self._wake_thread()

    def _advance_deadline(self, by_s: float) -> None:
        with self._changed:
            self.leave_by_s = min(self.leave_by_s, by_s)
            self._changed.notify_all()

    def _wake_thread(self) -> None:
        with self._changed:
            self._changed.notify_all()
            if self._is_running or self._is_closed.is_set():
                return
            self._is_running = True
        # `tasks` may be closed meanwhile.
        with contextlib.suppress(CkptError):
            self._tasks.start("parting", self._watch_deadline)

    def _watch_deadline(self) -> None:
        """Tells the agent of the signals that came, again after its restart. Ends the process when the agent says so,
        or at the deadline."""
        heard = (-1, 0)  # restarts of the agent when it was last told, and how many signals it was told of
        while True:
            with self._changed:
                came = dict(self._signal_deadlines)
                by_s = self.leave_by_s
                exiting = self._is_exiting
                end = self._link.end_order
            if self._is_closed.is_set():
                return
            if end is not None and not (end.is_after_saves and exiting):
                self._end_as_ordered(end)
            left_s = by_s - RESERVE_S - time.monotonic()
            if left_s <= 0:
                _end_process("the deadline has come")
            if heard != (self._link.agent.restarts, len(came)):
                heard = self._send_notices(came, heard)
            with self._changed:
                if (
                    not self._is_closed.is_set()
                    and self._link.end_order is end
                    and len(self._signal_deadlines) == len(came)
                ):
                    self._changed.wait(min(max(left_s, 0.0), RETRY_INTERVAL_S))

    def _send_notices(self, came: dict[str, float], heard: tuple[int, int]) -> tuple[int, int]:
        restarts = self._link.agent.restarts
        try:
            for key, by_s in came.items():
                # Seconds that are left, since clocks of hosts differ.
                told = {"key": key, "left_s": by_s - time.monotonic()}
                self._link.request("notice", told, NOTICE_TIMEOUT_S)
        except CkptError:
            # There is no agent just now.
            return heard
        return restarts, len(came)

    def _end_as_ordered(self, end: EndOrder) -> None:
        if end.is_after_saves and self._settings.restarts_left <= 0:
            with self._leave_lock, contextlib.suppress(CkptError):
                if self._is_exiting:
                    # The training thread came to the end of the block meanwhile, and has waited.
                    return
                self._leave_after_notice(end.reason, self.leave_by_s - RESERVE_S, lambda until_s: None)
                _end_process(end.reason)
        _end_process(end.reason)


def _end_process(why: str) -> None:
    """Ends the process at once, whatever other threads do and hold. Nothing here may wait for a lock."""
    with contextlib.suppress(OSError):
        os.write(2, f"ckpt: leaving at once: {why}\n".encode(errors="replace"))
    os._exit(NOTICE_EXIT_CODE)
