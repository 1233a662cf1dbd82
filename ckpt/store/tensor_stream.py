"""Tensors of a checkpoint as a stream of slabs: parts of about 8 MiB, each contiguous in its tensor, in order.

Memory stays bounded for any sharding. It holds what was read ahead (AHEAD_BYTES, and a slab), what is fetched and not
yet decoded (GETS times GET_BYTES), the current slab, and the frames that later slabs need. No later slab needs one if
the tensors were whole, or sharded by rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np

from ckpt.errors import UsageError
from ckpt.format.manifest import Manifest, TensorSpec
from ckpt.layout.reshard import Cut, Want, apply_cuts, plan_cuts
from ckpt.store.dtypes import Bits, bits_dtype
from ckpt.store.reader import FrameReader
from ckpt.types import ITEMSIZE, Box

SLAB_BYTES = 8 << 20
AHEAD_BYTES = 16 << 20  # of frames, fetched one batch after the other
# Gets at once, and the size of each (about a frame). Their memory comes on top.
GETS, GET_BYTES = 4, 4 << 20
HELD_BYTES_MAX = 256 << 20  # of frames kept for later slabs; beyond it, some are read again


def exported_name(item: TensorSpec | Want) -> str:
    """A tensor's name in an export. A rank's own tensor has its coordinate behind the name."""
    return f"{item.name}@{item.owner}" if item.owner else item.name


def choose_tensors(manifest: Manifest, only: Sequence[str] = ()) -> list[TensorSpec]:
    """The tensors (no values) whose exported name matches one of the globs, in order of name; all without a glob."""
    specs = {exported_name(spec): spec for spec in manifest.tensors if not spec.values}
    return [specs[name] for name in match_names(specs, only)]


def match_names(names: Iterable[str], only: Sequence[str]) -> list[str]:
    """The names that match one of the globs, in order; all without a glob."""
    return [name for name in names if not only or any(fnmatchcase(name, glob) for glob in only)]


def check_globs(only: Sequence[str], names: Collection[str], of: str) -> None:
    """Checks that each glob matches a name. A mistyped one beside others would silently leave out tensors. Errors:
    UsageError names the globs without a match."""
    vain = [glob for glob in only if not any(fnmatchcase(name, glob) for name in names)]
    if vain:
        raise UsageError(f"no tensor of {of} matches {', '.join(vain)}; `ckpt show --tensors` lists their names")


def slabs_of(spec: TensorSpec, slab_bytes: int = SLAB_BYTES) -> Iterator[Want]:
    """The tensor in non-empty parts, in row-major order."""
    for box in _split_box((), spec.shape, max(1, slab_bytes // ITEMSIZE[spec.dtype])):
        yield Want(spec.name, spec.owner, spec.dtype, spec.shape, box)


def stream(reader: FrameReader, wants: Sequence[Want]) -> Iterator[tuple[int, Bits]]:
    """(index of the want, its bits) for each want, in order. The bits are an array of the box's shape and
    dtypes.bits_dtype. Errors: StateMismatch if the checkpoint lacks a want; else as FrameReader.read."""
    reader = FrameReader(reader.backend, reader.record, reader.patience, gets=GETS, get_bytes=GET_BYTES)
    lengths = reader.record.manifest.frames["length"]
    per_want = cuts_by_want(reader.record.manifest, wants)
    left = Counter(frame for needed in per_want for frame in needed)
    held: dict[int, bytearray] = {}
    done = 0
    while done < len(wants):
        missing: dict[int, None] = {}
        stop, ahead_bytes = done, 0
        while stop < len(wants) and (stop == done or ahead_bytes < AHEAD_BYTES):
            new = [frame for frame in per_want[stop] if frame not in held and frame not in missing]
            missing.update(dict.fromkeys(new))
            ahead_bytes += sum(int(lengths[frame]) for frame in new) + 1024
            stop += 1
        held.update(reader.read_bytes(missing))
        for i in range(done, stop):
            want = wants[i]
            bits = np.empty(want.box.shape, bits_dtype(want.dtype))
            for frame, its_cuts in per_want[i].items():
                apply_cuts(its_cuts, frame, np.frombuffer(held[frame], np.uint8), [bits])
                left[frame] -= 1
            for frame in per_want[i]:
                if left[frame] == 0:
                    held.pop(frame, None)
            yield i, bits
        done = stop
        excess = sum(map(len, held.values())) - HELD_BYTES_MAX
        for frame in list(held):
            if excess <= 0:
                break
            excess -= len(held.pop(frame))


def cuts_by_want(manifest: Manifest, wants: Sequence[Want]) -> list[dict[int, list[Cut]]]:
    """For each want: its cuts by frame, each with `want` 0."""
    found: list[dict[int, list[Cut]]] = [{} for _ in wants]
    for cut in plan_cuts(manifest, wants):
        found[cut.want].setdefault(cut.frame, []).append(replace(cut, want=0))
    return found


def _split_box(at: tuple[int, ...], shape: tuple[int, ...], elements_max: int) -> Iterator[Box]:
    """The parts of a box that is one element, `at`, in the leading dimensions, and `shape` in the rest."""
    size = math.prod(shape)
    ones = (1,) * len(at)
    if size == 0:
        return
    if size <= elements_max or not shape:
        yield Box((*at, *(0,) * len(shape)), (*ones, *shape))
    elif (rows := elements_max // (size // shape[0])) > 0:
        for start in range(0, shape[0], rows):
            box = (min(rows, shape[0] - start), *shape[1:])
            yield Box((*at, start, *(0,) * (len(shape) - 1)), (*ones, *box))
    else:
        for i in range(shape[0]):
            yield from _split_box((*at, i), shape[1:], elements_max)
