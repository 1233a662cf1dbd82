"""States for the tests of torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import io

import torch

from ckpt.types import ITEMSIZE


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def mixed_state() -> dict[str, object]:
    """All dtypes, shapes without elements or dimensions, and memory that is not row-major."""
    torch.manual_seed(0)
    raw = torch.randint(0, 256, (4, 16), dtype=torch.uint8)
    dtypes = {name: getattr(torch, name) for name in ITEMSIZE if hasattr(torch, name) and name != "bool"}
    return {
        "kinds": {name: raw.view(dtype) for name, dtype in dtypes.items()},
        "bool": raw > 127,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(5, 7).t(),
        "strided": torch.arange(100.0)[3:50:2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "large": torch.randn(700, 1000),  # some MiB: frames of its own
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "blob": io.BytesIO(b"opaque"),
        "list": [1, {"x": torch.tensor(1), "text": "a"}, None],
    }


def zeros(state: dict[str, object]) -> dict[str, object]:
    """The same state with other values."""

    def blank(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return torch.zeros(*value.shape, value.itemsize, dtype=torch.uint8).view(value.dtype).view(value.shape)
        if isinstance(value, dict):
            return {key: blank(each) for key, each in value.items()}
        return [blank(each) for each in value] if isinstance(value, list) else "other"

    return {key: blank(value) for key, value in state.items()}


def flat(state: object, path: str = "") -> dict[str, object]:
    pairs = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else None
    if pairs is None:
        if isinstance(state, torch.Tensor):
            return {path: (state.dtype, tuple(state.shape), bits(state.detach().resolve_conj()))}
        return {path: state.getvalue() if isinstance(state, io.BytesIO) else state}
    return {name: each for key, value in pairs for name, each in flat(value, f"{path}.{key}").items()}
