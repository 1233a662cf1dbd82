"""From a frame into a tensor: the last copy of a restore."""

from __future__ import annotations

import torch

from ckpt.errors import DamagedData
from ckpt.plan.reshard import Cut


def copy_cut(cut: Cut, frame: torch.Tensor, tensor: torch.Tensor) -> memoryview | None:
    """Copies what `cut` says of `frame` (uint8, one dimension: its raw bytes) into `tensor`, the destination of the
    cut's want, on any device and with any strides; gradients do not notice.

    Returns where the bytes now lie if the whole frame went to one run of host memory, so that its hash can be checked
    after the copy; else None. Errors: DamagedData for a cut that does not lie in the frame or the tensor.
    """
    itemsize = tensor.element_size()
    span = 1 + sum((n - 1) * s for n, s in zip(cut.shape, cut.strides, strict=True))
    fits = len(cut.shape) == len(cut.at) == tensor.ndim and all(
        a >= 0 and n > 0 and s >= 0 and a + n <= m
        for a, n, s, m in zip(cut.at, cut.shape, cut.strides, tensor.shape, strict=True)
    )
    if not fits or cut.offset < 0 or cut.offset + span * itemsize > frame.numel():
        raise DamagedData(f"frame {cut.frame}: a part of shape {cut.shape} at byte {cut.offset} is not in it")
    part = tensor.detach()
    for dim, (start, length) in enumerate(zip(cut.at, cut.shape, strict=True)):
        part = part.narrow(dim, start, length)
    whole = span * itemsize == frame.numel() and _is_row_major(cut)
    if whole and part.is_contiguous() and part.device.type == "cpu":
        landed = part.view(-1).view(torch.uint8)
        landed.copy_(frame)
        return landed.numpy().data
    source = frame[cut.offset : cut.offset + span * itemsize].view(tensor.dtype)
    part.copy_(source.as_strided(cut.shape, cut.strides))
    return None


def _is_row_major(cut: Cut) -> bool:
    expected = 1
    for length, stride in zip(reversed(cut.shape), reversed(cut.strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
