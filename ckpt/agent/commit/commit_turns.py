"""When a node that is left of a job begins to commit what is in its memory. Pure; seconds of one clock.

It counts from when nobody here has anything to do with the job any more. The nodes have turns, in the order of the job,
so that the others need not begin once it is done; what came to nothing is tried again, later each time. Once the memory
is not kept any more nothing is begun: two nodes that fail in turn must not keep each other for ever.
"""

from __future__ import annotations

AFTER_S = 30.0  # until the first node's turn; as long again until the next one's
TURNS = 3  # all further nodes have the last one
AFTER_OF_LINGER = 1 / (TURNS + 1)  # at most, so that the last turn comes before the memory is given up
DOUBLED_MAX = 5  # times that the pause after an attempt is


class CommitTurns:
    """`linger_s`: how long memory is kept. `settled`: what is kept is in the store, or never will be."""

    def __init__(self, linger_s: float) -> None:
        self.settled = False
        self._linger_s = linger_s
        self._pause_s = min(AFTER_S, AFTER_OF_LINGER * linger_s)
        self._alone_s: float | None = None
        self._again_s = 0.0  # not before that
        self._attempts = 0

    def busy(self) -> None:
        """Somebody here, or the coordinator, has to do with the job: more may be saved."""
        self._alone_s, self._again_s, self._attempts, self.settled = None, 0.0, 0, False

    def due_s(self, turn: int, now_s: float) -> float | None:
        """When the node whose turn it is, counted from 0, begins; None: not as things are. Nobody is here now."""
        if self._alone_s is None:
            self._alone_s = now_s
        at_s = max(self._alone_s + (1 + min(turn, TURNS - 1)) * self._pause_s, self._again_s, now_s)
        return at_s if at_s < self._alone_s + self._linger_s and not self.settled else None

    def ended(self, now_s: float) -> None:
        """An attempt has. The others have their turns before the next."""
        self._again_s = now_s + self._pause_s * 2 ** min(self._attempts, DOUBLED_MAX)
        self._attempts += 1
