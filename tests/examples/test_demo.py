"""The demo is the first thing that a newcomer runs: it must do what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.torchrun
def test_the_demo_loses_nothing_and_says_so(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("CKPT_")}
    command = [sys.executable, "-W", "ignore", "examples/demo/run.py", "--folder", str(tmp_path / "demo")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "320 losses (2 ranks x 160 steps): equal bit for bit" in done.stdout
    table = re.findall(r"^torchrun.*\s(step \d+)\s+(step \d+|nothing)\s+(step \d+)\s+(\w+)\s+(\d+)$", done.stdout, re.M)
    assert [row[0] for row in table] == ["step 60", "step 100"]
    # Which step had arrived when it was killed depends on how fast the machine is; where it came from does not.
    assert [row[3] for row in table] == ["memory", "store"]
    assert table[0][2] in ("step 40", "step 60")
    # That the agent died in the middle of a save does not: what came back is older than what was being saved.
    assert table[1][1] == table[1][2]
    assert table[1][2] in ("step 60", "step 80")
    assert "all good" in done.stdout
