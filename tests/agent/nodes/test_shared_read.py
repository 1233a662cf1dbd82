"""A checkpoint that is in the store alone leaves it once for the whole job: each frame is read by one node and given to
the others, and a node that does not give what it should is done without. Of what memory has a part of, only the rest
leaves the store."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import AgentError
from ckpt.threads import Tasks
from ckpt.types import Identity
from tests.agent.fake import FakeRank
from tests.agent.node.test_agent import together
from tests.agent.nodes.cluster import BOUND_S, Cluster
from tests.storage.tiny import TinyS3, tiny

STATE_BYTES = 2 * 512 * 300 * 4
SLACK_BYTES = 64 << 10  # values, and what lies between frames that are read together


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[TinyS3]:
    with tiny() as server:
        for name, value in server.at.environment().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def url(store: TinyS3, tmp_path: Path) -> str:
    return f"s3://{store.at.bucket}/run"


def lose_memory(cluster: Cluster, *spread: int) -> int:
    """Saves a step to the store, and then nothing but the store has it."""
    cluster.start(*spread)
    cluster.checkpoint("store")
    version = cluster.save("store")
    cluster.kill(*set(spread))
    return version.step


def read(store: TinyS3) -> int:
    """The bytes of packs that have left the store since it was asked last."""
    found = sum(count for key, count in store.given.items() if key.endswith(".pack"))
    store.given.clear()
    return found


def check(candidate: dict[str, Any], step: int, lost_bytes: int, cluster: Cluster, store: TinyS3) -> None:
    """That step came back: what was lost of it left the store once, and all the rest came from memory."""
    assert (candidate["step"], candidate["level"]) == (step, "store")
    assert lost_bytes <= read(store) <= lost_bytes + SLACK_BYTES
    fetched = cluster.fetched()
    assert fetched["local"] + fetched["peer"] >= STATE_BYTES - lost_bytes


@pytest.mark.parametrize("spread", [(0, 1, 2), (0, 0, 1, 1), (0, 0, 1, 2, 3)])
def test_a_state_leaves_the_store_once_whatever_the_number_of_nodes(
    spread: tuple[int, ...], cluster: Cluster, store: TinyS3
) -> None:
    """Of the state one half is the same on all ranks, and wanted by all; the other is sharded."""
    step = lose_memory(cluster, 0, 1, 2)
    read(store)
    check(cluster.restart(*spread), step, STATE_BYTES, cluster, store)
    assert set(cluster.fetched()) == {"store", "peer"}
    assert cluster.checkpoint("store") > step
    cluster.finish()


def lose_a_node(cluster: Cluster, node: int, damaged: int | None = None) -> tuple[int, list[int]]:
    """Saves a step to the store; one node of three is lost then, and nobody has copies of what it had. What another has
    is `damaged`. The step, and the bytes that each had of it."""
    cluster.options = {**cluster.options, "peers": None}
    cluster.start(0, 1, 2)
    cluster.checkpoint("store")
    version = cluster.save("store")
    staged = [rank.plan.declaration.staging.data_bytes for rank in cluster.job if rank.plan is not None]
    assert sum(staged) == STATE_BYTES
    if damaged is not None:
        cluster.damage(damaged)
    cluster.lose(node)
    return version.step, staged


PARTLY = [(1, (0, 3, 2)), (1, (0, 2)), (1, (2, 0, 3, 0)), (0, (3, 1, 2)), (2, (3, 4, 0, 1, 1))]


@pytest.mark.parametrize(("gone", "spread"), PARTLY)
def test_of_a_checkpoint_that_memory_has_a_part_of_only_the_rest_leaves_the_store_and_once(
    gone: int, spread: tuple[int, ...], cluster: Cluster, store: TinyS3
) -> None:
    step, staged = lose_a_node(cluster, gone)
    read(store)
    check(cluster.restart(*spread), step, staged[gone], cluster, store)
    assert cluster.checkpoint("store") > step
    cluster.finish()


@pytest.mark.parametrize("damaged", [0, 2])
def test_a_part_in_memory_that_is_damaged_there_comes_from_the_store(
    damaged: int, cluster: Cluster, store: TinyS3
) -> None:
    step, staged = lose_a_node(cluster, 1, damaged)
    read(store)
    assert cluster.restart(0, 3, 2)["step"] == step
    assert read(store) >= staged[1] + staged[damaged]
    cluster.finish()


def in_pairs(cluster: Cluster) -> tuple[int, list[int], tuple[int, int], tuple[int, int]]:
    """Saves a step to the store, which two pairs of nodes keep parity of for each other. The step, the bytes that each
    node staged, and the pairs."""
    cluster.options = {**cluster.options, "peers": {"data": 1, "parity": 1}}
    cluster.start(0, 1, 2, 3)
    cluster.checkpoint("store")
    version = cluster.save("peer", "store")
    staged = [rank.plan.declaration.staging.data_bytes for rank in cluster.job if rank.plan is not None]
    (partner,) = cluster.keepers()[0]
    first, second = (node for node in (1, 2, 3) if node != partner)
    return version.step, staged, (0, partner), (first, second)


@pytest.mark.parametrize("news", [1, 0])
def test_what_parity_can_make_again_of_a_part_is_made_and_only_what_is_lost_leaves_the_store(
    news: int, cluster: Cluster, store: TinyS3
) -> None:
    """`news`: nodes that have nothing; with none of them the one that is left is a job of one node."""
    step, staged, beyond, (gone, left) = in_pairs(cluster)
    cluster.lose(*beyond, gone)
    read(store)
    cluster.connect(left, *range(4, 4 + news))
    if not news:
        cluster.job[0].nodes = []
    lost_bytes = sum(staged[node] for node in beyond)
    check(cluster.enter().fields["candidate"], step, lost_bytes, cluster, store)
    assert cluster.checkpoint("store") > step
    told = {each["name"] for each in cluster.job[0].events}
    assert told.isdisjoint({"restore.lost", "replica.restored"}), "nothing is lost, and copies of a part are of no use"
    cluster.finish()


def test_of_what_turns_out_not_to_be_whole_in_memory_the_rest_is_taken_from_there_and_what_was_made_again_too(
    cluster: Cluster, store: TinyS3
) -> None:
    """One node of each pair is lost, and made good; then what another one has is seen to be damaged."""
    step, staged, pair, other = in_pairs(cluster)
    cluster.damage(pair[0])
    cluster.lose(pair[1], other[1])
    read(store)
    check(cluster.restart(pair[0], other[0]), step, staged[pair[0]], cluster, store)
    cluster.finish()


def test_where_a_users_limit_leaves_no_memory_to_read_for_others_each_node_reads_for_itself_and_says_so(
    cluster: Cluster, store: TinyS3
) -> None:
    step = lose_memory(cluster, 0, 1, 2)
    read(store)
    limits = {"memory": 200 << 20, "bandwidth": None, "peer_bandwidth": None}  # less than the window alone may take
    cluster.options = {**cluster.options, "limits": limits}
    assert cluster.restart(0, 1, 2)["step"] == step
    assert set(cluster.fetched()) == {"store"}
    assert read(store) > 1.5 * STATE_BYTES, "one half of it is wanted by all three"
    for rank in cluster.job:
        assert [each["name"] for each in rank.events].count("restore.unshared") == 1
    cluster.finish()


def restoring(cluster: Cluster, tasks: Tasks, *spread: int) -> tuple[list[FakeRank], list[Future[Identity | None]]]:
    """A start as far as that its ranks restore, each by itself."""
    ranks = cluster.connect(*spread)
    decision = ranks[0].begin()
    together(ranks, lambda rank: rank.join(decision.fields["epoch"]))
    return ranks, [tasks.submit(rank.restore, decision) for rank in ranks]


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_home_that_is_killed_while_all_read_is_done_without(before: int, cluster: Cluster, store: TinyS3) -> None:
    """It is killed once so many reads of frames have been answered, and two others wait."""
    step = lose_memory(cluster, 0, 1, 2)
    changed, held, open_ = threading.Condition(), Counter[str](), threading.Event()

    def gate(key: str) -> None:
        if key.endswith(".pack"):
            with changed:
                held[key] += 1
                changed.notify_all()
                passes = held.total() <= before
            assert passes or open_.wait(BOUND_S)

    store.gate = gate
    with Tasks("restoring", pool_size=3) as tasks:
        ranks, restored = restoring(cluster, tasks, 0, 1, 2)
        with changed:
            assert changed.wait_for(lambda: held.total() > before, BOUND_S)
        cluster.kill_agent(2)
        open_.set()
        assert {each.result(BOUND_S) for each in restored[:2]} == {Identity.parse(str(ranks[0].parent))}
        with contextlib.suppress(AgentError):  # it may have had all that it wanted by then
            restored[2].result(BOUND_S)
    for rank in ranks[:2]:
        assert rank.step == step
        rank.check(step)


def test_what_a_home_gives_wrong_is_read_from_the_store_by_whoever_wants_it(cluster: Cluster, store: TinyS3) -> None:
    """The rank of the home spoils what lies in memory there, and then the others fetch it."""
    step = lose_memory(cluster, 0, 1, 2)
    ranks = cluster.connect(0, 1, 2)
    decision = ranks[0].begin()
    together(ranks, lambda rank: rank.join(decision.fields["epoch"]))
    spoiled: set[int] = set()

    def spoil(frame: int, raw: memoryview) -> bool:
        if frame in spoiled:
            return False
        spoiled.add(frame)
        raw[:] = bytes(len(raw))
        return True

    ranks[1].spoil = spoil
    ranks[1].restore(decision)
    assert spoiled
    read(store)
    together([ranks[0], ranks[2]], lambda rank: rank.restore(decision))
    for rank in ranks:
        assert rank.step == step
        rank.check(step)
    assert read(store) > STATE_BYTES // 3  # what node 1 has is read again
