"""The Trainer of transformers with ckpt's callback: the same command again after a kill gives the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ckpt
from tests.integrations.runs import Script

SCRIPT = Path(__file__).parent / "scripts" / "hf_train.py"


def script(folder: Path, how: str = "ckpt", world: int = 0, **options: Any) -> Script:
    args = (how, str(folder / how), json.dumps(options))
    env = {"CKPT_LINGER_S": "20", "CKPT_EVENTS": str(folder / "events.jsonl")}
    return Script(SCRIPT, folder / f"records-{how}", args, world=world, env=env)


def report(output: str) -> dict[str, Any]:
    """What the script says at its end: logs, the best metric, and a sum of each weight."""
    (line,) = [line for line in output.splitlines() if line.startswith("REPORT ")]
    found: dict[str, Any] = json.loads(line.removeprefix("REPORT "))
    return found


def killed(what: Script, *moments: str) -> str:
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


def test_kills_at_any_moment_leave_losses_and_samples_as_they_were(tmp_path: Path) -> None:
    """Killed within the accumulation of step 3, again in the same epoch, and at the boundary of epochs."""
    undisturbed = script(tmp_path, "none")
    expected = report(undisturbed.run())
    ours = script(tmp_path)
    found = report(killed(ours, "3.2", "4.1", "6.1"))
    assert [each.step for each in ours.steps()] == list(range(1, 16))
    assert ours.trajectory() == undisturbed.trajectory()
    assert same(found, expected)
    with ckpt.open(tmp_path / "ckpt/run") as run:
        assert run.newest.step == 15
