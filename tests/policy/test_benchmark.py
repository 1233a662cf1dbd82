"""The benchmark of the policy runs, small."""

from __future__ import annotations

import json

from benchmarks import policy


def test_the_policy_benchmark_runs_and_names_its_machine(tmp_path, capsys):
    results = tmp_path / "policy.json"
    assert policy.main(["--small", "--json", str(results)]) == 0
    found = json.loads(results.read_text())
    assert found["machine"]["name"] in capsys.readouterr().out
    judged = [row for row in found["rows"] if row["met"] is not None]
    assert len(judged) == 2 * (3 + 3 + 1 + 1) + 2 * 3 + 1
    assert all(row["ratio"] > 0 for row in judged if row["ratio"] is not None)
