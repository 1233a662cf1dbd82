"""The benchmark of planning runs, small."""

from __future__ import annotations

import json

from benchmarks import planning


def test_the_planning_benchmark_runs_and_names_its_machine(tmp_path, capsys):
    results = tmp_path / "planning.json"
    assert planning.main(["--small", "--json", str(results)]) == 0
    found = json.loads(results.read_text())
    assert found["machine"]["name"] in capsys.readouterr().out
    assert [row["question"] for row in found["rows"] if row["met"] is not None] == [
        "200 tensors x 8 ranks, replicated: planning in all"
    ]
