"""What the design's words are written as, for people."""

from __future__ import annotations

from ckpt.types import format_count


def test_one_is_counted_as_one() -> None:
    assert [format_count(count, "step") for count in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
