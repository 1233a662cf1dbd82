"""The collector is on or off afterwards as it was before, whatever happened."""

from __future__ import annotations

import gc

import pytest

from ckpt.gc_pause import pause_gc


@pytest.fixture(autouse=True)
def as_it_was():
    was_on = gc.isenabled()
    yield
    (gc.enable if was_on else gc.disable)()


@pytest.mark.parametrize("on", [True, False])
def test_it_is_off_meanwhile_and_as_before_afterwards(on: bool) -> None:
    (gc.enable if on else gc.disable)()
    seen = []

    @pause_gc()
    def fails() -> None:
        seen.append(gc.isenabled())
        with pause_gc():
            seen.append(gc.isenabled())
        seen.append(gc.isenabled())
        raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):
            fails()
        assert gc.isenabled() is on
    assert seen == [False] * 6
