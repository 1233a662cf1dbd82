"""The benchmark of a lost node runs small, so that it cannot rot. That of a soak is for a machine of one's own: it
waits for torchrun to take a new node in, which on a busy one it does not always do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nodes import lan as lans
from tests.session.scripts import ROOT


@pytest.mark.torchrun
@pytest.mark.timeout(400)
def test_the_benchmark_of_a_lost_node_runs(tmp_path: Path) -> None:
    if why := lans.why_not():
        pytest.skip(why)
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.recover", "--small", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=390)
    assert done.returncode == 0, done.stderr[-6000:]
    assert json.loads(out.read_text())["rows"]
