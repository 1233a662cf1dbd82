"""What another agent packs is taken out of a blob within bounds, whatever it says."""

from __future__ import annotations

import ast
import random
import tracemalloc
from pathlib import Path
from typing import Any

import msgpack
import pytest

from ckpt.errors import AgentError
from ckpt.ipc.bounded_msgpack import unpack_bounded

CKPT = Path(__file__).parents[2] / "ckpt"
OURS = {
    "bounded_msgpack.py",
    "messages.py",
    "client.py",
}  # a packet of 64 KiB with limits of its own; what our own agent answers
MIB = 1 << 20


def some(rng: random.Random, depth: int) -> Any:
    match rng.randrange(9 if depth else 6):
        case 0:
            return rng.choice([None, True, False, 0, 127, -1, -32, -33, -200, -(1 << 15) - 1, -(1 << 31) - 1])
        case 1:
            return 1 << rng.randrange(64)
        case 2:
            return rng.random()
        case 3:
            return bytes(rng.choice([0, 1, 255, 256, 70_000]))
        case 4 | 5:
            return "ü" * rng.choice([0, 15, 16, 100, 200, 40_000])
        case 6:
            return {str(key): some(rng, depth - 1) for key in range(rng.choice([0, 3, 15, 16]))}
        case _:
            return [some(rng, depth - 1) for _ in range(rng.choice([0, 1, 15, 16, 40]))]


def count(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + count(each) for each in value.values())
    return 1 + sum(map(count, value)) if isinstance(value, list) else 1


def test_what_was_packed_comes_out_as_it_was_and_one_value_more_than_may_be_does_not(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        value = some(rng, 3)
        blob: bytes = msgpack.packb(value)
        number = count(value)
        assert unpack_bounded(blob, "it", number) == value
        with pytest.raises(AgentError, match="it cannot be decoded"):
            unpack_bounded(blob, "it", number - 1)
        for wrong in (blob[:-1], blob + b"\x00", b""):
            with pytest.raises(AgentError, match="it "):
                unpack_bounded(wrong, "it", number + 1)


def test_long_arrays_are_counted_too() -> None:
    assert len(unpack_bounded(msgpack.packb([1] * 70_000), "it")) == 70_000
    assert len(unpack_bounded(msgpack.packb({str(n): n for n in range(70_000)}), "it")) == 70_000


@pytest.mark.parametrize(
    "blob",
    [
        b"\xdd" + (32 * MIB).to_bytes(4, "big") + b"\x90" * (32 * MIB),
        (b"\xdc" + (4096).to_bytes(2, "big")) + (b"\xdc" + (4096).to_bytes(2, "big") + b"\x90" * 4096) * 4096,
        b"\xdd\x03\xff\xff\xff" * 900 + b"\x90" * (32 * MIB),
        b"\xdf\xff\xff\xff\xff" + b"\x00" * (32 * MIB),
        b"\x00" * (32 * MIB),
        b"\x92\xc7\x00\xdb\x01\x00\x00\x00" + b"\x90" * (16 * MIB),
        b"\x91" * (32 * MIB),
    ],
    ids=["long", "nested", "promised", "map", "rest", "extension", "deep"],
)
def test_whatever_a_blob_says_of_itself_it_takes_little_memory(blob: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(AgentError):
            unpack_bounded(blob, "it")
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_no_agent_takes_a_blob_apart_in_another_way() -> None:
    found = {
        path.name
        for part in ("agent", "ipc")
        for path in (CKPT / part).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("unpackb", "unpack", "Unpacker")
        if isinstance(node.value, ast.Name) and node.value.id == "msgpack"
    }
    assert found == OURS
