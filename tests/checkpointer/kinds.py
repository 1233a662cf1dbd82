"""Tensors of every kind that can be saved, and their bits."""

from __future__ import annotations

import torch

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),  # torch 2.6 has none
    *(torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
]


def empty_tensors() -> dict[str, torch.Tensor]:
    """One of each dtype and shape, and some that are not contiguous."""
    shapes: dict[str, tuple[int, ...]] = {"zero_d": (), "empty": (0, 3), "odd": (3, 5), "large": (1000, 33)}
    found = {f"{kind}"[6:] + f".{name}": torch.zeros(s, dtype=kind) for kind in DTYPES for name, s in shapes.items()}
    found["transposed"] = torch.zeros(7, 5).t()
    found["channels_last"] = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    found["stepped"] = torch.zeros(10, 6, dtype=torch.bfloat16)[::2, 1::2]
    found["offset"] = torch.zeros(20, dtype=torch.float8_e5m2)[3:9]
    return found


def shuffle_bits(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Any bits there may be, NaNs of every payload among them."""
    top = 2 if tensor.dtype is torch.bool else 256
    size = tensor.numel() * tensor.itemsize
    raw = torch.randint(0, top, (size,), dtype=torch.uint8, generator=generator)
    if size:
        tensor.copy_(raw.view(tensor.dtype).reshape(tensor.shape))


def bits_of(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    flat = tensor.detach().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return str(tensor.dtype), tuple(tensor.shape), raw
