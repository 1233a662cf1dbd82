"""Which frames of a committed checkpoint memory has: those whose hash and length are the record's, wherever they lie.
What is odd about them costs no start anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.restore.partial_match import ANSWER_TIMEOUT_S, find_places, match_part, match_rows
from ckpt.agent.runtime.coroutines import Task
from ckpt.agent.snapshots.manifest_gather import FramePlaces, encode_local_parts
from ckpt.agent.snapshots.memory_checkpoint import StagedPart, StagedReader, assemble_checkpoint
from ckpt.errors import AgentError, DamagedData
from ckpt.format.manifest import Manifest
from ckpt.ipc.arena import Arena
from tests.agent.nodes.staged import Asked, MakeStaged, Net, Turned, identity

STEP = identity(5)
WORLD = 4

CONTENTS = st.lists(st.integers(0, 5), max_size=30)


def rows(contents: list[int]) -> np.ndarray[Any, Any]:
    """Equal where these are, and different in one column alone where they are not."""
    return np.array([[each % 2, each // 2 % 2, each // 4] for each in contents], np.uint64).reshape(-1, 3)


@given(CONTENTS, CONTENTS)
def test_each_frame_is_matched_with_an_equal_one_and_no_place_is_given_twice(
    wanted: list[int], held: list[int]
) -> None:
    found = match_rows(rows(wanted), rows(held)).tolist()
    assert all(wanted[number] == held[at] for number, at in enumerate(found) if at >= 0)
    used = [at for at in found if at >= 0]
    assert len(used) == len(set(used)) == (Counter(wanted) & Counter(held)).total()
    for content in set(wanted):
        mine = [at for number, at in enumerate(found) if wanted[number] == content]
        assert mine == [*sorted(at for at in mine if at >= 0), *(at for at in mine if at < 0)], (
            "the first for the first"
        )


@pytest.fixture
def arenas(make_staged: MakeStaged) -> dict[int, Arena]:
    return make_staged(STEP, WORLD)


@pytest.fixture
def manifest(arenas: dict[int, Arena]) -> Manifest:
    return assemble_checkpoint(STEP, StagedReader().read_sealed(STEP, WORLD, arenas), arenas).manifest


def found_of(arenas: dict[int, Arena], manifest: Manifest, parts: list[StagedPart]) -> FramePlaces:
    sizes = {rank: arena.size_bytes for rank, arena in arenas.items()}
    return find_places(STEP, manifest, parts, sizes, {rank: ["b"] for rank in arenas})


@pytest.mark.parametrize("held", [(0,), (1, 3), (3, 2, 1), (0, 1, 2, 3)])
def test_what_is_said_to_lie_somewhere_lies_there_and_what_nobody_holds_is_said_to_lack(
    held: tuple[int, ...], arenas: dict[int, Arena], manifest: Manifest
) -> None:
    whole = assemble_checkpoint(STEP, StagedReader().read_sealed(STEP, WORLD, arenas), arenas)
    places = found_of(arenas, manifest, StagedReader().read_sealed(STEP, WORLD, {rank: arenas[rank] for rank in held}))
    lacking = set(places.missing_frames.tolist())
    for frame, length in enumerate(manifest.frames["length"].tolist()):
        if frame in lacking:
            assert int(whole.ranks[frame]) not in held
            continue
        there = arenas[int(places.ranks[frame])].part((int(places.offsets[frame]), length))
        assert bytes(there) == bytes(whole.frame(frame))
    assert set(places.holders) == set(places.arena_sizes) == set(held)
    told = FramePlaces.parse(STEP, places.blobs(), manifest)
    assert np.array_equal(told.ranks, places.ranks)
    assert told.holders == places.holders


def test_what_contradicts_the_record_or_has_nothing_of_it_is_no_part(
    arenas: dict[int, Arena], manifest: Manifest
) -> None:
    parts = StagedReader().read_sealed(STEP, WORLD, arenas)
    with pytest.raises(AgentError, match="is not what"):
        found_of(arenas, replace(manifest, coordinates=("x", *manifest.coordinates[1:])), parts)
    with pytest.raises(AgentError, match="is not what"):
        found_of(arenas, replace(manifest, coordinates=manifest.coordinates[:2]), parts)
    frames = manifest.frames.copy()
    frames["hash_lo"] += 1
    with pytest.raises(AgentError, match="no frame"):
        found_of(arenas, replace(manifest, frames=frames), parts)


def test_an_arena_without_hashes_says_nothing_of_itself(make_staged: MakeStaged) -> None:
    with pytest.raises(DamagedData):
        StagedReader().read_sealed(STEP, 2, make_staged(STEP, 2, hashed=False))


class Start:
    """It asks: rank 0 lies here, rank 1 at b and c, rank 2 at b, and 3 is lost."""

    def __init__(self, turned: Turned, manifest: Manifest, arenas: dict[int, Arena]) -> None:
        self.turned, self.arenas, self.net = turned, arenas, Net()
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.asking = Task(
            match_part(
                cast(PeerNetwork, self.net),
                turned.workers,
                STEP,
                manifest,
                {0: [""], 1: ["b", "c"], 2: ["b"]},
                {0: arenas[0]},
                lambda delay_s, what: self.timers.append((delay_s, what)),
            )
        )

    def give(self, asked: Asked) -> None:
        theirs = {rank: self.arenas[rank] for rank in asked.fields["ranks"]}
        sizes = [[rank, arena.size_bytes] for rank, arena in theirs.items()]
        asked.answer({"sizes": sizes}, [encode_local_parts(STEP, WORLD, theirs, asked.fields["sealed"])])

    def came(self) -> set[int]:
        """The ranks whose frames are taken from memory."""
        self.turned.until(lambda: self.asking.is_settled)
        return set(self.asking.result().holders)


@pytest.fixture
def start(turned: Turned, manifest: Manifest, arenas: dict[int, Arena]) -> Start:
    return Start(turned, manifest, arenas)


def test_what_all_holders_say_is_put_together(start: Start) -> None:
    start.give(start.net.asked[0])
    assert start.came() == {0, 1, 2}


def test_who_refuses_is_followed_by_the_next_holder_and_what_nobody_gives_is_left_to_the_store(start: Start) -> None:
    for asked in start.net.asked:  # first for all that it holds, then for each rank; the list grows
        if asked.name == "b":
            asked.refuse()
    (last,) = [asked for asked in start.net.asked if asked.name == "c"]
    start.give(last)
    assert start.came() == {0, 1}


def test_who_says_nothing_is_not_waited_for(start: Start) -> None:
    ((delay_s, over),) = start.timers
    assert delay_s == ANSWER_TIMEOUT_S
    start.turned.until(lambda: start.turned.done)
    over()
    start.give(start.net.asked[0])  # too late
    assert start.came() == {0}
