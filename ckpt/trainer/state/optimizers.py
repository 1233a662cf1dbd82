"""Optimizers: their state under the names of the parameters that it belongs to, read without a step.

- State is named `<path>.state.<parameter>.<what>`. If the state has only one module, the parameter's name is the one
  within that module; else it begins with the module's path. So the names depend on the state, which every rank has, not
  on the parameters of this rank's optimizer (one stage).
- Hyper-parameters are values. Parameters are listed by name, not by number, so that another order or another wrapping
  restores correctly.
- State under a text instead of a parameter (a counter of the optimizer) is a tree of its own, `<path>.state.<key>`.
- Any other entry of an optimizer's state_dict() (a counter of a subclass) is a tree of its own, `<path>.<key>`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import nn

from ckpt.errors import UsageError
from ckpt.trainer.state import names, value_trees
from ckpt.trainer.state.composites import is_composite
from ckpt.trainer.state.names import join
from ckpt.trainer.state.shard import Shard, is_dtensor
from ckpt.trainer.state.state_nodes import NamedTensor, Read, read_tree
from ckpt.trainer.state.value_trees import Path, Tensor

_CUSTOM = ("state_dict", "load_state_dict")
_HOOKS = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
_TORCH_KEYS = ("state", "param_groups")  # what torch's own state_dict() gives


class Param(NamedTuple):
    """A parameter of an optimizer. `name`: its name in the optimizer's state. `full_name`: its canonical name in the
    state. `shard`: its declaration by ckpt.Shard, if any."""

    name: str
    full_name: str
    tensor: torch.Tensor
    shard: Shard | None

    def shard_like(self, state: Tensor) -> Tensor:
        """`state`, as a Shard like this parameter's if it has the parameter's local shape; else unchanged."""
        if self.shard is None or isinstance(state, Shard) or is_dtensor(state):
            return state
        return self.shard.like(state) if state.ndim and state.shape == self.tensor.shape else state


@dataclass(slots=True)
class Owners:
    """For each parameter, by id: the path of the registered module that owns it ("" for a bare tensor), and its name in
    it."""

    modules: list[str] = field(default_factory=list)
    home_by_id: dict[int, tuple[str, str]] = field(default_factory=dict)
    shard_by_id: dict[int, Shard] = field(default_factory=dict)

    def add_module(self, path: str, root: nn.Module, found: Sequence[NamedTensor]) -> None:
        """Adds the parameters of a module. `found`: its saved tensors, whose names are preferred. Add modules before
        tensors."""
        self.modules.append(path)
        for named in found:
            self.home_by_id.setdefault(id(named.tensor), (path, named.name[len(path) + 1 :]))
        for site in names.sites(root):
            self.home_by_id.setdefault(id(site.tensor), (path, site.name))

    def add_tensors(self, found: Sequence[NamedTensor]) -> None:
        for named in found:
            tensor = named.tensor
            if isinstance(tensor, Shard):
                self.shard_by_id[id(tensor.tensor)] = tensor
                tensor = tensor.tensor
            self.home_by_id.setdefault(id(tensor), ("", named.name))


@dataclass(slots=True)
class OptimizerView:
    """An optimizer as it was read.

    - `skeletons`: the distinct structures of per-parameter state, each {"value": the tree without its tensors,
      "tensors": their paths}. `skeleton_indices`: for each parameter, in order, the index of its skeleton; -1 for none.
    - `plain_states`: the state dicts that hold only tensors.
    - `rest`: the payload of the other entries of its state_dict(). `keyed`: the payload of its state under texts.
    - `is_mixed`: whether it has other state dicts, or a state_dict() of its own. Both may change at each step.
    """

    path: str
    optimizer: torch.optim.Optimizer
    params_by_group: list[list[Param]]
    names_by_group: list[tuple[str, ...]]
    tensors: list[NamedTensor] = field(default_factory=list)
    skeletons: list[dict[str, Any]] = field(default_factory=list)
    skeleton_indices: list[int] = field(default_factory=list)
    plain_states: list[dict[Any, Any]] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=lambda: {"value": {}, "tensors": []})
    keyed: dict[str, Any] = field(default_factory=lambda: {"value": {}, "tensors": []})
    is_mixed: bool = False

    def constants(self) -> list[Any]:
        """The parts of the payload that never change. The payload of a mixed optimizer's newer view has other parts."""
        return [*self.names_by_group, self.skeletons, self.skeleton_indices, self.rest, self.keyed]

    def read(self) -> Read:
        """The tensors and values of the same optimizer, read now."""
        now = read_view(self.path, self.optimizer, self.params_by_group)
        return now.tensors, now.payload()

    def payload(self) -> dict[str, Any]:
        """The values of this optimizer, of which hyper-parameters are read now."""
        groups = []
        for index, param_names in enumerate(self.names_by_group):
            _, hyper = _read_group(self.path, index, self.optimizer)
            groups.append({"params": param_names, "value": hyper["value"], "tensors": hyper["tensors"]})
        return {
            "kind": "optimizer",
            "class": class_of(self.optimizer),
            "groups": groups,
            "skeletons": self.skeletons,
            "state": self.skeleton_indices,
            "rest": self.rest,
            "keyed": self.keyed,
        }


def class_of(optimizer: torch.optim.Optimizer) -> str:
    """The class name of an optimizer; for a wrapper, that of the innermost optimizer with the same parameters."""
    inner, seen = [optimizer], {id(optimizer)}
    for each in inner:
        for held in vars(each).values():
            if isinstance(held, torch.optim.Optimizer) and id(held) not in seen:
                seen.add(id(held))
                inner += [held] if _parameter_ids(held) == _parameter_ids(optimizer) else []
    return type(inner[-1]).__name__


def _parameter_ids(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def state_path(path: str, parameter: str) -> str:
    return f"{path}.state.{parameter}"


def group_path(path: str, index: int) -> str:
    return f"{path}.param_groups.{index}"


def make_view(path: str, optimizer: torch.optim.Optimizer, owners: Owners) -> OptimizerView:
    """Reads an optimizer. `owners`: the modules and tensors of the state. Errors: UsageError for a
    ZeroRedundancyOptimizer, for a parameter that belongs to nothing registered, and for state without a parameter."""
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise UsageError(
            f"state[{path!r}] is a ZeroRedundancyOptimizer, whose state is spread over ranks by whole parameters; "
            "use FSDP2 (torch.distributed.fsdp.fully_shard), which shards it"
        )
    params = _name_parameters(path, optimizer, owners)
    known = {id(p.tensor) for line in params for p in line}
    state: dict[Any, Any] = optimizer.state  # torch calls them tensors; they may be texts, too
    for key in state:
        if id(key) not in known and not isinstance(key, str):
            what = _describe(key)
            raise UsageError(f"state[{path!r}] has state for {what}, which is no parameter of its groups; remove it")
    return read_view(path, optimizer, params)


def _name_parameters(path: str, optimizer: torch.optim.Optimizer, owners: Owners) -> list[list[Param]]:
    homes: list[list[tuple[str, str]]] = []
    for number, group in enumerate(optimizer.param_groups):
        homes.append([])
        for index, param in enumerate(group["params"]):
            home = owners.home_by_id.get(id(param))
            if home is None:
                raise UsageError(
                    f"state[{path!r}]: parameter {index} of group {number}, {_describe(param)}, belongs to "
                    'no module in the state, so that it has no name; register its module too: state={"model": model}'
                )
            homes[-1].append(home)
    one = len(owners.modules) == 1
    params = [
        [
            Param(name if one else join(module, name), join(module, name), p, owners.shard_by_id.get(id(p)))
            for (module, name), p in zip(line, group["params"], strict=True)
        ]
        for line, group in zip(homes, optimizer.param_groups, strict=True)
    ]
    named: dict[str, torch.Tensor] = {}
    for param in (p for line in params for p in line):
        if named.setdefault(param.name, param.tensor) is not param.tensor:
            raise UsageError(
                f"state[{path!r}] has two parameters of the name {param.name!r}, of a module and beside it; rename one"
            )
    return params


def _describe(key: object) -> str:
    """A description of an object that has no name."""
    with suppress(RuntimeError):  # some kinds of tensors have no shape
        return f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
    return f"a {type(key).__name__}"


def read_view(path: str, optimizer: torch.optim.Optimizer, params: list[list[Param]]) -> OptimizerView:
    """The view of an optimizer as it is now. `params`: its parameters, as named before."""
    found = OptimizerView(path, optimizer, params, [tuple(p.name for p in line) for line in params])
    for index in range(len(optimizer.param_groups)):
        found.tensors += _read_group(path, index, optimizer)[0]
    if is_custom(optimizer):
        found.is_mixed = True
        tensors_of_rest, found.rest = read_tree("rest", _read_rest(path, optimizer), path)
        found.tensors += tensors_of_rest
    state: dict[Any, Any] = optimizer.state
    if keyed := {key: value for key, value in state.items() if isinstance(key, str)}:
        found.is_mixed = True
        tensors_by_key, found.keyed = read_tree("keyed", keyed, join(path, "state"))
        found.tensors += tensors_by_key
    numbers: dict[Any, int] = {}
    for param in (p for line in params for p in line):
        held = optimizer.state.get(param.tensor)
        if held:
            found.skeleton_indices.append(_read_state(found, param, held, numbers))
        else:
            found.skeleton_indices.append(-1)
            # A lookup in the optimizer's defaultdict has created this dict. The first step will fill it.
            if isinstance(held, dict):
                found.plain_states.append(held)
    return found


def _read_group(path: str, index: int, optimizer: torch.optim.Optimizer) -> Read:
    """The hyper-parameters of a group."""
    hyper = hyper_parameters(optimizer.param_groups[index])
    return read_tree("group", hyper, group_path(path, index), has_objects=True)


def is_custom(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer customises how it is saved or loaded (overridden methods, hooks)."""
    kind = type(optimizer)
    return any(getattr(kind, name) is not getattr(torch.optim.Optimizer, name) for name in _CUSTOM) or any(
        getattr(optimizer, f"_optimizer_{name}_hooks", None) for name in _HOOKS
    )


def _read_rest(path: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The entries of an optimizer's state_dict() beside state and groups. State and groups are read directly. Errors:
    UsageError if state_dict() gives other state or groups than the optimizer's own (those of a wrapped optimizer)."""
    said = optimizer.state_dict()
    state, groups = (said.get(key) for key in _TORCH_KEYS)
    if (
        not isinstance(state, dict)
        or not isinstance(groups, list)
        or not _count_kinds(state.values()) <= _count_kinds(optimizer.state.values())
        or not _count_kinds(groups) <= _count_kinds(optimizer.param_groups)
    ):
        raise UsageError(
            f"state[{path!r}], a {type(optimizer).__name__}, has a state_dict() that gives other state or groups than "
            "its .state and .param_groups; register the optimizer that it wraps, and what it adds as plain values or "
            "as an object with state_dict() and load_state_dict()"
        )
    return {key: value for key, value in said.items() if key not in _TORCH_KEYS}


def _count_kinds(dicts: Iterable[Any]) -> Counter[tuple[str, Any]]:
    """How often each key occurs in the dicts, with which type or dtype. Dicts in dicts count by what they hold:
    bitsandbytes nests its state in state_dict(), so that FSDP does not see it."""
    held = (item for each in dicts if isinstance(each, Mapping) for item in _iter_items(each))
    return Counter((str(key), getattr(value, "dtype", type(value))) for key, value in held)


def _iter_items(held: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    for key, value in held.items():
        if isinstance(value, Mapping):
            yield from _iter_items(value)
        else:
            yield key, value


def _read_state(found: OptimizerView, param: Param, held: dict[Any, Any], numbers: dict[Any, int]) -> int:
    """Adds one parameter's state to `found`; returns the index of its skeleton. `numbers`: those so far, by
    structure."""
    prefix, trained = state_path(found.path, param.name), param.tensor.requires_grad
    tensors: list[tuple[Path, Tensor]]
    if all(map(isinstance, held.values(), repeat(torch.Tensor))) and not any(map(is_composite, held.values())):
        found.plain_states.append(held)
        bare: Any = dict.fromkeys(held)
        tensors = [((key,), tensor) for key, tensor in held.items()]
        same: Any = tuple(held)
    else:
        found.is_mixed = True
        bare, tensors = value_trees.split_tensors(held, prefix, has_objects=True)
        same = prefix
    for path, tensor in tensors:
        found.tensors.append(NamedTensor(join(prefix, *path), param.shard_like(tensor), trained))
    if same not in numbers:
        numbers[same] = len(found.skeletons)
        found.skeletons.append({"value": bare, "tensors": [path for path, _ in tensors]})
    return numbers[same]
