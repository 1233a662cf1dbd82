"""Whatever is killed, the next start goes on from the newest complete checkpoint, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.session.loops import losses
from tests.session.scripts import losses_of, torchrun, train

LINGER = {"CKPT_LINGER_S": "60"}


def test_a_killed_trainer_is_restored_from_this_hosts_memory(tmp_path: Path) -> None:
    first = train(tmp_path / "1.log", tmp_path / "run", 400, **LINGER)
    first.wait_for(lambda line: line.get("step") == 60)
    first.kill()
    second = train(tmp_path / "2.log", tmp_path / "run", 80, "--seed", "1", **LINGER)
    lines = second.end()
    came = next(line for line in lines if "restored" in line)
    assert came["level"] == "local"
    assert 10 <= came["restored"] <= 80
    both = losses_of(first.lines()) | losses_of(lines)
    assert [both[step] for step in range(1, 81)] == losses(80)


def test_a_killed_trainer_and_agent_are_restored_from_the_store(tmp_path: Path) -> None:
    first = train(tmp_path / "1.log", tmp_path / "run", 400, **LINGER)
    first.wait_for(lambda line: line.get("step") == 60)
    _kill_agent()
    first.kill()
    _kill_agent()
    second = train(tmp_path / "2.log", tmp_path / "run", 80, "--seed", "1", CKPT_HEARTBEAT_S="0.5")
    lines = second.end()
    came = next(line for line in lines if "restored" in line)
    assert came["level"] == "store"
    both = losses_of(first.lines()) | losses_of(lines)
    assert [both[step] for step in range(1, 81)] == losses(80)


@pytest.mark.torchrun
def test_a_torchrun_killed_alone_leaves_no_second_writer(tmp_path: Path) -> None:
    """kill -9 of torchrun leaves its workers training; a new start takes their place."""
    first = torchrun(tmp_path / "1.log", 2, "tests.session.train_script", str(tmp_path / "run"), "2000", **LINGER)
    first.wait_for(lambda line: line.get("step") == 60)
    first.kill()
    args = (str(tmp_path / "run"), "100", "--seed", "1")
    lines = torchrun(tmp_path / "2.log", 2, "tests.session.train_script", *args, **LINGER).end()
    came = next(line for line in lines if "restored" in line)
    assert came["level"] == "local"
    assert came["restored"] >= 10
    text = (tmp_path / "1.log").read_text()
    assert "superseded" in text


def _kill_agent() -> None:
    import psutil

    folder = os.environ["CKPT_RUNTIME_DIR"]
    for process in psutil.process_iter():
        try:
            if "ckpt.agent.main" in process.cmdline() and process.environ().get("CKPT_RUNTIME_DIR") == folder:
                process.kill()
                process.wait(10)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
