"""Optimizers that train a part of the state but are not saved with it: a restart would lose what they have gathered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ckpt.errors import is_injected
from ckpt.events import Events
from ckpt.trainer.snapshot.deferred_copy import params_of, state_of
from ckpt.trainer.state.shard import storage_addresses
from ckpt.trainer.state.state_walk import Walk
from ckpt.types import format_count

SEARCHED_OBJECTS_MAX = 100_000  # objects that are searched for optimizers, reachable from the state
# Types whose insides are not searched.
UNSEARCHED_TYPES = (str, bytes, type, ModuleType, Tensor, nn.Module, Optimizer, LRScheduler)


class UnregisteredOptimizers:
    """Finds the optimizers that train a part of the state and are not saved.

    `boundary_count`: how many boundaries there were. `due`: optimizers to examine, which have stepped in a second step:
    one that is made anew for each step need not be restored. `unheld_by_role`: examined optimizers that no object was
    found to hold, by role. One entry stands for all of a class that train the same parameters: an optimizer may be made
    anew every few steps."""

    def __init__(self, events: Events) -> None:
        self.boundary_count = 0
        self.due_optimizers: list[Optimizer] = []
        self.unheld_by_role: dict[tuple[type, int], ref[Optimizer]] = {}
        self._events = events
        # The boundary after which each optimizer first stepped; None: done. By id: some have no hash or equal others.
        self._first_steps: dict[int, tuple[ref[Optimizer], int | None]] = {}
        self._reported_roles: set[tuple[type, int]] = set()

    def exclude_registered(self, optimizers: Iterable[ref[Optimizer]]) -> None:
        """Marks optimizers that are in the state themselves: they are never examined."""
        for each in optimizers:
            if (optimizer := each()) is not None:
                self._first_steps[id(optimizer)] = each, None

    def note_step(self, optimizer: Optimizer) -> None:
        """Notes a step of an optimizer that trains a part of the state."""
        met, first = self._first_steps.get(id(optimizer), (None, None))
        if met is None or met() is not optimizer:
            self._first_steps[id(optimizer)] = ref(optimizer), self.boundary_count
        elif first not in (None, self.boundary_count):
            self._first_steps[id(optimizer)] = met, None
            self.due_optimizers.append(optimizer)

    def examine_due(self, states: Iterable[dict[str, Any]]) -> None:
        """At a boundary: examines the due optimizers. `states`: those of all Checkpointers of this process. An
        optimizer stays open if no object in these states holds it. An object that holds one may save it in its own way.
        """
        due, self.due_optimizers = self.due_optimizers, []
        kept = [each for each in due if _state_tensors(each) and _role(each) not in self._reported_roles]
        held, is_searched = find_held(kept, states) if kept else (set(), True)
        if is_searched:
            self.unheld_by_role.update((_role(each), ref(each)) for each in kept if id(each) not in held)

    def report_unsaved(self, walk: Walk, others: Iterable[Walk]) -> None:
        """Emits an event for the optimizers of `unheld_by_role` whose state is not in the walk. Such an optimizer was
        not registered, or another optimizer steps it. `walk`: the present one, made for a snapshot. A further walk
        would ask objects for their state when other ranks do not, although they may do so in a collective. `others`:
        walks of other Checkpointers."""
        found = {role: optimizer for role, each in self.unheld_by_role.items() if (optimizer := each()) is not None}
        self.unheld_by_role = {}
        self._reported_roles.update(found)
        saved = walk.storages.union(*(each.storages for each in others))
        lost = [
            each for each in found.values() if (of_it := storage_addresses(_state_tensors(each))) and not of_it & saved
        ]
        if not lost:
            return
        kind, trained = type(lost[0]).__name__, storage_addresses(params_of(lost[0]))
        lines = zip(walk.layout.entries, walk.tensors, strict=True)
        name = next((entry.name for entry, line in lines if storage_addresses(line) & trained), "a part of the state")
        more = f" (and {format_count(len(lost) - 1, 'other')} like it)" if len(lost) > 1 else ""
        self._events.emit(
            "optimizer.unsaved",
            f"ckpt: the {kind} that trains {name} is not in the state{more}: a restart begins with a new one, "
            "and this one's state is lost. Put it into the state as well",
            loud=True,
            optimizer=kind,
            tensor=name,
        )


def _state_tensors(optimizer: Optimizer) -> list[Tensor]:
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
        while held and len(seen) < SEARCHED_OBJECTS_MAX:
            value = held.pop()
            if id(value) in sought:
                found.add(id(value))
            if id(value) in seen or isinstance(value, UNSEARCHED_TYPES):
                continue
            seen.add(id(value))
            inner = value if isinstance(value, (dict, list, tuple, set)) else getattr(value, "__dict__", {})
            if len(inner) <= SEARCHED_OBJECTS_MAX:
                held += inner.values() if isinstance(inner, dict) else inner
    except Exception as exc:
        # Objects in a state run code of their own.
        if is_injected(exc):
            raise
        return found, False
    return found, not held
