"""What the design's words are written as, for people."""

from __future__ import annotations

import time

from ckpt.types import Epoch, format_count, split_by_bytes


def test_one_is_counted_as_one() -> None:
    assert [format_count(count, "step") for count in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


def test_each_run_of_items_has_at_most_the_bytes_or_one_item() -> None:
    lengths = [3, 2, 9, 5, 1]
    assert [lengths[run] for run in split_by_bytes(lengths, 5)] == [[3, 2], [9], [5], [1]]
    assert not list(split_by_bytes([], 5))


def test_of_two_starts_in_one_second_the_later_has_the_newer_epoch() -> None:
    epochs = []
    for _ in range(20):
        epochs.append(Epoch.new(1))
        time.sleep(0.001)
    assert sorted(epochs) == epochs
