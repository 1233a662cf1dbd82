"""Tensor requests: which tensors of a checkpoint are wanted, one want per box, and the local tensor that each fills."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.errors import DamagedData, UsageError
from ckpt.format.manifest import Manifest, TensorSpec
from ckpt.layout.assemble import part_owner
from ckpt.layout.reshard import Want
from ckpt.trainer.state import composites, value_trees
from ckpt.trainer.state.names import prefixes, shorten_names
from ckpt.trainer.state.optimizers import state_path
from ckpt.trainer.state.saved_values import SharedValues, Tree
from ckpt.trainer.state.shard import DTYPES, Cutter, Pieces, Shard, allow_in_place, is_dtensor
from ckpt.types import Box, format_count


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of the checkpoint as this rank may have it: whole, or in `parts`, one for each of its boxes. `shape`:
    the global shape; None if not recorded (parts). `owner`: the rank that saved it as its own; "" for the job's."""

    name: str
    owner: str
    dtype: str
    shape: tuple[int, ...] | None
    parts: tuple[TensorSpec, ...] = ()

    def fits(self, pieces: Pieces) -> bool:
        """Whether the tensor can be filled into `pieces`."""
        return self.dtypes == {pieces.dtype} and all(held == saved for held, saved in self.shapes(pieces))

    @property
    def dtypes(self) -> set[str]:
        return {self.dtype, *(part.dtype for part in self.parts)}

    def shapes(self, pieces: Pieces) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(shape of the pieces, shape in the checkpoint): the two are equal in each pair if the tensor fits."""
        whole = [(pieces.shape, self.shape)] if self.shape is not None else []
        return whole + [(box.shape, part.shape) for box, part in zip(pieces.boxes, self.parts, strict=False)]


@dataclass(slots=True)
class TensorRequests:
    """Collects the wants of one rank, and the differences between state and checkpoint.

    - `coordinate`: this rank's; None for a checkpoint of another mesh, where an equal coordinate is another rank's.
    - `owner_by_name`: for another mesh, by name, the owner to take a tensor from.
    - `live_aliases`: other names of the state's tensors (name -> first name); `aliases_by_first`: the reverse.
    - `saved`: the values of the checkpoint.
    """

    coordinate: str | None
    owner_by_name: Mapping[str, str]
    specs: Mapping[tuple[str, str], TensorSpec]
    saved_names: frozenset[str]
    live_aliases: Mapping[str, str]
    aliases_by_first: Mapping[str, Sequence[str]]
    saved: SharedValues
    wants: list[Want] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    installs: list[Callable[[], None]] = field(default_factory=list)
    differences: dict[tuple[str, str], str] = field(default_factory=dict)
    # The nouns of names that the checkpoint has for no rank; see `note_missing`.
    absent_nouns: dict[str, str] = field(default_factory=dict)
    used_names: set[str] = field(default_factory=set)
    # Hyper-parameters of the script that were replaced, in words.
    overruled_lines: list[str] = field(default_factory=list)
    cutter: Cutter = field(default_factory=Cutter)

    @staticmethod
    def from_manifest(
        manifest: Manifest,
        coordinate: str | None,
        alike: Mapping[str, str],
        live: Mapping[str, str],
        saved: SharedValues,
    ) -> TensorRequests:
        specs = {(spec.name, spec.owner): spec for spec in manifest.tensors if not spec.values}
        also: dict[str, list[str]] = {}
        for alias, first in live.items():
            also.setdefault(first, []).append(alias)
        return TensorRequests(coordinate, alike, specs, frozenset(name for name, _ in specs), live, also, saved)

    # ------------------------------------------------------------------------------------------------- differences

    def note_difference(self, kind: str, name: str, line: str) -> None:
        """Notes a difference; only the first one of each kind (missing, reshaped or retyped) and name counts. `line`:
        the difference in words."""
        self.differences.setdefault((kind, name), line)

    def note_missing(self, name: str, noun: str = "") -> None:
        """Notes a name that the checkpoint lacks for this rank. `noun`: what it is, such as "tensor", if it may share a
        line with others of its subtree."""
        why = ""
        if name in self.saved_names:
            why = f", where only other ranks than {self.coordinate} have one of their own"
            if self.coordinate is None:
                owners = sorted({owner.partition("@")[0] for held, owner in self.specs if held == name})
                why = (
                    f", where the ranks of another mesh each have their own, and {shorten_names(owners)} differ: only "
                    "as many "
                    "ranks of that mesh can have it back"
                )
        elif noun:
            self.absent_nouns[name] = noun
        self.note_difference("missing", name, f"{name} is missing in the checkpoint{why}")

    def note_other_kind(self, path: str, kind: str) -> None:
        saved = self.saved.kind_of(path)
        if saved is None:
            self.note_missing(path)
        else:
            self.note_difference(
                "retyped", path, f"{path} is of the kind {kind}, in the checkpoint of the kind {saved}"
            )

    def is_of_another_class(self, path: str, here: str, live: set[str], kept: set[str], more: str = "") -> bool:
        """Whether the checkpoint has an optimizer or scheduler of another class than `here` in this place. Then nothing
        of it fits, which is noted. A renamed class has the same keys (`live` and `kept`), and does not count."""
        there = self.saved.classes[path]
        if there in ("", here) or live == kept:
            return False
        keys = [
            f"{word} {', '.join(sorted(of))}" for word, of in (("without", live - kept), ("with", kept - live)) if of
        ]
        line = f"{path} is of the class {here}, in the checkpoint of the class {there}, {' and '.join(keys)}{more}"
        self.note_difference("retyped", path, line)
        return True

    def unused_names(self) -> list[str]:
        """The names that the checkpoint has for all ranks or for this one, and that nothing here wanted. For another
        mesh, those of all its ranks: none of these ranks will fetch its own."""
        mine = ("", self.coordinate)
        names = {n for n, owner in self.specs if self.coordinate is None or owner.partition("@")[0] in mine}
        return sorted(names - self.used_names)

    def unused_own_names(self) -> list[str]:
        """The names in `unused_names` that only this rank could restore."""
        return [name for name in self.unused_names() if self.coordinate is not None and (name, "") not in self.specs]

    def extra_subtrees(self, live_names: Collection[str]) -> dict[str, str]:
        """For each name in `unused_names`, its subtree: the shortest prefix below which this rank's state has nothing;
        the name itself if there is none. `live_names`: the names in the state; of its objects, the path and a dot."""
        unused = self.unused_names()
        held = {prefix for name in (*live_names, *self.used_names) for prefix in prefixes(name)} if unused else set()
        return {name: _find_subtree(name, held) for name in unused}

    def difference_lines(self) -> list[str]:
        """The noted differences in words, sorted by kind and name: one line for all absent names of a subtree."""
        groups = self._absent_groups()
        grouped = {("missing", name) for group in groups.values() for name in group}
        lines = {key: line for key, line in self.differences.items() if key not in grouped}
        for (prefix, noun), group in groups.items():
            lines["missing", prefix] = f"{prefix}.*: {format_count(len(group), noun)}, not in the checkpoint"
        return [line for _, line in sorted(lines.items())]

    def _absent_groups(self) -> dict[tuple[str, str], list[str]]:
        """The absent names by (prefix, noun): the shortest prefix below which the checkpoint has nothing. Single names
        are left out."""
        if not self.absent_nouns:
            return {}
        stored = [
            state_path(path, name) for path, optimizer in self.saved.optimizers.items() for name in optimizer.state
        ]
        held = {prefix for name in (*self.saved_names, *stored) for prefix in prefixes(name)}
        groups: dict[tuple[str, str], list[str]] = {}
        for name, noun in self.absent_nouns.items():
            groups.setdefault((_find_subtree(name, held), noun), []).append(name)
        return {key: group for key, group in groups.items() if len(group) > 1}

    # ------------------------------------------------------------------------------------------------------ tensors

    def find_tensor(self, name: str, boxes: Sequence[Box] = ()) -> SavedTensor | None:
        """The checkpoint's tensor for one of the state; None if there is none. It is looked up under this name and the
        other names of a tied tensor. It is the job's, or this rank's own: whole, or in parts that are exactly `boxes`.
        For another mesh, it may be one that all ranks have the same."""
        first = self.live_aliases.get(name, name)
        others = self.aliases_by_first.get(first, ())
        for candidate in (name, self.saved.aliases.get(name), first, self.saved.aliases.get(first), *others):
            if candidate is None:
                continue
            own = self.owner_by_name.get(candidate, "") if self.coordinate is None else self.coordinate
            for owner in ("", own):
                spec = self.specs.get((candidate, owner))
                if spec is not None:
                    return SavedTensor(candidate, owner, spec.dtype, spec.shape)
            if self.coordinate is None:
                continue
            parts = [self.specs.get((candidate, part_owner(self.coordinate, box))) for box in boxes]
            held = tuple(spec for spec in parts if spec is not None)
            if held and len(held) == len(parts):
                return SavedTensor(candidate, self.coordinate, held[0].dtype, None, held)
        return None

    def is_untied(self, name: str, boxes: Sequence[Box] = ()) -> bool:
        """Whether the state's tensor of this name is tied to another, while the checkpoint has a tensor for each."""
        first = self.live_aliases.get(name)
        if first is None:
            return False
        own, other = self.find_tensor(name, boxes), self.find_tensor(first, boxes)
        return own is not None and other is not None and own.name != other.name

    def request_fill(self, name: str, pieces: Pieces) -> bool:
        """Requests a tensor for these pieces. False if the checkpoint has none that fits: that is noted."""
        found = self.find_tensor(name, pieces.boxes)
        if found is None:
            if pieces.boxes or name not in self.saved_names:
                self.note_missing(name, noun="tensor")
            return False
        self.used_names.add(found.name)
        for shape, saved in found.shapes(pieces):
            if shape != saved:
                self.note_difference("reshaped", name, f"{name} has the shape {shape}, in the checkpoint {saved}")
                return False
        for saved_dtype in found.dtypes:
            if saved_dtype != pieces.dtype:
                self.note_difference("retyped", name, f"{name} is {pieces.dtype}, in the checkpoint {saved_dtype}")
                return False
        for box, local in zip(pieces.boxes, pieces.local_views, strict=True):
            self.wants.append(Want(found.name, found.owner, pieces.dtype, pieces.shape, box))
            self.tensors.append(self._destination(local))
        return True

    def request_new_tensor(self, name: str, like: Any = None) -> Any:
        """A new tensor, to be filled with the checkpoint's tensor of this name; None if there is none, which is noted.
        If `like` has the same global shape, the new one is placed like it, as a Shard if `like` is one. Otherwise it is
        whole, on the CPU. Its dimensions lie in memory as they were saved."""
        found = self.find_tensor(name)
        if found is None or found.shape is None:
            self.note_missing(name, noun="tensor")
            return None
        dtype, order = dtype_of(found), self.saved_order(found, len(found.shape))
        if isinstance(like, Shard) and like.global_shape == found.shape:
            new: torch.Tensor | Shard = like.like(empty_like(like.tensor, dtype, order))
        elif isinstance(like, torch.Tensor) and tuple(like.shape) == found.shape:
            new = empty_like(like, dtype, order)
        else:
            new = empty(found.shape, dtype, order)
        self.request_fill(name, self.cutter.pieces(new, name))
        return new

    def saved_order(self, found: SavedTensor, dims: int) -> Sequence[int] | None:
        """The order of the dimensions in memory at the save, from the outermost; None if it was not saved. Errors:
        DamagedData."""
        if self.saved.orders is None:
            return None
        order = self.saved.orders.get(found.name, range(dims))
        if len(order) != dims:
            raise DamagedData(f"{found.name} has {dims} dimensions, and the stored order of them has {len(order)}")
        return order

    def request_tree(self, saved: Tree, live: Mapping[str, Any], path: str, holder: Any = None) -> Callable[[], Any]:
        """A function for after the fill: it returns the saved values with new tensors in their places. Each tensor is
        placed as the `live` one of the same name. `path` names the tree. `holder`: the present tree, whose objects take
        their saved state. Errors: those of composites.check_composites."""
        composites.check_composites(saved.value, path, holder)
        made = [(path, self.request_new_tensor(name, live.get(name))) for path, name in saved.tensors]
        return lambda: composites.join_composites(
            value_trees.merge_tensors(saved.value, [(path, tensor) for path, tensor in made if tensor is not None]),
            holder,
        )

    def _destination(self, local: torch.Tensor) -> torch.Tensor:
        """The local tensor itself. If its elements share memory (expanded): a new tensor, copied back later."""
        if all(stride or size < 2 for stride, size in zip(local.stride(), local.shape, strict=True)):
            return local
        whole = torch.empty(local.shape, dtype=local.dtype, device=local.device)
        distinct = tuple(slice(None) if stride else slice(0, 1) for stride in local.stride())

        def copy_back() -> None:
            with allow_in_place(local):
                local[distinct].copy_(whole[distinct])

        self.installs.append(copy_back)
        return whole


def _find_subtree(name: str, held: Collection[str]) -> str:
    """The shortest prefix of `name` that is not in `held`, the prefixes of all names of a tree; else `name` itself."""
    return next((prefix for prefix in prefixes(name) if prefix not in held), name)


def extra_lines(names: Iterable[str], subtrees: Mapping[str, str], owner: str = "") -> list[str]:
    """The lines for names that only the checkpoint has: one for all tensors of a subtree that the state lacks.
    `subtrees`: by name of a tensor, see `TensorRequests.extra_subtrees`. `owner`: words behind each line."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(subtrees.get(name, name), []).append(name)
    lines = []
    for subtree, group in sorted(groups.items()):
        tensors = sum(name in subtrees for name in group)
        whole = f"{subtree}.*, {format_count(tensors, 'tensor')}"
        lines.append(f"only in the checkpoint: {whole if len(group) > 1 else group[0]}{owner}")
    return lines


def dtype_of(found: SavedTensor) -> torch.dtype:
    """The torch dtype of a saved tensor. Errors: UsageError if this torch lacks it."""
    if found.dtype not in DTYPES:
        raise UsageError(f"{found.name} is {found.dtype} in the checkpoint, which torch {torch.__version__} has not")
    return DTYPES[found.dtype]


def empty(
    shape: Sequence[int], dtype: torch.dtype, order: Sequence[int] | None, device: torch.device | str | None = None
) -> torch.Tensor:
    """A new tensor whose dimensions lie in memory in `order`, from the outermost; None: in their own order."""
    return torch.empty_permuted(shape, tuple(order or range(len(shape))), dtype=dtype, device=device)


def empty_like(tensor: Any, dtype: torch.dtype | None = None, order: Sequence[int] | None = None) -> torch.Tensor:
    """A new tensor of the same shape, device and placement, without gradient. `order`: of its dimensions in memory,
    from the outermost; None: as in `tensor`."""
    local = tensor._local_tensor if is_dtensor(tensor) else tensor
    if order is None or hasattr(local, "local_shards"):
        new, stride = torch.empty_like(local.detach(), dtype=dtype), tensor.stride()
    else:
        new = empty(local.shape, dtype or local.dtype, order, local.device)
        stride = empty(tensor.shape, new.dtype, order, "meta").stride()
    if not is_dtensor(tensor):
        return new
    return _make_dtensor(new, tensor.shape, stride, tensor.device_mesh, tensor.placements)


def replicated_like(
    tensor: Any, shape: tuple[int, ...], dtype: torch.dtype, order: Sequence[int] | None = None
) -> torch.Tensor:
    """A new tensor of that shape on the device of `tensor`; on every rank of its mesh if `tensor` is a DTensor.
    `order`: of its dimensions in memory."""
    local = empty(shape, dtype, order, tensor.device)
    if not is_dtensor(tensor) or not shape:
        return local
    from torch.distributed.tensor import Replicate

    return _make_dtensor(local, shape, local.stride(), tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim)


def _make_dtensor(
    local: torch.Tensor, shape: Sequence[int], stride: Sequence[int], mesh: Any, placements: Sequence[Any]
) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    new: torch.Tensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )
    return new
