"""Failures foreseen in a job of several nodes: each reads its own signals, and the coordinator has the books."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import CkptError
from ckpt.predict.model import save
from ckpt.types import Identity
from tests.agent.adaptive.test_alarms import ADAPTIVE, good, teach
from tests.agent.node.test_agent import wait_for
from tests.agent.nodes.cluster import COPIED, Cluster, pid_of, train
from tests.predict.models import certain


@pytest.fixture(autouse=True)
def foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model raises an alarm on every node at once."""
    save(certain(0.9), tmp_path / "model")
    monkeypatch.setenv("CKPT_SIGNALS", "on")
    monkeypatch.setenv("CKPT_SIGNALS_S", "0.05")
    monkeypatch.setenv("CKPT_PREDICTOR", str(tmp_path / "model"))


def predictions(cluster: Cluster, node: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = cluster.status(node)["predictions"]
    return found


def standing(cluster: Cluster) -> set[tuple[str, str]]:
    """By the model: this machine may be busy enough for other alarms, too."""
    return {(each["node"], each["source"]) for each in predictions(cluster)["standing"] if each["source"] == "model"}


def begin(cluster: Cluster, *spread: int) -> list[str]:
    """The names of the nodes, once all have raised their alarm with the coordinator."""
    cluster.start(*spread)
    train(cluster.job, 2)  # a node reads once its ranks are in a step
    names = [str(node["name"]) for node in cluster.job[0].nodes]
    wait_for(lambda: standing(cluster) == {("", "model"), *((name, "model") for name in names[1:])})
    return names


def test_the_coordinator_hears_of_every_nodes_alarms(cluster: Cluster) -> None:
    begin(cluster, 0, 1, 2)
    assert predictions(cluster, 1)["reading"] is True
    assert predictions(cluster, 1)["standing"] == [], "the books are the coordinator's"
    cluster.finish()


def test_a_lost_node_makes_its_own_alarm_come_true_and_no_others(cluster: Cluster) -> None:
    begin(cluster, 0, 1)
    cluster.kill(1)
    with contextlib.suppress(CkptError):
        cluster.job[0].leave_at_once()  # it fails without the other
    wait_for(lambda: predictions(cluster)["sources"]["model"]["outcomes"] == 1)
    model = predictions(cluster)["sources"]["model"]
    assert model["true"] + model["late"] == 1
    assert model["missed"] == model["false"] == 0
    assert standing(cluster) == {("", "model")}, "that of the node which only failed of the other's loss"


def test_each_node_is_told_its_pace_against_its_peers(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one takes half as many steps as the others, which do not wait for it."""
    path = tmp_path / "signals.jsonl"
    monkeypatch.setenv("CKPT_SIGNALS_LOG", str(path))
    begin(cluster, 0, 1, 2)

    def paces() -> dict[int, float]:
        whole = path.read_text().rpartition("\n")[0]  # the last line may be only begun
        read = [json.loads(line) for line in whole.splitlines()]
        return {line["pid"]: line["values"]["step.ratio"] for line in read if "step.ratio" in line.get("values", {})}

    def is_slow(found: dict[int, float]) -> bool:
        return len(found) == 3 and found[pid_of(slow)] == max(found.values()) and 1.2 < found[pid_of(slow)] < 4

    *quick, slow = cluster.job
    deadline = time.monotonic() + 100
    while not is_slow(paces()):  # the coordinator looks every 5 s, and on a busy machine few steps are taken meanwhile
        assert time.monotonic() < deadline, paces()
        train(quick, quick[0].step + 2)
        train([slow], slow.step + 1)
        threading.Event().wait(0.02)
    train([slow], quick[0].step)
    cluster.finish()


@pytest.mark.parametrize("count", [1, 2])
def test_nodes_that_are_said_to_fail_soon_keep_nothing_for_others_any_more(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Two of a pair are parted, too. Nor is the checkpoint that is taken for their sake kept so."""
    monkeypatch.setenv("CKPT_SIGNALS", "off")
    cluster.options = {**COPIED, "policy": ADAPTIVE["policy"]}
    cluster.start(0, 1, 2, 3)
    train(cluster.job, 1)
    cluster.finish()
    teach(cluster.url, {"model": good()})
    cluster.start(0, 1, 2, 3)
    ((one, (other,)),) = [
        (node, kept_by) for node, kept_by in cluster.keepers().items() if 0 not in (node, *kept_by) and [node] < kept_by
    ]
    third = 6 - one - other
    assert cluster.keepers() == {0: [third], third: [0], one: [other], other: [one]}
    monkeypatch.setenv("CKPT_SIGNALS", "on")
    failing = (one, other)[:count]
    for node in failing:  # whose agents are started again, and read signals
        cluster.kill_agent(node)
        cluster.come_back(node)
    train(cluster.job, cluster.job[0].step + 1)  # a node reads once its ranks are in a step

    def keeping() -> set[int]:
        return {keeper for keepers in cluster.keepers().values() for keeper in keepers}

    wait_for(lambda: len(standing(cluster)) == count)
    wait_for(lambda: keeping().isdisjoint(failing))  # it may be settled anew after that, among the others
    step = cluster.checkpoint("peer")
    cluster.await_event("prediction.acted")
    kept = {
        node: {Identity.parse(each).version.step: ranks for each, ranks in cluster.status(node)["copies"].items()}
        for node in range(4)
    }
    assert all(step not in kept[node] for node in failing)
    assert {rank for node in range(4) for rank in kept[node].get(step, [])} == {0, 1, 2, 3}
    cluster.finish()
