"""Swapped weights: the weights of a model are those of an average for a while, and then the same as before.

The average may be a module (torch's AveragedModel, or any module with the same names), an object with `shadow_params`
in the order of the parameters (diffusers, torch_ema), or a dict of tensors by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ckpt.errors import UsageError
from ckpt.trainer.state import names

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (a weight, its average)


def find_pairs(average: object, modules: Sequence[nn.Module]) -> tuple[nn.Module, Pairs]:
    """The one of `modules` that `average` belongs to, and its weights with their averages. Errors: UsageError if it
    belongs to none of them, or to several."""
    averaged = _inner_module(average)
    found = []
    for module in modules:
        if names.unwrap(module) is not averaged and averaged not in list(module.modules()):
            pairs = _pairs_of(averaged, names.unwrap(module))
            if pairs:
                found.append((module, pairs))
    if len(found) != 1:
        fits = "no module of the state" if not found else f"{len(found)} modules of the state"
        raise UsageError(
            f"ck.swapped({type(average).__name__}): it fits {fits}; give the model, ck.swapped(ema, model), whose "
            "parameters have the same names, number and shapes"
        )
    return found[0]


@contextlib.contextmanager
def swap(module: nn.Module, pairs: Pairs) -> Iterator[None]:
    """Gives the weights their averages for the time of the context. It takes a copy of the weights meanwhile."""
    gathered = names.find_fsdp_modules(module.modules())
    with torch.no_grad():
        kept = [weight.detach().clone() for weight, _ in pairs]
        try:
            for weight, average in pairs:
                weight.copy_(average)
            with torch.enable_grad():
                yield
        finally:
            for each in gathered:
                each.reshard()
            for (weight, _), former in zip(pairs, kept, strict=True):
                weight.copy_(former)


def _inner_module(average: object) -> Any:
    """The module whose names are those of the model: what torch's AveragedModel holds, without wrappers."""
    if isinstance(average, nn.Module):
        is_torchs = any(kind.__name__ == "AveragedModel" for kind in type(average).__mro__)
        inner: Any = average.module if is_torchs else average
        return names.unwrap(inner)
    return average


def _pairs_of(average: Any, model: nn.Module) -> Pairs:
    """The pairs for a model; none if the average is not of this model."""
    params = list(model.parameters())
    shadow = getattr(average, "shadow_params", None)
    if isinstance(average, (nn.Module, Mapping)):
        return _pairs_by_name(average, model)
    if isinstance(shadow, (list, tuple)):
        for chosen in (params, [param for param in params if param.requires_grad]):
            if [each.shape for each in chosen] == [each.shape for each in shadow]:
                return list(zip(chosen, shadow, strict=True))
        return []
    raise UsageError(
        f"ck.swapped() takes a module, an object with shadow_params or a dict of tensors by name, and not a "
        f"{type(average).__name__}"
    )


def _pairs_by_name(average: nn.Module | Mapping[str, torch.Tensor], model: nn.Module) -> Pairs:
    # Tied parameters are one tensor, and one pair.
    own = {id(site.tensor): site for site in reversed(list(names.sites(model)))}
    wanted = {site.name: site.tensor for site in own.values()}
    if isinstance(average, nn.Module):
        there = {site.name: site.tensor for site in names.sites(average)}
    else:
        there = dict(average)
        wanted = {name: tensor for name, tensor in wanted.items() if name in there or isinstance(tensor, nn.Parameter)}
    if any(name not in there or there[name].shape != tensor.shape for name, tensor in wanted.items()):
        return []
    return [(tensor, there[name]) for name, tensor in wanted.items()]
