"""torchtitan's Trainer with ckpt's CheckpointManager: the same command again after a kill gives the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import ckpt
from tests.integrations.runs import REPOSITORY, Script

TORCHTITAN = REPOSITORY / ".venv" / "torchtitan"  # which `make torchtitan` makes
pytestmark = pytest.mark.skipif(not TORCHTITAN.exists(), reason="torchtitan is not installed: make torchtitan")

SCRIPT = Path(__file__).parent / "scripts" / "torchtitan_train.py"
STEPS = range(1, 9)
HOWS = ("ckpt", "own", "none")


def script(folder: Path, how: str = "ckpt", *args: str, world: int = 2) -> Script:
    env = {"CKPT_LINGER_S": "20", "CKPT_NOTICES": "given", "CKPT_EVENTS": str(folder / "events.jsonl")}
    env["PYTHONPATH"] = str(TORCHTITAN)
    return Script(SCRIPT, folder / f"records-{how}", (how, str(folder / how), *args), world=world, env=env)


def trajectories(what: Script) -> list[Any]:
    return [what.trajectory(rank) for rank in range(max(1, what.world))]


def lives(what: Script) -> list[int]:
    """The process of rank 0 in each life, in order."""
    return list(dict.fromkeys(each.pid for each in what.steps()))


def warned(folder: Path) -> set[str]:
    """The warnings about the state, the loader and the optimizers."""
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    kinds = ("loader.", "optimizer.", "framework.", "restore.", "step.")
    return {each["event"] for each in lines if each["event"].startswith(kinds)}


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
    assert 3 <= third[0] <= second[-1] + 1
    with ckpt.open(tmp_path / "ckpt" / "run") as run:
        assert [each.step for each in run.checkpoints] == [2, 4, 6, 8]
        assert "model.layers.1.attention.qkv_linear.wq.weight" in run.newest.tensors
    assert not warned(tmp_path)


def test_a_notice_saves_the_step_where_torchtitan_begins_anew(tmp_path: Path) -> None:
    """SIGTERM long before the next save of the policy or of torchtitan. Both then give the same losses."""
    ours, own = (script(tmp_path, how, "--checkpoint.interval", "100") for how in ("ckpt", "own"))
    for each in (ours, own):
        code, _ = each.run_signalled(4)
        assert code != 0
        each.run()
    assert trajectories(ours) == trajectories(own)
    assert [len(ours.steps(rank)) for rank in (0, 1)] == [8, 8]
    assert [each.step for each in own.steps()].count(1) == 2


def test_weights_go_to_hugging_face_and_back_as_with_torchtitan(tmp_path: Path) -> None:
    script(tmp_path / "first", "ckpt", "--training.steps", "2", "--checkpoint.last_save_in_hf", world=1).run()
    weights = tmp_path / "first" / "ckpt" / "hf" / "step-2"
    assert "model.layers.1.self_attn.q_proj.weight" in load_file(weights / "model-00001-of-00001.safetensors")
    given = ("--training.steps", "2", "--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path", str(weights))
    ours, own, anew = (script(tmp_path, how, *given[: 5 if how != "none" else 2], world=1) for how in HOWS)
    for each in (ours, own, anew):
        each.run()
    assert ours.trajectory() == own.trajectory() != anew.trajectory()
    # At a restart the checkpoint wins.
    before = len(ours.steps())
    ours.args = (*ours.args, "--training.steps", "3")
    ours.run()
    assert [each.step for each in ours.steps()[before:]] == [3]


def test_a_run_of_torchtitans_own_manager_goes_on(tmp_path: Path) -> None:
    own = script(tmp_path, "own", "--checkpoint.interval", "4")
    own.run()
    given = ("--checkpoint.initial_load_path", str(tmp_path / "own" / "run" / "step-4"))
    ours = script(tmp_path, "ckpt", *given, "--checkpoint.no-initial_load_model_only", "--checkpoint.interval", "2")
    ours.run_killed(6)
    ours.run()
    assert [ours.trajectory(rank) for rank in (0, 1)] == [
        {step: own.trajectory(rank)[step] for step in range(5, 9)} for rank in (0, 1)
    ]


def test_data_that_runs_out_ends_the_run_at_its_last_step(tmp_path: Path) -> None:
    """torchtitan counts one step more, and cancels it."""
    ours = script(tmp_path, "ckpt", "--dataloader.no-infinite", "--training.steps", "40", world=1)
    ours.run()
    ours.run()
    assert [each.step for each in ours.steps()] == [*range(1, 10)]
    with ckpt.open(tmp_path / "ckpt" / "run") as run:
        assert (run.newest.step, run.newest.values()["train_state"]["step"]) == (9, 9)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"load_step": 3}, "load_step cannot be used.* the newest checkpoint is restored"),
        ({"load_only": True}, "load_only cannot be used"),
        ({"last_save_model_only": True}, "the last step is saved whole"),
        ({"create_seed_checkpoint": True}, "give it as initial_load_path"),
        ({"exclude_from_loading": ["dataloader"]}, "a restart restores everything"),
    ],
)
def test_what_would_be_ignored_is_refused(options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TORCHTITAN)
    from ckpt.integrations.torchtitan import CheckpointManager

    with pytest.raises(ckpt.UsageError, match=says):
        CheckpointManager.Config(**options)
