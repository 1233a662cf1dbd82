"""The benchmarks of the whole run small, so that they cannot rot. Their figures are looked at elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.session.scripts import ROOT


@pytest.mark.parametrize("name", ["step", "stall", "agent", "restore", "restart", "peer"])
def test_the_benchmark_runs_and_names_its_machine(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--small", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["benchmark"] == name
    assert found["machine"]["cpu"]
    assert all(row["figure"] is not None for row in found["rows"])
