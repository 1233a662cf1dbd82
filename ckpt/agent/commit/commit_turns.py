"""The turns of the remaining nodes to commit an orphaned checkpoint. Pure; times are seconds of one clock.

Time counts from when no process on this node works for the job any more. The nodes take turns in the job's order, so
that later nodes need not begin once an earlier one has committed. A failed attempt is repeated after a pause that
doubles. No attempt begins after the linger time, when the memory is given up. Otherwise two nodes that fail in turn
could keep each other alive for ever.
"""

from __future__ import annotations

AFTER_S = 30.0  # until the first node's turn; as long again until the next one's
TURNS = 3  # all further nodes share the last turn
# At most this part of the linger time, so that the last turn comes before the memory is given up.
AFTER_OF_LINGER = 1 / (TURNS + 1)
DOUBLED_MAX = 5  # the number of times that the pause doubles


class CommitTurns:
    """The turn of this node. `linger_s`: how long this node keeps the memory. `settled`: the checkpoint is in the
    store, or never will be."""

    def __init__(self, linger_s: float) -> None:
        self.settled = False
        self._linger_s = linger_s
        self._pause_s = min(AFTER_S, AFTER_OF_LINGER * linger_s)
        self._alone_s: float | None = None
        self._again_s = 0.0  # no attempt before this time
        self._attempts = 0

    def busy(self) -> None:
        """The job has a process here, or its coordinator is back, so it may save more: the turns start anew."""
        self._alone_s, self._again_s, self._attempts, self.settled = None, 0.0, 0, False

    def due_s(self, turn: int, now_s: float) -> float | None:
        """When the node of this turn, counted from 0, may begin; None: not in the present state. Called only while no
        process here works for the job."""
        if self._alone_s is None:
            self._alone_s = now_s
        at_s = max(self._alone_s + (1 + min(turn, TURNS - 1)) * self._pause_s, self._again_s, now_s)
        return at_s if at_s < self._alone_s + self._linger_s and not self.settled else None

    def ended(self, now_s: float) -> None:
        """An attempt has ended. The other nodes have their turns before this node's next attempt."""
        self._again_s = now_s + self._pause_s * 2 ** min(self._attempts, DOUBLED_MAX)
        self._attempts += 1
