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
from ckpt.trainer.state.loaders import find_position
from ckpt.trainer.state.names import join

ENDS_MAX = 3  # ends of passes that are checked
SEEN_ENDS_MAX = 1000  # ends that are looked at; most may belong to loaders from which nobody draws
COUNTERS_MAX = 1000


class EpochCounters:
    """The check for one `state`. `is_pending`: the next boundary is needed. `is_done`: the check is over."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.is_pending = self.is_done = False
        self._state = state
        self._checked_ends = self._seen_ends = 0
        self._ended_passes: dict[int, object] = {}  # the pass that had ended, by index of the loader
        self._counter_history: list[dict[str, int]] = []

    def check_pass_ends(self, loaders: Sequence[Any]) -> None:
        """Step 1, at a poll, a save or a boundary."""
        if self.is_done or self.is_pending:
            return
        places = enumerate(map(find_position, loaders))
        self._ended_passes = {
            index: stands.current_pass for index, stands in places if stands is not None and stands.is_at_end
        }
        if self._ended_passes:
            self._counter_history, self.is_pending = [find_counters(self._state)], True
            self._seen_ends += 1

    def note_boundary(self, loaders: Sequence[Any]) -> str:
        """Steps 2 and 3. Returns the name of a number that counts epochs too late; "" if none is known."""
        late = ""
        if self.is_pending:
            if len(self._counter_history) == 1 and not self._has_next_pass(loaders):
                self._counter_history, self.is_pending = [], False
            else:
                self._counter_history.append(find_counters(self._state))
        if len(self._counter_history) == 3:
            at_end, next_pass, then = self._counter_history
            moved = (name for name, number in at_end.items() if next_pass.get(name) == then.get(name) == number + 1)
            late = next(moved, "")
            self._counter_history, self.is_pending = [], False
            self._checked_ends += 1
        self.is_done |= bool(late) or self._checked_ends == ENDS_MAX or self._seen_ends >= SEEN_ENDS_MAX
        self.check_pass_ends(loaders)
        return late

    def _has_next_pass(self, loaders: Sequence[Any]) -> bool:
        """Whether a loader that had ended its pass is within another pass."""
        for index, one in self._ended_passes.items():
            stands = find_position(loaders[index])
            if stands is not None and stands.current_pass is not one and not stands.is_at_end:
                return True
        return False


def find_counters(state: dict[str, Any]) -> dict[str, int]:
    """The whole numbers among the plain values of a state, by name; at most COUNTERS_MAX."""
    found: dict[str, int] = {}
    _collect_counters(state, "", 0, found)
    return found


def _collect_counters(value: Any, path: str, depth: int, found: dict[str, int]) -> None:
    if depth > value_trees.DEPTH_MAX or len(found) >= COUNTERS_MAX:
        return
    if type(value) is int:
        found[path] = value
    elif isinstance(value, dict):
        for key, each in list(value.items())[:COUNTERS_MAX]:
            _collect_counters(each, join(path, key), depth + 1, found)
    elif isinstance(value, list | tuple):
        for key, each in enumerate(value[:COUNTERS_MAX]):
            _collect_counters(each, join(path, key), depth + 1, found)
