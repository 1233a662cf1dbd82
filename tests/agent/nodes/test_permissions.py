"""Who is believed what: a member of the run that lies, and a start that asks what lies here while a job is at work."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from ckpt.agent.node.inventory_lease import EPOCH_GAP_MAX
from ckpt.agent.runtime.coroutines import start
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.errors import CkptError
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NodeAt
from ckpt.store.lineage import NUMBER_MAX
from ckpt.types import Epoch
from tests.agent.nodes.cluster import Cluster, train
from tests.agent.nodes.test_hostile_peers import OTHER, Liar, MakeLiar, liar, node_of

__all__ = ["liar"]

NOWHERE = "00000002-ffffffffffffffff"  # what follows the first start, with the largest nonce


@pytest.fixture
def at_work(cluster: Cluster) -> Cluster:
    """Two nodes that have a checkpoint in each other's memory, and nowhere else."""
    cluster.forbid_commits()
    cluster.start(0, 1)
    cluster.checkpoint("peer")
    return cluster


def ask(who: Liar, node: NodeAt, fields: dict[str, Any]) -> tuple[Message | None, str]:
    if who.network.channel(node.name) is None:
        assert who.connect(node) == ""
    heard: list[tuple[Message | None, str]] = []
    start(who.network.request(node.name, fields), lambda *found: heard.append(found))
    who.loop.until(lambda: heard)
    return heard[0]


def held(who: Liar, node: NodeAt) -> Inventory:
    """What that node says to a start that asks."""
    answer, error = ask(who, node, {"t": "survey"})
    assert answer is not None, error
    return Inventory.parse(msgpack.unpackb(answer.blobs[0]))


def test_a_start_that_no_rank_here_waits_for_is_not_believed_and_the_job_goes_on(
    at_work: Cluster, liar: MakeLiar
) -> None:
    hostile = liar()
    for rank in range(2):
        fields = {"t": "survey", "launch": "another", "url": at_work.url, "take_over": True}
        assert "no rank of this node waits" in ask(hostile, node_of(at_work, rank), fields)[1]
    assert at_work.checkpoint("peer")


def test_only_who_leads_a_start_or_a_job_has_snapshots_given_out(at_work: Cluster, liar: MakeLiar) -> None:
    hostile, node = liar(), node_of(at_work, 1)
    epoch = at_work.job[0].epoch
    which = f"{epoch}-{at_work.job[0].step:012d}.0000"
    for kind in ("publish", "rebuild", "write-frames"):
        error = ask(hostile, node, {"t": kind, "identity": which, "ranks": [1], "rank": 1, "reader": ""})[1]
        assert "coordinates nothing" in error
    hostile.say(node, {"t": "start-outcome", "epoch": OTHER}, [])
    hostile.say(node, {"t": "withdraw", "identity": which, "reader": "start"}, [])
    assert at_work.checkpoint("peer")


def test_from_the_answer_to_a_start_until_its_outcome_what_was_listed_stays_though_the_job_before_it_lives(
    at_work: Cluster, liar: MakeLiar
) -> None:
    """The start has reached one node only, and not the coordinator."""
    starting, node = liar("starting"), node_of(at_work, 1)
    (newest,) = [each for each in held(starting, node).complete_checkpoints() if each.epoch.number == 1][-1:]
    train(at_work.job, at_work.job[0].step + 1)
    with pytest.raises(CkptError, match=r"asked what lies here|given up"):
        at_work.save()
    parts = {"t": "describe-snapshots", "identity": str(newest), "ranks": [0, 1], "world": 2}
    assert ask(starting, node, parts)[1] == ""
    starting.say(node, {"t": "start-outcome", "epoch": None}, [])
    starting.alive(node)
    train(at_work.job, at_work.job[0].step + 1)
    assert at_work.save("peer").step > newest.version.step


def test_from_the_answer_to_a_start_until_its_outcome_no_memory_that_was_listed_is_made_anew(
    at_work: Cluster, liar: MakeLiar
) -> None:
    """The start has reached one node only. The job before it has a larger state from here on."""
    starting, node = liar("starting"), node_of(at_work, 1)
    listed = held(starting, node).holders
    for rank in at_work.job:
        rank.relayout(extra=1 << 20)
    at_work.await_event("memory.short")
    assert listed
    assert held(starting, node).holders == listed


def test_a_coordinator_that_was_asked_decides_nothing_until_the_outcome_and_is_superseded_by_it(
    at_work: Cluster, liar: MakeLiar
) -> None:
    starting, nodes = liar("starting"), [node_of(at_work, rank) for rank in range(2)]
    (newest,) = held(starting, nodes[0]).complete_checkpoints()[-1:]
    train(at_work.job, at_work.job[0].step + 1)
    assert at_work.status(0)["job"]["frozen"]
    assert (
        ask(starting, nodes[0], {"t": "describe-snapshots", "identity": str(newest), "ranks": [0, 1], "world": 2})[1]
        == ""
    )
    starting.say(nodes[0], {"t": "start-outcome", "epoch": OTHER}, [])
    starting.alive(nodes[0])
    assert OTHER in at_work.status(0)["job"]["superseded_by"]


def test_an_epoch_that_no_start_can_have_come_to_is_not_believed_to_have_begun_and_the_job_goes_on(
    at_work: Cluster, liar: MakeLiar
) -> None:
    """Nothing would be left for the starts after it: they take a larger number."""
    hostile, number = liar(), Epoch.parse(at_work.job[0].epoch).number
    for node in (node_of(at_work, rank) for rank in range(2)):
        for wrong in (number + EPOCH_GAP_MAX + 1, NUMBER_MAX):
            held(hostile, node)
            hostile.say(node, {"t": "start-outcome", "epoch": str(Epoch(wrong, "f" * 16))}, [])
            hostile.alive(node)
        hostile.say(node, {"t": "start-outcome", "epoch": None}, [])
        hostile.alive(node)
    assert not at_work.status(0)["job"]["superseded_by"]
    train(at_work.job, at_work.job[0].step + 1)
    assert at_work.save("peer")


@pytest.mark.parametrize("heard", [(0,), (1,), (0, 1)])
def test_a_start_elsewhere_that_no_store_has_heard_of_is_outdone_by_the_next_and_freezes_nothing(
    heard: tuple[int, ...], at_work: Cluster, liar: MakeLiar
) -> None:
    """It began and its nodes were lost before it was claimed; these nodes know of it by its outcome."""
    nodes = [node_of(at_work, rank) for rank in heard]
    at_work.hang_up()
    elsewhere = liar("elsewhere")
    for node in nodes:
        held(elsewhere, node)
        elsewhere.say(node, {"t": "start-outcome", "epoch": NOWHERE}, [])
        elsewhere.alive(node)
    elsewhere.network.close()
    at_work.start(0, 1)
    assert Epoch.parse(at_work.job[0].epoch) > Epoch.parse(NOWHERE)
    assert not at_work.status(0)["job"]["frozen"]
    assert at_work.checkpoint("peer")
