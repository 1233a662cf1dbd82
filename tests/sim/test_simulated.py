"""The stand-ins of nodes in the benchmark of scale say what real agents say, and that benchmark runs small."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import scale, simulated
from benchmarks.simulated import RANKS, STEP_S, NearRank, Traffic, simulated_job
from ckpt.agent.net import framing
from ckpt.agent.runtime import memory_plan
from ckpt.backends import memory
from ckpt.ipc import secret
from ckpt.settings import read_settings
from tests.agent.fake import OPTIONS
from tests.sim import jobs
from tests.sim.agents import Fabric, SimChannel
from tests.sim.world import living

NODES, TENSORS, INTERVAL_S = 3, 10, 20.0
LIMIT_S = 600.0


class Tensors(NearRank):
    tensor_count = TENSORS


def real_traffic(patch: pytest.MonkeyPatch) -> Traffic:
    """Of one save, the second one, between the coordinator and the other nodes, all with their own agents."""
    traffic, send = Traffic(), SimChannel.send

    def counted(channel: SimChannel, fields: dict[str, Any], blobs: Sequence[bytes | memoryview] = ()) -> None:
        is_left_out = fields["t"] == "keep-connection" or "alarms" in fields
        if 0 in (channel.agent.number, channel.far.agent.number) and not is_left_out:
            traffic.count(fields, framing.make_payloads(fields, blobs))
        send(channel, fields, blobs)

    patch.setattr(SimChannel, "send", counted)
    patch.setattr(jobs, "SimRank", Tensors)
    patch.setattr(memory_plan, "free_bytes", lambda *_: simulated.FREE_BYTES)
    with living(0) as world:
        fabric = Fabric(world, "memory://scale-real", replace(read_settings(), notices="off"))
        options = {**OPTIONS, "policy": {"steps": None, "seconds": INTERVAL_S}, "peers": {"replicas": 1}}
        job = jobs.SimJob(fabric, [rank // RANKS for rank in range(NODES * RANKS)], secret.make_secret(), options)
        job.start(10_000, lambda _: STEP_S)
        known = job.ranks[0].levels

        def is_saved() -> bool:
            assert all(ok for ok, _ in known.values()), known
            return {level for _, level in known} == {"local", "peer", "store"}

        def wait(seconds: float) -> None:
            until_s = world.now_s + seconds
            world.at(seconds, lambda: None)
            world.run(lambda: world.now_s >= until_s, LIMIT_S)

        world.run(is_saved, LIMIT_S)
        wait(2.0)
        known.clear()
        before = traffic.copy()
        world.run(is_saved, LIMIT_S)
        wait(1.0)
        found = traffic.since(before)
        job.die(0.01)
        wait(1.0)
        fabric.close()
    del memory._STORES["memory://scale-real"]
    return found


def test_the_stand_in_of_a_node_sends_and_gets_the_messages_of_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = real_traffic(monkeypatch)
    monkeypatch.undo()
    with simulated_job(NODES, TENSORS, INTERVAL_S) as job:
        (saved,) = job.saves(1, 1.0)
    for of in (real.messages, real.bytes):
        of.pop("node-report")
    assert saved.traffic.messages == real.messages
    assert saved.traffic.bytes.keys() == real.bytes.keys()
    for kind, count in real.bytes.items():
        # Names of agents, addresses, and numbers of messages have other lengths.
        assert saved.traffic.bytes[kind] == pytest.approx(count, rel=0.05), kind


def test_the_benchmark_of_scale_runs_and_names_its_machine(tmp_path, capsys):
    results = tmp_path / "scale.json"
    assert scale.main(["--small", "--json", str(results)]) == 0
    found = json.loads(results.read_text())
    assert found["machine"]["name"] in capsys.readouterr().out
    named = {row["question"] for row in found["rows"]}
    assert {
        "1000 tensors per rank, sharded: read the record, 4 nodes",
        "a save: CPU, growth from 1 to 4 nodes",
        "a save: messages 'from-rank snapshot-staged', 4 nodes",
        "a folder: ckpt ls, 20 checkpoints",
    } <= named
