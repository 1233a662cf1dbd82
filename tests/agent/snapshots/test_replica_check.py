"""What the samples of several ranks say of the boxes that they hold together."""

from __future__ import annotations

import numpy as np
import pytest

from ckpt.agent.snapshots.replica_check import ReplicaCheck, find_shared_boxes
from ckpt.errors import AgentError
from ckpt.format.declaration import SAMPLE
from ckpt.layout.layout import Entry, Layout
from ckpt.types import Box

WHOLE = Box((0,), (4,))


def layout(*names: str) -> Layout:
    return Layout(tuple(Entry(name, "float32", (4,), (WHOLE,)) for name in names))


def said(**hashes: int) -> bytes:
    """By place in the rank's layout: `b0=5` is 5 of its first box."""
    return np.array([(int(name[1:]), value) for name, value in hashes.items()], SAMPLE).tobytes()


def test_a_tensor_is_named_where_a_rank_that_holds_it_samples_it_otherwise() -> None:
    same = layout("a", "b", "c")
    places, comparing = find_shared_boxes([same, same, layout("b", "z")], ()), ReplicaCheck()
    assert comparing.find_differing(1, places, 0, said(b0=1, b1=2, b2=3)) == []
    assert comparing.find_differing(1, places, 1, said(b0=1, b2=4)) == ["c"]
    assert comparing.find_differing(1, places, 2, said(b0=9, b1=1)) == ["b"]
    assert comparing.find_differing(2, places, 1, said(b0=5, b2=4)) == []
    assert comparing.find_differing(2, places, 0, said(b0=5, b2=4)) == []


def test_what_is_the_ranks_own_or_of_another_shape_is_not_compared() -> None:
    other = Layout((Entry("a", "float32", (4,), (WHOLE,)), Entry("b", "float32", (4,), (Box((0,), (2,)),))))
    places, comparing = find_shared_boxes([layout("a", "b"), other], {"a"}), ReplicaCheck()
    assert comparing.find_differing(1, places, 0, said(b0=1, b1=1)) == []
    assert comparing.find_differing(1, places, 1, said(b0=2, b1=2)) == []


def test_a_longer_sample_of_one_box_is_compared_too_and_a_tensor_is_named_once() -> None:
    comparing = ReplicaCheck()
    for number, rank, name, digest, named in (
        (1, 0, "a", b"x", []),
        (1, 1, "a", b"y", ["a"]),
        (1, 2, "a", b"z", []),
        (1, 0, "b", b"x", []),
        (2, 1, "b", b"y", []),
    ):
        assert comparing.find_differing(number, None, rank, None, [name, [0, 4], digest]) == named
    assert comparing.differing == {"a"}


@pytest.mark.parametrize("data", [b"123", said(b7=1)])
def test_samples_that_cannot_be_are_refused(data: bytes) -> None:
    with pytest.raises(AgentError, match="sample"):
        ReplicaCheck().find_differing(1, find_shared_boxes([layout("a")], ()), 0, data)
