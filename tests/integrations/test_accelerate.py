"""Accelerate: a script that was killed gives the losses and samples of an undisturbed one; its own resume does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.runs import Script

SCRIPTS = Path(__file__).parent / "scripts"


def script(folder: Path, how: str, *words: str, world: int = 0) -> Script:
    (folder / "data").mkdir(parents=True)
    arguments = (how, str(folder / "data"), *words)
    path = SCRIPTS / "accelerate_train.py"
    return Script(path, folder / "records", arguments, world, {"CKPT_LINGER_S": "20"})


def check_killed_equals_undisturbed(tmp_path: Path, *words: str, world: int = 0, kills: tuple[int, ...]) -> Script:
    whole, killed = script(tmp_path / "whole", "ckpt", *words, world=world), None
    whole.run()
    killed = script(tmp_path / "killed", "ckpt", *words, world=world)
    for step in kills:
        killed.run_killed(step)
    killed.run()
    for rank in range(max(1, world)):
        assert killed.trajectory(rank) == whole.trajectory(rank)
        assert len({each.pid for each in killed.steps(rank)}) == len(kills) + 1
    return killed


def test_a_killed_run_has_the_losses_and_samples_of_an_undisturbed_one(tmp_path: Path) -> None:
    """Accelerate's own save_state() and load_state(), used as its guide shows, repeat and skip samples."""
    killed = check_killed_equals_undisturbed(tmp_path, kills=(3, 17))
    # No skipped sample is read: 10 batches of 4 are an epoch, and two batches of 8 and the one ahead an evaluation.
    last = killed.steps()[-1].pid
    reads = (tmp_path / "killed" / "data" / f"reads-{last}").read_text().splitlines()
    made = [each.step for each in killed.steps() if each.pid == last]
    assert len(reads) == 4 * len(made) + 2 * 3 * 8

    own = script(tmp_path / "own", "own")
    own.run_killed(3)
    own.run_killed(17)
    own.run()
    whole = killed.trajectory()
    assert own.trajectory() != whole
    assert any(len(set(epoch)) < 40 for epoch in epochs(own))
    assert all(len(set(epoch)) == 40 for epoch in epochs(killed))


def epochs(of: Script) -> list[list[int]]:
    """The samples of each epoch of 10 steps."""
    seen = of.trajectory()
    return [[each for step in range(n, n + 10) for each in seen[step][1]] for n in (1, 11, 21)]


CASES = {
    "accumulation": (("accumulate", "seedable"), 0, (6,)),
    "ddp": (("accumulate",), 2, (3,)),
    "fsdp2": (("fsdp",), 2, (7,)),
    "stateful, peft": (("stateful", "peft"), 0, (13,)),
    "workers": (("workers",), 0, (13,)),
    "dispatch": (("dispatch",), 2, (7,)),
}


@pytest.mark.parametrize("case", CASES)
def test_so_it_is_with_other_loaders_models_and_ranks(tmp_path: Path, case: str) -> None:
    words, world, kills = CASES[case]
    check_killed_equals_undisturbed(tmp_path, *words, world=world, kills=kills)
