"""Whether an optimizer of the state has stepped since the last boundary, or was left in the middle of its step: what a
break, a save and a poll depend on. A step that a GradScaler of the state has skipped, since the gradients were not
finite, is such a step as well: the loop that goes on counts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar
from weakref import ref

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ckpt.trainer.lazy import owns_any
from ckpt.trainer.shard import storages
from ckpt.trainer.walk import Walk

T = TypeVar("T")

BUFFERS_MAX = 16  # how many are looked at, of modules that change theirs in forward: it is done at each boundary


class Marks(NamedTuple):
    """What is looked at again before the next boundary: what each scaler collects of one step, unless it is in the
    midst of that, and how often these buffers were changed."""

    collected: Sequence[tuple[GradScaler, object]] = ()
    buffers: Sequence[torch.Tensor] = ()
    changes: int = 0


class Updates:
    """While entered, counts steps of the optimizers in `state` and of those, inside wrappers or not registered at all,
    that own one of its tensors. `walk()`: the present walk.

    Since the last boundary: `ended`, how many steps have; `fenced`, whether changes by hand were announced; `seen`, the
    marks of that boundary. `by_hand`: no optimizer has stepped yet, so that updates are such changes.
    Its hooks are to come after those that wait for a copy, and after those of the user: an exception there has changed
    nothing."""

    def __init__(self, state: dict[str, Any], walk: Callable[[], Walk]) -> None:
        self.ended = 0
        self.fenced = False
        self.by_hand = True
        self.seen = Marks()
        self._state = state
        self._walk = walk
        self._followed: Walk | None = None
        self._storages: frozenset[int] = frozenset()
        self._scalers: list[GradScaler] = []
        self._buffers: list[torch.Tensor] = []
        self._known: dict[int, tuple[ref[Optimizer], bool]] = {}  # by id: some have no hash, or are equal to others
        self._last: dict[int, RemovableHandle] = {}  # by id: the hook that comes after all others of that optimizer
        self._begun: list[Optimizer] = []  # one for each step that has not ended: on threads, or within each other

    def __enter__(self) -> Self:
        self._hooks = register_optimizer_step_pre_hook(self._announce), register_optimizer_step_post_hook(self._end)
        self.seen = self.marks()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for hook in (*self._hooks, *self._last.values()):
            hook.remove()

    def marks(self) -> Marks:
        """As they are now, to be `seen` at a boundary. Not all buffers, for this is done at each."""
        self._follow()
        if not self._scalers and not self._buffers:
            return Marks()
        collected = [(scaler, each) for scaler in self._scalers if not (each := _collected(scaler))]
        return Marks(collected, self._buffers, _changes(self._buffers))

    @property
    def pending(self) -> int:
        """How many updates no step has ended."""
        return self.ended or int(any(_collected(scaler) is not old for scaler, old in self.seen.collected))

    @property
    def has_changed(self) -> bool:
        """Whether buffers were changed since the last boundary."""
        return _changes(self.seen.buffers) != self.seen.changes

    @property
    def is_torn(self) -> bool:
        return bool(self._begun)

    @property
    def torn(self) -> str:
        """Why the state is no whole one; "" where it is. What an exception has left stays so, whatever steps follow."""
        for optimizer in self._begun[:1]:
            return (
                f"{type(optimizer).__name__}.step() has begun and not ended, as by an exception in it: a part of that "
                "update may be in the state, which is not saved any more. Start again from the newest checkpoint; what "
                "may fail belongs before step(), not into its closure"
            )
        return ""

    def _announce(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The first hook of a step has the last one begin it."""
        if not self._is_ours(optimizer):
            return
        if (old := self._last.get(id(optimizer))) is not None:
            old.remove()
        self._last[id(optimizer)] = optimizer.register_step_pre_hook(self._begin)

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._begun.append(optimizer)

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for at, begun in enumerate(self._begun):
            if begun is optimizer:
                self.ended += 1
                self.by_hand = False
                del self._begun[at]
                return

    def _is_ours(self, optimizer: Optimizer) -> bool:
        self._follow()
        found = self._known.get(id(optimizer))
        if found is None or found[0]() is not optimizer:
            found = self._known[id(optimizer)] = ref(optimizer), owns_any(optimizer, self._storages)
        return found[1]

    def _follow(self) -> None:
        walk = self._walk()
        if walk is self._followed:
            return
        self._storages = storages(tensor for line in walk.tensors for tensor in line)
        self._known = {id(each): (ref(each), True) for each in _find(Optimizer, self._state, set())}
        self._scalers = _find(GradScaler, self._state, set())
        names = walk.scan.buffers()
        held = [line for entry, line in zip(walk.layout.entries, walk.tensors, strict=True) if entry.name in names]
        counted = [tensor for line in held for tensor in line if not tensor.is_inference()]
        self._buffers = counted[:: max(1, -(-len(counted) // BUFFERS_MAX))]
        self._followed = walk


def _collected(scaler: GradScaler) -> object:
    """Of one step; its update(), be it that of a step that was skipped, begins anew with another object."""
    return getattr(scaler, "_per_optimizer_states", None)


def _changes(buffers: Sequence[torch.Tensor]) -> int:
    return sum(tensor._version for tensor in buffers)


def _find(kind: type[T], value: Any, seen: set[int]) -> list[T]:
    if isinstance(value, kind):
        return [value]
    if not isinstance(value, (dict, list, tuple)) or id(value) in seen:
        return []
    seen.add(id(value))  # a state that contains itself is refused later, by name
    items = value.values() if isinstance(value, dict) else value
    return [found for item in items for found in _find(kind, item, seen)]
