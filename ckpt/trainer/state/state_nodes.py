"""The nodes of a state: modules, optimizers, objects, loaders, generators and plain data, and how each is read.

A state is a tree of dicts, lists and tuples, and its nodes are the leaves. Reading a node gives its tensors, under
canonical names, and a payload: the values that a restore needs beside the tensors.

Reading a node steps, copies and changes no object. Loaders and generators are read only for a save.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ckpt.errors import StateMismatch, UsageError
from ckpt.format import values
from ckpt.trainer.state import composites, generators, names, value_trees
from ckpt.trainer.state.names import join
from ckpt.trainer.state.shard import Shard
from ckpt.trainer.state.value_trees import Tensor

_OPTIMIZER_HINT = (
    "Register an optimizer that keeps such objects inside an object of your own, whose state_dict() gives its state "
    "as bytes (docs/guides/optimizers.md)"
)


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor under its canonical name. `is_trained`: whether a registered optimizer trains it, or keeps it as state
    of a parameter that it trains."""

    name: str
    tensor: Tensor
    is_trained: bool = False

    def parts(self) -> Iterator[NamedTensor]:
        """The tensor itself; of a composite, the tensors that it is made of, under its name."""
        if not composites.is_composite(self.tensor):
            yield self
            return
        for name, tensor in composites.inner_tensors(self.tensor).items():
            yield from NamedTensor(join(self.name, name), tensor, self.is_trained).parts()


# The tensors of a node, and the values that a restore needs beside them.
Read = tuple[list[NamedTensor], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class StateNode:
    """A node of the state. `value` is `container[key]`; `path` is its canonical name."""

    path: str
    container: Any
    key: Any

    @property
    def value(self) -> Any:
        return self.container[self.key]

    def put(self, value: Any) -> None:
        self.container[self.key] = value


class DataNode(StateNode):
    """Plain values and tensors, nested in any way."""

    def read(self) -> Read:
        return read_tree("data", self.value, self.path)


class ObjectNode(StateNode):
    """An object with state_dict() and load_state_dict(): a scheduler, a scaler, the user's own."""

    def read(self) -> Read:
        found, payload = read_tree("object", self.value.state_dict(), self.path)
        return found, {**payload, "class": type(self.value).__name__}


class LoaderNode(StateNode):
    """An iterable object with a state (a data loader). Its position belongs to the rank."""


class GeneratorNode(StateNode):
    """A random number generator. It belongs to the rank."""


class ModuleNode(StateNode):
    """A module: its parameters, persistent buffers and extra state; for a custom one (names.is_custom), its
    state_dict()."""

    def read(self) -> Read:
        root: nn.Module = self.value
        if not names.is_custom(root):
            found = [NamedTensor(join(self.path, site.name), site.tensor) for site in names.sites(root)]
            tensors, payload = self.read_extra(names.find_extra_state(root))
            return found + tensors, payload
        said = names.CustomStateDict.read(root)
        items = [(name, value) for name, _, value in said.items]
        found = [NamedTensor(join(self.path, name), value) for name, value in items if isinstance(value, torch.Tensor)]
        tensors, payload = self._read_extra_items([pair for pair in items if not isinstance(pair[1], torch.Tensor)])
        return found + tensors, {**payload, "versions": said.versions}

    def read_extra(self, modules: Sequence[tuple[str, nn.Module]]) -> Read:
        """The extra state of `modules`, a list made by `names.find_extra_state`."""
        return self._read_extra_items(
            [(join(path, "_extra_state"), module.get_extra_state()) for path, module in modules]
        )

    def load(self, state: Mapping[str, Any], versions: Mapping[str, int]) -> None:
        """Gives a custom module its state, by the keys of its state_dict(); `state` may lack some. `versions`: the
        format versions of its modules at the save. Errors: UsageError names each key that state_dict() gives and
        load_state_dict() does not accept, unless its value is right; StateMismatch has the module's own error."""
        try:
            refused = [key for key in names.load_state_dict(self.value, state, versions) if key in state]
        except RuntimeError as exc:
            kind = type(self.value).__name__
            raise StateMismatch(
                f"state[{self.path!r}]: its load_state_dict() (a {kind}) refuses what the checkpoint has: {exc}"
            ) from exc
        now = {key: value for _, key, value in names.CustomStateDict.read(self.value).items} if refused else {}
        lost = [key for key in refused if key not in now or _encode_value(state[key]) != _encode_value(now[key])]
        if lost:
            raise UsageError(
                f"state[{self.path!r}]: its load_state_dict() (a {type(self.value).__name__}) has no place for "
                f"{names.shorten_names(sorted(lost))}, which its state_dict() gives and the checkpoint holds; have it "
                "take them (register_load_state_dict_pre_hook can rename keys)"
            )

    def _read_extra_items(self, items: Sequence[tuple[str, Any]]) -> Read:
        found: list[NamedTensor] = []
        extra: dict[str, Any] = {}
        for name, value in items:
            tensors, extra[name] = read_tree("extra", value, join(self.path, name))
            found += tensors
        return found, {"kind": "module", "extra": extra}


class OptimizerNode(StateNode):
    """A torch.optim.Optimizer. It is read as an OptimizerView, once its parameters have names."""


def _encode_value(value: Any) -> bytes:
    """The encoded value: the same for equal values, and for tensors whose bytes on this rank are equal."""
    return values.encode(value_trees.embed_tensors(getattr(value, "_local_tensor", value), ""))


def read_tree(kind: str, tree: Any, path: str, has_objects: bool = False) -> Read:
    """The tensors of a tree of values, and the payload for its other values. `has_objects`: see `split_tensors`."""
    bare, found = value_trees.split_tensors(tree, path, has_objects)
    if kind == "data":
        value_trees.check_containers(tree, found, path)
    named = [NamedTensor(join(path, *place), tensor) for place, tensor in found]
    places = [(place, each.name) for (place, _), each in zip(found, named, strict=True)]
    return named, {"kind": kind, "value": bare, "tensors": places}


def encode_trees(shared: Mapping[str, Any], own: Mapping[str, Any], constants: values.Constants) -> tuple[bytes, bytes]:
    """The two value trees of a state (StateWalker.values), encoded for storage. `constants`: those of the scan. Errors:
    UsageError names each value that cannot be stored, by its place in the state."""
    try:
        return values.encode(shared, constants=constants), values.encode(own)
    except UsageError:
        refused, of_optimizers = values.Refused(), values.Refused()
        for path, tree in _iter_trees(shared, own):
            values.encode(tree, f"state[{path!r}]", refused=refused)
        for path, tree in _iter_optimizer_trees(shared):
            for each in (refused, of_optimizers):
                values.encode(tree, f"state[{path!r}]", refused=each)
        try:
            refused.raise_if_any()
        except UsageError as exc:
            raise UsageError(f"{exc}. {_OPTIMIZER_HINT}" if of_optimizers else str(exc)) from None
        raise


def _iter_trees(shared: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(path, tree) of the values that users put into the state, and of those that objects gave."""
    for path, payload in shared["objects"].items():
        if "value" in payload:
            yield path, payload["value"]
        for name, body in payload.get("extra", {}).items():
            yield join(path, name), body["value"]
    yield from own["loaders"].items()


def _iter_optimizer_trees(shared: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(path, tree) of what optimizers have; of equal structures, the first parameter's."""
    optimizers = [(path, body) for path, body in shared["objects"].items() if body["kind"] == "optimizer"]
    for path, payload in optimizers:
        for index, group in enumerate(payload["groups"]):
            yield join(path, "param_groups", index), group["value"]
        params = [name for group in payload["groups"] for name in group["params"]]
        first = {number: name for name, number in reversed(list(zip(params, payload["state"], strict=True)))}
        for number, skeleton in enumerate(payload["skeletons"]):
            yield join(path, "state", first.get(number, "")), skeleton["value"]
        yield path, payload["rest"]["value"]
        yield join(path, "state"), payload["keyed"]["value"]


# ---------------------------------------------------------------------------------------------------- finding nodes


def check_state(state: object) -> None:
    """Errors: UsageError if `state` is not a dict whose keys are names."""
    if not isinstance(state, dict) or not all(isinstance(key, str) and key for key in state):
        raise UsageError('state= is a dict with names as keys, such as {"model": model, "optim": optim}')


def find_nodes(state: Mapping[str, Any]) -> list[StateNode]:
    """The nodes of a state, in its order. Errors: UsageError names the parts that cannot be saved, and the
    alternatives."""
    check_state(state)
    found: list[StateNode] = []
    refused: list[str] = []
    for key in state:
        try:
            _collect_nodes(state, key, key, found, 0)
        except UsageError as exc:
            refused.append(str(exc))
    if refused:
        more = f"; and {len(refused) - names.NAMED_MAX} more" if len(refused) > names.NAMED_MAX else ""
        raise UsageError("; ".join(refused[: names.NAMED_MAX]) + more)
    paths = [node.path for node in found]
    if len(set(paths)) < len(paths):
        twice = sorted({p for p in paths if paths.count(p) > 1})
        raise UsageError(f"two parts of the state have the same name: {', '.join(twice)}; rename one of each")
    return found


def _collect_nodes(container: Any, key: Any, path: str, found: list[StateNode], depth: int) -> None:
    value = container[key]
    kind = _node_class(value, path)
    if kind is not None:
        found.append(kind(path, container, key))
    elif isinstance(value, dict) and set(value) == {"state", "param_groups"}:
        raise UsageError(
            f"state[{path!r}] is what an optimizer's state_dict() gave: a copy, to which nothing would be restored; "
            "give the optimizer itself"
        )
    elif not _has_objects(value, path, depth):
        found.append(DataNode(path, container, key))
    else:
        for child in value if isinstance(value, dict) else range(len(value)):
            _collect_nodes(value, child, join(path, child), found, depth + 1)
            if isinstance(value, tuple) and isinstance(found[-1], DataNode):
                raise UsageError(
                    f"state[{path!r}] is a tuple of objects and values, and a value in a tuple cannot be restored; "
                    "use a list or a dict"
                )


def _node_class(value: Any, path: str) -> type[StateNode] | None:
    """The node class for an object; None for plain data. Errors: UsageError for an object that cannot be saved."""
    if type(value) in value_trees.PLAIN or isinstance(value, (torch.Tensor, Shard, type)):
        return None
    if isinstance(value, nn.Module):
        return ModuleNode
    if isinstance(value, torch.optim.Optimizer):
        return OptimizerNode
    if generators.is_generator(value):
        return GeneratorNode
    saves, loads = hasattr(value, "state_dict"), hasattr(value, "load_state_dict")
    held = held_loader(value)
    if saves and loads and hasattr(held, "state_dict"):
        is_loader = hasattr(value, "__iter__") or type(value).__module__.split(".")[0] == "torchdata"
        return LoaderNode if is_loader else ObjectNode
    if isinstance(held, torch.utils.data.DataLoader):
        kind = "is" if held is value else f"is a {type(value).__name__} over"
        more = "" if held is value else " (Accelerate: DataLoaderConfiguration(use_stateful_dataloader=True))"
        raise UsageError(
            f"state[{path!r}] {kind} a torch DataLoader, which has no position that could be saved; use "
            f"torchdata.stateful_dataloader.StatefulDataLoader, which takes the same arguments{more}, or leave it out "
            "and skip to the restored step yourself"
        )
    if saves or loads or isinstance(value, nn.parallel.DistributedDataParallel):
        missing = "load_state_dict" if saves else "state_dict"
        raise UsageError(f"state[{path!r}], a {type(value).__name__}, has no {missing}(); an object needs both")
    return None


def held_loader(loader: Any) -> Any:
    """The loader that a loader of Accelerate's wraps; any other loader itself."""
    return getattr(loader, "base_dataloader", loader)


def _has_objects(value: Any, path: str, depth: int) -> bool:
    if depth > value_trees.DEPTH_MAX:
        raise UsageError(f"state[{path!r}] is nested more than {value_trees.DEPTH_MAX} deep, or contains itself")
    if isinstance(value, dict):
        children: Sequence[Any] = list(value.values())
    elif isinstance(value, (list, tuple)):
        children = value
    else:
        return False
    if set(map(type, children)) <= value_trees.PLAIN:
        return False
    return any(_node_class(c, path) is not None or _has_objects(c, path, depth + 1) for c in children)
