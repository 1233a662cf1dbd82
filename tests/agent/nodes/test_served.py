"""What a start has served, and read for all nodes, ends with it: also where its coordinator is gone and cannot say so,
and not where that only lost its connection for a moment."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.agent.job.follower_job import FollowerJob
from ckpt.agent.net.handshake import Dialler, Role
from ckpt.agent.net.peer_network import run_of
from ckpt.agent.net.tcp_sender import TcpTransport
from ckpt.agent.node.cluster_startup import ClusterStartup
from ckpt.agent.node.inventory_lease import BOUND_S, InventoryLease
from ckpt.agent.replication.replica_store import decode_described
from ckpt.agent.restore.peer_source import name_of
from ckpt.errors import AgentError
from ckpt.types import HERE, Epoch, Identity, Tick
from tests.agent.nodes.cluster import Cluster
from tests.agent.nodes.test_hostile_peers import Liar, liar, node_of
from tests.agent.nodes.test_permissions import ask, at_work, held

__all__ = ["at_work", "liar"]

ONE, TWO = Epoch(1, "a" * 16), Epoch(2, "b" * 16)
OLDER, NEWER = Identity(ONE, Tick(5)), Identity(ONE, Tick(6))


class Node:
    """What is served at a node, and by whose word; and its parts in jobs that others coordinate."""

    def __init__(self) -> None:
        self.fence = InventoryLease()
        self._offered = {name_of(OLDER, 0): {"x"}, name_of(NEWER, 0): {"x", "y"}, name_of(NEWER, 1): {HERE}}
        self.network = SimpleNamespace(transport=SimpleNamespace(withdraw=lambda name: None))
        self.ended: list[str] = []
        self.followings = [self.following("x"), self.following("y")]
        for name in ("x", "y"):
            self.fence.asked(name, ONE)

    def following(self, leader: str) -> Any:
        end = lambda: self.ended.append(leader)  # noqa: E731
        return SimpleNamespace(leader=SimpleNamespace(name=leader), end_reading_unled=end)

    def _withdraw_served(self, by: str, identity: Identity | None = None) -> None:
        ClusterStartup._withdraw_served(cast(ClusterStartup, self), by, identity)

    def tend(self, now_s: float) -> tuple[list[str], list[str]]:
        """What is served from then on, and by whose coordinator's end something that was read went."""
        self.ended.clear()
        ClusterStartup._end_what_starts_left(cast(ClusterStartup, self), now_s)
        return sorted(self._offered), self.ended


ALL = sorted([name_of(OLDER, 0), name_of(NEWER, 0), name_of(NEWER, 1)])


def test_what_a_coordinator_has_served_outlives_a_lost_connection_that_comes_back_in_time() -> None:
    node = Node()
    assert node.tend(0.0) == (ALL, [])
    node.fence.lost("x", 10.0)
    assert node.tend(10.0 + BOUND_S - 0.1) == (ALL, [])
    node.fence.heard("x")
    assert node.tend(10.0 + 9 * BOUND_S) == (ALL, [])


def test_what_a_coordinator_has_served_ends_once_it_is_taken_for_gone() -> None:
    node = Node()
    node.fence.lost("x", 10.0)
    assert node.tend(10.0 + BOUND_S) == ([name_of(NEWER, 0), name_of(NEWER, 1)], ["x"])
    node.fence.lost("y", 200.0)
    assert node.tend(200.0 + BOUND_S) == ([name_of(NEWER, 1)], ["x", "y"])


@pytest.mark.parametrize("begins", [True, False])
def test_what_a_start_has_served_ends_with_its_outcome_though_nobody_says_so(begins: bool) -> None:
    node = Node()
    if begins:
        assert node.fence.begun("x", TWO)
    else:
        node.fence.over("x")
    assert node.tend(1.0) == ([name_of(NEWER, 0), name_of(NEWER, 1)], ["x"])


def test_what_was_read_for_a_start_goes_unless_its_coordinator_is_connected() -> None:
    for led in (True, False):
        closed: list[str] = []
        following = cast(FollowerJob, SimpleNamespace(_is_led=led, _end_restore=lambda: closed.append("closed")))  # noqa: B023
        FollowerJob.end_reading_unled(following)
        assert closed == ([] if led else ["closed"])


def test_what_a_real_agent_serves_for_a_start_it_serves_until_that_has_come_to_nothing(
    at_work: Cluster, liar: Callable[..., Liar]
) -> None:
    starting, node = liar("starting"), node_of(at_work, 1)
    newest = held(starting, node).complete()[-1]
    answer, error = ask(starting, node, {"t": "publish", "identity": str(newest), "ranks": [1]})
    assert answer is not None, error
    (described,) = decode_described(answer.blobs[0])
    greet = lambda about, peer: Dialler(at_work.secret, run_of(at_work.secret), Role.DATA, "x", about, peer)  # noqa: E731
    transport = TcpTransport(greet, patience_s=0.2)

    def fetched() -> BaseException | None:
        target = memoryview(bytearray(described.size))
        done: Future[None] = transport.fetch(
            node.name, node.addresses, name_of(newest, 1), target, described.frames
        ).done
        return done.exception(60)

    try:
        assert isinstance(fetched(), AgentError)
        starting.say(node, {"t": "serve", "identity": str(newest), "rank": 1}, [described.frames.encode()])
        starting.alive(node)
        assert fetched() is None
        starting.say(node, {"t": "outcome", "epoch": None}, [])
        starting.alive(node)
        assert isinstance(fetched(), AgentError)
    finally:
        transport.close()
