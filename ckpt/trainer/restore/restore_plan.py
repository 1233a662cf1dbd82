"""The restore plan: what a state wants of a checkpoint, where it goes, and what is applied once all ranks agreed.

Guarantees:
- Existing tensors are filled in place, whatever their strides, device or placement. Tensors that do not exist yet (the
  optimizer state of a fresh process) are made and filled, then installed by `install()`.
- Nothing but tensor contents changes before `install()`. Nothing given to the user aliases a buffer it came from.
- Every difference between state and checkpoint is named.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ckpt.format.manifest import Manifest
from ckpt.layout.reshard import Want
from ckpt.trainer.restore import overruled
from ckpt.trainer.restore.optimizer_targets import OptimizerTargets
from ckpt.trainer.restore.rank_targets import RankTargets
from ckpt.trainer.restore.tensor_requests import TensorRequests, empty_like
from ckpt.trainer.state import composites, names, value_trees
from ckpt.trainer.state.saved_values import RankValues, SharedValues
from ckpt.trainer.state.shard import DTYPES, Pieces, Shard, allow_in_place
from ckpt.trainer.state.state_nodes import DataNode, GeneratorNode, LoaderNode, ModuleNode, ObjectNode, OptimizerNode
from ckpt.trainer.state.state_walk import Scan, StateWalker


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What one rank restores from a checkpoint.

    - `wants[i]` is a box; `tensors[i]` is the local tensor to fill with it (see Filler).
    - `difference_lines`: the differences between state and checkpoint, in words, but for extra names.
    - `extra_names`: names that only the checkpoint has, as this rank sees it. Ranks may hold different parts of the
      state (pipeline stages), so only names that are extra on all ranks count.
    - `own_extra_names`: extra names that only this rank could restore.
    - `extra_subtrees`: by name of an extra tensor, the widest subtree with the tensor that this rank's state lacks.
    - `dropped_generators`: saved generators of the process that this process lacks (CUDA's, before CUDA is used).
    - `first_rank_paths`: paths whose values differed between the ranks that saved; the first rank's are taken.
    - `overruled_lines`: hyper-parameters to which the script gave other values, in words; complete after `install`.
    """

    requests: TensorRequests
    difference_lines: list[str]
    extra_names: tuple[str, ...]
    own_extra_names: tuple[str, ...]
    extra_subtrees: Mapping[str, str]
    dropped_generators: tuple[str, ...]
    first_rank_paths: tuple[str, ...]

    @property
    def wants(self) -> list[Want]:
        return self.requests.wants

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self.requests.tensors

    @property
    def overruled_lines(self) -> list[str]:
        return self.requests.overruled_lines

    def install(self) -> None:
        """Applies all that is not a tensor's content, in the order of the state, generators last. Call it once, after
        all wants were filled on all ranks. Errors: those of the user's own load_state_dict()."""
        with torch.no_grad():
            for install in self.requests.installs:
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
      and a difference says so.
    - `alike`: for another mesh, by name, the owner to take a tensor from that ranks saved as their own. The tensor is
      the same on all ranks (match_replicas), or a buffer.
    - `differing`: paths for which `shared` has one of several values (find_differing).
    """
    scan, saved = walker.scan(), SharedValues.parse(shared)
    coordinate = None if own is None else walker.coordinate.text
    wants = TensorRequests.from_manifest(manifest, coordinate, alike or {}, scan.aliases, saved)
    mine = None if own is None else RankValues.parse(own)
    walker.saved_base = {} if mine is None else mine.base
    everyone = [RankValues.parse(tree) for tree in others]
    ranks = RankTargets(walker, wants, mine, everyone)
    plan, optimizers = _NodeTargets(scan, wants, ranks), OptimizerTargets(scan, wants)
    for node in scan.nodes:
        if isinstance(node, ModuleNode):
            plan.plan_module(node)
        elif isinstance(node, OptimizerNode):
            optimizers.plan_optimizer(scan.views[node.path])
        elif isinstance(node, ObjectNode):
            plan.plan_object(node)
        elif isinstance(node, DataNode):
            plan.plan_data(node)
        elif isinstance(node, LoaderNode):
            ranks.plan_loader(node, strict)
        elif isinstance(node, GeneratorNode):
            ranks.plan_generator(node)
    streams = ranks.plan_streams(scan.nodes, step)
    kept = {name for rank in ranks.ranks for name in rank.generators if walker.has_process_generators}
    return RestorePlan(
        wants,
        wants.difference_lines(),
        plan.find_extra_names(),
        tuple(wants.unused_own_names()),
        wants.extra_subtrees([*scan.tensors, *scan.aliases, *(f"{node.path}." for node in scan.nodes)]),
        tuple(sorted(name for name in kept - streams if not name.startswith("state:"))),
        tuple(sorted(path for path in differing if any(_is_inside(path, node.path) for node in scan.nodes))),
    )


def _is_inside(path: str, node: str) -> bool:
    return path == node or path.startswith(f"{node}.")


@dataclass(frozen=True, slots=True)
class _NodeTargets:
    """Plans the restore of all nodes that do not belong to one rank, but for optimizers."""

    scan: Scan
    requests: TensorRequests
    own: RankTargets
    untied_tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # made by `untie`, by name in the checkpoint

    def plan_module(self, node: ModuleNode) -> None:
        root: torch.nn.Module = node.value
        saved, live = self.requests.saved.modules.get(node.path, {}), self.scan.payloads[node.path]["extra"]
        loads: dict[str, Callable[[], Any]] = {}
        for key in live:
            if key in saved:
                loads[key] = self.requests.request_tree(saved[key], {}, names.join(node.path, key))
            else:
                self.requests.note_missing(names.join(node.path, key))
        if names.is_custom(root):
            self.plan_custom_module(node, loads)
            return
        self._check_contexts(node)
        inner = {name for body in live.values() for _, name in body["tensors"]}
        for named in self.scan.tensors_by_node[node.path]:
            if named.name in self.scan.tensors and named.name not in inner:
                self.requests.request_fill(named.name, self.scan.tensors[named.name][1])
        owners = {names.join(path, "_extra_state"): module for path, module in names.find_extra_state(root)}
        for key, load in loads.items():
            self.requests.installs.append(_make_call(owners[key].set_extra_state, load))

    def _check_contexts(self, node: ModuleNode) -> None:
        """Notes tensor subclasses that give their inner tensors another meaning than in the checkpoint."""
        kept = self.requests.saved.composites.get(node.path, {})
        for name, tensor in self.scan.composites.get(node.path, {}).items():
            now, there = composites.describe(tensor), kept.get(name)
            if there is not None and there != now:
                line = f"{name} is a {now}, in the checkpoint a {there}"
                self.requests.note_difference("retyped", name, line)

    def plan_custom_module(self, node: ModuleNode, loads: dict[str, Callable[[], Any]]) -> None:
        """A custom module gets all of its state in new tensors, by its load_state_dict()."""
        state: dict[str, Callable[[], Any]] = {}
        for name, key, value in names.CustomStateDict.read(node.value).items:
            full = names.join(node.path, name)
            if full in self.scan.frozen:
                continue
            if not isinstance(value, torch.Tensor):
                if name in loads:
                    state[key] = loads[name]
                continue
            new = self._request_like(value, full, names.may_resize(node.value, key))
            if new is not None:
                state[key] = lambda new=new: new  # type: ignore[misc]

        def install() -> None:
            versions = self.requests.saved.versions.get(node.path, {})
            node.load({key: value() for key, value in state.items()}, versions)

        self.requests.installs.append(install)

    def _request_like(self, value: torch.Tensor, name: str, may_resize: bool = False) -> torch.Tensor | None:
        """A new tensor like `value`, to be filled with the checkpoint's; None if the checkpoint has none that fits.
        `may_resize`: one of another shape fits, too."""
        if composites.is_composite(value):
            inner = {
                key: self._request_like(part, names.join(name, key))
                for key, part in composites.inner_tensors(value).items()
            }
            made = {key: part for key, part in inner.items() if part is not None}
            return composites.remake(value, made) if len(made) == len(inner) else None
        found = self.requests.find_tensor(name) if may_resize else None
        if found is not None and found.shape not in (None, tuple(value.shape)):
            resized: torch.Tensor | None = self.requests.request_new_tensor(name)
            return resized
        new = empty_like(value)
        return new if self.requests.request_fill(name, self.requests.cutter.pieces(new, name)) else None

    def plan_object(self, node: ObjectNode) -> None:
        saved = self.requests.saved.objects.get(node.path)
        if saved is None:
            self.requests.note_other_kind(node.path, "object")
            return
        # A user's class may know how to load another class's keys. A scheduler takes any keys, so it is checked here.
        live = self.scan.payloads[node.path]["value"]
        if isinstance(node.value, LRScheduler) and self.requests.is_of_another_class(
            node.path, type(node.value).__name__, _key_texts(live), _key_texts(saved.value)
        ):
            self.requests.used_names.update(name for _, name in saved.tensors)
            return
        load = self.requests.request_tree(
            saved, {named.name: named.tensor for named in self.scan.tensors_by_node[node.path]}, node.path
        )

        def install() -> None:
            state = load()
            if isinstance(node.value, LRScheduler):
                self.requests.overruled_lines += overruled.compare_scheduler(node.path, node.value, state)
            node.value.load_state_dict(state)

        self.requests.installs.append(install)

    def plan_data(self, node: DataNode) -> None:
        """Values become the saved ones. Tensors that the checkpoint has, too, stay the same objects. Exception: a
        tensor that has two names here, and is two tensors in the checkpoint."""
        saved = self.requests.saved.data.get(node.path)
        if saved is None:
            if not self.is_other_ranks(node):
                self.requests.note_other_kind(node.path, "value")
            return
        found = value_trees.split_tensors(node.value, node.path)[1]
        live = {names.join(node.path, *path): (path, tensor) for path, tensor in found}
        composites.check_composites(saved.value, node.path, node.value)
        made: list[tuple[value_trees.Path, Any]] = []
        for path, name in saved.tensors:
            _, tensor = live.pop(name, (path, None))
            pieces = self.scan.pieces(name) if tensor is not None else None
            if pieces is not None and isinstance(tensor, Shard) and self.requests.is_untied(name, pieces.boxes):
                first = self.scan.aliases[name]
                self.requests.note_difference(
                    "retyped", name, f"{name} is the shard {first}, in the checkpoint one of its own"
                )
            elif pieces is None:
                made.append((path, self.requests.request_new_tensor(name)))
            elif self.requests.is_untied(name, pieces.boxes):
                made.append((path, self.untie(name, tensor)))
            else:
                self.requests.request_fill(name, pieces)
                made.append((path, tensor))
        # Tensors that the saved tree lacks because it is another rank's: each rank has other names below this path.
        elsewhere = []
        for name, (path, tensor) in live.items():
            pieces = self.scan.pieces(name)
            if value_trees.has_path(saved.value, path) and name not in self.requests.saved_names:
                self.plan_value(name, pieces, value_trees.get_at(saved.value, path))
            elif self.requests.request_fill(name, pieces):
                elsewhere.append((path, tensor))
            made.append((path, tensor))

        def install() -> None:
            value = saved.value
            for path, tensor in made:
                if tensor is not None and value_trees.has_path(value, path):
                    value = value_trees.merge_tensors(value, [(path, tensor)])
            for path, tensor in elsewhere:
                value_trees.put_if_missing(value, path, tensor)
            node.put(value_trees.write_in_place(node.value, composites.join_composites(value, node.value)))

        self.requests.installs.append(install)

    def plan_value(self, name: str, pieces: Pieces, saved: Any) -> None:
        """Handles a tensor for which the checkpoint has a value. A number goes into a zero-dimensional tensor that can
        hold it exactly; the loop may have assigned one to that key. Else, or if the tensor has several names, it is a
        difference."""
        tied = name in self.scan.aliases or name in self.requests.aliases_by_first
        is_number = not (tied or pieces.shape) and isinstance(saved, int | float)
        if is_number and (equal := _equal_to(saved, pieces.dtype)) is not None:

            def install() -> None:
                for local in pieces.local_views:
                    with allow_in_place(local):
                        local.copy_(equal)

            self.requests.installs.append(install)
            return
        there = repr(saved) if saved is None or isinstance(saved, int | float) else f"a {type(saved).__name__}"
        line = f"{name} is a tensor ({pieces.dtype}, of the shape {pieces.shape}), in the checkpoint {there}"
        self.requests.note_difference("retyped", name, line)

    def is_other_ranks(self, node: DataNode) -> bool:
        """Whether this rank has None where other ranks have an object: a scheduler of the last stage, a loader of the
        first."""
        if node.value is not None:
            return False
        is_own = any(node.path in rank.loaders or f"state:{node.path}" in rank.generators for rank in self.own.others)
        return is_own or self.requests.saved.kind_of(node.path) not in (None, "value")

    def untie(self, name: str, live: Any) -> torch.Tensor | None:
        """A new tensor for a live one that is tied to another here, but not in the checkpoint. Ties there are kept."""
        found = self.requests.find_tensor(name)
        if found is not None and found.name in self.untied_tensors:
            return self.untied_tensors[found.name]
        new: torch.Tensor | None = self.requests.request_new_tensor(name, live)
        if found is None or new is None:
            return None
        if isinstance(live, torch.nn.Parameter):
            new = torch.nn.Parameter(new, live.requires_grad)
        elif live.requires_grad:
            new.requires_grad_()
        self.untied_tensors[found.name] = new
        return new

    def find_extra_names(self) -> tuple[str, ...]:
        """The names that the checkpoint has and this state has no place for."""
        saved, paths = self.requests.saved, {node.path for node in self.scan.nodes}
        found = set(self.requests.unused_names())
        found |= {n.path for n in self.scan.nodes if isinstance(n, DataNode) and self.is_other_ranks(n)}
        for held in (saved.data, saved.objects, saved.optimizers, saved.modules):
            found |= {path for path in held if path not in paths}
        for path, keys in saved.modules.items():
            live = self.scan.payloads.get(path, {}).get("extra", keys)
            found |= {names.join(path, key) for key in keys if key not in live}
        for path, view in self.scan.views.items():
            kept = saved.optimizers[path].rest.value if path in saved.optimizers else {}
            found |= {names.join(path, key) for key in kept if key not in view.rest["value"]}
        for rank in self.own.ranks[:1]:
            places = paths - {n.path for n in self.scan.nodes if isinstance(n, DataNode) and n.value is None}
            found |= {path for path in rank.loaders if path not in places}
            found |= {key[6:] for key in rank.generators if key.startswith("state:") and key[6:] not in places}
        return tuple(sorted(found))


def _equal_to(number: float, dtype: str) -> torch.Tensor | None:
    """A tensor of that dtype that equals the number; None if there is none."""
    try:
        made = torch.tensor(number, dtype=DTYPES[dtype], device="cpu")
        now = made.item()
    except (RuntimeError, ValueError, OverflowError):  # which one depends on dtype and number
        return None
    return made if now == number or (now != now and number != number) else None


def _key_texts(value: Any) -> set[str]:
    return set(map(str, value)) if isinstance(value, dict) else set()


def _make_call(function: Callable[[Any], Any], argument: Callable[[], Any]) -> Callable[[], None]:
    def call() -> None:
        function(argument())

    return call
