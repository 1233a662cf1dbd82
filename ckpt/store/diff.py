"""The difference between two checkpoints: tensors by name, and values by path.

Parts whose frames have equal hashes and equal positions are equal, and are not read. Of the rest, a few frames are in
memory at a time, whatever the sharding of the two checkpoints.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpt.format import values
from ckpt.format.manifest import Manifest, TensorSpec
from ckpt.layout.reshard import Cut
from ckpt.store import trees
from ckpt.store.dtypes import INTEGERS, Bits, distances, to_float64
from ckpt.store.reader import FrameReader, load_values
from ckpt.store.tensor_stream import check_globs, choose_tensors, cuts_by_want, exported_name, slabs_of, stream
from ckpt.types import FRAME_BYTES

PATHS_MAX = 50
ORDER = " (order of keys)"


@dataclass(frozen=True, slots=True)
class Changed:
    """A tensor with equal shape and dtype in both checkpoints, but with other bits. `elements`: how many differ.
    `max_abs`, `rms`: of the differences, over all elements that are finite in both; None for dtypes that are not
    numbers. `nans`: counts of NaN in the first and in the second, only in the parts (of some MiB) that differ."""

    name: str
    elements: int
    size: int
    max_abs: float | None
    rms: float | None
    nans: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ChangedValue:
    """A value that differs. `path`: as the user writes it, such as "optim.param_groups[0].lr", or "rank=0 loader.at"
    for a value of one rank. `before`, `after`: as short texts; None if that checkpoint has no such value."""

    path: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class Diff:
    """The result of `diff`. `added`: tensors only in the second. `removed`: only in the first. `retyped`: (name,
    before, after) of tensors whose dtype or shape differs. `values`: at most 50 of the values that differ."""

    equal: tuple[str, ...]
    changed: tuple[Changed, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    retyped: tuple[tuple[str, str, str], ...]
    values: tuple[ChangedValue, ...]

    @property
    def is_equal(self) -> bool:
        return not (self.changed or self.added or self.removed or self.retyped or self.values)


def diff(
    first: FrameReader,
    second: FrameReader,
    only: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Diff:
    """Compares two checkpoints. `only`: globs on tensor names; if given, values are not compared. `progress(done,
    total)`: bytes of tensors. Errors: UsageError if a glob matches no tensor of either; DamagedData; StorageError."""
    ours = {exported_name(spec): spec for spec in choose_tensors(first.record.manifest, only)}
    theirs = {exported_name(spec): spec for spec in choose_tensors(second.record.manifest, only)}
    check_globs(only, ours.keys() | theirs.keys(), "the two checkpoints")
    both = [name for name in ours if name in theirs]
    retyped = [name for name in both if _kind(ours[name]) != _kind(theirs[name])]
    alike = [name for name in both if name not in set(retyped)]
    changed = _compare(first, second, [ours[name] for name in alike], progress)
    return Diff(
        equal=tuple(name for name in alike if name not in changed),
        changed=tuple(changed.values()),
        added=tuple(name for name in theirs if name not in ours),
        removed=tuple(name for name in ours if name not in theirs),
        retyped=tuple((name, _kind(ours[name]), _kind(theirs[name])) for name in retyped),
        values=() if only else _changed_values(first, second),
    )


def _kind(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


@dataclass(slots=True)
class _Sums:
    """Sums over the differences of one tensor. `squares`: of the differences divided by `max_abs`, so that the squares
    neither overflow nor vanish."""

    elements: int = 0
    max_abs: float = 0.0
    squares: float = 0.0
    nans: list[int] = field(default_factory=lambda: [0, 0])
    are_numbers: bool = True

    def add(self, a: Bits, b: Bits, dtype: str) -> None:
        raw = np.frombuffer(a.tobytes(), np.uint8) != np.frombuffer(b.tobytes(), np.uint8)
        self.elements += int(raw.reshape(-1, a.itemsize).any(axis=1).sum())
        x, y = to_float64(a, dtype), to_float64(b, dtype)
        if x is None or y is None:
            self.are_numbers = False
            return
        self.nans[0] += int(np.isnan(x).sum())
        self.nans[1] += int(np.isnan(y).sum())
        finite = np.isfinite(x) & np.isfinite(y)
        far = distances(a, b) if dtype in INTEGERS else distances(x[finite], y[finite])
        top = max(self.max_abs, float(far.max(initial=0.0)))
        if top:
            self.squares *= (self.max_abs / top) ** 2
            self.squares += float(np.square(far / top).sum())
            self.max_abs = top


def _compare(
    first: FrameReader, second: FrameReader, specs: Sequence[TensorSpec], progress: Callable[[int, int], None] | None
) -> dict[str, Changed]:
    """The changed tensors among `specs`, which both checkpoints have with equal shape and dtype."""
    wants = [want for spec in specs for want in slabs_of(spec, FRAME_BYTES)]
    ours = cuts_by_want(first.record.manifest, wants)
    theirs = cuts_by_want(second.record.manifest, wants)
    signs = _frame_signatures(first.record.manifest), _frame_signatures(second.record.manifest)
    differing = [
        want
        for want, a, b in zip(wants, ours, theirs, strict=True)
        if _slab_signature(a, signs[0]) != _slab_signature(b, signs[1])
    ]
    del ours, theirs, signs
    total = sum(want.box.size for want in wants)
    done = total - sum(want.box.size for want in differing)
    sums: dict[tuple[str, str], _Sums] = {}
    for (i, a), (_, b) in zip(stream(first, differing), stream(second, differing), strict=True):
        want = differing[i]
        if a.tobytes() != b.tobytes():
            sums.setdefault((want.name, want.owner), _Sums()).add(a, b, want.dtype)
        done += want.box.size
        if progress is not None:
            progress(done, total)
    by_key = {(spec.name, spec.owner): spec for spec in specs}
    return {exported_name(by_key[key]): _changed_tensor(by_key[key], each) for key, each in sums.items()}


def _changed_tensor(spec: TensorSpec, sums: _Sums) -> Changed:
    size = math.prod(spec.shape)
    return Changed(
        name=exported_name(spec),
        elements=sums.elements,
        size=size,
        max_abs=sums.max_abs if sums.are_numbers else None,
        rms=sums.max_abs * math.sqrt(sums.squares / size) if sums.are_numbers else None,
        nans=(sums.nans[0], sums.nans[1]),
    )


def _frame_signatures(manifest: Manifest) -> list[tuple[int, int, int]]:
    signs: list[tuple[int, int, int]] = manifest.frames[["hash_hi", "hash_lo", "length"]].tolist()
    return signs


def _slab_signature(
    by_frame: Mapping[int, Sequence[Cut]], signs: Sequence[tuple[int, int, int]]
) -> list[tuple[Any, ...]]:
    """What a slab consists of, in a form that two checkpoints can compare: its cuts, with the frames' hashes."""
    return sorted(
        (c.box_offset, c.shape, c.strides, c.offset, signs[f]) for f, its_cuts in by_frame.items() for c in its_cuts
    )


def _changed_values(first: FrameReader, second: FrameReader) -> tuple[ChangedValue, ...]:
    ours, theirs = load_values(first), load_values(second)
    pairs: list[tuple[str, Any, Any]] = [("", ours.shared, theirs.shared)]
    for coordinate in sorted({*ours.shared_by_coordinate, *theirs.shared_by_coordinate}):
        a = ours.shared_by_coordinate.get(coordinate, ours.shared)
        b = theirs.shared_by_coordinate.get(coordinate, theirs.shared)
        pairs.append((coordinate, a, b))
    for coordinate in sorted({*ours.own_by_coordinate, *theirs.own_by_coordinate}):
        pairs.append((coordinate, ours.own_by_coordinate.get(coordinate), theirs.own_by_coordinate.get(coordinate)))
    found = (_changed_value(owner, each) for owner, a, b in pairs for each in _differences(a, b, ()))
    return tuple(itertools.islice(found, PATHS_MAX))


def _changed_value(owner: str, found: _Difference) -> ChangedValue:
    before, after = (None if each is _ABSENT else trees.value_text(each) for each in (found.before, found.after))
    return ChangedValue(trees.path_text(owner, found.path), before, after)


def differences(a: Any, b: Any, path: str) -> Iterator[str]:
    """The paths at which two trees of values would be restored differently: other bits (so NaN equals itself), another
    type, other keys of a dict, or another order of its keys (which has a path of its own)."""
    for found in _differences(a, b, ()):
        yield path + "".join(_raw(each) for each in found.path)


_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Difference:
    """One difference. `before`, `after`: the parts that differ; _NOTHING if the tree has no such part."""

    path: tuple[trees.PathStep, ...]
    before: Any
    after: Any


def _differences(a: Any, b: Any, path: tuple[trees.PathStep, ...]) -> Iterator[_Difference]:
    if values.encode(a) == values.encode(b):
        return
    if type(a) is not type(b):
        yield _Difference(path, a, b)
        return
    for name in ("maxlen", "default_factory"):
        ours, theirs = getattr(a, name, None), getattr(b, name, None)
        if ours != theirs:
            yield _Difference((*path, (trees.PathKind.ATTRIBUTE, name)), ours, theirs)
    if isinstance(a, dict):
        yield from _dict_differences(a, b, path)
    elif isinstance(a, (list, tuple, deque)):
        for i, (x, y) in enumerate(itertools.zip_longest(a, b, fillvalue=_ABSENT)):
            here = (*path, (trees.PathKind.INDEX, i))
            if x is _ABSENT or y is _ABSENT:
                yield _Difference(here, x, y)
            else:
                yield from _differences(x, y, here)
    else:
        yield _Difference(path, a, b)


def _dict_differences(a: dict[Any, Any], b: dict[Any, Any], path: tuple[trees.PathStep, ...]) -> Iterator[_Difference]:
    ours, theirs = _keys_by_encoding(a), _keys_by_encoding(b)
    for code in [*ours, *(code for code in theirs if code not in ours)]:
        here = (*path, (trees.PathKind.KEY, ours.get(code, theirs.get(code))))
        if code in ours and code in theirs:
            yield from _differences(a[ours[code]], b[theirs[code]], here)
        else:
            x, y = a[ours[code]] if code in ours else _ABSENT, b[theirs[code]] if code in theirs else _ABSENT
            yield _Difference(here, x, y)
    if ours.keys() == theirs.keys() and list(ours) != list(theirs):
        yield _Difference((*path, (trees.PathKind.NOTE, ORDER)), [*ours.values()], [*theirs.values()])


def _raw(step: trees.PathStep) -> str:
    kind, value = step
    if kind is trees.PathKind.NOTE:
        return str(value)
    return f".{value}" if kind is trees.PathKind.ATTRIBUTE else f"[{value!r}]"


def _keys_by_encoding(tree: dict[Any, Any]) -> dict[bytes, Any]:
    """Each key by its encoding. There 1, True and 1.0 are three keys, and all NaN are one."""
    return {values.encode(key): key for key in tree}
