"""A memory-only node is the only peer: it keeps what a job of one node has, gives it back elsewhere when that node is
lost, and commits it."""

from __future__ import annotations

import os
import re
import signal
from contextlib import closing
from pathlib import Path

import pytest

from ckpt.errors import AgentError
from ckpt.ipc import secret
from ckpt.storage import open as open_store
from ckpt.store.run import Run
from ckpt.types import Version
from tests.agent.nodes.cluster import Cluster, line
from tests.agent.nodes.test_previous_nodes import allow_reading, newer_in_memory

SLOW = 300e3  # bytes/s to the store: a commit takes seconds


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start with another launch id watches for two heartbeats whether the one before lives."""
    monkeypatch.setenv("CKPT_HEARTBEAT_S", "0.5")
    monkeypatch.setenv("CKPT_RETRY_S", "1")


@pytest.fixture
def lent(cluster: Cluster) -> Cluster:
    cluster.peers = cluster.lend()["listen"]
    return cluster


def test_a_job_of_one_node_has_its_copies_at_a_memory_only_node(lent: Cluster, url: str) -> None:
    lent.start(0, 0)
    step = lent.checkpoint("local", "peer", "store")
    table = lent.status(0)["job"]["peers"]
    assert [len(row["kept_by"]) for row in table["nodes"] if row["own_bytes"]] == [1], table
    assert any(f"-{Version(step)}" in each for each in lent.lending_status()["whole"])
    lent.finish()
    assert [identity.version.step for identity in line(url)][-1] == lent.job[0].step
    assert lent.await_lending(lambda status: not status["connected"])["keeps"] == []
    assert lent.end_lending() == 0


@pytest.mark.parametrize("after", [(1,), (1, 1, 1), (1, 2)])
def test_when_the_trainers_node_is_lost_its_state_comes_back_from_there_onto_any_number_of_ranks(
    lent: Cluster, after: tuple[int, ...]
) -> None:
    lent.forbid_commits()
    lent.start(0, 0)
    step = lent.checkpoint("peer")
    lent.kill(0)
    decision = lent.start(*after, launch="another")
    assert decision.fields["candidate"]["step"] == step
    assert decision.fields["candidate"]["level"] == "peer"
    assert decision.fields["steps_lost"] is None, "who keeps copies has not seen how far the job came"
    assert set(lent.fetched()) == {"peer"}
    assert lent.checkpoint("peer") > step


def test_a_memory_only_node_that_stops_in_the_middle_of_a_restore_costs_that_start_and_nothing_that_it_has(
    lent: Cluster,
) -> None:
    _, step = newer_in_memory(lent, 0)
    lent.kill(0)
    allow_reading(lent)
    lent.connect(1, launch="another")
    decision = lent.job[0].begin()
    lent.job[0].join(decision.fields["epoch"])
    assert decision.fields["candidate"]["step"] == step
    os.kill(lent.lending[0].pid, signal.SIGSTOP)
    try:
        with pytest.raises(AgentError, match="could not be reached"):
            lent.job[0].restore(decision)
    finally:
        os.kill(lent.lending[0].pid, signal.SIGCONT)
    lent.hang_up()
    assert lent.restart(1, launch="a third")["step"] == step


def text_of(cluster: Cluster, name: str) -> str:
    """What rank 0 read of the newest such event."""
    return str(next(event["message"] for event in reversed(cluster.job[0].events) if event["name"] == name))


def newest_safe(cluster: Cluster) -> int | None:
    """In other nodes' memory, as it is shown."""
    found = cluster.status(0)["account"]["safe"].get("peer")
    return found["step"] if found is not None else None


def test_what_is_shown_as_safe_falls_back_when_the_one_that_keeps_it_is_lost_and_rises_when_another_has_it(
    lent: Cluster,
) -> None:
    lent.start(0, 0)
    step = lent.checkpoint("peer")
    assert newest_safe(lent) == step
    at = lent.peers[0]
    lent.end_lending(with_=signal.SIGKILL)
    lost = lent.await_event("replica.lost")
    assert lost["identity"].endswith(str(Version(step)))
    assert f"agent {lost['agent']} is gone or cut off" in text_of(lent, "replica.lost")
    assert newest_safe(lent) is None
    assert lent.job[0].levels[str(Version(step)), "peer"], "it was so when it was said"
    lent.lend(at=at)
    lent.await_event("replication.done", 2)  # the same step, without another snapshot
    assert newest_safe(lent) == step


def test_an_agent_that_is_started_again_empty_makes_what_it_kept_unsafe_until_it_has_it_again(cluster: Cluster) -> None:
    cluster.forbid_commits()
    cluster.start(0, 1)
    step = cluster.checkpoint("peer")
    pid = cluster.pids[1]
    cluster.kill_agent(1)
    cluster.await_event("replica.lost")
    assert re.search(rf"agent \S+:{pid}-[0-9a-f]{{6}} is gone or cut off", text_of(cluster, "replica.lost"))
    assert newest_safe(cluster) is None
    assert cluster.job[1].lost.wait(60)
    cluster.come_back(1)
    cluster.await_event("replication.done", 2)
    assert newest_safe(cluster) == step


@pytest.mark.parametrize("commits", [False, True])
def test_when_all_of_several_trainers_nodes_are_lost_it_has_everything_and_gives_it_back_or_commits_it(
    commits: bool, cluster: Cluster, url: str
) -> None:
    cluster.peers = cluster.lend("1GiB", "--commit-after-s", "0.5" if commits else "3600")["listen"]
    cluster.forbid_commits()
    cluster.start(0, 1, 1)
    step = cluster.checkpoint("peer")
    assert len(cluster.lending_status()["whole"]) == 1
    cluster.kill(0, 1)
    if commits:
        cluster.await_lending(lambda status: status["error"] is not None)
        cluster.allow_commits()
        assert cluster.end_lending() == 0  # it tries once more
        assert cluster.committed_steps() == [step]
        cluster.peers = []
        candidate = cluster.restart(2, launch="another")
        assert (candidate["step"], candidate["level"]) == (step, "store")
    else:
        assert cluster.restart(2)["step"] == step
        assert set(cluster.fetched()) == {"peer"}


def slowly(cluster: Cluster, bandwidth: float | None = SLOW) -> None:
    cluster.options = {**cluster.options, "limits": {"memory": None, "bandwidth": bandwidth}}


def test_it_commits_of_itself_once_nobody_has_been_there_for_so_long(cluster: Cluster) -> None:
    cluster.peers = cluster.lend("1GiB", "--commit-after-s", "0.5")["listen"]
    slowly(cluster)
    cluster.start(0, 0)
    step = cluster.checkpoint("peer")
    assert cluster.committed_steps() == []
    cluster.kill(0)
    cluster.await_lending(lambda status: bool(cluster.committed_steps()))
    assert cluster.committed_steps() == [step]


def test_a_job_that_begins_while_it_commits_goes_on_from_the_same_and_neither_hurts_the_other(cluster: Cluster) -> None:
    cluster.peers = cluster.lend("1GiB", "--commit-after-s", "0")["listen"]
    slowly(cluster, SLOW / 2)
    cluster.start(0, 0)
    step = cluster.checkpoint("peer")
    cluster.kill(0)
    cluster.await_lending(lambda status: status["committing"] is not None)
    slowly(cluster, None)
    # On a machine that is slow enough the commit ends meanwhile: that is right, too.
    assert cluster.restart(1, 1)["step"] == step
    later = cluster.checkpoint("peer", "store")
    cluster.await_lending(lambda status: status["committing"] is None)
    # The start has ended that commit, or came too late for it.
    assert cluster.committed_steps() in ([later], [step, later])


@pytest.mark.parametrize("committing", [False, True])
def test_once_a_job_has_gone_on_from_something_older_what_it_keeps_is_not_put_on_the_line(
    committing: bool, cluster: Cluster
) -> None:
    """That job names no memory-only nodes: it does not know of this one, nor this one of it."""
    named = cluster.lend("1GiB", "--commit-after-s", "0" if committing else "3600")["listen"]
    cluster.start(0, 0)
    older = cluster.checkpoint("store")
    cluster.kill(0)
    cluster.peers = named
    slowly(cluster, SLOW / 3)  # the next start comes in between on a busy machine, too
    cluster.start(1, 1)
    lost = cluster.checkpoint("peer")
    assert cluster.lending_status()["whole"]
    cluster.kill(1)
    if committing:
        cluster.await_lending(lambda status: status["committing"] is not None)
    cluster.peers = []
    slowly(cluster, None)
    assert cluster.restart(2)["step"] == older
    later = cluster.checkpoint("store")
    assert cluster.end_lending() == 0  # when it has tried
    assert cluster.committed_steps() == [older, later]
    assert later == lost  # of another branch: told apart by its epoch
    cluster.finish()


def test_a_coordinator_that_hung_and_wakes_up_commits_beside_it(cluster: Cluster) -> None:
    cluster.peers = cluster.lend("1GiB", "--commit-after-s", "0")["listen"]
    slowly(cluster)
    cluster.start(0, 0)
    step = cluster.checkpoint("peer")
    os.kill(cluster.pids[0], signal.SIGSTOP)
    cluster.await_lending(lambda status: bool(cluster.committed_steps()))  # once it has been silent for long enough
    os.kill(cluster.pids[0], signal.SIGCONT)
    assert cluster.await_event("agent.stood_still")["for_s"] > 10, "it was this one that said nothing"
    assert cluster.job[0].wait_level(Version(step), "store")
    with closing(open_store(cluster.url)) as store:
        records = [ref.identity.version.step for ref in Run(store).view().commits]
    assert records == [step, step]
    assert cluster.committed_steps() == [step]
    assert cluster.checkpoint("peer", "store") > step


def test_one_that_is_not_there_is_named_and_training_goes_on_and_when_it_comes_it_is_used(cluster: Cluster) -> None:
    at = cluster.lend()["listen"][0]
    assert cluster.end_lending() == 0
    cluster.peers = [at]
    cluster.start(0)
    told = [event for event in cluster.job[0].events if event["name"] == "memory_node.unreachable"]
    assert len(told) == 1
    assert f"--listen {at}" in told[0]["message"]
    assert told[0]["loud"]
    cluster.checkpoint("local", "store")
    cluster.lend(at=at)
    cluster.await_lending(lambda status: status["connected"], 1)
    assert cluster.checkpoint("peer")
    cluster.end_lending(1, signal.SIGKILL)
    cluster.checkpoint("store")
    cluster.finish()


def test_what_it_keeps_stays_until_something_newer_is_safe_though_that_does_not_fit(cluster: Cluster) -> None:
    """The job that goes on has a larger state: its own memory is no reason to drop what is elsewhere."""
    cluster.peers = cluster.lend("8MiB")["listen"]
    cluster.forbid_commits()
    cluster.start(0)
    step = cluster.checkpoint("peer")
    cluster.kill(0)
    cluster.connect(1)
    cluster.job[0].extra = 4 << 20
    cluster.enter()
    assert cluster.checkpoint("local") > step
    assert cluster.checkpoint("local") > step + 1
    cluster.kill(1)
    assert cluster.restart(2)["step"] == step


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("one with another secret", "secret"),
        ("one of another url", "mistyped"),
        ("the coordinator", "leads back to this agent itself"),
        ("a node of the job", "lends no memory"),
    ],
)
def test_one_that_cannot_be_used_is_named_and_learns_nothing(
    named: str, why: str, cluster: Cluster, tmp_path: Path
) -> None:
    url, other = cluster.url, str(tmp_path / "mistyped")
    if named == "one with another secret":
        cluster.peers = cluster.lend(secret=secret.make_secret())["listen"]
    elif named == "one of another url":
        cluster.url = other
        cluster.peers = cluster.lend()["listen"]
        cluster.url = url
    cluster.connect(0, 1)
    if not cluster.lending:
        for rank in cluster.job:
            rank.peers = cluster.job[0].nodes[int(named != "the coordinator")]["addresses"][:1]
    cluster.enter()
    (told,) = [event for event in cluster.job[0].events if event["name"] == "memory_node.unreachable"]
    assert why in told["message"]
    assert told["loud"]
    cluster.checkpoint("peer", "store")
    cluster.finish()
    cluster.url = other if named == "one of another url" else url
    if cluster.lending:
        status = cluster.lending_status()
        assert (status["launch"], status["keeps"]) == (None, [])


def test_a_job_of_another_url_neither_goes_on_from_what_is_kept_there_nor_costs_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.forbid_commits()
    cluster.peers = cluster.lend()["listen"]
    cluster.start(0)
    step = cluster.checkpoint("peer")
    cluster.kill(0)
    cluster.await_lending(lambda status: not status["connected"])
    kept = cluster.lending_status()["whole"]

    cluster.url, url = str(tmp_path / "another"), cluster.url
    assert cluster.start(1, launch="another").fields["candidate"] is None
    assert cluster.checkpoint("local", "store") <= step  # of its own
    cluster.finish()

    cluster.url = url
    assert cluster.lending_status()["whole"] == kept
    assert cluster.restart(2)["step"] == step


def test_one_that_lends_too_little_is_not_used_and_that_is_said(cluster: Cluster) -> None:
    cluster.peers = cluster.lend("1MiB")["listen"]
    cluster.start(0)
    cluster.checkpoint("local", "store")
    placed = [event for event in cluster.job[0].events if event["name"] == "replication.placed"]
    assert "lend more" in placed[-1]["message"]
    assert cluster.lending_status()["keeps"] == []
    cluster.finish()
