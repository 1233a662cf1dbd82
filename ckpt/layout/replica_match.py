"""The replica match of a restore: finds tensors that were saved per rank, but are equal on all ranks.

After a restart with another mesh, the new ranks do not match the old ones. A per-rank tensor could then be restored
only by dropping the values of all other ranks. But per-rank tensors can be equal: replicas that differed once are saved
per rank from then on, and may have become equal again. Such tensors are restored as tensors of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.format.manifest import Manifest
from ckpt.types import ITEMSIZE, SMALL_BYTES

# Reads the raw bytes of frames, by number. All ranks call it with the same frames in the same order.
ReadFrames = Callable[[Collection[int]], Mapping[int, bytes | bytearray]]


@dataclass(frozen=True, slots=True)
class _Run:
    start: int
    length: int
    offset: int
    frame: int


@dataclass(frozen=True, slots=True)
class _Copy:
    """One rank's copy of a tensor. `signature`: dtype, shape and boxes, which must be equal for a match; None: not
    whole."""

    owner: str
    signature: Any
    runs: tuple[_Run, ...]


def match_replicas(manifest: Manifest, frames: ReadFrames) -> dict[str, str]:
    """The tensors that have equal bytes on all ranks that own one: name -> owner of the first copy.

    Large tensors have frames of their own and are compared by hash. Small tensors share frames with others, so their
    frames are read: first those of two ranks, then the others if these two are equal. Parts of a tensor never match."""
    copies = _copies(manifest)
    hashes = list(zip(manifest.frames["hash_hi"].tolist(), manifest.frames["hash_lo"].tolist(), strict=True))
    found: dict[str, str] = {}
    unsure: dict[str, list[_Copy]] = {}
    for name, held in copies.items():
        first, *others = held
        if any(other.signature != first.signature for other in others):
            continue
        told = {tuple((r.start, r.length, r.offset, hashes[r.frame]) for r in copy.runs) for copy in held}
        if len(told) == 1:
            found[name] = first.owner
        elif sum(run.length for run in first.runs) < SMALL_BYTES:
            unsure[name] = held
    for several in (slice(0, 2), slice(0, None)):
        read = frames({run.frame for held in unsure.values() for copy in held[several] for run in copy.runs})
        unsure = {name: held for name, held in unsure.items() if len({_bytes(c, read) for c in held[several]}) == 1}
    return found | {name: held[0].owner for name, held in unsure.items()}


def first_owners(manifest: Manifest, wanted: Collection[str]) -> dict[str, str]:
    """The first owner that saved a whole tensor of its own, by name, for the `wanted` names."""
    found: dict[str, str] = {}
    for spec in manifest.tensors:
        if spec.owner and "@" not in spec.owner and spec.name in wanted:
            found.setdefault(spec.name, spec.owner)
    return found


def _copies(manifest: Manifest) -> dict[str, list[_Copy]]:
    """The copies of tensors that have owners, by name; only names whose copies are all whole."""
    runs: dict[int, list[_Run]] = {}
    columns = (manifest.extents[key].tolist() for key in ("box", "start", "length", "offset", "frame"))
    for box, *run in zip(*columns, strict=True):
        runs.setdefault(box, []).append(_Run(*run))
    boxes: dict[int, list[int]] = {}
    for number, tensor in enumerate(manifest.tensor_by_box):
        boxes.setdefault(tensor, []).append(number)
    copies: dict[str, list[_Copy]] = {}
    for number, spec in enumerate(manifest.tensors):
        if spec.values or not spec.owner:
            continue
        at = boxes.get(number, [])
        whole = all(manifest.boxes[box][1].size * ITEMSIZE[spec.dtype] == _sum(runs.get(box, [])) for box in at)
        form = None if "@" in spec.owner or not whole else (spec.dtype, spec.shape, [manifest.boxes[b][1] for b in at])
        copies.setdefault(spec.name, []).append(
            _Copy(spec.owner, form, tuple(run for box in at for run in runs.get(box, [])))
        )
    return {name: held for name, held in copies.items() if all(copy.signature is not None for copy in held)}


def _sum(runs: list[_Run]) -> int:
    return sum(run.length for run in runs)


def _bytes(copy: _Copy, frames: Mapping[int, bytes | bytearray]) -> bytes:
    return b"".join(frames[run.frame][run.offset : run.offset + run.length] for run in copy.runs)
