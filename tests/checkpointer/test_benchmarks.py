"""The benchmarks of the whole run small, so that they cannot rot. Their figures are looked at elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.report import Row, parser, report
from tests.checkpointer.scripts import ROOT


@pytest.mark.parametrize(
    "name",
    [
        "step",
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
    ],
)
def test_the_benchmark_runs_and_names_its_machine(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--small", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["benchmark"] == name
    assert found["machine"]["cpu"]
    assert all(row["figure"] is not None for row in found["rows"])


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
