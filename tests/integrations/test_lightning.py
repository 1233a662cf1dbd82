"""ckpt in Lightning's Trainer and Fabric: killed runs are bit for bit the undisturbed one, data included."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.integrations.runs import Script

SCRIPTS = Path(__file__).parent / "scripts"


def train(folder: Path, name: str, world: int = 0, **options: object) -> Script:
    """A script of Lightning's Trainer with a URL and records of its own."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    told = json.dumps({"url": str(folder / name / "run"), "world": max(1, world), **options})
    env = {"CKPT_LINGER_S": "20", "CUDA_VISIBLE_DEVICES": ""}
    return Script(SCRIPTS / "lightning_train.py", folder / name / "records", (told,), world=world, env=env)


def final(output: str) -> list[str]:
    """What the script says of validations and of the end."""
    return re.findall(r"^(?:validated|final|steps) .*$", output, re.MULTILINE)


def check_equal(folder: Path, kills: tuple[int, ...], **options: object) -> list[str]:
    """Runs a script undisturbed, and again with a kill after each of these batches. Returns all outputs of the latter."""
    whole, killed = train(folder, "whole", pause=0, **options), train(folder, "killed", **options)
    said = final(whole.run())
    outputs = [killed.run_killed(each) for each in kills]
    outputs.append(killed.run())
    assert killed.trajectory() == whole.trajectory()
    assert len({each.pid for each in killed.steps()}) == len(kills) + 1
    assert final(outputs[-1])[-2:] == said[-2:]
    assert set(final("\n".join(outputs))) == set(said)
    return outputs


def test_killed_runs_continue_bit_for_bit_within_and_between_epochs(tmp_path: Path) -> None:
    """Kills twice within an epoch, at its last batch, and after it; shuffled data, dropout, noise in the dataset."""
    check_equal(tmp_path, (2, 5, 8, 10))
