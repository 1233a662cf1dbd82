"""How much time a notice leaves to one of two nodes decides what becomes of the last step: real agents, whose links to
the store are limited. A commit takes seconds, copies take less unless they are held back."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import AgentError
from ckpt.ipc.notice_sources import Sources
from ckpt.threads import Tasks
from ckpt.types import Version
from tests.agent.node.test_agent import one_step, together, wait_for
from tests.agent.nodes.cluster import BOUND_S, Cluster, train

STORE = 2e5  # bytes a second of each agent's


def start(cluster: Cluster, word: Path, doomed: int = 1, store: float = STORE) -> int:
    """Two nodes, of which one looks for that file; a first checkpoint shows what saving takes. Its step."""
    limits = {"memory": None, "bandwidth": store, "peer_bandwidth": None}
    policy = {"steps": 100_000, "seconds": None}
    cluster.options = {**cluster.options, "policy": policy, "limits": limits, "codec": "raw"}
    cluster.connect(0, 1)[doomed].notices = Sources("given", file=str(word)).fields()
    cluster.enter()
    train(cluster.job, 1)
    return cluster.save(*(["peer"] if cluster.options.get("peers") else []), "store").step


def warn(cluster: Cluster, word: Path, lead_s: float, after: int = 50) -> int:
    """The second node goes away so soon; the job trains until all ranks are told to leave. The step of that. `after`:
    so many steps, by which the pace is known."""
    part = word.with_suffix(".part")
    for attempts in range(1000):
        if attempts == after:
            part.write_text(f"+{lead_s:g}")
            os.rename(part, word)
        left = together(cluster.job, one_step)
        if any(left):
            assert all(left)
            return cluster.job[0].step
        threading.Event().wait(0.05)
    raise AssertionError("they were never told to leave")


def outcome(cluster: Cluster) -> dict[str, Any]:
    told = cluster.await_event("notice.outcome")
    (path,) = (cluster.folder / "n0").glob("*.outcome.json")
    found = json.loads(path.read_text())
    assert found["how"] == told["how"] == "left"
    return dict(found)


def test_where_a_commit_takes_too_long_the_node_that_stays_has_the_last_step_and_commits_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    first = start(cluster, tmp_path / "word")
    step = warn(cluster, tmp_path / "word", 6.0)
    with Tasks("leave", pool_size=2) as tasks:
        here, gone = (tasks.submit(rank.leave, "notice") for rank in cluster.job)
        assert cluster.job[0].wait_level(Version(step), "peer")
        cluster.kill_agent(1)  # its machine, as soon as it is not needed any more
        with pytest.raises(AgentError):
            gone.result(BOUND_S)
        told = outcome(cluster)
        assert (told["level"], told["step"], told["peer_step"]) == ("peer", step, step)
        assert told["committed_step"] == first
        assert told["left_s"] > 0
        assert here.result(BOUND_S)["committed"] == str(Version(step))
    assert cluster.committed_steps() == [first, step]


def test_where_it_is_the_coordinators_own_node_that_goes_the_other_one_commits_the_last_step(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_LINGER_S", "40")
    first = start(cluster, tmp_path / "word", doomed=0)
    step = warn(cluster, tmp_path / "word", 6.0)
    with Tasks("leave", pool_size=2) as tasks:
        left = [tasks.submit(rank.leave, "notice") for rank in cluster.job]
        assert cluster.job[0].wait_level(Version(step), "peer")
        told = outcome(cluster)
        assert (told["level"], told["step"], told["committed_step"]) == ("peer", step, first)
        cluster.kill_agent(0)  # its machine, as soon as it is not needed any more
        for each in left:
            with pytest.raises(AgentError):
                each.result(BOUND_S)
    cluster.hang_up()
    wait_for(lambda: len(cluster.committed_steps()) > 1)
    assert cluster.committed_steps() == [first, step]


def test_a_commit_under_way_is_broken_off_on_all_nodes_for_the_last_one_which_is_there_in_time_then(
    cluster: Cluster, tmp_path: Path
) -> None:
    """A commit takes ten seconds. One has just begun when a notice says fifteen."""
    cluster.options = {**cluster.options, "peers": None}
    first = start(cluster, tmp_path / "word", store=STORE / 2)
    for _ in range(50):
        together(cluster.job, one_step)
        threading.Event().wait(0.05)
    given_up = cluster.save().step
    step = warn(cluster, tmp_path / "word", 15.0, after=0)
    with Tasks("leave", pool_size=2) as tasks:
        answers = [tasks.submit(rank.leave, "notice") for rank in cluster.job]
        told = outcome(cluster)
        assert (told["level"], told["step"], told["committed_step"]) == ("store", step, step)
        assert told["left_s"] > 0
        for answer in answers:
            found = answer.result(BOUND_S)
            assert (found["committed"], found["error"]) == (str(Version(step)), None)
    assert not cluster.job[0].wait_level(Version(given_up, 1), "store")
    assert cluster.committed_steps() == [first, step]
