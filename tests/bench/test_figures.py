"""The suite's figures: their comparison, and their file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpt.bench.figures import Figure, SuiteResult, compare, in_turns, read_result
from ckpt.errors import UsageError


def result(*figures: Figure) -> SuiteResult:
    return SuiteResult({"url": "s3://b", "state_bytes": 1}, {"delete": True}, figures, {"save": "why"})


@pytest.mark.parametrize(
    ("better", "new", "verdict"),
    [
        ("lower", 0.8, "better"),
        ("lower", 1.2, "worse"),
        ("higher", 1.2, "better"),
        ("higher", 0.8, "worse"),
        ("higher", 1.09, "equal"),
        ("lower", 0.92, "equal"),
        ("", 5.0, ""),
    ],
)
def test_a_change_is_judged_by_what_is_better(better: str, new: float, verdict: str) -> None:
    (found,) = compare(result(Figure("s", "n", 1.0, "ms", better)), result(Figure("s", "n", new, "ms", better)))
    assert (found.ratio, found.verdict) == (new, verdict)


def test_only_figures_of_both_are_compared() -> None:
    old = result(Figure("s", "a", 1.0, "ms"), Figure("s", "b", 1.0, "ms"), Figure("s", "zero", 0.0, "ms"))
    new = result(Figure("s", "b", 2.0, "s"), Figure("s", "c", 1.0, "ms"), Figure("s", "zero", 1.0, "ms"))
    assert compare(old, new) == []


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    saved = result(Figure("s", "n", 1.5, "MB/s", "higher", 3.0, {"bytes": 4}))
    (tmp_path / "r.json").write_text(json.dumps(saved.to_json()))
    read = read_result(tmp_path / "r.json")
    assert read.to_json() == saved.to_json()
    assert read.figures[0].ratio == 0.5


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"ckpt_bench": 2}', '{"ckpt_bench": 1, "figures": [{"x": 1}]}'])
def test_another_file_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(UsageError, match=r"r\.json"):
        read_result(tmp_path / "r.json")


def test_works_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    found = in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2, limit_s=60)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert set(found) == {"a", "b"}
    calls.clear()
    in_turns({"a": lambda: calls.append("a")}, rounds=5, limit_s=0)
    assert calls == ["a", "a"]
