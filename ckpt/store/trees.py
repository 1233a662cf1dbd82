"""The stored values for people: in the shape of the user's state, and by paths such as "optim.param_groups[0].lr".

A checkpoint stores values by object, each with its class, its kind and the places of its tensors. These functions
return what the user registered. A tree that is not of a state is returned unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

TEXT_MAX = 60


class PathKind(Enum):
    """How one step of a path leads from a value to a part of it."""

    KEY = "key"
    INDEX = "index"
    ATTRIBUTE = "attribute"
    NOTE = "note"


PathStep = tuple[PathKind, Any]


def state_values(shared: Any) -> Any:
    """What the user registered, by key: the values of each object, with None in place of a tensor. An optimizer has its
    `param_groups`, each with the names of its `params`."""
    objects = _get(shared, "objects")
    if not isinstance(objects, dict):
        return shared
    return {path: _object_values(body) for path, body in objects.items()}


def _object_values(body: Any) -> Any:
    kind = _get(body, "kind")
    if kind == "optimizer" and isinstance(groups := _get(body, "groups"), (list, tuple)):
        rest = _get(_get(body, "rest"), "value")
        made = [{"params": list(_get(each, "params") or ()), **_dict(_get(each, "value"))} for each in groups]
        return {"param_groups": made, **_dict(rest)}
    if kind == "module":
        return {key: _get(each, "value") for key, each in _dict(_get(body, "extra")).items()}
    return _get(body, "value") if kind in ("data", "object") else body


def rank_values(own: Any) -> Any:
    """What one rank has of its own: `loaders`, by their key in the state, and `generators`, by name."""
    if not isinstance(_get(own, "loaders"), dict):
        return own
    loaders = {path: _get(each, "value") for path, each in own["loaders"].items()}
    return {"loaders": loaders, "generators": _dict(_get(own, "generators"))}


def path_text(owner: str, steps: Sequence[PathStep]) -> str:
    """A path in the tree of a checkpoint, as the user writes it. `owner`: the rank's coordinate; "": all ranks."""
    keys = [value for _, value in steps]
    short = list(steps)
    if len(keys) > 1 and keys[0] == "objects":
        short = [steps[1], *_object_path(steps[2:])]
    elif len(keys) > 1 and keys[0] == "loaders":
        short = [steps[1], *(steps[3:] if keys[2:3] == ["value"] else steps[2:])]
    text = "".join(_step_text(number, each) for number, each in enumerate(short))
    return f"{owner} {text}".strip()


def _object_path(steps: Sequence[PathStep]) -> list[PathStep]:
    keys = [value for _, value in steps]
    if keys[:1] == ["groups"]:
        return [(PathKind.KEY, "param_groups"), *steps[1:2], *(steps[3:] if keys[2:3] == ["value"] else steps[2:])]
    if keys[:1] == ["value"] or keys[:2] == ["rest", "value"]:
        return list(steps[1 if keys[0] == "value" else 2 :])
    if keys[:1] == ["extra"]:
        return [*steps[1:2], *(steps[3:] if keys[2:3] == ["value"] else steps[2:])]
    return list(steps)


def _step_text(number: int, step: PathStep) -> str:
    kind, value = step
    if kind is PathKind.NOTE:
        return str(value)
    if kind is PathKind.ATTRIBUTE:
        return f".{value}"
    if kind is PathKind.KEY and isinstance(value, str) and (number == 0 or value.isidentifier()):
        return f".{value}" if number else value
    return f"[{value!r}]"


def value_text(value: Any) -> str:
    """A value as text of at most TEXT_MAX characters."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and len(shape) and dtype is not None:
        return f"{dtype}{list(shape)}"
    if isinstance(value, (bytes, bytearray)) and len(value) > TEXT_MAX // 4:
        return f"{len(value)} bytes"
    text = repr(value)
    return text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 3]}..."


def _get(tree: Any, key: str) -> Any:
    return tree.get(key) if isinstance(tree, dict) else None


def _dict(tree: Any) -> dict[Any, Any]:
    return tree if isinstance(tree, dict) else {}
