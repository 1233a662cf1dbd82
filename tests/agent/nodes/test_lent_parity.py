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
        lends = max(row["keeps_bytes"] for row in cluster.status(0)["job"]["peers"]["nodes"])
        status = cluster.lending_status(len(cluster.lending) - 1)
        assert status["used_bytes"] <= lends
        cluster.kill(0)
    assert cluster.start(1).fields["candidate"]["step"] == step
    assert set(cluster.fetched()) == {"local"}  # it was made again here
