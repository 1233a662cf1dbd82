"""Parity against a slow reference: arithmetic on numbers, byte by byte, straight from the definition."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import parity as benchmark
from ckpt.errors import UsageError
from ckpt.format import parity
from ckpt.format.parity import BLOCK_BYTES, MEMBERS_MAX, Row, add_data, inverse, pieces, product, solve_lost, weight

SCRATCH = parity.ParityScratch()


def slow_product(a: int, b: int) -> int:
    """Of polynomials over GF(2), then the remainder by x^8 + x^4 + x^3 + x^2 + 1."""
    whole = 0
    for bit in range(8):
        if b >> bit & 1:
            whole ^= a << bit
    for bit in range(15, 7, -1):
        if whole >> bit & 1:
            whole ^= 0x11D << (bit - 8)
    return whole


PRODUCTS = [[slow_product(a, b) for b in range(256)] for a in range(256)]


def slow_parity(members: list[bytes], row: Row, length: int) -> bytes:
    found = bytearray(length)
    for index, data in enumerate(members):
        factor = 1 if row is Row.P else index + 1
        for at, byte in enumerate(data):
            found[at] ^= PRODUCTS[factor][byte]
    return bytes(found)


def made(members: list[bytes], row: Row, length: int) -> bytearray:
    target = bytearray(length)
    for index, data in enumerate(members):
        add_data(target, 0, {index: data}, row, SCRATCH)
    return target


def data_of(rng: random.Random, lengths: list[int]) -> list[bytes]:
    return [rng.randbytes(length) for length in lengths]


def test_the_field_is_that_of_the_definition():
    assert all(product(a, b) == PRODUCTS[a][b] for a in range(256) for b in range(256))
    assert all(product(a, inverse(a)) == 1 for a in range(1, 256))
    for a in (0, 256, -1):
        with pytest.raises(UsageError):
            inverse(a)


def test_weights_are_distinct_and_not_zero():
    weights = [weight(Row.Q, member) for member in range(MEMBERS_MAX)]
    assert len(set(weights)) == MEMBERS_MAX
    assert all(0 < each < 256 for each in weights)
    for member in (-1, MEMBERS_MAX):
        with pytest.raises(UsageError):
            weight(Row.P, member)


@pytest.mark.parametrize("member", [0, 1, 2, 3, 6, 127, 128, 254])
def test_every_byte_is_multiplied_as_the_definition_says(member):
    data = bytes(range(256))
    target = bytearray(256)
    add_data(target, 0, {member: data}, Row.Q, SCRATCH)
    assert list(target) == PRODUCTS[member + 1]


def test_what_was_multiplied_by_any_weight_is_divided_by_it_again():
    data = bytes(range(256)) + b"end"
    for member in range(MEMBERS_MAX):
        target = bytearray(len(data))
        add_data(target, 0, {member: data}, Row.Q, SCRATCH)
        assert solve_lost([member], {Row.Q: target}, SCRATCH) == [data]


LENGTHS = [
    [64, 64],
    [100, 37, 64],
    [0, 50],  # an empty member
    [0, 0, 0],
    [1],
    [33, 0, 8, 120, 7],
    [500, 499, 1, 0, 250, 77],
]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("rows", [(Row.P,), (Row.Q,), (Row.P, Row.Q)])
def test_every_loss_that_the_parities_can_bear_is_recovered(lengths, rows, seed):
    """Every set of lost members and lost parities, as many as there are parities."""
    members = data_of(random.Random(seed), lengths)
    length = max(lengths) + 3
    whole = {row: slow_parity(members, row, length) for row in rows}
    for row in rows:
        assert bytes(made(members, row, length)) == whole[row]
    things = [*range(len(members)), *rows]
    for count in range(len(rows) + 1):
        for gone in itertools.combinations(things, count):
            lost_rows = [row for row in rows if any(thing is row for thing in gone)]
            lost = [thing for thing in gone if not isinstance(thing, Row)]
            left = {row: bytearray(whole[row]) for row in rows if row not in lost_rows}
            for row, target in left.items():
                for index, data in enumerate(members):
                    if index not in lost:
                        add_data(target, 0, {index: data}, row, SCRATCH)
            found = dict(zip(lost, solve_lost(lost, left, SCRATCH), strict=True))
            for index in lost:
                assert bytes(found[index]) == members[index].ljust(length, b"\0")
            again = [bytes(found.get(index, data)) for index, data in enumerate(members)]
            for row in lost_rows:
                assert bytes(made(again, row, length)) == whole[row]


def test_any_two_of_many_members_are_recovered_in_either_order(seed):
    rng = random.Random(seed)
    members = data_of(rng, [rng.randrange(20) for _ in range(MEMBERS_MAX)])
    sums = {row: made(members, row, 20) for row in Row}
    for pair in [(0, 254), (254, 0), (127, 128), *(rng.sample(range(MEMBERS_MAX), 2) for _ in range(40))]:
        left = {row: bytearray(target) for row, target in sums.items()}
        for row, target in left.items():
            for index in set(range(MEMBERS_MAX)) - set(pair):
                add_data(target, 0, {index: members[index]}, row, SCRATCH)
        assert [bytes(data) for data in solve_lost(pair, left, SCRATCH)] == [members[i].ljust(20, b"\0") for i in pair]


@pytest.mark.parametrize("row", Row)
@pytest.mark.parametrize("at", [0, 5])
def test_members_that_are_added_together_are_the_same_as_one_by_one(row, at, seed):
    rng = random.Random(seed)
    members = data_of(rng, [2 * BLOCK_BYTES + 9, 0, BLOCK_BYTES, 3, BLOCK_BYTES + 70, 2 * BLOCK_BYTES])
    together, apart = bytearray(3 * BLOCK_BYTES), bytearray(3 * BLOCK_BYTES)
    add_data(together, at, {i: members[i] for i in (5, 0, 1, 3, 2, 4)}, row, SCRATCH)
    for index, data in enumerate(members):
        add_data(apart, at, {index: data}, row, SCRATCH)
    assert together == apart
    add_data(together, at, {}, row, SCRATCH)
    assert together == apart


@given(
    st.lists(st.binary(max_size=40), min_size=1, max_size=6),
    st.sampled_from(Row),
    st.randoms(use_true_random=False),
    st.integers(1, 9),
)
def test_bytes_may_come_in_any_order_and_cut_anywhere(members, row, rng, step):
    length = max(map(len, members)) + 1
    parts = [
        (index, at, data[at : at + step]) for index, data in enumerate(members) for at in range(0, len(data), step)
    ]
    rng.shuffle(parts)
    target = bytearray(length)
    for index, at, data in parts:
        add_data(target, at, {index: data}, row, SCRATCH)
    assert bytes(target) == slow_parity(members, row, length)


def test_more_than_a_block_at_any_alignment_is_the_same_as_byte_by_byte(seed):
    rng = np.random.default_rng(seed)
    size = 2 * BLOCK_BYTES + 77
    raw = rng.integers(0, 256, size + 3, np.uint8)
    members = [raw[i : i + size].tobytes() for i in range(3)]
    tables = np.array(PRODUCTS, np.uint8)
    arrays = [np.frombuffer(data, np.uint8) for data in members]
    target = memoryview(bytearray(size + 5))[5:]
    for index in range(3):
        add_data(target, 0, {index: memoryview(raw)[index : index + size]}, Row.Q, SCRATCH)
    assert (np.frombuffer(target, np.uint8) == arrays[0] ^ tables[2][arrays[1]] ^ tables[3][arrays[2]]).all()
    left = {Row.P: made(members, Row.P, size), Row.Q: bytearray(target)}
    for row in left:
        add_data(left[row], 0, {1: members[1]}, row, SCRATCH)
    assert [bytes(data) for data in solve_lost([2, 0], left, SCRATCH)] == [members[2], members[0]]
    one = {Row.Q: bytearray(target)}
    for index in (0, 1):
        add_data(one[Row.Q], 0, {index: members[index]}, Row.Q, SCRATCH)
    assert bytes(solve_lost([2], one, SCRATCH)[0]) == members[2]


def test_what_cannot_be_added_or_solved_is_refused():
    target = bytearray(8)
    for at, data in ((0, bytes(9)), (1, bytes(8)), (-1, b"1"), (9, b"")):
        with pytest.raises(UsageError, match="reach beyond"):
            add_data(target, at, {0: data}, Row.P, SCRATCH)
    for lost in ([0, 1], [2, 2]):
        with pytest.raises(UsageError, match="lost members"):
            solve_lost(lost, {Row.P: target}, SCRATCH)
    with pytest.raises(UsageError, match="different lengths"):
        solve_lost([0, 1], {Row.P: target, Row.Q: bytearray(7)}, SCRATCH)
    assert target == bytes(8)


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 40), st.integers(0, 40))
def test_pieces_are_the_bytes_of_the_frames_laid_end_to_end(lengths, start, stop):
    whole = [(frame, offset) for frame, length in enumerate(lengths) for offset in range(length)]
    if not start <= stop <= len(whole):
        with pytest.raises(UsageError):
            list(pieces(lengths, start, stop))
        return
    found = list(pieces(lengths, start, stop))
    assert [(p.frame, p.offset + i) for p in found for i in range(p.length)] == whole[start:stop]
    assert [p.stripe_offset + i for p in found for i in range(p.length)] == list(range(stop - start))


def test_the_benchmark_runs_and_names_its_machine(tmp_path, capsys):
    results = tmp_path / "parity.json"
    assert benchmark.main(["--small", "--json", str(results)]) == 0
    found = json.loads(results.read_text())
    assert found["machine"]["name"] in capsys.readouterr().out
    assert sum(row["met"] is not None for row in found["rows"]) == 6 * len(benchmark.MEMBERS)
