"""Frames that come from other nodes' memory take no more of this one's than there is room for, whatever is wanted."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import pytest

from ckpt.agent.arena import Arena
from ckpt.agent.checkpoint import Reader, put_together
from ckpt.agent.fetch import Restore
from ckpt.agent.gathering import Places
from ckpt.agent.network import Network, NodeAt
from ckpt.agent.peerframes import PeerFrames
from ckpt.errors import AgentError
from tests.agent.nodes.staged import FRAME_BYTES, Net, Turned, identity, staged
from tests.agent.receiver import Rank

STEP = identity(5)
ROOM = 2 * FRAME_BYTES
PAGES = 2 * mmap.PAGESIZE  # one in each arena, with frames that are smaller than it


class Coming:
    """One transfer, which the test lets come."""

    def __init__(self, target: memoryview, frames: Any, only: list[int], landed: Callable[[int], None]) -> None:
        self.target, self.frames, self.only, self.landed = target, frames, only, landed
        self.done: Future[None] = Future()

    def cancel(self) -> None:
        if not self.done.done():
            self.done.set_exception(AgentError("called off"))


class Carrier:
    """Between this node and one that has every rank's arena."""

    def __init__(self, arenas: dict[int, Arena]) -> None:
        self.arenas = arenas
        self.coming: list[tuple[int, Coming]] = []
        self.fetched: list[int] = []  # bytes of each transfer
        self.broken: set[str] = set()  # of these agents nothing comes

    def fetch(
        self, peer: str, _: Any, name: str, target: memoryview, frames: Any, only: list[int], landed: Any, **__: Any
    ) -> Coming:
        if peer in self.broken:
            raise AgentError("it is gone")
        made = Coming(target, frames, only, landed)
        self.coming.append((int(name.rsplit("/", 1)[1]), made))
        self.fetched.append(int(frames.lengths[only].sum()))
        return made

    def come(self) -> None:
        """The oldest transfer, whole."""
        rank, each = self.coming.pop(0)
        for number in each.only:
            offset, length = each.frames.places()[number]
            each.target[offset : offset + length] = self.arenas[rank].view[offset : offset + length]
            each.landed(number)
        each.done.set_result(None)


class Start:
    """Of `count` ranks on a node that has nothing, from one that has a checkpoint of two."""

    def __init__(self, turned: Turned, count: int, holders: tuple[str, ...] = ("b",)) -> None:
        self.turned, self.given = turned, staged(STEP, 2)
        made = put_together(STEP, Reader().read(STEP, 2, self.given, keep_hashes=False), self.given)
        sizes = {rank: arena.bytes for rank, arena in self.given.items()}
        places = Places(STEP, made.ranks, made.offsets, sizes, {rank: list(holders) for rank in (0, 1)})
        self.carrier = Carrier(self.given)
        network = cast(Network, Net(transport=self.carrier))
        nodes = [NodeAt(name, (), ()) for name in holders]
        self.peers = PeerFrames(places, made.manifest, network, nodes, turned.post, lambda: ROOM, FRAME_BYTES)
        later = lambda delay_s, what: None  # noqa: E731
        self.restore = Restore(
            STEP, made.manifest, count, None, None, turned.bulk, later, turned.post, peers=self.peers
        )
        self.frames = list(range(len(made.manifest.frames)))
        self.total = int(made.manifest.frames["length"].sum())
        self.ranks = [Rank(turned.post, self) for _ in range(count)]
        self.bytes_of = {
            frame: bytes(self.given[int(made.ranks[frame])].part((int(made.offsets[frame]), int(length))))
            for frame, length in enumerate(made.manifest.frames["length"].tolist())
        }

    def taken(self) -> int:
        return sum(512 * os.fstat(arena.fd).st_blocks for arena in self.peers.arenas.values())

    def close(self) -> None:
        self.restore.close()
        for each in (*self.ranks, *self.given.values()):
            each.close()


@pytest.fixture
def turned() -> Iterator[Turned]:
    made = Turned()
    yield made
    made.close()


def test_all_of_a_checkpoint_passes_through_the_room_there_is_and_comes_once_for_all_ranks(turned: Turned) -> None:
    start = Start(turned, 2)
    try:
        for rank in start.ranks:
            start.restore.request(rank, start.frames)
        while not all(rank.outcome for rank in start.ranks):
            turned.until(lambda: bool(start.carrier.coming) or all(rank.outcome for rank in start.ranks))
            if start.carrier.coming:
                start.carrier.come()
                assert start.taken() <= ROOM + PAGES
        assert start.total > 3 * ROOM
        assert sum(start.carrier.fetched) == start.total
        assert max(start.carrier.fetched) <= ROOM
        for rank in start.ranks:
            assert rank.got == start.bytes_of
            assert rank.outcome is not None
            assert rank.outcome["sources"] == {"peer": start.total}
        assert start.taken() <= PAGES
    finally:
        start.close()


def test_what_a_rank_still_reads_stays_and_what_nobody_waits_for_any_more_goes(turned: Turned) -> None:
    start = Start(turned, 2)
    slow, gone = start.ranks
    slow.deaf = gone.deaf = True
    try:
        start.restore.request(slow, start.frames[:1])
        start.restore.request(gone, start.frames)
        while start.carrier.coming:
            start.carrier.come()
        turned.until(lambda: len(start.peers.here) == 2)
        start.restore.drop(gone)
        assert start.peers.here == {0}
        region = next(iter(slow.regions.values()))
        rank = int(start.peers.places.ranks[0])
        at = int(start.peers.places.offsets[0])
        assert bytes(region.view[at : at + FRAME_BYTES]) == start.bytes_of[0], rank
        start.restore.got(slow, [0], [])
        assert slow.outcome is not None
        while start.peers._coming:
            if start.carrier.coming:
                start.carrier.come()
            turned.until(lambda: start.carrier.coming or not start.peers._coming)
        assert not start.peers.here
        assert start.taken() <= ROOM + PAGES
    finally:
        start.close()


def test_where_one_holder_gives_nothing_another_does_within_the_same_room(turned: Turned) -> None:
    start = Start(turned, 1, ("a", "b"))
    start.carrier.broken = {"a"}
    try:
        start.restore.request(start.ranks[0], start.frames)
        while start.ranks[0].outcome is None:
            turned.until(lambda: bool(start.carrier.coming) or start.ranks[0].outcome is not None)
            if start.carrier.coming:
                start.carrier.come()
                assert start.taken() <= ROOM + PAGES
        assert start.ranks[0].got == start.bytes_of
    finally:
        start.close()


def test_where_nobody_gives_any_of_it_that_is_said_and_nothing_is_waited_for(turned: Turned) -> None:
    start = Start(turned, 1, ("a",))
    start.carrier.broken = {"a"}
    try:
        start.restore.request(start.ranks[0], start.frames)
        turned.until(lambda: start.ranks[0].outcome is not None)
        assert start.ranks[0].outcome is not None
        assert start.ranks[0].outcome["ok"] is False
    finally:
        start.close()


def test_only_whole_pages_within_are_given_back() -> None:
    arena = Arena.create(16 * 4096)
    try:
        arena.view[:] = b"x" * arena.bytes
        arena.give_back(4000, 5000)
        assert bytes(np.unique(np.frombuffer(arena.view[4096:8192], np.uint8))) == b"\0"
        assert bytes(arena.view[:4096]) == b"x" * 4096
        assert bytes(arena.view[8192:]) == b"x" * (arena.bytes - 8192)
        arena.give_back(100, 200)
        assert bytes(arena.view[:4096]) == b"x" * 4096
    finally:
        arena.close()
