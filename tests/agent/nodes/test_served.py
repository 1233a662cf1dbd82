"""What a start has served, and read for all nodes, ends with it: also where its coordinator is gone and cannot say so,
and not where that only lost its connection for a moment."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.agent.job.follower_restore import FollowerRestore
from ckpt.agent.net.handshake import Dialler, Role
from ckpt.agent.net.peer_network import secret_id_of
from ckpt.agent.net.tcp_sender import Transport
from ckpt.agent.net.transport import Frames
from ckpt.agent.node.inventory_lease import LEASE_TIMEOUT_S
from ckpt.agent.node.node_memory import NodeMemory
from ckpt.agent.replication.replica_offers import transfer_name
from ckpt.agent.restore.peer_source import offer_name
from ckpt.agent.snapshots.described import decode_described
from ckpt.errors import AgentError
from ckpt.types import Epoch, Identity, Version
from tests.agent.node.test_inventory_lease import Later
from tests.agent.nodes.cluster import Cluster
from tests.agent.nodes.test_hostile_peers import MakeLiar, liar, node_of
from tests.agent.nodes.test_permissions import ask, at_work, held
from tests.agent.parts import bare_context

__all__ = ["at_work", "liar"]

ONE, TWO = Epoch(1, "a" * 16), Epoch(2, "b" * 16)
OLDER, NEWER = Identity(ONE, Version(5)), Identity(ONE, Version(6))
OFFERS = {
    transfer_name(NEWER, 0): ["x/"],  # a job has it copied
    offer_name(OLDER, 0): ["x/start"],
    offer_name(NEWER, 0): ["x/start", "y/start"],
    offer_name(NEWER, 1): ["start"],  # a start from here
}
ALL = list(OFFERS)
OF_Y = [name for name in ALL if name != offer_name(OLDER, 0)]
OWN = [name for name in OF_Y if name != offer_name(NEWER, 0)]


class Node:
    """What is served at a node, and by whose word; and its parts in jobs that others coordinate."""

    def __init__(self) -> None:
        self.later: Later = {}
        server = SimpleNamespace(call_later=self.later.__setitem__, post=lambda what: what())
        context = bare_context(server=server)
        self.memory = NodeMemory(context)
        self.inventory_lease, self.replicas = self.memory.inventory_lease, self.memory.replicas
        transport = SimpleNamespace(offer=lambda *given: None, withdraw=lambda name: None)
        for name, readers in OFFERS.items():
            for reader in readers:
                given = cast(Transport, transport), name, memoryview(b""), cast(Frames, None)
                self.replicas.offers.add(*given, reader, urgent=True)
        self.peer_disconnected: list[str] = []
        context.jobs.followed = [self.followed_job("x"), self.followed_job("y")]
        for name in ("x", "y"):
            self.inventory_lease.take_lease(name, ONE)

    def followed_job(self, leader: str) -> Any:
        end = lambda: self.peer_disconnected.append(leader)  # noqa: E731
        restore = SimpleNamespace(end_uncoordinated=end)
        return SimpleNamespace(coordinator=SimpleNamespace(name=leader), restore=restore)

    def tend(self) -> tuple[list[str], list[str]]:
        """What is served from then on, and by whose coordinator's end something that was read went."""
        self.peer_disconnected.clear()
        self.memory.end_expired_serving()
        return sorted(self.replicas.offers._readers_by_offer), self.peer_disconnected


def test_what_a_coordinator_has_served_outlives_a_lost_connection_that_comes_back_in_time() -> None:
    node = Node()
    node.inventory_lease.on_holder_lost("x")
    assert node.tend() == (ALL, [])
    node.inventory_lease.on_holder_connected("x")
    node.later[LEASE_TIMEOUT_S]()
    assert node.tend() == (ALL, [])


def test_what_a_coordinator_has_served_ends_once_it_is_taken_for_gone() -> None:
    node = Node()
    node.inventory_lease.on_holder_lost("x")
    node.later[LEASE_TIMEOUT_S]()
    assert node.tend() == (OF_Y, ["x"])
    node.inventory_lease.on_holder_lost("y")
    node.later[LEASE_TIMEOUT_S]()
    assert node.tend() == (OWN, ["x", "y"])


@pytest.mark.parametrize("begins", [True, False])
def test_what_a_start_has_served_ends_with_its_outcome_though_nobody_says_so(begins: bool) -> None:
    node = Node()
    if begins:
        assert node.inventory_lease.on_epoch_begun("x", TWO)
    else:
        node.inventory_lease.end_lease("x")
    assert node.tend() == (OF_Y, ["x"])


def test_what_was_read_for_a_start_goes_unless_its_coordinator_is_connected() -> None:
    for led in (True, False):
        closed: list[str] = []
        network = SimpleNamespace(channel=lambda name, led=led: object() if led else None)
        given = (cast(Any, each) for each in (None, network, ONE, [SimpleNamespace(name="a")], None, None, None))
        restore = FollowerRestore(*given)
        restore.session = cast(Any, SimpleNamespace(close=partial(closed.append, "closed")))
        restore.end_uncoordinated()
        assert closed == ([] if led else ["closed"])


def test_what_a_real_agent_serves_for_a_start_it_serves_until_that_has_come_to_nothing(
    at_work: Cluster, liar: MakeLiar
) -> None:
    starting, node = liar("starting"), node_of(at_work, 1)
    newest = held(starting, node).complete_checkpoints()[-1]
    answer, error = ask(starting, node, {"t": "publish", "identity": str(newest), "ranks": [1]})
    assert answer is not None, error
    (described,) = decode_described(answer.blobs[0])
    greet = lambda about, peer: Dialler(at_work.secret, secret_id_of(at_work.secret), Role.DATA, "x", about, peer)  # noqa: E731
    transport = Transport(greet, patience_s=0.2)

    def fetched() -> BaseException | None:
        target = memoryview(bytearray(described.arena_bytes))
        done: Future[None] = transport.fetch(
            node.name, node.addresses, offer_name(newest, 1), target, described.frames
        ).completion
        return done.exception(60)

    with closing(transport):
        assert isinstance(fetched(), AgentError)
        starting.say(node, {"t": "publish", "identity": str(newest), "ranks": [1]}, [described.frames.encode()])
        starting.alive(node)
        assert fetched() is None
        starting.say(node, {"t": "start-outcome", "epoch": None}, [])
        starting.alive(node)
        assert isinstance(fetched(), AgentError)
