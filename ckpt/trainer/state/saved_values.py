"""The value trees of a checkpoint, checked: what `StateWalker.values()` gave at the save, as read back.

All access to these trees goes through this module. So a damaged or hostile tree gives one clear error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import DamagedData, StateMismatch
from ckpt.format import values
from ckpt.trainer.state.mesh_coordinate import Axis
from ckpt.trainer.state.names import join
from ckpt.trainer.state.value_trees import get_at, has_path

Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """Values, and the (path, name) of each tensor that was in them."""

    value: Any
    tensors: tuple[tuple[Path, str], ...]


@dataclass(frozen=True, slots=True)
class SavedParamGroup:
    """A stored parameter group. `number`: its index in its optimizer. Joined groups of several ranks may share a
    number."""

    params: tuple[str, ...]
    hyper: Tree
    number: int


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The structure of one parameter's state: a tree without its tensors, and their paths."""

    value: Any
    tensors: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class OptimizerTree:
    """A stored optimizer. By parameter name, `state`: the structure of its state, None if it had none; and
    `group_indices`: the index of its group. `rest`: what its load_state_dict() gets beside state and groups, by key.
    `keyed`: its state under texts."""

    groups: tuple[SavedParamGroup, ...]
    state: Mapping[str, Skeleton | None]
    group_indices: Mapping[str, int]
    rest: Tree
    keyed: Tree


@dataclass(frozen=True, slots=True)
class SharedValues:
    """The values that belong to no single rank, by path:

    - `data`: plain values.
    - `objects`: what their load_state_dict() gets.
    - `optimizers`, and `classes`: the class names of optimizers and objects.
    - `modules`: extra state, by key; `versions`: the format versions inside each custom module; `composites`: by name,
      what its tensor subclasses were, in words.
    - `aliases`: other names of tensors, each with the name that the tensor was saved under.
    - `orders`: by name of a tensor that was not row-major, its dimensions in memory, from the outermost. None if the
      checkpoint has no orders.
    """

    data: Mapping[str, Tree] = field(default_factory=dict)
    objects: Mapping[str, Tree] = field(default_factory=dict)
    optimizers: Mapping[str, OptimizerTree] = field(default_factory=dict)
    modules: Mapping[str, Mapping[str, Tree]] = field(default_factory=dict)
    versions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    composites: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    orders: Mapping[str, Sequence[int]] | None = None

    @staticmethod
    def parse(tree: Any) -> SharedValues:
        """Errors: DamagedData; StateMismatch if the values are not a Checkpointer's but those of torch's DCP."""
        if isinstance(tree, dict) and "dcp" in tree:
            raise StateMismatch(
                "dcp.save or `ckpt import` saved this checkpoint, and a Checkpointer cannot restore it. Give its URL "
                "as init= of a Checkpointer with another URL, which begins with the weights; or load it with dcp.load "
                "and ckpt.integrations.dcp.Reader"
            )
        data: dict[str, Tree] = {}
        objects: dict[str, Tree] = {}
        optimizers: dict[str, OptimizerTree] = {}
        modules: dict[str, dict[str, Tree]] = {}
        versions: dict[str, dict[str, int]] = {}
        composites: dict[str, dict[str, str]] = {}
        classes: dict[str, str] = {}
        for path, body in _get_named(tree, "objects").items():
            kind = _get(body, "kind", str)
            classes[path] = _class_name(body)
            if kind == "data":
                data[path] = _tree(body)
            elif kind == "object":
                objects[path] = _tree(body)
            elif kind == "optimizer":
                optimizers[path] = _optimizer(body)
            elif kind == "module":
                modules[path] = {key: _tree(extra) for key, extra in _get_named(body, "extra").items()}
                versions[path], composites[path] = _versions(body), _composites(body)
            else:
                raise DamagedData(f"the stored values know the kind {kind[:80]!r}, which this version does not")
        aliases, orders = _get_named(tree, "aliases"), _orders(tree)
        if not _are_texts(aliases.values()):
            raise DamagedData("the stored values have another name of a tensor that is none")
        return SharedValues(data, objects, optimizers, modules, versions, composites, classes, aliases, orders)

    def kind_of(self, path: str) -> str | None:
        kinds = {"module": self.modules, "optimizer": self.optimizers, "object": self.objects, "value": self.data}
        return next((kind for kind, held in kinds.items() if path in held), None)


@dataclass(frozen=True, slots=True)
class RankValues:
    """What one rank saved as its own. `generators`: {"state": .., "seed": ..} by name. `loaders`: embedded trees by
    path. `base`: by name, the hashes of frozen parameters that were not saved."""

    axes: tuple[Axis, ...]
    data: str
    data_rank: int
    data_world: int
    generators: Mapping[str, Mapping[str, Any]]
    loaders: Mapping[str, Mapping[str, Any]]
    base: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def parse(tree: Any) -> RankValues:
        """Errors: DamagedData."""
        coordinate = _get(tree, "coordinate", str)
        indices = dict(part.partition("=")[::2] for part in coordinate.split(","))
        try:
            axes = tuple(Axis(str(n), int(indices[n]), int(size)) for n, size in _get(tree, "mesh", (tuple, list)))
        except (KeyError, ValueError, TypeError) as exc:
            raise DamagedData(
                f"the stored coordinate {coordinate[:80]!r} does not fit the mesh stored with it"
            ) from exc
        generators = _get_named(tree, "generators")
        for stored in generators.values():
            _check_own_bytes(_get(stored, "state", object))
        loaders = _get_named(tree, "loaders")
        for stored in loaders.values():
            _get(stored, "value", object)
            _get(stored, "tensors", (tuple, list))
        numbers = _get(tree, "data_rank", int), _get(tree, "data_world", int)
        base = _get_named(tree, "base") if "base" in tree else {}
        if not _are_texts(base.values()):
            raise DamagedData("the stored hashes of frozen parameters are not texts")
        return RankValues(axes, _get(tree, "data", str), *numbers, generators, loaders, base)


def merge_shared(trees: Sequence[Any]) -> Any:
    """One tree made of several ranks' shared values. These differ if the ranks hold different parameters (pipeline
    stages). For each part, the first tree that has it is taken. Optimizer groups with equal numbers and
    hyper-parameters are joined; any other stays a group of its own, for its own parameters. An object is taken before
    None (a scheduler that only the last stage has). Errors: DamagedData."""
    if not trees:
        raise DamagedData("the checkpoint has no values")
    objects: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for tree in trees:
        aliases = {**_get(tree, "aliases", dict), **aliases}
        for path, body in _get(tree, "objects", dict).items():
            if path not in objects or (_is_stored_none(objects[path]) and _get(body, "kind", str) != "data"):
                objects[path] = body
            elif _get(body, "kind", str) == "module" == _get(objects[path], "kind", str):
                extra = {**_get(body, "extra", dict), **_get(objects[path], "extra", dict)}
                versions = {**_versions(body), **_versions(objects[path])}
                parts = {**_composites(body), **_composites(objects[path])}
                objects[path] = {"kind": "module", "extra": extra, "versions": versions, "composites": parts}
            elif _get(body, "kind", str) == "optimizer" == _get(objects[path], "kind", str):
                objects[path] = _join_optimizers(objects[path], body)
    merged: dict[str, Any] = {"objects": objects, "aliases": aliases}
    told = [orders for tree in trees if (orders := _orders(tree)) is not None]
    if told:
        merged["orders"] = {name: order for orders in reversed(told) for name, order in orders.items()}
    return merged


def find_differing(trees: Sequence[Any], before: Sequence[Any] = ()) -> set[str]:
    """The paths at which several ranks' shared values differ; merge_shared takes the first one. For an optimizer, also
    its groups that give one parameter different hyper-parameters. Parts that `before` has are left out. Errors:
    DamagedData."""
    known = {(path, part) for tree in before for path, part, _ in _iter_parts(tree)}
    first: dict[tuple[str, str], bytes] = {}
    found: set[str] = set()
    kinds = {(path, _get(body, "kind", str)) for tree in trees for path, body in _get(tree, "objects", dict).items()}
    objects = {path for path, kind in kinds if kind != "data"}
    for tree in trees:
        for path, part, told in _iter_parts(tree):
            if path in objects and _is_stored_none(_get(tree, "objects", dict).get(path)):
                continue
            if (path, part) not in known and first.setdefault((path, part), told) != told:
                found.add(path)
    return found


def _iter_parts(tree: Any) -> Iterator[tuple[str, str, bytes]]:
    """(path, parameter or "", encoded content) of each part that merge_shared takes from one rank as a whole."""
    for path, body in _get(tree, "objects", dict).items():
        kind = _get(body, "kind", str)
        if kind == "module":
            for key, extra in _get(body, "extra", dict).items():
                yield join(path, key), "", _encode_content(extra)
        elif kind == "optimizer":
            for number, group in enumerate(_get(body, "groups", (list, tuple))):
                told = _encode_content(group)
                for name in _get(group, "params", (list, tuple)):
                    yield join(path, "param_groups", number), name, told
            yield path, "", _encode_content(_rest(body))
            yield path, "state", _encode_content(_rest(body, "keyed"))
        else:
            yield path, "", _encode_content(body)


def _is_stored_none(body: Any) -> bool:
    return body is not None and _get(body, "kind", str) == "data" and _get(body, "value", object) is None


def is_different(one: Any, another: Any) -> bool:
    """Whether two stored values differ."""
    return one is not another and values.encode(one) != values.encode(another)


def _encode_content(body: Any) -> bytes:
    """The encoded content: the same for equal values with tensors in the same places."""
    return values.encode([_get(body, "value", object), _get(body, "tensors", (list, tuple))])


def _join_optimizers(first: Any, second: Any) -> dict[str, Any]:
    """One stored optimizer made of two. For a parameter in both, the first one's state is taken if it has any."""
    held = set(_optimizer(first).state)
    skeletons = [*_get(first, "skeletons", list), *_get(second, "skeletons", list)]
    _optimizer(second)
    state = _skeleton_indices(second, len(_get(first, "skeletons", list))) | _skeleton_indices(first, 0)
    joined: dict[tuple[int, bytes], list[str]] = {}
    groups: list[dict[str, Any]] = []
    for body, known in ((first, set()), (second, held)):
        for index, group in enumerate(body["groups"]):
            added = [name for name in group["params"] if name not in known]
            key = _group_number(group, index), _encode_content(group)
            if key not in joined:
                if not added and any(number == key[0] for number, _ in joined):
                    # No parameter would have these hyper-parameters.
                    continue
                joined[key] = []
                groups.append({**group, "number": key[0]})
            joined[key] += added
    for group, names in zip(groups, joined.values(), strict=True):
        group["params"] = tuple(names)
    flat = [state.get(name, -1) for names in joined.values() for name in names]
    of_first = {"class": _class_name(first), "rest": _rest(first), "keyed": _rest(first, "keyed")}
    return {"kind": "optimizer", "groups": groups, "skeletons": skeletons, "state": flat, **of_first}


def _skeleton_indices(body: Any, shift: int) -> dict[str, int]:
    """By name of a parameter with state: the index of its skeleton, plus `shift`."""
    names = (name for group in body["groups"] for name in group["params"])
    return {name: number + shift for name, number in zip(names, body["state"], strict=True) if number >= 0}


def _optimizer(body: Any) -> OptimizerTree:
    skeletons = []
    for item in _get(body, "skeletons", (list, tuple)):
        value = _get(item, "value", dict)
        places = tuple(_path(path, value) for path in _get(item, "tensors", (list, tuple)))
        skeletons.append(Skeleton(value, places))
    groups = tuple(
        SavedParamGroup(tuple(_get(item, "params", (list, tuple))), _tree(item), _group_number(item, index))
        for index, item in enumerate(_get(body, "groups", (list, tuple)))
    )
    if not all(isinstance(group.hyper.value, dict) and _are_texts(group.params) for group in groups):
        raise DamagedData("the stored groups of an optimizer are not by name")
    of_groups = (path for group in groups for path, _ in group.hyper.tensors)
    if not all([*of_groups, *(path for skeleton in skeletons for path in skeleton.tensors)]):
        raise DamagedData("the stored values of an optimizer have a tensor where they should be by key")
    numbers, names = _get(body, "state", (list, tuple)), [name for group in groups for name in group.params]
    if len(numbers) != len(names) or not all(isinstance(n, int) and -1 <= n < len(skeletons) for n in numbers):
        raise DamagedData("the stored values of an optimizer do not fit its parameters")
    state = {name: None if n < 0 else skeletons[n] for name, n in zip(names, numbers, strict=True)}
    home = {name: number for number, group in enumerate(groups) for name in group.params}
    rest, keyed = _tree(_rest(body)), _tree(_rest(body, "keyed"))
    if not (isinstance(rest.value, dict) and isinstance(keyed.value, dict) and _are_texts(keyed.value)):
        raise DamagedData("the stored values of an optimizer are not by key")
    return OptimizerTree(groups, state, home, rest, keyed)


def _class_name(body: Any) -> str:
    """The class name of an optimizer or object; "" if it is unknown."""
    return str(_get(body, "class", str, ""))


def _rest(body: Any, key: str = "rest") -> Any:
    """The rest of a stored optimizer, or its state under texts ("keyed"). Older checkpoints may lack either."""
    return _get(body, key, dict, {"value": {}, "tensors": ()})


def _group_number(group: Any, index: int) -> int:
    """The number of a stored group: recorded in a joined group, else its index."""
    return int(_get(group, "number", int, index))


def _versions(body: Any) -> dict[str, int]:
    """The format versions of a stored module; empty for one that is restored tensor by tensor."""
    versions: dict[str, int] = _get(body, "versions", dict, {})
    if not all(isinstance(name, str) and isinstance(number, int) for name, number in versions.items()):
        raise DamagedData("the stored versions of a module's format are not numbers by name")
    return versions


def _composites(body: Any) -> dict[str, str]:
    """What the tensor subclasses of a stored module were; empty for a module that has none."""
    found: dict[str, str] = _get(body, "composites", dict, {})
    if not (_are_texts(found) and _are_texts(found.values())):
        raise DamagedData("the stored tensor subclasses of a module are not texts by name")
    return found


def _orders(tree: Any) -> dict[str, Sequence[int]] | None:
    if "orders" not in tree:
        return None
    orders: dict[str, Sequence[int]] = _get_named(tree, "orders")
    for order in orders.values():
        if not isinstance(order, (list, tuple)) or not all(type(dim) is int for dim in order):
            raise DamagedData("the stored values have an order of dimensions that is not known")
        if sorted(order) != list(range(len(order))):
            raise DamagedData(f"the stored values have an order of dimensions that is none: {order!s:.80}")
    return orders


def _tree(body: Any) -> Tree:
    pairs, value = [], _get(body, "value", object)
    for item in _get(body, "tensors", (list, tuple)):
        if not isinstance(item, (list, tuple)) or len(item) != 2 or not isinstance(item[1], str):
            raise DamagedData("the stored values name their tensors in a way that is not known")
        pairs.append((_path(item[0], value), item[1]))
    return Tree(value, tuple(pairs))


def _path(path: Any, tree: Any) -> Path:
    """`path` as a tuple. Errors: DamagedData unless it leads to a tensor's empty place (None) in `tree`."""
    try:
        if isinstance(path, (list, tuple)) and has_path(tree, tuple(path)) and get_at(tree, tuple(path)) is None:
            return tuple(path)
    except TypeError:
        # The path contains a list, which cannot be a key.
        pass
    raise DamagedData("the stored values name a place of a tensor that is not there, or not empty")


def _check_own_bytes(state: Any) -> None:
    """Refuses a range in the stored state of a generator: expanding one takes more memory than its stored bytes."""
    if isinstance(state, range):
        raise DamagedData("the stored state of a generator has a range in it")
    if isinstance(state, Mapping):
        state = tuple(state.values())
    if isinstance(state, (list, tuple)):
        for part in state:
            _check_own_bytes(part)


def _are_texts(names: Iterable[Any]) -> bool:
    return all(isinstance(name, str) for name in names)


def _get_named(tree: Any, key: str) -> dict[str, Any]:
    """The dict under `key`, whose keys must be texts."""
    found: dict[str, Any] = _get(tree, key, dict)
    if not _are_texts(found):
        raise DamagedData(f"the stored values are not those of a state: {key!r} is not by name")
    return found


def _get(tree: Any, key: str, kind: type[Any] | tuple[type[Any], ...], default: Any = None) -> Any:
    """The value under `key`, which must be of type `kind`; `default`, if it is given, where the key is missing. Errors:
    DamagedData."""
    if isinstance(tree, dict) and (key in tree or default is not None) and isinstance(tree.get(key, default), kind):
        return tree.get(key, default)
    raise DamagedData(f"the stored values are not those of a state: no proper {key!r} where one is expected")
