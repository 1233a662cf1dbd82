"""A node's step time against the median of its peers."""

from __future__ import annotations

import pytest

from ckpt.predict.paces import Paces


def test_who_is_slow_is_slower_than_the_median_and_who_is_fast_faster() -> None:
    paces = Paces()
    assert paces.observed(0.0, {"a": 0, "b": 0, "c": 0, "d": 0}) == {}
    found = paces.observed(10.0, {"a": 100, "b": 100, "c": 50, "d": 200})
    assert found == pytest.approx({"a": 1.0, "b": 1.0, "c": 2.0, "d": 0.5})


def test_of_too_few_or_of_who_stands_still_nothing_is_said() -> None:
    paces = Paces()
    paces.observed(0.0, {"a": 0, "b": 0, "c": 0})
    assert paces.observed(5.0, {"a": 10, "b": 10, "c": 0}) == {}
    assert paces.observed(10.0, {"a": 20, "b": 20, "c": 10})["c"] == pytest.approx(2.0), "counted from its last step"


def test_who_goes_back_begins_anew() -> None:
    paces = Paces()
    paces.observed(0.0, {"a": 100, "b": 100, "c": 100})
    assert paces.observed(1.0, {"a": 0, "b": 0, "c": 0}) == {}
    assert paces.observed(2.0, {"a": 10, "b": 10, "c": 10})["a"] == 1.0
