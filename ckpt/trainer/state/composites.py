"""Composites: values that are saved in parts, and put together again at a restore.

- A tensor subclass that flattens (`__tensor_flatten__`, `__tensor_unflatten__`) is saved as its inner tensors.
- A member of an enum is saved as its value.
- An object with state_dict() and load_state_dict() in an optimizer is saved as its state. It is never made anew.

In a tree of values each of them becomes a dict with one of the MARKERS as a key. Nothing is imported for a restore. A
class is looked up by its name in the modules that are loaded, and must be of the right kind.
"""

from __future__ import annotations

import enum
import functools
import re
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from ckpt.errors import DamagedData, StateMismatch, is_injected
from ckpt.trainer.state.shard import is_dtensor

TENSOR = "__tensor__"  # class, context, shape, strides; beside it the inner tensors by name
ENUM = "__enum__"  # class, value
OBJECT = "__object__"  # class, what its state_dict() gave
MARKERS = (TENSOR, ENUM, OBJECT)

# Tensors of torch itself that stand for others: a result that is still on its way, a traced tensor.
_INTERNAL = ("torch.distributed.", "torch._subclasses.")
_PLAIN = (str, bytes, int, float, complex, type(None))


def is_composite(value: Any) -> bool:
    """Whether the value is a tensor subclass that is saved as its inner tensors. A DTensor and a nested tensor are
    none."""
    kind: type = type(value)
    return _can_flatten(kind) and not is_dtensor(value) and not value.is_nested


@functools.lru_cache(maxsize=1 << 12)
def _can_flatten(kind: Any) -> bool:
    return (
        issubclass(kind, torch.Tensor)
        and not kind.__module__.startswith(_INTERNAL)
        and kind.__torch_dispatch__ != torch.Tensor.__torch_dispatch__
        and hasattr(kind, "__tensor_flatten__")
        and hasattr(kind, "__tensor_unflatten__")
    )


def inner_tensors(tensor: Any) -> dict[str, torch.Tensor]:
    """The tensors that a composite is made of, by attribute. Each may be a composite itself."""
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def split_composite(tensor: Any) -> dict[str, Any]:
    """The dict that stands for a composite, with its inner tensors."""
    context = tensor.__tensor_flatten__()[1]
    return {TENSOR: [_class_text(tensor), context, tuple(tensor.shape), tensor.stride()], **inner_tensors(tensor)}


def split_enum(member: enum.Enum) -> dict[str, Any]:
    return {ENUM: [_class_text(member), member.value]}


def split_object(value: Any) -> dict[str, Any]:
    return {OBJECT: [_class_text(value), value.state_dict()]}


def has_state(value: object) -> bool:
    """Whether the value is an object with a state of its own."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict") and not isinstance(value, type)


def describe(tensor: Any) -> str:
    """The class and the context of a composite in words. Equal texts mean that inner tensors have the same meaning."""
    return re.sub(r" at 0x[0-9a-f]+", "", f"{_class_text(tensor)} {tensor.__tensor_flatten__()[1]!r}")[:1000]


def remake(like: Any, inner: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A composite like another one, of other inner tensors."""
    made: torch.Tensor = type(like).__tensor_unflatten__(inner, like.__tensor_flatten__()[1], like.shape, like.stride())
    return made


def join_composites(tree: Any, live: Any = None) -> Any:
    """`tree` with its marked dicts turned back into what they stand for; containers are changed in place. `live`: what
    is in the tree's place now. A live object gets the saved state. A live composite stays if it has the same inner
    tensors. Errors: those of `check_composites`."""
    if isinstance(tree, dict):
        marker = _find_marker(tree)
        if marker == OBJECT:
            live.load_state_dict(join_composites(tree[OBJECT][1]))
            return live
        held = live if isinstance(live, dict) else inner_tensors(live) if is_composite(live) else {}
        for key, value in tree.items():
            if not isinstance(value, _PLAIN):
                tree[key] = join_composites(value, held.get(key))
        return tree if marker is None else _make_value(tree, live)
    if isinstance(tree, (list, tuple, deque)) and not all(isinstance(item, _PLAIN) for item in tree):
        others = [*live] if isinstance(live, (list, tuple, deque)) else []
        items = [join_composites(item, others[n] if n < len(others) else None) for n, item in enumerate(tree)]
        if isinstance(tree, tuple):
            return tuple(items) if any(a is not b for a, b in zip(tree, items, strict=True)) else tree
        for n, item in enumerate(items):
            tree[n] = item
    return tree


def check_composites(tree: Any, what: str, live: Any = None) -> None:
    """Checks that `join_composites` will succeed. Errors: DamagedData; StateMismatch names a class that is not loaded,
    and an object that this process does not have. `what` names the tree."""
    if isinstance(tree, dict):
        marker = _find_marker(tree)
        if marker is not None:
            kind = _find_class(tree, marker, what)
            if marker == ENUM and not _has_member(kind, tree[ENUM][1]):
                raise StateMismatch(f"{what} is {tree[ENUM][1]!r:.80} in the checkpoint, which {kind.__name__} has not")
            if marker == OBJECT and not (isinstance(live, kind) and has_state(live)):
                raise StateMismatch(
                    f"{what} is a {kind.__name__} in the checkpoint, and its state needs one to load it, which the "
                    "optimizer has not made; have the optimizer make it in its constructor"
                )
        for key, value in tree.items():
            if not isinstance(value, _PLAIN):
                child = live.get(key) if isinstance(live, dict) else None
                check_composites(value, what if key in MARKERS else f"{what}.{key}", child)
    elif isinstance(tree, (list, tuple, deque)):
        others = [*live] if isinstance(live, (list, tuple, deque)) else []
        for n, item in enumerate(tree):
            if not isinstance(item, _PLAIN):
                check_composites(item, f"{what}.{n}", others[n] if n < len(others) else None)


def _has_member(kind: Any, value: Any) -> bool:
    try:
        return isinstance(kind(value), enum.Enum)
    except (ValueError, TypeError):
        return False


def _find_marker(tree: dict[Any, Any]) -> str | None:
    return next((marker for marker in MARKERS if marker in tree), None)


def _make_value(tree: dict[Any, Any], live: Any) -> Any:
    marker = _find_marker(tree)
    kind: Any = _find_class(tree, str(marker), "")
    if marker == ENUM:
        return kind(tree[ENUM][1])
    _, context, shape, stride = tree[TENSOR]
    inner = {key: value for key, value in tree.items() if key != TENSOR}
    if type(live) is kind and all(inner.get(name) is part for name, part in inner_tensors(live).items()):
        return live
    try:
        return kind.__tensor_unflatten__(inner, context, torch.Size(shape), tuple(stride))
    except Exception as exc:
        if is_injected(exc):
            raise
        raise DamagedData(f"a stored {kind.__name__} cannot be made of its parts: {type(exc).__name__}: {exc}") from exc


_SIZES = {TENSOR: 4, ENUM: 2, OBJECT: 2}


def _find_class(tree: dict[Any, Any], marker: str, what: str) -> type:
    told = tree[marker]
    if not isinstance(told, list) or len(told) != _SIZES[marker] or not isinstance(told[0], str):
        raise DamagedData(f"{what}: the stored values mark a composite that is none")
    module, _, path = told[0].partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        # vars(): a module's or class's own __getattr__ could import or run something.
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    is_right = (
        isinstance(found, type)
        and {
            TENSOR: _can_flatten(found),
            ENUM: issubclass(found, enum.Enum),
            OBJECT: has_state(found) or (hasattr(found, "state_dict") and hasattr(found, "load_state_dict")),
        }[marker]
    )
    if not is_right:
        raise StateMismatch(
            f"{what} is a {path[:80]} in the checkpoint, and this process has no such class: import {module[:80]} "
            "before the Checkpointer"
        )
    kind: type = found
    return kind


def _class_text(value: object) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"
