"""The turns of the remaining nodes to commit an orphaned checkpoint. Pure; times are seconds of one clock.

Time counts from when no process on this node works for the job any more. The nodes take turns in the job's order, so
that later nodes need not begin once an earlier one has committed. A failed attempt is repeated after a pause that
doubles. No attempt begins after the linger time, when the memory is given up. Otherwise two nodes that fail in turn
could keep each other alive for ever. A memory-only node gives its memory up only when it is asked to end.
"""

from __future__ import annotations

TURN_PAUSE_S = 30.0  # until the first node's turn, usually; as long again until the next one's
TURNS = 3  # all further nodes share the last turn
# At most this part of the linger time, so that the last turn comes before the memory is given up.
PAUSE_OF_LINGER_MAX = 1 / (TURNS + 1)
DOUBLINGS_MAX = 5  # the number of times that the pause doubles


class CommitTurns:
    """The turn of this node. `linger_s`: how long this node keeps the memory. `first_s`: until the first node's turn.
    `is_settled`: the checkpoint is in the store, or never will be."""

    def __init__(self, linger_s: float, first_s: float = TURN_PAUSE_S) -> None:
        self.is_settled = False
        self._linger_s = linger_s
        self._pause_s = min(TURN_PAUSE_S, PAUSE_OF_LINGER_MAX * linger_s)
        self._first_s = min(first_s, PAUSE_OF_LINGER_MAX * linger_s)
        self._orphaned_since_s: float | None = None
        self._next_attempt_s = 0.0  # no attempt before this time
        self._attempts = 0

    def restart_turns(self) -> None:
        """The job has a process here, or its coordinator is back, so it may save more: the turns start anew."""
        self._orphaned_since_s, self._next_attempt_s, self._attempts, self.is_settled = None, 0.0, 0, False

    def due_s(self, turn: int, now_s: float) -> float | None:
        """When the node of this turn, counted from 0, may begin; None: not in the present state. Called only while no
        process here works for the job."""
        if self._orphaned_since_s is None:
            self._orphaned_since_s = now_s
        turn_s = self._orphaned_since_s + self._first_s + min(turn, TURNS - 1) * self._pause_s
        at_s = max(turn_s, self._next_attempt_s, now_s)
        return at_s if at_s < self._orphaned_since_s + self._linger_s and not self.is_settled else None

    def record_attempt(self, now_s: float) -> None:
        """An attempt has ended. The other nodes have their turns before this node's next attempt."""
        self._next_attempt_s = now_s + self._pause_s * 2 ** min(self._attempts, DOUBLINGS_MAX)
        self._attempts += 1
