"""The way back: what a state wants of a checkpoint, where it goes, and what is applied once all ranks agreed.

Guarantees:
- Tensors that exist are filled in place, whatever their strides, device or placement. What does not exist yet (the
  optimizer state of a fresh process) is filled in new tensors, which `finish()` installs.
- Nothing but tensor contents changes before `finish()`. Nothing given to the user aliases a buffer it came from.
- Every difference between state and checkpoint is in `mismatch`, by name.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ckpt.errors import UsageError
from ckpt.format.manifest import Manifest
from ckpt.plan.reshard import Mismatch, Want
from ckpt.trainer import generators, names, trees
from ckpt.trainer.names import join
from ckpt.trainer.nodes import DataNode, GeneratorNode, LoaderNode, ModuleNode, Node, ObjectNode, OptimizerNode
from ckpt.trainer.optimizers import OptimizerView, Param, class_of, group_path, hyper, state_path
from ckpt.trainer.saved import Group, OptimizerTree, Own, Shared, Tree, is_other
from ckpt.trainer.shard import Pieces, Shard, changing
from ckpt.trainer.walk import Scan, StateWalker
from ckpt.trainer.wants import Found, Wants, dtype_of, empty_like, replicated_like

# State that torch's optimizers keep on the host, unless they are capturable or fused.
HOST_STATE = frozenset({"step", "mu_product"})
# What a group of an optimizer of any class may have.
_OF_ANY = frozenset({"foreach", "fused", "capturable", "differentiable", "initial_lr"})


@dataclass(frozen=True, slots=True)
class Targets:
    """`wants[i]` is a box, `tensors[i]` the local tensor that it is to be filled into (see Filler). `mismatch`:
    what does not fit. `extra`: names only in the checkpoint, as this rank sees it. Of several ranks, each may hold
    another part of the state (pipeline stages): there only what is extra on all is, and `mismatch` leaves it out;
    and `own_extra`, which only this rank could have back. `dropped`: generators of the process that were saved, and
    that this one has not (CUDA's, before CUDA is used). `firsts`: paths of this state whose values differed between
    the ranks that saved, where the first rank's are taken."""

    wants: list[Want]
    tensors: list[torch.Tensor]
    mismatch: Mismatch
    extra: tuple[str, ...]
    own_extra: tuple[str, ...]
    dropped: tuple[str, ...]
    firsts: tuple[str, ...]
    _installs: list[Callable[[], None]]

    def finish(self) -> None:
        """Applies everything that is not a tensor's content, in the order of the state, generators last. Call it once,
        after all wants were filled on all ranks. Errors: those of the user's own load_state_dict."""
        with torch.no_grad():
            for install in self._installs:
                install()


def plan_targets(
    walker: StateWalker,
    manifest: Manifest,
    shared: Any,
    own: Any | None,
    others: Sequence[Any],
    strict: bool,
    step: int,
    alike: Mapping[str, str] | None = None,
    differing: Collection[str] = (),
) -> Targets:
    """What this rank needs of a checkpoint of step `step`.

    `shared`: the tree of shared values (saved.merge_shared, where ranks have several). `own`: what this coordinate
    saved, if the checkpoint is of the same mesh (Coordinate.is_on), else None, and `others`: what every rank saved.
    `strict` matters here only for a loader that cannot be resharded: UsageError, or its data starts anew, which
    `mismatch` then says. `alike`: for another mesh, of whom to take tensors that ranks saved as their own and that are
    the same on all (alike.alike). `differing`: paths of which `shared` has one of several values (saved.differing).
    Errors: UsageError; DamagedData for trees that are not those of a state.
    """
    scan, saved = walker.scan(), Shared.parse(shared)
    coordinate = None if own is None else walker.coordinate.text
    wants = Wants.of(manifest, coordinate, alike or {}, scan.aliases, saved.aliases)
    plan = _Plan(walker, scan, saved, wants)
    mine = None if own is None else Own.parse(own)
    everyone = [Own.parse(tree) for tree in others]
    for node in scan.nodes:
        if isinstance(node, ModuleNode):
            plan.module(node)
        elif isinstance(node, OptimizerNode):
            plan.optimizer(node, scan.views[node.path])
        elif isinstance(node, ObjectNode):
            plan.object(node)
        elif isinstance(node, DataNode):
            plan.data(node, everyone)
        elif isinstance(node, LoaderNode):
            plan.loader(node, mine, everyone, strict)
        elif isinstance(node, GeneratorNode):
            plan.generator(node, mine, everyone)
    streams = {name: each for name, each in walker.streams(scan.nodes).items() if plan.is_like(name, each, mine)}
    wants.installs.append(lambda: generators.restore(streams, mine, everyone, walker.coordinate, step))
    extra = plan.extra(mine or next(iter(everyone), None), everyone)
    alone = math.prod(size for _, size in walker.coordinate.mesh) == 1
    kept = {name for rank in ([mine] if mine else everyone) for name in rank.generators if walker.generators}
    dropped = tuple(sorted(name for name in kept - streams.keys() if not name.startswith("state:")))
    mismatch = wants.mismatch(extra if alone else ())
    firsts = tuple(sorted(path for path in differing if any(_is_in(path, node.path) for node in scan.nodes)))
    filled = wants.wants, wants.tensors
    return Targets(*filled, mismatch, extra, tuple(wants.unused_own()), dropped, firsts, wants.installs)


def _is_in(path: str, node: str) -> bool:
    return path == node or path.startswith(f"{node}.")


@dataclass(frozen=True, slots=True)
class _Plan:
    walker: StateWalker
    scan: Scan
    saved: Shared
    wants: Wants
    parted: dict[str, torch.Tensor] = field(default_factory=dict)  # by its name in the checkpoint
    hypers: dict[int, torch.Tensor] = field(default_factory=dict)  # by id, tensors of groups that have their value

    def module(self, node: ModuleNode) -> None:
        root: torch.nn.Module = node.value
        saved, live = self.saved.modules.get(node.path, {}), node.payload()["extra"]
        loads: dict[str, Callable[[], Any]] = {}
        for key in live:
            if key in saved:
                loads[key] = self.wants.tree(saved[key], {})
            else:
                self.wants.missing(names.join(node.path, key))
        if names.is_custom(root):
            self.custom_module(node, loads)
            return
        inner = {name for body in live.values() for _, name in body["tensors"]}
        for named in self.scan.found[node.path]:
            if named.name in self.scan.tensors and named.name not in inner:
                self.wants.fill(named.name, self.scan.tensors[named.name][1])
        owners = {names.join(path, "_extra_state"): module for path, module in names.extras(root)}
        for key, load in loads.items():
            self.wants.installs.append(_call(owners[key].set_extra_state, load))

    def custom_module(self, node: ModuleNode, loads: dict[str, Callable[[], Any]]) -> None:
        """A module with its own way of loading gets all of its state in new tensors, by load_state_dict."""
        state: dict[str, Callable[[], Any]] = {}
        for name, key, value in names.Said.of(node.value).items:
            full = names.join(node.path, name)
            if not isinstance(value, torch.Tensor):
                if name in loads:
                    state[key] = loads[name]
                continue
            new = empty_like(value)
            if self.wants.fill(full, self.wants.cutter.pieces(new, full)):
                state[key] = lambda new=new: new  # type: ignore[misc]

        def install() -> None:
            versions = self.saved.versions.get(node.path, {})
            node.load({key: value() for key, value in state.items()}, versions)

        self.wants.installs.append(install)

    def object(self, node: ObjectNode) -> None:
        saved = self.saved.objects.get(node.path)
        if saved is None:
            self.other_kind(node.path, "object")
            return
        # What a class of the user's makes of former keys is its own affair; a scheduler takes whatever it is given.
        if isinstance(node.value, LRScheduler) and self.is_of_another_class(
            node, type(node.value).__name__, _keys(node.payload()["value"]), _keys(saved.value)
        ):
            self.wants.used.update(name for _, name in saved.tensors)
            return
        load = self.wants.tree(saved, {named.name: named.tensor for named in self.scan.found[node.path]})
        self.wants.installs.append(_call(node.value.load_state_dict, load))

    def other_kind(self, path: str, kind: str) -> None:
        saved = self.saved.kind_of(path)
        if saved is None:
            self.wants.missing(path)
        else:
            self.wants.differ("retyped", path, f"{path} is of the kind {kind}, in the checkpoint of the kind {saved}")

    def is_of_another_class(self, node: Node, here: str, live: set[str], kept: set[str], more: str = "") -> bool:
        """Whether the checkpoint has another optimizer or scheduler in this place: of another class than `here` and,
        unlike one that was only renamed, with other keys (`live` and `kept`). Nothing of it fits then."""
        there = self.saved.classes[node.path]
        if there in ("", here) or live == kept:
            return False
        keys = [
            f"{word} {', '.join(sorted(of))}" for word, of in (("without", live - kept), ("with", kept - live)) if of
        ]
        line = f"{node.path} is of the class {here}, in the checkpoint of the class {there}, {' and '.join(keys)}{more}"
        self.wants.differ("retyped", node.path, line)
        return True

    def data(self, node: DataNode, others: Sequence[Own]) -> None:
        """Values become what was saved; tensors that were there, and still are in the checkpoint, stay the same
        objects, except where one has two names here and the checkpoint has two tensors."""
        saved = self.saved.data.get(node.path)
        if saved is None:
            if not self.is_others(node, others):
                self.other_kind(node.path, "value")
            return
        live = {name: (path, t) for path, name, t in trees.named(node.path, trees.split(node.value, node.path)[1])}
        made: list[tuple[trees.Path, Any]] = []
        for path, name in saved.tensors:
            _, tensor = live.pop(name, (path, None))
            pieces = self.pieces(name) if tensor is not None else None
            if pieces is not None and isinstance(tensor, Shard) and self.wants.is_parted(name, pieces.boxes):
                first = self.scan.aliases[name]
                self.wants.differ("retyped", name, f"{name} is the shard {first}, in the checkpoint one of its own")
            elif pieces is None:
                made.append((path, self.wants.fresh(name)))
            elif self.wants.is_parted(name, pieces.boxes):
                made.append((path, self.part(name, tensor)))
            else:
                self.wants.fill(name, pieces)
                made.append((path, tensor))
        elsewhere = []  # in the tree of another rank: each has other names here
        for name, (path, tensor) in live.items():
            if self.wants.fill(name, self.pieces(name)):
                elsewhere.append((path, tensor))
            made.append((path, tensor))

        def install() -> None:
            value = saved.value
            for path, tensor in made:
                if tensor is not None and trees.has(value, path):
                    value = trees.merge(value, [(path, tensor)])
            for path, tensor in elsewhere:
                trees.plant(value, path, tensor)
            node.put(trees.settle(node.value, value))

        self.wants.installs.append(install)

    def pieces(self, name: str) -> Pieces:
        """Of a tensor of the state, under any of its names."""
        return self.scan.tensors[self.scan.aliases.get(name, name)][1]

    def is_others(self, node: DataNode, others: Sequence[Own]) -> bool:
        """Whether this rank has nothing where others have an object: a scheduler of the last stage, a loader of the
        first."""
        if node.value is not None:
            return False
        own = any(node.path in rank.loaders or f"state:{node.path}" in rank.generators for rank in others)
        return own or self.saved.kind_of(node.path) not in (None, "value")

    def part(self, name: str, live: Any) -> torch.Tensor | None:
        """A tensor of its own instead of the live one, which is another's too. What is tied in the checkpoint stays
        so."""
        found = self.wants.find(name)
        if found is not None and found.name in self.parted:
            return self.parted[found.name]
        new: torch.Tensor | None = self.wants.fresh(name, live)
        if found is None or new is None:
            return None
        if isinstance(live, torch.nn.Parameter):
            new = torch.nn.Parameter(new, live.requires_grad)
        elif live.requires_grad:
            new.requires_grad_()
        self.parted[found.name] = new
        return new

    def loader(self, node: LoaderNode, own: Own | None, others: Sequence[Own], strict: bool) -> None:
        here, loader, path = self.walker.coordinate, node.value, node.path
        saved: dict[int, Own] = {}
        for rank in (*others, *([own] if own else [])):
            first = saved.setdefault(rank.data_rank, rank) if path in rank.loaders else None
            if first is not None and is_other(first.loaders[path], rank.loaders[path]):
                self.wants.differ(
                    "reshaped",
                    path,
                    f"{path} was saved at several positions by ranks that count as one data-parallel rank "
                    f"({rank.data}): one of them would be taken for all; save with a mesh= whose axes have other names",
                )
        world = max((rank.data_world for rank in saved.values()), default=0)
        if not (here.data_rank in saved if own or world == here.data_world else len(saved) == world > 0):
            self.wants.missing(path, " (the position of a loader)")
            return
        if own or world == here.data_world:
            state = trees.extract(saved[here.data_rank].loaders[path], path)
            self.wants.installs.append(lambda: loader.load_state_dict(state))
            return
        if hasattr(loader, "reshard"):
            states = [trees.extract(saved[rank].loaders[path], path) for rank in sorted(saved)]
            self.wants.installs.append(lambda: loader.reshard(states, here.data_rank, here.data_world))
            return
        line = (
            f"{path} was saved by {world} data-parallel ranks and there are {here.data_world} now; "
            f"{type(loader).__name__} has no reshard(states, rank, world) that would divide the positions anew"
        )
        if strict:
            raise UsageError(
                f"{line}. Start with {world} data-parallel ranks, give the loader that method, or pass strict=False: "
                "its data then starts from the beginning, and what was trained on already repeats"
            )
        self.wants.differ("missing", path, f"{line}: its data starts from the beginning and repeats")

    def generator(self, node: GeneratorNode, own: Own | None, others: Sequence[Own]) -> None:
        if not any(f"state:{node.path}" in rank.generators for rank in (*others, *([own] if own else []))):
            self.wants.missing(node.path, " (the state of a generator)")

    def is_like(self, name: str, stream: generators.Stream, own: Own | None) -> bool:
        """Whether a generator can go on with what this rank saved of it, if it did: one of another kind cannot."""
        if own is None or name not in own.generators or generators.is_like(stream, own.generators[name]["state"]):
            return True
        path = name.removeprefix("state:")
        self.wants.differ("retyped", path, f"{path} is a generator of another kind than in the checkpoint")
        return False

    # --------------------------------------------------------------------------------------------------- optimizers

    def optimizer(self, node: OptimizerNode, view: OptimizerView) -> None:
        saved = self.saved.optimizers.get(view.path)
        if saved is None:
            self.other_kind(view.path, "optimizer")
            return
        live = set().union(*(_flags(hyper(group)) for group in view.optimizer.param_groups))
        kept = set().union(*(_flags(group.hyper.value) for group in saved.groups))
        state = {join(*path) for held in saved.state.values() if held is not None for path in held.tensors}
        more = f"; of its parameters it has {', '.join(sorted(state))}" if state else ""
        if self.is_of_another_class(node, class_of(view.optimizer), live, kept, more):
            self.wants.used.update(name for name in self.wants.names if name.startswith(f"{view.path}."))
            return
        before = len(self.wants.installs)
        for number, params in enumerate(view.params):
            stored = [self.stored(param, saved) for param in params]
            held = {saved.home[name] for name in stored if name is not None}
            if not params:
                held = {home for home, group in enumerate(saved.groups) if group.number == number}
                held = set(sorted(held)[:1])
            if len(held) > 1:
                name = group_path(view.path, number)
                numbers = sorted(saved.groups[home].number for home in held)
                line = f"{name} holds parameters that the checkpoint has in the groups {numbers}"
                if len(set(numbers)) < len(numbers):
                    line += ", and with other hyper-parameters on other ranks"
                self.wants.differ("reshaped", name, line)
            if len(held) == 1:
                self.numbered(view, number, home := saved.groups[held.pop()])
                self.group(view, number, home)
            else:
                tensors = trees.split(hyper(view.optimizer.param_groups[number]), view.path)[1]
                self.hypers.update((id(tensor), tensor) for _, tensor in tensors if isinstance(tensor, torch.Tensor))
            for param, known_as in zip(params, stored, strict=True):
                self.parameter(view, param, known_as, saved)
        self.rest(view, saved, self.wants.installs[before:])

    def numbered(self, view: OptimizerView, number: int, saved: Group) -> None:
        """A scheduler knows groups by their numbers alone: another order gives each the rates of another."""
        schedulers = (
            node.path
            for node in self.scan.nodes
            if isinstance(node, ObjectNode)
            and getattr(getattr(node.value, "optimizer", None), "param_groups", None) is view.optimizer.param_groups
        )
        if saved.number != number and (scheduler := next(schedulers, None)) is not None:
            name = group_path(view.path, number)
            line = (
                f"{name} is the group {saved.number} of the checkpoint, and {scheduler} goes by the numbers of groups"
            )
            self.wants.differ("reshaped", name, line)

    def stored(self, param: Param, saved: OptimizerTree) -> str | None:
        """The name that a parameter has in the checkpoint's optimizer, of its own or as one that is tied to it, here or
        there; None where it has none."""
        first = self.scan.aliases.get(param.full, param.full)
        tied = (param.full, first, *self.wants.also.get(first, ()))
        names_of = [name for full in tied for name in (full, self.saved.aliases.get(full)) if isinstance(name, str)]
        return next((name for full in names_of if (name := self.named_there(full)) in saved.home), None)

    def named_there(self, full: str) -> str | None:
        """What the checkpoint's optimizers call the parameter of that canonical name: where the checkpoint has one
        module, its name in that. None where another one is called so: one in that module, or one beside it."""
        if len(self.saved.modules) != 1:
            return full
        (module,) = self.saved.modules
        name = full.removeprefix(f"{module}.")
        if name == full:
            return full if self.is_there(full) else None
        return None if self.is_there(name) and not self.is_there(full) else name

    def is_there(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of that name."""
        return name in self.wants.names or name in self.saved.aliases

    def group(self, view: OptimizerView, number: int, saved: Group) -> None:
        live = dict(trees.split(hyper(view.optimizer.param_groups[number]), view.path)[1])
        load = self.wants.tree(saved.hyper, {name: live.get(path) for path, name in saved.hyper.tensors})

        def install() -> None:
            group = view.optimizer.param_groups[number]
            for key, value in load().items():
                live = group.get(key)
                if (known := self.hypers.get(id(live))) is not None and not bool((known == value).all()):
                    live = known.clone()  # another group's, for which the checkpoint has another value
                group[key] = now = _as_before(live, value)
                if isinstance(now, torch.Tensor):
                    self.hypers[id(now)] = now

        self.wants.installs.append(install)

    def parameter(self, view: OptimizerView, param: Param, stored: str | None, saved: OptimizerTree) -> None:
        """The state of one parameter: tensors of the saved shape and dtype stay the same objects."""
        if stored is None:
            self.wants.missing(state_path(view.path, param.name))
            return
        prefix, skeleton = state_path(view.path, stored), saved.state[stored]
        found = {} if skeleton is None else {path: names.join(prefix, *path) for path in skeleton.tensors}
        if self.is_misfit(param):
            self.wants.used.update(found.values())  # the parameter is named; its state does not fit either
            return
        pieces = self.wants.cutter.pieces(param.shard or param.tensor, param.full)
        live = dict(trees.split(view.optimizer.state.get(param.tensor, {}), prefix)[1])
        flags = saved.groups[saved.home[stored]].hyper.value
        made: list[tuple[trees.Path, Any]] = []
        for path, name in found.items():
            tensor = self.state_tensor(name, path, param, pieces, flags, live.get(path))
            if tensor is None:
                return
            made.append((path, tensor))

        def install() -> None:
            state = view.optimizer.state
            if skeleton is None:
                state.pop(param.tensor, None)
                return
            value = trees.merge(copy.deepcopy(skeleton.value), made)
            state[param.tensor] = trees.settle(state.get(param.tensor), value)

        self.wants.installs.append(install)

    def is_misfit(self, param: Param) -> bool:
        """Whether what is saved of the parameter (by its module, maybe not as it is) cannot be filled."""
        if self.scan.aliases.get(param.full, param.full) not in self.scan.tensors:
            return False
        pieces = self.pieces(param.full)
        found = self.wants.find(param.full, pieces.boxes)
        return found is not None and not found.fits(pieces)

    def rest(self, view: OptimizerView, saved: OptimizerTree, installs: Sequence[Callable[[], None]]) -> None:
        """What the optimizer's own load_state_dict() gets beside state and groups; `installs` put these there."""
        live, kept = view.rest["value"], saved.rest.value
        for key in live.keys() - kept.keys():
            self.wants.missing(names.join(view.path, key))
        both = [key for key in live if key in kept]
        if not both:
            return
        tensors = tuple((path, name) for path, name in saved.rest.tensors if path and path[0] in both)
        tree = Tree({key: kept[key] for key in both}, tensors)
        load = self.wants.tree(tree, {named.name: named.tensor for named in view.tensors})

        def install() -> None:
            view.optimizer.load_state_dict({**view.optimizer.state_dict(), **load()})

        # It finds its state in place; what it makes of that (torch casts it to the parameter's dtype) is put right.
        self.wants.installs += [install, *installs]

    def state_tensor(self, name: str, path: trees.Path, param: Param, pieces: Pieces, flags: Any, live: Any) -> Any:
        """`pieces`: those of the parameter. `flags`: the saved hyper-parameters."""
        found = self.wants.find(name, pieces.boxes)
        if found is None:
            self.wants.missing(name)
            return None
        tensor, parted = live, self.wants.is_parted(name, pieces.boxes)
        fits = isinstance(live, torch.Tensor) and found.fits(self.wants.cutter.pieces(param.like(live), name))
        if parted or not fits:
            tensor = _new_state(found, path, param, flags, pieces.shape)
        self.wants.fill(name, self.wants.cutter.pieces(param.like(tensor), name))
        return tensor

    # -------------------------------------------------------------------------------------------------------- extra

    def extra(self, own: Own | None, others: Sequence[Own]) -> tuple[str, ...]:
        """What the checkpoint has and this state has no place for."""
        paths = {node.path for node in self.scan.nodes}
        found = set(self.wants.unused())
        found |= {n.path for n in self.scan.nodes if isinstance(n, DataNode) and self.is_others(n, others)}
        for held in (self.saved.data, self.saved.objects, self.saved.optimizers, self.saved.modules):
            found |= {path for path in held if path not in paths}
        for path, keys in self.saved.modules.items():
            node = next((node for node in self.scan.nodes if node.path == path), None)
            live = node.payload()["extra"] if isinstance(node, ModuleNode) else keys
            found |= {names.join(path, key) for key in keys if key not in live}
        for path, view in self.scan.views.items():
            kept = self.saved.optimizers[path].rest.value if path in self.saved.optimizers else {}
            found |= {names.join(path, key) for key in kept if key not in view.rest["value"]}
        if own is not None:
            places = paths - {n.path for n in self.scan.nodes if isinstance(n, DataNode) and n.value is None}
            found |= {path for path in own.loaders if path not in places}
            found |= {key[6:] for key in own.generators if key.startswith("state:") and key[6:] not in places}
        return tuple(sorted(found))


def _keys(value: Any) -> set[str]:
    return set(map(str, value)) if isinstance(value, dict) else set()


def _flags(group: Any) -> set[str]:
    """What hyper-parameters an optimizer has; of those that say yes or no (decoupled_weight_decay) what they say. Not
    how it computes, nor what a scheduler adds: these are no matter of its class."""
    held = group.items() if isinstance(group, dict) else ()
    return {f"{key}={value}" if isinstance(value, bool) else str(key) for key, value in held if key not in _OF_ANY}


def _call(function: Callable[[Any], Any], argument: Callable[[], Any]) -> Callable[[], None]:
    def call() -> None:
        function(argument())

    return call


def _as_before(live: Any, value: Any) -> Any:
    """A hyper-parameter as the live optimizer keeps it: in the same tensor (a compiled step looks there), or as a
    number."""
    if isinstance(live, torch.Tensor) and (not isinstance(value, torch.Tensor) or value.shape == live.shape):
        with changing(live):
            if isinstance(value, torch.Tensor):
                live.copy_(value)
            else:
                live.fill_(value)
        return live
    if isinstance(value, torch.Tensor) and isinstance(live, (int, float)):
        return value.item()
    return value


def _new_state(found: Found, path: trees.Path, param: Param, flags: Any, whole: tuple[int, ...]) -> torch.Tensor:
    """State that the fresh optimizer has not made yet, placed as one with the saved hyper-parameters would."""
    dtype, shape = dtype_of(found), whole if found.shape is None else found.shape
    on_device = isinstance(flags, dict) and (flags.get("capturable") or flags.get("fused"))
    if not shape and path[-1] in HOST_STATE and not on_device:
        return torch.empty((), dtype=dtype)
    if shape == whole and path[-1] not in HOST_STATE:
        return empty_like(param.tensor, dtype)
    return replicated_like(param.tensor, shape, dtype)
