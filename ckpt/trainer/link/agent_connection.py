"""The connection to this node's agent, and how it is made again when the agent dies.

When the agent dies, nothing is appointed until another one serves. The first trainer that notices starts it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ckpt.errors import AgentError, CkptError, NoCoordinator
from ckpt.events import Events
from ckpt.ipc.client import Connection
from ckpt.threads import Tasks

RECONNECT_TRIES = 20
CUT_OFF_S_MAX = 600.0  # how long this node's agent may be cut off from rank 0's before saving is given up
FAILED_RESTARTS_MAX = 8  # agents are given up after so many deaths in a row without progress
SERVED_S = 60.0  # an agent that has served for so long counts as progress, even if nothing was saved
RETRY_INTERVAL_S = 0.05


class AgentConnection:
    """`connect()` makes a connection; `rejoin()` makes this rank a member there again. `wait_for_copies()` returns once
    no snapshot is being written. `on_given_up()`: no agent will be connected again.

    `is_wanted`: whether another agent is started if this one dies: not before the join, and not once the rank leaves.
    `restarts`: how often another agent was joined."""

    def __init__(
        self,
        connect: Callable[[], Connection],
        rejoin: Callable[[], None],
        wait_for_copies: Callable[[], None],
        on_given_up: Callable[[], None],
        events: Events,
        tasks: Tasks,
    ) -> None:
        self.is_wanted = False
        self.restarts = 0
        self.present: Connection | None = None
        self._connect, self._rejoin, self._wait_for_copies = connect, rejoin, wait_for_copies
        self._on_given_up = on_given_up
        self._events, self._tasks = events, tasks
        self._failed_restarts = 0  # restarts of the agent since it last made progress
        self._connected_since_s = 0.0
        self._lost_incarnation = ""  # the incarnation of the agent that was lost last; it may still live
        self._is_reconnecting = self._has_given_up = False
        self._lock = threading.RLock()

    def connect(self) -> None:
        """Connects to this node's agent, and starts one if there is none. Errors: AgentError."""
        self.present = self._connect()

    @property
    def connection(self) -> Connection:
        """The present connection. Errors: AgentError if there is no agent."""
        if (present := self.present) is None:
            state = "it could not be started again" if self._has_given_up else "it is being started again"
            raise AgentError(f"there is no agent at present; {state}")
        return present

    @property
    def is_open(self) -> bool:
        """Whether an agent is connected, even one that knows nothing of this rank."""
        return (present := self.present) is not None and present.is_open

    @property
    def is_rejoined(self) -> bool:
        """Whether an agent is connected that knows this rank."""
        with self._lock:
            return self.is_open and not self._is_reconnecting

    @property
    def is_given_up(self) -> bool:
        """Whether no agent will be connected again."""
        return self._has_given_up or not self.is_wanted

    def note_progress(self) -> None:
        """Notes that the agent has reported on a checkpoint."""
        self._failed_restarts = 0

    def on_lost(self, why: str, is_follower: bool, then: str = "Training goes on") -> None:
        """The connection is lost. `is_follower`: the agent also closes it when it has lost that of rank 0's node."""
        with self._lock:
            if self.is_open:
                return  # an earlier connection was lost
            if self.present is not None and not self._is_reconnecting:
                self._lost_incarnation = self.present.incarnation
            self.present = None
            is_restarted = self.is_wanted and not self._is_reconnecting
            self._is_reconnecting |= is_restarted
            if is_restarted and time.monotonic() >= self._connected_since_s + SERVED_S:
                self._failed_restarts = 0
        if is_restarted:
            text = f"the agent is gone ({why}); starting it again"
            if is_follower:
                text = f"the agent is gone, or cut off from that of rank 0's node ({why}); connecting again"
            self._events.emit("agent.lost", f"ckpt: {text}. {then}", loud=True)
            self._tasks.start("reconnect", self._reconnect)

    def _reconnect(self) -> None:
        """Connects to another agent. Only one such thread runs at a time: two would take each other's place at the
        agent for ever. It ends when this rank leaves."""
        self._wait_for_copies()
        self._failed_restarts += 1
        delay_s = RETRY_INTERVAL_S * 2 ** (self._failed_restarts - 1)
        if self._failed_restarts > 1:
            self._tasks.stopping.wait(min(delay_s, 10.0))
        tries = RECONNECT_TRIES if self._failed_restarts <= FAILED_RESTARTS_MAX else 0
        until_s = time.monotonic() + CUT_OFF_S_MAX
        while tries and self.is_wanted and not self._tasks.stopping.is_set():
            tries -= 1
            try:
                self._rejoin()
            except (CkptError, OSError) as exc:
                what = "serves no rank" if isinstance(exc, NoCoordinator) else "could not be started again"
                self._events.emit("agent.restart_failed", f"ckpt: the agent {what} yet: {exc}")
                self.drop()
                tries += isinstance(exc, NoCoordinator) and time.monotonic() < until_s
                self._tasks.stopping.wait(delay_s)
                delay_s = min(10.0, 2 * delay_s)
                continue
            with self._lock:
                connection = self.present
                if connection is None or not connection.is_open:
                    # The agent is gone again, and `on_lost` has left it to this thread.
                    continue
                self._is_reconnecting, self._connected_since_s = False, time.monotonic()
            self.restarts += 1
            how = "is the same as before" if connection.incarnation == self._lost_incarnation else "was started again"
            self._events.emit("agent.restarted", f"ckpt: the agent {how} and has the arenas", loud=True)
            return
        with self._lock:
            self._is_reconnecting = False
            self._has_given_up = True
        self._on_given_up()
        if self.is_wanted:
            text = "ckpt: the agent, which saves for this job, could not be started again. This job saves nothing more"
            self._events.emit("agent.given_up", f"{text}: start it again", loud=True)

    def await_another(self, until_s: float, why: AgentError) -> None:
        """Waits until another agent is joined, for a rank that leaves. Errors: AgentError if there is none by then."""
        self.is_wanted = True
        self.on_lost(str(why), False, "The last step is saved there")
        while not self.is_rejoined:
            if self.is_given_up or time.monotonic() >= until_s or self._tasks.stopping.wait(RETRY_INTERVAL_S):
                raise AgentError("the agent is gone, and none could be started again before the end")

    def drop(self) -> None:
        if self.present is not None:
            self.present.close()
            self.present = None

    def abandon_in_child(self) -> None:
        """In a forked child: closes what would keep the socket alive."""
        self.is_wanted = False
        if self.present is not None:
            self.present.abandon_in_child()
