"""The coordinate of a rank in the mesh: the key of the rank's own state.

It is written as text: "dp=1,tp=0" or "rank=3". Its data-parallel part tells which ranks get the same data, and so share
a loader position. Axes of size 1 are left out. A mesh of one data-parallel axis is written by rank. So a rank has the
same coordinate under DDP, under FSDP2 and without a mesh.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ckpt.errors import UsageError
from ckpt.trainer.state.names import modules
from ckpt.trainer.state.shard import is_dtensor

# Axes along which ranks work on the same data, in lower case. Every other axis counts as data-parallel. Too many
# data-parallel axes keep more loader positions than needed; too few would lose positions.
_SAME_DATA_KINDS = "tensor", "pipeline", "context", "sequence", "model"
SAME_DATA = frozenset(
    {"tp", "pp", "cp", "sp", "mp", "pipe", "ulysses", *_SAME_DATA_KINDS, *(f"{k}_parallel" for k in _SAME_DATA_KINDS)}
)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a mesh, with this rank's index on it."""

    name: str
    index: int
    size: int

    @property
    def is_same_data(self) -> bool:
        """Whether ranks along this axis work on the same data, judged by its name."""
        return self.name.lower() in SAME_DATA


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A rank's place in the mesh. `axes`: from the outermost to the innermost; together they identify the rank."""

    axes: tuple[Axis, ...]

    @property
    def text(self) -> str:
        return _axes_text(self.axes)

    @property
    def world(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @property
    def data_axes(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if not a.is_same_data)

    @property
    def data(self) -> str:
        """The data-parallel part as text; "all" if every rank gets the same data."""
        return _axes_text(self.data_axes) or "all"

    @property
    def data_rank(self) -> int:
        return functools.reduce(lambda rank, axis: rank * axis.size + axis.index, self.data_axes, 0)

    @property
    def data_world(self) -> int:
        return math.prod(axis.size for axis in self.data_axes)

    def is_in_mesh_of(self, coordinates: Collection[str]) -> bool:
        """Whether `coordinates`, those of all ranks, are the coordinates of this coordinate's mesh."""
        every = itertools.product(*([Axis(a.name, i, a.size) for i in range(a.size)] for a in self.axes))
        return set(map(_axes_text, every)) == set(coordinates)

    @property
    def mesh(self) -> tuple[tuple[str, int], ...]:
        """The names and sizes of the axes: the same on all ranks."""
        return tuple((a.name, a.size) for a in self.axes)


def _axes_text(axes: tuple[Axis, ...]) -> str:
    return ",".join(f"{a.name}={a.index}" for a in axes)


def find_coordinate(state: dict[str, Any], rank: int, world: int, mesh: Any = None) -> Coordinate:
    """This rank's coordinate in `mesh`, a DeviceMesh over all ranks. Without `mesh`, the mesh of the state's DTensors
    is taken if it, or the mesh it was cut from, covers all ranks. Otherwise the coordinate is the rank. Errors:
    UsageError if `mesh` is no DeviceMesh, or does not cover all ranks."""
    if mesh is not None:
        if not hasattr(mesh, "get_coordinate"):
            raise UsageError(f"mesh={mesh!r}: give a torch DeviceMesh (init_device_mesh(...)) over all ranks, or none")
        found = _coordinate_in_mesh(mesh, world)
        if found is None:
            raise UsageError(f"mesh= covers {mesh.size()} of {world} ranks; give the mesh that covers all, or none")
        return found
    candidates = sorted({id(m): m for m in _meshes(state)}.values(), key=lambda m: -m.ndim)
    for candidate in [*candidates, *filter(None, map(_root_mesh, candidates))]:
        found = _coordinate_in_mesh(candidate, world)
        if found is not None:
            return found
    return coordinate_by_rank(rank, world)


def coordinate_by_rank(rank: int, world: int) -> Coordinate:
    """The coordinate of a rank if no mesh is known."""
    return Coordinate((Axis("rank", rank, world),))


def _coordinate_in_mesh(mesh: Any, world: int) -> Coordinate | None:
    at = mesh.get_coordinate()
    if mesh.size() != world or at is None:
        return None
    names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
    axes = tuple(Axis(n, int(i), int(s)) for n, i, s in zip(names, at, mesh.shape, strict=True) if s > 1)
    if not axes or (len(axes) == 1 and not axes[0].is_same_data):
        return coordinate_by_rank(axes[0].index if axes else 0, world)
    return Coordinate(axes)


def _root_mesh(mesh: Any) -> Any:
    """The mesh that `mesh` was cut from, if torch tells it (since 2.7), else None. It is a hint; nothing relies on
    it."""
    root = getattr(mesh, "_get_root_mesh", None)
    return root() if root is not None else None


def _meshes(state: Any, depth: int = 0) -> Iterator[Any]:
    if isinstance(state, nn.Module):
        for _, module in modules(state):
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if is_dtensor(tensor):
                    yield tensor.device_mesh  # type: ignore[union-attr]
    elif is_dtensor(state):
        yield state.device_mesh
    elif isinstance(state, (dict, list, tuple)) and depth < 10:
        for value in state.values() if isinstance(state, dict) else state:
            yield from _meshes(value, depth + 1)
