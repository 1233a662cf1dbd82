"""Agents find each other, and keep one connection, whatever addresses lead there. Over real sockets."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import psutil
import pytest

from ckpt.agent.net.channel import Channel
from ckpt.agent.net.peer_network import PeerNetwork, link_bytes_s
from ckpt.agent.runtime.coroutines import Promise
from ckpt.agent.runtime.workers import Workers
from ckpt.ipc.addresses import Address
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NodeAt
from tests.agent.net.loop import SECRET, TurnedLoop


class Answering:
    """Answers whatever it is asked."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    def peer_message(self, channel: Channel, message: Message) -> None:
        channel.reply(int(message.fields["id"]), {"to": message.kind})

    def peer_closed(self, channel: Channel) -> None:
        self.closed.append(channel.peer)


class Agent:
    def __init__(self, loop: TurnedLoop, name: str) -> None:
        self.receiver = Answering()
        self.workers = Workers(loop.post)
        self.network = PeerNetwork(loop, self.workers, name, self.receiver)
        self.port = self.network.listen(SECRET, "0.0.0.0:0")[0].port

    def at(self, hosts: int) -> NodeAt:
        """As a node with so many addresses, all of which lead here."""
        return NodeAt(
            self.network.agent_name, tuple(Address(f"127.0.0.{i}", self.port) for i in range(1, hosts + 1)), ()
        )

    def close(self) -> None:
        self.network.close()
        self.workers.close()


@pytest.fixture
def loop() -> Iterator[TurnedLoop]:
    made = TurnedLoop()
    yield made
    made.close()


@pytest.fixture
def agent(loop: TurnedLoop) -> Iterator[Callable[[str], Agent]]:
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(closing(Agent(loop, name)))


def test_who_is_told_to_listen_elsewhere_is_reached_there_and_where_others_knew_it_before(
    loop: TurnedLoop, agent: Callable[[str], Agent]
) -> None:
    """An agent of an earlier start is left, and its user has named another address since."""
    one = agent("one")
    (before,) = one.at(hosts=1).addresses
    assert one.network.listen(SECRET, "0.0.0.0:0")[0].port == before.port, "that of the same words stays"
    assert one.network.listen(SECRET, f"0.0.0.0:{before.port}")[0].port == before.port, "and that which came of them"
    (named,) = one.network.listen(SECRET, "127.0.0.3:0")
    assert (named.host, named.port == before.port) == ("127.0.0.3", False)
    assert one.network.listen(SECRET, "127.0.0.3:0") == [named]
    within = Address("127.0.0.5", before.port)
    assert one.network.listen(SECRET, str(within)) == [within], "of all interfaces, where it listens, that one is named"
    for name, address in (("two", named), ("three", before), ("four", within)):
        connected = agent(name).network.connect(NodeAt("one", (address,), ()))
        loop.until(lambda connected=connected: connected.is_settled)
        assert connected.result() == "one"


def test_two_agents_that_dial_each_other_at_once_are_left_with_one_connection_that_both_keep(
    loop: TurnedLoop, agent: Callable[[str], Agent], seed: int
) -> None:
    rng = random.Random(seed)
    for turn in range(40):
        one, two = agent(f"one-{turn}"), agent(f"two-{turn}")
        connected: list[Promise[str]] = []
        pairs = [(one, two), (two, one)]
        rng.shuffle(pairs)
        for caller, called in pairs:
            connected.append(caller.network.connect(called.at(hosts=rng.choice((1, 3, 8)))))
            for _ in range(rng.choice((0, 0, 1, 2, 4))):
                loop.turn(0.001)
        loop.until(lambda connected=connected: all(each.is_settled for each in connected))
        assert [each.result() for each in connected] == [called.network.agent_name for _, called in pairs]
        for _ in range(5):
            loop.turn(0.002)
        for caller, called in pairs:
            answer = caller.network.request(called.network.agent_name, {"t": "any"})
            loop.until(lambda answer=answer: answer.is_settled)
            assert answer.error is None
        assert one.receiver.closed == two.receiver.closed == []
        one.close()
        two.close()


def test_of_an_address_of_this_host_it_is_known_what_its_link_carries_if_the_system_says_so() -> None:
    links = {name: each.speed for name, each in psutil.net_if_stats().items()}
    assert links
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family == socket.AF_INET and name in links:
                assert link_bytes_s(Address(each.address, 1)) == links[name] * 125_000
    assert link_bytes_s(Address("203.0.113.9", 1)) == 0, "nobody here has that address"
