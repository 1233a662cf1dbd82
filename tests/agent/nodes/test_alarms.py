"""Failures foreseen in a job of several nodes: each reads its own signals, and the coordinator has the books."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import CkptError
from ckpt.predict.model import save
from tests.agent.node.test_agent import wait_for
from tests.agent.nodes.cluster import Cluster, train
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
