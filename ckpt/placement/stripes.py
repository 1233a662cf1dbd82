"""The stripes of a parity group: decides how much parity each node keeps, over which bytes of the others' data. Pure.

The group shares an axis of L bytes. Node j keeps parity for q_j bytes of the axis. Its own s_j bytes of data lie on the
rest of the axis. Each byte of the axis has exactly p holders of parity (P, and with p = 2 also Q). A lost node takes at
most one part (data or parity) of each byte of the axis. So any p nodes may be lost.

    sum of q_j = p L,    q_j <= room_j,    q_j + s_j <= L

The least L with a solution q needs the least memory, p L in all. Equal nodes get L = s n / (n - p) and
q = s p / (n - p), the same as rotating parity. Nodes without data (memory-only nodes, or the missing members of a short
group) take parity first. A node with little room takes little. The intervals come from McNaughton's wrap-around rule
(1959, "Scheduling with deadlines and loss functions"): the q_j are laid end to end over p rows of length L. No node is
twice at one place of the axis, since no q_j exceeds L. The axis is cut into at most n stripes.

Sizes are in whole units of CUT_BYTES. The result depends only on the numbers given and their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.errors import UsageError

CUT_BYTES = 4096  # data is cut at multiples of this: whole pages, and whole machine words for the codec
PARITY_MAX = 2


@dataclass(frozen=True, slots=True)
class StripePart:
    """The bytes [start, stop) of a member's data, which lie at the beginning of the stripe. `member`: index."""

    member: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Stripe:
    """A stripe: `length` bytes of parity at each holder, made of `parts`.

    `holders`: indices of the members that keep P and Q, in this order. `parts`: at most one per member, and none of a
    holder; shorter parts count as padded with zeros."""

    length: int
    holders: tuple[int, ...]
    parts: tuple[StripePart, ...]


def plan_stripes(sizes: Sequence[int], rooms: Sequence[int], parity: int) -> tuple[Stripe, ...] | None:
    """The stripes of a group whose members have `sizes` bytes of data and keep at most `rooms` bytes of parity.

    Each byte of every member lies in exactly one stripe; any `parity` members may be lost. A stripe's length may
    exceed its longest part by less than CUT_BYTES. () if there is no data. None if the rooms do not suffice, or there
    are at most `parity` members. Errors: UsageError for a negative number, or a parity other than 1 or 2.
    """
    if len(sizes) != len(rooms) or any(number < 0 for number in (*sizes, *rooms)):
        raise UsageError("sizes and rooms: give one number of bytes for each member, at least 0")
    if not 1 <= parity <= PARITY_MAX:
        raise UsageError(f"parity={parity}: give a number from 1 to {PARITY_MAX}")
    units = [-(-size // CUT_BYTES) for size in sizes]
    caps = [room // CUT_BYTES for room in rooms]
    if not any(units):
        return ()
    length = _least_length(units, caps, parity)
    if length is None:
        return None
    kept = _split_evenly([min(cap, length - unit) for unit, cap in zip(units, caps, strict=True)], parity * length)
    return _cut(sizes, _intervals(kept, length), length)


def _least_length(units: Sequence[int], caps: Sequence[int], parity: int) -> int | None:
    """The least L >= max(units) with sum(min(cap, L - unit)) >= parity * L; None if there is none.

    The difference of both sides is concave in L, with kinks at unit + cap. The first kink where it is not negative
    bounds L from above. Between the kink before and this one the difference is linear, so a binary search finds L.
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


def _split_evenly(most: Sequence[int], total: int) -> list[int]:
    """Numbers of at most `most` each that add up to `total`, with the largest as small as possible."""
    left, kept = total, [0] * len(most)
    for count, i in enumerate(sorted(range(len(most)), key=lambda i: (most[i], i))):
        kept[i] = min(most[i], -(-left // (len(most) - count)))
        left -= kept[i]
    return kept


def _intervals(kept: Sequence[int], length: int) -> list[list[tuple[int, int]]]:
    """For each row of the axis (P, Q): (member, end of its interval), in order. McNaughton's rule."""
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
