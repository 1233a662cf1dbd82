"""Whether an optimizer of the state has stepped since the last boundary, or was left in the middle of its step: what a
break, a save and a poll depend on."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self
from weakref import ref

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ckpt.trainer.lazy import owns_any
from ckpt.trainer.shard import storages
from ckpt.trainer.walk import Walk


class Updates:
    """While entered, counts steps of the optimizers in `state` and of those, inside wrappers or not registered at all,
    that own one of its tensors. `walk()`: the present walk.

    Since the last boundary: `pending`, how many steps have ended; `fenced`, whether changes by hand were announced.
    `by_hand`: no optimizer has stepped yet, so that updates are such changes.
    Its hooks are to come after those that wait for a copy: an exception there has changed nothing."""

    def __init__(self, state: dict[str, Any], walk: Callable[[], Walk]) -> None:
        self.pending = 0
        self.fenced = False
        self.by_hand = True
        self._state = state
        self._walk = walk
        self._seen: Walk | None = None
        self._storages: frozenset[int] = frozenset()
        self._known: dict[int, tuple[ref[Optimizer], bool]] = {}  # by id: some have no hash, or are equal to others
        self._begun: list[Optimizer] = []  # one for each step that has not ended: on threads, or within each other

    def __enter__(self) -> Self:
        self._hooks = register_optimizer_step_pre_hook(self._begin), register_optimizer_step_post_hook(self._end)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

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

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_ours(optimizer):
            self._begun.append(optimizer)

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for at, begun in enumerate(self._begun):
            if begun is optimizer:
                self.pending += 1
                self.by_hand = False
                del self._begun[at]
                return

    def _is_ours(self, optimizer: Optimizer) -> bool:
        walk = self._walk()
        if walk is not self._seen:
            self._storages = storages(tensor for line in walk.tensors for tensor in line)
            self._known = {id(each): (ref(each), True) for each in _optimizers(self._state, set())}
            self._seen = walk
        found = self._known.get(id(optimizer))
        if found is None or found[0]() is not optimizer:
            found = self._known[id(optimizer)] = ref(optimizer), owns_any(optimizer, self._storages)
        return found[1]


def _optimizers(value: Any, seen: set[int]) -> list[Optimizer]:
    if isinstance(value, Optimizer):
        return [value]
    if not isinstance(value, (dict, list, tuple)) or id(value) in seen:
        return []
    seen.add(id(value))  # a state that contains itself is refused later, by name
    items = value.values() if isinstance(value, dict) else value
    return [found for item in items for found in _optimizers(item, seen)]
