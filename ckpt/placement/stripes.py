"""Where parity lies within one group of nodes, by bytes: who keeps how much, over which parts of the others' data.

The group shares an axis of L bytes. Node j keeps parity for q_j bytes of the axis, and its own s_j bytes lie on the
axis where it keeps none. Each byte of the axis has exactly p keepers (P, and with p = 2 also Q), so that any p nodes
may be lost: a byte of the axis that loses a data member or a keeper loses only one of its parts to each lost node.

    sum of q_j = p L,    q_j <= room_j,    q_j + s_j <= L

The least L for which such q exist takes the least memory, p L in all. Equal nodes get L = s n / (n - p) and
q = s p / (n - p), which is what rotating the parity over them gives; nodes without data (memory-only ones, or the
zero members of a short group) take parity first; a node with little room takes little. The intervals come from
McNaughton's wrap-around rule (1959, "Scheduling with deadlines and loss functions"): the q_j laid end to end over p
rows of length L put no node twice at one place, since no q_j exceeds L; and they cut the axis into at most n stripes.

Sizes are in whole units of CUT_BYTES. Everything is a pure function of the order and numbers given.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.errors import UsageError

CUT_BYTES = 4096  # data is cut at multiples of it: pages, and whole words for the codec
PARITY_MAX = 2


@dataclass(frozen=True, slots=True)
class StripePart:
    """Bytes [start, stop) of a member's data, which lie at the beginning of the stripe. `member`: index."""

    member: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Stripe:
    """`length` bytes of parity at each of `holders` (indices of members: who keeps P, then who keeps Q), made of
    `parts`, at most one a member, each as if followed by zeros up to `length`. A holder has no part."""

    length: int
    holders: tuple[int, ...]
    parts: tuple[StripePart, ...]


def stripes(sizes: Sequence[int], rooms: Sequence[int], parity: int) -> tuple[Stripe, ...] | None:
    """The stripes of a group whose members have `sizes` bytes of data and keep parity of at most `rooms` bytes.

    Each byte of every member lies in exactly one stripe; any `parity` members may be lost. A stripe's length may
    exceed its longest part by less than CUT_BYTES. () where there is no data; None where the rooms do not suffice or
    there are not more members than `parity`.
    Errors: UsageError for a negative number, or a parity that is not 1 or 2.
    """
    if len(sizes) != len(rooms) or any(number < 0 for number in (*sizes, *rooms)):
        raise UsageError("the sizes and rooms of a group are one number of bytes for each member, at least 0")
    if not 1 <= parity <= PARITY_MAX:
        raise UsageError(f"parity={parity}: 1 or {PARITY_MAX}")
    units = [-(-size // CUT_BYTES) for size in sizes]
    caps = [room // CUT_BYTES for room in rooms]
    if not any(units):
        return ()
    length = _least_length(units, caps, parity)
    if length is None:
        return None
    kept = _even([min(cap, length - unit) for unit, cap in zip(units, caps, strict=True)], parity * length)
    return _cut(sizes, _intervals(kept, length), length)


def _least_length(units: Sequence[int], caps: Sequence[int], parity: int) -> int | None:
    """The least L of at least the largest unit with sum(min(cap, L - unit)) >= parity * L. None: there is none.

    The difference of both sides is concave in L with kinks at unit + cap: the first kink where it is not negative
    bounds L from above, and up to there it is linear.
    """

    def suffices(length: int) -> bool:
        return sum(min(cap, length - unit) for unit, cap in zip(units, caps, strict=True)) >= parity * length

    low = max(units)
    if suffices(low):
        return low
    for kink in sorted({unit + cap for unit, cap in zip(units, caps, strict=True) if unit + cap > low}):
        if suffices(kink):
            high = kink
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if suffices(middle) else (middle, high)
            return high
        low = kink
    return None


def _even(most: Sequence[int], total: int) -> list[int]:
    """At most `most` each and `total` in all, the largest as small as can be."""
    left, kept = total, [0] * len(most)
    for count, i in enumerate(sorted(range(len(most)), key=lambda i: (most[i], i))):
        kept[i] = min(most[i], -(-left // (len(most) - count)))
        left -= kept[i]
    return kept


def _intervals(kept: Sequence[int], length: int) -> list[list[tuple[int, int]]]:
    """For each row of the axis (P, Q): (member, where it ends), in order. McNaughton's rule."""
    rows: list[list[tuple[int, int]]] = [[]]
    at = 0
    for member, amount in enumerate(kept):
        while amount:
            take = min(amount, length - at)
            at, amount = at + take, amount - take
            rows[-1].append((member, at))
            if at == length:
                rows.append([])
                at = 0
    return rows[:-1]


def _cut(sizes: Sequence[int], rows: Sequence[Sequence[tuple[int, int]]], length: int) -> tuple[Stripe, ...]:
    bounds = sorted({end for row in rows for _, end in row} | {0, length})
    done = [0] * len(sizes)
    found: list[Stripe] = []
    for begin, end in itertools.pairwise(bounds):
        holders = tuple(next(member for member, stop in row if stop >= end) for row in rows)
        parts = []
        for member, size in enumerate(sizes):
            if member in holders or done[member] == size:
                continue
            stop = min(size, done[member] + (end - begin) * CUT_BYTES)
            parts.append(StripePart(member, done[member], stop))
            done[member] = stop
        if parts:
            longest = max(part.stop - part.start for part in parts)
            found.append(Stripe(-(-longest // CUT_BYTES) * CUT_BYTES, holders, tuple(parts)))
    return tuple(found)
