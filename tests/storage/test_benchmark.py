"""benchmarks/store.py still runs, and its results name the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_store_benchmark_runs_small(tmp_path: Path) -> None:
    words = ["-m", "benchmarks.store", "--small", "--server", "sink", "--server", "rclone"]
    words += ["--json", str(tmp_path / "found.json")]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["machine"]["name"]
    assert found["machine"]["cores"]
    assert [row["question"] for row in found["rows"]] == [
        f"{server}: {what}{figure}"
        for server in ("sink", "rclone")
        for what in ("put", "frames", "get")
        for figure in ("", ", CPU", ", memory besides")
    ]
    assert all(row["figure"] > 0 for row in found["rows"] if row["unit"] == "GB/s")
    assert f"store on {found['machine']['name']}" in done.stdout
