"""Whatever another agent answers, who asked hears of it once: an error where it is not what such an agent can say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import msgpack
import numpy as np
import pytest

from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.replication.replica_service import ReplicaService
from ckpt.agent.replication.replica_store import ReplicaStore
from ckpt.agent.replication.replicate import Assignment, replicate
from ckpt.agent.restore.manifest_request import gather_manifest
from ckpt.agent.runtime import memory_plan
from ckpt.agent.runtime.coroutines import Task, start
from ckpt.agent.runtime.workers import Workers
from ckpt.agent.snapshots.manifest_gather import GatheredManifest
from ckpt.agent.snapshots.memory_checkpoint import StagedReader
from ckpt.agent.snapshots.remote_share import RemoteShare, WriteRequest, encode_parts
from ckpt.errors import AgentError
from ckpt.format.manifest import FRAME, PLACE
from ckpt.ipc.arena import Arena
from ckpt.ipc.node_list import NodeAt
from ckpt.store.keys import pack_key
from tests.agent.nodes.staged import EPOCH, WRONG, MakeStaged, Net, Turned, identity, spoiled

NODES = [NodeAt("a", (), (0,)), NodeAt("b", (), (1,))]
STEP = identity(5)


@pytest.fixture
def turned(arenas: dict[int, Arena]) -> Iterator[Turned]:
    """Its threads end before the arenas go that they may read."""
    made = Turned()
    yield made
    made.close()


@pytest.fixture
def arenas(make_staged: MakeStaged) -> dict[int, Arena]:
    return make_staged(STEP, 2)


def share() -> tuple[RemoteShare, Net]:
    net = Net()
    return RemoteShare(cast(PeerNetwork, net), "b", EPOCH, 2, [1]), net


def asking(method: str, *given: Any, check: Callable[..., object] = lambda result, error: None) -> Callable[..., Net]:
    """Asks a new share, in that way. `check`: hears the answer, too."""

    def ask(then: Callable[..., None]) -> Net:
        remote, net = share()
        start(getattr(remote, method)(*given), lambda *found: (check(*found), then(*found)))
        return net

    return ask


def parts_of(arenas: dict[int, Arena], *ranks: int) -> bytes:
    reader = StagedReader()
    found = reader.read(STEP, 2, {rank: arenas[rank] for rank in ranks}, keep_hashes=False)
    return encode_parts(found, {}, reader.encoded_declarations())


def unpacked(blob: bytes) -> Any:
    return msgpack.unpackb(blob, strict_map_key=False)


def heard_of(answers: Iterator[Any], ask: Callable[[Callable[..., None]], Net], answer: Callable[..., None]) -> int:
    """Asks anew for each answer. Each is heard once, and nothing else is raised. How many were taken for good."""
    taken = 0
    for each in answers:
        heard: list[tuple[Any, str]] = []
        net = ask(lambda result, error, heard=heard: heard.append((result, error)))
        answer(net.asked[-1], each)
        assert len(heard) == 1, each
        taken += not heard[0][1]
    return taken


def test_a_node_that_says_nonsense_of_its_memory_has_none() -> None:
    right = memory_plan.make_plan(1 << 20, 0, 0, None, 1 << 30).table()

    def check(result: memory_plan.MemoryPlan | None, error: str) -> None:
        assert error or (result is not None and type(result.slots) is int and 0 <= result.slots <= memory_plan.SLOTS)
        assert error or result is None or result.replica_bytes_max(2) >= 0

    answer = lambda asked, plan: asked.answer({"plan": plan})  # noqa: E731
    ask = asking("plan_memory", {1: 1 << 20}, 3, None, check=check)
    heard_of(spoiled(right), ask, answer)
    assert heard_of(iter([right]), ask, answer) == 1
    assert heard_of(iter(WRONG), ask, answer) == 0


def test_steps_that_no_rank_can_be_in_are_refused_and_those_before_stay_known() -> None:
    remote, _ = share()
    remote.record_steps({1: (7, 2)})
    for wrong in ((1 << 35, 0), (1 << 70, 0), (-1, 0), (8, 1 << 20), (8, -1)):
        with pytest.raises(AgentError, match="steps"):
            remote.record_steps({1: wrong})
    assert (remote.steps_by_rank[1], remote.polls_by_rank[1]) == (7, 2)
    remote.record_steps({1: ((1 << 35) - 1, (1 << 20) - 1)})
    assert remote.steps_by_rank[1] == (1 << 35) - 1


def test_a_node_that_makes_smaller_arenas_than_it_was_asked_to_has_made_none() -> None:
    def check(sizes: dict[int, int], error: str) -> None:
        assert error or (sizes.keys() == {1} and sizes[1] >= 4096)

    answer = lambda asked, sizes: asked.answer({"sizes": sizes})  # noqa: E731
    ask = asking("make_arenas", 0, {1: 4096}, check=check)
    assert heard_of(iter([[[1, 4096]], [[1, 8192]]]), ask, answer) == 2
    heard_of(iter([*spoiled([[1, 4096]]), *WRONG]), ask, answer)


def test_what_a_node_says_of_its_ranks_is_taken_whole_or_refused(arenas: dict[int, Arena]) -> None:
    right, ask = parts_of(arenas, 1), asking("hash_snapshots", 0, STEP)

    def answer(asked: Any, rows: Any) -> None:
        asked.answer({}, [msgpack.packb(rows)])

    heard_of(spoiled(unpacked(right)), ask, answer)
    assert heard_of(iter([unpacked(right)]), ask, answer) == 1
    assert heard_of(iter([None, 5, {}, {1: 2}, "x"]), ask, answer) <= 1  # an empty map has no rows
    assert heard_of(iter([unpacked(parts_of(arenas, 0))]), ask, answer) == 0, "another node's rank"
    assert heard_of(iter([b"", b"\xc1", right[:-1]]), ask, lambda asked, blob: asked.answer({}, [blob])) == 0
    assert heard_of(iter([0]), ask, lambda asked, _: asked.answer({})) == 0


def wanted() -> WriteRequest:
    frames = np.zeros(2, FRAME)
    frames["length"] = 1000
    return WriteRequest(STEP, frames, np.array([1, 1]), np.array([4096, 8192]), "raw", None)


def test_packs_that_a_node_says_it_wrote_are_taken_only_where_it_can_have_written_them() -> None:
    ask = asking("write_frames", wanted())
    places = np.zeros(2, PLACE)
    places["length"], places["offset"] = 1000, [0, 1000]
    packs = [[pack_key(STEP, "node", "w", 0), 2000]]

    def answer(asked: Any, given: Any) -> None:
        asked.answer({}, [given[0], msgpack.packb(given[1])])

    right = [places.tobytes(), packs]
    assert heard_of(iter([right]), ask, answer) == 1
    for each in spoiled(right):
        if len(each) == 2 and isinstance(each[0], bytes):  # what a blob can be
            heard_of(iter([each]), ask, answer)
    other, short = [[pack_key(identity(6), "node", "w", 0), 2000]], [[packs[0][0], 1999]]
    for places_told, packs_told in ((right[0], other), (right[0], []), (b"", packs), (right[0], short)):
        assert heard_of(iter([(places_told, packs_told)]), ask, answer) == 0
    assert heard_of(iter([(right[0], [*packs, *packs])]), ask, answer) == 0
    for field, wrong in (("offset", (1 << 63) - 1), ("offset", 1 << 63), ("length", 0), ("length", 999), ("codec", 9)):
        told = places.copy()
        told[field][1] = wrong  # a record that says so is damaged, all of it
        assert heard_of(iter([(told.tobytes(), packs)]), ask, answer) == 0, (field, wrong)
    assert heard_of(iter([0]), ask, lambda asked, _: asked.answer({})) == 0


def test_who_waits_on_a_thread_for_a_nodes_packs_hears_of_it_even_when_the_job_is_over() -> None:
    remote, net = share()
    heard: list[str] = []
    start(remote.write_frames(wanted()), lambda result, error: heard.append(error))
    remote.is_dropped = True
    net.asked[-1].refuse("gone")
    assert heard == ["gone"]


def test_a_checkpoint_of_which_a_node_says_nonsense_is_not_had_from_there(
    turned: Turned, arenas: dict[int, Arena]
) -> None:
    own = {0: arenas[0]}
    right = [parts_of(arenas, 1), [[1, arenas[1].size_bytes]]]

    def gather(answer: Callable[[Any], None]) -> tuple[GatheredManifest | None, str]:
        net, heard = Net(), list[tuple[GatheredManifest | None, str]]()
        holders = {0: ["", "b"], 1: ["b"]}
        then = lambda found, error: heard.append((found, error))  # noqa: E731
        start(gather_manifest(cast(PeerNetwork, net), turned.workers, STEP, holders, own), then)
        answer(net.asked[-1])
        turned.until(lambda: heard)
        assert len(heard) == 1
        return heard[0]

    def say(rows: Any, sizes: Any) -> tuple[GatheredManifest | None, str]:
        return gather(lambda asked: asked.answer({"sizes": sizes}, [msgpack.packb(rows)]))

    rows = unpacked(right[0])
    found, error = say(rows, right[1])
    assert found is not None, error
    for sizes in [*spoiled(right[1]), *WRONG]:
        found, error = say(rows, sizes)
        assert error or (found is not None and found.places.arena_sizes[1] >= arenas[1].size_bytes), sizes
        if found is not None:
            places_serve(found)
    for each in spoiled(rows):
        found, error = say(each, right[1])
        if found is not None:
            places_serve(found)
    assert gather(lambda asked: asked.answer({"sizes": right[1]}))[1]
    assert "gone" in gather(lambda asked: asked.refuse("gone"))[1]


def test_a_snapshot_that_has_changed_since_it_was_staged_is_had_from_the_next_holder(
    turned: Turned, arenas: dict[int, Arena]
) -> None:
    arenas[0].data(0, 8)[:] = b"\xff" * 8
    net = Net()
    gathering = Task(gather_manifest(cast(PeerNetwork, net), turned.workers, STEP, {0: ["", "b"], 1: [""]}, arenas))
    turned.until(lambda: net.asked)
    assert [(asked.name, asked.fields["ranks"], asked.fields["sealed"]) for asked in net.asked] == [("b", [0], False)]
    gathering.cancel()


def places_serve(found: GatheredManifest) -> None:
    """Its frames can be told of: they lie within the arenas, and apart."""
    for rank in found.places.arena_sizes:
        found.places.frames(rank, found.checkpoint.manifest)


def replicated(answer: Callable[[Net], None], own: dict[int, Arena], turned: Turned) -> str:
    """Why it is not."""
    net = Net(transport=Offers())
    copies = ReplicaStore(cast(Workers, turned.workers), turned.post)
    network, held = cast(PeerNetwork, net), lambda identity: {0: own[0]}
    service = ReplicaService(turned.workers, turned.post, copies, held, lambda: network, lambda: 1 << 40)
    try:
        wanted = [Assignment("b", {"a": (0,)}), Assignment("a", {"b": (1,)})]
        replicating = Task(replicate(copies, service, NODES, STEP, wanted))
        turned.until(lambda: len(net.asked) == 2)
        answer(net)
        turned.until(lambda: replicating.is_settled)
    finally:
        copies.close()
    assert isinstance(replicating.error, AgentError)
    return str(replicating.error)


class Offers:
    """A transport that has nothing to give."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def offer(self, name: str, source: memoryview, frames: Any, urgent: bool) -> None:
        self.names.add(name)

    def withdraw(self, name: str) -> None:
        self.names.discard(name)

    def fetch(self, *given: Any) -> Any:
        raise AgentError("nothing is to be had here")


WRONG_BLOBS = [[], [b""], [b"\xc1"], [b"x" * 99], *([msgpack.packb(each)] for each in (5, [], {}, [[0, 1, 2]], [5]))]


@pytest.mark.parametrize("blobs", WRONG_BLOBS)
def test_a_node_that_describes_its_snapshots_wrong_fails_the_copies_and_holds_nothing_up(
    blobs: list[bytes], turned: Turned, arenas: dict[int, Arena]
) -> None:
    def answer(net: Net) -> None:
        for asked in net.asked:
            asked.answer({}, blobs if asked.fields["t"] == "publish" else [])

    assert replicated(answer, arenas, turned)


def test_copies_that_a_node_refuses_are_failed_with_its_reason(turned: Turned, arenas: dict[int, Arena]) -> None:
    error = replicated(lambda net: [asked.refuse("no room") for asked in net.asked] and None, arenas, turned)
    assert "no room" in error
