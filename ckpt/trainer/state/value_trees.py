"""Value trees: how tensors are taken out of a tree of values, and put back.

A tree is what an object's state_dict() gives, or what a user puts into the state: dicts, lists, tuples and deques of
plain values and tensors. A path is the tuple of keys and indices that leads to a tensor. The tensor's place in the tree
holds None.
"""

from __future__ import annotations

import enum
import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ckpt.errors import DamagedData, UsageError
from ckpt.trainer.state import composites
from ckpt.trainer.state.names import join
from ckpt.trainer.state.shard import DTYPES, Shard, dense_bytes, is_dtensor, plain_view

Path = tuple[Any, ...]
Tensor = torch.Tensor | Shard

DEPTH_MAX = 100
CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, deque)  # types that are restored as they were
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


def split_tensors(tree: Any, what: str, has_objects: bool = False) -> tuple[Any, list[tuple[Path, Tensor]]]:
    """(the tree with None in each tensor's place, [(path, tensor)] in order). Parts without a tensor are not copied.
    Containers with tensors become plain ones, as load_state_dict() expects; see `check_containers`. Composites are
    taken apart (composites.py), objects with a state of their own only if `has_objects`. Errors: UsageError for a tree
    that contains itself, or is nested more than DEPTH_MAX deep; `what` names it."""
    found: list[tuple[Path, Tensor]] = []
    return _split_tensors(tree, (), found, what, has_objects), found


def _split_tensors(tree: Any, path: Path, found: list[tuple[Path, Tensor]], what: str, has_objects: bool) -> Any:
    if type(tree) in PLAIN:
        return tree
    if isinstance(tree, (torch.Tensor, Shard)) and not composites.is_composite(tree):
        found.append((path, tree))
        return None
    if len(path) > DEPTH_MAX:
        raise UsageError(f"{what} is nested more than {DEPTH_MAX} deep, or contains itself; store less of it")
    if isinstance(tree, dict) and not tree.keys().isdisjoint(composites.MARKERS):
        raise UsageError(
            f"{join(what, *path)} has a key that ckpt writes itself ({', '.join(composites.MARKERS)}); rename the key"
        )
    tree = _take_apart(tree, has_objects)
    before = len(found)
    if isinstance(tree, dict):
        if set(map(type, tree.values())) <= PLAIN:
            return tree
        children = {key: _split_tensors(value, (*path, key), found, what, has_objects) for key, value in tree.items()}
        if len(found) == before and all(child is tree[key] for key, child in children.items()):
            return tree
        return _same_container(tree, children)
    if isinstance(tree, (list, tuple, deque)):
        if set(map(type, tree)) <= PLAIN:
            return tree
        items = [_split_tensors(value, (*path, index), found, what, has_objects) for index, value in enumerate(tree)]
        if len(found) == before and all(map(operator.is_, items, tree)):
            return tree
        if isinstance(tree, deque):
            return deque(items, tree.maxlen)
        return items if isinstance(tree, list) else tuple(items)
    return tree


def _take_apart(value: Any, has_objects: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return composites.split_composite(value)
    if isinstance(value, enum.Enum):
        return composites.split_enum(value)
    return composites.split_object(value) if has_objects and composites.has_state(value) else value


def check_containers(tree: Any, found: Iterable[tuple[Path, Tensor]], what: str) -> None:
    """Checks a tree that is put back directly, without load_state_dict(). Errors: UsageError for tensors in a container
    that would come back as another type (a named tuple, a class derived from dict)."""
    for path, _ in found:
        held = tree
        for depth, key in enumerate(path):
            if composites.is_composite(held):
                break
            if type(held) not in CONTAINERS:
                raise UsageError(
                    f"{join(what, *path[:depth])} is a {type(held).__name__} with tensors in it, and would come back "
                    "as something else; use a dict, a list, a tuple, or an object with state_dict(), load_state_dict()"
                )
            held = held[key]


def _same_container(tree: dict[Any, Any], children: dict[Any, Any]) -> dict[Any, Any]:
    if isinstance(tree, defaultdict):
        return defaultdict(tree.default_factory, children)
    return OrderedDict(children) if isinstance(tree, OrderedDict) else children


def merge_tensors(tree: Any, tensors: Iterable[tuple[Sequence[Any], Any]]) -> Any:
    """`tree` with each value of `tensors` put at its path: the reverse of split. Containers on the way are changed in
    place, except tuples. Errors: DamagedData for a path that leads nowhere."""
    for path, value in tensors:
        tree = _put_at(tree, tuple(path), value)
    return tree


def _put_at(tree: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    key, rest = path[0], path[1:]
    try:
        child = _put_at(tree[key], rest, value)
    except (KeyError, IndexError, TypeError) as exc:
        raise DamagedData(f"stored values and their tensors do not fit: nothing at {key!r:.80}") from exc
    if isinstance(tree, tuple):
        return (*tree[:key], child, *tree[key + 1 :])
    tree[key] = child
    return tree


def put_if_missing(tree: Any, path: Path, value: Any) -> None:
    """Puts `value` under a new key of an existing dict. Does nothing if the dict is missing, or the key exists."""
    if path and has_path(tree, path[:-1]) and not has_path(tree, path):
        tree = get_at(tree, path[:-1])
        if isinstance(tree, dict):
            tree[path[-1]] = value


def has_path(tree: Any, path: Path) -> bool:
    """Whether the path leads to a place in the tree."""
    for key in path:
        if not isinstance(tree, (dict, list, tuple, deque)) or (isinstance(tree, dict) and key not in tree):
            return False
        if not isinstance(tree, dict) and not (isinstance(key, int) and 0 <= key < len(tree)):
            return False
        tree = tree[key]
    return True


def get_at(tree: Any, path: Path) -> Any:
    """The value at a path that the tree has."""
    for key in path:
        tree = tree[key]
    return tree


def write_in_place(live: Any, new: Any) -> Any:
    """`new`, written into the live dicts, lists, sets, deques and arrays wherever these can take it. So other holders
    of a live container see the new content, and what they change later is part of the state."""
    if type(live) is not type(new) or live is new:
        return new
    if isinstance(new, dict):
        items = {key: write_in_place(live.get(key), value) for key, value in new.items()}
        live.clear()
        for key, value in items.items():
            live[key] = value
        return live
    if isinstance(new, list):
        live[:] = _write_items(live, new)
        return live
    if type(new) is tuple:
        return tuple(_write_items(live, new))
    if isinstance(new, deque) and live.maxlen == new.maxlen:
        each = _write_items(live, new)
        live.clear()
        live.extend(each)
        return live
    if isinstance(new, set):
        live.clear()
        live.update(new)
        return live
    if isinstance(new, np.ndarray) and live.flags.writeable and (live.dtype, live.shape) == (new.dtype, new.shape):
        live[...] = new
        return live
    return new


def _write_items(live: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    was = [*live, *[None] * (len(new) - len(live))]
    return [write_in_place(old, value) for old, value in zip(was, new, strict=False)]


def embed_tensors(tree: Any, what: str) -> dict[str, Any]:
    """A tree with its tensors as bytes, for small values of one rank (a loader's position). `what` names the tree.
    Errors: UsageError for tensors that are not plain."""
    bare, found = split_tensors(tree, what)
    packed = []
    for path, tensor in found:
        if isinstance(tensor, Shard) or is_dtensor(tensor):
            raise UsageError(f"{join(what, *path)} is sharded, but belongs to one rank's own state; gather it there")
        local = plain_view(tensor, join(what, *path)).contiguous().cpu()
        raw = dense_bytes(local).numpy().tobytes()
        packed.append((path, str(local.dtype).removeprefix("torch."), tuple(local.shape), raw))
    return {"value": bare, "tensors": packed}


def extract_tensors(stored: Mapping[str, Any], what: str) -> Any:
    """The tree that `embed_tensors` was given, with new tensors on the CPU. Errors: DamagedData."""
    tensors = []
    for item in stored["tensors"]:
        try:
            path, dtype, shape, raw = item
            if not isinstance(path, (list, tuple)) or not isinstance(shape, (list, tuple)) or type(raw) is not bytes:
                raise TypeError("its place, its shape or its bytes are none")
            flat = torch.frombuffer(bytearray(raw) or bytearray(1), dtype=torch.uint8)[: len(raw)]
            tensors.append((path, flat.view(DTYPES[dtype]).reshape(shape)))
        except (TypeError, ValueError, KeyError, RuntimeError, OverflowError) as exc:
            raise DamagedData(f"{what}: a tensor stored among its values is none: {exc}") from exc
    tree = merge_tensors(stored["value"], tensors)
    composites.check_composites(tree, what)
    return composites.join_composites(tree)
