"""Optimizers: state under the names of the parameters it belongs to, read without a step.

Names: `<path>.state.<parameter>.<what>`, where the parameter's name is the one within its module if the state has one
module only, else it begins with the module's path: not what an optimizer spans on this rank (one stage) makes names,
but what the state has on every rank. Hyper-parameters are values; parameters are listed by name, not by number, so that
another order or another wrapping restores right. What an optimizer's own state_dict() gives beside these two (a counter
of a subclass) is a tree of its own, `<path>.<key>`.
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
from ckpt.trainer.state.names import join
from ckpt.trainer.state.shard import Shard, is_dtensor
from ckpt.trainer.state.state_nodes import NamedTensor, read_tree
from ckpt.trainer.state.value_trees import Path, Tensor

_CUSTOM = ("state_dict", "load_state_dict")
_HOOKS = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
_COMMON = ("state", "param_groups")  # what torch's own state_dict() gives


class Param(NamedTuple):
    """`full`: its canonical name in the state. `shard`: as it was declared with ckpt.Shard, if it was."""

    name: str
    full: str
    tensor: torch.Tensor
    shard: Shard | None

    def like(self, state: Tensor) -> Tensor:
        """State of the parameter: of its local shape, it is sharded as the parameter is."""
        if self.shard is None or isinstance(state, Shard) or is_dtensor(state):
            return state
        return self.shard.like(state) if state.ndim and state.shape == self.tensor.shape else state


@dataclass(slots=True)
class Owners:
    """To which registered module (its path, "" for a bare tensor) each parameter belongs, and its name within it."""

    modules: list[str] = field(default_factory=list)
    of: dict[int, tuple[str, str]] = field(default_factory=dict)
    shards: dict[int, Shard] = field(default_factory=dict)

    def add_module(self, path: str, root: nn.Module, found: Sequence[NamedTensor]) -> None:
        """`found`: what is saved of it, whose names are the first choice. Modules come before tensors."""
        self.modules.append(path)
        for named in found:
            self.of.setdefault(id(named.tensor), (path, named.name[len(path) + 1 :]))
        for site in names.sites(root):
            self.of.setdefault(id(site.tensor), (path, site.name))

    def add_tensors(self, found: Sequence[NamedTensor]) -> None:
        for named in found:
            tensor = named.tensor
            if isinstance(tensor, Shard):
                self.shards[id(tensor.tensor)] = tensor
                tensor = tensor.tensor
            self.of.setdefault(id(tensor), ("", named.name))


@dataclass(slots=True)
class OptimizerView:
    """An optimizer as it is. `params`: by group; `param_names`: theirs.

    `skeletons`: the distinct shapes of per-parameter state, each {"value": the tree without its tensors, "tensors":
    their paths}; `state`: by parameter, in order, the number of its skeleton, -1 for none. `plain`: the state dicts
    that hold tensors only. `rest`: the payload of what its own state_dict() gives beside state and groups. `mixed`:
    whether there are other state dicts, or it has a state_dict() of its own: these may change at each step."""

    path: str
    optimizer: torch.optim.Optimizer
    params: list[list[Param]]
    param_names: list[tuple[str, ...]]
    tensors: list[NamedTensor] = field(default_factory=list)
    skeletons: list[dict[str, Any]] = field(default_factory=list)
    state: list[int] = field(default_factory=list)
    plain: list[dict[Any, Any]] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=lambda: {"value": {}, "tensors": []})
    mixed: bool = False

    def constants(self) -> list[Any]:
        """Parts of its payload that nobody changes; where it is mixed, others come in their place."""
        return [*self.param_names, self.skeletons, self.state, self.rest]

    def again(self) -> OptimizerView:
        return read(self.path, self.optimizer, self.params)

    def payload(self) -> dict[str, Any]:
        """Hyper-parameters are read afresh; so is what is mixed."""
        now = self.again() if self.mixed else self
        groups = []
        for index, param_names in enumerate(self.param_names):
            bare, found = value_trees.split(hyper(self.optimizer.param_groups[index]), self.path)
            tensors = [(path, name) for path, name, _ in value_trees.named(group_path(self.path, index), found)]
            groups.append({"params": param_names, "value": bare, "tensors": tensors})
        return {
            "kind": "optimizer",
            "class": class_of(self.optimizer),
            "groups": groups,
            "skeletons": now.skeletons,
            "state": now.state,
            "rest": now.rest,
        }

    def referred(self, payload: dict[str, Any]) -> Iterator[str]:
        """The tensors that a payload refers to and that were read anew for it, by name."""
        for group in payload["groups"]:
            yield from (name for _, name in group["tensors"])
        yield from (name for _, name in payload["rest"]["tensors"])
        if self.mixed and (payload["state"] != self.state or _paths(payload["skeletons"]) != _paths(self.skeletons)):
            paths = _paths(payload["skeletons"])
            for param, number in zip((p for line in self.params for p in line), payload["state"], strict=True):
                if number >= 0:
                    yield from (join(state_path(self.path, param.name), *path) for path in paths[number])


def _paths(skeletons: Sequence[dict[str, Any]]) -> list[list[Path]]:
    return [skeleton["tensors"] for skeleton in skeletons]


def class_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of its class; of one that wraps another, with the same parameters, that of the innermost."""
    inner, seen = [optimizer], {id(optimizer)}
    for each in inner:
        for held in vars(each).values():
            if isinstance(held, torch.optim.Optimizer) and id(held) not in seen:
                seen.add(id(held))
                inner += [held] if _parameters(held) == _parameters(optimizer) else []
    return type(inner[-1]).__name__


def _parameters(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def hyper(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def state_path(path: str, parameter: str) -> str:
    return f"{path}.state.{parameter}"


def group_path(path: str, index: int) -> str:
    return f"{path}.param_groups.{index}"


def view(path: str, optimizer: torch.optim.Optimizer, owners: Owners) -> OptimizerView:
    """Errors: UsageError names a parameter that belongs to nothing registered, or state of no parameter."""
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise UsageError(
            f"state[{path!r}] is a ZeroRedundancyOptimizer, whose state is spread over ranks by whole parameters; "
            "use FSDP2 (torch.distributed.fsdp.fully_shard), which shards it"
        )
    params = _named(path, optimizer, owners)
    known = {id(p.tensor) for line in params for p in line}
    for key in optimizer.state:
        if id(key) not in known:
            what = _described(key)
            raise UsageError(f"state[{path!r}] has state for {what}, which is no parameter of its groups; remove it")
    return read(path, optimizer, params)


def _named(path: str, optimizer: torch.optim.Optimizer, owners: Owners) -> list[list[Param]]:
    homes: list[list[tuple[str, str]]] = []
    for number, group in enumerate(optimizer.param_groups):
        homes.append([])
        for index, param in enumerate(group["params"]):
            home = owners.of.get(id(param))
            if home is None:
                raise UsageError(
                    f"state[{path!r}]: parameter {index} of group {number}, {_described(param)}, belongs to "
                    'no module in the state, so that it has no name; register its module too: state={"model": model}'
                )
            homes[-1].append(home)
    one = len(owners.modules) == 1
    params = [
        [
            Param(name if one else join(module, name), join(module, name), p, owners.shards.get(id(p)))
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


def _described(key: object) -> str:
    """What has no name, in words."""
    with suppress(RuntimeError):  # some kinds of tensors have no shape
        return f"a tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
    return f"a {type(key).__name__}"


def read(path: str, optimizer: torch.optim.Optimizer, params: list[list[Param]]) -> OptimizerView:
    """The optimizer as it is now, of parameters that were named before."""
    found = OptimizerView(path, optimizer, params, [tuple(p.name for p in line) for line in params])
    for index, group in enumerate(optimizer.param_groups):
        tensors = value_trees.split(hyper(group), path)[1]
        found.tensors += [
            NamedTensor(name, tensor) for _, name, tensor in value_trees.named(group_path(path, index), tensors)
        ]
    if is_custom(optimizer):
        found.mixed = True
        tensors_of_rest, found.rest = read_tree("rest", _rest(path, optimizer), path)
        found.tensors += tensors_of_rest
    numbers: dict[Any, int] = {}
    for param in (p for line in params for p in line):
        held = optimizer.state.get(param.tensor)
        if held:
            found.state.append(_read_state(found, param, held, numbers))
        else:
            found.state.append(-1)
            if isinstance(held, dict):  # somebody looked: the first step fills this very one
                found.plain.append(held)
    return found


def is_custom(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer says itself how it is saved or loaded (overridden methods, hooks)."""
    kind = type(optimizer)
    return any(getattr(kind, name) is not getattr(torch.optim.Optimizer, name) for name in _CUSTOM) or any(
        getattr(optimizer, f"_optimizer_{name}_hooks", None) for name in _HOOKS
    )


def _rest(path: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the state_dict() of an optimizer gives beside state and groups, which are read where they are.

    Errors: UsageError where it gives such that are not its own (those of an optimizer that it wraps)."""
    said = optimizer.state_dict()
    state, groups = (said.get(key) for key in _COMMON)
    if (
        not isinstance(state, dict)
        or not isinstance(groups, list)
        or not _kinds(state.values()) <= _kinds(optimizer.state.values())
        or not _kinds(groups) <= _kinds(optimizer.param_groups)
    ):
        raise UsageError(
            f"state[{path!r}], a {type(optimizer).__name__}, has a state_dict() that gives other state or groups than "
            "its .state and .param_groups; register the optimizer that it wraps, and what it adds as plain values or "
            "as an object with state_dict() and load_state_dict()"
        )
    return {key: value for key, value in said.items() if key not in _COMMON}


def _kinds(dicts: Iterable[Any]) -> Counter[tuple[str, Any]]:
    """What the dicts hold: how often which key, with what type or dtype."""
    held = (item for each in dicts if isinstance(each, Mapping) for item in each.items())
    return Counter((str(key), getattr(value, "dtype", type(value))) for key, value in held)


def _read_state(found: OptimizerView, param: Param, held: dict[Any, Any], numbers: dict[Any, int]) -> int:
    """Adds one parameter's state; the number of its skeleton."""
    prefix, trained = state_path(found.path, param.name), param.tensor.requires_grad
    tensors: list[tuple[Path, Tensor]]
    if all(map(isinstance, held.values(), repeat(torch.Tensor))):
        found.plain.append(held)
        bare: Any = dict.fromkeys(held)
        tensors = [((key,), tensor) for key, tensor in held.items()]
        same: Any = tuple(held)
    else:
        found.mixed = True
        bare, tensors = value_trees.split(held, prefix)
        same = prefix
    for path, tensor in tensors:
        found.tensors.append(NamedTensor(join(prefix, *path), param.like(tensor), trained))
    if same not in numbers:
        numbers[same] = len(found.skeletons)
        found.skeletons.append({"value": bare, "tensors": [path for path, _ in tensors]})
    return numbers[same]
