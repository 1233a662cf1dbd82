"""A notice that reaches only a node that is not rank 0's: all ranks leave at one step, or go on if it is taken back."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.agent.runtime.workers import NICE
from ckpt.errors import AgentError, CkptError
from ckpt.ipc.control_page import WordKind
from ckpt.ipc.notice_sources import Sources
from ckpt.threads import Tasks
from ckpt.types import Version
from tests.agent.fake import FakeRank
from tests.agent.node.test_agent import one_step, together, wait_for
from tests.agent.nodes.cluster import BOUND_S, Cluster, train
from tests.preemption.fakes import Asked, FakeService, Says, serving


class Gce(FakeService):
    """Of one machine; `preempted` is what it says."""

    preempted = False

    def __init__(self) -> None:
        super().__init__()
        self.now_s = time.time
        self.answer = self._answer

    def _answer(self, asked: Asked) -> Says:
        value = ("TRUE" if self.preempted else "FALSE") if "preempted" in asked.path else "NONE"
        return Says(200, value, {"ETag": value})


@pytest.fixture
def gce() -> Iterator[Gce]:
    with serving(Gce()) as service:
        yield service


@pytest.fixture
def job(cluster: Cluster, gce: Gce) -> Cluster:
    """Two nodes, of which the second alone has a metadata service. Nothing is saved by itself."""
    cluster.options = {**cluster.options, "policy": {"steps": 100_000, "seconds": None}}
    cluster.connect(0, 0, 1, 1)
    listen(cluster, gce)
    cluster.enter()
    return cluster


def listen(cluster: Cluster, gce: Gce) -> None:
    named = (("GCE_METADATA_HOST", f"127.0.0.1:{gce.port}"),)
    for rank in cluster.job[2:]:
        rank.notices = Sources("given", named).fields()


def leave(cluster: Cluster) -> None:
    left: list[bool] = []
    while not any(left):
        step = cluster.job[0].await_word(WordKind.HOLD)
        train(cluster.job, step - 1)
        together(cluster.job, lambda rank: rank.await_word(WordKind.HOLD))
        left = together(cluster.job, one_step)
        assert len(set(left)) == 1, "some leave and some go on"


def preempt(cluster: Cluster, node: int, cancel: bool = False) -> None:
    """As an operator on that node."""
    with cluster.tool(cluster.settings(node)) as tool:
        tool.request("preempt", {"deadline_s": 60.0, "source": "test", "cancel": cancel})


def standing(cluster: Cluster) -> list[str]:
    return [each["source"] for each in cluster.status(0)["job"]["notices"]["standing"]]


def withdrawn(cluster: Cluster) -> list[str]:
    return [event["message"] for rank in cluster.job for event in rank.events if event["name"] == "notice.withdrawn"]


def await_standing(cluster: Cluster, wanted: list[str]) -> None:
    wait_for(lambda: standing(cluster) == wanted)


def test_all_ranks_of_all_nodes_leave_at_one_step_that_is_in_the_store(job: Cluster, gce: Gce) -> None:
    gce.preempted = True
    leave(job)
    answers = together(job.job, lambda rank: rank.leave("notice"))
    assert {answer["committed"] for answer in answers} == {str(Version(job.job[0].step))}
    assert job.committed_steps() == [job.job[0].step]
    told = [event["message"] for event in job.job[0].events if event["name"] == "notice"]
    assert len(told) == 1
    assert "on node" not in told[0]
    assert "Compute Engine" in told[0]


def test_a_launcher_that_starts_it_again_there_does_not_have_it_leave_again(job: Cluster, gce: Gce) -> None:
    gce.preempted = True
    leave(job)
    together(job.job, lambda rank: rank.leave("notice"))
    job.hang_up()
    job.connect(0, 0, 1, 1)
    listen(job, gce)
    job.enter()
    await_standing(job, ["gcp-preempted"])

    def told() -> list[str]:
        """To the lowest rank that had come by then."""
        return [event["message"] for rank in job.job for event in rank.events if event["name"] == "notice"]

    wait_for(lambda: any("does not leave again" in message for message in told()))
    train(job.job, job.job[0].step + 20)
    assert job.save("store")
    gce.preempted = False
    await_standing(job, [])


def test_when_it_is_taken_back_there_all_ranks_go_on(job: Cluster, gce: Gce) -> None:
    gce.preempted = True
    step = job.job[0].await_word(WordKind.HOLD)
    gce.preempted = False
    await_standing(job, [])
    train(job.job, step + 3)
    assert job.save("store")
    assert not [rank for rank in job.job if rank.superseded]


@pytest.mark.parametrize(("asked", "cancelled"), [(0, 1), (1, 0), (1, 1)])
def test_what_an_operator_asked_for_on_one_node_may_be_taken_back_on_any(
    cluster: Cluster, asked: int, cancelled: int
) -> None:
    cluster.options = {**cluster.options, "policy": {"steps": 100_000, "seconds": None}}
    cluster.start(0, 1)
    preempt(cluster, asked)
    step = cluster.job[0].await_word(WordKind.HOLD)
    notices = cluster.status(0)["job"]["notices"]["standing"]
    other = cluster.status(1)["name"]
    assert [each["nodes"] for each in notices] == [[other if asked else ""]]
    preempt(cluster, cancelled, cancel=True)
    await_standing(cluster, [])
    wait_for(lambda: bool(withdrawn(cluster)))
    assert [("this machine" in each) for each in withdrawn(cluster)] == [not asked]
    wait_for(lambda: cluster.job[asked].standing == [])  # what it would hand to another agent
    train(cluster.job, step + 3)
    assert cluster.save("store")
    assert standing(cluster) == []


@pytest.mark.parametrize("asked", [0, 1])
def test_what_an_operator_asked_for_stands_though_the_agent_that_was_asked_dies(cluster: Cluster, asked: int) -> None:
    cluster.options = {**cluster.options, "policy": {"steps": 100_000, "seconds": None}}
    cluster.start(0, 1)
    preempt(cluster, asked)
    await_standing(cluster, ["test"])
    cluster.kill_agent(asked)
    for rank in cluster.job if asked == 0 else cluster.job[1:]:
        assert rank.lost.wait(60)
    cluster.come_back(*([] if asked == 0 else [asked]))
    await_standing(cluster, ["test"])
    together(cluster.job, lambda rank: rank.enter(rank.step + 1))
    leave(cluster)
    assert not withdrawn(cluster)
    assert len({answer["committed"] for answer in together(cluster.job, lambda rank: rank.leave("notice"))}) == 1


def test_it_is_told_again_to_a_coordinator_whose_agent_was_started_anew(job: Cluster, gce: Gce) -> None:
    gce.preempted = True
    await_standing(job, ["gcp-preempted"])
    job.kill_agent(0)
    for rank in job.job:
        assert rank.lost.wait(60)
    job.come_back()
    await_standing(job, ["gcp-preempted"])


@pytest.mark.parametrize("node", [0, 1])
def test_an_agent_that_dies_after_the_verdict_is_followed_by_one_that_saves_it_and_says_so(
    job: Cluster, gce: Gce, node: int
) -> None:
    """The ranks that lost it save the last step again: the coordinator's next agent has nothing."""
    gce.preempted = True
    job.forbid_commits()
    leave(job)
    step = Version(job.job[0].step)
    assert job.job[0].wait_level(step, "local")
    job.kill_agent(node)
    away = [rank for rank in job.job if node == 0 or job.at[rank.rank] == node]
    for rank in away:
        assert rank.lost.wait(60)
    job.allow_commits()
    job.come_back(*([] if node == 0 else [node]))

    def leave_again(rank: FakeRank) -> dict[str, Any]:
        if rank in away:
            with contextlib.suppress(CkptError):
                rank.save(Version(step.step, 1), "exit")
        return rank.leave("notice")

    answers = together(job.job, leave_again)
    assert {answer["committed"] for answer in answers} == {str(Version(step.step, 1 - node))}
    (path,) = (job.folder / "n0").glob("*.outcome.json")
    found = json.loads(path.read_text())
    assert (found["how"], found["level"], found["step"]) == ("left", "store", step.step)


@pytest.mark.parametrize("copies", [True, False])
def test_ranks_that_wait_for_the_last_commit_come_back_when_their_nodes_agent_dies(
    cluster: Cluster, copies: bool
) -> None:
    """The coordinator has heard that they leave, and does not refuse them. The commit takes seconds here. Where nobody
    else has what that node was to write it is waited for."""
    limits = {"memory": None, "bandwidth": 3e5}
    cluster.options = {**cluster.options, "policy": {"steps": 100_000, "seconds": None}, "limits": limits}
    if not copies:
        cluster.options["peers"] = None
    job = cluster
    job.start(0, 1)
    preempt(job, 0)
    leave(job)
    with Tasks("leave", pool_size=2) as tasks:
        first, second = (tasks.submit(rank.leave, "notice") for rank in job.job)
        assert job.job[0].wait_level(Version(job.job[0].step), "local")
        wait_for(lambda: job.status(0)["job"]["ranks"] == ["left", "left"])
        job.kill_agent(1)
        with pytest.raises(AgentError):
            second.result(BOUND_S)
        job.come_back(1)
        answers = [job.job[1].leave("notice"), first.result(BOUND_S)]
    assert answers[0]["committed"] == answers[1]["committed"] == str(Version(job.job[0].step)), "each is told the same"


def give_way(cluster: Cluster) -> list[bool]:
    """By node: whether all that its agent does at length gives way to training on the machine; false: none of it."""
    found: list[bool] = []
    for _, pid in sorted(cluster.pids.items()):
        own = os.getpriority(os.PRIO_PROCESS, pid)
        threads: list[int] = []
        for each in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                threads.append(os.getpriority(os.PRIO_PROCESS, int(each)))
        session = Path(f"/proc/{pid}/autogroup")
        shared = session.read_text().rpartition(" nice ")[2] if session.exists() else None  # between sessions
        if NICE in threads and shared in (None, "10\n"):
            found.append(True)
        elif set(threads) == {own} and shared in (None, "0\n"):
            found.append(False)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a thread less nice")
@pytest.mark.parametrize("asked", [0, 1])
def test_agents_give_way_to_training_but_for_what_is_to_be_saved_before_a_deadline(
    cluster: Cluster, asked: int
) -> None:
    """Where the processors are busy that leaves them a hundredth of one, and a commit takes minutes."""
    cluster.options = {**cluster.options, "policy": {"steps": 100_000, "seconds": None}}
    cluster.start(0, 1)
    cluster.save("peer", "store")
    wait_for(lambda: give_way(cluster) == [True, True])
    preempt(cluster, asked)
    wait_for(lambda: give_way(cluster) == [False, False])
    step = cluster.job[0].await_word(WordKind.HOLD)
    preempt(cluster, asked, cancel=True)
    await_standing(cluster, [])
    train(cluster.job, step + 3)
    wait_for(lambda: give_way(cluster) == [True, True])
    preempt(cluster, asked)
    leave(cluster)
    wait_for(lambda: give_way(cluster) == [False, False])
    together(cluster.job, lambda rank: rank.leave("notice"))
