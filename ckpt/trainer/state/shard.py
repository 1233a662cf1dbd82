"""Shards: the boxes of a tensor that this rank holds, and the local tensors with their bytes.

A tensor whose boxes are not certain is refused by name; no box is guessed. Nothing is copied: the local tensors are
views of live memory, and keep it alive.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.errors import UsageError
from ckpt.types import ITEMSIZE, Box

DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, n): n for n in ITEMSIZE if hasattr(torch, n)}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

Runs = tuple[tuple[int, int], ...]  # (start, length) along one dimension, in local order


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A hand-made shard: `tensor` holds the box at `offset` of a tensor of `global_shape`, in elements. Put it into the
    state in the tensor's place. If a module's parameter is declared with a Shard anywhere in the state, the parameter
    is saved as that shard. So is optimizer state of the parameter's local shape. Errors: UsageError if `tensor` is not
    a plain tensor, or the box does not lie inside `global_shape`."""

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, torch.Tensor) or is_dtensor(self.tensor):
            raise UsageError(f"ckpt.Shard takes a plain tensor, not {type(self.tensor).__name__}; a DTensor needs none")
        for name in ("global_shape", "offset"):
            try:
                numbers = tuple(int(n) for n in getattr(self, name))
            except (TypeError, ValueError) as exc:
                raise UsageError(f"ckpt.Shard: {name} is a sequence of whole numbers") from exc
            object.__setattr__(self, name, numbers)
        if not Box(self.offset, tuple(self.tensor.shape)).within(self.global_shape):
            raise UsageError(
                f"ckpt.Shard: a part of shape {tuple(self.tensor.shape)} at offset {self.offset} does not lie inside "
                f"a tensor of global shape {self.global_shape}; give offset and shape in elements of the whole tensor"
            )

    def like(self, tensor: torch.Tensor) -> Shard:
        """`tensor`, which has the same local shape, as the same part of another whole tensor."""
        return Shard(tensor, self.global_shape, self.offset)


@dataclass(frozen=True, slots=True)
class Pieces:
    """One tensor as this rank holds it. `local_views[i]`: a detached view of the live memory of `boxes[i]`, maybe not
    contiguous. `live_tensors`: the views are current while the addresses and strides of these tensors stay.
    `may_have_replicas`: whether other ranks may hold the same boxes."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    local_views: tuple[torch.Tensor, ...]
    live_tensors: tuple[torch.Tensor, ...]
    may_have_replicas: bool


@dataclass(slots=True)
class Cutter:
    """Makes Pieces, and caches the boxes of placements. `world`: the number of ranks."""

    world: int = 1
    _boxes_by_placement: dict[Any, tuple[tuple[Box, ...], tuple[Runs, ...]]] = field(default_factory=dict)

    def pieces(self, tensor: torch.Tensor | Shard, name: str) -> Pieces:
        """The Pieces of a tensor. Errors: UsageError, as "<name>: <what the tensor is>; <what to do>"."""
        if isinstance(tensor, Shard):
            box = Box(tensor.offset, tuple(tensor.tensor.shape))
            local = plain_view(tensor.tensor, name)
            held = box.size > 0 or math.prod(tensor.global_shape) == 0
            boxes, views = ((box,), (local,)) if held else ((), ())
            return Pieces(DTYPE_NAMES[local.dtype], tensor.global_shape, boxes, views, (tensor.tensor,), True)
        if is_dtensor(tensor):
            return self._cut_dtensor(tensor, name)
        local = plain_view(tensor, name)
        shape = tuple(local.shape)
        return Pieces(DTYPE_NAMES[local.dtype], shape, (Box.whole(shape),), (local,), (tensor,), True)

    def _cut_dtensor(self, tensor: Any, name: str) -> Pieces:
        shape, mesh, placements = tuple(tensor.shape), tensor.device_mesh, tensor.placements
        if any(p.is_partial() for p in placements):
            raise UsageError(
                f"{name}: a DTensor with a Partial placement ({placements}), whose value is spread over ranks as "
                "unreduced sums; redistribute it to Shard or Replicate before it is saved"
            )
        local = tensor._local_tensor
        if hasattr(local, "__create_chunk_list__") and hasattr(local, "local_shards"):
            return self._cut_listed(tensor, local, name)
        if hasattr(local, "__tensor_flatten__"):
            raise UsageError(
                f"{name}: a DTensor whose local part is a {type(local).__name__}, a tensor subclass, which could not "
                "be cut anew for another number of ranks; use DDP, or an optimizer or weights of plain tensors"
            )
        view = plain_view(local, name)
        dtype = DTYPE_NAMES[view.dtype]
        replica = mesh.size() < self.world or any(p.is_replicate() for p in placements)
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return Pieces(dtype, shape, (), (), (local,), replica)
        # A tensor without bytes: every rank declares the whole of it.
        if math.prod(shape) == 0:
            return Pieces(dtype, shape, (Box.whole(shape),), (view.new_empty(shape),), (local,), True)
        key = (shape, mesh, placements)
        if key not in self._boxes_by_placement:
            self._boxes_by_placement[key] = _boxes(shape, tuple(mesh.shape), tuple(coordinate), placements, name)
        boxes, runs = self._boxes_by_placement[key]
        held = tuple(sum(n for _, n in r) for r in runs)
        if held != tuple(view.shape):
            raise UsageError(
                f"{name}: a DTensor whose local part has shape {tuple(view.shape)}, where its placements "
                f"{placements} give {held}; declare such a part with ckpt.Shard(tensor, global_shape, offset)"
            )
        views = (view,) if len(boxes) == 1 else tuple(_views(view, runs)) if boxes else ()
        return Pieces(dtype, shape, boxes, views, (local,), replica)

    def _cut_listed(self, tensor: Any, local: Any, name: str) -> Pieces:
        """The Pieces of a DTensor whose local part lists its own boxes (several shards), by torch's checkpointing
        protocol."""
        shape = tuple(tensor.shape)
        shards = [*zip(local.__create_chunk_list__(), local.local_shards(), strict=False)]
        boxes = tuple(Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk, part in shards if part.numel())
        views = tuple(plain_view(part, name) for _, part in shards if part.numel())
        if any(not b.within(shape) or b.shape != tuple(v.shape) for b, v in zip(boxes, views, strict=True)):
            raise UsageError(f"{name}: the boxes that its local part lists do not lie inside its shape {shape}")
        dtype = DTYPE_NAMES[views[0].dtype if views else tensor.dtype]
        return Pieces(dtype, shape, boxes, views, tuple(part for _, part in shards), True)


def is_dtensor(tensor: object) -> bool:
    """Whether the tensor is a DTensor. The test does not import torch.distributed.tensor."""
    return hasattr(tensor, "_local_tensor") and hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def live_parts(tensor: torch.Tensor | Shard) -> tuple[torch.Tensor, ...]:
    """The tensors that hold the bytes: a view is current while their addresses stay."""
    if isinstance(tensor, Shard):
        return (tensor.tensor,)
    local = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return tuple(local.local_shards()) if hasattr(local, "local_shards") else (local,)


def storage_addresses(tensors: Iterable[torch.Tensor | Shard]) -> frozenset[int]:
    """The addresses of the tensors' storages. All views of one storage have the same address."""
    return frozenset(storage_address(part) for tensor in tensors for part in live_parts(tensor)) - {0}


def storage_address(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage. 0 if it has no bytes, or if this kind of tensor has no storage (sparse,
    wrapper); no walk has such a kind."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions of a plain tensor as they lie in memory, from the outermost to the innermost. None if that is
    their own order, or if the elements are not dense (expanded, part of a larger tensor)."""
    return _find_memory_order(tuple(tensor.shape), tensor.stride())


@functools.lru_cache(maxsize=1 << 12)
def _find_memory_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    # Of two dimensions with one stride, the one of size 1 counts as the inner one. So it gets that stride again.
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim] == 1)))
    dense = 1
    for dim in reversed(order):
        if shape[dim] > 1 and strides[dim] != dense:
            return None
        dense *= shape[dim]
    return None if order == tuple(range(len(shape))) else order


def dense_bytes(dense: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor without gradient, as a flat uint8 view. A tensor of one element keeps the stride
    that it was cut with. torch then gives no flat view without as_strided()."""
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def allow_in_place(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """A context for changing a tensor in place: torch changes inference tensors only under inference_mode()."""
    return torch.inference_mode() if tensor.is_inference() else nullcontext()


def plain_view(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A detached view of a tensor that consists only of its bytes. Errors: UsageError for any other kind of tensor; the
    message begins with "<name>: "."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        _refuse_subclass(tensor, name)
    trouble = _find_obstacle(tensor)
    if trouble is not None:
        raise UsageError(f"{name}: {trouble}")
    with torch._C.DisableTorchFunctionSubclass():
        view = tensor.detach()
        return view if type(view) is torch.Tensor else view.as_subclass(torch.Tensor)


def _find_obstacle(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be stored; None if it can."""
    if tensor.dtype not in DTYPE_NAMES:
        return f"dtype {tensor.dtype} cannot be stored; convert it to one of {', '.join(DTYPES)}"
    if tensor.layout is not torch.strided:
        return f"a {tensor.layout} tensor; store its indices and values as tensors, or call .to_dense()"
    if tensor.is_meta:
        return "on the meta device, with no data; materialise it (module.to_empty(device=...)) before the block"
    if tensor.is_nested:
        return "a nested tensor; store its values and offsets as tensors"
    if tensor.is_conj() or tensor.is_neg():
        return "a lazily conjugated or negated view; call .resolve_conj() and .resolve_neg() on it"
    return None


def _refuse_subclass(tensor: torch.Tensor, name: str) -> None:
    kind = type(tensor).__name__
    if isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)):
        raise UsageError(f"{name}: not initialised yet ({kind}); run one forward pass before the Checkpointer")
    if kind == "FlatParameter" or hasattr(tensor, "_is_flat_param"):
        raise UsageError(f"{name}: a flat parameter of FSDP1; use torch.distributed.fsdp.fully_shard (FSDP2)")
    if type(tensor).__torch_dispatch__ != torch.Tensor.__torch_dispatch__:
        raise UsageError(
            f"{name}: a {kind}, a tensor subclass that is not known to be made of plain bytes; keep its parts "
            "(such as integer data and scales) as plain tensors in the state, or give its owner state_dict() and "
            "load_state_dict() that do"
        )


def _boxes(
    shape: tuple[int, ...], sizes: tuple[int, ...], at: tuple[int, ...], placements: Sequence[Any], name: str
) -> tuple[tuple[Box, ...], tuple[Runs, ...]]:
    """The boxes at one mesh coordinate, in the order of the runs' product; and the runs of each dimension."""
    runs: list[Runs] = [((0, n),) for n in shape]
    cuts: dict[int, list[tuple[int, int, int]]] = {}  # by dimension: (parts, chunks, index)
    for size, index, placement in zip(sizes, at, placements, strict=True):
        if placement.is_replicate():
            continue
        if type(placement).__name__ not in ("Shard", "_StridedShard") or not 0 <= placement.dim < len(shape):
            raise UsageError(f"{name}: a DTensor with the placement {placement}, which is not known; use Shard")
        parts = int(getattr(placement, "split_factor", 1))
        cuts.setdefault(placement.dim, []).append((parts, size, index))
    for dim, line in cuts.items():
        for cut in _sort_cuts(line):
            runs[dim] = _cut_runs(runs[dim], *cut)
    if not all(sum(n for _, n in r) for r in runs):
        return (), tuple(runs)
    corners = itertools.product(*runs)
    return tuple(Box(tuple(s for s, _ in c), tuple(n for _, n in c)) for c in corners), tuple(runs)


def _sort_cuts(cuts: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The cuts in the order in which they were made. fully_shard comes after tensor parallelism, yet its cut is first
    on the mesh: strided, in as many parts as the later cuts make. It cuts what the later ones leave. The order matters
    if the sizes do not divide evenly."""
    (parts, chunks, index), *later = cuts
    if all(n == 1 for n, *_ in later) and parts == math.prod(size for _, size, _ in later):
        return [*later, (1, chunks, index)]
    return cuts


def _cut_runs(runs: Runs, parts: int, chunks: int, index: int) -> Runs:
    """The index-th chunk (of `chunks`, cut as by torch.chunk) of each of `parts` equal parts, one after the other. That
    is a strided shard; with parts = 1 a plain one."""
    total = sum(n for _, n in runs)
    part = -(-total // parts)
    found: list[tuple[int, int]] = []
    for start in range(0, total, part) if part else ():
        length = min(part, total - start)
        chunk = -(-length // chunks)
        found += _slice_runs(runs, start + min(length, chunk * index), start + min(length, chunk * (index + 1)))
    return _join_runs(found) or ((0, 0),)


def _slice_runs(runs: Runs, low: int, high: int) -> list[tuple[int, int]]:
    """The runs at positions [low, high) of the concatenated runs."""
    found = []
    for start, length in runs:
        a, b = max(low, 0), min(high, length)
        if a < b:
            found.append((start + a, b - a))
        low, high = low - length, high - length
    return found


def _join_runs(runs: list[tuple[int, int]]) -> Runs:
    joined: list[tuple[int, int]] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return tuple(joined)


def _views(local: torch.Tensor, runs: tuple[Runs, ...]) -> list[torch.Tensor]:
    """The parts of the local tensor, in the order of the boxes."""
    spans = []
    for lengths in ([n for _, n in r] for r in runs):
        ends = list(itertools.accumulate(lengths))
        spans.append([slice(end - n, end) for n, end in zip(lengths, ends, strict=True)])
    return [local[corner] for corner in itertools.product(*spans)]
