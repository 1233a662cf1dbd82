"""A node whose memory is full: the kernel gives its agent neither a page nor a thread more. Training goes on, what is
safe stays, nothing wrong is restored, and once there is memory again copies, or parity, are made again."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.types import Version
from tests.agent.nodes.cluster import Cluster

STATE = 16 << 20  # numbers that each rank holds beside the rest, of which it stages a third
LEFT_BYTES = 12 << 20  # less than what an agent keeps of it for others, and the stack of one thread
UNLIMITED = resource.RLIM_INFINITY
COPIES, PARITY = {"replicas": 1}, {"data": 2, "parity": 1}


@contextlib.contextmanager
def full(pid: int) -> Iterator[None]:
    """From here on that process may take no more than so much, whatever the machine has left."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize() + LEFT_BYTES, UNLIMITED))
    yield
    resource.prlimit(pid, resource.RLIMIT_AS, (UNLIMITED, UNLIMITED))


def begin(cluster: Cluster, peers: dict[str, int]) -> int:
    """On three nodes. The step that is safe."""
    cluster.forbid_commits()
    cluster.options = {**cluster.options, "peers": peers}
    cluster.connect(0, 1, 2)
    for rank in cluster.job:
        rank.extra = STATE
    cluster.enter()
    return cluster.checkpoint("peer")


def await_full(cluster: Cluster, safe: int) -> None:
    """Until copies have failed for want of memory. Nothing is safe but what was."""
    cluster.await_event("replication.failed")
    told = [event["message"] for event in cluster.job[0].events if event["name"] == "replication.failed"]
    assert any("memory" in text for text in told), told
    with cluster.job[0].changed:
        levels = dict(cluster.job[0].levels)
    assert [version for (version, level), (ok, _) in levels.items() if ok and level == "peer"] == [str(Version(safe))]


@pytest.mark.parametrize("node", [0, 2])
@pytest.mark.parametrize("peers", [COPIES, PARITY])
def test_training_goes_on_beside_a_full_memory_and_what_is_safe_stays(
    peers: dict[str, int], node: int, cluster: Cluster
) -> None:
    """Parity may find room in what malloc has reserved before."""
    safe = begin(cluster, peers)
    with full(cluster.pids[node]):
        for _ in range(3):
            cluster.checkpoint("local")
        if peers == COPIES:
            await_full(cluster, safe)
        log = next(cluster.folder.glob(f"n{node}/*.log")).read_text()
        assert "made a mistake" not in log, log
    again = cluster.checkpoint("peer")
    cluster.lose(1)
    assert cluster.restart(0, 2)["step"] >= again > safe


@pytest.mark.parametrize("node", [0, 2])
def test_where_a_node_is_lost_while_the_memory_of_another_is_full_what_was_safe_comes_back(
    node: int, cluster: Cluster
) -> None:
    safe = begin(cluster, COPIES)
    with full(cluster.pids[node]):
        for _ in range(3):
            cluster.checkpoint("local")
        await_full(cluster, safe)
        cluster.lose(1)
    assert cluster.restart(0, 2)["step"] >= safe
    assert set(cluster.fetched()) <= {"local", "peer"}
