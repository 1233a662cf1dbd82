"""A check whether the state's parameters are still those of the last boundary, or others such as averaged weights.

A glance reads some elements of up to GLANCED_MAX parameters, spread over those that the optimizers of the state train.
An average that is updated between two steps is not among those. If the optimizers train none of the modules' own
parameters, as when they hold copies of higher precision, all parameters count. So the swap of a whole model is found,
however it is done. A change of a few parameters or elements may be missed. A glance takes some 15 us on the host. On a
device no boundary waits for it.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ckpt.trainer.snapshot.bindings import ordinary_mode
from ckpt.trainer.snapshot.samples import group_reads
from ckpt.trainer.state import names
from ckpt.trainer.state.shard import live_parts

GLANCED_MAX = 16

# The elements that were read, by device and dtype.
Glance = Sequence[Tensor]


class Weights:
    """The parameters of `parts()`, the modules and optimizers of the state. For the training thread.

    Boundaries with an update are remembered; if `is_watching`, because polls or saves come, all boundaries are. After a
    boundary that is not remembered nothing is compared, nor after other parts have taken their place in the state."""

    def __init__(self, parts: Callable[[], Sequence[Optimizer | nn.Module]]) -> None:
        self.is_watching = False
        self._parts = parts
        self._first_glance: Glance = ()
        self._boundary_glance: Glance | None = None  # at the last boundary
        self._clear()

    def _clear(self) -> None:
        # The parts to which the getters and the gathered modules belong.
        self._known_parts: list[weakref.ref[Any]] = []
        self._param_getters: list[Callable[[], Any]] = []
        self._gathered_modules: list[Any] = []
        self._addresses: list[int] = []  # the addresses to which `_reads` belong
        self._reads: list[list[Callable[[], Tensor]]] = []

    def begin(self) -> None:
        """Takes the first glance: the start of training is a boundary."""
        self._boundary_glance = self._first_glance = self.glance()

    @property
    def have_changed(self) -> bool:
        """Whether the parameters differ from those at the start of training, as far as is known."""
        return not are_equal_glances(self._first_glance, self.glance())

    def note_step_end(self, has_updated: bool) -> None:
        """Notes that a step has ended."""
        if has_updated or self.is_watching:
            self._boundary_glance = self.glance()
        elif self._boundary_glance is not None:
            self._boundary_glance = None
            # What leaves the state is freed, even if no optimizer steps any more.
            self._clear()

    @property
    def are_swapped(self) -> bool:
        """Whether the parameters differ from those of the last boundary, as far as is known."""
        now = self.glance()
        return self._boundary_glance is not None and not are_equal_glances(self._boundary_glance, now)

    def glance(self) -> Glance:
        """Reads the elements now."""
        parts = self._parts()
        if len(parts) != len(self._known_parts) or not all(
            one() is part for one, part in zip(self._known_parts, parts, strict=True)
        ):
            self._choose_parameters(parts)
        # Parameters that were gathered for a forward pass are not those of the optimizer.
        for module in self._gathered_modules:
            module.reshard()
        local = [_local_part(_get_parameter(home)) for home in self._param_getters]
        places = [0 if part is None else _address_of(part) for part in local]
        with ordinary_mode():  # no gradient is recorded
            if places != self._addresses:
                self._addresses = places
                groups = group_reads(part for part in local if part is not None and _address_of(part))
                self._reads = [[read for _, _, read in group] for group in groups]
            return [torch.cat([read() for read in reads]) for reads in self._reads]

    def _choose_parameters(self, parts: Sequence[Optimizer | nn.Module]) -> None:
        # Places of parameters, by the parameter's id: each parameter is read once.
        trained: dict[int, Callable[[], Any]] = {}
        held: dict[int, Callable[[], Any]] = {}
        for part in (part for part in parts if isinstance(part, Optimizer)):
            for group in part.param_groups:
                for number, param in enumerate(group["params"]):
                    trained.setdefault(id(param), partial(operator.getitem, group["params"], number))
        modules = [(part, *named) for part in parts if isinstance(part, nn.Module) for named in part.named_modules()]
        for root, path, module in modules:
            params = vars(module).get("_parameters")
            for key, param in (params if isinstance(params, dict) else {}).items():
                held.setdefault(id(param), partial(_get_in_module, root, path.split(".") if path else (), key))
        homes = {**trained, **({number: held[number] for number in held if number in trained} or held)}
        found = [home for home in homes.values() if _local_part(_get_parameter(home)) is not None]
        self._boundary_glance = None
        self._param_getters = found[:: -(-len(found) // GLANCED_MAX) or 1]
        self._known_parts = list(map(weakref.ref, parts))
        self._gathered_modules = names.find_fsdp_modules(module for _, _, module in modules)
        self._addresses = []


def are_equal_glances(one: Glance, other: Glance) -> bool:
    """Whether two glances are equal."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


_PLAIN_TYPES = (Tensor, nn.Parameter)
_address_of = Tensor.data_ptr


def _get_in_module(root: nn.Module, path: Sequence[str], key: str) -> Any:
    module: Any = root
    for part in path:
        module = module._modules[part]
    return module._parameters[key]


def _get_parameter(home: Callable[[], Any]) -> Tensor | None:
    """The parameter at that place; None if there is none."""
    try:
        found = home()
    except (LookupError, AttributeError):  # modules were exchanged
        return None
    return found if isinstance(found, Tensor) else None


def _local_part(param: Tensor | None) -> Tensor | None:
    """This rank's part of a parameter; None if there is none, or for types whose data is absent or not in the tensor
    itself."""
    part = param
    if param is not None and type(param) not in _PLAIN_TYPES:
        part = next(iter(live_parts(param)), None)
    return part if part is not None and type(part) in _PLAIN_TYPES and part.layout is torch.strided else None
