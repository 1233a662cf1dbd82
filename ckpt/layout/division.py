"""The division: decides which rank stages which part of the tensors that several ranks hold.

Boxes whose bytes are equal on several ranks are divided among these ranks. Each rank stages all its other boxes whole,
which is always correct and only costs bytes. Guarantees of `divide`:
- cover: at least one rank that declares a box stages each byte of it;
- balanced: no bytes can move to a less loaded rank that holds them too, except for one frame at each end of a run;
- stable: runs end where a rank's quota of the cumulated bytes ends. So a change of b bytes somewhere moves at most
  about b bytes across each boundary;
- pure: equal input gives equal shares, whatever the order of sets and dicts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ckpt.errors import UsageError
from ckpt.layout.layout import Entry, Layout, Part, Share, are_disjoint, covers
from ckpt.types import ITEMSIZE, Box

Key = tuple[str, str, Box]  # name, owner, box
# The xxh3-128 of each box of a layout, shape (boxes in order of (entry, box), 2). A row (0, 0): not hashed.
Hashes = npt.NDArray[np.uint64]

BALANCE_ROUNDS = 16  # one round suffices if the groups of holders are nested or disjoint


def whole_share(layout: Layout) -> Share:
    """The share of a rank that stages everything it holds: the safe path. Empty boxes are left out."""
    return tuple(Part(entry, box, 0, size) for entry, box, size in _boxes(layout) if size)


def divide(layouts: Sequence[Layout], agreed: Collection[Key], frame_bytes: int) -> list[Share]:
    """The share of every rank. `agreed`: the boxes whose bytes are known to be equal on all ranks that declare them.

    An agreed box is divided among exactly the ranks that declare it. It is cut at multiples of `frame_bytes` into at
    most one run per rank, so a smaller box goes whole to one rank. Takes about 4 us per declared box and rank.
    """
    parts: list[list[tuple[int, int, int, int]]] = [[] for _ in layouts]
    loads = [0] * len(layouts)
    common: dict[Key, _AgreedBox] = {}
    seen: dict[int, _Sorted] = {}
    for rank, layout in enumerate(layouts):
        # Ranks that share a layout object reuse its sorted boxes.
        if (known := seen.get(id(layout))) is not None:
            for divided, e, b in known.shared_boxes:
                divided.holders.append((rank, e, b))
            parts[rank] += known.own_parts
            loads[rank] += known.own_bytes
            continue
        found = seen[id(layout)] = _Sorted([], parts[rank])
        for e, b, size in _boxes(layout):
            entry = layout.entries[e]
            key = (entry.name, entry.owner, entry.boxes[b])
            item = common.get(key)
            if item is None:
                if not size:
                    continue
                if key in agreed:
                    item = common[key] = _AgreedBox(entry, size, [(rank, e, b)])
                    found.shared_boxes.append((item, e, b))
                    continue
            elif item.entry.dtype == entry.dtype and item.entry.shape == entry.shape:
                item.holders.append((rank, e, b))
                found.shared_boxes.append((item, e, b))
                continue
            found.own_parts.append((e, b, 0, size))
            found.own_bytes += size
        # A copy, since the rank's own list gets the rank's parts of agreed boxes later.
        found.own_parts = list(found.own_parts)
        loads[rank] += found.own_bytes

    groups: dict[tuple[int, ...], list[_AgreedBox]] = defaultdict(list)
    # The boxes of one group come from the layout of its lowest rank, so they are in canonical order.
    for item in common.values():
        groups[tuple(rank for rank, _, _ in item.holders)].append(item)
    order = sorted(groups, key=lambda ranks: (len(ranks), ranks))
    quotas = _quotas(loads, [(ranks, sum(item.size for item in groups[ranks])) for ranks in order])
    for ranks, quota in zip(order, quotas, strict=True):
        for rank, part in _cut(groups[ranks], quota, frame_bytes):
            parts[rank].append(part)
    return [tuple(Part(*part) for part in sorted(share)) for share in parts]


def find_agreed(layouts: Sequence[Layout], hashes: Sequence[Hashes]) -> tuple[set[Key], set[tuple[str, str]]]:
    """(agreed boxes, differing tensors), from the ranks' hashes.

    A box is agreed if at least two ranks declare it and its bytes are equal on all of them. A tensor (name, owner)
    differs if two ranks declare different dtypes or global shapes for it, or have different hashes for one box. A row
    (0, 0) means that the rank did not hash the box; such a box is not agreed, and does not make its tensor differ. An
    empty array means (0, 0) for all boxes. Errors: UsageError if a rank's hashes are not one row per box.
    """
    kinds: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    first: dict[Key, list[int]] = {}
    equal: dict[Key, bool] = {}
    differing: set[tuple[str, str]] = set()
    said: defaultdict[tuple[int, bytes], int] = defaultdict(int)  # ranks with that layout object and those hashes
    for rank, (layout, array) in enumerate(zip(layouts, hashes, strict=True)):
        count = sum(len(entry.boxes) for entry in layout.entries)
        if array.size and array.shape != (count, 2):
            raise UsageError(
                f"rank {rank} declares {count} boxes, so its hashes need the shape ({count}, 2), not {array.shape}"
            )
        said[id(layout), array.tobytes()] += 1
        if said[id(layout), array.tobytes()] > 2:
            continue  # a third rank with the same hashes changes nothing
        rows: Iterator[list[int]] = iter(array.tolist() if array.size else itertools.repeat([0, 0]))
        for entry in layout.entries:
            tensor = (entry.name, entry.owner)
            kind = (entry.dtype, entry.shape)
            if kinds.setdefault(tensor, kind) != kind:
                differing.add(tensor)
            for box in entry.boxes:
                key = (entry.name, entry.owner, box)
                row = next(rows)
                known = first.setdefault(key, row)
                if known is row:
                    continue
                if known == row:
                    equal[key] = equal.get(key, True) and row != [0, 0]
                else:
                    equal[key] = False
                    if row != [0, 0] and known != [0, 0]:
                        differing.add(tensor)
                    elif known == [0, 0]:
                        # A third rank is then compared with a hash.
                        first[key] = row
    return {key for key, same in equal.items() if same and key[:2] not in differing}, differing


def incomplete_tensors(layouts: Sequence[Layout]) -> list[str]:
    """The sorted names of the job's tensors that have a part which no rank holds. A checkpoint could not be complete.
    Tensors that are saved per rank are left out: their boxes overlap in part, or ranks declare different shapes."""
    kinds: defaultdict[str, set[tuple[str, tuple[int, ...]]]] = defaultdict(set)
    boxes: defaultdict[str, set[Box]] = defaultdict(set)
    for layout in {id(layout): layout for layout in layouts}.values():
        for entry in layout.entries:
            if not entry.owner:
                kinds[entry.name].add((entry.dtype, entry.shape))
                boxes[entry.name].update(entry.boxes)
    found = []
    for name, held in boxes.items():
        (_, shape), *others = kinds[name]
        parts = [box for box in held if box.size]
        if not (others or covers(parts, shape)) and are_disjoint(parts):
            found.append(name)
    return sorted(found)


def make_owned(layout: Layout, names: Collection[str], coordinate: str) -> Layout:
    """The layout, with the job's tensors of these names changed into tensors that the rank owns. Entries keep their
    places. Returns `layout` itself if `names` is empty."""
    if not names:
        return layout
    return Layout(
        tuple(
            replace(entry, owner=coordinate) if entry.owner == "" and entry.name in names else entry
            for entry in layout.entries
        )
    )


def division_id(layouts: Sequence[Layout], shares: Sequence[Share]) -> str:
    """The id of a division: 16 hex digits, a hash of all layouts and shares."""
    digest = hashlib.blake2b(digest_size=8)
    told: dict[int, tuple[bytes, bytes]] = {}
    for layout, share in zip(layouts, shares, strict=True):
        if id(layout) not in told:
            told[id(layout)] = _layout_bytes(layout)
        words, numbers = told[id(layout)]
        digest.update(words)
        digest.update(np.array([len(layout.entries), len(share)], "<u8").tobytes())
        digest.update(numbers)
        digest.update(np.array([(part.entry, part.box, part.start, part.stop) for part in share], "<u8").tobytes())
    return digest.hexdigest()


def _layout_bytes(layout: Layout) -> tuple[bytes, bytes]:
    """The whole content of a layout as bytes: (its texts, its numbers)."""
    words: list[str] = []
    numbers: list[int] = []
    for entry in layout.entries:
        words += (entry.name, entry.owner, entry.dtype)
        numbers += (len(entry.shape), len(entry.boxes), *entry.shape)
        for box in entry.boxes:
            numbers += box.offset
            numbers += box.shape
    return json.dumps(words).encode(), np.array(numbers, "<u8").tobytes()


@dataclass(slots=True)
class _AgreedBox:
    """An agreed box. `entry`: one entry that declares it. `size`: its bytes. `holders`: where each holder lists it."""

    entry: Entry
    size: int
    holders: list[tuple[int, int, int]]  # rank, entry, box


@dataclass(slots=True)
class _Sorted:
    """The boxes of one layout. `shared_boxes`: agreed boxes, which are divided among their holders. `own_parts`: the
    parts that each rank with this layout stages by itself."""

    shared_boxes: list[tuple[_AgreedBox, int, int]]  # item, entry, box
    own_parts: list[tuple[int, int, int, int]]
    own_bytes: int = 0


def _boxes(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """(entry, box, bytes) of each box."""
    for e, entry in enumerate(layout.entries):
        itemsize = ITEMSIZE[entry.dtype]
        for b, box in enumerate(entry.boxes):
            yield e, b, box.size * itemsize


def _quotas(loads: Sequence[int], groups: Sequence[tuple[tuple[int, ...], int]]) -> list[list[int]]:
    """For each group (its ranks, its bytes): how many bytes each of its ranks takes, so that all loads become as equal
    as possible. `loads`: the bytes that each rank stages alone.

    Each group in turn is poured over its ranks like water, while the other groups stay fixed. Repeated, this finds the
    least sum of squares (block coordinate descent on a convex function).
    """
    level = list(loads)
    quotas = [[0] * len(ranks) for ranks, _ in groups]
    for _ in range(BALANCE_ROUNDS):
        before = [list(quota) for quota in quotas]
        for (ranks, size), quota in zip(groups, quotas, strict=True):
            for i, rank in enumerate(ranks):
                level[rank] -= quota[i]
            quota[:] = _level_quota(size, [level[rank] for rank in ranks])
            for i, rank in enumerate(ranks):
                level[rank] += quota[i]
        if quotas == before:
            break
    return quotas


def _level_quota(size: int, levels: Sequence[int]) -> list[int]:
    """How much of `size` each level gets, in whole numbers, if it is poured over `levels` until the surface is even."""
    order = sorted(range(len(levels)), key=lambda i: (levels[i], i))
    total, wet = size, 0
    for i in order:
        if wet and levels[i] * wet >= total:
            break
        total += levels[i]
        wet += 1
    surface, rest = divmod(total, wet)
    quota = [0] * len(levels)
    for place, i in enumerate(order[:wet]):
        quota[i] = surface + (place < rest) - levels[i]
    return quota


def _cut(
    items: Sequence[_AgreedBox], quota: Sequence[int], frame_bytes: int
) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
    """The parts of a group's boxes, as (rank, (entry, box, start, stop)). The boxes are laid end to end and cut where
    the quotas end.

    If a boundary falls into a frame, or into a box smaller than a frame, the side that has its middle gets all of it.
    """
    ends = np.cumsum(np.array(quota, np.int64))
    sizes = np.array([item.size for item in items], np.int64)
    begins = np.cumsum(sizes) - sizes
    holders = np.searchsorted(ends, begins, side="right")  # the holder of each box's first byte
    bounds = ends.tolist()
    for item, begin, k in zip(items, begins.tolist(), holders.tolist(), strict=True):
        start = 0
        while start < item.size:
            stop = _frame_end(bounds[k] - begin, item.size, frame_bytes)
            if stop > start:
                rank, e, b = item.holders[k]
                yield rank, (e, b, start, stop)
                start = stop
            k += 1


def _frame_end(at: int, size: int, frame_bytes: int) -> int:
    """The end of the last frame whose middle lies before byte `at`, in a box of `size` bytes; 0 if there is none."""
    last = (size - 1) // frame_bytes * frame_bytes
    if 2 * at >= last + size:
        return size
    return (2 * at + frame_bytes) // (2 * frame_bytes) * frame_bytes
