"""From tensors on n ranks to tensors on m ranks through division, staging, hashing, assembling and resharding."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.layout.assemble import Incomplete, assemble
from ckpt.layout.division import divide, find_agreed, make_owned
from ckpt.layout.reshard import Want
from tests.layout.jobs import Rank, fetch, random_array, random_ranks, random_state, region, take, wants_of

SEEDS = st.integers(0, 2**32)


def check(snapshot, assembled, state, wants):
    for want, out in zip(wants, fetch(snapshot, assembled, wants), strict=True):
        expected = state[want.name][1][region(want.box)]
        assert out.tobytes() == np.ascontiguousarray(expected).tobytes(), want


@settings(max_examples=150)
@given(SEEDS, st.integers(1, 8), st.integers(1, 8), st.sampled_from((64, 256, 1024)), st.booleans())
def test_what_n_ranks_staged_comes_back_on_m_ranks_bit_for_bit(seed, world, other_world, frame_bytes, divided):
    rng = random.Random(seed)
    state = random_state(rng, 12)
    ranks = random_ranks(rng, state, world)
    agreed, differing = find_agreed([rank.layout() for rank in ranks], [rank.hashes() for rank in ranks])
    assert not differing
    snapshot = take(ranks, agreed if divided else None, frame_bytes)
    assembled = assemble(rng.sample(snapshot.staged, world), snapshot.read)
    assert assembled.differing_tensors == ()
    wants = wants_of(rng, state, other_world)
    check(snapshot, assembled, state, wants)


@settings(max_examples=60)
@given(SEEDS, st.integers(1, 5))
def test_without_any_one_part_a_divided_snapshot_is_incomplete(seed, world):
    rng = random.Random(seed)
    state = random_state(rng, 6)
    ranks = random_ranks(rng, state, world)
    agreed, _ = find_agreed([rank.layout() for rank in ranks], [rank.hashes() for rank in ranks])
    whole = take(ranks, agreed)
    choices = [(r, i) for r, staged in enumerate(whole.staged) for i in range(len(parts_of(ranks, agreed)[r]))]
    if not choices:
        return
    drop = rng.choice(choices)
    part = parts_of(ranks, agreed)[drop[0]][drop[1]]
    lost = ranks[drop[0]].layout().entries[part.entry].name
    snapshot = take(ranks, agreed, drop=drop)
    with pytest.raises(Incomplete) as caught:
        assemble(snapshot.staged, snapshot.read)
    assert caught.value.missing == (lost,)
    assert lost in str(caught.value)


def parts_of(ranks, agreed):
    return divide([rank.layout() for rank in ranks], agreed, 256)


@settings(max_examples=100)
@given(SEEDS, st.integers(2, 5), st.booleans(), st.sampled_from(("unhashed", "hashed", "owned")))
def test_replicas_that_differ_come_back_to_each_rank_as_it_held_them(seed, world, with_read, how):
    """Found by the hashes before, or only when the frames are compared: no rank gets another's bytes."""
    rng = random.Random(seed)
    state = random_state(rng, 8)
    ranks = random_ranks(rng, state, world)
    spoilt = spoil(rng, ranks)
    layouts = [rank.layout() for rank in ranks]
    agreed, differing = find_agreed(layouts, [rank.hashes() for rank in ranks])
    assert differing == {(name, "") for name in spoilt}
    if how == "owned":
        for rank in ranks:
            rewritten = make_owned(rank.layout(), spoilt, rank.coordinate)
            rank.held = {(entry.name, entry.owner): rank.held[entry.name, ""] for entry in rewritten.entries}
    snapshot = take(ranks, None if how == "unhashed" else agreed)
    assembled = assemble(snapshot.staged, snapshot.read if with_read else None)
    if how == "owned":
        assert assembled.differing_tensors == ()
    elif with_read:
        assert set(assembled.differing_tensors) == spoilt
    else:
        assert set(assembled.differing_tensors) >= spoilt
    owners = {(spec.name, spec.owner.partition("@")[0]) for spec in assembled.manifest.tensors}
    for rank in ranks:
        wants, expected = [], []
        for (name, _), (dtype, shape, boxes) in rank.held.items():
            owner = rank.coordinate if (name, rank.coordinate) in owners else ""
            wants += [Want(name, owner, dtype, shape, box) for box, _ in boxes]
            expected += [array for _, array in boxes]
        for out, array in zip(fetch(snapshot, assembled, wants), expected, strict=True):
            assert out.tobytes() == np.ascontiguousarray(array).tobytes()


def spoil(rng: random.Random, ranks: list[Rank]) -> set[str]:
    """Gives some boxes that several ranks hold other bytes on one of them; the names."""
    names = set()
    for r, rank in enumerate(ranks):
        for key, (dtype, _, boxes) in rank.held.items():
            for i, (box, array) in enumerate(boxes):
                others = [o for o in ranks[:r] if key in o.held and any(b == box for b, _ in o.held[key][2])]
                if others and box.size and rng.random() < 0.3:
                    other = random_array(rng, dtype, box.shape)
                    while other.tobytes() == np.ascontiguousarray(array).tobytes():
                        other = random_array(rng, dtype, box.shape)
                    boxes[i] = (box, other)
                    names.add(key[0])
    return names
