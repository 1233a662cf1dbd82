"""Hashes of live tensors: of what other ranks may hold too, and of frozen parameters that are not saved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from ckpt.errors import UsageError
from ckpt.threads import Tasks
from ckpt.trainer.state.shard import dense_bytes, live_parts, plain_view
from ckpt.trainer.state.state_nodes import NamedTensor

THREADS = 2
HASH_BLOCK_BYTES = 8 << 20
BASE_BYTES = 1 << 20  # of a frozen parameter, for the hash by which another base model is noticed


def hash_replicas(
    tensors: Sequence[Sequence[torch.Tensor]], may_have_replicas: Sequence[bool]
) -> npt.NDArray[np.uint64]:
    """The xxh3-128 of every box of a walk that other ranks may hold too, in the order of (entry, box): uint64, shape
    (boxes, 2), as (high, low). The rows of other boxes are 0. Boxes are read in blocks; no whole tensor is copied."""
    lines = zip(tensors, may_have_replicas, strict=True)
    boxes = [(tensor, replica) for line, replica in lines for tensor in line]
    jobs = [(row, tensor) for row, (tensor, replica) in enumerate(boxes) if replica]
    hashes = np.zeros((len(boxes), 2), np.uint64)

    def run(part: Sequence[tuple[int, torch.Tensor]]) -> None:
        for row, tensor in part:
            value = _hash_tensor(tensor)
            hashes[row] = value >> 64, value & 0xFFFFFFFFFFFFFFFF

    jobs.sort(key=lambda job: -job[1].nbytes)
    with Tasks("hash", pool_size=THREADS) as tasks:
        for done in [tasks.submit(run, jobs[first::THREADS]) for first in range(THREADS)]:
            done.result()
    return hashes


def _hash_tensor(tensor: torch.Tensor) -> int:
    whole = xxhash.xxh3_128()
    for block in _blocks(tensor):
        whole.update(dense_bytes(block.contiguous().cpu()).numpy().data)
    return int(whole.intdigest())


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor in row-major order, in parts of about HASH_BLOCK_BYTES."""
    if tensor.nbytes <= HASH_BLOCK_BYTES or tensor.ndim == 0:
        if tensor.numel():
            yield tensor
    elif tensor.nbytes // tensor.shape[0] > HASH_BLOCK_BYTES:
        for row in tensor:
            yield from _blocks(row)
    else:
        rows = max(1, HASH_BLOCK_BYTES * tensor.shape[0] // tensor.nbytes)
        for first in range(0, tensor.shape[0], rows):
            yield tensor[first : first + rows]


def hash_base(frozen: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """By name: the xxh3-128 of shape, dtype and the first MiB of each frozen parameter on this rank. Another base model
    differs there. A tensor that cannot be read as bytes is left out."""
    found: dict[str, str] = {}
    for name, whole in frozen.items():
        for part in NamedTensor(name, whole).parts():
            with contextlib.suppress(UsageError):
                local = plain_view(live_parts(part.tensor)[0], name).flatten()[: BASE_BYTES // whole.element_size()]
                told = f"{tuple(whole.shape)} {local.dtype} {_hash_tensor(local)}"
                found[part.name] = xxhash.xxh3_128_hexdigest(told.encode())
    return found
