"""What fits before the machine goes away: deadlines from two minutes to two seconds over slow and quick links."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import pytest

from ckpt.agent.preemption.notice_relay import StandingNotice
from ckpt.agent.state import actions as do
from ckpt.agent.state.retention_rule import survives_nodes
from ckpt.agent.state.step_timing import SaveTiming
from ckpt.ipc.control_page import WordKind
from ckpt.placement.placement import Kept
from ckpt.types import Version
from tests.agent.preemption.test_preemption import Warned

RING = (Kept("", 1, ("b",)), Kept("b", 1, ("",)))
BYTES = 1e9


def test_copies_outlast_the_nodes_that_go_where_somebody_who_stays_has_each() -> None:
    assert survives_nodes(RING, {"b"})
    assert survives_nodes(RING, {""})
    assert survives_nodes(RING, ())
    assert not survives_nodes(RING, {"", "b"})
    assert not survives_nodes((), {"b"})
    lent = tuple(Kept(node, 1, ("m",)) for node in ("", "b"))
    assert survives_nodes(lent, {"", "b"}), "a memory-only node has all of it"
    striped = tuple(Kept(node, 1) for node in ("", "b", "c"))
    assert survives_nodes(striped, {"b"})
    assert not survives_nodes(striped, {"b", "c"})
    assert not survives_nodes((*RING[:1], Kept("b", 0)), {"b"}), "it has nobody who keeps a copy"


def test_what_was_measured_is_scaled_up_only_and_a_slow_one_is_remembered() -> None:
    first = SaveTiming.from_save(10.0, 100, None)
    assert first.estimate_s(300) == 30.0
    assert first.estimate_s(50) == 10.0
    assert SaveTiming.from_save(2.0, 100, first).seconds == 6.0
    assert SaveTiming.from_save(2.0, 300, first).seconds == 16.0
    assert SaveTiming.from_save(20.0, 100, first).seconds == 20.0
    assert SaveTiming(3.0, 0).estimate_s(1 << 40) == 3.0, "of how much it was is not known"


class Linked(Warned):
    """Two nodes, a rank on each, of which "b" is told to go. What is written and copied takes as long as the links say
    (bytes a second; no `peer_bandwidth`: no copies are kept)."""

    def __init__(self, store_bandwidth: float, peer_bandwidth: float | None) -> None:
        self.commit_s = BYTES / store_bandwidth
        self.copy_s = BYTES / peer_bandwidth if peer_bandwidth is not None else None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        super().__init__()
        if self.copy_s is not None:
            self.group.replicas.is_replication_on, self.group.replicas.placement = True, RING

    def at(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, len(self.said), what))

    def decide(self) -> list[do.Action]:
        new = super().decide()
        for action in new:
            if isinstance(action, do.Replicate):
                assert self.copy_s is not None
                self.at(
                    self.copy_s, lambda slot=action.slot: self.group.replicas.record_replication(slot, "", self.now_s)
                )  # type: ignore[misc]
            elif isinstance(action, do.Commit):
                self.at(self.commit_s, lambda slot=action.slot: self.group.commits.record_commit(slot, "", self.now_s))  # type: ignore[misc]
            elif isinstance(action, do.Assemble):
                self.at(0.0, lambda a=action: self.group.save_attempts.record_assembly(a.slot, a.attempt_number, ""))  # type: ignore[misc]
        return new

    def run(self, until: Callable[[], Any], limit_s: float = 1000.0) -> None:
        """Ten steps a second."""
        end_s = self.now_s + limit_s
        while not until():
            assert self.now_s < end_s
            self.now_s += 0.05
            while self._events and self._events[0][0] <= self.now_s:
                heapq.heappop(self._events)[2]()
                self.decide()
            if not self.held():
                step = round(10 * self.now_s) + 1
                self.steps = [step] * self.world
                word = self.word()
                if word is not None and step > word.step and word.attempt_number not in self.staged:
                    self.staged.add(word.attempt_number)
                    self.stage(word.attempt_number, Version(word.step), word.slot)
                    if word.kind is WordKind.HOLD:
                        self.hold(word)
            self.decide()

    def held(self) -> bool:
        return bool(self.answers("rank-holds"))

    def measured(self) -> None:
        """One checkpoint has been everywhere."""
        self.group.clock.set_intervals(1.0, 1.0, self.now_s)
        self.run(lambda: self.group.facts.committed_version is not None)
        self.group.clock.set_intervals(10_000.0, 10_000.0, self.now_s)
        self.run(lambda: not self._events)


# Deadline -> where the last step is when the machine goes away, for a gigabyte.
TABLE: dict[tuple[float, float | None], dict[float, str]] = {
    # Ten seconds to the store, one to the other node.
    (100e6, 1000e6): {120.0: "store", 60.0: "store", 30.0: "store", 10.0: "peer", 5.0: "peer", 2.0: "peer"},
    # Fifty, and five.
    (20e6, 200e6): {120.0: "store", 60.0: "store", 30.0: "peer", 10.0: "peer", 5.0: "local", 2.0: "local"},
    # Nobody keeps copies.
    (100e6, None): {120.0: "store", 60.0: "store", 30.0: "store", 10.0: "local", 5.0: "local", 2.0: "local"},
    # A store that is quicker than the other node.
    (1000e6, 100e6): {120.0: "store", 10.0: "store", 5.0: "store", 2.0: "store"},
}


# What stands besides, and is about other times: the end of an allocation, as each node hears it, and a maintenance.
FAR = {
    "nothing": [],
    "slurm": [("slurm", "7", ""), ("slurm", "7 on node b", "b")],
    "maintenance": [("aws-maintenance", "1", "")],
}


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize(
    ("links", "lead_s", "level"), [(links, *found) for links, row in TABLE.items() for found in row.items()]
)
def test_from_two_minutes_to_two_seconds_where_the_last_step_is_is_what_is_reported(
    links: tuple[float, float | None], lead_s: float, level: str, far: str
) -> None:
    driver = Linked(*links)
    driver.measured()
    before = driver.group.facts.committed_version
    for source, key, node in FAR[far]:
        end_s = driver.now_s + 2 * 86400.0
        driver.group.preemption.add_notice(StandingNotice(source, key, end_s, driver.now_s, nodes=frozenset({node})))
    deadline_s = driver.now_s + lead_s
    driver.group.preemption.add_notice(
        StandingNotice("cloud", "1 on node b", deadline_s, driver.now_s, nodes=frozenset({"b"}))
    )
    driver.run(driver.held)
    driver.run(lambda: driver.now_s >= deadline_s - 0.1)
    told = driver.outcomes()[-1]
    assert (told["how"], told["level"]) == ("left", level)
    assert told["left_s"] >= 0
    assert before is not None
    assert told["step"] > before.step, "a last one is taken, however late it is"
    assert (told["committed_step"] == told["step"]) is (level == "store")
    if level == "local":
        assert driver.commit_s >= lead_s, "only what cannot be had at all is not"
        assert driver.copy_s is None or driver.copy_s >= lead_s


def test_copies_of_the_last_step_are_made_though_all_ranks_are_gone() -> None:
    driver = Linked(20e6, 200e6)
    driver.measured()
    driver.group.preemption.add_notice(
        StandingNotice("cloud", "1 on node b", driver.now_s + 30.0, driver.now_s, nodes=frozenset({"b"}))
    )
    driver.run(driver.held)
    driver.leave()
    driver.run(lambda: driver.replicas.replicating_slot is not None)
    assert driver.group.facts.all_gone
    driver.run(lambda: driver.replicas.replicating_slot is None)
    newest = driver.slots.newest
    assert newest is not None
    assert driver.replicas.replicated_version == newest.version


def test_where_every_node_goes_nobody_is_left_to_copy_to() -> None:
    driver = Linked(100e6, 1000e6)
    driver.measured()
    nodes = frozenset({"", "b"})
    driver.group.preemption.add_notice(StandingNotice("cloud", "1", driver.now_s + 10.0, driver.now_s, nodes=nodes))
    driver.run(driver.outcomes)
    assert driver.outcomes()[0]["level"] == "local", "whose copies go as well"


def test_a_node_that_goes_soon_after_is_no_survivor() -> None:
    driver = Linked(100e6, 1000e6)
    driver.measured()
    for node, lead_s in (("b", 10.0), ("", 15.0)):
        driver.group.preemption.add_notice(
            StandingNotice("cloud", node, driver.now_s + lead_s, driver.now_s, nodes=frozenset({node}))
        )
    driver.decide()
    assert driver.group.preemption.doomed_nodes == {"", "b"}
    driver.run(driver.outcomes)
    assert driver.outcomes()[0]["level"] == "local"


def test_where_the_newest_gets_nowhere_it_is_said_which_one_stays_in_other_nodes_memory() -> None:
    driver = Linked(20e6, 200e6)
    driver.measured()
    driver.group.clock.set_intervals(8.0, 8.0, driver.now_s)
    driver.run(lambda: driver.replicas.replicating_slot is not None)
    safe = driver.replicas.replicated_version
    driver.group.preemption.add_notice(
        StandingNotice("cloud", "1 on node b", driver.now_s + 3.0, driver.now_s, nodes=frozenset({"b"}))
    )
    driver.run(driver.outcomes)
    (told,) = driver.outcomes()
    assert safe is not None
    assert (told["level"], told["peer_step"]) == ("local", safe.step)
    assert told["step"] > safe.step
