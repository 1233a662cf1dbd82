"""Warnings about data that a restart would repeat or skip, from how the loaders move in the running loop.

`LoaderWatch` compares the positions of the state's loaders at the first boundaries. Each finding is one event, as a
warning:

- `loader.missing`: the state has no loader;
- `loader.early`: the loop draws from an iterator that was made before the block;
- `loader.not_moving`: no loader of the state moves while steps end;
- `loader.ahead`: batches were drawn before the steps that train on them;
- `loader.inexact`: a loader's iterable dataset has no state;
- `epoch.repeated`: an epoch is counted after a save, a poll or a step's end that comes when its data has ended.

The position of a torchdata loader, or of one with drawn_batches(), is read without asking it for its state. A loader of
another make is asked for its state at three boundaries, on all ranks, since it may gather the state in a collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import xxhash

from ckpt.errors import is_injected
from ckpt.events import Events
from ckpt.format import values
from ckpt.trainer.state import loaders, state_nodes, value_trees
from ckpt.trainer.state.loaders import LoaderPosition, find_position
from ckpt.trainer.state.names import join, shorten_names
from ckpt.trainer.state.state_nodes import LoaderNode, ObjectNode, OptimizerNode, StateNode

ASKED_STEPS = (1, 2, 16)  # steps after the start at which loaders of other makes are asked for their state
LAST_STEP = ASKED_STEPS[-1]
# A number of batches n per step is the usual one after ALIKE * n steps in a row that draw n.
ALIKE_FACTOR = 4
DRAWS_MAX = 64  # steps in which that has to happen
ENDS_MAX = 3  # ends of passes that are checked
SEEN_ENDS_MAX = 1000  # ends that are looked at; most may belong to loaders from which nobody draws
COUNTERS_MAX = 1000
GUIDE = "(docs/guides/loops.md)"


class LoaderWatch:
    """Watches the loaders in `state`. It is made before the state is restored; `begin_watch` comes after the restore.
    From then on the training thread reports boundaries, as long as the watch `is_open`, and polls and saves. It never
    fails: an error of a loader ends the watch."""

    def __init__(self, state: dict[str, Any], events: Events) -> None:
        self.is_open = True
        self._state = state
        self._events = events
        self._is_reporting = False
        self._step_count = 0
        self._first_counters: dict[str, int] = {}
        self._early_iterators: list[_EarlyIterator] = []
        self._watched_loaders: list[_WatchedLoader] = []
        self._epoch_counters = EpochCounters(state)
        with self._end_on_error():
            self._early_iterators = [*filter(None, map(_EarlyIterator.find, self._nodes()))]

    def begin_watch(self, is_told: bool) -> None:
        """The state is restored. `is_told`: this rank emits the findings."""
        with self._end_on_error():
            self._is_reporting = is_told
            found = self._nodes()
            for node in found:
                # The loader then refuses iterators that were drawn from before, which is better than a warning.
                if callable(begin_run := getattr(node.value, "begin_run", None)):
                    begin_run()
            if is_told:
                loaders.warn_inexact(found, self._events)
            self._watched_loaders = [_WatchedLoader(node) for node in found]
            self._first_counters = find_counters(self._state)

    def note_boundary(self) -> None:
        """Notes that a step has ended."""
        with self._end_on_error():
            self._step_count += 1
            self._check_loaders()
            ends = self._epoch_counters
            if repeated := ends.note_boundary(self._loaders()):
                self._report_repeated_epoch(repeated)
            undecided = any(each.draw_counts is not None for each in self._watched_loaders)
            is_wrapped = any(state_nodes.held_loader(each) is not each for each in self._loaders())
            self.is_open = (
                self._step_count < LAST_STEP or undecided or ends.is_pending or (is_wrapped and not ends.is_done)
            )

    def note_poll(self) -> None:
        """Notes a poll or a save after a step has ended."""
        if self._watched_loaders and not self._epoch_counters.is_done:
            with self._end_on_error():
                self._epoch_counters.check_pass_ends(self._loaders())
                self.is_open |= self._epoch_counters.is_pending

    # -- inside

    def _check_loaders(self) -> None:
        if self._step_count == 1 and self._lacks_loader():
            self._emit(
                "loader.missing",
                "the state has no loader: after a restart the steps go on, but the data begins at its first batch "
                f"again, unless the script skips to the right place. Put the loader into the state {GUIDE}",
            )
        for early in self._early_iterators:
            if early.is_drawn_from():
                self._early_iterators, self._watched_loaders = [], []
                self._emit(
                    "loader.early",
                    f"{early.path}: the loop draws from an iterator that was made before the block, and that is not "
                    "restored: every restart begins at its first batch again. Make the iterator in the block "
                    f"(batches = iter(loader)) {GUIDE}",
                    loader=early.path,
                )
                return
        for each in self._watched_loaders:
            is_early = self._step_count <= LAST_STEP
            if is_early and each.check_moved(self._step_count) and loaders.is_stateless(each.loader):
                # After a restart this loader counts its batches twice.
                each.draw_counts = None
                self._emit("loader.inexact", f"{each.path}: {loaders.STATELESS}", loader=each.path)
            if ahead := each.count_ahead():
                drawn = f"{ahead} more batches were drawn than the steps take ({each.usual_draws} each)"
                self._emit(
                    "loader.ahead",
                    f"{each.path}: {drawn}. If these batches wait for their steps, a restart skips them. Put "
                    "ck.steps(n) first in zip(). If something prefetches, let it count what it hands out, and register "
                    f"it instead of the loader {GUIDE}",
                    loader=each.path,
                    batches=ahead,
                )
        paths = [each.path for each in self._watched_loaders]
        if self._step_count == LAST_STEP and paths and not any(each.has_moved for each in self._watched_loaders):
            self._early_iterators = []
            self._emit(
                "loader.not_moving",
                f"{shorten_names(paths)}: {LAST_STEP} steps have ended, and the position has not moved: every restart "
                f"draws the same batches again. Make the iterator in the block, from the loader in the state {GUIDE}",
                loaders=paths,
            )

    def _report_repeated_epoch(self, name: str) -> None:
        self._emit(
            "epoch.repeated",
            f"state[{name!r}] is counted too late: the epoch's data had ended, and the state could be saved before "
            "the count. A restart from there repeats that epoch. Count where the data ends: in a generator that the "
            "loop draws from, after its `yield from loader`. If each batch is a step, count directly after the loop. "
            f"With a loader of Accelerate's, count in the last step of the epoch {GUIDE}",
            counter=name,
        )

    def _lacks_loader(self) -> bool:
        """Whether an optimizer trains, but nothing in the state can hold the position of the data: no loader, no object
        of the user's, no number that is counted with the steps."""
        found = state_nodes.find_nodes(self._state)
        objects = [node.value for node in found if isinstance(node, ObjectNode)]
        return (
            any(isinstance(node, OptimizerNode) for node in found)
            and not any(isinstance(node, LoaderNode) for node in found)
            and all(type(each).__module__.partition(".")[0] == "torch" for each in objects)
            and find_counters(self._state) == self._first_counters
        )

    def _nodes(self) -> list[StateNode]:
        return [node for node in state_nodes.find_nodes(self._state) if isinstance(node, LoaderNode)]

    def _loaders(self) -> list[Any]:
        return [each.loader for each in self._watched_loaders]

    def _emit(self, name: str, text: str, **data: Any) -> None:
        if self._is_reporting:
            self._events.emit(name, f"ckpt: {text}", loud=True, **data)

    @contextlib.contextmanager
    def _end_on_error(self) -> Iterator[None]:
        """Ends the watch if something fails: a loader runs code of its own, and the user may change the state."""
        try:
            yield
        except Exception as exc:
            if is_injected(exc):
                raise
            self.is_open, self._early_iterators, self._watched_loaders = False, [], []


@dataclass(frozen=True, slots=True)
class _EarlyIterator:
    """An iterator over a torchdata loader, made before the block. `position`: its position then."""

    path: str
    iterator: ref[Any]
    position: LoaderPosition

    @classmethod
    def find(cls, node: StateNode) -> _EarlyIterator | None:
        iterator = loaders.find_iterator(node.value)
        if iterator is None:
            return None
        return cls(node.path, ref(iterator), LoaderPosition(iterator._sampler_iter, iterator._num_yielded))

    def is_drawn_from(self) -> bool:
        """Whether the iterator has moved within the same pass. Persistent workers keep the iterator for later
        passes."""
        iterator = self.iterator()
        if iterator is None or iterator._sampler_iter is not self.position.current_pass:
            return False
        return bool(iterator._num_yielded > self.position.batches)


class _WatchedLoader:
    """A loader of the state in the first steps. `draw_counts`: how many batches each step has drawn; None: counting is
    over. `usual_draws`: how many the last step has drawn."""

    def __init__(self, node: StateNode) -> None:
        self.path = node.path
        self.has_moved = False
        self.draw_counts: list[int] | None = None
        self.usual_draws = 0
        self._node = node
        self._first_position: LoaderPosition | bytes | None = find_position(self.loader)
        if isinstance(self._first_position, LoaderPosition):
            self.draw_counts = []
            # If a pass had begun before the block, the loop begins a new one.
            self._last_position = (
                self._first_position if self._first_position.current_pass is None else LoaderPosition(None, 0)
            )

    @property
    def loader(self) -> Any:
        return self._node.value

    def check_moved(self, step: int) -> bool:
        """Whether the loader is torchdata's and has just been seen to move for the first time."""
        if self.has_moved:
            return False
        now = find_position(self.loader)
        if now is None and step not in ASKED_STEPS:
            return False
        stands: LoaderPosition | bytes | None = _digest(self.loader) if now is None else now
        if self._first_position is None:
            self._first_position = stands
        self.has_moved = stands != self._first_position
        return self.has_moved and now is not None

    def count_ahead(self) -> int:
        """How many batches more were drawn than the steps use, once that is known; 0: none, or not known."""
        if self.draw_counts is None:
            return 0
        drawn = self._count_drawn(most=max(self.draw_counts, default=0))
        # Batches that wait were drawn in the first steps. If a later step draws more, the steps differ or skip batches.
        if drawn is None or len(self.draw_counts) == DRAWS_MAX or (self.draw_counts and drawn > self.draw_counts[-1]):
            self.draw_counts = None
            return 0
        self.draw_counts.append(drawn)
        self.usual_draws = drawn
        alike = ALIKE_FACTOR * self.usual_draws
        if not alike or len(self.draw_counts) < alike or set(self.draw_counts[-alike:]) != {self.usual_draws}:
            return 0
        ahead, self.draw_counts = sum(self.draw_counts) - self.usual_draws * len(self.draw_counts), None
        return max(0, ahead)

    def _count_drawn(self, most: int) -> int | None:
        """The batches drawn since the last boundary; None if that is unknown. `most`: the most that one step has drawn
        so far."""
        last, now = self._last_position, find_position(self.loader)
        if now is None:
            return None
        self._last_position = now
        if last.current_pass is None or now.current_pass is last.current_pass:
            return now.batches - last.batches if now.batches >= last.batches else now.batches
        # Another pass has begun: the rest of the last pass counts, and the new one's batches.
        total = loaders.batches_per_pass(self.loader)
        if total is None or total - last.batches > most:
            return None
        return total - last.batches + now.batches


def _digest(loader: Any) -> bytes:
    return xxhash.xxh3_128_digest(values.encode(value_trees.embed_tensors(loader.state_dict(), "loader")))


class EpochCounters:
    """A check whether the loop counts an epoch too late: the state may be saved when the data has ended, but not the
    count. `is_pending`: the next boundary is needed. `is_done`: the check is over.

    1. A poll, a save or a boundary comes while a torchdata loader is at the end of a pass. A restart from there begins
       the next pass.
    2. At the boundary after that, the loader is within its next pass.
    3. At the boundary after that one, some whole number of the state is one more than at 1, and the same as at 2. So it
       counts epochs, not steps, and at 1 the ended epoch was not counted. A restart from there would count the next
       pass as the same epoch."""

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
