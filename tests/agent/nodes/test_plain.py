"""A job of several nodes saves at every level, and comes back from memory onto whatever nodes there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import RunInUse
from ckpt.ipc import client
from ckpt.policy.save_options import PEER_BANDWIDTH_MIN
from ckpt.types import Version
from tests.agent.node.test_agent import train, wait_for
from tests.agent.nodes.cluster import ADAPTIVE, Cluster, line
from tests.cli.stores import ckpt


@pytest.mark.parametrize("spread", [(0, 1), (0, 0, 1, 1), (0, 1, 1, 2), (0, 1, 2, 3)])
def test_a_job_of_several_nodes_is_complete_at_every_level_and_every_agent_ends_with_it(
    spread: tuple[int, ...], cluster: Cluster, runtime_dir: Path, url: str
) -> None:
    decision = cluster.start(*spread)
    assert decision.fields["candidate"] is None
    appointed = cluster.checkpoint("local", "peer", "store")
    asked = cluster.save("local", "peer", "store")
    cluster.finish()
    committed = [identity.version for identity in line(url)]
    assert {Version(appointed), asked} <= set(committed)
    left = [path for path in runtime_dir.rglob("*") if path.is_file() or path.is_socket()]
    assert not [(path, path.read_text() if path.is_file() else "") for path in left]


def test_each_node_writes_the_packs_of_its_own_ranks(cluster: Cluster, url: str) -> None:
    cluster.start(0, 0, 1, 2)
    cluster.save("store")
    packs = {path.name.rpartition("-")[0] for path in Path(url, "data").rglob("*.pack")}
    assert len(packs) == 3, packs
    assert len(line(url)) == 1
    assert cluster.status(0)["job"]["launch"] == "test"
    assert [cluster.status(node)["followed_jobs"][0]["launch"] for node in (1, 2)] == ["test"] * 2


def test_only_the_agent_that_coordinates_a_job_lets_its_checkpoints_go(cluster: Cluster, url: str) -> None:
    cluster.start(0, 1)
    for _ in range(2):
        cluster.save("store")
        train(cluster.job, cluster.job[0].step + 1)
    wanted = {"keep": {"last": 1}, "also": []}
    with pytest.raises(RunInUse, match=rf"coordinated by agent .*:{cluster.pids[0]}-[0-9a-f]{{6}}, which"):
        prune(cluster, 1, {**wanted, "yes": True})
    # A commit may still be under way.
    wait_for(lambda: len(prune(cluster, 1, {**wanted, "yes": False})["retire"]) == len(line(url)) - 1 > 0)
    prune(cluster, 0, {**wanted, "yes": True})
    assert len(line(url)) == 1
    cluster.finish()


def test_watching_shows_which_step_other_nodes_have_and_what_each_node_takes_and_sends(
    cluster: Cluster, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.forbid_commits()
    cluster.start(0, 1)
    step = cluster.checkpoint("peer")
    monkeypatch.setenv("CKPT_RUNTIME_DIR", str(cluster.settings(0).runtime_dir))
    lines = [line.split() for line in ckpt(monkeypatch, "watch", url, "--once").out.splitlines()]
    safe = {words[0]: words[1] for words in lines if words and words[0] in ("local", "peer", "store")}
    assert (safe["peer"], safe["store"]) == (str(step), "none")
    assert len([words for words in lines if {"copies", "sends", "gets"} <= set(words)]) == 2


@pytest.mark.parametrize("newer", [False, True])
def test_an_agent_that_goes_on_from_others_memory_shows_what_the_store_has(cluster: Cluster, newer: bool) -> None:
    """It is new, and has committed nothing yet; the memory that it went on from may have something newer."""
    cluster.start(0, 1)
    step = stored = cluster.checkpoint("peer", "store")
    if newer:
        Path(cluster.url, "data").rename(Path(cluster.url, "kept"))  # nobody reads it here
        cluster.forbid_commits()
        step = cluster.checkpoint("peer")
    cluster.lose(0)
    candidate = cluster.start(2, 1).fields["candidate"]
    assert (candidate["step"], candidate["level"]) == (step, "peer")
    assert cluster.status(2)["account"]["safe"]["store"]["step"] == stored


@pytest.mark.parametrize("spread", [(0,), (0, 1)])
def test_an_agent_that_was_started_again_shows_what_the_store_has_though_no_memory_has_that_any_more(
    spread: tuple[int, ...], cluster: Cluster
) -> None:
    cluster.start(*spread)
    stored = cluster.checkpoint("store")
    Path(cluster.url, "data").rename(Path(cluster.url, "kept"))  # nobody reads it here
    cluster.forbid_commits()
    for _ in range(4):
        cluster.checkpoint("local")
    cluster.kill_agent(0)
    assert all(rank.lost.wait(60) for rank in cluster.job)
    cluster.come_back()
    shown = cluster.await_status(0, lambda status: "store" in status["account"]["safe"])
    assert shown["account"]["safe"]["store"]["step"] == stored


def test_what_came_from_the_store_is_not_shown_as_safe_in_other_nodes_memory(cluster: Cluster) -> None:
    cluster.start(0, 1)
    step = cluster.checkpoint("store")
    cluster.kill(0, 1)
    candidate = cluster.start(2, 3).fields["candidate"]
    assert (candidate["step"], candidate["level"]) == (step, "store")
    cluster.await_event("replication.placed")
    safe = cluster.await_status(2, lambda status: bool(status["job"]["memory"]))["account"]["safe"]
    assert safe.keys() == {"store"}, "nobody keeps it"


def prune(cluster: Cluster, node: int, fields: dict[str, Any]) -> dict[str, Any]:
    """As ckpt prune does on that node."""
    with cluster.tool(cluster.settings(node)) as tool:
        return client.decode_body(tool.request("prune", fields))


RATE = 400_000.0
STATE_BYTES = 2 * 512 * 300 * 4


def test_copies_keep_to_their_bandwidth_on_every_node_and_what_a_start_waits_for_does_not(cluster: Cluster) -> None:
    cluster.options = {**cluster.options, "limits": {"memory": None, "bandwidth": None, "peer_bandwidth": RATE}}
    cluster.start(0, 1, 2)
    assert [cluster.status(node)["peer_bandwidth"] for node in range(3)] == [RATE] * 3
    step = cluster.checkpoint("peer")
    told = cluster.await_event("replication.done")
    assert told["seconds"] >= 0.9 * STATE_BYTES / 3 / RATE, "some node sends a third of the state, or more"
    cluster.lose(1)
    cluster.options["limits"]["peer_bandwidth"] = float(PEER_BANDWIDTH_MIN)
    assert cluster.restart(3, 0, 2)["step"] == step
    assert cluster.fetched()["peer"] > 100_000
    assert [cluster.status(node)["peer_bandwidth"] for node in (3, 0, 2)] == [PEER_BANDWIDTH_MIN] * 3


RESTARTS = [
    ((0, 0, 1, 1), (), (0, 0, 1, 1)),  # none is lost
    ((0, 0, 1, 1), (), (0, 1)),
    ((0, 1), (), (0, 0, 1)),
    ((0, 1, 2), (), (2, 0, 1, 1)),
    ((0, 0, 1, 1), (1,), (0, 0)),  # fewer nodes: the one that is left, alone
    ((0, 0, 1, 1), (0,), (1, 2)),  # others: the coordinator's is gone, a new one comes
    ((0, 1, 2), (1,), (0, 2, 2)),
    ((0, 1, 2), (0,), (3, 1, 2, 4)),  # more, and the coordinator is one that knows nothing
    ((0, 1, 2, 3), (3,), (2, 1, 0)),
]


@pytest.mark.parametrize(("before", "gone", "after"), RESTARTS)
def test_a_restart_comes_from_memory_on_whatever_nodes_and_any_number_of_ranks(
    before: tuple[int, ...], gone: tuple[int, ...], after: tuple[int, ...], cluster: Cluster
) -> None:
    cluster.start(*before)
    step = cluster.checkpoint("peer")
    cluster.lose(*gone)
    candidate = cluster.start(*after).fields["candidate"]
    assert candidate["step"] == step
    assert candidate["level"] == ("local" if len(set(after)) == 1 else "peer")
    assert set(cluster.fetched()) <= {"local", "peer"}
    assert cluster.checkpoint("peer" if len(set(after)) > 1 else "local", "store") > step
    cluster.finish()


def test_what_was_learnt_outlives_the_loss_of_the_coordinators_node(cluster: Cluster) -> None:
    """The next coordinator goes on from memory, and no agent that is left had learnt anything."""
    cluster.options = {**cluster.options, "policy": ADAPTIVE}

    def losses_seen(node: int) -> int:
        found: int = cluster.status(node)["job"]["rates"]["node"]["seen"]
        return found

    cluster.start(0, 1)
    train(cluster.job, 3)
    cluster.save("peer")
    cluster.lose(1)
    cluster.start(0, 2)
    assert losses_seen(0) == 1
    train(cluster.job, cluster.job[0].step + 3)
    cluster.save("peer", "store")
    cluster.lose(0)
    assert cluster.restart(2, 3)["level"] == "peer"
    wait_for(lambda: losses_seen(2) == 2)


@pytest.mark.parametrize("gone", [(1, 2), (0, 1, 2)])
def test_nodes_that_took_all_copies_with_them_count_as_a_loss_that_only_the_store_survives(
    gone: tuple[int, ...], cluster: Cluster
) -> None:
    cluster.options = {**cluster.options, "policy": ADAPTIVE}
    cluster.start(0, 1, 2)
    train(cluster.job, 3)
    step = cluster.save("peer", "store").step
    cluster.lose(*gone)
    candidate = cluster.restart(*{0, 3, 4, 5}.difference(gone))
    assert (candidate["step"], candidate["level"]) == (step, "store")
    rates = cluster.status(min({0, 3}.difference(gone)))["job"]["rates"]
    assert {name: each["seen"] for name, each in rates.items() if each["seen"]} == {"job": 1}
