"""Tensors for a reader of one process: the name of each, and any part of it as an array.

A job may hold several copies of one tensor, such as a buffer of each rank under DDP. A start on another number of ranks
takes one copy for all, and so does a reader of one process. These rules name the copies:

1. Copies that are the same on all ranks are one tensor.
2. Of a module's buffers the first rank's is taken. A tensor of a module counts as a buffer if no optimizer names it.
3. Any other copy keeps a name of its own, `name@coordinate`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.errors import UsageError
from ckpt.format.manifest import TensorSpec
from ckpt.layout.replica_match import first_owners, match_replicas
from ckpt.layout.reshard import Want, apply_cuts
from ckpt.store.dtypes import FLOATS, Bits, bits_dtype, to_float64, to_numpy_floats
from ckpt.store.reader import FrameReader, load_values
from ckpt.store.tensor_stream import cuts_by_want, exported_name
from ckpt.types import Box

Part = int | slice | EllipsisType
Index = Part | tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """The tensors of a checkpoint by name. `specs`: by name, in order of name. `firsts`: names of buffers that differ
    between ranks; the first rank's is taken. `copies`: by `name@coordinate`, all copies of the tensors that have one
    name for several copies, also the one that was taken."""

    specs: Mapping[str, TensorSpec]
    first_rank_names: tuple[str, ...]
    rank_copies: Mapping[str, TensorSpec]


def index_tensors(reader: FrameReader) -> TensorIndex:
    """The tensors of a checkpoint as one process names them. If ranks have copies, it reads small tensors and values.
    Errors: DamagedData; StorageError."""
    manifest = reader.record.manifest
    specs = [spec for spec in manifest.tensors if not spec.values]
    whole = {spec.name for spec in specs if not spec.owner}
    several = {spec.name for spec in specs if spec.owner} - whole
    if not several:
        return TensorIndex({exported_name(spec): spec for spec in specs}, (), {})
    same = match_replicas(manifest, reader.read_bytes)
    firsts = first_owners(manifest, _buffers(reader, several - same.keys()))
    taken = {name: owner for name, owner in {**firsts, **same}.items() if name in several}
    found: dict[str, TensorSpec] = {}
    copies: dict[str, TensorSpec] = {}
    for spec in specs:
        if spec.name not in taken:
            found[exported_name(spec)] = spec
            continue
        copies[exported_name(spec)] = spec
        if spec.owner == taken[spec.name]:
            found[spec.name] = spec
    return TensorIndex(dict(sorted(found.items())), tuple(sorted(firsts.keys() & taken.keys())), copies)


def _buffers(reader: FrameReader, names: Collection[str]) -> set[str]:
    """Which of the names are buffers of a module."""
    if not names:
        return set()
    values = load_values(reader)
    objects: dict[str, list[Any]] = {}
    for tree in (values.shared, *values.shared_by_coordinate.values()):
        for path, body in _dict(_dict(tree).get("objects")).items():
            objects.setdefault(str(path), []).append(_dict(body))
    modules = [path for path, bodies in objects.items() if any(body.get("kind") == "module" for body in bodies)]
    trained: set[str] = set()
    for body in (body for bodies in objects.values() for body in bodies if body.get("kind") == "optimizer"):
        groups = body.get("groups")
        for group in groups if isinstance(groups, (list, tuple)) else ():
            params = _dict(group).get("params")
            trained.update(map(str, params if isinstance(params, (list, tuple)) else ()))
    parameters = trained | {f"{path}.{name}" for path in modules for name in trained}
    return {n for n in names if n not in parameters and any(n.startswith(f"{path}.") for path in modules)}


def _dict(tree: Any) -> dict[Any, Any]:
    return tree if isinstance(tree, dict) else {}


def read_part(reader: FrameReader, spec: TensorSpec, index: Index = ()) -> Bits:
    """A part of a tensor, as an array of dtypes.bits_dtype. Reads only the frames that hold it. Errors: UsageError if
    the index does not fit; DamagedData; StorageError."""
    box, then = locate_part(spec, index)
    want = Want(spec.name, spec.owner, spec.dtype, spec.shape, box)
    (by_frame,) = cuts_by_want(reader.record.manifest, [want])
    bits = np.empty(box.shape, bits_dtype(spec.dtype))
    lengths = reader.record.manifest.frames["length"]
    held: dict[int, bytearray] = {}

    def out(frame: int) -> memoryview:
        held[frame] = bytearray(int(lengths[frame]))
        return memoryview(held[frame])

    def deliver(frame: int) -> None:
        apply_cuts(by_frame[frame], frame, np.frombuffer(held.pop(frame), np.uint8), [bits])

    reader.read(by_frame, deliver, out)
    # The ellipsis makes this an array also if all parts are integers.
    found: Bits = bits[(*then, ...)]
    return found


def locate_part(spec: TensorSpec, index: Index) -> tuple[Box, tuple[Any, ...]]:
    """The box that holds the part, and the index of the part within that box. Errors: UsageError."""
    parts = index if isinstance(index, tuple) else (index,)
    around = [place for place, part in enumerate(parts) if part is ...]
    left_out = len(spec.shape) - (len(parts) - len(around))
    if left_out < 0 or len(around) > 1:
        raise UsageError(f"{index!r} does not fit {spec.name}, which has the shape {list(spec.shape)}")
    at = around[0] if around else len(parts)
    filled = (*parts[:at], *(slice(None),) * left_out, *parts[at + len(around) :])
    offset, shape, then = [], [], list[Any]()
    for size, part in zip(spec.shape, filled, strict=True):
        if isinstance(part, slice):
            places = range(*part.indices(size))
            offset.append(min(places, default=0))
            shape.append(max(places, default=-1) + 1 - offset[-1])
            then.append(slice(None, None, places.step))
        elif isinstance(part, (int, np.integer)) and -size <= part < size:
            offset.append(int(part) % size)
            shape.append(1)
            then.append(0)
        else:
            raise UsageError(
                f"{part!r} is not an index of {spec.name}, which has the shape {list(spec.shape)}; give integers, "
                "slices or ..."
            )
    return Box(tuple(offset), tuple(shape)), tuple(then)


def as_numpy(bits: Bits, dtype: str) -> npt.NDArray[Any]:
    """The same numbers in a NumPy dtype, each value exactly: bfloat16 and the float8 kinds as float32, complex32 as
    complex64. float4_e2m1fn_x2 stays as the bytes of its pairs."""
    if dtype == "bool":
        return bits.view(np.bool_)
    if dtype in FLOATS:
        return np.asarray(to_numpy_floats(bits, dtype))
    if dtype == "complex32":
        found = to_float64(bits, dtype)
        assert found is not None
        return np.asarray(found, np.complex64)
    return bits


def as_torch(bits: Bits, dtype: str) -> Any:
    """A torch.Tensor of that dtype, on the CPU. Errors: UsageError if this torch has no such dtype."""
    import torch

    kind = getattr(torch, dtype, None)
    if kind is None:
        raise UsageError(f"torch {torch.__version__} has no {dtype}; install a newer torch, or use the NumPy array")
    return torch.from_numpy(np.asarray(bits, order="C")).view(kind)
