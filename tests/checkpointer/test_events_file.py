"""CKPT_EVENTS: the trainer and its agent write one file, each what happened in it, and nothing twice."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.checkpointer.loops import make
from tests.checkpointer.runs import run


def test_a_run_leaves_one_file_of_what_happened_in_the_trainer_and_in_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv("CKPT_EVENTS", str(path))
    heard = [event for steps in (5, 8) for event in run(tmp_path / "run", steps, make()).seen.events]
    found = [json.loads(line) for line in path.read_text().splitlines()]
    by_trainer = [each["event"] for each in found if each["by"] == "trainer"]
    assert by_trainer == ["loader.missing", "receipt", "restored", "loader.missing", "receipt"]
    assert {each["pid"] for each in found if each["by"] == "trainer"} == {os.getpid()}
    commits = [each for each in found if each["event"] == "commit.done"]
    assert [each["by"] for each in commits] == ["agent", "agent"]
    assert {(each["rank"], each["launch"]) for each in found if each["by"] == "trainer"} == {(0, commits[0]["launch"])}
    epochs = [each["epoch"] for each in found if each["event"] == "receipt"]
    assert len(set(epochs)) == 2
    assert [each["epoch"] for each in commits] == epochs
    assert [each["epoch"] for each in found if each["event"] == "job.account" and each["starts"]][-1] == epochs[-1]
    assert [each.name for each in heard if each.name == "commit.done" and each.by_agent] == ["commit.done"] * 2
    accounts = [each for each in found if each["event"] == "job.account"]
    assert accounts[-1]["phase"] == "idle"
    assert accounts[-1]["restores"] == {"store": 1}
    assert accounts[-1]["safe"]["store"]["step"] == 8
