"""What a transport promises, of each that there is; and that copies, a start from other nodes' memory and the sharing
of what is read from a store need no more of one than that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from ckpt.agent.net.tcp_sender import TcpTransport
from ckpt.agent.net.transport import Frames, Transport
from ckpt.agent.replication.replica_store import ReplicaStore, decode_described, encode_described
from ckpt.agent.restore.peer_source import PeerSource, offer_name
from ckpt.agent.restore.restore_session import RestoreSession
from ckpt.agent.snapshots.described import DescribedSnapshot
from ckpt.agent.snapshots.inventory import find_sealed_snapshot
from ckpt.agent.snapshots.manifest_gather import FramePlaces
from ckpt.agent.snapshots.memory_checkpoint import StagedReader, assemble_checkpoint
from ckpt.errors import AgentError, DamagedData
from ckpt.format.frames import frame_hash
from ckpt.ipc.arena import Arena
from ckpt.ipc.node_list import NodeAt
from tests.agent.net.within import Hub
from tests.agent.nodes.staged import identity, staged
from tests.agent.nodes.test_sharing import FRAME_BYTES, FRAMES, Job
from tests.agent.receiver import Rank

LENGTHS = (100, 1, 70_000, 3_000_000, 5)
NAME, STEP = "offer", identity(5)
TCP = partial(TcpTransport, stall_s=10.0, patience_s=1.0)  # who offers nothing is not asked again for long


@pytest.fixture(params=["tcp", "within"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    """Three agents, whose connections are TCP in any case."""
    made = Job(3, 16 * 4096, (lambda name: TCP) if request.param == "tcp" else Hub().make)
    yield made
    made.close()


def content() -> tuple[bytearray, Frames]:
    data = bytearray(np.random.default_rng(1).bytes(sum(LENGTHS)))
    offsets = [0, *np.cumsum(LENGTHS)[:-1].tolist()]
    hashes = [frame_hash(data[at : at + length]) for at, length in zip(offsets, LENGTHS, strict=True)]
    return data, Frames.from_columns(*(np.array(each, np.uint64) for each in (offsets, LENGTHS, hashes)), len(data))


class Between:
    """The first agent gives, the second gets."""

    def __init__(self, job: Job) -> None:
        self.job, self.giver, self.getter = job, job.agents[0], job.agents[1]
        self.target = bytearray(sum(LENGTHS))
        self.landed: list[int] = []

    @property
    def gives(self) -> Transport:
        return self.giver.network.transport

    def fetch(self, frames: Frames, **named: Any) -> Any:
        at = [self.giver.address]
        call: Callable[..., Any] = self.getter.network.transport.fetch
        return call("agent-0", at, NAME, memoryview(self.target), frames, landed=self.landed.append, **named)

    def wait(self, fetch: Any) -> BaseException | None:
        self.job.loop.until(fetch.completion.done)
        error: BaseException | None = fetch.completion.exception()
        return error


@pytest.fixture
def between(job: Job) -> Between:
    return Between(job)


def test_what_is_offered_arrives_byte_for_byte_and_each_frame_is_told_of(between: Between) -> None:
    data, frames = content()
    between.gives.offer(NAME, memoryview(data), frames)
    with pytest.raises(AgentError):
        between.gives.offer(NAME, memoryview(data), frames)
    fetch = between.fetch(frames)
    assert between.wait(fetch) is None
    assert (between.target, sorted(between.landed), fetch.missing()) == (data, list(range(len(LENGTHS))), [])
    between.gives.withdraw(NAME).result(30)
    assert isinstance(between.wait(between.fetch(frames)), AgentError)
    between.gives.withdraw(NAME).result(30)  # nothing is left of it


def test_only_what_is_wanted_comes_and_by_the_numbers_of_the_offer(between: Between) -> None:
    data, frames = content()
    between.gives.offer(NAME, memoryview(data), frames)
    assert between.wait(between.fetch(frames, only=[1, 4])) is None
    assert sorted(between.landed) == [1, 4]
    assert between.target[100:101] == data[100:101]
    assert not any(between.target[:100])
    some = Frames.from_columns(np.array([0, 100], np.uint64), frames.lengths[[0, 4]], frames.hashes[[0, 4]], len(data))
    assert between.wait(between.fetch(some, numbers=[0, 4])) is None
    assert between.target[:105] == data[:100] + data[-5:]


def test_what_is_not_what_was_announced_is_never_taken_for_it(between: Between) -> None:
    data, frames = content()
    data[100_000] ^= 1
    between.gives.offer(NAME, memoryview(data), frames)
    fetch = between.fetch(frames)
    assert isinstance(between.wait(fetch), DamagedData)
    assert 3 in fetch.missing()
    assert 3 not in between.landed


def test_an_agent_that_is_not_there_gives_nothing_and_what_is_called_off_ends(between: Between) -> None:
    _, frames = content()
    fetch = between.fetch(frames)
    fetch.cancel()
    assert isinstance(between.wait(fetch), AgentError)
    fetch.cancel()
    assert fetch.missing()


def test_copies_go_by_it(job: Job) -> None:
    giver, keeper = job.agents[:2]
    arenas, copies = staged(STEP, 2), [ReplicaStore(each.workers, job.loop.post) for each in (giver, keeper)]
    try:
        told: list[list[DescribedSnapshot]] = []
        heard: list[str] = []
        copies[0].publish(giver.network.transport, STEP, arenas, lambda found, error: told.append(found))
        job.loop.until(lambda: told)
        wanted = decode_described(encode_described(told[0]))
        copies[1].fetch_replicas(keeper.network.transport, STEP, "agent-0", [giver.address], wanted, heard.append)
        job.loop.until(lambda: heard)
        assert heard == [""]
        for rank, arena in copies[1].arenas_of(STEP).items():
            at, length = arenas[rank].tail()
            assert bytes(arena.view[: at + length]) == bytes(arenas[rank].view[: at + length])
            assert find_sealed_snapshot(arena) == ((STEP, rank), 2)
        copies[0].withdraw(giver.network.transport, STEP)
    finally:
        for each in copies:
            each.close()
        close(arenas)


def test_a_start_goes_on_from_other_nodes_memory_by_it(job: Job) -> None:
    giver, getter = job.agents[:2]
    arenas = staged(STEP, 2)
    made = assemble_checkpoint(STEP, StagedReader().read(STEP, 2, arenas, keep_hashes=False), arenas)
    sizes = {rank: arena.size_bytes for rank, arena in arenas.items()}
    places = FramePlaces(STEP, made.ranks, made.offsets, sizes, {rank: ["agent-0"] for rank in arenas})
    for rank, arena in arenas.items():
        giver.network.transport.offer(
            offer_name(STEP, rank), arena.view, places.frames(rank, made.manifest), urgent=True
        )
    node = NodeAt("agent-0", (giver.address,), ())
    peers = PeerSource(places, made.manifest, getter.network, [node], job.loop.post)
    services = getter.workers, job.loop.call_later, job.loop.post
    restore = RestoreSession(STEP, made.manifest, 1, None, None, *services, peers=peers)
    rank = Rank(job.loop.post, cast(Any, type("Owner", (), {"restore": restore})))
    try:
        restore.request(rank, range(len(made.manifest.frames)))
        job.loop.until(lambda: rank.outcome)
        assert rank.outcome is not None
        assert rank.outcome["ok"], rank.outcome["message"]
        for frame, length in enumerate(made.manifest.frames["length"].tolist()):
            where = int(made.offsets[frame]), int(length)
            assert rank.got[frame] == bytes(arenas[int(made.ranks[frame])].part(where))
    finally:
        restore.close()
        rank.close()
        for number in arenas:
            giver.network.transport.withdraw(offer_name(STEP, number)).result(30)
        close(arenas)


def test_what_is_read_from_a_store_is_shared_by_it(job: Job) -> None:
    ranks = job.restore()
    job.until_restored(ranks)
    assert set(job.reads().values()) == {1}
    assert all(len(rank.got) == FRAMES for rank in ranks)
    assert all(sum(rank.outcome["sources"].values()) == FRAMES * FRAME_BYTES for rank in ranks if rank.outcome)


def close(arenas: dict[int, Arena]) -> None:
    for arena in arenas.values():
        arena.close()
