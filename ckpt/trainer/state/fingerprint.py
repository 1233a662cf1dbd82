"""Whether the structure of a state is still the one that was walked: compared at each save, in C loops over lists.

What is compared: which containers hold which objects under which keys, by identity; of every tensor its address,
strides, shape and dtype; of every DTensor its local part and placements. So it is noticed when `opt.load_state_dict`,
`p.data =`, a reassigned buffer or a replaced module moved the storage that the cached views look at. All that is
compared is kept alive, so that no new object can take an old one's identity, and no new storage an old one's address.
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
from ckpt.trainer.state.value_trees import Path, Tensor

_PARTS = itemgetter("_parameters", "_buffers", "_modules")
_PLACES = attrgetter("_local_tensor", "_spec")
_AT_ONCE = 256  # tensors that are asked all questions while they are in the processor's cache


class Fingerprint:
    """`modules`: every module; their parameters, buffers and children are watched. `optimizers`: their groups, which
    parameters have state, and the tensors among hyper-parameters. `dicts`: of tensors, by name. `distributed`: the
    DTensors. `live`: the local tensors that hold the bytes."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        dicts: Sequence[dict[Any, Any]],
        distributed: Sequence[Any],
        live: Sequence[torch.Tensor],
    ) -> None:
        self._homes = [vars(module) for module in modules]
        self._optimizers = optimizers
        self._dicts = [*chain.from_iterable(map(_PARTS, self._homes)), *dicts]
        self._distributed = distributed
        self._live = live
        self._hyper = self._hyper_tensors()
        self._objects = self._held()
        self._keys = self._names()
        self._geometry = geometry(live)

    def stale(self) -> bool:
        objects, hyper = self._held(), self._hyper_tensors()
        return (
            len(objects) != len(self._objects)
            or not all(map(is_, objects, self._objects))
            or self._names() != self._keys
            or len(hyper) != len(self._hyper)
            or not all(p == q and t is u for (p, t), (q, u) in zip(hyper, self._hyper, strict=True))
            or not same_geometry(self._live, self._geometry)
        )

    def _held(self) -> list[Any]:
        """Every object that is held where one was found."""
        found = [
            *chain.from_iterable(map(_PARTS, self._homes)),
            *chain.from_iterable(map(dict.values, self._dicts)),
            *chain.from_iterable(map(_PLACES, self._distributed)),
        ]
        for optimizer in self._optimizers:
            found += (optimizer.state, *optimizer.state, *optimizer.state.values(), optimizer.param_groups)
            for group in optimizer.param_groups:
                found += (group, group["params"], *group["params"])
        return found

    def _hyper_tensors(self) -> list[tuple[Path, Tensor]]:
        """The tensors among hyper-parameters, in tuples too (betas), with the group and the keys they are under."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        bare = [
            {k: value for k, value in group.items() if type(value) not in value_trees.PLAIN and k != "params"}
            for group in groups
        ]
        return value_trees.split(bare, "the hyper-parameters of an optimizer")[1]

    def _names(self) -> list[Any]:
        """The keys of every container, and where each container begins."""
        return [*map(len, self._dicts), *chain.from_iterable(self._dicts)]


_OF: tuple[Callable[[torch.Tensor], Any], ...] = (
    torch.Tensor.data_ptr,
    torch.Tensor.is_contiguous,
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
)
_DENSE = _OF.index(torch.Tensor.is_contiguous)

Answers = list[list[Any]]  # by question, of up to _AT_ONCE tensors


@dataclass(frozen=True, slots=True)
class Geometry:
    """`strides`: of those that are not contiguous. Shapes say those of the others, and cost less to ask for."""

    answers: list[Answers]
    strides: list[tuple[int, ...]]


def geometry(tensors: Sequence[torch.Tensor]) -> Geometry:
    """Addresses, strides, shapes and dtypes of plain local tensors, _AT_ONCE tensors at a time."""
    with torch._C.DisableTorchFunctionSubclass():
        answers = list(map(_asked, _parts(tensors)))
        return Geometry(answers, _strides(tensors, answers))


def same_geometry(tensors: Sequence[torch.Tensor], before: Geometry) -> bool:
    """geometry(tensors) == before, without keeping the lists: 80,000 objects more would wake the garbage collector.

    Most of the time is spent waiting for memory: question by question over all tensors takes half as long again."""
    with torch._C.DisableTorchFunctionSubclass():
        same = all(map(eq, map(_asked, _parts(tensors)), before.answers))
        return same and _strides(tensors, before.answers) == before.strides


def _parts(tensors: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    return (tensors[at : at + _AT_ONCE] for at in range(0, len(tensors), _AT_ONCE))


def _asked(tensors: Sequence[torch.Tensor]) -> Answers:
    return [list(map(of, tensors)) for of in _OF]


def _strides(tensors: Sequence[torch.Tensor], answers: Sequence[Answers]) -> list[tuple[int, ...]]:
    parts = ((part, asked[_DENSE]) for part, asked in zip(_parts(tensors), answers, strict=False))
    return [tensor.stride() for part, dense in parts if False in dense for tensor in compress(part, map(not_, dense))]
