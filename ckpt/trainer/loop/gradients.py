"""Gradients that wait for an update. No snapshot is taken at such a boundary, since gradients are never saved.

A step that ends with an optimizer's update has nothing to lose, whatever gradients stay set. From the first step that
ends without an update, the gradients are remembered at each boundary with an update. At a later step without an update,
gradients wait if they differ from those, or were written to.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.optim import Optimizer

from ckpt.trainer.state.shard import live_parts
from ckpt.types import format_count

# A gradient and its version counter; None: there is no gradient.
_SeenGradient = tuple[weakref.ref[torch.Tensor], int] | None


class Gradients:
    """The gradients of the parameters that the registered `optimizers()` train. `is_by_hand()`: whether the parameters
    change although no optimizer was seen to step; then nobody knows which gradients were used.

    `is_watching`: whether a step has ended without an update. `last_update_step`: the newest step with an update.
    `update_interval_steps`: the number of steps from the update before to `last_update_step`; 0: unknown."""

    def __init__(self, optimizers: Callable[[], Sequence[Optimizer]], is_by_hand: Callable[[], bool]) -> None:
        self.is_watching = False
        self.last_update_step = self.update_interval_steps = 0
        self._optimizers = optimizers
        self._has_manual_updates = is_by_hand
        self._seen_gradients: list[_SeenGradient] = []

    def begin(self, step: int) -> None:
        self.last_update_step = step
        self._seen_gradients = list(map(_record_gradient, self._params()))

    def note_update(self, step: int) -> None:
        """Notes that `step` has ended with an update."""
        self.update_interval_steps, self.last_update_step = step - self.last_update_step, step
        if self.is_watching:
            self._seen_gradients = list(map(_record_gradient, self._params()))

    def waiting_reason(self, step: int) -> str:
        """Why the end of `step`, the last one, cannot be saved; "" if no gradient waits. Gradients that are all zero or
        not finite do not count: they were cleared, or a scaler has skipped them."""
        if (
            step == self.last_update_step
            or not self._has_new_gradient()
            or not self._has_useful_gradients()
            or self._has_manual_updates()
        ):
            return ""
        steps = format_count(step - self.last_update_step, "step")
        return (
            f"the gradients of {steps} wait for an optimizer's update, and gradients are not saved: a restart from "
            "there would lose them. Make each step one update: call ck.step() only after optimizer.step(), or draw all "
            "micro-batches in one iteration of ck.steps()"
        )

    def _params(self) -> Iterator[torch.Tensor]:
        return (param for each in self._optimizers() for group in each.param_groups for param in group["params"])

    def _has_new_gradient(self) -> bool:
        """Whether a gradient is there that was not there at the last boundary with an update. Stops at the first
        one."""
        params = list(self._params())
        known = self._seen_gradients if len(self._seen_gradients) == len(params) else [None] * len(params)
        pairs = ((param.grad, was) for param, was in zip(params, known, strict=True))
        return any(grad is not None and not _is_same(grad, was) for grad, was in pairs)

    def _has_useful_gradients(self) -> bool:
        parts = [
            part
            for param in self._params()
            if param.grad is not None
            for part in live_parts(param.grad.coalesce().values() if param.grad.is_sparse else param.grad)
            if part.numel()
        ]
        with torch.no_grad():
            largest = [torch.linalg.vector_norm(part, torch.inf).item() for part in parts]
        return any(largest) and all(map(math.isfinite, largest))


def _record_gradient(param: torch.Tensor) -> _SeenGradient:
    grad = param.grad
    return None if grad is None else (weakref.ref(local := _local_part(grad)), _version(local))


def _is_same(grad: torch.Tensor, was: _SeenGradient) -> bool:
    local = _local_part(grad)
    return was is not None and was[0]() is local and was[1] == _version(local)


def _version(local: torch.Tensor) -> int:
    return 0 if local.is_inference() else local._version


def _local_part(grad: torch.Tensor) -> torch.Tensor:
    """The tensor that is written to: the local part of a DTensor."""
    found: torch.Tensor = getattr(grad, "_local_tensor", grad)
    return found
