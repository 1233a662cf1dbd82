"""Optimizers that train a part of the state but are not saved with it: a restart would lose what they have gathered."""

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

SEARCHED_MAX = 100_000  # objects that are searched for optimizers, reachable from the state
# Types whose insides are not searched.
SEALED = (str, bytes, type, ModuleType, Tensor, nn.Module, Optimizer, LRScheduler)


class UnregisteredOptimizers:
    """Finds the optimizers that train a part of the state and are not saved.

    `boundaries`: how many boundaries there were. `due`: optimizers to examine, which have stepped in a second step: one
    that is made anew for each step need not be restored. `open`: examined optimizers that no object was found to hold,
    by role. One entry stands for all of a class that train the same parameters: an optimizer may be made anew every few
    steps."""

    def __init__(self, events: Events) -> None:
        self.boundaries = 0
        self.due: list[Optimizer] = []
        self.open: dict[tuple[type, int], ref[Optimizer]] = {}
        self._events = events
        # The boundary after which each optimizer first stepped; None: done. By id: some have no hash or equal others.
        self._met: dict[int, tuple[ref[Optimizer], int | None]] = {}
        self._looked_at: set[tuple[type, int]] = set()

    def pass_over(self, optimizers: Iterable[ref[Optimizer]]) -> None:
        """Marks optimizers that are in the state themselves: they are never examined."""
        for each in optimizers:
            if (optimizer := each()) is not None:
                self._met[id(optimizer)] = each, None

    def stepped(self, optimizer: Optimizer) -> None:
        """Notes a step of an optimizer that trains a part of the state."""
        met, first = self._met.get(id(optimizer), (None, None))
        if met is None or met() is not optimizer:
            self._met[id(optimizer)] = ref(optimizer), self.boundaries
        elif first not in (None, self.boundaries):
            self._met[id(optimizer)] = met, None
            self.due.append(optimizer)

    def look(self, states: Iterable[dict[str, Any]]) -> None:
        """At a boundary: examines the due optimizers. `states`: those of all Checkpointers of this process. An
        optimizer stays open if no object in these states holds it. An object that holds one may save it in its own way.
        """
        due, self.due = self.due, []
        kept = [each for each in due if _tensors(each) and _role(each) not in self._looked_at]
        held, is_searched = find_held(kept, states) if kept else (set(), True)
        if is_searched:
            self.open.update((_role(each), ref(each)) for each in kept if id(each) not in held)

    def name(self, walk: Walk, others: Iterable[Walk]) -> None:
        """Emits an event for the optimizers of `open` whose state is not in the walk. Such an optimizer was not
        registered, or another optimizer steps it. `walk`: the present one, made for a snapshot. A further walk would
        ask objects for their state when other ranks do not, although they may do so in a collective. `others`: walks of
        other Checkpointers."""
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
            "and this one's state is lost. Put it into the state as well",
            loud=True,
            optimizer=kind,
            tensor=name,
        )


def _tensors(optimizer: Optimizer) -> list[Tensor]:
    return [each for each in state_of(optimizer) if isinstance(each, Tensor)]


def _role(optimizer: Optimizer) -> tuple[type, int]:
    return type(optimizer), next(map(id, params_of(optimizer)), 0)


def find_held(optimizers: Sequence[Optimizer], states: Iterable[dict[str, Any]]) -> tuple[set[int], bool]:
    """The optimizers, by id, that an object of these states holds and so may save in its own way; and whether
    everything was searched. Schedulers and modules do not count as holders. An optimizer that saves another one does so
    in the walk. One search serves all optimizers: there may be one for each parameter."""
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
    except Exception as exc:
        # Objects in a state run code of their own.
        if is_from_outside(exc):
            raise
        return found, False
    return found, not held
