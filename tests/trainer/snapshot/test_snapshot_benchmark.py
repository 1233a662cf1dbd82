"""benchmarks/snapshot.py still runs, and its results name the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_snapshot_benchmark_runs_small(tmp_path: Path) -> None:
    words = ["-m", "benchmarks.snapshot", "--small", "--json", str(tmp_path / "found.json")]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["machine"]["name"]
    assert found["small"]
    assert len(found["rows"]) == 5
    assert all(row["figure"] is not None for row in found["rows"])
    assert done.stdout.startswith(f"snapshot on {found['machine']['name']}")
