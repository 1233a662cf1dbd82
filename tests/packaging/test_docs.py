"""The documents tell the truth where that can be checked."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import ckpt
from tests.nodes.jobs import RENDEZVOUS

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


def rows(page: str, first: str) -> list[list[str]]:
    """Of each table of that page whose first column is headed so: the cells of each row."""
    found: list[list[str]] = []
    inside = False
    for line in (ROOT / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        inside = bool(cells) and (inside or cells[0] == first)
        if inside and cells[0] != first and set(line) - set("|- "):
            found.append(cells)
    return found


@pytest.mark.parametrize(
    ("page", "first", "columns", "least"),
    [
        ("docs/failure-model.md", "what fails", 3, 100),
        ("docs/failure-model.md", "what happens", 3, 10),
        ("docs/guides/nodes.md", "what is lost", 5, 15),
    ],
)
def test_every_row_of_a_table_of_failures_says_all_that_its_columns_ask_and_names_a_test(
    page: str, first: str, columns: int, least: int
) -> None:
    found = rows(page, first)
    assert len(found) >= least
    assert [cells for cells in found if len(cells) != columns or not all(cells) or "::test_" not in cells[-1]] == []


def test_what_is_shown_with_nodes_of_their_own_is_in_the_table_that_says_how_long_the_way_back_takes() -> None:
    told = "".join(cells[-1] for cells in rows("docs/guides/nodes.md", "what is lost"))
    shown = {
        f"nodes/{file.name}::{name}"
        for file in (ROOT / "tests/nodes").glob("test_*.py")
        if file.name != "test_benchmarks.py"
        for name in re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE)
    }
    assert len(shown) > 5
    assert {name for name in shown if f"`{name}`" not in told} == set()


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


def test_the_guides_torchrun_is_started_as_in_the_tests_that_kill_nodes() -> None:
    """Without that its restarts take minutes, or fail: it is what a user copies."""
    shown = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "docs/guides/nodes.md").read_text(), re.MULTILINE | re.DOTALL)
    script = (ROOT / "examples/launchers/torchrun.sh").read_text()
    wanted = set(RENDEZVOUS.split(",")) - {"join_timeout=180"}  # tests are impatient
    for command in (next(each for each in shown if "torchrun --nnodes" in each), script):
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in command
        assert set(re.findall(r"--rdzv-conf (\S+)", command)[0].split(",")) == wanted
