"""A check whether the loop counts an epoch too late: the state may be saved when the data has ended, but not the count.

1. A poll, a save or a boundary comes while a torchdata loader is at the end of a pass. A restart from there begins the
   next pass.
2. At the boundary after that, the loader is within its next pass.
3. At the boundary after that one, some whole number of the state is one more than at 1, and the same as at 2. So it
   counts epochs, not steps, and at 1 the ended epoch was not counted. A restart from there would count the next pass as
   the same epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt.trainer.state import value_trees
from ckpt.trainer.state.loaders import place
from ckpt.trainer.state.names import join

ENDS_MAX = 3  # ends of passes that are checked
LOOKS_MAX = 1000  # ends that are looked at; most may belong to loaders from which nobody draws
COUNTERS_MAX = 1000


class EpochCounters:
    """The check for one `state`. `is_pending`: the next boundary is needed. `is_done`: the check is over."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.is_pending = self.is_done = False
        self._state = state
        self._ends = self._looks = 0
        self._ended: dict[int, object] = {}  # the pass that had ended, by index of the loader
        self._found: list[dict[str, int]] = []

    def look(self, loaders: Sequence[Any]) -> None:
        """Step 1, at a poll, a save or a boundary."""
        if self.is_done or self.is_pending:
            return
        places = enumerate(map(place, loaders))
        self._ended = {index: stands.one for index, stands in places if stands is not None and stands.at_end}
        if self._ended:
            self._found, self.is_pending = [counters(self._state)], True
            self._looks += 1

    def boundary(self, loaders: Sequence[Any]) -> str:
        """Steps 2 and 3. Returns the name of a number that counts epochs too late; "" if none is known."""
        late = ""
        if self.is_pending:
            if len(self._found) == 1 and not self._has_begun(loaders):
                self._found, self.is_pending = [], False
            else:
                self._found.append(counters(self._state))
        if len(self._found) == 3:
            at_end, next_pass, then = self._found
            moved = (name for name, number in at_end.items() if next_pass.get(name) == then.get(name) == number + 1)
            late = next(moved, "")
            self._found, self.is_pending = [], False
            self._ends += 1
        self.is_done |= bool(late) or self._ends == ENDS_MAX or self._looks >= LOOKS_MAX
        self.look(loaders)
        return late

    def _has_begun(self, loaders: Sequence[Any]) -> bool:
        """Whether a loader that had ended its pass is within another pass."""
        for index, one in self._ended.items():
            stands = place(loaders[index])
            if stands is not None and stands.one is not one and not stands.at_end:
                return True
        return False


def counters(state: dict[str, Any]) -> dict[str, int]:
    """The whole numbers among the plain values of a state, by name; at most COUNTERS_MAX."""
    found: dict[str, int] = {}
    _collect(state, "", 0, found)
    return found


def _collect(value: Any, path: str, depth: int, found: dict[str, int]) -> None:
    if depth > value_trees.DEPTH_MAX or len(found) >= COUNTERS_MAX:
        return
    if type(value) is int:
        found[path] = value
    elif isinstance(value, dict):
        for key, each in list(value.items())[:COUNTERS_MAX]:
            _collect(each, join(path, key), depth + 1, found)
    elif isinstance(value, list | tuple):
        for key, each in enumerate(value[:COUNTERS_MAX]):
            _collect(each, join(path, key), depth + 1, found)
