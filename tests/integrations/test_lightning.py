"""ckpt in Lightning's Trainer and Fabric: killed runs are bit for bit the undisturbed one, data included."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.integrations.forked import Forked

SCRIPTS = Path(__file__).parent / "scripts"
PRELOADED = ("lightning.pytorch", "torchdata.stateful_dataloader", "ckpt.integrations.lightning")


def train(folder: Path, name: str, world: int = 0, script: str = "train", **options: object) -> Forked:
    """A script of Lightning's with a URL and records of its own."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    told = json.dumps({"url": str(folder / name / "run"), "world": max(1, world), **options})
    env = {"CKPT_LINGER_S": "20", "CUDA_VISIBLE_DEVICES": "", "CKPT_NOTICES": "given"}
    return Forked(SCRIPTS / f"lightning_{script}.py", folder / name / "records", (told,), world=world, env=env)


def final(output: str) -> list[str]:
    """What the script says of validations and of the end."""
    return re.findall(r"^(?:validated|final|steps) .*$", output, re.MULTILINE)


def check_equal(folder: Path, kills: tuple[int, ...], **options: object) -> list[str]:
    """Runs a script undisturbed, and again with a kill after each of these batches. Returns the latter's outputs."""
    whole, killed = train(folder, "whole", pause=0, every=1000, **options), train(folder, "killed", **options)
    said = final(whole.run())
    outputs = [killed.run_killed(each) for each in kills]
    outputs.append(killed.run())
    assert killed.trajectory() == whole.trajectory()
    assert len({each.pid for each in killed.steps()}) == len(kills) + 1
    assert final(outputs[-1])[-2:] == said[-2:]
    assert set(final("\n".join(outputs))) == set(said)
    return outputs


def epoch(script: Forked, first: int, last: int) -> list[int]:
    """The samples that all ranks saw in these batches, sorted."""
    ranks = range(max(1, script.world))
    return sorted(
        each for rank in ranks for step in range(first, last + 1) for each in script.trajectory(rank)[step][1]
    )


CASES: dict[str, tuple[tuple[int, ...], dict[str, object]]] = {
    # Twice within an epoch, at its last batch, and after it; shuffled data, dropout, noise in the dataset.
    "plain": ((2, 5, 8, 10), {}),
    # Three batches make an update, and the last two of an epoch.
    "accumulation": ((4, 9, 13), {"accumulate": 3, "workers": 2}),
    # The optimizer asks for the number of steps, for which Lightning makes the loader and its workers early.
    "persistent workers": ((3, 11), {"workers": 2, "persistent": True, "estimate": True}),
    # Before stochastic weight averaging, and in mid-epoch of it; the module keeps a count by on_save_checkpoint.
    "averaging": ((5, 13, 19), {"swa": True, "epochs": 3, "val": 0.5}),
    "fabric": ((3, 8), {"script": "fabric", "workers": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_killed_runs_continue_bit_for_bit_within_and_between_epochs(tmp_path: Path, case: str) -> None:
    kills, options = CASES[case]
    check_equal(tmp_path, kills, **options)


def test_a_validation_that_a_kill_interrupts_runs_again(tmp_path: Path) -> None:
    """A plateau scheduler, EarlyStopping and averaged weights depend on it. A run that was stopped early stays so."""
    options = {"val": 0.5, "plateau": True, "early": True, "ema": True, "epochs": 3}
    outputs = check_equal(tmp_path, (2, 4, 8), **options)
    assert "steps 12" in outputs[-1]
    again = train(tmp_path, "killed", **options)
    before = len(again.steps())
    assert final(again.run()) == ["steps 12"]
    assert len(again.steps()) == before


@pytest.mark.parametrize("kind", ["plain", "stateful"])
def test_streams_of_unknown_length_go_on_at_the_next_sample(tmp_path: Path, kind: str) -> None:
    """Lightning fetches one batch of them ahead. A plain loader reads again, and that is said."""
    outputs = check_equal(tmp_path, (3, 9), iterable=kind)
    assert all(("reads its batches again" in each) == (kind == "plain") for each in outputs)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_sampler_without_length_goes_on_at_the_next_batch(tmp_path: Path, workers: int) -> None:
    """Lightning fetches one batch of it ahead. The noise of items read without workers is then drawn elsewhere."""
    whole, killed = (train(tmp_path, name, unsized=True, workers=workers) for name in ("whole", "killed"))
    whole.run()
    killed.run_killed(3)
    killed.run_killed(13)
    killed.run()
    samples = [{n: each[1] for n, each in script.trajectory().items()} for script in (whole, killed)]
    assert samples[0] == samples[1]
    assert workers == 0 or killed.trajectory() == whole.trajectory()


@pytest.mark.parametrize("script", ["train", "fabric"])
def test_another_batch_size_is_refused_within_an_epoch(tmp_path: Path, script: str) -> None:
    train(tmp_path, "run", script=script).run_killed(3)
    other = train(tmp_path, "run", script=script, batch=8).start()
    assert other.wait() == 1
    assert "batch_size=4, samples=32" in other.output()
    assert "batch_size=8, samples=32" in other.output()
    # The refused start has changed nothing.
    same = train(tmp_path, "run", script=script)
    same.run()
    assert epoch(same, 1, 8) == epoch(same, 9, 16) == [*range(32)]
    # At the beginning of an epoch it is fine.
    more = train(tmp_path, "run", script=script, batch=8, epochs=3)
    more.run()
    assert [*more.trajectory()] == [*range(1, 21)]
    assert epoch(more, 17, 20) == [*range(32)]


def test_a_trainer_tests_its_own_weights_and_fits_again(tmp_path: Path) -> None:
    """validate, test and predict after fit restore nothing; a second fit goes on where the first ended."""
    whole, again = train(tmp_path, "whole", epochs=4), train(tmp_path, "again", again=True)
    said = whole.run()
    output = again.run()
    assert "validate True\ntest True" in output
    assert again.trajectory() == whole.trajectory()
    assert final(output)[-2:] == final(said)[-2:]


def test_sigterm_saves_one_step_of_all_ranks_and_the_restart_goes_on(tmp_path: Path) -> None:
    whole, left = (train(tmp_path, name, world=2, val=0.5, every=100, epochs=6) for name in ("whole", "left"))
    whole.run()
    code, output = left.run_signalled(3)
    assert code == 143, output
    newest = [left.steps(rank)[-1].step for rank in (0, 1)]
    assert newest[0] == newest[1] < 24
    assert "SIGTERM" in output
    left.run()
    for rank in (0, 1):
        assert [each.step for each in left.steps(rank)] == [*range(1, 25)]
        assert left.trajectory(rank) == whole.trajectory(rank), rank
    assert epoch(left, 1, 4) == [*range(32)]


def test_a_model_that_two_ranks_shard_goes_on_and_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    whole, left = (train(tmp_path, name, world=2, fsdp=True) for name in ("whole", "left"))
    whole.run()
    left.run_killed(2)
    left.run_killed(5)
    one = train(tmp_path, "left").start()
    assert one.wait() == 1
    assert "2 ranks have saved this run, and there are 1 now" in one.output()
    left.run()
    for rank in (0, 1):
        assert left.trajectory(rank) == whole.trajectory(rank), rank


def test_lightnings_own_resume_repeats_samples_and_skips_others(tmp_path: Path) -> None:
    """ModelCheckpoint at each batch and fit(ckpt_path="last"), killed in mid-epoch, beside ckpt in the same script."""
    whole = train(tmp_path, "whole", how="own", pause=0, epochs=1)
    whole.run()
    for how in ("own", "ckpt"):
        killed = train(tmp_path, how, how=how, epochs=1)
        killed.run_killed(5)
        killed.run()
        assert [each.step for each in killed.steps()][-1] == 8
        assert (epoch(killed, 1, 8) == [*range(32)]) == (how == "ckpt")
    # Also the run that Lightning alone makes.
    assert killed.trajectory() == whole.trajectory()


def test_a_file_given_to_fit_counts_only_for_a_run_without_checkpoint(tmp_path: Path) -> None:
    """Lightning's own checkpoint begins the run; a restart with the same ckpt_path goes on from ckpt's."""
    own = train(tmp_path, "own", how="own", epochs=1)
    own.run()
    ours = train(tmp_path, "ours", epochs=2, path=str(tmp_path / "own/run-own/last.ckpt"), save=True)
    output = ours.run_killed(11)
    assert next(each.step for each in ours.steps()) == 9
    assert output.count("ModelCheckpoint saves files of its own") == 1
    assert "only begins a run" not in output
    assert "only begins a run" in ours.run()
    assert [*ours.trajectory()] == [*range(9, 17)]
    assert epoch(ours, 9, 16) == [*range(32)]


def test_slurms_signal_saves_by_ckpt_and_requeues_by_lightning(tmp_path: Path) -> None:
    scontrol = tmp_path / "bin/scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/requeued\n")
    scontrol.chmod(0o755)
    whole, left = (train(tmp_path, name, every=100, epochs=6) for name in ("whole", "left"))
    whole.run()
    slurm = {"JOB_ID": "77", "JOB_NAME": "job", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    left.env |= {f"SLURM_{key}": value for key, value in slurm.items()}
    left.env["PATH"] = f"{scontrol.parent}:{os.environ['PATH']}"
    code, output = left.run_signalled(3, signal.SIGUSR1)
    assert code == 143, output
    assert (tmp_path / "requeued").read_text() == "requeue 77\n"
    assert not [*tmp_path.rglob("hpc_ckpt*")]
    left.run()
    assert left.trajectory() == whole.trajectory()
    assert (tmp_path / "requeued").read_text() == "requeue 77\n"


def test_fabric_trains_all_epochs_that_a_finished_run_is_given(tmp_path: Path) -> None:
    """A finished pass is not resumed; the loader's own generator goes on."""
    whole, more = (train(tmp_path, name, script="fabric", epochs=4) for name in ("whole", "more"))
    said = whole.run()
    train(tmp_path, "more", script="fabric").run()
    output = more.run()
    assert more.trajectory() == whole.trajectory()
    assert final(output) == final(said)
