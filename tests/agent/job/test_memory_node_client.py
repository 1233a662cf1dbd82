"""Which memory-only nodes a job uses, as its coordinator knows them. With agents: nodes/test_memory_node.py."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.agent.job.memory_node_client import ANSWER_TIMEOUT_S, CALL_S, MemoryNodeClients
from ckpt.agent.runtime.coroutines import Promise
from ckpt.ipc.addresses import Address

ADDRESS = Address.parse("127.0.0.1:9")
LOAN = SimpleNamespace(fields={"lent_bytes": 1 << 30, "name": "lender", "domains": [], "link_bytes_s": 0})
ENDED = "the connection to agent lender has ended"


class Network:
    """That of the coordinator, with one memory-only node. `error`: why it cannot be reached. `asked`: the requests that
    wait for an answer. `later`: timers by delay."""

    def __init__(self) -> None:
        self.error = ""
        self.asked: list[Promise[Any]] = []
        self.later: dict[float, Callable[[], None]] = {}
        self.is_connected = False
        network = lambda: cast(Any, self)  # noqa: E731
        self.nodes = MemoryNodeClients("url", network, self.later.__setitem__, lambda event: None, lambda: None)

    def begin(self) -> MemoryNodeClients:
        self.nodes.begin_borrowing(cast(CommitTerms, SimpleNamespace(encode=lambda: b"")), [ADDRESS])
        return self.nodes

    def connect_to_address(self, address: Address) -> Promise[str]:
        name = Promise[str]()
        name.set_outcome("lender", self.error)
        return name

    def request(self, name: str, fields: Any, blobs: Any) -> Promise[Any]:
        self.asked.append(Promise())
        return self.asked[-1]

    def channel(self, name: str) -> object:
        return self if self.is_connected else None


def test_nobody_waits_for_one_that_is_not_called_any_more() -> None:
    """It has not answered by then: what is safe is found out without it."""
    memory_nodes = Network().begin()
    assert memory_nodes.has_pending_nodes
    memory_nodes.stop_borrowing()
    assert not memory_nodes.has_pending_nodes


@pytest.mark.parametrize("then", ["it is back", "nobody is there", "it does not answer"])
def test_one_whose_connection_has_ended_may_be_there_still_until_it_was_called_again(then: str) -> None:
    """What it keeps may be all that outlives a node, and nothing goes before it was asked."""
    network = Network()
    memory_nodes = network.begin()
    network.asked.pop().set_outcome(LOAN, "")
    assert [each.name for each in memory_nodes.nodes()] == ["lender"]
    assert not memory_nodes.has_pending_nodes
    assert memory_nodes.on_disconnect("lender")
    assert memory_nodes.nodes() == []
    assert memory_nodes.has_pending_nodes
    if then == "nobody is there":
        network.error = "nobody listens there"
    network.later[CALL_S]()
    if then == "it is back":
        network.asked.pop().set_outcome(LOAN, "")
    assert memory_nodes.has_pending_nodes is (then == "it does not answer")
    network.later[ANSWER_TIMEOUT_S]()
    assert not memory_nodes.has_pending_nodes, "for ever nobody waits"
    assert bool(memory_nodes.nodes()) is (then == "it is back")


def test_one_whose_connection_ends_while_it_is_asked_is_missed_all_the_same() -> None:
    """As where the link is cut, or its machine has died: it is asked every few seconds, and found to be silent later.
    What it kept is not believed to be there any more, and it may be there still."""
    network = Network()
    memory_nodes, network.is_connected = network.begin(), True
    network.asked.pop().set_outcome(LOAN, "")
    network.later[CALL_S]()
    network.is_connected = False  # in the order of Network.closed
    network.asked.pop().set_outcome(None, f"{ENDED}: it has been silent for 20 s")
    assert memory_nodes.on_disconnect("lender")
    assert memory_nodes.nodes() == []
    assert memory_nodes.has_pending_nodes


def test_one_whose_connection_ends_while_it_is_called_first_may_be_there_still_until_it_was_called_again() -> None:
    """As by a coordinator that was started again: it is waited for once, not each time that it does not answer."""
    network = Network()
    memory_nodes = network.begin()
    network.asked.pop().set_outcome(None, ENDED)
    assert memory_nodes.has_pending_nodes
    gone = network.later.pop(ANSWER_TIMEOUT_S)
    network.later[CALL_S]()
    network.asked.pop().set_outcome(None, ENDED)
    assert memory_nodes.has_pending_nodes
    gone()
    assert not memory_nodes.has_pending_nodes, "for ever nobody waits"
    network.later[CALL_S]()
    network.asked.pop().set_outcome(None, ENDED)
    assert not memory_nodes.has_pending_nodes
    assert ANSWER_TIMEOUT_S not in network.later
