"""Every kind of message has one route and is in the protocol's tables; a sender without permission is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.agent.node.agent import Agent
from ckpt.agent.node.dispatch import PROCESSES, Dispatch, Permissions, Route, Sender
from ckpt.agent.node.inventory_lease import InventoryLease
from ckpt.agent.node.memory_node import MemoryNode, MemoryNodeOptions
from ckpt.agent.node.node_jobs import NodeJobs
from ckpt.agent.runtime.event_loop import EventLoop, Peer
from ckpt.agent.snapshots.remote_share import RemotePeer
from ckpt.errors import AgentError
from ckpt.ipc.messages import Message
from ckpt.settings import read_settings
from ckpt.types import Epoch

PROTOCOL = Path(__file__).resolve().parents[3] / "docs" / "protocol.md"
EPOCH = Epoch(7, "0123456789abcdef")
IDENTITY = f"{EPOCH}-000000000005.0000"
TRANSPORT = {"progress", "keep-connection"}  # the connections handle them


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    server = EventLoop(tmp_path / "socket")
    made = Agent(str(tmp_path / "run"), read_settings(), server)
    yield made
    made.close()
    server.close()


@pytest.fixture
def memory_node(tmp_path: Path) -> Iterator[MemoryNode]:
    server = EventLoop(tmp_path / "socket")
    options = MemoryNodeOptions(bytes(32), "127.0.0.1:0", 1 << 20)
    made = MemoryNode(str(tmp_path / "run"), read_settings(), server, options)
    yield made
    made.close()
    server.close()


def told_kinds(column: str) -> dict[str, str]:
    """By kind in the tables of the protocol, who sends it and whether memory-only nodes receive it."""
    rows = re.findall(r"^\| `([a-z-]+)`( M)? \| ([^|]+) \|", PROTOCOL.read_text(), re.MULTILINE)
    return {kind: who + mark for kind, mark, who in rows if kind not in TRANSPORT and who != "agent" and column in mark}


def test_the_table_has_exactly_the_kinds_of_the_protocol(agent: Agent, memory_node: MemoryNode) -> None:
    only_lent = {"borrow-memory"}
    assert agent.dispatch.routes.keys() | only_lent == told_kinds("").keys()
    theirs = {kind for kind, route in memory_node.dispatch.routes.items() if route.sender not in PROCESSES}
    assert theirs == told_kinds("M").keys()


def test_two_routes_for_one_kind_are_a_mistake() -> None:
    route = Route("save", Sender.RANK, lambda connection, message: None)
    with pytest.raises(ValueError, match="two routes for the message 'save'"):
        Dispatch(cast(Permissions, None), [route, route])


def process(role: str) -> Peer:
    made = Peer(cast(EventLoop, None), cast(Any, None), 1)
    made.role = role
    return made


def elsewhere() -> RemotePeer:
    return RemotePeer(cast(Any, None), "b", EPOCH, 1, 1, 1)


def stranger() -> Any:
    return SimpleNamespace(peer="stranger")


def may_send(dispatch: Dispatch, connection: Any) -> set[str]:
    """The kinds that get to their handlers from there."""
    found = set()
    for kind, route in dispatch.routes.items():
        reached: list[Message] = []
        spied = Dispatch(
            dispatch._permissions, [Route(kind, route.sender, lambda _, message, r=reached: r.append(message))]
        )
        fields = {"t": kind, "id": 1, "epoch": str(EPOCH), "identity": IDENTITY, "slot": 0, "word": 1}
        try:
            spied.handle(connection, Message(fields, [], []))
        except (AgentError, ValueError):
            assert not reached
        if reached:
            found.add(kind)
    return found


def test_a_process_says_hello_first_and_sends_no_message_of_an_agent_or_of_a_rank_that_it_is_not(agent: Agent) -> None:
    assert may_send(agent.dispatch, process("")) == {"hello"}
    of_ranks = {"listen", "begin", "restored", "join", "is-stored"}
    assert may_send(agent.dispatch, process("trainer")) == {"hello", "status", "preempt", "prune", *of_ranks}
    assert may_send(agent.dispatch, elsewhere()) == {"join"}


def test_an_agent_without_a_part_in_anything_here_sends_nothing_but_harmless_questions(agent: Agent) -> None:
    questions, of_its_own = {"survey", "describe-snapshots"}, {"withdraw", "read-frames", "frames-read"}
    assert may_send(agent.dispatch, stranger()) == questions | of_its_own


def test_a_memory_only_node_serves_no_trainer_and_evicts_nothing_for_a_stranger(memory_node: MemoryNode) -> None:
    assert may_send(memory_node.dispatch, stranger()) == {"survey", "borrow-memory", "describe-snapshots", "withdraw"}
    assert "join" not in memory_node.dispatch.routes


@pytest.mark.parametrize("connection", [process("trainer"), stranger()])
def test_a_kind_that_is_not_in_the_table_is_refused(connection: Any, agent: Agent) -> None:
    with pytest.raises(AgentError, match="does not know the message 'nonsense'"):
        agent.dispatch.handle(connection, Message({"t": "nonsense"}, [], []))


def test_until_the_outcome_of_a_survey_a_coordinator_sends_only_what_evicts_nothing(agent: Agent) -> None:
    lease, coordinator = InventoryLease({}.__setitem__), SimpleNamespace(peer="x")
    permissions = Permissions(NodeJobs(), lease, lambda name, epoch: name == "x", lambda: False)
    lease.take_lease("y", EPOCH)

    def check(kind: str, **more: Any) -> None:
        fields = {"t": kind, "epoch": str(EPOCH), "slot": 0, **more}
        permissions.check(agent.dispatch.routes[kind].sender, coordinator, fields)

    check("replicate", rereplication=True)
    check("control-word", word=0)
    check("control-word", slot=None, word=5)
    check("plan-memory")
    for kind, more in (("replicate", {}), ("control-word", {"word": 5}), ("make-arenas", {})):
        with pytest.raises(AgentError, match="asked what lies here"):
            check(kind, **more)


@pytest.mark.parametrize(
    ("what", "begins"), [("older-epochs", True), ("older", True), ("epoch", False), ("job", False)]
)
def test_a_start_has_begun_its_epoch_once_it_tells_of_a_checkpoint_and_not_by_the_end_of_its_job(
    what: str, begins: bool
) -> None:
    """The start may have come to nothing after its ranks had joined. Then the epochs before it decide as before."""
    lease = InventoryLease({}.__setitem__)
    permissions = Permissions(NodeJobs(), lease, lambda name, epoch: name == "x", lambda: False)
    lease.take_lease("x", Epoch(6, "0" * 16))
    fields = {"t": "evict", "what": what, "epoch": str(EPOCH), "identity": IDENTITY}
    permissions.check(Sender.EVICTING_COORDINATOR, SimpleNamespace(peer="x"), fields)
    assert lease.has_lease("x") is not begins
    assert (lease.epoch_floor == EPOCH) is begins
