"""What the tests of notices have in common: jobs that leave, and what they say and write of that."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.checkpointer.runs import run
from tests.checkpointer.scripts import Line, Script

CODE = 143
MODULE = "tests.checkpointer.train_script"
ENDLESS = 1_000_000
SELDOM = ("--every", "1000000")
HOUR_S = 3600.0  # until a deadline that nothing here lives to see: whoever waits for it is found waiting


@pytest.fixture(autouse=True)
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nothing_left_behind: None) -> None:
    """For every test of a module that imports it. Notices are given: the firmware is not looked at."""
    monkeypatch.setenv("CKPT_NOTICES", "given")
    monkeypatch.setenv("CKPT_OUTCOME_FILE", str(tmp_path / "outcome.json"))


def appear(tmp_path: Path, lead_s: float) -> None:
    """The file `word` says so many seconds, at once."""
    (tmp_path / "part").write_text(f"+{lead_s:g}")
    os.rename(tmp_path / "part", tmp_path / "word")


def outcome(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "outcome.json").read_text())
    return found


def left_in_the_store(tmp_path: Path) -> dict[str, Any]:
    """The outcome: all left by themselves, and their last step is in the store."""
    found = outcome(tmp_path)
    assert (found["how"], found["level"], found["error"]) == ("left", "store", "")
    assert found["committed_step"] == found["step"]
    return found


def wait_outcome(tmp_path: Path, script: Script) -> dict[str, Any]:
    """What the event says is what the file says."""
    script.wait_for(lambda line: line.get("event") == "notice.outcome")
    found = outcome(tmp_path)
    assert any(f"{found['left_s']:.1f} s before the deadline" in text for text in said(script, "notice.outcome"))
    return found


def at_step(script: Script, step: int = 12) -> Line:
    return script.wait_for(lambda line: line.get("step", 0) >= step)


def last_steps(script: Script, ranks: int = 2) -> list[int]:
    """The last one that each rank said; after the newest restart only."""
    lines = script.lines()
    return [max(line["step"] for line in lines if "step" in line and line["rank"] == r) for r in range(ranks)]


def said(script: Script, event: str) -> list[str]:
    return [line["message"] for line in script.lines() if line.get("event") == event]


def why_it_ended(script: Script) -> list[str]:
    """The reasons of those that ended where they were, whatever their training thread did."""
    return re.findall(r"^ckpt: leaving at once: (.*)$", script.log.read_text(), re.MULTILINE)


def code_of(script: Script, timeout_s: float = 60.0) -> int:
    return script.process.wait(timeout_s)


def goes_on_from(tmp_path: Path, step: int) -> None:
    """The next start restores that step, and trains on."""
    assert run(tmp_path / "run", step + 2).from_step == step
    assert not (tmp_path / "outcome.json").exists(), "that of an earlier start was left"
