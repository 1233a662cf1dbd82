"""ckpt rehearse with a real training script: real agents, a real kill, a real restore."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.cli.real_train import WAITS_AFTER
from tests.cli.stores import Said, run_ckpt

ROOT = Path(__file__).parents[2]
STEPS = 10


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("REAL_TRAIN_URL", os.fspath(tmp_path / "run"))


def rehearse(url: Path, how: str, *options: str, at: int | None = WAITS_AFTER) -> Said:
    script = [sys.executable, "-m", "tests.cli.real_train", str(STEPS), how]
    when = [] if at is None else ["--at", at]
    return run_ckpt("rehearse", url, *when, "--timeout-s", 120, *options, "--", *script)


def test_a_script_that_restarts_exactly_is_proven_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From this host's memory, which the agent of the killed run still holds."""
    monkeypatch.setenv("CKPT_LINGER_S", "60")
    said = rehearse(tmp_path / "run", "exact", "--json")
    assert said.code == 0, said.err
    assert said.json["equal"] is True
    assert said.json["step"] == STEPS
    assert said.json["killed_after"] == WAITS_AFTER
    assert said.json["memory_lost"] is False
    assert [said.json[name] for name in ("came_back_at", "came_back_from")] == [WAITS_AFTER, "memory"]
    assert list(tmp_path.iterdir()) == []  # the real run was not begun, and the scratch ones are gone


def test_a_script_that_forgets_a_generator_is_told_what_differs(tmp_path: Path) -> None:
    said = rehearse(tmp_path / "run", "forgets", "--lose-memory")
    assert said.code == 1, said.err
    assert f"came back at step {WAITS_AFTER} from store" in said.out
    assert "tensor model.0.bias: " in said.out
    assert "already before the kill" not in said.out
    assert list(tmp_path.iterdir()) == []


def test_a_script_of_milliseconds_that_saves_at_its_exit_only_is_killed_half_way(tmp_path: Path) -> None:
    said = rehearse(tmp_path / "run", "exact, and hurries", "--lose-memory", "--json", at=None)
    assert said.code == 0, said.err
    assert said.json["equal"] is True
    assert said.json["killed_after"] == STEPS // 2
    assert [said.json[name] for name in ("came_back_at", "came_back_from")] == [STEPS // 2, "store"]
    assert said.json["steps_run"] == STEPS - STEPS // 2
