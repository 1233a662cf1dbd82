"""Placement, stripes and parity together: any nodes that may be lost come back bit for bit from what is left."""

from __future__ import annotations

import itertools
import random

import pytest

from ckpt.format import parity
from ckpt.format.parity import Row, add_data, pieces, solve_lost
from ckpt.placement.groups import PlacementNode
from ckpt.placement.placement import Parity, place

SCRATCH = parity.ParityScratch()

Frames = list[bytes]


def protect(states: dict[str, Frames], option: Parity, nodes: list[PlacementNode]):
    """(the placement, each holder's parity by (group, stripe, row)), as agents would make it: frame by frame, in any
    order of the members."""
    placement = place(nodes, option)
    kept: dict[tuple[int, int, Row], tuple[str, bytearray]] = {}
    for g, group in enumerate(placement.groups):
        for s, stripe in enumerate(group.stripes):
            for row, holder in zip(Row, stripe.holders, strict=False):
                target = bytearray(stripe.length)
                for place_in_stripe, part in reversed(list(enumerate(stripe.parts))):
                    frames = states[group.members[part.member]]
                    for piece in pieces([len(frame) for frame in frames], part.start, part.stop):
                        data = memoryview(frames[piece.frame])[piece.offset : piece.offset + piece.length]
                        add_data(target, piece.stripe_offset, {place_in_stripe: data}, row, SCRATCH)
                kept[g, s, row] = group.members[holder], target
    return placement, kept


def recovered(states: dict[str, Frames], gone: tuple[str, ...], placement, kept) -> dict[str, bytes]:
    """The states of who is gone, from the states and parities of who is not."""
    whole = {name: b"".join(frames) for name, frames in states.items() if name not in gone}
    found = {name: bytearray(sum(map(len, states[name]))) for name in gone}
    for g, group in enumerate(placement.groups):
        for s, stripe in enumerate(group.stripes):
            lost = [k for k, part in enumerate(stripe.parts) if group.members[part.member] in gone]
            left = {
                row: bytearray(kept[g, s, row][1]) for row in Row if kept.get((g, s, row), (gone[0],))[0] not in gone
            }
            if not lost:
                continue
            for row, target in left.items():
                for k, part in enumerate(stripe.parts):
                    if k not in lost:
                        add_data(
                            target, 0, {k: whole[group.members[part.member]][part.start : part.stop]}, row, SCRATCH
                        )
            for k, data in zip(lost, solve_lost(lost, left, SCRATCH), strict=True):
                part = stripe.parts[k]
                found[group.members[part.member]][part.start : part.stop] = data[: part.stop - part.start]
    return {name: bytes(data) for name, data in found.items()}


@pytest.mark.parametrize("option", [Parity(1, 1), Parity(3, 1), Parity(2, 2), Parity(4, 2)])
@pytest.mark.parametrize("count", [3, 4, 5, 7])
def test_any_losses_that_the_option_bears_are_made_good_bit_for_bit(option, count, seed):
    rng = random.Random(seed)
    states = {
        f"n{i}": [rng.randbytes(rng.choice((1, 4096, 5000, 20_000))) for _ in range(rng.randrange(5))]
        for i in range(count)
    }
    nodes = [PlacementNode(name, sum(map(len, frames)), 1 << 30) for name, frames in states.items()]
    states["m"] = []
    placement, kept = protect(states, option, [*nodes, PlacementNode("m", 0, 1 << 30, has_state=False)])
    assert placement.shortfalls == ()
    for gone in itertools.combinations(states, option.parity):
        found = recovered(states, gone, placement, kept)
        assert found == {name: b"".join(states[name]) for name in gone}
