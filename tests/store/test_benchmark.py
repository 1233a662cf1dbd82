"""benchmarks/commit.py still runs, and its results name the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_benchmark_of_commit_and_restore_runs_small(tmp_path: Path) -> None:
    words = ["-m", "benchmarks.commit", "--small", "--server", "rclone", "--json", tmp_path / "found.json"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["machine"]["name"]
    assert [row["question"] for row in found["rows"]] == [
        "rclone: commit",
        "rclone: commit, CPU",
        "rclone: commit, memory besides the state",
    ]
    assert found["rows"][0]["figure"] > 0
