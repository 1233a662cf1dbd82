"""What the planner really makes fits the format: every check of the decoders holds for it, and it comes back equal."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.format import declaration, record
from ckpt.layout.assemble import assemble
from ckpt.layout.division import divide, find_agreed
from tests.format.test_declaration import assert_equal
from tests.layout.jobs import random_ranks, random_state, take


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 5), st.sampled_from((64, 256, 1024)), st.booleans())
def test_what_the_planner_makes_comes_back_equal(seed: int, world: int, frame_bytes: int, divided: bool) -> None:
    rng = random.Random(seed)
    ranks = random_ranks(rng, random_state(rng, 12), world)
    layouts = [rank.layout() for rank in ranks]
    agreed, _ = find_agreed(layouts, [rank.hashes() for rank in ranks])
    shares = divide(layouts, agreed if divided else set(), frame_bytes)
    for layout, share in zip(layouts, shares, strict=True):
        assert declaration.decode_layout(declaration.encode_layout(layout)) == layout
        assert declaration.decode_share(declaration.encode_share(share)) == share
    snapshot = take(ranks, agreed if divided else None, frame_bytes)
    for staged in snapshot.staged:
        assert_equal(declaration.decode(declaration.encode(staged.declaration)), staged.declaration)
    made = assemble(snapshot.staged, snapshot.read).manifest
    back = record.decode_manifest(record.encode_manifest(made))
    assert (back.tensors, back.boxes, back.coordinates) == (made.tensors, made.boxes, made.coordinates)
    assert back.frames.tolist() == made.frames.tolist()
    assert back.extents.tolist() == made.extents.tolist()
