"""Where parity lies within a group."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import UsageError
from ckpt.placement.stripes import CUT_BYTES, Stripe, plan_stripes

CUT = CUT_BYTES
AMPLE = 1 << 40


def keeps(found: tuple[Stripe, ...], members: int) -> list[int]:
    return [sum(stripe.length for stripe in found if m in stripe.holders) for m in range(members)]


def is_sound(found: tuple[Stripe, ...], sizes: list[int], parity: int) -> None:
    covered: list[list[tuple[int, int]]] = [[] for _ in sizes]
    for stripe in found:
        assert len(set(stripe.holders)) == parity
        members = [part.member for part in stripe.parts]
        assert len(set(members)) == len(members) > 0
        assert not set(members) & set(stripe.holders)
        for part in stripe.parts:
            assert part.start % CUT == 0
            assert 0 < part.stop - part.start <= stripe.length
            covered[part.member].append((part.start, part.stop))
    for size, parts in zip(sizes, covered, strict=True):
        ends = [0, *(stop for _, stop in parts)]
        assert [start for start, _ in parts] == ends[:-1]
        assert ends[-1] == size


@pytest.mark.parametrize(("members", "parity"), [(2, 1), (4, 1), (4, 2), (8, 2), (3, 2), (9, 1)])
def test_equal_members_keep_parity_over_data_of_a_state_each(members, parity):
    state = (members - parity) * 7 * CUT
    found = plan_stripes([state] * members, [AMPLE] * members, parity)
    is_sound(found, [state] * members, parity)
    assert keeps(found, members) == [state * parity // (members - parity)] * members
    assert len(found) <= members


def test_members_without_data_take_parity_first():
    found = plan_stripes([30 * CUT] * 3 + [0], [AMPLE] * 4, 1)
    assert keeps(found, 4) == [0, 0, 0, 30 * CUT]
    found = plan_stripes([30 * CUT] * 3 + [0, 0], [AMPLE] * 5, 1)
    assert keeps(found, 5) == [0, 0, 0, 15 * CUT, 15 * CUT]


def test_what_is_no_number_of_bytes_is_refused():
    for sizes, rooms, parity in (([-1], [0], 1), ([1], [], 1), ([1, 1], [1, 1], 3), ([1, 1], [1, 1], 0)):
        with pytest.raises(UsageError):
            plan_stripes(sizes, rooms, parity)


def least_memory(sizes: list[int], rooms: list[int], parity: int) -> int | None:
    """All lengths of the axis tried one by one."""
    units, caps = [-(-size // CUT) for size in sizes], [room // CUT for room in rooms]
    for length in range(max(units), sum(units) * 2 + sum(caps) + 2):
        if sum(min(cap, length - unit) for unit, cap in zip(units, caps, strict=True)) >= parity * length:
            return parity * length * CUT
    return None


@given(
    st.lists(st.tuples(st.integers(0, 9 * CUT), st.integers(0, 30 * CUT)), min_size=1, max_size=7), st.integers(1, 2)
)
def test_any_sizes_and_rooms_give_sound_stripes_within_the_rooms_or_none_is_possible(members, parity):
    sizes, rooms = [size for size, _ in members], [room for _, room in members]
    found = plan_stripes(sizes, rooms, parity)
    least = least_memory(sizes, rooms, parity)
    if found is None:
        assert least is None
        return
    is_sound(found, sizes, parity)
    kept = keeps(found, len(sizes))
    assert all(amount <= room for amount, room in zip(kept, rooms, strict=True))
    assert sum(kept) <= (least or 0)
    for gone in itertools.combinations(range(len(sizes)), parity):
        for stripe in found:
            assert len(set(gone) & {*stripe.holders, *(part.member for part in stripe.parts)}) <= parity
