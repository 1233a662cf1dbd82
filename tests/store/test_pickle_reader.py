"""A pickle is read as plain values; nothing in it is looked up or called."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckpt.errors import DamagedData
from ckpt.store.pickle_reader import Made, Name, read_pickle

PLAIN = {"a": [1, -1, 2**40, 2**200, 1.5, None, True, False], "b": ((), (1,), (1, 2), (1, 2, 3), tuple(range(9)))}
PLAIN |= {"c": {"long": "x" * 300, "bytes": [b"x", b"y" * 300]}, "d": [[], {}, "é"]}
PLAIN["again"] = [PLAIN["b"], PLAIN["b"]]


@dataclass
class Point:
    x: int
    y: object = None


class Runs:
    """A pickle of it would call os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.command,)


def read(data: bytes, *allowed: str) -> object:
    return read_pickle(data, lambda name: name in allowed, "x.metadata")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_read_as_they_are(protocol: int) -> None:
    if protocol == 2:
        del (plain := {**PLAIN, "c": {"long": "x" * 300}})["again"]
    else:
        plain = PLAIN
    assert read(pickle.dumps(plain, protocol)) == plain


@pytest.mark.parametrize("protocol", [2, 4])
def test_an_object_is_an_inert_record(protocol: int) -> None:
    found = read(pickle.dumps(Point(1, Point), protocol), f"{__name__}.Point")
    assert isinstance(found, Made)
    assert (found.name, found.args, found.state) == (f"{__name__}.Point", (), {"x": 1, "y": Name(f"{__name__}.Point")})


def test_a_class_or_function_that_is_not_allowed_is_named_and_not_called(tmp_path: Path) -> None:
    data = pickle.dumps({"a": Runs(f"touch {tmp_path / 'ran'}")})
    with pytest.raises(DamagedData, match=r"x\.metadata names 'posix\.system'"):
        read(data, f"{__name__}.Point")
    # Even an allowed name is never called.
    assert isinstance(read(data, "posix.system")["a"], Made)
    assert not (tmp_path / "ran").exists()


def test_every_cut_and_every_flipped_byte_is_an_error_or_a_value() -> None:
    data = pickle.dumps([Point(1, ("a", {"b": 2.5}, b"x")), collections.OrderedDict()], 4)
    allowed = (f"{__name__}.Point", "collections.OrderedDict")
    assert read(data, *allowed)
    for cut in range(len(data)):
        with pytest.raises(DamagedData, match=r"^x\.metadata"):
            read(data[:cut], *allowed)
    for place in range(len(data)):
        for flip in (1, 16, 128, 255):
            # Any other error fails the test.
            with contextlib.suppress(DamagedData):
                read(data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :], *allowed)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc.",  # BINBYTES8 of 2**63 bytes
        b"\x80\x04]r\xff\xff\xff\x7f.",  # a memo of 2**31 places: no memory for the places between
        b"\x80\x04\x8b\xff\xff\xff\x7fabc.",  # LONG4 of 2**31 bytes
        b"\x80\x04" + b"(" * 100_000 + b"t.",
        b"\x80\x04e.",
        b"",
        b"\x80\x04NN.",
    ],
)
def test_hostile_lengths_cost_no_memory(data: bytes) -> None:
    with contextlib.suppress(DamagedData):
        assert read(data) == []
