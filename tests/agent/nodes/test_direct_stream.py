"""What one rank alone wants of other nodes' memory is received where it belongs; what does not come so, or not right,
comes as all the rest does, and the bytes are the same. The ranks here are fetched for by the trainer's own `fetch`."""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import pytest

from ckpt.agent.net.transport import STREAM_FRAMES
from ckpt.agent.restore.direct_stream import HOLDER_STREAMS_MAX, RANK_STREAMS_MAX, DirectStreams, FrameStream
from ckpt.agent.restore.rank_request import Origin, RankRequest
from ckpt.errors import AgentError, CkptError
from ckpt.format.frames import frame_hash
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NodeAt
from ckpt.threads import Tasks
from ckpt.trainer.restore.fetch import fetch
from tests.agent.nodes.staged import Turned
from tests.agent.nodes.test_peer_source import STEP, Carrier, Start

STREAM_S = 10.0  # more than the connections of these tests ever wait


class Streams:
    """What the carrier's connections do. `spoil`, `cut_at`: the frame of an offer that comes wrong, and before which
    all ends. `refuse`: nobody is connected. `closed`: asking for it raises. `silent`: nothing comes by them, until they
    are cut."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self.spoil = self.cut_at = -1
        self.refuse = self.silent = self.closed = False
        self.asked: list[list[int]] = []
        self.tasks = Tasks("streams")
        carrier.stream = self.open  # type: ignore[attr-defined]

    def open(self, peer: str, addresses: Any, name: str, numbers: list[int]) -> Future[socket.socket]:
        self.asked.append(numbers)
        opened: Future[socket.socket] = Future()
        if self.closed:
            raise CkptError("closed")
        if self.refuse:
            opened.set_exception(AgentError("it serves others"))
            return opened
        ours, theirs = socket.socketpair()
        rank = int(name.rsplit("/", 1)[1])
        self.tasks.start("gives", lambda: self._give(theirs, rank, numbers))
        opened.set_result(ours)
        return opened

    def _give(self, sock: socket.socket, rank: int, numbers: list[int]) -> None:
        with sock:
            sock.settimeout(STREAM_S)
            try:
                if self.silent:
                    sock.recv(1)
                    return
                for number in numbers:
                    at, length = self._carrier.offers[rank][number]
                    raw = bytearray(self._carrier.arenas[rank].view[at : at + length])
                    if number == self.cut_at:
                        return
                    raw[0] ^= number == self.spoil
                    sock.sendall(raw)
                sock.recv(1)
            except OSError:
                pass  # nobody reads it any more


class Trainer:
    """A rank whose frames the trainer's own code fetches, on a thread. `whole_frames`: which it takes as one run."""

    def __init__(self, start: Start, whole: set[int], deliver: Callable[[int, memoryview], bool] | None = None) -> None:
        self._start, self.whole_frames = start, whole
        self._deliver = deliver or self._copy
        self.rooms = {frame: bytearray(len(start.bytes_of[frame])) for frame in whole}
        self.got: dict[int, bytes] = {}
        self.sources: dict[str, int] = {}
        self.error: Exception | None = None
        self.outcome = False  # whether it is over
        self.tasks = Tasks("trainer", pool_size=3)
        self.fetch_inbox: queue.SimpleQueue[Any] | None = None
        self.connection = self  # of the link that it stands for
        start.ranks.append(self)  # type: ignore[arg-type]
        self.tasks.start("fetch", self._fetch)

    # -- as a link and its connection

    def request(self, kind: str, fields: dict[str, Any], blobs: list[bytes]) -> None:
        wanted, whole = (np.frombuffer(blob, "<u4").tolist() for blob in blobs)
        self._start.turned.post(lambda: self._start.restore.request(self, wanted, whole))

    def notify(self, kind: str, fields: dict[str, Any]) -> None:
        restore = self._start.restore
        assert kind == "frames-received"
        self._start.turned.post(lambda: restore.handle_received(self, fields))

    # -- as its agent sees it

    def send(self, fields: dict[str, Any], fds: Any = ()) -> None:
        if self.fetch_inbox is not None:
            self.fetch_inbox.put(Message(fields, [socket.dup(fd) for fd in fds], []))

    # -- as rooms

    def frame_memory(self, frame: int) -> memoryview:
        return memoryview(self.rooms[frame])

    def has_right_hash(self, frame: int, value: tuple[int, int]) -> bool:
        return value == frame_hash(self._start.bytes_of[frame])

    # -- inside

    def _copy(self, frame: int, raw: memoryview) -> bool:
        self.got[frame] = bytes(raw)
        return True

    def _fetch(self) -> None:
        try:
            self.sources = fetch(cast(Any, self), self.tasks, STEP, self._start.frames, self._deliver, self)
        except Exception as exc:
            self.error = exc.with_traceback(None)  # which would keep what was copied from
        self.outcome = True
        self._start.turned.post(lambda: None)

    def has(self) -> dict[int, bytes]:
        return {**{frame: bytes(room) for frame, room in self.rooms.items()}, **self.got}

    def close(self) -> None:
        self.tasks.close()


def streams_of(start: Start) -> dict[int, FrameStream]:
    (streams,) = (each for each in start.restore.sources if isinstance(each, DirectStreams))
    return streams._streams


Begin = Callable[..., tuple[Start, Streams]]


@pytest.fixture
def begun(turned: Turned) -> Iterator[Begin]:
    made: list[tuple[Start, Streams]] = []

    def begin(*holders: tuple[str, ...], cells: int = 64) -> tuple[Start, Streams]:
        start = Start(turned, 0, *holders, cells=cells)
        start.restore._count = 1
        made.append((start, Streams(start.carrier)))
        return made[-1]

    yield begin
    for start, streams in made:
        start.close()
        streams.tasks.close()


def test_what_one_rank_takes_whole_is_received_where_it_belongs(begun: Begin) -> None:
    start, streams = begun(("b",), ("b",))
    rank = Trainer(start, set(start.frames[1:-1]))
    start.end()
    assert rank.error is None
    assert rank.has() == start.bytes_of
    assert rank.got.keys() == {start.frames[0], start.frames[-1]}, "the rest came through the window"
    assert rank.sources == {"peer": start.total}
    assert sum(start.carrier.fetched) == sum(len(raw) for raw in rank.got.values()), "nothing came twice"
    assert sum(map(len, streams.asked)) == len(rank.whole_frames)
    assert len(streams.asked) == 2, "few frames are not divided among connections"


@pytest.mark.parametrize("how", ["refused", "closed", "cut", "wrong", "gone"])
def test_what_does_not_come_straight_or_not_right_comes_through_the_window(
    how: str, begun: Begin, turned: Turned
) -> None:
    start, streams = begun(("a", "b"), ("a", "b"))
    streams.refuse, streams.closed, streams.silent = how == "refused", how == "closed", how == "gone"
    streams.cut_at, streams.spoil = (2 if how == "cut" else -1), (1 if how == "wrong" else -1)
    rank = Trainer(start, set(start.frames))
    if how == "gone":
        turned.until(lambda: streams.asked)
        turned.until(lambda: any(each.sock is not None for each in streams_of(start).values()))
        start.restore.handle_disconnect("a")
    start.end()
    assert start.carrier.asked[0] == ("b" if how == "gone" else "a"), "who is gone is asked last"
    assert rank.error is None
    assert rank.has() == start.bytes_of
    assert rank.sources == {"peer": start.total}
    assert bool(start.carrier.fetched)
    assert not streams_of(start)


def test_what_several_ranks_want_comes_once_for_all_of_them_and_not_straight(
    begun: Begin,
) -> None:
    start, streams = begun(("b",), ("b",))
    start.restore._count = 2
    ranks = [Trainer(start, set(start.frames)) for _ in range(2)]
    start.end()
    assert [rank.has() for rank in ranks] == [start.bytes_of] * 2
    assert not streams.asked
    assert sum(start.carrier.fetched) == start.total


def test_a_rank_that_is_gone_leaves_no_connection_behind(begun: Begin, turned: Turned) -> None:
    start, streams = begun(("b",), ("b",))
    streams.silent = True
    rank = Trainer(start, set(start.frames))
    turned.until(lambda: any(each.sock is not None for each in streams_of(start).values()))
    start.restore.drop_request(rank)
    assert not streams_of(start)
    assert rank.fetch_inbox is not None
    rank.fetch_inbox.put(None)
    turned.until(lambda: rank.outcome)
    assert isinstance(rank.error, AgentError)


def test_a_copy_that_raises_ends_the_fetch_at_once(begun: Begin, turned: Turned) -> None:
    def raises(frame: int, raw: memoryview) -> bool:
        raise ZeroDivisionError

    start, _ = begun(("b",), ("b",))
    rank = Trainer(start, set(), raises)
    start.end()
    assert isinstance(rank.error, ZeroDivisionError)


def test_what_a_fetch_that_failed_has_not_read_yet_is_closed() -> None:
    fds = [os.memfd_create("region") for _ in range(2)]

    class Link:
        fetch_inbox: queue.SimpleQueue[Any] | None = None
        connection: Any = None

        def request(self, kind: str, fields: dict[str, Any], blobs: list[bytes]) -> None:
            assert self.fetch_inbox is not None
            self.fetch_inbox.put(Message({"t": "fetch-ended", "ok": False, "kind": "agent", "message": "no"}, [], []))
            for number, fd in enumerate(fds):
                self.fetch_inbox.put(Message({"t": "frame-region", "region": number}, [fd], []))

    link = Link()
    link.connection = link
    with Tasks("trainer") as tasks, pytest.raises(AgentError):
        fetch(cast(Any, link), tasks, STEP, [0], lambda frame, raw: True)
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


class Opened:
    """A rank, whose streams are opened by the test."""

    def __init__(self) -> None:
        self.futures: list[tuple[list[int], Future[socket.socket]]] = []
        self.left: list[int] = []
        self.sent: list[dict[str, Any]] = []
        self.asked = RankRequest(self, set(), set())

    def refuse(self, number: int) -> None:
        self.futures[number][1].set_exception(AgentError("no"))

    def send(self, fields: dict[str, Any], fds: Any = ()) -> None:
        self.sent.append(fields)


class Session:
    """The session and the peer source of direct streams. What a rank wants lies in an arena of its own."""

    def __init__(self) -> None:
        self.ranks: list[Opened] = []  # by arena
        self.holders: list[str] = []
        self.numbers: list[Any] = []
        self.network = self.transport = self
        self.nodes = {name: NodeAt(name, (), ()) for name in "bcdef"}
        self.streams = DirectStreams(cast(Any, self))
        self.streams.begin(cast(Any, self), 0)

    def want(self, rank: Opened, holder: str, count: int) -> None:
        first = sum(map(len, self.numbers))
        self.ranks.append(rank)
        self.holders.append(holder)
        self.numbers.append(np.arange(first, first + count))
        self.streams.request(set(range(first, first + count)), rank.asked)

    # -- as a peer source and its network

    def by_rank(self, frames: set[int]) -> list[tuple[int, list[int]]]:
        return [(len(self.ranks) - 1, sorted(frames))]

    def holders_of(self, arena: int) -> tuple[str, ...]:
        return (self.holders[arena],)

    def offer_name(self, arena: int) -> str:
        return str(arena)

    def addresses(self, node: NodeAt) -> list[Any]:
        return []

    def stream(self, peer: str, addresses: Any, name: str, numbers: list[int]) -> Future[socket.socket]:
        opened = self.ranks[int(name)].futures
        opened.append((numbers, Future()))
        return opened[-1][1]

    # -- as a session

    def post(self, what: Callable[[], None]) -> None:
        what()

    guard = post

    def give(self, origin: Origin, asked: RankRequest, frames: set[int]) -> None:
        asked.given_frames.update(dict.fromkeys(frames, origin))

    def reject(self, asked: RankRequest, frames: list[int], error: BaseException) -> None:
        for frame in frames:
            del asked.given_frames[frame]
        cast(Opened, asked.receiver).left += frames


def test_a_holder_gives_a_few_streams_at_a_time_and_each_is_of_bounded_length() -> None:
    session, each = Session(), Opened()
    count = HOLDER_STREAMS_MAX * STREAM_FRAMES * 2 + 1
    session.want(each, "b", count)
    assert len(each.futures) == HOLDER_STREAMS_MAX
    assert max(len(frames) for frames, _ in each.futures) <= STREAM_FRAMES
    began = 0
    while began < len(each.futures):
        each.refuse(began)
        began += 1
    assert sorted(each.left) == list(range(count)), "each frame is given back once"


def test_ranks_take_turns_and_none_gets_more_streams_than_it_can_read() -> None:
    session, ranks = Session(), [Opened() for _ in range(3)]
    for rank in ranks:
        session.want(rank, "b", STREAM_FRAMES * 4)
    assert [len(rank.futures) for rank in ranks] == [2, 0, 0], "of one that holds all"
    ranks[0].refuse(0)
    assert [len(rank.futures) for rank in ranks] == [2, 1, 0]
    ranks[0].refuse(1)
    ranks[1].refuse(0)
    assert [len(rank.futures) for rank in ranks] == [3, 1, 1]
    for holder in "cdef":
        session.want(ranks[0], holder, STREAM_FRAMES * 4)
    assert len(ranks[0].futures) == 2 + RANK_STREAMS_MAX


def test_a_stream_that_comes_after_nobody_waits_is_closed() -> None:
    session, each = Session(), Opened()
    session.want(each, "b", 2)
    session.streams.drop_receiver(each)
    ours, theirs = socket.socketpair()
    with theirs:
        each.futures[0][1].set_result(ours)
        theirs.settimeout(STREAM_S)
        assert theirs.recv(1) == b""
    assert not each.sent
    assert not each.left
