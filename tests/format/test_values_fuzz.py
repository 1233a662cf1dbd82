"""Values from anybody: whatever the bytes are, they are a tree or DamagedData, in time and memory that they pay for."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from ckpt.errors import DamagedData
from ckpt.format import values

ROUNDS = 3000
TREES: list[Any] = [
    {"a": (1, 2.5, None), "b": [True, b"raw", "text"], (1, "k"): {2, 3}, 7: frozenset({"x"})},
    [Counter({80: 2}), OrderedDict(a=1), defaultdict(list, {1: [2]}), deque([1], 3), deque([2])],
    [1 << 80, -(1 << 90), "\udc80", bytearray(b"ab"), 1 + 2j, range(3), slice(1, None, 2)],
    [np.arange(6.0).reshape(2, 3), np.zeros((0, 4), np.int16), np.ones((), np.bool_), np.float32(1.5)],
    [list(range(40)), [0.5] * 40, torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")],
    random.Random(1).getstate(),
    np.random.PCG64(1).state,
    torch.optim.Adam([torch.zeros(2)]).state_dict()["param_groups"],
]
ENCODED = [values.encode(tree) for tree in TREES]
ODD = [0, 1, -1, 255, 1 << 31, (1 << 32) - 1, 1 << 63, -(1 << 63), None, True, 0.5, float("nan"), "", "x", "<f4", b""]
ODD += ["|u1", "list", "eval", "cuda:99", "float32", b"\x01" * 8, b"\xff" * 40, "long" * 50, [], {}, [[]], [1 << 40]]


def changed(rng: random.Random, data: bytes) -> bytes:
    """A few bytes are others, are gone, or come from another tree."""
    made = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(made) + 1)
        other = rng.choice(ENCODED)
        start = rng.randrange(len(other))
        piece = other[start : start + rng.randrange(1, 12)]
        cut = rng.choice((0, 1, 1, rng.randrange(12)))
        made[at : at + cut] = rng.choice((piece, rng.randbytes(1), bytes([rng.randrange(0x80, 0x100)]), b""))
    return bytes(made)


def made_up(rng: random.Random, depth: int = 0) -> bytes:
    """A value whose parts have types that nobody expects: tags with any items."""
    kind = rng.randrange(8)
    if depth > 4 or kind < 3:
        return bytes(msgpack.packb(rng.choice(ODD)))
    items = [made_up(rng, depth + 1) for _ in range(rng.choice((0, 1, 1, 2, 3, 3, 4)))]
    if kind == 3:
        return bytes([0x90 + len(items)]) + b"".join(items)
    if kind == 4:
        return bytes([0x80 + len(items) // 2]) + b"".join(items[: len(items) // 2 * 2])
    tag = rng.choice((rng.randrange(1, 22), values.Tag.ARRAY, values.Tag.INTS))
    if tag == values.Tag.ARRAY and len(items) == 3 and rng.random() < 0.7:  # of which something is right
        items[0] = msgpack.packb(rng.choice(("<f4", "|b1", "|u1", ">c8")))
    return bytes([0x91 + len(items)]) + b"\xc7\x00" + bytes([tag]) + b"".join(items)


def decoded(data: bytes) -> str:
    """What has become of it."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        tree = values.decode(data, "here")
    except DamagedData as exc:
        said = str(exc)
        assert said.startswith("here: ")
        assert len(said) < 400
        assert not any(kind in said for kind in ("MemoryError", "SystemError", "RecursionError")), said
        tree = exc
    # An empty deque takes 760 bytes and is written in 5; what is said of it takes some more.
    assert tracemalloc.get_traced_memory()[1] - before < 256 * len(data) + (1 << 18)
    if tree.__class__ is DamagedData:
        return "damaged"
    values.encode(tree)
    return "read"


@pytest.mark.parametrize("how", ["changed", "made up"])
def test_any_bytes_are_a_tree_or_damaged_data_in_bounded_memory(how: str, seed: int) -> None:
    rng = random.Random(seed)
    found: Counter[str] = Counter()
    tracemalloc.start()
    try:
        for _ in range(ROUNDS):
            data = changed(rng, rng.choice(ENCODED)) if how == "changed" else made_up(rng)
            try:
                found[decoded(data)] += 1
            except Exception as exc:
                raise AssertionError(f"{data.hex()} (seed {seed})") from exc
    finally:
        tracemalloc.stop()
    assert min(found["read"], found["damaged"]) > ROUNDS // 20, found
