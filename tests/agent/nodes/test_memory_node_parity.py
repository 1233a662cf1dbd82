"""Parity of which a memory-only node keeps some: within what it lends, and given back where it is needed."""

from __future__ import annotations

import threading
import time

import pytest

from tests.agent.nodes.cluster import BOUND_S, Cluster
from tests.agent.nodes.test_parity import await_commit

PAIR = {"data": 1, "parity": 1}


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_HEARTBEAT_S", "0.5")
    monkeypatch.setenv("CKPT_RETRY_S", "1")


def test_one_that_lends_twice_the_parity_of_a_checkpoint_keeps_that_of_each_and_no_more_is_taken(
    cluster: Cluster,
) -> None:
    cluster.forbid_commits()
    cluster.options = {**cluster.options, "peers": PAIR}
    lends = 0
    for _ in range(2):  # how much that is, the first says
        cluster.peers = cluster.lend(f"{lends}B" if lends else "1GiB")["listen"]
        cluster.connect(0)
        cluster.job[0].extra = 2 << 20  # of which the checkpoint is, but for little
        cluster.enter()
        for _ in range(4):
            step = cluster.checkpoint("peer")
        assert "any 1 of 2 nodes may be lost" in next(
            each["message"] for each in cluster.job[0].events if each["name"] == "replication.placed"
        )
        lends = max(row["keeps_bytes"] for row in cluster.status(0)["job"]["peers"]["nodes"])
        status = cluster.lending_status(len(cluster.lending) - 1)
        assert status["used_bytes"] <= lends
        cluster.kill(0)
    assert cluster.start(1).fields["candidate"]["step"] == step
    assert set(cluster.fetched()) == {"local"}  # it was made again here


def test_a_coordinators_agent_that_is_started_again_shows_what_is_safe_and_the_next_is(cluster: Cluster) -> None:
    cluster.options = {**cluster.options, "peers": PAIR}
    cluster.peers = cluster.lend("1GiB")["listen"]
    cluster.start(0)
    step = cluster.checkpoint("peer", "store")
    cluster.kill_agent(0)
    assert cluster.job[0].lost.wait(60)
    cluster.come_back()
    deadline = time.monotonic() + BOUND_S
    while (safe := cluster.status(0)["account"]["safe"]).keys() != {"local", "peer", "store"}:  # no snapshot is taken
        assert time.monotonic() < deadline, safe
        threading.Event().wait(0.02)
    assert {found["step"] for found in safe.values()} == {step}
    cluster.job[0].enter(step + 1)
    cluster.job[0].wait_warm()
    assert cluster.checkpoint("peer") > step


def test_a_commit_of_what_is_kept_with_a_memory_only_node_alone_is_made_by_the_nodes_that_are_left(
    cluster: Cluster,
) -> None:
    """It makes nothing itself: the coordinator, of another group, does."""
    cluster.forbid_commits()
    cluster.options = {**cluster.options, "peers": PAIR}
    cluster.peers = cluster.lend("1GiB", "--domain", "x")["listen"]
    cluster.connect(0, 1, 2)
    for node, domain in zip(cluster.job[0].nodes, "xyy", strict=True):
        node["domains"] = [domain]
    cluster.enter()
    step = cluster.checkpoint("peer")
    rows = cluster.status(0)["job"]["peers"]["nodes"]
    memory_node = next(row["node"] for row in rows if not row["own_bytes"])
    lost = next(row["node"] for row in rows if row["kept_by"] == [memory_node])
    cluster.allow_commits()
    cluster.kill(next(cluster.at[node["ranks"][0]] for node in cluster.job[0].nodes if node["name"] == lost))
    cluster.hang_up()
    await_commit(cluster, step)
