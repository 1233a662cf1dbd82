"""Whether a registered optimizer has stepped since the last boundary: what a break, a save and a poll depend on."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class Updates:
    """Counts steps of the optimizers in `state` while entered; `pending` is set to 0 at each boundary."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.pending = 0
        self._optimizers = {id(found) for found in _optimizers(state)}

    def __enter__(self) -> Self:
        self._hook = register_optimizer_step_post_hook(self._count)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._hook.remove()

    def _count(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._optimizers:
            self.pending += 1


def _optimizers(value: Any) -> list[Optimizer]:
    if isinstance(value, Optimizer):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in _optimizers(item)]
    return []
