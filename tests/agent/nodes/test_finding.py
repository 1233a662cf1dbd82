"""What a coordinator that was started again finds out of what is safe, so that new copies have room."""

from __future__ import annotations

from typing import Any, cast

import pytest

from ckpt.agent.arena import PAGE
from ckpt.agent.finding import Keeps, find_safe, newest_safe
from ckpt.agent.network import NodeAt
from ckpt.agent.replicating import Replication
from ckpt.agent.wire import Message
from ckpt.errors import AgentError, CkptError
from ckpt.types import Epoch, Identity, Tick
from tests.agent.nodes.staged import spoiled
from tests.agent.nodes.test_replication_sim import ADDRESS, Cell, Holder, Sim, cells

__all__ = ["cells"]

EPOCH, BEFORE = Epoch(2, "0" * 16), Epoch(1, "0" * 16)


def at(step: int) -> Identity:
    return Identity(EPOCH, Tick(step))


def keeps(safe: int | None, **ranks: list[int]) -> Keeps:
    kept = {at(int(step[1:])): frozenset(theirs) for step, theirs in ranks.items()}
    return Keeps(at(safe) if safe is not None else None, kept)


@pytest.mark.parametrize(
    ("nodes", "safe"),
    [
        ([keeps(None), keeps(None)], None),
        ([keeps(3), keeps(5)], 5),
        ([keeps(3, _3=[0, 1, 2], _5=[2]), keeps(3, _3=[0, 1, 2], _5=[0, 1, 2])], 3),
        ([keeps(3, _3=[0, 1, 2], _5=[0, 1, 2]), keeps(3, _3=[0, 1, 2], _5=[0, 1, 2])], 5),
        ([keeps(None, _5=[0, 1, 2]), keeps(None, _5=[0, 1, 2])], 5),
        ([keeps(None, _5=[0, 1, 2]), keeps(None)], None),
        ([keeps(None, _5=[0, 1]), keeps(None, _5=[2]), keeps(None, _5=[0, 1, 2])], 5),
    ],
)
def test_safe_is_what_anybody_was_told_of_or_what_lies_on_as_many_nodes_as_it_should(
    nodes: list[Keeps], safe: int | None
) -> None:
    assert newest_safe(nodes, 3, 1) == (at(safe) if safe is not None else None)


def test_what_a_node_says_that_cannot_be_is_an_error_and_nothing_else() -> None:
    right = keeps(3, _3=[1, 2]).fields()
    assert Keeps.parse(EPOCH, right) == keeps(3, _3=[1, 2])
    with pytest.raises(AgentError, match="another epoch"):
        Keeps.parse(BEFORE, right)
    for wrong in spoiled(right):
        try:
            Keeps.parse(EPOCH, wrong)
        except (CkptError, ValueError, TypeError, LookupError, AttributeError, OverflowError):
            continue


class Pair:
    """A coordinator, and a memory-only node that lends exactly twice the state."""

    def __init__(self) -> None:
        self.sim = Sim(1)
        self.sim.break_rate = 0.0
        self.lead, self.lender = (self.sim.nodes[self.sim.add()] for _ in range(2))
        self.lender.copies.bound(lambda: 2 * (PAGE + 16))
        self.nodes = [NodeAt(self.lead.me, ADDRESS, (0,)), NodeAt(self.lender.me, ADDRESS, ())]
        self.wanted = {self.lead.me: ((0,), (self.lender.me,))}

    def copy(self, step: int, safe: Identity | None) -> str:
        cell = Cell()
        cell.fill(at(step), 0, 1)
        self.lead.own[at(step), 0] = cell
        said: list[str] = []
        services = cast(Any, self.lead), self.lead.copies, self.nodes, self.wanted
        Replication(*services, at(step), safe, cast(Any, {0: cell}), said.append).begin()
        while not said:
            self.sim.turn()
        return said[0]

    def deaf(self, holder: Holder) -> None:
        """What is told to it is lost."""
        holder.told = lambda by, fields: None  # type: ignore[method-assign]

    def find(self) -> Identity | None:
        said: list[Identity | None] = []
        names = [node.name for node in self.nodes]
        find_safe(cast(Any, self.lead), names, self.lead.keeps(EPOCH), EPOCH, 1, 1, said.append)
        while not said:
            self.sim.turn()
        return said[0]


def test_a_node_that_lends_twice_the_state_takes_new_copies_of_a_coordinator_that_was_started_again() -> None:
    """It died after a second checkpoint had come there, and before it could say that this is safe."""
    pair = Pair()
    assert pair.copy(1, None) == ""
    while pair.sim.turn():
        pass
    pair.deaf(pair.lender)
    assert pair.copy(2, at(1)) == ""
    assert set(pair.lender.copies.identities) == {at(1), at(2)}
    assert "not left" in pair.copy(3, None), "what is safe is not known, and nothing goes"
    assert pair.find() == at(2)
    assert pair.copy(3, pair.find()) == ""
    assert set(pair.lender.copies.identities) == {at(2), at(3)}


def test_while_a_node_does_not_answer_nothing_is_known() -> None:
    pair = Pair()
    assert pair.copy(1, None) == ""
    pair.sim.lose(pair.lender.me)
    assert pair.find() is None


def test_an_answer_that_cannot_be_read_is_none() -> None:
    said: list[Identity | None] = []

    class Net:
        me = "a"

        def ask(self, name: str, fields: Any, blobs: Any, then: Any) -> None:
            then(Message({"kept": 5, "safe": None}, [], []), "")

    find_safe(cast(Any, Net()), ["a", "b"], keeps(None), EPOCH, 1, 1, said.append)
    assert said == [None]
