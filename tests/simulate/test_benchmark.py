"""The benchmark of the simulator runs, small."""

from __future__ import annotations

import json

from benchmarks import simulate


def test_the_simulator_benchmark_runs_and_names_its_machine(tmp_path, capsys):
    results = tmp_path / "simulate.json"
    assert simulate.main(["--small", "--json", str(results)]) == 0
    found = json.loads(results.read_text())
    assert found["machine"]["name"] in capsys.readouterr().out
    assert [row["met"] for row in found["rows"]].count(None) == 2
    assert len(found["rows"]) == 6
