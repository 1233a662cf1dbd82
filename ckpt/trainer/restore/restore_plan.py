"""The restore plan: what a state wants of a checkpoint, where it goes, and what is applied once all ranks agreed.

Guarantees:
- Existing tensors are filled in place, whatever their strides, device or placement. Tensors that do not exist yet (the
  optimizer state of a fresh process) are made and filled, then installed by `finish()`.
- Nothing but tensor contents changes before `finish()`. Nothing given to the user aliases a buffer it came from.
- `mismatch` names every difference between state and checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ckpt.errors import UsageError
from ckpt.format.manifest import Manifest
from ckpt.layout.reshard import Mismatch, Want
from ckpt.trainer.restore import overruled
from ckpt.trainer.restore.optimizer_targets import OptimizerTargets
from ckpt.trainer.restore.tensor_requests import TensorRequests, empty_like
from ckpt.trainer.state import generators, names, value_trees
from ckpt.trainer.state.loaders import put_back
from ckpt.trainer.state.saved_values import Own, Shared, is_other
from ckpt.trainer.state.shard import DTYPES, Pieces, Shard, changing
from ckpt.trainer.state.state_nodes import DataNode, GeneratorNode, LoaderNode, ModuleNode, ObjectNode, OptimizerNode
from ckpt.trainer.state.state_walk import Scan, StateWalker


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What one rank restores from a checkpoint.

    - `wants[i]` is a box; `tensors[i]` is the local tensor to fill with it (see Filler).
    - `mismatch`: the differences between state and checkpoint. With several ranks it leaves `extra` out.
    - `extra`: names that only the checkpoint has, as this rank sees it. Ranks may hold different parts of the state
      (pipeline stages), so only names that are extra on all ranks count.
    - `own_extra`: extra names that only this rank could restore.
    - `dropped`: saved generators of the process that this process lacks (CUDA's, before CUDA is used).
    - `firsts`: paths whose values differed between the ranks that saved; the first rank's are taken.
    - `overruled`: hyper-parameters to which the script gave other values, in words; complete after `finish`.
    """

    wants: list[Want]
    tensors: list[torch.Tensor]
    mismatch: Mismatch
    extra: tuple[str, ...]
    own_extra: tuple[str, ...]
    dropped: tuple[str, ...]
    firsts: tuple[str, ...]
    overruled: list[str]
    _installs: list[Callable[[], None]]

    def finish(self) -> None:
        """Applies all that is not a tensor's content, in the order of the state, generators last. Call it once, after
        all wants were filled on all ranks. Errors: those of the user's own load_state_dict()."""
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
) -> RestorePlan:
    """What this rank wants of a checkpoint of step `step`. Errors: UsageError; DamagedData for trees of no state.

    - `shared`: the tree of shared values; if ranks have several, merged by saved_values.merge_shared.
    - `own`: what this coordinate saved, if the checkpoint is of the same mesh (Coordinate.is_on); else None.
    - `others`: what every rank saved, if `own` is None.
    - `strict` matters only for a loader that cannot be resharded. Strict: UsageError. Otherwise its data starts anew,
      and `mismatch` says so.
    - `alike`: for another mesh, by name, the owner to take a tensor from that ranks saved as their own. The tensor is
      the same on all ranks (replica_match.alike), or a buffer.
    - `differing`: paths for which `shared` has one of several values (saved_values.differing).
    """
    scan, saved = walker.scan(), Shared.parse(shared)
    coordinate = None if own is None else walker.coordinate.text
    wants = TensorRequests.of(manifest, coordinate, alike or {}, scan.aliases, saved)
    plan, optimizers = _NodeTargets(walker, scan, wants), OptimizerTargets(scan, wants)
    mine = None if own is None else Own.parse(own)
    everyone = [Own.parse(tree) for tree in others]
    for node in scan.nodes:
        if isinstance(node, ModuleNode):
            plan.module(node)
        elif isinstance(node, OptimizerNode):
            optimizers.plan(scan.views[node.path])
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
    return RestorePlan(
        *filled, mismatch, extra, tuple(wants.unused_own()), dropped, firsts, wants.overruled, wants.installs
    )


def _is_in(path: str, node: str) -> bool:
    return path == node or path.startswith(f"{node}.")


@dataclass(frozen=True, slots=True)
class _NodeTargets:
    """Plans the restore of all nodes but optimizers."""

    walker: StateWalker
    scan: Scan
    wants: TensorRequests
    parted: dict[str, torch.Tensor] = field(default_factory=dict)  # made by `part`, by name in the checkpoint

    def module(self, node: ModuleNode) -> None:
        root: torch.nn.Module = node.value
        saved, live = self.wants.saved.modules.get(node.path, {}), node.payload()["extra"]
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
        """A custom module gets all of its state in new tensors, by its load_state_dict()."""
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
            versions = self.wants.saved.versions.get(node.path, {})
            node.load({key: value() for key, value in state.items()}, versions)

        self.wants.installs.append(install)

    def object(self, node: ObjectNode) -> None:
        saved = self.wants.saved.objects.get(node.path)
        if saved is None:
            self.wants.other_kind(node.path, "object")
            return
        # A user's class may know how to load another class's keys. A scheduler takes any keys, so it is checked here.
        if isinstance(node.value, LRScheduler) and self.wants.is_of_another_class(
            node.path, type(node.value).__name__, _keys(node.payload()["value"]), _keys(saved.value)
        ):
            self.wants.used.update(name for _, name in saved.tensors)
            return
        load = self.wants.tree(saved, {named.name: named.tensor for named in self.scan.found[node.path]})

        def install() -> None:
            state = load()
            if isinstance(node.value, LRScheduler):
                self.wants.overruled += overruled.of_scheduler(node.path, node.value, state)
            node.value.load_state_dict(state)

        self.wants.installs.append(install)

    def data(self, node: DataNode, others: Sequence[Own]) -> None:
        """Values become the saved ones. Tensors that the checkpoint has, too, stay the same objects. Exception: a
        tensor that has two names here, and is two tensors in the checkpoint."""
        saved = self.wants.saved.data.get(node.path)
        if saved is None:
            if not self.is_others(node, others):
                self.wants.other_kind(node.path, "value")
            return
        live = {
            name: (path, t)
            for path, name, t in value_trees.named(node.path, value_trees.split(node.value, node.path)[1])
        }
        made: list[tuple[value_trees.Path, Any]] = []
        for path, name in saved.tensors:
            _, tensor = live.pop(name, (path, None))
            pieces = self.scan.pieces(name) if tensor is not None else None
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
        # Tensors that the saved tree lacks because it is another rank's: each rank has other names below this path.
        elsewhere = []
        for name, (path, tensor) in live.items():
            pieces = self.scan.pieces(name)
            if value_trees.has(saved.value, path) and name not in self.wants.names:
                self.value_into(name, pieces, value_trees.at(saved.value, path))
            elif self.wants.fill(name, pieces):
                elsewhere.append((path, tensor))
            made.append((path, tensor))

        def install() -> None:
            value = saved.value
            for path, tensor in made:
                if tensor is not None and value_trees.has(value, path):
                    value = value_trees.merge(value, [(path, tensor)])
            for path, tensor in elsewhere:
                value_trees.plant(value, path, tensor)
            node.put(value_trees.settle(node.value, value))

        self.wants.installs.append(install)

    def value_into(self, name: str, pieces: Pieces, saved: Any) -> None:
        """Handles a tensor for which the checkpoint has a value. A number goes into a zero-dimensional tensor that can
        hold it exactly; the loop may have assigned one to that key. Else, or if the tensor has several names, it is a
        difference."""
        tied = name in self.scan.aliases or name in self.wants.also
        is_number = not (tied or pieces.shape) and isinstance(saved, int | float)
        if is_number and (equal := _equal_to(saved, pieces.dtype)) is not None:

            def install() -> None:
                for local in pieces.locals:
                    with changing(local):
                        local.copy_(equal)

            self.wants.installs.append(install)
            return
        there = repr(saved) if saved is None or isinstance(saved, int | float) else f"a {type(saved).__name__}"
        line = f"{name} is a tensor ({pieces.dtype}, of the shape {pieces.shape}), in the checkpoint {there}"
        self.wants.differ("retyped", name, line)

    def is_others(self, node: DataNode, others: Sequence[Own]) -> bool:
        """Whether this rank has None where other ranks have an object: a scheduler of the last stage, a loader of the
        first."""
        if node.value is not None:
            return False
        own = any(node.path in rank.loaders or f"state:{node.path}" in rank.generators for rank in others)
        return own or self.wants.saved.kind_of(node.path) not in (None, "value")

    def part(self, name: str, live: Any) -> torch.Tensor | None:
        """A new tensor for a live one that is tied to another here, but not in the checkpoint. Ties there are kept."""
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
        """Plans the position of a loader. If as many data-parallel ranks saved it as there are now, each takes its own
        position. Otherwise the loader's reshard() divides the positions. Errors: UsageError if `strict` and it has
        none."""
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
            state = value_trees.extract(saved[here.data_rank].loaders[path], path)
            self.wants.installs.append(lambda: put_back(loader, state))
            return
        if hasattr(loader, "reshard"):
            states = [value_trees.extract(saved[rank].loaders[path], path) for rank in sorted(saved)]
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

    def is_like(self, name: str, stream: generators.RandomStream, own: Own | None) -> bool:
        """Whether a generator can take the state that this rank saved for it, if any. Another kind is a noted
        difference."""
        if own is None or name not in own.generators or generators.is_like(stream, own.generators[name]["state"]):
            return True
        path = name.removeprefix("state:")
        self.wants.differ("retyped", path, f"{path} is a generator of another kind than in the checkpoint")
        return False

    def extra(self, own: Own | None, others: Sequence[Own]) -> tuple[str, ...]:
        """The names that the checkpoint has and this state has no place for."""
        saved, paths = self.wants.saved, {node.path for node in self.scan.nodes}
        found = set(self.wants.unused())
        found |= {n.path for n in self.scan.nodes if isinstance(n, DataNode) and self.is_others(n, others)}
        for held in (saved.data, saved.objects, saved.optimizers, saved.modules):
            found |= {path for path in held if path not in paths}
        for path, keys in saved.modules.items():
            node = next((node for node in self.scan.nodes if node.path == path), None)
            live = node.payload()["extra"] if isinstance(node, ModuleNode) else keys
            found |= {names.join(path, key) for key in keys if key not in live}
        for path, view in self.scan.views.items():
            kept = saved.optimizers[path].rest.value if path in saved.optimizers else {}
            found |= {names.join(path, key) for key in kept if key not in view.rest["value"]}
        if own is not None:
            places = paths - {n.path for n in self.scan.nodes if isinstance(n, DataNode) and n.value is None}
            found |= {path for path in own.loaders if path not in places}
            found |= {key[6:] for key in own.generators if key.startswith("state:") and key[6:] not in places}
        return tuple(sorted(found))


def _equal_to(number: float, dtype: str) -> torch.Tensor | None:
    """A tensor of that dtype that equals the number; None if there is none."""
    try:
        made = torch.tensor(number, dtype=DTYPES[dtype], device="cpu")
        now = made.item()
    except (RuntimeError, ValueError, OverflowError):  # which one depends on dtype and number
        return None
    return made if now == number or (now != now and number != number) else None


def _keys(value: Any) -> set[str]:
    return set(map(str, value)) if isinstance(value, dict) else set()


def _call(function: Callable[[Any], Any], argument: Callable[[], Any]) -> Callable[[], None]:
    def call() -> None:
        function(argument())

    return call
