"""A job's coordinator is lost and nothing is started again: what the nodes that are left have in memory is
committed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.agent.commit.commit_turns import CommitTurns
from ckpt.agent.node.orphan_committer import OrphanCommitter, assign_writers
from ckpt.agent.runtime.coroutines import Promise, spawn
from ckpt.agent.snapshots.inventory import Inventory
from ckpt.ipc.messages import Message
from ckpt.ipc.node_list import NodeAt
from tests.agent.node.test_agent import wait_for, wait_gone
from tests.agent.nodes.cluster import Cluster
from tests.agent.nodes.test_hostile_peers import MakeLiar, liar, node_of
from tests.agent.nodes.test_permissions import ask
from tests.agent.parts import bare_context

__all__ = ["liar"]

COPIES: dict[str, Any] = {"replicas": 1}
PARITY: dict[str, Any] = {"data": 2, "parity": 1}
NO_LIMITS: dict[str, Any] = {"memory": None, "bandwidth": None, "peer_bandwidth": None}


@pytest.fixture
def soon(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first turn comes after 4 s."""
    monkeypatch.setenv("CKPT_LINGER_S", "16")


def save_nowhere_but_in_memory(cluster: Cluster, peers: Mapping[str, Any], *spread: int) -> int:
    cluster.forbid_commits()
    cluster.options = {**cluster.options, "peers": dict(peers)}
    cluster.start(*spread)
    return cluster.checkpoint("peer")


def check_committed_without_coordinator(cluster: Cluster, step: int) -> None:
    """The coordinator's node is lost, and the job ends: the other nodes commit that step, and nothing else."""
    cluster.kill(0)
    cluster.allow_commits()
    cluster.hang_up()
    wait_for(lambda: bool(cluster.committed_steps()))
    assert cluster.committed_steps() == [step]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("peers", [COPIES, PARITY])
def test_what_is_safe_with_others_is_committed_by_them_when_its_coordinator_is_lost(
    cluster: Cluster, peers: dict[str, Any]
) -> None:
    step = save_nowhere_but_in_memory(cluster, peers, 0, 0, 1, 2)
    check_committed_without_coordinator(cluster, step)


@pytest.mark.usefixtures("soon")
def test_an_agent_that_was_started_again_meanwhile_commits_it_too(cluster: Cluster) -> None:
    save_nowhere_but_in_memory(cluster, COPIES, 0, 1)
    cluster.kill_agent(1)
    cluster.come_back(1)
    step = cluster.checkpoint("peer")
    check_committed_without_coordinator(cluster, step)


@pytest.mark.usefixtures("soon")
def test_what_is_not_whole_any_more_is_left_alone(cluster: Cluster) -> None:
    """Two of three are lost, where one may be; the third one ends in its time."""
    save_nowhere_but_in_memory(cluster, COPIES, 0, 1, 2)
    cluster.kill(0, 2)
    cluster.allow_commits()
    cluster.hang_up(1)
    wait_gone(cluster.pids[1])
    assert cluster.committed_steps() == []


@pytest.mark.usefixtures("soon")
def test_a_start_that_comes_while_it_is_written_goes_on_from_memory(cluster: Cluster) -> None:
    cluster.options = {**cluster.options, "codec": "raw", "limits": {**NO_LIMITS, "bandwidth": 2e5}}
    step = save_nowhere_but_in_memory(cluster, COPIES, 0, 1, 2)
    cluster.kill(0)
    cluster.allow_commits()
    cluster.hang_up(1, 2)
    data = Path(cluster.url) / "data"
    wait_for(lambda: data.is_dir() and any(data.iterdir()))
    cluster.options = {**cluster.options, "limits": NO_LIMITS}
    assert cluster.restart(1, 2, 3)["step"] == step
    assert set(cluster.fetched()) <= {"local", "peer"}
    newer = cluster.checkpoint("store")
    assert cluster.committed_steps() in ([newer], [step, newer])
    cluster.finish()


@pytest.mark.usefixtures("soon")
def test_a_later_start_that_saved_nothing_is_followed_by_what_it_went_on_from(cluster: Cluster) -> None:
    step = save_nowhere_but_in_memory(cluster, COPIES, 0, 1, 2)
    cluster.hang_up()
    assert cluster.restart(0, 1, 2)["step"] == step
    cluster.appointed()  # all nodes know by then that it has begun: else they keep what they have for it for a while
    check_committed_without_coordinator(cluster, step)


LEFT = {"t": "survey", "for_orphans": True}
NOTHING: dict[str, Any] = {"t": "start-outcome", "epoch": None, "settled": None}


def left_alone(cluster: Cluster, linger_s: str, monkeypatch: pytest.MonkeyPatch) -> NodeAt:
    """One of two nodes, whose coordinator is lost. What it commits it writes slowly."""
    monkeypatch.setenv("CKPT_LINGER_S", linger_s)
    cluster.options = {**cluster.options, "codec": "raw", "limits": {**NO_LIMITS, "bandwidth": 1e5}}
    save_nowhere_but_in_memory(cluster, COPIES, 0, 1)
    left = node_of(cluster, 1)
    cluster.kill(0)
    cluster.hang_up(1)
    return left


def test_of_two_nodes_that_ask_each_other_one_goes_on_and_begins_again_when_nothing_came_of_the_other(
    cluster: Cluster, liar: MakeLiar, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = left_alone(cluster, "24", monkeypatch)
    cluster.allow_commits()
    later, earlier = liar("~"), liar("!")

    def refused() -> bool:
        answer, error = ask(later, left, LEFT)
        if answer is not None:
            later.say(left, NOTHING, [])
        return "already committing it" in error

    wait_for(refused)
    answer, error = ask(earlier, left, LEFT)
    assert answer is not None, error
    assert ask(later, left, LEFT)[0] is not None  # it has ended its own
    later.say(left, NOTHING, [])
    earlier.say(left, NOTHING, [])
    wait_for(lambda: bool(cluster.committed_steps()))


def test_who_is_asked_for_what_is_left_stays_until_the_outcome(
    cluster: Cluster, liar: MakeLiar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has been long enough alone to end; who has asked may be at work on what it has."""
    left, other = left_alone(cluster, "6", monkeypatch), liar("!")
    answer, error = ask(other, left, LEFT)
    assert answer is not None, error
    with pytest.raises(AssertionError, match="the agent stays"):
        wait_gone(cluster.pids[1], 8.0)
    other.alive(left)
    other.say(left, NOTHING, [])
    wait_gone(cluster.pids[1])


def test_what_is_left_gives_way_to_a_start_there_and_then(
    cluster: Cluster, liar: MakeLiar, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = left_alone(cluster, "120", monkeypatch)
    start, other = liar("~"), liar("!")
    assert ask(other, left, LEFT)[0] is not None
    assert ask(start, left, {"t": "survey"})[0] is not None
    assert "a start has asked" in ask(other, left, LEFT)[1]


def test_what_was_committed_elsewhere_is_left_alone(
    cluster: Cluster, liar: MakeLiar, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, other = left_alone(cluster, "12", monkeypatch), liar("!")
    cluster.allow_commits()
    assert ask(other, left, LEFT)[0] is not None
    other.say(left, {**NOTHING, "settled": cluster.job[0].epoch}, [])
    wait_gone(cluster.pids[1])
    assert cluster.committed_steps() == []


def test_nobody_is_asked_once_the_attempt_is_over() -> None:
    """It would wait for an outcome that nobody tells it."""
    connected: list[Promise[str]] = []
    asked: list[str] = []

    def connect(node: NodeAt) -> Promise[str]:
        connected.append(Promise())
        return connected[-1]

    def request(name: str, fields: object) -> Promise[Message]:
        asked.append(name)
        return Promise()

    network = SimpleNamespace(
        agent_name="b",
        connect=connect,
        request=request,
        channel=lambda name: None,
    )
    nodes = [NodeAt(name, (), ()) for name in "abcd"]
    attempt = SimpleNamespace(network=network, inventory=Inventory(), job=SimpleNamespace(nodes=nodes, epoch="e"))
    orphans = OrphanCommitter(bare_context(), cast(Any, None), CommitTurns(1.0), lambda: None)
    orphans._attempt = cast(Any, attempt)
    spawn(orphans._survey_other_nodes(cast(Any, attempt)), functools.partial(orphans._guard, cast(Any, attempt)))
    assert len(connected) == 2, "not the coordinator, which is lost"
    connected[0].set_result("c")
    orphans._attempt = None
    connected[1].set_result("d")
    assert asked == ["c"]


def test_every_frame_is_written_by_who_has_it_and_another_may_do_it_who_has_all_of_that_share() -> None:
    holders = {0: ["", "b"], 1: ["b", "c", "d"], 2: ["b", "d"], 3: ["c"]}
    ranks, rest = assign_writers(holders)
    assert ranks == {"": frozenset((0,)), "b": frozenset((1, 2)), "c": frozenset((3,))}
    assert rest == {"": ["b"], "b": ["d"], "c": []}
