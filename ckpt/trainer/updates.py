"""Whether an optimizer of the state has stepped since the last boundary: what a break, a save and a poll depend on."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckpt.trainer.lazy import owns_any, storages
from ckpt.trainer.walk import Walk


class Updates:
    """While entered, counts steps of the optimizers in `state` and of those, inside wrappers or not registered at all,
    that own one of its tensors; `pending` is set to 0 at each boundary. `walk()`: the present walk."""

    def __init__(self, state: dict[str, Any], walk: Callable[[], Walk]) -> None:
        self.pending = 0
        self._registered = {id(found) for found in _optimizers(state, set())}
        self._walk = walk
        self._seen: Walk | None = None
        self._storages: frozenset[int] = frozenset()
        self._known: dict[int, bool] = {}

    def __enter__(self) -> Self:
        self._hook = register_optimizer_step_post_hook(self._count)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._hook.remove()

    def _count(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._registered or self._owns_any(optimizer):
            self.pending += 1

    def _owns_any(self, optimizer: Optimizer) -> bool:
        walk = self._walk()
        if walk is not self._seen:
            self._seen, self._known = walk, {}
            mine = storages([tensor for line in walk.tensors for tensor in line])
            self._storages = mine - {0}  # of tensors without bytes
        found = self._known.get(id(optimizer))
        if found is None:
            found = self._known[id(optimizer)] = owns_any(optimizer, self._storages)
        return found


def _optimizers(value: Any, seen: set[int]) -> list[Optimizer]:
    if isinstance(value, Optimizer):
        return [value]
    if not isinstance(value, (dict, list, tuple)) or id(value) in seen:
        return []
    seen.add(id(value))  # a state that contains itself is refused later, by name
    items = value.values() if isinstance(value, dict) else value
    return [found for item in items for found in _optimizers(item, seen)]
