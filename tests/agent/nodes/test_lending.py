"""A memory-only node is the only peer: it keeps what a job of one node has, gives it back elsewhere when that node is
lost, and commits it."""

from __future__ import annotations

import pytest

from ckpt.types import Tick
from tests.agent.nodes.cluster import Cluster, line


@pytest.fixture
def lent(cluster: Cluster) -> Cluster:
    cluster.peers = cluster.lend()["listen"]
    return cluster


def test_a_job_of_one_node_has_its_copies_at_a_memory_only_node(lent: Cluster, url: str) -> None:
    lent.start(0, 0)
    step = lent.checkpoint("local", "peer", "store")
    table = lent.status(0)["job"]["peers"]
    assert [len(row["kept_by"]) for row in table["nodes"] if row["own_bytes"]] == [1], table
    assert any(f"-{Tick(step)}" in each for each in lent.lending_status()["whole"])
    lent.finish()
    assert [identity.tick.step for identity in line(url)][-1] == lent.job[0].step
    assert lent.await_lending(lambda status: not status["connected"])["keeps"] == []
    assert lent.end_lending() == 0


@pytest.mark.parametrize("after", [(1,), (1, 1, 1), (1, 2)])
def test_when_the_trainers_node_is_lost_its_state_comes_back_from_there_onto_any_number_of_ranks(
    lent: Cluster, after: tuple[int, ...]
) -> None:
    lent.forbid_commits()
    lent.start(0, 0)
    step = lent.checkpoint("peer")
    lent.kill(0)
    decision = lent.start(*after, launch="another")
    assert decision.fields["candidate"]["step"] == step == lent.job[0].step
    assert decision.fields["candidate"]["level"] == "peer"
    assert set(lent.fetched()) == {"peer"}
    assert lent.checkpoint("peer") > step
