"""A node whose memory is full: the kernel gives its agent neither a page nor a thread more. Training goes on, what is
safe stays, nothing wrong is restored, and once there is memory again copies, or parity, are made again."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.nodes.cluster import Cluster

STATE = 16 << 20  # numbers that each rank holds beside the rest, of which it stages a third
LEFT_BYTES = 12 << 20  # less than what an agent keeps of it for others, and the stack of one thread
UNLIMITED = resource.RLIM_INFINITY


@contextlib.contextmanager
def full(pid: int) -> Iterator[None]:
    """From here on that process may take no more than so much, whatever the machine has left."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize() + LEFT_BYTES, UNLIMITED))
    yield
    resource.prlimit(pid, resource.RLIMIT_AS, (UNLIMITED, UNLIMITED))


@pytest.mark.parametrize("node", [0, 2])
@pytest.mark.parametrize("peers", [{"replicas": 1}, {"data": 2, "parity": 1}])
def test_training_goes_on_beside_a_full_memory_and_what_is_safe_stays(
    peers: dict[str, int], node: int, cluster: Cluster
) -> None:
    cluster.forbid_commits()
    cluster.options = {**cluster.options, "peers": peers}
    cluster.connect(0, 1, 2)
    for rank in cluster.job:
        rank.extra = STATE
    cluster.enter()
    safe = cluster.checkpoint("peer")
    with full(cluster.pids[node]):
        for _ in range(3):
            cluster.checkpoint("local")
        log = next(cluster.folder.glob(f"n{node}/*.log")).read_text()
        assert "made a mistake" not in log, log
    again = cluster.checkpoint("peer")
    cluster.kill(1)
    cluster.hang_up()
    assert cluster.start(0, 2).fields["candidate"]["step"] >= again > safe
