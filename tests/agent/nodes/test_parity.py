"""Parity of snapshots in other nodes' memory: as many nodes as it has parities may be lost, and all comes back bit for
bit from what is left, with nothing read from the store."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.agent.nodes.cluster import Cluster

TWO = {"data": 2, "parity": 2}
ONE = {"data": 3, "parity": 1}


def protect(cluster: Cluster, peers: dict[str, int]) -> None:
    cluster.options = {**cluster.options, "peers": peers}


def keeps(cluster: Cluster, node: int) -> int:
    """Bytes that it is planned to keep of one generation for others."""
    rows = cluster.status(cluster.at[0])["job"]["peers"]["nodes"]
    name = {cluster.at[each["ranks"][0]]: each["name"] for each in cluster.job[0].nodes}[node]
    return int(next(row["keeps_bytes"] for row in rows if row["node"] == name)) // 2


def check_memory(cluster: Cluster, decision: Any, step: int) -> None:
    """That is what came back, and all of it from memory. That it is right, each rank has checked on entry."""
    assert decision.fields["candidate"]["step"] == step
    assert decision.fields["candidate"]["level"] == "peer"
    assert {level for level, count in cluster.fetched().items() if count} <= {"local", "peer"}


@pytest.mark.parametrize("lost", list(itertools.combinations(range(4), 2)))
def test_with_two_parities_any_two_of_four_nodes_may_be_lost(cluster: Cluster, lost: tuple[int, int]) -> None:
    cluster.forbid_commits()
    protect(cluster, TWO)
    cluster.start(0, 1, 2, 3)
    step = cluster.checkpoint("peer")
    cluster.kill(*lost)
    cluster.hang_up()
    left = [node for node in range(4) if node not in lost]
    check_memory(cluster, cluster.start(*left), step)
    again = cluster.checkpoint("peer")
    cluster.hang_up()
    check_memory(cluster, cluster.start(*left, 4, 5), again)
