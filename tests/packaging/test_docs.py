"""The documents tell the truth where that can be checked."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import ckpt

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize(("page", "least"), [("docs/failure-model.md", 30), ("docs/guides/nodes.md", 20)])
def test_every_test_that_a_table_of_failures_names_is_there(page: str, least: int) -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", (ROOT / page).read_text())
    assert len(named) > least
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (file := ROOT / "tests" / path).exists() or f"def {name}(" not in file.read_text()
    ]
    assert not missing


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs/decisions"
    index = (folder / "README.md").read_text()
    assert [page.name for page in sorted(folder.glob("0*.md")) if f"({page.name})" not in index] == []


def test_every_option_of_a_checkpointer_is_in_the_table() -> None:
    table = (ROOT / "docs/start.md").read_text().split("## Options", 1)[1].split("##", 1)[0]
    named = re.findall(r"^\| `([a-z_]+)` \|", table, re.MULTILINE)
    given = set(inspect.signature(ckpt.Checkpointer).parameters) - {"url", "state"}
    assert set(named) == given


def test_every_variable_that_is_read_is_told_of_where_users_begin() -> None:
    read = set(re.findall(r"CKPT_[A-Z0-9_]+", (ROOT / "ckpt/settings.py").read_text()))
    start = (ROOT / "docs/start.md").read_text()
    assert sorted(each for each in read if each not in start) == []
