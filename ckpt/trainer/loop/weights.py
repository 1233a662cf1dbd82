"""Whether the parameters of the state are those of the last boundary: else averaged weights may have been swapped in.

A glance reads some elements of up to GLANCED_MAX parameters, spread over those that the optimizers of the state train:
an average that moves on between two steps is none of them. Where they train none of the modules' own (as where they
hold copies of higher precision), all parameters count. So the swap of a whole model is found, however it is done; what
changes a few parameters or a few elements may be missed. A glance takes some 15 us on the host. On a device no boundary
waits for it.
"""

from __future__ import annotations

import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ckpt.trainer.snapshot.bindings import plain
from ckpt.trainer.snapshot.samples import line
from ckpt.trainer.state import names
from ckpt.trainer.state.shard import live_parts

GLANCED_MAX = 16

# What was read, by device and kind.
Glance = Sequence[Tensor]


class Weights:
    """The parameters of `parts()`, the modules and optimizers of the state. For the training thread.

    A boundary with an update is remembered; where `is_watching`, since polls or saves come, each one is. What comes
    after any other is not compared, nor what comes after other parts have taken their place in the state."""

    def __init__(self, parts: Callable[[], Sequence[Optimizer | nn.Module]]) -> None:
        self.is_watching = False
        self._parts = parts
        self._last: Glance | None = None  # at the last boundary
        self._of: list[weakref.ref[Any]] = []  # whose parameters `_homes` are, and are gathered by `_gathering`
        self._homes: list[Callable[[], Any]] = []
        self._gathering: list[Any] = []
        self._places: list[int] = []  # of which `_reads` are
        self._reads: list[list[Callable[[], Tensor]]] = []

    def begin(self) -> Glance:
        """Training begins: that is a boundary."""
        self._last = found = self.glance()
        return found

    def end(self, has_updated: bool) -> None:
        """A step has ended."""
        if has_updated or self.is_watching:
            self._last = self.glance()
        elif self._last is not None:
            self._last = None
            self._forget()  # what leaves the state is free, also where no optimizer steps any more

    @property
    def are_swapped(self) -> bool:
        """Whether others are in the state than at the last boundary, as far as that is known."""
        now = self.glance()
        return self._last is not None and not are_alike(self._last, now)

    def glance(self) -> Glance:
        parts = self._parts()
        if len(parts) != len(self._of) or not all(one() is part for one, part in zip(self._of, parts, strict=True)):
            self._look_at(parts)
        for module in self._gathering:  # else what is gathered for a forward pass is no parameter of the optimizer's
            module.reshard()
        local = [_local(_get(home)) for home in self._homes]
        places = [0 if part is None else _at(part) for part in local]
        with plain():  # of what was detached nothing records a gradient
            if places != self._places:
                self._places, self._reads = places, _reads(part for part in local if part is not None and _at(part))
            return [torch.cat([read() for read in reads]) for reads in self._reads]

    def _look_at(self, parts: Sequence[Optimizer | nn.Module]) -> None:
        trained: dict[int, Callable[[], Any]] = {}  # by the parameter that is there, of which each is glanced at once
        held: dict[int, Callable[[], Any]] = {}
        for part in (part for part in parts if isinstance(part, Optimizer)):
            for group in part.param_groups:
                for number, param in enumerate(group["params"]):
                    trained.setdefault(id(param), partial(operator.getitem, group["params"], number))
        modules = [(part, *named) for part in parts if isinstance(part, nn.Module) for named in part.named_modules()]
        for root, path, module in modules:
            params = vars(module).get("_parameters")
            for key, param in (params if isinstance(params, dict) else {}).items():
                held.setdefault(id(param), partial(_in_module, root, path.split(".") if path else (), key))
        homes = {**trained, **({number: held[number] for number in held if number in trained} or held)}
        found = [home for home in homes.values() if _local(_get(home)) is not None]
        self._last = None
        self._homes = found[:: -(-len(found) // GLANCED_MAX) or 1]
        self._of = list(map(weakref.ref, parts))
        self._gathering = names.resharding(module for _, _, module in modules)
        self._places = []

    def _forget(self) -> None:
        self._of, self._homes, self._gathering, self._places, self._reads = [], [], [], [], []


def are_alike(one: Glance, other: Glance) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


_KINDS = (Tensor, nn.Parameter)
_at = Tensor.data_ptr


def _in_module(root: nn.Module, path: Sequence[str], key: str) -> Any:
    module: Any = root
    for part in path:
        module = module._modules[part]
    return module._parameters[key]


def _get(home: Callable[[], Any]) -> Tensor | None:
    """The parameter that is there; None for none."""
    try:
        found = home()
    except (LookupError, AttributeError):  # modules were exchanged
        return None
    return found if isinstance(found, Tensor) else None


def _local(param: Tensor | None) -> Tensor | None:
    """What this rank holds of it; None for nothing, and for kinds that have bytes elsewhere or have none."""
    part = param
    if param is not None and type(param) not in _KINDS:
        part = next(iter(live_parts(param)), None)
    return part if part is not None and type(part) in _KINDS and part.layout is torch.strided else None


def _reads(parts: Iterator[Tensor]) -> list[list[Callable[[], Tensor]]]:
    """What is read together, by device and kind."""
    groups: dict[tuple[torch.device, torch.dtype], list[Callable[[], Tensor]]] = defaultdict(list)
    for now, read in map(line, parts):
        groups[now.device, now.dtype].append(read)
    return list(groups.values())
