"""ckpt in Lightning's Trainer and Fabric: killed runs are bit for bit the undisturbed one, data included."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.forked import Forked, server

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="module", autouse=True)
def lightning() -> Iterator[None]:
    with server("lightning_train"):
        yield


def train(folder: Path, name: str, world: int = 0, **options: object) -> Forked:
    """A script of Lightning's Trainer with a URL and records of its own."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    told = json.dumps({"url": str(folder / name / "run"), "world": max(1, world), **options})
    env = {"CKPT_LINGER_S": "20", "CUDA_VISIBLE_DEVICES": ""}
    return Forked(SCRIPTS / "lightning_train.py", folder / name / "records", (told,), world=world, env=env)


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


def test_accumulated_gradients_are_never_lost(tmp_path: Path) -> None:
    """Three batches make an update, and the last two of an epoch."""
    check_equal(tmp_path, (4, 9, 13), accumulate=3, workers=2)


def test_a_validation_that_a_kill_interrupts_runs_again_and_no_other(tmp_path: Path) -> None:
    """Validation in mid-epoch, whose metric a plateau scheduler, EarlyStopping and averaged weights depend on."""
    check_equal(tmp_path, (2, 4, 8, 13), val=0.5, plateau=True, early=True, ema=True, epochs=3)


def test_persistent_workers_begin_at_the_restored_batch(tmp_path: Path) -> None:
    """The optimizer asks for the number of steps, for which Lightning makes the loader and its workers early."""
    check_equal(tmp_path, (3, 11), workers=2, persistent=True, estimate=True)
