"""The benchmarks of the whole run small, so that they cannot rot. Their figures are looked at elsewhere."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import faulty_disk
from benchmarks.report import Row, parser, report
from tests.checkpointer.scripts import ROOT


@pytest.mark.parametrize(
    "name",
    [
        "step",
        "snapshot",
        "stall",
        pytest.param("device", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
        "many",
        "agent",
        "restore",
        "entry",
        "peak",
        "restart",
        "peer",
        "peer_restore",
        "disturb",
        "startup",
        "walk",
        "everystep",
        "preempt",
        "notice",
        "listening",
        "paper",
    ],
)
def test_the_benchmark_runs_and_names_its_machine(name: str, tmp_path: Path) -> None:
    found = run_small(name, tmp_path / "out.json")
    assert found["benchmark"] == name
    assert found["machine"]["cpu"]
    assert all(row["figure"] is not None for row in found["rows"])


def run_small(name: str, out: Path, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--small", "--json", str(out), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def rows_of(*given: Any) -> dict[str, dict[str, Any]]:
    """By their question."""
    return {row["question"]: row for row in run_small(*given)["rows"]}


def test_peers_restore_what_was_saved_and_who_is_not_installed_is_named(tmp_path: Path) -> None:
    names = ["torch.save, boto3", "DCP async, thread", "ckpt, auto, deferred"]
    only = [word for name in [*names, "torchsnapshot"] for word in ("--only", name)]
    rows = rows_of("peers", tmp_path / "out.json", *only)
    for label in [f"folder: {name}" for name in names if "boto3" not in name] + [
        "rclone: torch.save, boto3",
        "rclone: ckpt, auto, deferred",
    ]:
        assert rows[f"{label}: restored bit for bit"]["met"], label
        assert rows[f"{label}: durable"]["figure"] > 0, label
        assert rows[f"{label}: written"]["figure"] > 4, label
    if importlib.util.find_spec("torchsnapshot") is None:
        assert any(question.startswith("folder: torchsnapshot: NOT MEASURED: ") for question in rows)


def test_the_league_tells_lost_and_wrong_restarts_from_good_ones(tmp_path: Path) -> None:
    if why := faulty_disk.why_not():
        pytest.skip(why)
    only = [word for name in ("torch.save", "ckpt, auto, deferred") for word in ("--only", name)]
    rows = rows_of("league", tmp_path / "out.json", *only, "--points", "2")
    assert rows["torch.save: flipped: WRONG"]["figure"] == 1
    assert rows["torch.save: missing: lost"]["figure"] == 1
    assert rows["torch.save: killed: refused"]["figure"] == 1  # of two: before the first change nothing has happened
    ours = [row for question, row in rows.items() if question.startswith("ckpt") and row["met"] is not None]
    assert ours
    assert all(row["met"] for row in ours)


@pytest.mark.parametrize(
    ("met", "words", "code"), [(False, [], 1), (False, ["--small"], 0), (True, [], 0), (None, [], 0)]
)
def test_a_bar_that_is_not_met_fails_the_benchmark_but_for_a_small_one(
    met: bool | None, words: list[str], code: int
) -> None:
    rows = [Row("met", 1.0, "s", "at most 1 s", True), Row("this one", 1.0, "s", "at most 1 s", met)]
    assert report("any", rows, parser("Any.").parse_args(words)) == code


def test_every_benchmark_is_run_by_a_test_and_is_on_the_page() -> None:
    names = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert [n for n in sorted(names) if not any(f in tests for f in (f'"{n}"', f"benchmarks.{n}", f"import {n}"))] == []
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
