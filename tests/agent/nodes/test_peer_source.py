"""Frames that come from other nodes' memory take no more of this one's than the window, whatever is wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.restore.peer_fetch import IN_FLIGHT
from ckpt.agent.restore.peer_source import PeerSource
from ckpt.agent.restore.sources import open_session
from ckpt.agent.snapshots.manifest_gather import FramePlaces
from ckpt.agent.snapshots.memory_checkpoint import StagedReader, assemble_checkpoint
from ckpt.errors import AgentError, DamagedData, NotFound
from ckpt.ipc.arena import Arena
from ckpt.ipc.node_list import NodeAt
from ckpt.store.reader import FrameReader
from tests.agent.nodes.staged import FRAME_BYTES, Net, Turned, identity, staged
from tests.agent.receiver import Rank

STEP = identity(5)
CELLS = 8


class Coming:
    """One transfer, which the test lets come."""

    def __init__(self, target: memoryview, frames: Any, numbers: list[int], landed: Callable[[int], None]) -> None:
        self.target, self.frames, self.numbers, self.landed = target, frames, numbers, landed
        self.completion: Future[None] = Future()

    def cancel(self) -> None:
        if not self.completion.done():
            self.completion.set_exception(AgentError("called off"))


class Carrier:
    """Between this node and others, which have every rank's arena."""

    def __init__(self, arenas: dict[int, Arena], places: FramePlaces, manifest: Any) -> None:
        self.arenas = arenas
        self.offers = {rank: places.frames(rank, manifest).byte_ranges() for rank in arenas}
        self.coming: list[tuple[str, int, Coming]] = []
        self.fetched: list[int] = []  # bytes of each transfer
        self.asked: list[str] = []  # and of whom
        self.broken: set[str] = set()  # of these agents nothing comes

    def fetch(
        self,
        peer: str,
        addresses: Any,
        name: str,
        target: memoryview,
        frames: Any,
        landed: Callable[[int], None],
        *,
        urgent: bool,
        numbers: list[int],
    ) -> Coming:
        assert urgent
        self.asked.append(peer)
        if peer in self.broken:
            raise AgentError("it is gone")
        made = Coming(target, frames, numbers, landed)
        self.coming.append((peer, int(name.rsplit("/", 1)[1]), made))
        self.fetched.append(int(frames.lengths.sum()))
        return made

    def come(self, count: int | None = None) -> None:
        """The oldest transfer, whole; or so much of it, and then its end."""
        _, rank, each = self.coming.pop(0)
        for at, (offset, length) in enumerate(each.frames.byte_ranges()[:count]):
            there, theirs = self.offers[rank][each.numbers[at]]
            assert theirs == length
            each.target[offset : offset + length] = self.arenas[rank].view[there : there + length]
            each.landed(at)
        if count is None:
            each.completion.set_result(None)
        else:
            each.cancel()


class Start:
    """Of `count` ranks on a node that has nothing. `holders`: who has which rank of the checkpoint, the first to be
    asked first. `open_record`: of the store; None: it is not there."""

    def __init__(
        self,
        turned: Turned,
        count: int,
        *holders: tuple[str, ...],
        cells: int = CELLS,
        open_record: Callable[[], FrameReader] | None = None,
    ) -> None:
        self.turned, world = turned, len(holders)
        self.given = staged(STEP, world)
        made = assemble_checkpoint(STEP, StagedReader().read(STEP, world, self.given, keep_hashes=False), self.given)
        sizes = {rank: arena.size_bytes for rank, arena in self.given.items()}
        places = FramePlaces(
            STEP, made.ranks, made.offsets, sizes, {rank: list(each) for rank, each in enumerate(holders)}
        )
        self.carrier = Carrier(self.given, places, made.manifest)
        network = cast(PeerNetwork, Net(transport=self.carrier))
        nodes = [NodeAt(name, (), ()) for name in {name for each in holders for name in each}]
        self.peers = PeerSource(places, network, nodes)
        self.timers: list[Callable[[], None]] = []
        loop: Any = SimpleNamespace(post=turned.post, call_later=lambda delay_s, what: self.timers.append(what))
        services = turned.workers, loop, cells * int(made.manifest.frames["length"].max())
        self.restore = open_session(STEP, made.manifest, count, None, open_record, *services, peers=self.peers)
        self.frames = list(range(len(made.manifest.frames)))
        self.total = int(made.manifest.frames["length"].sum())
        self.ranks = [Rank(turned.post, self) for _ in range(count)]
        self.bytes_of = {
            frame: bytes(self.given[int(made.ranks[frame])].part((int(made.offsets[frame]), int(length))))
            for frame, length in enumerate(made.manifest.frames["length"].tolist())
        }

    def end(self, *ranks: Rank) -> None:
        """All comes that is asked for, until these ranks (all by default) have heard what has become of it."""
        over = lambda: all(rank.outcome for rank in ranks or self.ranks)  # noqa: E731
        while not over():
            self.turned.until(lambda: bool(self.carrier.coming) or over())
            if self.carrier.coming:
                self.carrier.come()

    def close(self) -> None:
        self.restore.close()
        for each in (*self.ranks, *self.given.values()):
            each.close()


Begin = Callable[..., Start]


@pytest.fixture
def begin(turned: Turned) -> Iterator[Begin]:
    with ExitStack() as stack:
        yield lambda *given, **more: stack.enter_context(closing(Start(turned, *given, **more)))


@pytest.mark.parametrize("cells", [1, 2, CELLS, 64])
def test_all_of_a_checkpoint_passes_through_the_window_and_comes_once_for_all_ranks(cells: int, begin: Begin) -> None:
    start = begin(2, ("b",), ("b",), cells=cells)
    for rank in start.ranks:
        start.restore.request(rank, start.frames)
    start.end()
    assert sum(start.carrier.fetched) == start.total
    for rank in start.ranks:
        assert rank.got == start.bytes_of
        assert rank.outcome is not None
        assert rank.outcome["sources"] == {"peer": start.total}
        assert [arena.size_bytes for arena in rank.regions.values()] == [cells * FRAME_BYTES]
    window = start.restore.window
    assert window.free_count == window.cell_count, "each cell was given back"


def test_what_a_rank_still_reads_stays_and_what_nobody_waits_for_any_more_makes_room(
    begin: Begin, turned: Turned
) -> None:
    start = begin(2, ("b",), ("b",), cells=2)
    slow, gone = start.ranks
    slow.deaf = gone.deaf = True
    start.restore.request(slow, start.frames[:1])
    start.restore.request(gone, start.frames)
    window = start.restore.window
    while start.carrier.coming:
        start.carrier.come()
        turned.until(lambda: start.carrier.coming or not window.free_count)
    start.restore.drop_request(gone)
    turned.until(lambda: start.carrier.coming)
    start.carrier.come()
    offset = start.restore._requests_by_receiver[id(slow)].given_frames[0].cell
    assert offset is not None
    (region,) = slow.regions.values()
    assert bytes(region.view[offset : offset + FRAME_BYTES]) == start.bytes_of[0]
    start.restore.acknowledge_frames(slow, [0], [])
    assert slow.outcome is not None
    assert slow.outcome["ok"]


@pytest.mark.parametrize("how", ["broken", "cut", "gone"])
def test_where_one_holder_gives_nothing_right_another_does(how: str, begin: Begin, turned: Turned) -> None:
    start = begin(1, ("a", "b"), ("a", "b"))
    (rank,) = start.ranks
    if how == "broken":
        start.carrier.broken = {"a"}
    start.restore.request(rank, start.frames)
    if how == "cut":
        start.carrier.come(1)
    if how == "gone":
        start.restore.handle_disconnect("a")
        while start.carrier.coming and start.carrier.coming[0][0] == "a":
            start.carrier.coming.pop(0)
    start.end()
    assert rank.got == start.bytes_of
    assert rank.outcome is not None
    assert rank.outcome["ok"]


def test_frames_that_only_a_lost_agent_has_are_awaited(begin: Begin) -> None:
    """The link may have been cut, and come back."""
    start = begin(1, ("a",))
    start.restore.request(start.ranks[0], start.frames)
    start.restore.handle_disconnect("a")
    assert start.ranks[0].outcome is None
    start.end()
    assert start.ranks[0].got == start.bytes_of


def test_what_a_rank_finds_wrong_of_other_nodes_memory_is_had_nowhere_else_here_and_ends_the_fetch(
    begin: Begin, turned: Turned
) -> None:
    start = begin(1, ("b",), ("b",))
    (rank,) = start.ranks
    rank.deaf = True
    start.restore.request(rank, [0])
    start.carrier.come()
    turned.until(lambda: rank.regions)
    start.restore.acknowledge_frames(rank, [], [0])
    assert rank.outcome is not None
    assert not rank.outcome["ok"]
    assert "frame 0" in rank.outcome["message"]
    window = start.restore.window
    assert window.free_count == window.cell_count


@pytest.mark.parametrize("count", [1, 2, 4, 16])
def test_one_of_many_holders_that_hangs_keeps_none_of_the_others_waiting(
    count: int, begin: Begin, turned: Turned
) -> None:
    """And a half of the window is left for what ranks read."""
    start = begin(1, *[(f"n{rank % count}",) for rank in range(32)], cells=64)
    (rank,) = start.ranks
    start.restore.request(rank, start.frames)
    window = start.restore.window
    assert {peer for peer, _, _ in start.carrier.coming} == {f"n{number}" for number in range(count)}
    assert window.free_count >= window.cell_count - window.cell_count // IN_FLIGHT
    stuck = [each for each in start.carrier.coming if each[0] == "n0"]
    start.carrier.coming = [each for each in start.carrier.coming if each not in stuck]
    while start.carrier.coming:
        start.carrier.come()
        turned.until(
            lambda: (
                start.carrier.coming
                or not {each for offer in start.restore.fetches._offers for each in offer.fetches}
                - {each for *_, each in stuck}
            )
        )
    lacks = set(start.frames) - rank.got.keys()
    assert {start.peers._places.holders[int(start.peers._places.ranks[frame])][0] for frame in lacks} == {"n0"}
    start.carrier.coming = stuck
    start.end()
    assert rank.got == start.bytes_of


def test_ranks_hear_that_it_goes_on_only_while_something_comes(begin: Begin) -> None:
    start = begin(2, ("a",))
    heard: list[str] = []
    start.ranks[1].send = lambda fields, fds=(): heard.append(fields["t"])  # type: ignore[method-assign]
    for rank, frames in zip(start.ranks, (start.frames, start.frames[-1:]), strict=True):
        start.restore.request(rank, frames)

    def a_while() -> None:
        due, start.timers[:] = list(start.timers), []
        for what in due:
            what()

    a_while()
    assert heard == []
    start.carrier.come()
    start.turned.until(lambda: start.ranks[0].got)
    a_while()
    assert heard[-1] == "progress"
    before = list(heard)
    a_while()
    assert heard == before, "nothing has come since"
    start.end(start.ranks[0])
    start.restore.acknowledge_frames(start.ranks[1], start.frames[-1:], [])
    a_while()
    assert not start.timers, "nobody waits any more"


@pytest.mark.parametrize(
    ("holders", "broken", "kind"),
    [
        ([("a",)], "a", "agent"),
        ([("a", "b")], "ab", "agent"),
        ([("a", "b")], "a", "agent"),
        ([("a", "b")], "", "damaged"),
        ([("a", "b"), ("b",)], "a", "damaged"),
    ],
)
def test_only_what_every_node_gives_wrong_is_called_damaged(
    holders: list[tuple[str, ...]], broken: str, kind: str, begin: Begin
) -> None:
    """What a node that is out of reach may have is not: it would be struck out, and what is older taken for the newest.
    Where one frame is damaged the others do not matter: each start would end so, while some node is lost."""
    start = begin(1, *holders)
    (rank,) = start.ranks
    start.carrier.broken = set(broken)
    first = [int(start.peers._places.numbers(each)[0]) for each in range(len(holders))]
    start.restore.request(rank, first)

    def end() -> bool:
        for _, _, each in start.carrier.coming:
            each.completion.set_exception(DamagedData("wrong too often"))
        start.carrier.coming.clear()
        return rank.outcome is not None

    start.turned.until(end)
    assert rank.outcome is not None
    assert rank.outcome["kind"] == kind
    assert ("could not be reached" in rank.outcome["message"]) == (kind == "agent")


def test_so_is_what_no_store_has_either_though_a_node_that_is_gone_may_have_the_rest_of_it(
    begin: Begin,
) -> None:
    both = threading.Event()

    def open_record() -> FrameReader:
        assert both.wait(60)
        raise NotFound("it was deleted")

    start = begin(1, ("a",), ("b",), open_record=open_record)
    (rank,) = start.ranks
    away, damaged = (int(start.peers._places.numbers(each)[0]) for each in (0, 1))
    start.carrier.broken = {"a"}
    start.restore.request(rank, [away, damaged])

    def end() -> bool:
        for *_, each in start.carrier.coming:
            each.completion.set_exception(DamagedData("wrong too often"))
        start.carrier.coming.clear()
        store = len(start.restore.sources) - 1
        if len(start.restore._awaited.of_source(store, (away, damaged))) == 2:
            both.set()
        return rank.outcome is not None

    start.turned.until(end)
    assert start.restore.unreached_frames == {away}
    assert rank.outcome is not None
    assert rank.outcome["kind"] == "missing"
