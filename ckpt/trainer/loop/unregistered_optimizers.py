"""Optimizers that train a part of the state and are not saved with it, so that a restart would not bring them back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ckpt.errors import is_from_outside
from ckpt.events import Events
from ckpt.trainer.snapshot.deferred_copy import params_of, state_of
from ckpt.trainer.state.shard import storages
from ckpt.trainer.state.state_walk import Walk
from ckpt.types import counted

SEARCHED_MAX = 100_000  # of what hangs on the state, for what may hold an optimizer
SEALED = (str, bytes, type, ModuleType, Tensor, nn.Module, Optimizer, LRScheduler)  # in which nothing is searched


class UnregisteredOptimizers:
    """Meets the optimizers that train a part of the state. `boundaries`: how many there were. `due`: those that are to
    be looked at, which have stepped in a second step: one that is made anew for each step is not to come back. `open`:
    those that nothing was found to hold, by their role: once for all of a class that train the same, as one that is
    made anew every few steps is no other."""

    def __init__(self, events: Events) -> None:
        self.boundaries = 0
        self.due: list[Optimizer] = []
        self.open: dict[tuple[type, int], ref[Optimizer]] = {}
        self._events = events
        # By id, after which boundary it has stepped first; None: done with. Some have no hash, or are equal to others.
        self._met: dict[int, tuple[ref[Optimizer], int | None]] = {}
        self._looked_at: set[tuple[type, int]] = set()

    def pass_over(self, optimizers: Iterable[ref[Optimizer]]) -> None:
        """They are in the state by themselves."""
        for each in optimizers:
            if (optimizer := each()) is not None:
                self._met[id(optimizer)] = each, None

    def stepped(self, optimizer: Optimizer) -> None:
        met, first = self._met.get(id(optimizer), (None, None))
        if met is None or met() is not optimizer:
            self._met[id(optimizer)] = ref(optimizer), self.boundaries
        elif first not in (None, self.boundaries):
            self._met[id(optimizer)] = met, None
            self.due.append(optimizer)

    def look(self, states: Iterable[dict[str, Any]]) -> None:
        """At a boundary. Leaves open what no object holds in one of these, the states of all Checkpointers of this
        process. What an object may have copies of is its own affair."""
        due, self.due = self.due, []
        kept = [each for each in due if _tensors(each) and _role(each) not in self._looked_at]
        held, is_searched = find_held(kept, states) if kept else (set(), True)
        if is_searched:
            self.open.update((_role(each), ref(each)) for each in kept if id(each) not in held)

    def name(self, walk: Walk, others: Iterable[Walk]) -> None:
        """An event for those of `open` whose state would not come back with what was walked; such as one that was not
        registered, or that another optimizer steps for itself. `walk`: of now, made for a snapshot; one more would ask
        objects for their state where other ranks do not, and they may do so together. `others`: of other
        Checkpointers."""
        found = {role: optimizer for role, each in self.open.items() if (optimizer := each()) is not None}
        self.open = {}
        self._looked_at.update(found)
        saved = walk.storages.union(*(each.storages for each in others))
        lost = [each for each in found.values() if (of_it := storages(_tensors(each))) and not of_it & saved]
        if not lost:
            return
        kind, trained = type(lost[0]).__name__, storages(params_of(lost[0]))
        lines = zip(walk.layout.entries, walk.tensors, strict=True)
        name = next((entry.name for entry, line in lines if storages(line) & trained), "a part of the state")
        more = f" (and {counted(len(lost) - 1, 'other')} like it)" if len(lost) > 1 else ""
        self._events.emit(
            "optimizer.unsaved",
            f"ckpt: the {kind} that trains {name} is not in the state{more}: a restart begins with a new one, "
            "without what this one has gathered. Register it as well",
            loud=True,
            optimizer=kind,
            tensor=name,
        )


def _tensors(optimizer: Optimizer) -> list[Tensor]:
    return [each for each in state_of(optimizer) if isinstance(each, Tensor)]


def _role(optimizer: Optimizer) -> tuple[type, int]:
    return type(optimizer), next(map(id, params_of(optimizer)), 0)


def find_held(optimizers: Sequence[Optimizer], states: Iterable[dict[str, Any]]) -> tuple[set[int], bool]:
    """By id, those that an object of these states holds, and so may save in a way of its own; and whether all was
    searched. A scheduler does not, a module neither, and what an optimizer saves of another one is in the walk. One
    search for all: there may be one for each parameter."""
    sought, found = set(map(id, optimizers)), set[int]()
    seen: set[int] = set()
    held: list[Any] = [*states]
    try:
        while held and len(seen) < SEARCHED_MAX:
            value = held.pop()
            if id(value) in sought:
                found.add(id(value))
            if id(value) in seen or isinstance(value, SEALED):
                continue
            seen.add(id(value))
            inner = value if isinstance(value, (dict, list, tuple, set)) else getattr(value, "__dict__", {})
            if len(inner) <= SEARCHED_MAX:
                held += inner.values() if isinstance(inner, dict) else inner
    except Exception as exc:  # what may lie in a state has code of its own
        if is_from_outside(exc):
            raise
        return found, False
    return found, not held
