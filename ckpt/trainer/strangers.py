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
from ckpt.trainer.lazy import state_of
from ckpt.trainer.shard import storages
from ckpt.trainer.walk import StateWalker, Walk
from ckpt.types import counted

SEARCHED_MAX = 100_000  # of what hangs on the state, for what may hold an optimizer
SEALED = (str, bytes, type, ModuleType, Tensor, nn.Module, Optimizer, LRScheduler)  # in which nothing is searched


class Strangers:
    """Meets the optimizers that train a part of the state. `boundaries`: how many there were. `due`: those that are to
    be looked at, which have stepped in a second step: one that is made anew for each step is not to come back."""

    def __init__(self, events: Events) -> None:
        self.boundaries = 0
        self.due: list[Optimizer] = []
        self._events = events
        # By id, after which boundary it has stepped first; None: done with. Some have no hash, or are equal to others.
        self._met: dict[int, tuple[ref[Optimizer], int | None]] = {}
        self._looked_at: set[tuple[type, int]] = set()  # by `_role`

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

    def name(self, walker: StateWalker, others: Sequence[StateWalker]) -> None:
        """An event for those of `due` whose state would not come back with the state that `walker` walks, nor with what
        `others` do, of other Checkpointers in this process; such as one that was not registered, or that another
        optimizer steps for itself. What an object may have copies of is not looked at. Once for all of a class that
        train the same: one that is made anew every few steps is no other."""
        due, self.due = self.due, []
        kept = [each for each in due if _tensors(each) and _role(each) not in self._looked_at]
        if not kept:
            return
        walkers = (walker, *others)
        try:
            held = _may_be_held(kept, [each.state for each in walkers])
            kept = [each for each in kept if id(each) not in held]
            if not kept:
                return
            walks = [each.walk() for each in walkers]  # the present ones may be from before their state appeared
        except Exception as exc:  # what may lie in a state has code of its own
            if is_from_outside(exc):
                raise
            return  # the next snapshot says it, where it concerns one
        walk, saved = walks[0], frozenset().union(*map(_storages, walks))
        self._looked_at.update(map(_role, kept))
        lost = [each for each in kept if not storages(_tensors(each)) & saved]
        if not lost:
            return
        kind, trained = type(lost[0]).__name__, storages(_params(lost[0]))
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


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"] if isinstance(each, Tensor)]


def _tensors(optimizer: Optimizer) -> list[Tensor]:
    return [each for each in state_of(optimizer) if isinstance(each, Tensor)]


def _role(optimizer: Optimizer) -> tuple[type, int]:
    return type(optimizer), next(map(id, _params(optimizer)), 0)


def _storages(walk: Walk) -> frozenset[int]:
    return storages(tensor for line in walk.tensors for tensor in line)


def _may_be_held(optimizers: Sequence[Optimizer], states: Iterable[dict[str, Any]]) -> set[int]:
    """By id, those that an object of these states holds, and so may save in a way of its own. A scheduler does not, a
    module neither, and what an optimizer saves of another one is in the walk. One search for all: there may be one for
    each parameter."""
    sought, found = set(map(id, optimizers)), set[int]()
    seen: set[int] = set()
    held: list[Any] = [*states]
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
    return sought if held else found
