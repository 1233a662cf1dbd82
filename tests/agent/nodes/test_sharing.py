"""Nodes that share the reading of a store, within one process and over real connections: what goes wrong at a home
costs a read of the store and nothing else, memory is bounded, and the end of a restore leaves nothing."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from ckpt.agent.net.channel import Channel
from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.restore import home_client, peer_fetch, shared_read
from ckpt.agent.restore.restore_session import RestoreSession
from ckpt.agent.restore.shared_read import SharedRead, shared_read_of
from ckpt.agent.restore.sources import open_session
from ckpt.agent.runtime.workers import Workers
from ckpt.errors import AgentError, StorageError
from ckpt.events import Event
from ckpt.ipc import secret
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NodeAt
from ckpt.layout.read_sharding import shard_reads
from ckpt.types import Epoch, Identity, Version
from tests.agent.net.loop import TurnedLoop
from tests.agent.receiver import Rank
from tests.agent.restore.test_restore_session import FRAME_BYTES, Source, manifest, raw

EPOCH = Epoch(2, "0" * 16)
IDENTITY = Identity(Epoch(1, "0" * 16), Version(5))
FRAMES = 200  # one as the other: those that are 251 apart would have the same bytes
SECRET = secret.make_secret()


class Store:
    """What all of them read. `gate(node, frame)` is called before a frame is given; it may raise StorageError."""

    def __init__(self) -> None:
        self.reads: list[Counter[int]] = []  # by node
        self.gate: Callable[[int, int], None] = lambda node, frame: None

    def reader(self, node: int) -> Any:
        store = self

        class Reader:
            record = Source(manifest(FRAMES))

            def read(self, frames: Any, deliver: Any, out: Any, failed: Any) -> None:
                for frame in frames:
                    store.reads[node][frame] += 1
                    try:
                        store.gate(node, frame)
                    except StorageError as exc:
                        failed(frame, exc)
                        continue
                    out(frame)[:] = raw(frame)
                    deliver(frame)

        return Reader()


class Agent:
    """One node: a network of its own, and a restore. `mute`: of what it is told, nothing is heard. `away`: it has not
    come as far as to restore."""

    def __init__(self, loop: TurnedLoop, number: int) -> None:
        self.loop, self.number = loop, number
        self.room = 1 << 30  # what it may take for all
        self.events: list[Event] = []
        self.workers = Workers(loop.post)
        self.network = PeerNetwork(loop, self.workers, f"agent-{number}", self)
        (self.address,) = self.network.listen(SECRET, "127.0.0.1:0")
        self.ranks: list[Rank] = []
        self.heard: list[str] = []
        self.mute = self.away = False
        self.restore: RestoreSession

    def has_room(self) -> int:
        return self.room

    def peer_message(self, channel: Channel, message: Message) -> None:
        self.heard.append(message.kind)
        fan = shared_read_of(self.restore)
        assert fan is not None
        if self.mute:
            return
        try:
            if message.kind == "frames-read":
                fan.handle_frames_read(channel, message)
            elif self.away:
                channel.reply(int(message.fields["id"]), {"ready": False})
            else:
                fan.handle_read_frames(channel, message)
        except AgentError as exc:
            channel.refuse(int(message.fields["id"]), exc)

    def peer_closed(self, channel: Channel) -> None:
        self.restore.handle_disconnect(channel.peer)

    def rank(self) -> Rank:
        self.ranks.append(Rank(self.loop.post, self))
        return self.ranks[-1]


class Job:
    """`count` agents in one process, one rank at each unless a test makes more."""

    def __init__(self, count: int, window_bytes: int) -> None:
        self.loop = TurnedLoop()
        self.store = Store()
        self.agents = [Agent(self.loop, number) for number in range(count)]
        nodes = [NodeAt(each.network.agent_name, (each.address,), (each.number,)) for each in self.agents]
        for each in self.agents:
            self.store.reads.append(Counter())
            read = lambda number=each.number: self.store.reader(number)  # noqa: E731
            fan = SharedRead(EPOCH, manifest(FRAMES), nodes, each.network, read, each.has_room, each.events.append)
            services = each.workers, self.loop, window_bytes
            each.restore = open_session(IDENTITY, manifest(FRAMES), 1, None, read, *services, fan=fan)

    def restore(self, *numbers: int, frames: Any = range(FRAMES)) -> list[Rank]:
        """A rank at each of these nodes (at all) asks for these frames."""
        ranks = [each.rank() for each in self.agents if each.number in numbers or not numbers]
        for rank in ranks:
            rank.owner.restore.request(rank, frames)
        return ranks

    def until_restored(self, ranks: list[Rank]) -> None:
        self.loop.until(lambda: all(rank.outcome for rank in ranks))
        for rank in ranks:
            assert rank.outcome["ok"], rank.outcome["message"]
            assert rank.got == {frame: raw(frame) for frame in rank.got}

    def reads(self) -> Counter[int]:
        return sum(self.store.reads, Counter[int]())

    def close(self) -> None:
        for each in self.agents:
            each.restore.close()
            each.network.close()
            each.workers.close()
            for rank in each.ranks:
                rank.close()
        self.loop.close()


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    made = Job(*getattr(request, "param", (3, 16 * 4096)))
    yield made
    made.close()


HOMES = shard_reads(manifest(FRAMES).frames, 3)
STATE_BYTES = FRAMES * FRAME_BYTES


@pytest.mark.parametrize("job", [(2, 4096), (3, 3 * 4096), (5, 1 << 20)], indirect=True)
def test_all_nodes_have_all_and_each_frame_is_read_once_through_a_window_of_any_size(job: Job) -> None:
    ranks = job.restore()
    job.until_restored(ranks)
    assert all(len(rank.got) == FRAMES for rank in ranks)
    assert job.reads() == Counter(range(FRAMES))
    told = [rank.outcome["sources"] for rank in ranks]
    assert [each["store"] + each["peer"] for each in told] == [STATE_BYTES] * len(ranks)
    assert sum(each["store"] for each in told) == STATE_BYTES


def test_however_many_homes_there_are_so_many_are_called_and_fetched_from_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_fetch, "FETCHES_MAX", 2)
    monkeypatch.setattr(shared_read, "DIALS_MAX", 3)
    job, dialling, fetching = Job(7, 1 << 20), list[int](), list[int]()
    for each in job.agents:
        connect, fetch, calls = each.network.connect, each.network.transport.fetch, set[object]()

        def connected(node: NodeAt, calls: set[object] = calls, connect: Any = connect) -> Any:
            call = connect(node)
            calls.add(call)
            dialling.append(len(calls))
            call.when_settled(lambda: calls.discard(call))
            return call

        def fetched(*given: Any, restore: RestoreSession = each.restore, fetch: Any = fetch, **more: Any) -> Any:
            fetching.append(sum(len(offer.fetches) for offer in restore.fetches._offers))
            return fetch(*given, **more)

        each.network.connect = connected  # type: ignore[method-assign]
        each.network.transport.fetch = fetched  # type: ignore[method-assign]
    with closing(job):
        job.until_restored(job.restore())
        assert job.reads() == Counter(range(FRAMES))
        assert max(dialling) == 3
        assert max(fetching) == 1, "one more is begun then"


def test_frames_of_equal_bytes_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FRAMES", 260)
    with closing(Job(3, 16 * 4096)) as job:
        ranks = job.restore(frames=range(260))
        job.until_restored(ranks)
        assert all(len(rank.got) == 260 for rank in ranks)
        assert job.reads() == Counter(range(251))


def test_ranks_that_come_one_after_the_other_and_want_other_frames_each_read_nothing_twice(job: Job) -> None:
    for numbers, frames in (((1,), range(50)), ((0, 2), range(30, 120)), ((1,), range(FRAMES)), ((), range(100))):
        ranks = job.restore(*numbers, frames=frames)
        job.until_restored(ranks)
        assert all(set(rank.got) == set(frames) for rank in ranks)
    assert job.reads() == Counter(range(FRAMES))


def test_a_home_that_says_nothing_is_done_without(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_client, "HOME_TIMEOUT_S", 0.3)
    monkeypatch.setattr(home_client, "CHECK_S", 0.05)
    job.agents[1].mute = True
    ranks = job.restore(0, 2)
    job.until_restored(ranks)
    expected = Counter({frame: 2 if HOMES.home_nodes[frame] == 1 else 1 for frame in range(FRAMES)})
    assert job.reads() == expected


def test_a_home_that_comes_later_is_waited_for(job: Job) -> None:
    job.agents[2].away = True
    ranks = job.restore()
    job.loop.until(lambda: job.agents[2].heard.count("read-frames") >= 4)
    job.agents[2].away = False
    job.until_restored(ranks)
    assert job.reads() == Counter(range(FRAMES))


@pytest.mark.parametrize("turn", range(6))
def test_whatever_is_cut_or_dies_and_whenever_each_node_that_lives_has_each_frame(
    turn: int, job: Job, seed: int
) -> None:
    rng = random.Random(seed + turn)
    ranks = [rank for each in job.agents for rank in (each.rank(), each.rank())]
    for rank in ranks:
        rank.owner.restore.request(rank, rng.sample(range(FRAMES), rng.randrange(1, FRAMES)))
    for _ in range(rng.randrange(8)):
        for _ in range(rng.randrange(20)):
            job.loop.turn(0.001)
        one, other = rng.sample(job.agents, 2)
        channel = one.network.channel(other.network.agent_name)
        if channel is not None:
            channel.close()
            one.network.channel_closed(channel, AgentError("cut by the test"))
    dead = rng.choice([None, *job.agents])
    if dead is not None:
        dead.restore.close()
        dead.network.close()
    left = [rank for rank in ranks if rank.owner is not dead]
    job.until_restored(left)
    if dead is None:
        assert max(job.reads().values()) == 1


def test_what_a_home_cannot_read_each_node_tries_itself_and_a_fetch_fails_only_where_that_fails_too(job: Job) -> None:
    bad = int(HOMES.frames_of(1)[0])

    def gate(node: int, frame: int) -> None:
        if frame == bad and node != 2:
            raise StorageError("not for you")

    job.store.gate = gate
    ranks = job.restore()
    job.loop.until(lambda: all(rank.outcome for rank in ranks))
    assert [rank.outcome["ok"] for rank in ranks] == [False, False, True]
    assert len(ranks[2].got) == FRAMES
    assert f"frame {bad}" in ranks[0].outcome["message"]
    assert ranks[0].outcome["kind"] == "storage"


def test_the_end_of_a_restore_leaves_no_memory_and_no_offer(job: Job) -> None:
    job.until_restored(job.restore())
    fans = [shared_read_of(each.restore) for each in job.agents]
    regions = [fan.home.memory.arenas[0] for fan in fans if fan is not None and fan.home.memory is not None]
    for each, region in zip(job.agents, regions, strict=True):
        assert region.size_bytes <= STATE_BYTES // 3 + FRAME_BYTES + 4096
        each.restore.close()
        job.loop.until(lambda region=region: region.fd == -1)  # type: ignore[misc]
        assert not each.network.transport._offers


def test_malformed_and_foreign_requests_are_refused_and_change_nothing(job: Job) -> None:
    fan = shared_read_of(job.agents[0].restore)
    assert fan is not None
    connected = job.agents[1].network.connect(NodeAt("agent-0", (job.agents[0].address,), ()))
    job.loop.until(lambda: connected.is_settled)
    job.loop.until(lambda: job.agents[0].network.channel("agent-1"))
    channel = job.agents[0].network.channel("agent-1")
    assert channel is not None
    theirs = np.asarray(HOMES.frames_of(1)[:1], "<u4").tobytes()
    for blob in (b"x", theirs, np.asarray([FRAMES], "<u4").tobytes(), bytes(4 * FRAMES + 4)):
        with pytest.raises(AgentError):
            fan.handle_read_frames(channel, Message({"t": "read-frames", "id": 1}, [], [blob]))
    fan.handle_frames_read(channel, Message({"t": "frames-read"}, [], [theirs, b""]))  # nobody has asked for it
    job.until_restored(job.restore())
    assert job.reads() == Counter(range(FRAMES))
