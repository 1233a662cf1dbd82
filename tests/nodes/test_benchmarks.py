"""The benchmarks of lost nodes run small, so that they cannot rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpointer.scripts import ROOT
from tests.nodes import lan as lans
from tests.nodes.jobs import NO_ANSWER


@pytest.mark.torchrun
@pytest.mark.timeout(400)
@pytest.mark.flaky(reruns=1, only_rerun=[NO_ANSWER])
@pytest.mark.parametrize("name", ["recover", "soak", "replay"])
def test_a_benchmark_of_lost_nodes_runs(name: str, tmp_path: Path) -> None:
    if why := lans.why_not():
        pytest.skip(why)
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--small", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=390)
    why = f"({NO_ANSWER}) " if NO_ANSWER in done.stderr else ""
    assert done.returncode == 0, f"{why}{done.stderr[-6000:]}"
    assert json.loads(out.read_text())["rows"]
