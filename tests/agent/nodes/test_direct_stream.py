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
from ckpt.agent.restore.direct_stream import HOLDER_STREAMS_MAX, RANK_STREAMS_MAX, SHARE_MIN, DirectStreams
from ckpt.errors import AgentError, CkptError
from ckpt.format.frames import frame_hash
from ckpt.ipc.messages import Message
from ckpt.threads import Tasks
from ckpt.trainer.restore.fetch import fetch
from tests.agent.nodes.staged import Turned
from tests.agent.nodes.test_peer_source import STEP, Carrier, Start

STREAM_S = 10.0  # more than the connections of these tests ever wait


class Streams:
    """What the carrier's connections do. `spoil`, `cut_at`: the frame of an offer that comes wrong, and before which
    all ends. `refuse`: nobody is connected. `silent`: nothing comes by them, until they are cut."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self.spoil = self.cut_at = -1
        self.refuse = self.silent = False
        self.asked: list[list[int]] = []
        self.tasks = Tasks("streams")
        carrier.stream = self.open  # type: ignore[attr-defined]

    def open(self, peer: str, addresses: Any, name: str, numbers: list[int]) -> Future[socket.socket]:
        self.asked.append(numbers)
        opened: Future[socket.socket] = Future()
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
        if kind == "frames-received":
            self._start.turned.post(lambda: restore.acknowledge_frames(self, fields["ok"], fields["bad"]))
        else:
            self._start.turned.post(lambda: restore.end_stream(self, fields["stream"]))

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


@pytest.fixture
def begun(turned: Turned) -> Iterator[Callable[..., tuple[Start, Streams]]]:
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


def test_what_one_rank_takes_whole_is_received_where_it_belongs(begun: Callable[..., tuple[Start, Streams]]) -> None:
    start, streams = begun(("b",), ("b",))
    rank = Trainer(start, set(start.frames[1:-1]))
    start.end()
    assert rank.error is None
    assert rank.has() == start.bytes_of
    assert rank.got.keys() == {start.frames[0], start.frames[-1]}, "the rest came through the window"
    assert rank.sources == {"peer": start.total}
    assert sum(start.carrier.fetched) == sum(len(raw) for raw in rank.got.values()), "nothing came twice"
    assert sum(map(len, streams.asked)) == len(rank.whole_frames)


@pytest.mark.parametrize("how", ["refused", "cut", "wrong", "gone"])
def test_what_does_not_come_straight_or_not_right_comes_through_the_window(
    how: str, begun: Callable[..., tuple[Start, Streams]], turned: Turned
) -> None:
    start, streams = begun(("a", "b"), ("a", "b"))
    streams.refuse, streams.silent = how == "refused", how == "gone"
    streams.cut_at, streams.spoil = (2 if how == "cut" else -1), (1 if how == "wrong" else -1)
    rank = Trainer(start, set(start.frames))
    if how == "gone":
        turned.until(lambda: streams.asked)
        turned.until(
            lambda: any(each.sock is not None for each in start.peers.direct_streams._streams_by_number.values())
        )
        start.restore.handle_disconnect("a")
    start.end()
    assert start.carrier.asked[0] == ("b" if how == "gone" else "a"), "who is gone is asked last"
    assert rank.error is None
    assert rank.has() == start.bytes_of
    assert rank.sources == {"peer": start.total}
    assert bool(start.carrier.fetched)
    assert not start.peers.direct_streams._streams_by_number
    assert not start.peers.direct_streams._streams_by_frame


def test_what_several_ranks_want_comes_once_for_all_of_them_and_not_straight(
    begun: Callable[..., tuple[Start, Streams]],
) -> None:
    start, streams = begun(("b",), ("b",))
    start.restore._count = 2
    ranks = [Trainer(start, set(start.frames)) for _ in range(2)]
    start.end()
    assert [rank.has() for rank in ranks] == [start.bytes_of] * 2
    assert not streams.asked
    assert sum(start.carrier.fetched) == start.total


def test_a_rank_that_is_gone_leaves_no_connection_behind(
    begun: Callable[..., tuple[Start, Streams]], turned: Turned
) -> None:
    start, streams = begun(("b",), ("b",))
    streams.silent = True
    rank = Trainer(start, set(start.frames))
    turned.until(lambda: any(each.sock is not None for each in start.peers.direct_streams._streams_by_number.values()))
    start.restore.drop_request(rank)
    assert not start.peers.direct_streams._streams_by_number
    assert rank.fetch_inbox is not None
    rank.fetch_inbox.put(None)
    turned.until(lambda: rank.outcome)
    assert isinstance(rank.error, AgentError)


def test_a_copy_that_raises_ends_the_fetch_at_once(begun: Callable[..., tuple[Start, Streams]], turned: Turned) -> None:
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
    """Streams that are opened by the test."""

    def __init__(self) -> None:
        self.futures: list[tuple[list[int], Future[socket.socket]]] = []
        self.left: list[int] = []
        self.sent: list[dict[str, Any]] = []

    def open(self, frames: list[int]) -> Future[socket.socket]:
        self.futures.append((frames, Future()))
        return self.futures[-1][1]

    def send(self, fields: dict[str, Any], fds: Any = ()) -> None:
        self.sent.append(fields)


def test_a_holder_gives_a_few_streams_at_a_time_and_each_is_of_bounded_length() -> None:
    straight, each = DirectStreams(lambda what: what()), Opened()
    count = HOLDER_STREAMS_MAX * STREAM_FRAMES * 2 + 1
    straight.queue_streams(each, "b", list(range(count)), each.open, each.left.extend)
    straight.start_streams()
    assert len(each.futures) == HOLDER_STREAMS_MAX
    assert max(len(frames) for frames, _ in each.futures) <= STREAM_FRAMES
    began = 0
    while began < len(each.futures):
        each.futures[began][1].set_exception(AgentError("no"))
        began += 1
    assert sorted(each.left) == list(range(count)), "each frame is given back once"


def test_who_asks_for_other_streams_when_one_is_given_back_changes_nothing_of_the_rest() -> None:
    straight, each, other = DirectStreams(lambda what: what()), Opened(), Opened()
    count = HOLDER_STREAMS_MAX * STREAM_FRAMES * 2

    def left(frames: list[int]) -> None:
        each.left += frames
        straight.drop_receiver(other)

    for who in (each, other):
        straight.queue_streams(who, "b", list(range(count)), who.open, left)
    straight.handle_disconnect("b")
    begun = [frame for frames, _ in each.futures for frame in frames]
    assert sorted([*each.left, *begun]) == list(range(count)), "of the other, which was dropped, nothing is given back"
    assert not straight._queued_streams
    assert not other.futures


def test_ranks_take_turns_and_none_gets_more_streams_than_it_can_read() -> None:
    straight, ranks = DirectStreams(lambda what: what()), [Opened() for _ in range(3)]
    count = STREAM_FRAMES * 4
    for rank in ranks:
        straight.queue_streams(rank, "b", list(range(count)), rank.open, rank.left.extend)
    straight.start_streams()
    assert [len(rank.futures) for rank in ranks] == [1, 1, 0], "of one that holds all, one each"
    ranks[0].futures[0][1].set_exception(AgentError("no"))
    assert [len(rank.futures) for rank in ranks] == [1, 1, 1]
    for holder in "cdef":
        straight.queue_streams(ranks[0], holder, list(range(count, 2 * count)), ranks[0].open, ranks[0].left.extend)
    straight.start_streams()
    assert len(ranks[0].futures) == 1 + RANK_STREAMS_MAX


def test_few_frames_are_not_divided_among_connections() -> None:
    straight, each = DirectStreams(lambda what: what()), Opened()
    straight.queue_streams(each, "b", list(range(SHARE_MIN)), each.open, each.left.extend)
    straight.start_streams()
    assert [frames for frames, _ in each.futures] == [list(range(SHARE_MIN))]


def test_a_stream_that_comes_after_nobody_waits_is_closed() -> None:
    straight, each = DirectStreams(lambda what: what()), Opened()
    straight.queue_streams(each, "b", [0, 1], each.open, each.left.extend)
    straight.start_streams()
    straight.drop_receiver(each)
    ours, theirs = socket.socketpair()
    with theirs:
        each.futures[0][1].set_result(ours)
        theirs.settimeout(STREAM_S)
        assert theirs.recv(1) == b""
    assert not each.sent
    assert not each.left


def test_a_transport_that_raises_gives_no_streams() -> None:
    straight, each = DirectStreams(lambda what: what()), Opened()

    def refuses(frames: list[int]) -> Future[socket.socket]:
        raise CkptError("closed")

    straight.queue_streams(each, "b", [0, 1], refuses, each.left.extend)
    straight.start_streams()
    assert each.left == [0, 1]
