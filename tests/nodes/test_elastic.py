"""Nodes of a torchrun job are lost and come: training goes on, from memory alone and bit for bit."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.nodes.jobs import ELASTIC, Elastic, check_memory
from tests.nodes.lan import Lan

pytestmark = ELASTIC

VETH_BYTES_S = 10_000_000_000 / 8  # what the kernel says of these links


def test_from_4_nodes_to_3_to_2_to_4_in_other_meshes_the_state_is_intact_and_comes_from_memory(
    lan: Lan, tmp_path: Path
) -> None:
    mesh = tmp_path / "mesh.json"
    mesh.write_text("[4]")
    job = Elastic(lan, tmp_path, 100_000, "--every", "10", "--mesh", str(mesh))
    first = job.start(4)
    job.safe_after(0.0, world=4)
    placed = job.wait_for(lambda line: line.get("event") == "replication.placed")["data"]
    for row in placed["nodes"]:  # what a link carries is known of each
        assert row["seconds"] == pytest.approx(max(row["sends_bytes"], row["receives_bytes"]) / VETH_BYTES_S), placed
    for world, victim in ((3, job.node_of(0)), (2, job.node_of(1))):
        safe = job.safe_step()
        killed = job.kill(victim)
        check_memory(job.restored(world, killed), at_least=safe)
        job.safe_after(killed, world=world)
    mesh.write_text("[2, 2]")
    safe, grown = job.safe_step(), time.time()
    job.start(2)
    came = job.restored(4, grown)
    check_memory(came, at_least=safe)
    trained = [line["step"] for line in job.lines() if "step" in line and line["at"] < came[0]["at"]]
    assert came[0]["restored"] == max(trained), "who is told to leave by SIGTERM saves its last step first"
    assert job.wait_for(lambda line: "ready" in line and line["world"] == 4, grown)["ready"] == [2, 2]
    job.safe_after(grown, world=4)
    lines = job.finish()
    assert {line["world"] for line in lines if line["node"] in first} == {2, 3, 4}
