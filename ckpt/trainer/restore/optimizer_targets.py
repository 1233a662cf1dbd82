"""Optimizer targets: which values of a checkpoint go to which parameter's state, and to which group.

The state of a parameter is found by the parameter's name, whatever its group and its place in the group. The
hyper-parameters of a group are found by the parameters that it holds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.trainer.restore import overruled
from ckpt.trainer.restore.tensor_requests import SavedTensor, TensorRequests, dtype_of, empty_like, replicated_like
from ckpt.trainer.state import names, value_trees
from ckpt.trainer.state.composites import check_composites, is_composite, join_composites
from ckpt.trainer.state.names import join
from ckpt.trainer.state.optimizers import OptimizerView, Param, class_of, group_path, hyper_parameters, state_path
from ckpt.trainer.state.saved_values import OptimizerTree, SavedParamGroup, Tree
from ckpt.trainer.state.shard import Pieces, allow_in_place
from ckpt.trainer.state.state_nodes import ObjectNode
from ckpt.trainer.state.state_walk import Scan
from ckpt.types import Box

# State that torch's optimizers keep on the host, unless they are capturable or fused.
HOST_STATE = frozenset({"step", "mu_product"})
# Hyper-parameters that an optimizer of any class may have.
_COMMON_KEYS = frozenset({"foreach", "fused", "capturable", "differentiable", "initial_lr"})

_REGROUP_HINT = (
    "make the groups as they were, or pass strict=False once: then the script's hyper-parameters hold for them, "
    "and the state of each parameter is restored"
)


@dataclass(frozen=True, slots=True)
class OptimizerTargets:
    """The restore of all optimizers of a state. Their wants, and their differences, are collected in `requests`."""

    scan: Scan
    requests: TensorRequests
    # By id: tensors among hyper-parameters that already have their final value.
    _final_hyper_tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    # State that the fresh optimizers have not made yet, by its name in the checkpoint and its device.
    _made_tensors: dict[tuple[str, torch.device], torch.Tensor] = field(default_factory=dict)

    def plan_optimizer(self, view: OptimizerView) -> None:
        """Plans what one optimizer wants, and what is installed afterwards."""
        saved = self.requests.saved.optimizers.get(view.path)
        if saved is None:
            self.requests.note_other_kind(view.path, "optimizer")
            return
        live = set().union(*(_class_flags(hyper_parameters(group)) for group in view.optimizer.param_groups))
        kept = set().union(*(_class_flags(group.hyper.value) for group in saved.groups))
        state = {join(*path) for held in saved.state.values() if held is not None for path in held.tensors}
        more = f"; of its parameters it has {', '.join(sorted(state))}" if state else ""
        if self.requests.is_of_another_class(view.path, class_of(view.optimizer), live, kept, more):
            self.requests.used_names.update(
                name for name in self.requests.saved_names if name.startswith(f"{view.path}.")
            )
            return
        before = len(self.requests.installs)
        stored_as = [[self._find_stored_name(param, saved) for param in params] for params in view.params_by_group]
        homes = [{saved.group_indices[name] for name in stored if name is not None} for stored in stored_as]
        for number, (params, stored, held) in enumerate(zip(view.params_by_group, stored_as, homes, strict=True)):
            sharing = [other for other, of_it in enumerate(homes) if other != number and of_it & held]
            if not params:
                held = {home for home, group in enumerate(saved.groups) if group.number == number}
                held = set(sorted(held)[:1])
            if len(held) > 1:
                name = group_path(view.path, number)
                numbers = sorted(saved.groups[home].number for home in held)
                line = f"{name} holds parameters that the checkpoint has in the groups {numbers}"
                if len(set(numbers)) < len(numbers):
                    line += ", and with other hyper-parameters on other ranks"
                self.requests.note_difference("reshaped", name, f"{line}; {_REGROUP_HINT}")
            elif sharing:
                name = group_path(view.path, number)
                line = f"{name} and {' and '.join(group_path(view.path, other) for other in sharing[:3])}"
                line += f" hold parameters that the checkpoint has in one group; {_REGROUP_HINT}"
                self.requests.note_difference("reshaped", name, line)
            if len(held) == 1 and not sharing:
                self._check_group_number(view, number, home := saved.groups[held.pop()])
                self._plan_group(view, number, home)
            else:
                group = hyper_parameters(view.optimizer.param_groups[number])
                tensors = value_trees.split_tensors(group, view.path, has_objects=True)[1]
                self._final_hyper_tensors.update(
                    (id(tensor), tensor) for _, tensor in tensors if isinstance(tensor, torch.Tensor)
                )
            for param, known_as in zip(params, stored, strict=True):
                self._plan_parameter(view, param, known_as, saved)
        self._plan_keyed(view, saved)
        self._plan_rest(view, saved, self.requests.installs[before:])

    def _check_group_number(self, view: OptimizerView, number: int, saved: SavedParamGroup) -> None:
        """Notes a difference if a group has another number than in the checkpoint, and the optimizer has a scheduler.
        Schedulers know groups only by number, so this one would give the group another one's rates."""
        if saved.number != number and (scheduler := next(self._find_schedulers(view), None)) is not None:
            name = group_path(view.path, number)
            line = (
                f"{name} is the group {saved.number} of the checkpoint, and {scheduler} goes by the numbers of groups"
            )
            self.requests.note_difference("reshaped", name, line)

    def _find_schedulers(self, view: OptimizerView) -> Iterator[str]:
        """The paths of the schedulers of this optimizer."""
        return (
            node.path
            for node in self.scan.nodes
            if isinstance(node, ObjectNode)
            and getattr(getattr(node.value, "optimizer", None), "param_groups", None) is view.optimizer.param_groups
        )

    def _find_stored_name(self, param: Param, saved: OptimizerTree) -> str | None:
        """The name of a parameter in the checkpoint's optimizer: its own, or that of a parameter tied to it, here or in
        the checkpoint. None if it has none."""
        first = self.scan.aliases.get(param.full_name, param.full_name)
        tied = (param.full_name, first, *self.requests.aliases_by_first.get(first, ()))
        there = self.requests.saved.aliases
        names_of = [name for full in tied for name in (full, there.get(full)) if isinstance(name, str)]
        return next(
            (name for full in names_of if (name := self._name_in_checkpoint(full)) in saved.group_indices), None
        )

    def _name_in_checkpoint(self, full: str) -> str | None:
        """The name that the checkpoint's optimizers give the parameter of that canonical name. If the checkpoint has
        one module, it is the name within that module. None if another parameter, in the module or beside it, has that
        name."""
        if len(self.requests.saved.modules) != 1:
            return full
        (module,) = self.requests.saved.modules
        name = full.removeprefix(f"{module}.")
        if name == full:
            return full if self._is_in_checkpoint(full) else None
        return None if self._is_in_checkpoint(name) and not self._is_in_checkpoint(full) else name

    def _is_in_checkpoint(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of that name."""
        return name in self.requests.saved_names or name in self.requests.saved.aliases

    def _plan_group(self, view: OptimizerView, number: int, saved: SavedParamGroup) -> None:
        group, path = view.optimizer.param_groups[number], group_path(view.path, number)
        live = dict(value_trees.split_tensors(hyper_parameters(group), path, has_objects=True)[1])
        named = {name: live.get(place) for place, name in saved.hyper.tensors}
        load = self.requests.request_tree(saved.hyper, named, path, group)

        def install() -> None:
            group, restored = view.optimizer.param_groups[number], load()
            is_scheduled = any(self._find_schedulers(view))
            path = f"{view.path}.param_groups[{number}]"
            self.requests.overruled_lines += overruled.compare_group(
                path, view.optimizer, group, restored, is_scheduled
            )
            for key, value in restored.items():
                live = group.get(key)
                if value is None and isinstance(live, torch.Tensor):
                    # The checkpoint lacks the tensor. That was reported (strict=False).
                    continue
                if (known := self._final_hyper_tensors.get(id(live))) is not None and not bool((known == value).all()):
                    # Another group has the same tensor, and in the checkpoint another value.
                    live = known.clone()
                group[key] = now = _keep_live_form(live, value)
                if isinstance(now, torch.Tensor):
                    self._final_hyper_tensors[id(now)] = now

        self.requests.installs.append(install)

    def _plan_parameter(self, view: OptimizerView, param: Param, stored: str | None, saved: OptimizerTree) -> None:
        """Plans the state of one parameter. Tensors of the saved shape and dtype stay the same objects."""
        if stored is None:
            self.requests.note_missing(state_path(view.path, param.name), noun="optimizer state")
            return
        prefix, skeleton = state_path(view.path, stored), saved.state[stored]
        found = {} if skeleton is None else {path: names.join(prefix, *path) for path in skeleton.tensors}
        if self._is_misfit(param):
            # The parameter itself is reported. Its state does not fit either.
            self.requests.used_names.update(found.values())
            return
        held = view.optimizer.state.get(param.tensor, {})
        if skeleton is not None:
            check_composites(skeleton.value, state_path(view.path, param.name), held)
        live = dict(value_trees.split_tensors(held, prefix, has_objects=True)[1])
        pieces = self._find_pieces(param)
        flags = saved.groups[saved.group_indices[stored]].hyper.value
        made: list[tuple[value_trees.Path, Any]] = []
        for path, name in found.items():
            tensor = self._plan_state_tensor(name, path, param, pieces, flags, live.get(path))
            if tensor is None:
                return
            made.append((path, tensor))

        def install() -> None:
            state = view.optimizer.state
            if skeleton is None:
                state.pop(param.tensor, None)
                return
            live = state.get(param.tensor)
            value = join_composites(value_trees.merge_tensors(copy.deepcopy(skeleton.value), made), live)
            state[param.tensor] = value_trees.write_in_place(live, value)

        self.requests.installs.append(install)

    def _find_pieces(self, param: Param) -> Pieces:
        """The Pieces of a parameter. A composite has one box, which is the whole of it, and no bytes."""
        if not is_composite(param.tensor):
            return self.requests.cutter.pieces(param.shard or param.tensor, param.full_name)
        shape = tuple(param.tensor.shape)
        return Pieces("", shape, (Box.whole(shape),), (), (), may_have_replicas=True)

    def _is_misfit(self, param: Param) -> bool:
        """Whether the checkpoint's tensor for the parameter does not fit. Its module may save it in another form."""
        if self.scan.aliases.get(param.full_name, param.full_name) not in self.scan.tensors:
            return False
        pieces = self.scan.pieces(param.full_name)
        found = self.requests.find_tensor(param.full_name, pieces.boxes)
        return found is not None and not found.fits(pieces)

    def _plan_keyed(self, view: OptimizerView, saved: OptimizerTree) -> None:
        """Plans the state under texts, which may not exist before the optimizer's first step."""
        for key in view.keyed["value"].keys() - saved.keyed.value.keys():
            self.requests.note_missing(state_path(view.path, key))
        live = {named.name: named.tensor for named in view.tensors}
        state: dict[Any, Any] = view.optimizer.state
        held = {key: value for key, value in state.items() if isinstance(key, str)}
        load = self.requests.request_tree(saved.keyed, live, join(view.path, "state"), held)

        def install() -> None:
            for key, value in load().items():
                state[key] = value_trees.write_in_place(state.get(key), value)

        if saved.keyed.value:
            self.requests.installs.append(install)

    def _plan_rest(self, view: OptimizerView, saved: OptimizerTree, installs: Sequence[Callable[[], None]]) -> None:
        """Plans what the optimizer's own load_state_dict() gets beside state and groups, which `installs` install."""
        live, kept = view.rest["value"], saved.rest.value
        for key in live.keys() - kept.keys():
            self.requests.note_missing(names.join(view.path, key))
        both = [key for key in live if key in kept]
        if not both:
            return
        tensors = tuple((path, name) for path, name in saved.rest.tensors if path and path[0] in both)
        tree = Tree({key: kept[key] for key in both}, tensors)
        load = self.requests.request_tree(tree, {named.name: named.tensor for named in view.tensors}, view.path)

        def install() -> None:
            view.optimizer.load_state_dict({**view.optimizer.state_dict(), **load()})

        # load_state_dict() finds state and groups installed. It may change them (torch casts state to the parameter's
        # dtype), so they are installed again after it.
        self.requests.installs += [install, *installs]

    def _plan_state_tensor(
        self, name: str, path: value_trees.Path, param: Param, pieces: Pieces, flags: Any, live: Any
    ) -> Any:
        """The tensor to be filled with one part of a parameter's state; None if the checkpoint lacks it. `pieces`:
        those of the parameter. `flags`: the saved hyper-parameters."""
        found = self.requests.find_tensor(name, pieces.boxes)
        if found is None:
            self.requests.note_missing(name, noun="tensor")
            return None
        tensor, parted = live, self.requests.is_untied(name, pieces.boxes)
        fits = isinstance(live, torch.Tensor) and found.fits(self.requests.cutter.pieces(param.shard_like(live), name))
        if parted or not fits:
            key = found.name, param.tensor.device
            if key in self._made_tensors:
                # Several parameters share it, such as the tables of bitsandbytes.
                return self._made_tensors[key]
            tensor = self._made_tensors[key] = self._make_state_tensor(found, path, param, flags, pieces.shape)
        self.requests.request_fill(name, self.requests.cutter.pieces(param.shard_like(tensor), name))
        return tensor

    def _make_state_tensor(
        self, found: SavedTensor, path: value_trees.Path, param: Param, flags: Any, whole: tuple[int, ...]
    ) -> torch.Tensor:
        """State that the fresh optimizer has not made yet, placed as the saved hyper-parameters imply."""
        dtype, shape = dtype_of(found), whole if found.shape is None else found.shape
        order = self.requests.saved_order(found, len(shape))
        on_device = isinstance(flags, dict) and any(flags.get(key) is True for key in ("capturable", "fused"))
        if not shape and path[-1] in HOST_STATE and not on_device:
            return torch.empty((), dtype=dtype)
        if shape == whole and path[-1] not in HOST_STATE and not is_composite(param.tensor):
            return empty_like(param.tensor, dtype, order)
        return replicated_like(param.tensor, shape, dtype, order)


def _class_flags(group: Any) -> set[str]:
    """The names of the hyper-parameters, and of boolean ones the values (decoupled_weight_decay). They tell classes
    apart. Left out: how the optimizer computes, and what a scheduler adds."""
    held = group.items() if isinstance(group, dict) else ()
    return {f"{key}={value}" if isinstance(value, bool) else str(key) for key, value in held if key not in _COMMON_KEYS}


def _keep_live_form(live: Any, value: Any) -> Any:
    """A hyper-parameter in the live one's form: in the same tensor (a compiled step reads it there), or as a number. As
    it was saved if neither can hold it."""
    if isinstance(live, torch.Tensor) and (not isinstance(value, torch.Tensor) or value.shape == live.shape):
        with suppress(TypeError, RuntimeError, OverflowError), allow_in_place(live):
            return live.copy_(value) if isinstance(value, torch.Tensor) else live.fill_(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and isinstance(live, (int, float)):
        return value.item()
    return value
