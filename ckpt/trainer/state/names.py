"""Canonical names: the name of a tensor, whatever wraps the module that holds it.

A name is the path through the state, then through the module: `model.layers.0.weight`. Wrappers (DDP, torch.compile,
activation checkpointing) leave no trace in the name. FSDP2 and tensor parallelism change no names. So a checkpoint made
under one of them can be restored under another.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ckpt.errors import UsageError

NAME_BYTES_MAX = 1024
NAMED_MAX = 5  # names listed in one message

# By class name, the attribute under which a wrapper holds the wrapped module. A class of the same name from any other
# package than _WRAPPERS_FROM is an ordinary module.
WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "ActivationWrapper": "_checkpoint_wrapped_module",
}
_WRAPPERS_FROM = ("torch.", "apex.")
_WRAPPER_ATTRIBUTES = ("_orig_mod", "_checkpoint_wrapped_module")  # no user's attribute has such a name
_OWN_HOOKS = ("torch.distributed.fsdp.", "torch.distributed._composable.")  # these only reshard, as the walk does
_CUSTOM_METHODS = ("state_dict", "load_state_dict", "_save_to_state_dict")


@dataclass(frozen=True, slots=True)
class Site:
    """The place where a tensor is registered: `container[key]`, under the canonical `name` within its module."""

    name: str
    container: dict[str, Any]
    key: str
    tensor: torch.Tensor


def join(*parts: object) -> str:
    return ".".join(str(p) for p in parts if p != "")


def prefixes(name: str) -> list[str]:
    """The names of what holds `name`, the outermost first."""
    return [name[:at] for at, letter in enumerate(name) if letter == "."]


def shorten_names(names: Sequence[str]) -> str:
    """The first NAMED_MAX names and the number of the others, for a message."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return f"{', '.join(names[:NAMED_MAX])}{more}"


def check_name(name: str) -> None:
    """Raises UsageError for a name that the format cannot hold."""
    if not name.isprintable() or len(name.encode()) > NAME_BYTES_MAX:
        raise UsageError(f"{name[:80]!r} cannot name a tensor: a name is printable and has at most 1024 bytes")


def unwrap(module: nn.Module) -> nn.Module:
    """The user's module inside any wrappers. A wrapper with content of its own counts as the user's module. Such a
    wrapper is a derived class with parameters, buffers, modules or extra state. Errors: UsageError for FSDP1."""
    while True:
        if any(c.__name__ == "FullyShardedDataParallel" for c in type(module).__mro__):
            raise UsageError(
                "a module is wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters are not supported; "
                "use torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        attribute = _find_wrapped_attribute(module)
        if attribute is None:
            return module
        module = module._modules[attribute]  # type: ignore[assignment]


def _find_wrapped_attribute(module: nn.Module) -> str | None:
    """The attribute under which a wrapper holds the user's module; None for a module that is not looked through."""
    attribute = _wrapper_attribute(module)
    inner = None if attribute is None else module._modules.get(attribute)
    return None if inner is None or _has_own_content(module, attribute) else attribute


def _wrapper_attribute(module: nn.Module) -> str | None:
    classes = {c.__name__ for c in type(module).__mro__ if c.__module__.startswith(_WRAPPERS_FROM)}
    return next((attribute for name, attribute in WRAPPERS.items() if name in classes), None)


def _has_own_content(module: nn.Module, attribute: str | None) -> bool:
    kept = [b for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set]
    children = [child for name, child in module._modules.items() if name != attribute]
    extra = type(module).get_extra_state is not nn.Module.get_extra_state
    return extra or any(held is not None for held in (*module._parameters.values(), *kept, *children))


def modules(root: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every (canonical path, module) from `root` down, without wrappers; a shared module under each of its names."""
    module = unwrap(root)
    yield path, module
    for key, child in module._modules.items():
        if child is not None:
            yield from modules(child, join(path, key))


def sites(root: nn.Module) -> Iterator[Site]:
    """The parameters and persistent buffers below `root`, under every name they have."""
    for path, module in modules(root):
        for container in (module._parameters, module._buffers):
            for key, tensor in container.items():
                if tensor is not None and not (
                    container is module._buffers and key in module._non_persistent_buffers_set
                ):
                    yield Site(join(path, key), container, key, tensor)


def find_extra_state(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that have extra state of their own, with their paths."""
    return [(p, m) for p, m in modules(root) if type(m).get_extra_state is not nn.Module.get_extra_state]


def find_fsdp_modules(found: Iterable[nn.Module]) -> list[Any]:
    """The FSDP2 modules in `found`. After evaluation some of them still hold gathered parameters. `.reshard()` brings
    these back to shards, as torch's own state_dict does. Between two steps this changes no value."""
    return [
        module
        for module in found
        if hasattr(type(module), "reshard") and any(c.__name__ == "FSDPModule" for c in type(module).__mro__)
    ]


def is_custom(root: nn.Module) -> bool:
    """Whether the module customises how it is saved or loaded (hooks, overridden methods, TorchScript). Such a module
    is saved by its state_dict() and restored by its load_state_dict()."""
    return any(_is_custom(module) for _, module in modules(root))


def _is_custom(module: nn.Module) -> bool:
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule) or any(
        getattr(kind, n) is not getattr(nn.Module, n) for n in _CUSTOM_METHODS
    ):
        return True
    if _loads_in_own_way(module):
        return True
    hooks: list[Callable[..., Any]] = [
        *module._state_dict_hooks.values(),
        *module._state_dict_pre_hooks.values(),
        *module._load_state_dict_pre_hooks.values(),
        *module._load_state_dict_post_hooks.values(),
    ]
    return any(not _hook_module(hook).startswith(_OWN_HOOKS) for hook in hooks)


def may_resize(root: nn.Module, key: str) -> bool:
    """Whether the module that holds `key`, a key of the state_dict() of `root`, loads its state in its own way. It may
    then take a tensor of another shape, as the observers of torch.ao.quantization do."""
    module = unwrap(root)
    for part in key.split(".")[:-1]:
        child = getattr(module, part, None)
        if not isinstance(child, nn.Module):
            return False
        module = child
    return _loads_in_own_way(module)


def _loads_in_own_way(module: nn.Module) -> bool:
    loads: Any = type(module)._load_from_state_dict
    return loads is not nn.Module._load_from_state_dict and not loads.__module__.startswith("torch.nn.modules.")


def _hook_module(hook: Any) -> str:
    # torch wraps some hooks.
    inner = getattr(hook, "hook", hook)
    return str(getattr(inner, "__module__", None) or type(inner).__module__)


@dataclass(frozen=True, slots=True)
class CustomStateDict:
    """What a custom module's state_dict() gives. `items`: (canonical name, own key, value); the tensors are live ones
    if state_dict() takes torch's arguments. `versions`: the format versions of its modules, by canonical name.
    load_state_dict() gets them, so that it can tell old formats from new ones."""

    items: list[tuple[str, str, Any]]
    versions: dict[str, int]

    @staticmethod
    def read(root: nn.Module) -> CustomStateDict:
        module = unwrap(root)
        state, told = _state_dict(module)
        # A wrapped module has the same name as its wrapper, comes after it, and so takes its place here.
        versions = {
            _canonical_key(module, key): each["version"]
            for key, each in told.items()
            if isinstance(each.get("version"), int)
        }
        return CustomStateDict([(_canonical_key(module, key), key, value) for key, value in state.items()], versions)


def load_state_dict(root: nn.Module, state: Mapping[str, Any], versions: Mapping[str, int]) -> list[str]:
    """Gives a custom module what CustomStateDict.read() returned, by the module's own keys; `state` may lack some of
    them. Returns the keys that the module reports as unexpected, as torch's own load_state_dict() does."""
    module, given = unwrap(root), OrderedDict(state)
    names = {key: _canonical_key(module, key) for key in _state_dict(module)[1]}
    told = ((key, {"version": versions[name]}) for key, name in names.items() if name in versions)
    given._metadata = OrderedDict(told)  # type: ignore[attr-defined]
    lenient: dict[str, Any] = {"strict": False} if _takes_argument(module.load_state_dict, "strict") else {}
    said = module.load_state_dict(given, **lenient)
    return list(getattr(said, "unexpected_keys", ()))


def _state_dict(module: nn.Module) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]]]:
    """The module's state_dict(), and the metadata of its modules, by their own names."""
    live: dict[str, Any] = {"keep_vars": True} if _takes_argument(module.state_dict, "keep_vars") else {}
    state = module.state_dict(**live)
    return state, getattr(state, "_metadata", {})


def _takes_argument(method: Callable[..., Any], argument: str) -> bool:
    """Whether a method takes the argument; an overridden method may take fewer than torch's own."""
    parameters = inspect.signature(method).parameters
    return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _canonical_key(root: nn.Module, key: str) -> str:
    """A key of state_dict() without wrappers' parts, as far as the key follows the modules below `root`."""
    kept: list[str] = []
    module: nn.Module | None = root
    for part in key.split("."):
        if part not in _WRAPPER_ATTRIBUTES and (module is None or part != _find_wrapped_attribute(module)):
            kept.append(part)
        child = getattr(module, part, None)
        module = child if isinstance(child, nn.Module) else None
    return join(*kept)
