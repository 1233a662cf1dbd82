"""Each frame has one home, that all nodes agree on, with its fair share of the bytes and a place of its own there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import UsageError
from ckpt.format.manifest import FRAME
from ckpt.layout.read_sharding import homes


def frames(contents: list[tuple[int, int]]) -> np.ndarray:  # type: ignore[type-arg]
    """Of (what is in it, length)."""
    made = np.zeros(len(contents), FRAME)
    made["hash_hi"] = [content % 3 for content, _ in contents]
    made["hash_lo"] = [content // 3 for content, _ in contents]
    made["length"] = [length for _, length in contents]
    return made


CONTENTS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 1000)), max_size=60)


@given(CONTENTS, st.integers(1, 9))
def test_every_frame_has_one_home_and_a_place_there_that_only_equal_frames_share(
    contents: list[tuple[int, int]], count: int
) -> None:
    found = homes(frames(contents), count)
    for node in range(count):
        mine = found.of(node)
        lengths = [contents[frame][1] for frame in mine]
        assert found.offsets[mine].tolist() == [sum(lengths[:number]) for number in range(len(lengths))]
        assert found.sizes[node] == sum(lengths)
    assert sum(len(found.of(node)) for node in range(count)) == len(set(contents))
    for frame, content in enumerate(contents):
        first = contents.index(content)
        assert found.same[frame] == first
        assert found.nodes[frame] == found.nodes[first]
        assert found.offsets[frame] == found.offsets[first]


@given(CONTENTS, st.integers(1, 9))
def test_no_home_has_more_than_its_share_of_the_bytes_and_a_frame(contents: list[tuple[int, int]], count: int) -> None:
    found = homes(frames(contents), count)
    total, largest = sum(length for _, length in set(contents)), max([length for _, length in contents], default=0)
    assert sum(found.sizes) == total
    assert max(found.sizes) <= total / count + largest


@given(CONTENTS, st.integers(1, 9))
def test_what_lies_together_is_read_together(contents: list[tuple[int, int]], count: int) -> None:
    found = homes(frames(contents), count)
    firsts = found.nodes[found.same == np.arange(len(contents))]
    assert firsts.tolist() == sorted(firsts.tolist())


@given(CONTENTS, st.integers(1, 9), st.sets(st.integers(0, 59)))
def test_only_what_is_to_be_read_has_a_home_and_takes_room_there(
    contents: list[tuple[int, int]], count: int, wanted: set[int]
) -> None:
    only = np.array(sorted(number for number in wanted if number < len(contents)), np.int64)
    found, alone = homes(frames(contents), count, only), homes(frames(contents)[only], count)
    assert np.flatnonzero(found.nodes >= 0).tolist() == only.tolist()
    assert found.nodes[only].tolist() == alone.nodes.tolist()
    assert found.offsets[only].tolist() == alone.offsets.tolist()
    assert found.same[only].tolist() == only[alone.same].tolist()
    assert found.sizes == alone.sizes
    for node in range(count):
        assert found.of(node).tolist() == only[alone.of(node)].tolist()


def test_without_nodes_there_is_no_answer() -> None:
    with pytest.raises(UsageError):
        homes(frames([]), 0)
