"""The fingerprint of a walked state: it tells whether the state still has the structure that was walked.

It is compared at each save, in C loops over lists. It covers:
- by identity, which containers hold which objects under which keys;
- the address, strides, shape and dtype of every tensor;
- the local part and placements of every DTensor.

A difference means that the cached views look at old storage: after `opt.load_state_dict`, `p.data =`, a reassigned
buffer or a replaced module. A fingerprint keeps all compared objects alive. So no new object can get an old object's
identity, and no new storage an old storage's address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import attrgetter, eq, is_, itemgetter, not_
from typing import Any

import torch
from torch import nn

from ckpt.trainer.state import value_trees
from ckpt.trainer.state.composites import inner_tensors
from ckpt.trainer.state.shard import Shard, is_dtensor, live_parts
from ckpt.trainer.state.state_nodes import Read
from ckpt.trainer.state.value_trees import Path, Tensor

_GET_MODULE_DICTS = itemgetter("_parameters", "_buffers", "_modules")
_GET_DTENSOR_PARTS = attrgetter("_local_tensor", "_spec")
# Tensors per batch: all attributes of a batch are read while its tensors are in the processor's cache.
_BATCH_TENSORS = 256


class Fingerprint:
    """The structure of a state when it was walked. `modules`: all modules; their parameters, buffers and children are
    watched. `optimizers`: their groups, the parameters that have state, and the tensors among hyper-parameters are
    watched. `dicts`: dicts of tensors by name. `distributed`: the DTensors. `composites`: the modules' tensors that
    are saved in parts. `live`: the local tensors that hold the bytes."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        dicts: Sequence[dict[Any, Any]],
        distributed: Sequence[Any],
        composites: Sequence[Any],
        live: Sequence[torch.Tensor],
    ) -> None:
        self._module_dicts = [vars(module) for module in modules]
        self._optimizers = optimizers
        self._dicts = [*chain.from_iterable(map(_GET_MODULE_DICTS, self._module_dicts)), *dicts]
        self._distributed = distributed
        self._composites = composites
        self._live_tensors = live
        self._known_hyper_tensors = self._hyper_tensors()
        self._known_objects = self._held_objects()
        self._known_keys = self._dict_keys()
        self._known_geometry = geometry(live)

    def is_stale(self) -> bool:
        """Whether the structure has changed since. Errors: RuntimeError if a tensor has lost its storage."""
        objects, hyper = self._held_objects(), self._hyper_tensors()
        return (
            len(objects) != len(self._known_objects)
            or not all(map(is_, objects, self._known_objects))
            or self._dict_keys() != self._known_keys
            or len(hyper) != len(self._known_hyper_tensors)
            or not all(p == q and t is u for (p, t), (q, u) in zip(hyper, self._known_hyper_tensors, strict=True))
            or not has_same_geometry(self._live_tensors, self._known_geometry)
        )

    def _held_objects(self) -> list[Any]:
        """The objects in all watched containers, in a fixed order."""
        found = [
            *chain.from_iterable(map(_GET_MODULE_DICTS, self._module_dicts)),
            *chain.from_iterable(map(dict.values, self._dicts)),
            *chain.from_iterable(map(_GET_DTENSOR_PARTS, self._distributed)),
            *chain.from_iterable(inner_tensors(each).values() for each in self._composites),
        ]
        for optimizer in self._optimizers:
            found += (optimizer.state, *optimizer.state, *optimizer.state.values(), optimizer.param_groups)
            for group in optimizer.param_groups:
                found += (group, group["params"], *group["params"])
        return found

    def _hyper_tensors(self) -> list[tuple[Path, Tensor]]:
        """(path, tensor) of each tensor among the hyper-parameters, also of those in tuples (betas)."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        bare = [
            {k: value for k, value in group.items() if type(value) not in value_trees.PLAIN and k != "params"}
            for group in groups
        ]
        return value_trees.split_tensors(bare, "the hyper-parameters of an optimizer", has_objects=True)[1]

    def _dict_keys(self) -> list[Any]:
        """The size of each dict, then the keys of all dicts."""
        return [*map(len, self._dicts), *chain.from_iterable(self._dicts)]


def describe_answer(said: Read) -> Any:
    """The names of an answer's values, and the names, boxes and addresses of its tensors. Compare it with another only
    while this answer's tensors are alive."""
    tensors, payload = said
    places: list[tuple[Any, ...]] = []
    for named in tensors:
        tensor = named.tensor
        if isinstance(tensor, Shard):
            places.append((named.name, tensor.global_shape, tensor.offset))
        elif is_dtensor(tensor):
            places.append((named.name, tensor.shape, tensor.placements))  # type: ignore[attr-defined]
        else:
            places.append((named.name,))
    parts = [part for named in tensors for part in live_parts(named.tensor)]
    return tuple(payload.get("extra", ())), places, geometry(parts)


_ATTRIBUTE_GETTERS: tuple[Callable[[torch.Tensor], Any], ...] = (
    torch.Tensor.data_ptr,
    torch.Tensor.is_contiguous,
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
)
_CONTIGUOUS_INDEX = _ATTRIBUTE_GETTERS.index(torch.Tensor.is_contiguous)

BatchAttributes = list[list[Any]]  # by attribute getter, then by tensor of one batch


@dataclass(frozen=True, slots=True)
class Geometry:
    """Attributes of tensors, in batches. `strides`: only of tensors that are not contiguous; for all others the shape
    determines the strides, and is cheaper to read."""

    attributes: list[BatchAttributes]
    strides: list[tuple[int, ...]]


def geometry(tensors: Sequence[torch.Tensor]) -> Geometry:
    """The addresses, strides, shapes and dtypes of plain local tensors, in batches."""
    with torch._C.DisableTorchFunctionSubclass():
        answers = list(map(_read_attributes, _batches(tensors)))
        return Geometry(answers, _strides(tensors, answers))


def has_same_geometry(tensors: Sequence[torch.Tensor], before: Geometry) -> bool:
    """Whether geometry(tensors) == before. It keeps no lists: 80,000 more objects would start the garbage collector.
    Most of the time goes into waiting for memory. Reading one attribute of all tensors before the next takes 50 %
    longer."""
    with torch._C.DisableTorchFunctionSubclass():
        same = all(map(eq, map(_read_attributes, _batches(tensors)), before.attributes))
        return same and _strides(tensors, before.attributes) == before.strides


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    return (tensors[at : at + _BATCH_TENSORS] for at in range(0, len(tensors), _BATCH_TENSORS))


def _read_attributes(tensors: Sequence[torch.Tensor]) -> BatchAttributes:
    return [list(map(of, tensors)) for of in _ATTRIBUTE_GETTERS]


def _strides(tensors: Sequence[torch.Tensor], answers: Sequence[BatchAttributes]) -> list[tuple[int, ...]]:
    parts = ((part, asked[_CONTIGUOUS_INDEX]) for part, asked in zip(_batches(tensors), answers, strict=False))
    return [tensor.stride() for part, dense in parts if False in dense for tensor in compress(part, map(not_, dense))]
