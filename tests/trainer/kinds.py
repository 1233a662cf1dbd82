"""What a state may hold: objects of the user's own, and tensors that have no bytes of their own, none yet, or none that
are all that there is to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Holder:
    """Its state is its attributes."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class Wrapping(Tensor):
    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapping:
        return Tensor._make_wrapper_subclass(cls, inner.shape)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapping(*args)
        raise NotImplementedError


WITHOUT_STORAGE: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "wrapping": lambda: Wrapping(torch.ones(2)),
    "not initialised": torch.nn.UninitializedParameter,
    "meta": lambda: torch.ones(3, device="meta"),
}
