"""Which memory-only nodes a job uses, as its coordinator knows them; with their agents see nodes/test_lending.py."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.agent.commit.commit_terms import CommitTerms
from ckpt.agent.job.memory_node_client import ANSWER_TIMEOUT_S, CALL_S, MemoryNodeClients
from ckpt.ipc.addresses import Address


def test_nobody_waits_for_one_that_is_not_called_any_more() -> None:
    """It has not answered by then: what is safe is found out without it."""
    network = SimpleNamespace(connect_to_address=lambda address, then: None)
    memory_nodes = MemoryNodeClients("url", lambda: cast(Any, network), lambda *_: None, lambda _: None, lambda: None)
    terms = cast(CommitTerms, SimpleNamespace(encode=lambda: b""))
    memory_nodes.begin_borrowing(terms, [Address.parse("127.0.0.1:9")])
    assert memory_nodes.has_pending_nodes
    memory_nodes.stop_borrowing()
    assert not memory_nodes.has_pending_nodes


@pytest.mark.parametrize("then", ["it is back", "nobody is there", "it does not answer"])
def test_one_whose_connection_has_ended_may_be_there_still_until_it_was_called_again(then: str) -> None:
    """What it keeps may be all that outlives a node, and nothing goes before it was asked."""
    address = Address.parse("127.0.0.1:9")
    later: dict[float, Callable[[], None]] = {}
    loan = {"lent_bytes": 1 << 30, "name": "lender", "domains": [], "link_bytes_s": 0}
    answers, reach = [SimpleNamespace(fields=loan)], ["lender", ""]
    network = SimpleNamespace(
        connect_to_address=lambda address, then: then(*reach),
        request=lambda name, fields, blobs, then: then(answers.pop(), "") if answers else None,
        channel=lambda name: None,
    )
    memory_nodes = MemoryNodeClients("url", lambda: cast(Any, network), later.__setitem__, lambda _: None, lambda: None)
    memory_nodes.begin_borrowing(cast(CommitTerms, SimpleNamespace(encode=lambda: b"")), [address])
    assert [each.name for each in memory_nodes.nodes()] == ["lender"]
    assert not memory_nodes.has_pending_nodes
    assert memory_nodes.on_disconnect("lender")
    assert memory_nodes.nodes() == []
    assert memory_nodes.has_pending_nodes
    if then == "it is back":
        answers.append(SimpleNamespace(fields=loan))
    elif then == "nobody is there":
        reach[:] = ["", "nobody listens there"]
    later[CALL_S]()
    assert memory_nodes.has_pending_nodes is (then == "it does not answer")
    later[ANSWER_TIMEOUT_S]()
    assert not memory_nodes.has_pending_nodes, "for ever nobody waits"
    assert bool(memory_nodes.nodes()) is (then == "it is back")


def test_one_whose_connection_ends_while_it_is_asked_is_missed_all_the_same() -> None:
    """As where the link is cut, or its machine has died: it is asked every few seconds, and found to be silent later.
    What it kept is not believed to be there any more, and it may be there still."""
    address = Address.parse("127.0.0.1:9")
    later: dict[float, Callable[[], None]] = {}
    loan = {"lent_bytes": 1 << 30, "name": "lender", "domains": [], "link_bytes_s": 0}
    asked: list[Callable[..., None]] = []
    connected = {"lender": object()}
    network = SimpleNamespace(
        connect_to_address=lambda address, then: then("lender", ""),
        request=lambda name, fields, blobs, then: asked.append(then),
        channel=connected.get,
    )
    memory_nodes = MemoryNodeClients("url", lambda: cast(Any, network), later.__setitem__, lambda _: None, lambda: None)
    memory_nodes.begin_borrowing(cast(CommitTerms, SimpleNamespace(encode=lambda: b"")), [address])
    asked.pop()(SimpleNamespace(fields=loan), "")
    later[CALL_S]()
    connected.clear()  # in the order of Network.closed
    asked.pop()(None, "the connection to agent lender has ended: it has been silent for 20 s")
    assert memory_nodes.on_disconnect("lender")
    assert memory_nodes.nodes() == []
    assert memory_nodes.has_pending_nodes


def test_one_whose_connection_ends_while_it_is_called_first_may_be_there_still_until_it_was_called_again() -> None:
    """As by a coordinator that was started again: it is waited for once, not each time that it does not answer."""
    address = Address.parse("127.0.0.1:9")
    later: dict[float, Callable[[], None]] = {}
    network = SimpleNamespace(
        connect_to_address=lambda address, then: then("lender", ""),
        request=lambda name, fields, blobs, then: then(None, "the connection to agent lender has ended"),
        channel=lambda name: None,
    )
    memory_nodes = MemoryNodeClients("url", lambda: cast(Any, network), later.__setitem__, lambda _: None, lambda: None)
    memory_nodes.begin_borrowing(cast(CommitTerms, SimpleNamespace(encode=lambda: b"")), [address])
    assert memory_nodes.has_pending_nodes
    gone = later.pop(ANSWER_TIMEOUT_S)
    later[CALL_S]()
    assert memory_nodes.has_pending_nodes
    gone()
    assert not memory_nodes.has_pending_nodes, "for ever nobody waits"
    later[CALL_S]()
    assert not memory_nodes.has_pending_nodes
    assert ANSWER_TIMEOUT_S not in later
