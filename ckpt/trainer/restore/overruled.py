"""Overruled hyper-parameters: values that the script gives an optimizer or a scheduler, and that a restart replaces by
the checkpoint's. Pure functions.

Values that change during a run do not count. What an optimizer's constructor does not take is such a value
(schedule-free's mode and counters). If a scheduler sets the learning rates, the initial rates are compared. Of
a scheduler, only arguments of its constructor are compared.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_PLAIN = (bool, int, float, str, type(None))


def compare_group(
    name: str, optimizer: Optimizer, live: Mapping[str, Any], saved: Mapping[str, Any], is_scheduled: bool
) -> Iterator[str]:
    """The differences of an optimizer's group, in words, before it gets the saved hyper-parameters. `is_scheduled`:
    whether a scheduler in the state sets its rates."""
    moving = {"lr"} if is_scheduled or "initial_lr" in live else set()
    moving |= {"momentum", "betas"} if "max_momentum" in live else set()
    given = inspect.signature(type(optimizer).__init__).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in given.values()):
        moving |= live.keys() - given.keys() - {"initial_lr"}
    for key in sorted((live.keys() & saved.keys()) - moving):
        yield from _compare_values(f"{name}.{key}", live[key], saved[key])


def compare_scheduler(name: str, scheduler: LRScheduler, saved: Mapping[str, Any]) -> Iterator[str]:
    """The differences of a scheduler and of those within it, in words, before it loads the saved state."""
    live = vars(scheduler)
    given = inspect.signature(type(scheduler).__init__).parameters.keys() - {"last_epoch"}
    for key in sorted(live.keys() & saved.keys()):
        if key.lstrip("_") in given:
            yield from _compare_values(f"{name}.{key.lstrip('_')}", live[key], saved[key])
    pairs = zip(live.get("_schedulers") or (), saved.get("_schedulers") or (), strict=False)
    for number, (inner, its) in enumerate(pairs):
        if isinstance(inner, LRScheduler) and isinstance(its, Mapping):
            yield from compare_scheduler(f"{name}.{number}", inner, its)


def _compare_values(name: str, live: Any, saved: Any) -> Iterator[str]:
    one, other = _plain_value(live), _plain_value(saved)
    if _is_plain(one) and _is_plain(other) and not _is_same(one, other):
        yield f"{name}: {_shown(one)} given, {_shown(other)} restored"


def _plain_value(value: Any) -> Any:
    """`value` with a number for a tensor of one element, and a list for a tuple."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return list(map(_plain_value, value)) if isinstance(value, (list, tuple)) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, _PLAIN)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


def _shown(value: Any) -> str:
    text = f"{value:.7g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."
