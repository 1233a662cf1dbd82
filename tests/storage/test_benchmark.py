"""benchmarks/store.py still runs, and its results name the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "store.py"


def test_the_store_benchmark_runs_small(tmp_path: Path) -> None:
    words = ["--small", "--server", "sink", "--server", "rclone", "--json", tmp_path / "found.json"]
    done = subprocess.run([sys.executable, BENCHMARK, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["machine"]["name"]
    assert found["machine"]["cores"]
    rows = [(row["server"], row["what"]) for row in found["rows"]]
    assert rows == [(server, what) for server in ("sink", "rclone") for what in ("put", "frames", "get")]
    assert all(row["ours_gb_s"] > 0 and row["obstore_gb_s"] > 0 for row in found["rows"])
    assert done.stdout.splitlines()[0].startswith(found["machine"]["name"])
