"""A home reads each frame once for all nodes that want it, and each of them is told of it once."""

from __future__ import annotations

from ckpt.agent.restore.shared_home import ALIVE_S, ReadRequests
from ckpt.types import OWN_NODE


def test_a_frame_that_several_want_is_read_once_and_each_of_them_is_told_once() -> None:
    asked = ReadRequests()
    assert asked.add([1, 2], "a") == [1, 2]
    assert asked.add([2, 3], "b") == [3]
    assert asked.add([3], OWN_NODE) == []
    assert asked.add([1], "b") == []
    for frame in (1, 2, 3):
        asked.end_frame(frame, frame != 3)
    asked.end_frame(1, False)  # a pass ends with all that it has not read
    assert asked.take_reports(0.0) == {"a": ([1, 2], []), "b": ([1, 2], [3]), OWN_NODE: ([], [3])}
    assert asked.take_reports(0.0) == {}
    assert asked.add([1, 3], "c") == []
    assert asked.take_reports(0.0) == {"c": ([1], [3])}, "at once"


def test_who_waits_hears_now_and_then_that_reading_goes_on() -> None:
    asked = ReadRequests()
    asked.add([1, 2], "a")
    asked.add([2], OWN_NODE)
    assert asked.take_reports(10.0) == {"a": ([], [])}
    assert asked.take_reports(10.0 + ALIVE_S / 2) == {}
    assert asked.take_reports(10.0 + ALIVE_S) == {"a": ([], [])}
