"""torchtitan's Trainer with ckpt's CheckpointManager: the same command again after a kill gives the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckpt
from tests.integrations.runs import Script

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

SCRIPT = Path(__file__).parent / "scripts" / "torchtitan_train.py"
STEPS = range(1, 9)


def script(folder: Path, how: str = "ckpt", *args: str, world: int = 2) -> Script:
    env = {"CKPT_LINGER_S": "20", "CKPT_NOTICES": "given", "CKPT_EVENTS": str(folder / "events.jsonl")}
    return Script(SCRIPT, folder / f"records-{how}", (how, str(folder / how), *args), world=world, env=env)


def trajectories(what: Script) -> list[Any]:
    return [what.trajectory(rank) for rank in range(max(1, what.world))]


def test_kills_at_any_step_leave_losses_and_data_as_they_were(tmp_path: Path) -> None:
    """FSDP2 on two ranks. The text data begins its second pass within the run."""
    undisturbed = script(tmp_path, "none")
    undisturbed.run()
    ours = script(tmp_path, "ckpt", "--checkpoint.interval", "2")
    ours.run_killed(3)
    ours.run_killed(5)
    ours.run()
    assert trajectories(ours) == trajectories(undisturbed)
    assert list(ours.trajectory()) == [*STEPS]
    first, second, third = ([each.step for each in ours.steps() if each.pid == pid] for pid in lives(ours))
    assert first[0] == 1
    assert 1 < second[0] <= first[-1] + 1
    assert 3 < third[0] <= second[-1] + 1
    with ckpt.open(tmp_path / "ckpt" / "run") as run:
        assert [each.step for each in run.checkpoints] == [2, 4, 6, 8]
        assert "model.layers.1.attention.qkv_linear.wq.weight" in run.newest.tensors


def lives(what: Script) -> list[int]:
    """The process of rank 0 in each life, in order."""
    return list(dict.fromkeys(each.pid for each in what.steps()))
