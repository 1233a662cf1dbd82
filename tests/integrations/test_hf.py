"""The Trainer of transformers with ckpt's callback: the same command again after a kill gives the same run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ckpt
from tests.integrations.forked import Forked

SCRIPT = Path(__file__).parent / "scripts" / "hf_train.py"
PRELOADED = ("transformers.trainer", "peft", "ckpt.integrations.hf")


def script(folder: Path, /, how: str = "ckpt", world: int = 0, **options: Any) -> Forked:
    told = json.dumps({"how": how, "folder": str(folder / how), **options})
    env = {"CKPT_LINGER_S": "20", "CKPT_NOTICES": "given", "CKPT_EVENTS": str(folder / "events.jsonl")}
    return Forked(SCRIPT, folder / f"records-{how}", (told,), world=world, env=env)


def report(output: str) -> dict[str, Any]:
    """What the script says at its end: logs, the best metric, and a sum of each weight."""
    (line,) = [line for line in output.splitlines() if line.startswith("REPORT ")]
    found: dict[str, Any] = json.loads(line.removeprefix("REPORT "))
    return found


def killed(what: Forked, *moments: str) -> str:
    """Runs the script once for each moment, "step.batch", at which it dies by SIGKILL; then to its end."""
    for moment in moments:
        what.env["KILL"] = moment
        life = what.start()
        assert life.wait() == -9, life.output()
    what.env.pop("KILL", None)
    return what.run()


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [each for each in lines if each["event"] == name]


def same(ours: dict[str, Any], other: dict[str, Any]) -> bool:
    return {**ours, "read": 0} == {**other, "read": 0}


def check_killed(tmp_path: Path, *moments: str, **options: Any) -> tuple[Forked, dict[str, Any]]:
    """Killed at these moments, a run has the losses, samples and logs of an undisturbed one. Its script, and report."""
    undisturbed, ours = (script(tmp_path, how, **options) for how in ("none", "ckpt"))
    expected = report(undisturbed.run())
    found = report(killed(ours, *moments))
    assert ours.trajectory() == undisturbed.trajectory()
    assert same(found, expected)
    return ours, found


def test_kills_at_any_moment_leave_losses_and_samples_as_they_were(tmp_path: Path) -> None:
    """Killed within the accumulation of step 3, again in the same epoch, and at the boundary of epochs."""
    ours, _ = check_killed(tmp_path, "3.2", "4.1", "6.1")
    assert [each.step for each in ours.steps()] == list(range(1, 16))
    with ckpt.open(tmp_path / "ckpt/run") as run:
        assert run.newest.step == 15


def test_a_resume_in_mid_epoch_reads_no_sample_of_a_map_dataset_again(tmp_path: Path) -> None:
    ours = script(tmp_path, args={"num_train_epochs": 1})
    assert report(killed(ours, "4.1"))["read"] == 40 - 3 * 8
    assert sorted(number for each in ours.steps() for number in each.samples) == list(range(40))


def test_the_trainers_own_resume_draws_other_numbers_and_other_data(tmp_path: Path) -> None:
    """The same script, killed in its second epoch, whose order comes from the global generators (group_by_length). The
    Trainer's own resume draws a new order, so it repeats some samples of the epoch and skips others."""
    args = {"train_sampling_strategy": "group_by_length", "num_train_epochs": 2}
    undisturbed, own, ours = (script(tmp_path, how, args=args) for how in ("none", "own", "ckpt"))
    expected = report(undisturbed.run())
    assert same(report(killed(ours, "8.1")), expected)
    assert ours.trajectory() == undisturbed.trajectory()
    found = report(killed(own, "8.1"))
    assert [each.step for each in own.steps()] == list(range(1, 11))
    assert own.trajectory()[7] == undisturbed.trajectory()[7]
    assert sorted(number for each in own.steps()[5:] for number in each.samples) != list(range(40))
    assert found["logs"] != expected["logs"]


def test_early_stopping_and_the_best_model_outlive_a_kill_in_the_evaluation(tmp_path: Path) -> None:
    """The Trainer's own files of the best model lie beside ours. The end, started again, trains nothing."""
    args = {
        "num_train_epochs": 8,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "save_only_model": True,
        "learning_rate": 1.0,
    }
    options = {"args": args, "evaluate": True, "patience": 2}
    ours, found = check_killed(tmp_path, "25.0", "28.1", **options)
    assert (found["best_step"], max(ours.trajectory())) == (20, 30)
    before = len(ours.steps())
    assert same(report(ours.run()), found)
    assert len(ours.steps()) == before
    assert len(events(tmp_path, "run.finished")) == 1


def test_a_lora_model_resumes_and_repeats_only_what_was_not_saved(tmp_path: Path) -> None:
    ours, _ = check_killed(tmp_path, "6.2", lora=True, every=2)
    assert [each.step for each in ours.steps()] == [1, 2, 3, 4, 5, *range(5, 16)]


def test_two_ranks_leave_at_one_step_on_sigterm_and_go_on_together(tmp_path: Path) -> None:
    """In the second epoch, so that the sampler's epoch counts."""
    options = {"pause_s": 0.2, "samples": 64, "args": {"num_train_epochs": 3}}
    undisturbed = script(tmp_path, "none", world=2, **{**options, "pause_s": 0})
    undisturbed.run()
    ours = script(tmp_path, world=2, **options)
    code, output = ours.run_signalled(5)
    assert code != 0, output
    left = [ours.steps(rank)[-1].step for rank in (0, 1)]
    assert left[0] == left[1] < 12, output
    with ckpt.open(tmp_path / "ckpt/run") as run:
        assert run.newest.step == left[0]
    ours.run()
    for rank in (0, 1):
        assert [each.step for each in ours.steps(rank)] == list(range(1, 13))
        assert ours.trajectory(rank) == undisturbed.trajectory(rank)


def test_a_model_that_two_ranks_shard_goes_on_there_and_on_one_rank(tmp_path: Path) -> None:
    """FSDP2. One rank then takes twice the batch, and goes on in the middle of the epoch with the same samples."""
    options: dict[str, Any] = {"samples": 64, "noise": False}
    undisturbed, two = (script(tmp_path, how, world=2, fsdp=True, **options) for how in ("none", "ckpt"))
    undisturbed.run()
    for moment in ("3.2", "6.1"):
        two.env["KILL"] = moment
        assert two.start().wait() == -9
    for rank in (0, 1):
        expected = undisturbed.trajectory(rank)
        assert two.trajectory(rank) == {step: expected[step] for step in range(1, 6)}
    one = script(tmp_path, args={"per_device_train_batch_size": 8}, **options)
    one.run()
    assert [each.step for each in one.steps()] == list(range(1, 13))
    for step in range(6, 13):
        both = [number for rank in (0, 1) for number in undisturbed.trajectory(rank)[step][1]]
        assert sorted(both) == list(one.trajectory()[step][1])


def test_a_trainer_that_also_saves_is_told_and_our_checkpoint_wins(tmp_path: Path) -> None:
    args = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2, "dataloader_num_workers": 1}
    ours, _ = check_killed(tmp_path, "4.2", args=args, resume=True, noise=False)
    assert [each.step for each in ours.steps()] == list(range(1, 11))
    assert len(events(tmp_path, "framework.also_saves")) == 2
    (ignored,) = events(tmp_path, "framework.resume_ignored")
    assert "checkpoint-2' is not used" in ignored["message"]


def test_a_stream_is_read_again_up_to_its_position_and_that_is_said(tmp_path: Path) -> None:
    ours, _ = check_killed(tmp_path, "4.2", "8.1", stream=True, args={"max_steps": 12})
    assert [each.step for each in ours.steps()] == list(range(1, 13))
    assert len(events(tmp_path, "loader.inexact")) == 3


def test_changed_data_in_mid_epoch_is_refused_with_a_way_out(tmp_path: Path) -> None:
    ours = script(tmp_path)
    ours.env["KILL"] = "3.2"
    assert ours.start().wait() == -9
    for change, message in (
        ({"samples": 48}, "samples was 40 and is 48"),
        (
            {"args": {"gradient_accumulation_steps": 3}},
            "16 samples into its epoch, which is no whole number of updates",
        ),
    ):
        life = script(tmp_path, **change).start()
        assert life.wait() == 1
        assert message in life.output()
        assert "ignore_data_skip=True" in life.output()


def test_another_size_of_length_groups_in_mid_epoch_is_refused(tmp_path: Path) -> None:
    """The epoch's order depends on the size. With the same size, another batch size goes on with the same samples."""
    grouped = {"train_sampling_strategy": "group_by_length"}
    ours = script(tmp_path, args=grouped)
    ours.env["KILL"] = "3.2"
    assert ours.start().wait() == -9
    life = script(tmp_path, args={**grouped, "gradient_accumulation_steps": 4}).start()
    assert life.wait() == 1
    assert "length_groups was 8 and is 16" in life.output()
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    again = script(tmp_path, args={**grouped, **sizes})
    again.run()
    assert sorted(number for each in again.steps()[:5] for number in each.samples) == list(range(40))


def test_a_run_begins_with_the_trainers_own_checkpoint_and_then_keeps_ours(tmp_path: Path) -> None:
    """Killed in mid-epoch and at an epoch's beginning, where the Trainer would load its own checkpoint's generators."""
    options = {"noise": False, "resume": True}
    own = script(tmp_path, "own", **options)
    own.run()
    for step in range(4, 16):
        shutil.rmtree(tmp_path / f"own/own/checkpoint-{step}")
    ours = script(tmp_path, folder=str(tmp_path / "own"), **options)
    killed(ours, "5.2", "6.1")
    assert [each.step for each in ours.steps()] == list(range(4, 16))
    assert ours.trajectory() == {step: own.trajectory()[step] for step in range(4, 16)}


def test_another_version_and_a_callback_that_comes_late_are_told(tmp_path: Path) -> None:
    script(tmp_path, late="attached", version="9.9.0", args={"max_steps": 2}).run()
    (told,) = events(tmp_path, "framework.untested")
    assert "was tested with transformers 5.24; this is 9.9.0" in told["message"]
    life = script(tmp_path, late="added").start()
    assert life.wait() == 1
    assert "callback.attach(trainer) instead of trainer.add_callback(callback)" in life.output()
    life = script(tmp_path, lacks="_inner_training_loop").start()
    assert life.wait() == 1
    assert "has no Trainer._inner_training_loop" in life.output()
