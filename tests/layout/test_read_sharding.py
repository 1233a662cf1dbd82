"""Each frame has one home, that all nodes agree on, with its fair share of the bytes and a place of its own there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import UsageError
from ckpt.format.manifest import FRAME
from ckpt.layout.read_sharding import shard_reads


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
    found = shard_reads(frames(contents), count)
    for node in range(count):
        mine = found.frames_of(node)
        lengths = [contents[frame][1] for frame in mine]
        assert found.offsets[mine].tolist() == [sum(lengths[:number]) for number in range(len(lengths))]
        assert found.node_bytes[node] == sum(lengths)
    assert sum(len(found.frames_of(node)) for node in range(count)) == len(set(contents))
    firsts = found.home_nodes[found.first_equal == np.arange(len(contents))]
    assert firsts.tolist() == sorted(firsts.tolist()), "what lies together is read together"
    for frame, content in enumerate(contents):
        first = contents.index(content)
        assert found.first_equal[frame] == first
        assert found.home_nodes[frame] == found.home_nodes[first]
        assert found.offsets[frame] == found.offsets[first]


@given(CONTENTS, st.integers(1, 9))
def test_no_home_has_more_than_its_share_of_the_bytes_and_a_frame(contents: list[tuple[int, int]], count: int) -> None:
    found = shard_reads(frames(contents), count)
    total, largest = sum(length for _, length in set(contents)), max([length for _, length in contents], default=0)
    assert sum(found.node_bytes) == total
    assert max(found.node_bytes) <= total / count + largest


@given(CONTENTS, st.integers(1, 9), st.sets(st.integers(0, 59)))
def test_only_what_is_to_be_read_has_a_home_and_takes_room_there(
    contents: list[tuple[int, int]], count: int, wanted: set[int]
) -> None:
    only = np.array(sorted(number for number in wanted if number < len(contents)), np.int64)
    found, alone = shard_reads(frames(contents), count, only), shard_reads(frames(contents)[only], count)
    assert np.flatnonzero(found.home_nodes >= 0).tolist() == only.tolist()
    assert found.home_nodes[only].tolist() == alone.home_nodes.tolist()
    assert found.offsets[only].tolist() == alone.offsets.tolist()
    assert found.first_equal[only].tolist() == only[alone.first_equal].tolist()
    assert found.node_bytes == alone.node_bytes
    for node in range(count):
        assert found.frames_of(node).tolist() == only[alone.frames_of(node)].tolist()


def test_without_nodes_there_is_no_answer() -> None:
    with pytest.raises(UsageError):
        shard_reads(frames([]), 0)
