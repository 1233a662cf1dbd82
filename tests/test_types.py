"""What the design's words are written as, for people."""

from __future__ import annotations

import time

from ckpt.types import Epoch, format_count


def test_one_is_counted_as_one() -> None:
    assert [format_count(count, "step") for count in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


def test_of_two_starts_in_one_second_the_later_has_the_newer_epoch() -> None:
    epochs = []
    for _ in range(20):
        epochs.append(Epoch.new(1))
        time.sleep(0.001)
    assert sorted(epochs) == epochs
