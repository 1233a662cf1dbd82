"""Training on a real CUDA device is killed, and goes on bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.checkpointer.loops import wait_agent_gone
from tests.checkpointer.scripts import Line, Script, losses_of, torchrun

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LINGER = {"CKPT_LINGER_S": "60"}
SCRIPT = "tests.checkpointer.device_script"


def start(log: Path, ranks: int, url: str, steps: int, kind: str, **env: str) -> Script:
    return torchrun(log, ranks, SCRIPT, url, str(steps), kind, **env)


def kill_ranks(script: Script) -> None:
    script.kill()
    for pid in {line["pid"] for line in script.lines() if "pid" in line}:
        os.kill(pid, signal.SIGKILL)


def fallen(lines: list[Line]) -> list[str]:
    return [f"{line['event']}: {line['message']}" for line in lines if line.get("event") in FALLEN]


FALLEN = ("deferred_copy.off", "deferred_copy.changed", "snapshot.abandoned", "snapshot.unpinned", "save.failed")


@pytest.mark.parametrize("level", ["local", "store"])
@pytest.mark.parametrize(("kind", "ranks"), [("fused", 1), ("graph", 1), ("compiled", 1), ("ema", 1), ("fused", 2)])
def test_a_killed_job_goes_on_bit_for_bit(kind: str, ranks: int, level: str, tmp_path: Path) -> None:
    env = LINGER if level == "local" else {"CKPT_LINGER_S": "0.1"}
    whole = start(tmp_path / "0.log", ranks, str(tmp_path / "whole"), 60, kind)
    first = start(tmp_path / "1.log", ranks, str(tmp_path / "run"), 100_000, kind, **env)
    first.wait_for(lambda line: line.get("step", 0) > 30 and line.get("loss") is not None)
    first.wait_for(lambda line: line.get("event") == "commit.done")
    kill_ranks(first)
    expected = whole.end()
    if level == "store":
        wait_agent_gone(tmp_path / "run")
    reached = max(losses_of(first.lines()))
    lines = start(tmp_path / "2.log", ranks, str(tmp_path / "run"), max(reached, 60), kind, **env).end()
    came = next(line for line in lines if "restored" in line)
    assert came["level"] == level
    assert came["restored"] >= 3
    both = losses_of(first.lines()) | losses_of(lines)
    assert [both[step] for step in range(1, 61)] == [losses_of(expected)[step] for step in range(1, 61)]
    if kind != "graph":  # whose replays nothing announces
        assert fallen(lines) == []
        assert next(line["receipt"] for line in lines if "receipt" in line)["proven"]
