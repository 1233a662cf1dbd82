"""Values: what comes back equals what went in, types and order included; the rest is refused by its path."""

from __future__ import annotations

import collections
import datetime
import mmap
import random
import re
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import DamagedData, UsageError
from ckpt.format import values
from tests.memory import memory_below


def same(a: Any, b: Any) -> bool:
    """Equality that tells 1 from True and 1.0, 0.0 from -0.0, a list from a tuple, and takes nan for itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
            return False
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def there_and_back(tree: Any) -> Any:
    return values.decode(values.encode(tree))


surrogates = st.text(st.characters(exclude_categories=()), max_size=8)
numbers = st.integers() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.booleans()
scalars = (
    st.none() | numbers | surrogates | st.binary(max_size=8) | st.complex_numbers()
    | st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3))
)  # fmt: skip
hashable = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | surrogates | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
leaves = (
    scalars
    | st.binary(max_size=8).map(bytearray)
    | st.builds(slice, st.none() | st.integers(), st.integers())
    | st.sampled_from(
        [np.float32(1.5), np.int8(-3), np.bool_(True), np.complex128(1j), np.float64("nan"), np.uint64(7)]
    )
    | st.sampled_from([np.arange(6.0).reshape(2, 3), np.zeros((0, 4), np.int16), np.array(3 + 1j), np.ones(3, ">i4")])
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(hashable, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(hashable, inner, max_size=4).map(lambda d: defaultdict(list, d))
        | st.dictionaries(hashable, st.integers(), max_size=4).map(Counter)
        | st.builds(deque, st.lists(inner, max_size=3), st.none() | st.integers(3, 5))
    ),
    max_leaves=25,
)


@given(trees)
def test_any_tree_comes_back_as_it_was(tree: Any) -> None:
    assert same(there_and_back(tree), tree)


def parts_of(tree: Any) -> list[Any]:
    """A tree and every part of it that is one itself."""
    items = [*tree.items()] if isinstance(tree, dict) else tree if isinstance(tree, list | tuple | deque) else ()
    return [tree, *(part for item in items for part in parts_of(item))]


@given(trees, st.randoms(use_true_random=False))
def test_what_is_copied_from_an_earlier_tree_is_what_would_be_encoded(tree: Any, random: random.Random) -> None:
    constants = values.Constants(part for part in parts_of(tree) if random.random() < 0.5)
    for _ in range(2):
        assert values.encode([tree, tree], constants=constants) == values.encode([tree, tree])


def test_what_is_copied_counts_as_what_is_encoded() -> None:
    half = [None] * (values.ELEMENTS_MAX // 2 - 1)
    constants = values.Constants([half])
    assert values.encode([half, half], constants=constants) == values.encode([half, half])
    with pytest.raises(UsageError, match="more than 4194304 plain values"):
        values.encode([half, half, None], constants=constants)


KINDS = [
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.integers(0, (1 << 63) - 1) | st.just(1 << 63),
    st.floats(),
    st.booleans(),
]


@given(st.sampled_from([*KINDS, KINDS[1] | KINDS[2] | KINDS[3] | st.text(max_size=1)]).flatmap(
    lambda kind: st.lists(kind, min_size=31, max_size=40)
))  # fmt: skip
def test_long_lists_come_back_with_the_types_of_their_items(items: list[Any]) -> None:
    assert same(there_and_back(items), items)


def real_states() -> list[Any]:
    optimizer = torch.optim.Adam(torch.nn.Linear(2, 2).parameters(), betas=(0.9, 0.99))
    bits = (np.random.PCG64(3), np.random.MT19937(3), np.random.Philox(3), np.random.SFC64(3))
    return [
        random.Random(3).getstate(),
        *(each.state for each in bits),
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5, 5]).state_dict(),
        optimizer.state_dict()["param_groups"],
        struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0],  # a NaN with bits of its own
    ]


@pytest.mark.parametrize("state", real_states(), ids=lambda state: type(state).__name__)
def test_the_state_of_generators_schedulers_and_optimizers_comes_back(state: Any) -> None:
    assert same(there_and_back(state), state)


def test_arrays_come_back_writable_and_on_their_own() -> None:
    data = values.encode(np.arange(4))
    a, b = values.decode(data), values.decode(data)
    a[0] = 9
    assert b[0] == 0


def test_what_is_torch_s_comes_back_where_torch_is_loaded_and_as_plain_values_elsewhere() -> None:
    tree = {"size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cuda", 1)}
    assert same(there_and_back(tree), tree)
    code = (
        "import sys; from ckpt.format import values; tree = values.decode(sys.stdin.buffer.read());"
        "assert 'torch' not in sys.modules; print(tree)"
    )
    out = subprocess.run([sys.executable, "-c", code], input=values.encode(tree), capture_output=True, check=True)
    assert out.stdout.decode().strip() == str({"size": (2, 3), "dtype": "bfloat16", "device": "cuda:1"})


def test_the_same_tree_gives_the_same_bytes_in_every_process() -> None:
    code = (
        "import sys; from ckpt.format import values;"
        "sys.stdout.buffer.write(values.encode({'s': {'a', 'b', 'c', 'd', 1, (2, 'x')}, 'f': frozenset('xyz')}))"
    )
    runs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env={"PYTHONHASHSEED": s}).stdout
        for s in ("1", "2", "3")
    }
    assert len(runs) == 1


class Foo:
    pass


class Sub(dict[str, int]):
    pass


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (
            {"loader": {"_x": [1, 2, 3, Foo()]}},
            "state['loader']['_x'][3]: objects of type tests.format.test_values.Foo",
        ),
        ({"a": (1, {2: Sub()})}, "state['a'][1][2]: objects of type tests.format.test_values.Sub cannot"),
        ({"t": [Point(1, 2)]}, "state['t'][0]: objects of type tests.format.test_values.Point"),
        ({"w": deque([torch.zeros(1)])}, "state['w'][0]: a tensor cannot be stored as a value"),
        ({"w": torch.nn.Parameter(torch.zeros(1))}, "state['w']: a tensor cannot"),
        ({"d": defaultdict(lambda: 0)}, "state['d']: a defaultdict of <function"),
        ({"a": np.array([Foo()])}, "state['a']: NumPy values of dtype object"),
        ({"a": np.array(["x"])}, "state['a']: NumPy values of dtype <U1"),
        ({"a": np.zeros(2, [("x", "i4")])}, "state['a']: NumPy values of dtype [('x', '<i4')]"),
        ({"a": np.datetime64("2020-01-01")}, "state['a']: NumPy values of dtype datetime64[D]"),
        ({"a": datetime.date(2020, 1, 1)}, "state['a']: objects of type datetime.date"),
        ({"a": torch.quint8}, "state['a']: the dtype torch.quint8 cannot be stored"),
        ({"s": {(1, print)}}, "state['s']{(1, <built-in function print>)}[1]: objects of type builtin_function"),
        ({print: 1}, "state[<built-in function print>]: objects of type builtin_function"),
        (print, "state: objects of type"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_its_path(tree: Any, says: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(says)}"):
        values.encode(tree)


def test_all_that_cannot_be_stored_is_named_in_one_message() -> None:
    tree = {"a": [Foo(), 1, Foo()], "t": {2: torch.zeros(1)}, "s": {print}, "d": defaultdict(lambda: 0, x=Foo())}
    with pytest.raises(UsageError) as caught:
        values.encode(tree)
    first, *others = str(caught.value).split("; ")
    assert first.startswith("state['a'][0], state['a'][2], state['d']['x']: objects of type tests.format.test_values.F")
    for part in ("state['t'][2]: a tensor", "state['s']{<built-in function print>}: objects", "state['d']: a default"):
        assert any(other.startswith(part) for other in others)


def test_of_many_that_cannot_be_stored_a_few_are_named_and_the_rest_counted() -> None:
    many = [Foo() for _ in range(values.NAMED_MAX + 3)]
    kinds = [type(f"Kind{number}", (), {})() for number in range(values.NAMED_MAX + 1)]
    with pytest.raises(UsageError, match=r"^state\[0\]\[0\], .*state\[0\]\[4\] and 3 more: objects .*; and 2 more$"):
        values.encode([many, kinds])


def test_a_part_that_is_encoded_once_is_refused_each_time() -> None:
    part = [1, Foo()]
    constants = values.Constants([part])
    for _ in range(2):
        with pytest.raises(UsageError, match=r"state\[1\]: objects"):
            values.encode(part, constants=constants)


def test_an_int_that_is_too_large_to_be_printed_is_refused_by_its_path() -> None:
    largest = (1 << 8 * values.INT_BYTES_MAX - 1) - 1
    assert same(there_and_back([largest, -largest]), [largest, -largest])
    with pytest.raises(UsageError, match=r"^state\['n'\]: an int of 8192 bits cannot be stored; give it as bytes$"):
        values.encode({"n": largest + 1})
    with pytest.raises(UsageError, match=r"^state\[<int>\]: an int of 100001 bits"):
        values.encode({1 << 100_000: 1})


def test_a_tree_that_contains_itself_is_refused() -> None:
    tree: list[Any] = [1]
    tree.append({"again": tree})
    with pytest.raises(UsageError, match="contains itself"):
        values.encode(tree)


def nest(depth: int, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = [leaf]
    return leaf


def test_what_may_be_written_may_be_read_to_the_last_level() -> None:
    for leaf in (np.zeros(3), {1: bytearray(b"x")}, (1,)):
        depth = values.DEPTH_MAX - (0 if isinstance(leaf, np.ndarray) else 1)
        tree = nest(depth, leaf)
        assert same(there_and_back(tree), tree)
    with pytest.raises(UsageError, match="deeper than 128"):
        values.encode(nest(values.DEPTH_MAX + 1, 1))


@pytest.mark.parametrize("around", [b"\x91%s", b"\x92\x90%s", b"\x92%s\x91\x80", b"\x81\x01%s"], ids=repr)
def test_depth_is_counted_whatever_stands_beside_what_is_deep(around: bytes) -> None:
    most, more = b"\x90", b"\x90"
    for _ in range(values.DEPTH_MAX):
        most = around % most
    for _ in range(values.DEPTH_MAX + 2):
        more = around % more
    values.decode(most)
    with pytest.raises(DamagedData, match="too large or deep"):
        values.decode(more)


def test_exactly_what_may_be_written_may_be_read() -> None:
    # Elements: 5 of the list, 2 + 1, a tag and 2, a tag and 3 parts and 2 dimensions, a tag and 1.
    head = [{1: [None]}, (1, 2), np.zeros((1, 1)), {3}]
    most = [*head, [None] * (values.ELEMENTS_MAX - 19)]
    assert len(there_and_back(most)[4]) == values.ELEMENTS_MAX - 19
    with pytest.raises(UsageError, match="more than 4194304 plain values"):
        values.encode([*head, [None] * (values.ELEMENTS_MAX - 18)])
    assert len(there_and_back(list(range(values.ELEMENTS_MAX + 9)))) == values.ELEMENTS_MAX + 9  # one block


HOSTILE = [
    ("nothing", b""),
    ("half a float", b"\xcb\x00\x00"),
    ("a text longer than the data", b"\xdb\xff\xff\xff\xffabc"),
    ("bytes longer than the data", b"\xc6\xff\xff\xff\xffabc"),
    ("a list longer than the data", b"\xdd\xff\xff\xff\xff\xc0"),
    ("a dict longer than the data", b"\xdf\xff\xff\xff\xff\xc0"),
    ("lists that each claim to be long", (b"\xdc\xff\xff" * 40) + bytes(65_600)),
    ("lists in lists in lists", b"\x91" * 100_000 + b"\xc0"),
    ("dicts in dicts in dicts", b"\x81\x01" * 100_000 + b"\xc0"),
    ("what msgpack never uses", b"\xc1"),
    ("a timestamp", b"\xd6\xff\x00\x00\x00\x00"),
    ("an extension by itself", b"\xc7\x00\x01"),
    ("an extension with a body", b"\x92\xc7\x01\x01\x00"),
    ("a tag of a later version", b"\x92\xc7\x00\x7f\x01"),
    ("a float of 32 bits", b"\xca\x00\x00\x00\x00"),
    ("two values", b"\x01\x02"),
    ("text that is not UTF-8", b"\xa2\xff\xfe"),
    ("a dict with a list for a key", b"\x81\x90\x01"),
    ("a dict with a key twice", b"\x82\x01\x01\x01\x01"),
    ("a set with a dict in it", b"\x92\xc7\x00\x02\x80"),
    ("a set with an item twice", b"\x93\xc7\x00\x02\x01\x01"),
    ("a counter with half a pair", b"\x92\xc7\x00\x05\x01"),
    ("a defaultdict of another factory", b"\x92\xc7\x00\x06\xa4eval"),
    ("a deque of a negative length", b"\x92\xc7\x00\x07\xff"),
    ("a range without a step", b"\x94\xc7\x00\x0c\x00\x01\x00"),
    ("an array of objects", b"\x94\xc7\x00\x0e\xa2|O\x91\x01\xc4\x08" + bytes(8)),
    ("an array of texts", b"\x94\xc7\x00\x0e\xa3<U1\x91\x01\xc4\x04x\0\0\0"),
    ("an array of records", b"\x94\xc7\x00\x0e\xa5u1,u1\x91\x01\xc4\x02\0\0"),
    ("an array of a true shape", b"\x94\xc7\x00\x0e\xa3|u1\x91\xc3\xc4\x01\0"),
    ("an array of a huge shape", b"\x94\xc7\x00\x0e\xa3<f4\x92\xce\xff\xff\xff\xff\xce\xff\xff\xff\xff\xc4\x00"),
    ("an array of a negative shape", b"\x94\xc7\x00\x0e\xa3<f4\x92\xff\xff\xc4\x04" + bytes(4)),
    ("an array of 65 dimensions", b"\x94\xc7\x00\x0e\xa3|u1\xdc\x00\x41" + b"\x01" * 65 + b"\xc4\x01\x00"),
    (
        "an array of a product that takes hours",
        b"\x94\xc7\x00\x0e\xa3|u1\x92\xc7\x00\x10\xc6\x00\x80\x00\x00" + b"\x7f" * (1 << 23) + b"\xc4\x00",
    ),
    ("an array of a float shape", b"\x94\xc7\x00\x0e\xa3|u1\x91\xcb" + struct.pack(">d", 1.0) + b"\xc4\x01\x00"),
    ("an array of a text for a shape", b"\x94\xc7\x00\x0e\xa3|u1\x92\xa8abcdefgh\xce\xff\xff\xff\xff\xc4\x00"),
    ("an array of a list in its shape", b"\x94\xc7\x00\x0e\xa3|u1\x92\x91\x01\xce\xff\xff\xff\xff\xc4\x00"),
    ("an array of nothing for a number", b"\x94\xc7\x00\x0e\xa3|u1\x91\xc0\xc4\x00"),
    (
        "an array of a number beyond 64 bits",
        b"\x94\xc7\x00\x0e\xa3|u1\x92\x92\xc7\x00\x08\xc4\x09" + b"\x7f" * 9 + b"\x00\xc4\x00",
    ),
    ("an int of 1025 bytes", b"\x92\xc7\x00\x08\xc5\x04\x01" + b"\x7f" * 1025),
    ("a device with a long name", b"\x92\xc7\x00\x14\xd9\x51" + b"c" * 81),
    ("a bool of 2", b"\x94\xc7\x00\x0e\xa3|b1\x91\x01\xc4\x01\x02"),
    ("a scalar of 3 bytes", b"\x93\xc7\x00\x0f\xa3<f4\xc4\x03\x00\x00\x00"),
    ("ints of 7 bytes", b"\x92\xc7\x00\x10\xc4\x07" + bytes(7)),
    ("a dtype that is a function", b"\x92\xc7\x00\x13\xa4load"),
    ("a device that is none", b"\x92\xc7\x00\x14\xa9../../etc"),
    ("a size that torch cannot print", b"\x92\xc7\x00\x12\xd3\x80" + bytes(7)),
    ("a size of texts", b"\x92\xc7\x00\x12\xa1x"),
]


@pytest.mark.parametrize("data", [data for _, data in HOSTILE], ids=[name for name, _ in HOSTILE])
def test_hostile_bytes_are_refused_in_bounded_memory(data: bytes) -> None:
    with memory_below(20 * len(data) + (1 << 18)), pytest.raises(DamagedData, match=r"^here: "):
        values.decode(data, "here")


def test_more_bytes_than_are_allowed_are_not_looked_at() -> None:
    with (
        mmap.mmap(-1, values.VALUES_BYTES_MAX + 1) as data,
        memoryview(data) as view,
        pytest.raises(DamagedData, match="1073741825 bytes; at most"),
    ):
        values.decode(view)


def test_more_elements_than_are_allowed_are_refused_before_they_are_made() -> None:
    data = b"\xdd" + (values.ELEMENTS_MAX + 3).to_bytes(4, "big") + b"\xc0" * (values.ELEMENTS_MAX + 3)
    with memory_below(1 << 16), pytest.raises(DamagedData, match="4194307 values at depth 1"):
        values.decode(data)


def big(number: int) -> bytes:
    data = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x92\xc7\x00\x08\xc4" + bytes([len(data)]) + data


def imaginary(number: int) -> bytes:
    """hash() of a complex number is that of its real part plus 1000003 times that of the other."""
    return b"\x93\xc7\x00\x0b\xcb" + struct.pack(">d", -1000003.0 * number) + b"\xcb" + struct.pack(">d", number)


def tagged(tag: int, *items: bytes) -> bytes:
    return b"\xdd" + (1 + len(items)).to_bytes(4, "big") + b"\xc7\x00" + bytes([tag]) + b"".join(items)


def pairs(keys: list[bytes]) -> list[bytes]:
    return [each for key in keys for each in (key, b"\xc0")]


KEYED: dict[str, Any] = {
    "a dict": lambda keys: b"\xdf" + len(keys).to_bytes(4, "big") + b"".join(pairs(keys)),
    "a set": lambda keys: tagged(2, *keys),
    "a frozenset": lambda keys: tagged(3, *keys),
    "an OrderedDict": lambda keys: tagged(4, *pairs(keys)),
    "a Counter": lambda keys: tagged(5, *pairs(keys)),
    "a defaultdict": lambda keys: tagged(6, b"\xc0", *pairs(keys)),
}
HASH = sys.hash_info.modulus


@pytest.mark.parametrize("kind", KEYED)
@pytest.mark.parametrize("key", [lambda n: big(HASH * n + 7), imaginary], ids=["ints", "complex numbers"])
def test_keys_of_one_hash_are_refused_before_all_are_compared_with_all(kind: str, key: Any) -> None:
    keys = [key(n) for n in range(100, 100 + values.SAME_HASH_MAX)]
    assert len(values.decode(KEYED[kind](keys))) == values.SAME_HASH_MAX
    with pytest.raises(DamagedData, match="more than 128 keys have the same hash"):
        values.decode(KEYED[kind]([*keys, key(1)]))


def test_many_keys_of_one_hash_take_no_time() -> None:
    """To compare all with all would take minutes."""
    with pytest.raises(DamagedData, match="have the same hash"):
        values.decode(KEYED["a dict"]([big(HASH * n) for n in range(100, 200_000)]))


@pytest.mark.parametrize("kind", [dict.fromkeys, set, frozenset, OrderedDict.fromkeys, Counter])
def test_keys_of_one_hash_that_would_not_be_read_are_not_written(kind: Any) -> None:
    many = kind([HASH * n for n in range(values.SAME_HASH_MAX + 1)])
    with pytest.raises(UsageError, match=r"^state\['a'\]: more than 128 keys have the same hash"):
        values.encode({"a": many})


@pytest.mark.parametrize(
    "keys",
    [
        range(-50_000, 50_000),
        [n << 40 for n in range(100_000)],
        [(n // 300, n % 300) for n in range(90_000)],
        [n / 8 for n in range(50_000)],
        [frozenset((n, n + 1)) for n in range(50_000)],
        [f"{n}" for n in range(50_000)],
    ],
    ids=["ints", "ints far apart", "tuples", "floats", "frozensets", "texts"],
)
def test_keys_as_states_have_them_come_back_however_many(keys: Any) -> None:
    tree = dict.fromkeys(keys)
    assert there_and_back(tree) == tree
    assert there_and_back(set(keys)) == set(keys)
