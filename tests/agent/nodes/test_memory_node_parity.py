"""Parity of which a memory-only node keeps some: within what it lends, and given back where it is needed."""

from __future__ import annotations

import pytest

from tests.agent.nodes.cluster import Cluster

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


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_a_memory_only_node_keeps_outlives_the_coordinators_agent_until_the_next_is_safe(
    is_lost: bool, cluster: Cluster
) -> None:
    cluster.forbid_commits()
    cluster.options = {**cluster.options, "peers": PAIR}
    cluster.peers = cluster.lend("1GiB")["listen"]
    cluster.start(0)
    step = cluster.checkpoint("peer")
    cluster.kill_agent(0)
    assert cluster.job[0].lost.wait(60)
    cluster.come_back()
    if is_lost:  # before the next snapshot
        cluster.kill(0)
        assert cluster.start(1).fields["candidate"]["step"] == step
    else:
        cluster.job[0].enter(step + 1)
        cluster.job[0].wait_warm()
        assert cluster.checkpoint("peer") > step


def test_a_node_whose_state_is_kept_with_a_memory_only_node_alone_is_lost_and_a_start_has_it_again(
    cluster: Cluster,
) -> None:
    """Its part is parity, of which a commit makes nothing: the nodes that are left commit no such step."""
    cluster.options = {**cluster.options, "peers": PAIR}
    cluster.forbid_commits()
    cluster.peers = cluster.lend("1GiB", "--domain", "x")["listen"]
    cluster.connect(0, 1, 2)
    for node, domain in zip(cluster.job[0].nodes, "xyy", strict=True):
        node["domains"] = [domain]
    cluster.enter()
    step = cluster.checkpoint("peer")
    rows = cluster.status(0)["job"]["peers"]["nodes"]
    memory_node = next(row["node"] for row in rows if not row["own_bytes"])
    lost = next(row["node"] for row in rows if row["kept_by"] == [memory_node])
    gone = next(cluster.at[node["ranks"][0]] for node in cluster.job[0].nodes if node["name"] == lost)
    cluster.kill(gone)
    cluster.hang_up()
    left = [node for node in range(3) if node != gone]
    assert cluster.start(*left, 3, launch="another").fields["candidate"]["step"] == step
