"""Which committed steps are exported, and which options a ckpt.Export refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.policy.export_rule import Export, ExportRule, exported_step


def a_rule(every: int | None) -> ExportRule:
    return ExportRule("/out", every, (), "", (), None, "sharded", "")


@given(st.integers(1, 50), st.lists(st.tuples(st.integers(1, 300), st.booleans()), max_size=40))
def test_each_stretch_with_a_commit_is_exported_once_and_at_its_first(
    every: int, commits: list[tuple[int, bool]]
) -> None:
    """A commit whose export fails is made up for by the next commit of its stretch, also after a restart."""
    rule, exported = a_rule(every), set[int]()
    tried: dict[int, list[bool]] = {}
    for step, succeeds in sorted(commits):
        if rule.is_due(step, exported):
            tried.setdefault(step // every, []).append(succeeds)
            if succeeds:
                exported.add(step)
    stretches = {step // every for step, _ in commits if step >= every}
    assert tried.keys() == stretches
    assert all(each.count(True) <= 1 and True not in each[:-1] for each in tried.values())


def test_without_every_only_the_end_is_exported() -> None:
    assert not any(a_rule(None).is_due(step, ()) for step in range(1000))


def test_the_folder_of_a_step_is_found_again_by_its_name() -> None:
    assert exported_step(a_rule(1).path(120).name) == 120
    assert [exported_step(each) for each in (".beside", "step-", "step-x", ".step-1.ab.part", "step-1/")] == [None] * 5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"to": ""}, "give a folder"),
        ({"to": "s3://bucket/x"}, "hf://USER/NAME"),
        ({"to": "x", "every": 0}, "at least 1"),
        ({"to": "x", "beside": "tokenizer"}, "give a list"),
        ({"to": "x", "names": {"(": ""}}, "unterminated"),
        ({"to": "x", "names": {"a": r"\1"}}, "invalid group"),
    ],
)
def test_an_export_that_cannot_work_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ckpt.UsageError, match=says):
        Export(**options)
