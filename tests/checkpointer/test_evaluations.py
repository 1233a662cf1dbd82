"""A notice that comes in a long evaluation: with boundaries in it (ck.poll()), and with none. Real processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.checkpointer.scripts import Script, torchrun, train

AT = 12
ENDLESS = 1_000_000
CODE = 143


@pytest.fixture(autouse=True)
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nothing_left_behind: None) -> None:
    monkeypatch.setenv("CKPT_NOTICES", "given")
    monkeypatch.setenv("CKPT_OUTCOME_FILE", str(tmp_path / "outcome.json"))
    monkeypatch.setenv("CKPT_NOTICE_FILE", str(tmp_path / "word"))


def warn(tmp_path: Path, lead_s: int) -> None:
    (tmp_path / "part").write_text(f"+{lead_s}")
    os.rename(tmp_path / "part", tmp_path / "word")


def outcome(script: Script, tmp_path: Path) -> dict[str, Any]:
    script.wait_for(lambda line: line.get("event") == "notice.outcome")
    found: dict[str, Any] = json.loads((tmp_path / "outcome.json").read_text())
    return found


def reaches(script: Script, step: int) -> None:
    script.wait_for(lambda line: line.get("step", 0) == step)


def test_all_ranks_leave_in_an_evaluation_that_polls(tmp_path: Path) -> None:
    script = torchrun(
        *(tmp_path / "log", 2, "tests.checkpointer.train_script", str(tmp_path / "run"), str(ENDLESS)),
        *("--every", "1000000", "--evaluate-at", str(AT)),
    )
    reaches(script, AT)
    warn(tmp_path, 60)  # nothing was measured: it is due at once
    script.process.wait(60)
    found = outcome(script, tmp_path)
    assert (found["how"], found["level"], found["step"]) == ("left", "store", AT)
    assert len([line for line in script.lines() if line.get("step") == AT]) == 2
    assert not [line for line in script.lines() if line.get("step", 0) > AT]


def test_where_no_boundary_comes_before_the_deadline_it_is_said_what_is_saved_and_nobody_is_ended(
    tmp_path: Path,
) -> None:
    script = train(
        *(tmp_path / "log", tmp_path / "run", ENDLESS, "--every", "1000000"),
        *("--pace", "0.05", "--save-at", "100", "--stuck-at", "103"),
    )
    script.wait_for(lambda line: "stuck" in line)
    script.wait_for(lambda line: line.get("event") == "commit.done" and "step 100 " in line["message"])
    warn(tmp_path, 6)
    found = outcome(script, tmp_path)
    assert (found["how"], found["level"], found["step"], found["committed_step"]) == ("stayed", "store", 100, 100)
    assert script.process.poll() is None
    script.process.send_signal(signal.SIGKILL)
    script.process.wait(60)
