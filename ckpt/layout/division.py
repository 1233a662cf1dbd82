"""Who stages what: every rank's share of what the ranks hold together.

What several ranks hold with equal bytes is divided among them; everything else each rank stages whole, which is always
right and only costs bytes. Guarantees of `divide`:
- cover: every byte of every declared box is staged by at least one rank that declares it;
- equal: no rank's bytes can be lowered by giving them to another that holds them too, but for one frame at each end
  of its runs;
- sticky: a run ends where a rank's quota of the cumulated bytes ends, so that b bytes more or fewer somewhere move at
  most about b bytes across each boundary;
- pure: equal input gives equal shares, in whatever order sets and dicts happen to be.
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
from ckpt.layout.layout import Entry, Layout, Part, Share, are_apart, covers
from ckpt.types import ITEMSIZE, Box

Key = tuple[str, str, Box]  # name, owner, box
Hashes = npt.NDArray[np.uint64]  # (boxes of a layout in order of (entry, box), 2): xxh3-128; (0, 0): not hashed

BALANCE_ROUNDS = 16  # one is enough where the groups of holders are nested or apart


def undivided(layout: Layout) -> Share:
    """The safe path: all that the rank holds."""
    return tuple(
        Part(entry, box, 0, size) for entry, box, size in _boxes(layout) if size
    )  # an empty box has no bytes to stage


def divide(layouts: Sequence[Layout], agreed: Collection[Key], frame_bytes: int) -> list[Share]:
    """Every rank's share. `agreed`: the boxes whose bytes are known equal on all ranks that declare them.

    An agreed box is divided among exactly its declarers: it is cut at multiples of `frame_bytes` into at most one run
    a rank, so that a smaller one goes whole to one of them. Takes about 4 us per box that a rank declares.
    """
    parts: list[list[tuple[int, int, int, int]]] = [[] for _ in layouts]
    loads = [0] * len(layouts)
    common: dict[Key, _AgreedBox] = {}
    seen: dict[int, _Sorted] = {}
    for rank, layout in enumerate(layouts):
        if (known := seen.get(id(layout))) is not None:  # what this loop would find again, without its look-ups
            for divided, e, b in known.shared:
                divided.holders.append((rank, e, b))
            parts[rank] += known.alone
            loads[rank] += known.alone_bytes
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
                    found.shared.append((item, e, b))
                    continue
            elif item.entry.dtype == entry.dtype and item.entry.shape == entry.shape:
                item.holders.append((rank, e, b))
                found.shared.append((item, e, b))
                continue
            found.alone.append((e, b, 0, size))
            found.alone_bytes += size
        found.alone = list(found.alone)  # the rank's own list grows with its part of what is shared
        loads[rank] += found.alone_bytes

    groups: dict[tuple[int, ...], list[_AgreedBox]] = defaultdict(list)
    for item in common.values():  # those of one group come from its lowest rank's layout, hence in canonical order
        groups[tuple(rank for rank, _, _ in item.holders)].append(item)
    order = sorted(groups, key=lambda ranks: (len(ranks), ranks))
    quotas = _quotas(loads, [(ranks, sum(item.size for item in groups[ranks])) for ranks in order])
    for ranks, quota in zip(order, quotas, strict=True):
        for rank, part in _cut(groups[ranks], quota, frame_bytes):
            parts[rank].append(part)
    return [tuple(Part(*part) for part in sorted(share)) for share in parts]


def agree(layouts: Sequence[Layout], hashes: Sequence[Hashes]) -> tuple[set[Key], set[tuple[str, str]]]:
    """What the ranks' hashes say: (boxes equal on all, at least two, ranks that declare them; tensors that differ).

    A tensor (name, owner) differs where two ranks declare another dtype or global shape, or hashed other bytes for
    one box. A row (0, 0) is a box that its rank did not hash: it is neither agreed nor does it differ; an empty array
    stands for such rows.
    Errors: UsageError when a rank's hashes are not one row per box.
    """
    kinds: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    first: dict[Key, list[int]] = {}
    equal: dict[Key, bool] = {}
    differing: set[tuple[str, str]] = set()
    said: list[tuple[Layout, Hashes]] = []
    again: set[int] = set()
    for rank, (layout, array) in enumerate(zip(layouts, hashes, strict=True)):
        count = sum(len(entry.boxes) for entry in layout.entries)
        if array.size and array.shape != (count, 2):
            raise UsageError(
                f"rank {rank} declares {count} boxes and sent hashes of shape {array.shape}, not ({count}, 2)"
            )
        same = next((n for n, (one, its) in enumerate(said) if one is layout and np.array_equal(its, array)), None)
        if same in again:
            continue  # a third rank that says the same adds nothing
        if same is not None:
            again.add(same)
        else:
            said.append((layout, array))
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
                        first[key] = row  # so that a third rank is compared with a hash, not with its absence
    return {key for key, same in equal.items() if same and key[:2] not in differing}, differing


def with_holes(layouts: Sequence[Layout]) -> list[str]:
    """The tensors of the job of which some part is held by no rank, sorted: no checkpoint of them would be whole. Not
    those that are saved per rank, as where boxes overlap in part, or ranks give one name different shapes."""
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
        if not (others or covers(parts, shape)) and are_apart(parts):
            found.append(name)
    return sorted(found)


def owned(layout: Layout, names: Collection[str], coordinate: str) -> Layout:
    """The layout with the job's tensors of these names made the rank's own: itself where there are none. Entries keep
    their places."""
    if not names:
        return layout
    return Layout(
        tuple(
            replace(entry, owner=coordinate) if entry.owner == "" and entry.name in names else entry
            for entry in layout.entries
        )
    )


def division_id(layouts: Sequence[Layout], shares: Sequence[Share]) -> str:
    """16 hex digits that name a division: other layouts or shares have another one."""
    digest = hashlib.blake2b(digest_size=8)
    told: dict[int, tuple[bytes, bytes]] = {}
    for layout, share in zip(layouts, shares, strict=True):
        if id(layout) not in told:
            told[id(layout)] = _told(layout)
        words, numbers = told[id(layout)]
        digest.update(words)
        digest.update(np.array([len(layout.entries), len(share)], "<u8").tobytes())
        digest.update(numbers)
        digest.update(np.array([(part.entry, part.box, part.start, part.stop) for part in share], "<u8").tobytes())
    return digest.hexdigest()


def _told(layout: Layout) -> tuple[bytes, bytes]:
    """All that a layout says, as words and as numbers."""
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
    """An agreed box: one entry that declares it, its bytes, and where each of its holders lists it."""

    entry: Entry
    size: int
    holders: list[tuple[int, int, int]]  # rank, entry, box


@dataclass(slots=True)
class _Sorted:
    """One layout's boxes: those that are divided among their holders, and what each rank that holds it stages alone."""

    shared: list[tuple[_AgreedBox, int, int]]  # item, entry, box
    alone: list[tuple[int, int, int, int]]
    alone_bytes: int = 0


def _boxes(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """(entry, box, bytes) of each box."""
    for e, entry in enumerate(layout.entries):
        itemsize = ITEMSIZE[entry.dtype]
        for b, box in enumerate(entry.boxes):
            yield e, b, box.size * itemsize


def _quotas(loads: Sequence[int], groups: Sequence[tuple[tuple[int, ...], int]]) -> list[list[int]]:
    """For each group (its ranks, its bytes): how many of its bytes each of its ranks takes, so that all ranks'
    loads become as equal as they can. `loads`: what each rank stages alone.

    Each group in turn is poured over its ranks like water while the others stand still; repeated, this finds the least
    sum of squares (block coordinate descent on a convex function).
    """
    level = list(loads)
    quotas = [[0] * len(ranks) for ranks, _ in groups]
    for _ in range(BALANCE_ROUNDS):
        before = [list(quota) for quota in quotas]
        for (ranks, size), quota in zip(groups, quotas, strict=True):
            for i, rank in enumerate(ranks):
                level[rank] -= quota[i]
            quota[:] = _pour(size, [level[rank] for rank in ranks])
            for i, rank in enumerate(ranks):
                level[rank] += quota[i]
        if quotas == before:
            break
    return quotas


def _pour(size: int, levels: Sequence[int]) -> list[int]:
    """`size` in whole numbers over `levels`, lowest first, until the surface is even."""
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
    """A group's items, laid end to end and cut where the quotas end: (rank, (entry, box, start, stop)) each.

    A frame that a boundary falls into goes to the side that has its middle; so does a box smaller than a frame.
    """
    ends = np.cumsum(np.array(quota, np.int64))
    sizes = np.array([item.size for item in items], np.int64)
    begins = np.cumsum(sizes) - sizes
    holders = np.searchsorted(ends, begins, side="right")  # of each item's first byte
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
    """The end of the last frame of a box of `size` bytes whose middle lies before byte `at`; 0 if there is none."""
    last = (size - 1) // frame_bytes * frame_bytes
    if 2 * at >= last + size:
        return size
    return (2 * at + frame_bytes) // (2 * frame_bytes) * frame_bytes
