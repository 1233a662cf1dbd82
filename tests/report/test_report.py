"""Reports: one HTML file that needs nothing else, and Markdown with its plots beside it."""

from __future__ import annotations

import builtins
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ckpt.errors import UsageError
from ckpt.report.document import Document, Plot, Section, Series, Table, format_cell
from ckpt.report.html import write_html
from ckpt.report.markdown import write_markdown
from ckpt.report.plots import draw

LINES = Plot("Rates, at <once>", "MiB", "MB/s", [Series("ours", [1, 4, 16], [10.0, 20.0, 40.0])], log_x=True)
BARS = Plot("Seconds", "", "s", [Series("a", ["x", "y"], [1.0, 2.0]), Series("b", ["x"], [3.0])], kind="bars")
REPORT = Document(
    "A <run> of s3://bucket",
    {"processor": "a | b", "cores": 2, "empty": None},
    [
        Section(
            "Store & more", ["Text <b>.", Table(("name", "MB/s"), [("put | get", 1234.5), ("none", None)]), LINES, BARS]
        )
    ],
)


class Page(HTMLParser):
    """Collects the tags, the links and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href") or name.endswith(":href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_html_file_loads_nothing_and_shows_every_part(tmp_path: Path) -> None:
    write_html(REPORT, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert all(each.startswith("#") for each in page.loads), page.loads
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert page.tags.count("svg") == 2
    for shown in ("A <run> of s3://bucket", "Store & more", "Text <b>.", "put | get", "1234", "a | b"):
        assert shown in page.text
    assert [*tmp_path.iterdir()] == [tmp_path / "report.html"]


def test_markdown_has_its_plots_beside_it(tmp_path: Path) -> None:
    write_markdown(REPORT, tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    links = re.findall(r"!\[.*\]\((.*)\)", text)
    assert links == ["report-plots/1-rates-at-once.png", "report-plots/1-seconds.png"]
    assert all((tmp_path / each).read_bytes().startswith(b"\x89PNG") for each in links)
    assert "| put \\| get | 1234 |" in text
    assert "|---|---:|" in text


def test_bars_stand_above_their_names() -> None:
    drawn = draw(BARS, "svg").decode()
    assert ">x</text>" in drawn
    assert ">y</text>" in drawn


def test_the_same_plot_gives_the_same_bytes() -> None:
    assert draw(LINES, "svg") == draw(LINES, "svg")
    assert draw(LINES, "svg") != draw(BARS, "svg")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args, **kwargs):  # type: ignore[no-untyped-def]
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UsageError, match=re.escape("pip install 'multilevel-ckpt[report]'")):
        draw(LINES, "svg")


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (0.012345, "0.0123"), (1234.56, "1235"), (3, "3"), ("a", "a"), (-2000.4, "-2000")]
)
def test_cells_have_three_digits(value: float | str | None, text: str) -> None:
    assert format_cell(value) == text
