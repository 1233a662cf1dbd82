"""Copies that are made again after a loss, as their coordinator sees to it: who is asked for them, and until when."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest

from ckpt.agent.net.peer_network import PeerNetwork
from ckpt.agent.replication.replica_service import ReplicaService
from ckpt.agent.replication.replica_store import ReplicaStore
from ckpt.agent.replication.rereplicate import Rereplication, Target, retry_delay_s
from ckpt.agent.runtime.coroutines import Promise, Task
from ckpt.agent.runtime.workers import Workers
from ckpt.agent.snapshots.described import describe_snapshots, encode_described
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.ipc.node_list import NodeAt
from ckpt.placement.rebuild import StagedRun, Striped
from ckpt.policy.save_options import PEER_BANDWIDTH_MIN
from tests.agent.fake import full
from tests.agent.node.test_agent import together
from tests.agent.nodes.cluster import Cluster
from tests.agent.nodes.staged import Asked, Net, identity, staged

PLENTY = dict.fromkeys("abcd", 1 << 40)
WHICH = identity(5)


class Made:
    """Rank 0's snapshot is at some of the nodes a, b, c and d, and this is another one's job to see to."""

    def __init__(self, *holders: str) -> None:
        self.net, self.events = Net("me"), list[tuple[str, dict[str, Any]]]()
        self.holders, self.silent = set(holders), set[str]()
        self.parity = ""  # the node that has parity of it
        self.nodes = list("abcd")
        self.said: list[bool] = []  # whether it is safe
        self.copies, self.lends = 1, PLENTY
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.rebuilding: list[Promise[None]] = []
        self.arenas = staged(WHICH, 1)
        self.sent = encode_described(describe_snapshots(WHICH, self.arenas))
        network = cast(PeerNetwork, self.net)
        copies = cast(ReplicaStore, SimpleNamespace(arenas=None, withdraw=lambda *given: None))
        service = ReplicaService(
            cast(Workers, None), lambda what: what(), copies, lambda which: {}, lambda: network, lambda: 0
        )
        self.job = Rereplication(
            *(network, service, WHICH),
            target=self.target,
            own=Inventory,
            rebuild=self.rebuild,
            later=lambda delay_s, what: self.timers.append((delay_s, what)),
            emit=lambda name, text, loud, data: self.events.append((name, data)),
            report=self.said.append,
        )
        self.task = Task(self.job.run())

    def target(self) -> Target:
        nodes = [NodeAt(name, (), (number,)) for number, name in enumerate(self.nodes)]
        return Target(nodes, self.lends, self.copies)

    async def rebuild(self, held: Inventory) -> None:
        self.rebuilding.append(Promise())
        await self.rebuilding[-1]

    @property
    def is_due(self) -> bool:
        """Whether the next attempt comes by itself."""
        return bool(self.timers)

    @property
    def is_pausing(self) -> bool:
        return any(delay_s > 0 for delay_s, _ in self.timers)

    def begin(self, copies: int = 1) -> None:
        """The next attempt, however long that takes to come."""
        assert self.is_due
        self.copies = copies
        while self.timers:
            self.timers.pop(0)[1]()

    def survey(self) -> None:
        """Whoever was asked what lies there answers."""

        def answer(asked: Asked) -> None:
            if asked.name in self.silent:
                asked.refuse()
                return
            held = Inventory()
            if asked.name in self.holders:
                held.add_arenas(self.arenas.values())
            if asked.name == self.parity:
                held._add_parity(WHICH, 1, Striped(8, ((StagedRun(0, 0, 8),),)), [0], {0: 8})
            asked.answer({}, [msgpack.packb(held.fields())])

        self.each("survey", answer)

    def tend(self, copies: int = 1) -> list[str]:
        """Which sources are asked."""
        before = len(self.net.asked)
        self.begin(copies)
        self.survey()
        return [each.name for each in self.net.asked[before:] if each.fields["t"] != "survey"]

    def left(self, kind: str) -> list[Asked]:
        return [each for each in self.net.asked if each.fields["t"] == kind and not each.reply.is_settled]

    def each(self, kind: str, answer: Callable[[Asked], None]) -> list[str]:
        """Whoever was asked that and has not answered does; their names."""
        found = self.left(kind)
        for asked in found:
            answer(asked)
        return sorted(asked.name for asked in found)

    def give(self) -> None:
        self.each("publish", lambda asked: asked.answer({}, [self.sent]))

    def keep(self) -> list[str]:
        """All copies come."""
        self.holders |= {asked.name for asked in self.left("replicate")}
        return self.each("replicate", lambda asked: asked.answer({}))

    def names(self) -> list[str]:
        return [name for name, _ in self.events]


Make = Callable[..., Made]


@pytest.fixture
def made() -> Iterator[Make]:
    every: list[Made] = []

    def make(*holders: str) -> Made:
        every.append(Made(*holders))
        return every[-1]

    yield make
    for each in every:
        for arena in each.arenas.values():
            arena.close()


@pytest.mark.parametrize("at", ["publish", "replicate"])
def test_who_does_not_give_what_he_has_is_followed_by_who_has_it_too_and_then_gets_it_himself(
    at: str, made: Make
) -> None:
    job = made("a", "b")
    assert job.tend(2) == ["a"]
    if at == "replicate":
        job.give()
    job.each(at, Asked.refuse)
    assert job.names() == ["replication.failed"]
    assert job.tend(2) == ["b"]
    job.give()
    assert len(job.keep()) == 1
    assert job.names()[-1] == "replica.restored"
    (again,) = job.tend(2)
    assert again != "a", "what a has is damaged there"
    job.give()
    assert job.keep() in (["a"], ["c"], ["d"])
    assert job.tend(2) == []
    assert not job.is_due


def test_the_only_one_who_has_it_is_asked_again(made: Make) -> None:
    job = made("c")
    for _ in range(3):
        assert job.tend() == ["c"]
        job.each("publish", Asked.refuse)
    assert job.tend() == ["c"]
    job.give()
    assert len(job.keep()) == 1
    assert job.tend() == []


def test_that_it_is_safe_again_is_said_once_each_has_its_copy_and_no_more_once_one_is_lost(
    made: Make,
) -> None:
    job = made("a")
    assert job.tend() == ["a"]
    job.give()
    (holder,) = job.keep()
    assert job.said == [False]
    assert job.tend() == []
    assert job.said == [False, True]
    job.holders.remove(holder)
    job.job.survey_again()
    assert job.tend()
    assert job.said == [False, True, False]


def test_what_there_is_too_little_memory_for_is_not_said_to_be_safe(made: Make) -> None:
    job = made("a")
    job.lends = {}
    job.begin()
    job.survey()
    assert (job.said, job.names()) == ([False], ["replication.short"])


def test_what_fails_is_tried_again_ever_later_and_at_least_once_a_minute() -> None:
    assert [retry_delay_s(failures) for failures in (1, 2, 5, 6, 10_000)] == [2.0, 4.0, 32.0, 60.0, 60.0]


@pytest.mark.parametrize("when", ["meanwhile", "afterwards"])
def test_where_an_agent_is_lost_that_had_a_copy_another_one_is_made(when: str, made: Make) -> None:
    job = made("a")

    def lose(name: str) -> None:
        job.holders.discard(name)
        job.job.survey_again()

    assert job.tend() == ["a"]
    job.give()
    if when == "meanwhile":
        lose("a")
    (holder,) = job.keep()
    if when == "afterwards":
        assert job.tend() == []
        assert not job.is_due
        lose("d" if holder != "d" else "c")
        assert job.tend() == [], "it had nothing"
        lose("a")
    assert job.tend() == [holder]
    job.give()
    job.keep()
    assert job.names() == ["replica.restored"] * 2
    job.task.cancel()
    job.job.survey_again()
    job.begin()
    assert not job.left("survey")


def test_a_node_that_dies_while_it_is_asked_is_done_without_where_the_others_have_all_and_else_all_are_asked_again(
    made: Make,
) -> None:
    job = made()
    job.silent = {"b"}
    for _ in range(3):
        assert job.tend() == []
        assert job.is_pausing
    job.holders = {"a"}
    assert job.tend() == ["a"]


def test_what_only_parity_has_is_rebuilt_first_and_again_where_that_fails(made: Make) -> None:
    job = made()
    job.parity = "b"
    for error in ("there is no memory", ""):
        assert job.tend() == []
        assert not job.is_due
        job.rebuilding.pop().set_outcome(None, error)
        assert (job.is_due, job.said) == (True, [])
    job.holders = {"c"}
    job.tend(2)
    assert not job.rebuilding
    assert [asked.name for asked in job.left("publish")] == ["c"]


def test_what_an_agent_has_said_that_is_gone_meanwhile_counts_no_more(made: Make) -> None:
    job = made("a", "b")
    job.begin(2)
    job.job.survey_again()
    job.survey()
    assert (job.left("publish"), job.is_due) == ([], True)
    job.holders = {"b"}
    assert job.tend(2) == ["b"]


def test_copies_that_do_not_stay_are_made_again_only_after_a_pause(made: Make) -> None:
    job = made("a")
    for _ in range(2):
        assert job.tend() == ["a"]
        job.give()
        job.keep()
        job.holders = {"a"}
        assert not job.is_pausing
        assert job.tend() == []
        assert job.is_pausing


@pytest.mark.parametrize("when", ["while they are asked", "afterwards"])
def test_where_nobody_has_the_rest_a_memory_only_node_that_comes_is_asked_too(when: str, made: Make) -> None:
    job = made("m")
    job.begin()
    if when == "while they are asked":
        job.nodes.append("m")
        job.job.survey_again()
    job.survey()
    if when == "afterwards":
        assert not job.is_due, "nothing is to come of that by itself"
        job.nodes.append("m")
        job.job.survey_again()
    assert job.tend() == ["m"]


def test_once_the_job_has_something_as_safe_nothing_is_found_any_more(made: Make) -> None:
    job = made("a")
    job.begin()
    job.task.cancel()
    job.survey()
    assert (job.left("publish"), job.is_due) == ([], False)


def limit(cluster: Cluster, peer_bandwidth: int | None) -> None:
    """Copies take as long as they may, or no longer than they have to, once the coordinator's agent is another."""
    limits = {"memory": None, "bandwidth": None, "peer_bandwidth": peer_bandwidth}
    cluster.options = {**cluster.options, "limits": limits}
    for rank in cluster.job:
        rank.options = cluster.options


def lose_the_coordinators_agent(cluster: Cluster) -> None:
    """While copies are being made again. All ranks come back."""
    cluster.kill_agent(0)
    assert all(rank.lost.wait(60) for rank in cluster.job)
    assert not any(event["name"] == "replica.restored" for event in cluster.job[0].events)
    cluster.come_back()
    together(cluster.job, lambda rank: rank.wait_warm())


@pytest.mark.parametrize("times", [1, 2])
def test_a_coordinators_agent_that_was_started_again_goes_on_with_what_is_being_protected_again(
    times: int, cluster: Cluster
) -> None:
    """Three nodes, two copies of each; one is lost, and a new one comes, which has nothing. While it gets copies the
    coordinator's agent dies, with all it has. No snapshot is taken after the first: memory of it is all there is."""
    cluster.forbid_commits()
    cluster.options = {**cluster.options, "peers": {"replicas": 2}}
    cluster.start(0, 1, 2)
    step = cluster.checkpoint("peer")
    cluster.lose(2)
    limit(cluster, PEER_BANDWIDTH_MIN)
    decision = cluster.start(0, 1, 3)
    assert decision.fields["candidate"]["step"] == step
    for left in reversed(range(times)):
        limit(cluster, PEER_BANDWIDTH_MIN if left else None)
        lose_the_coordinators_agent(cluster)
    told = cluster.await_event("replica.restored")
    assert told["identity"] == decision.fields["candidate"]["identity"]
    assert told["bytes"] > full("sharded", 0).nbytes
    assert cluster.job[0].levels == {}
    cluster.lose(1)
    assert cluster.restart(0, 3)["step"] == step
    assert set(cluster.fetched()) == {"local"}


def test_what_only_a_memory_only_node_has_is_copied_from_it_though_it_answers_a_new_agent_later_than_all_others(
    cluster: Cluster,
) -> None:
    """All copies are there; the node with the original of one rank is lost, and the other's agent dies."""
    cluster.forbid_commits()
    cluster.peers = cluster.lend("1GiB", "--domain", "y")["listen"]
    cluster.connect(0, 1)
    for node in cluster.job[0].nodes:
        node["domains"] = ["x"]  # so that all copies lie on the memory-only node
    cluster.enter()
    step = cluster.checkpoint("peer")
    cluster.lose(1)
    limit(cluster, PEER_BANDWIDTH_MIN)
    assert cluster.restart(0, 2)["step"] == step
    limit(cluster, None)
    cluster.lending[0].send_signal(signal.SIGSTOP)
    lose_the_coordinators_agent(cluster)
    cluster.await_event("memory_node.unreachable")
    cluster.lending[0].send_signal(signal.SIGCONT)
    told = cluster.await_event("replica.restored")
    assert {source for source, _, _ in told["copies"]} == {cluster.status(0)["lenders"][0]["name"]}
    cluster.end_lending(0, signal.SIGKILL)
    cluster.hang_up()
    cluster.peers = []
    assert cluster.restart(0, 2)["step"] == step
    assert set(cluster.fetched()) <= {"local", "peer"}  # either node may have been chosen for a copy


def test_what_only_parity_has_after_the_coordinators_agent_died_is_made_again_and_copied(cluster: Cluster) -> None:
    """No node was lost before, so that nothing was copied; then one node's snapshot and parity go with its agent."""
    cluster.forbid_commits()
    cluster.options = {**cluster.options, "peers": {"data": 2, "parity": 2}}
    cluster.start(0, 1, 2, 3)
    step = cluster.checkpoint("peer")
    cluster.hang_up()
    assert cluster.restart(0, 1, 2, 3)["step"] == step
    lose_the_coordinators_agent(cluster)
    cluster.await_event("replica.restored")
    cluster.lose(1, 2)
    assert cluster.restart(0, 3)["step"] == step
    assert "store" not in cluster.fetched()
