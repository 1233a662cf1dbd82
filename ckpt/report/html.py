"""Writes a report as one HTML file: style and plots (SVG) are inside, nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from ckpt.report.document import Cell, Document, Plot, Table, format_cell
from ckpt.report.plots import draw

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2rem; border-bottom: 1px solid #ddd }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #eee; text-align: left; white-space: nowrap }
td.number { text-align: right; font-variant-numeric: tabular-nums }
svg { max-width: 100%; height: auto }
@media (prefers-color-scheme: dark) {
  body { background: #16181d; color: #ddd } th, td, h2 { border-color: #333 } svg { background: #fff }
}
"""


def write_html(report: Document, path: Path) -> None:
    """Writes the file. Errors: OSError; UsageError as `plots.check_can_draw`."""
    path.write_text("\n".join(_lines(report)) + "\n")


def _lines(report: Document) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width">'
    yield f"<title>{escape(report.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>"
    yield f"<h1>{escape(report.title)}</h1>"
    yield from _table(Table(("", ""), [(name, format_cell(value)) for name, value in report.facts.items()]))
    for section in report.sections:
        yield f"<h2>{escape(section.title)}</h2>"
        for part in section.parts:
            if isinstance(part, Table):
                yield from _table(part)
            elif isinstance(part, Plot):
                yield _picture(part)
            else:
                yield f"<p>{escape(part)}</p>"
    yield "</body>\n</html>"


def _table(table: Table) -> Iterator[str]:
    yield "<table>"
    if any(table.columns):
        yield "<tr>" + "".join(f"<th>{escape(each)}</th>" for each in table.columns) + "</tr>"
    for row in table.rows:
        yield "<tr>" + "".join(map(_cell, row)) + "</tr>"
    yield "</table>"


def _cell(value: Cell) -> str:
    kind = ' class="number"' if isinstance(value, int | float) else ""
    return f"<td{kind}>{escape(format_cell(value))}</td>"


def _picture(plot: Plot) -> str:
    """The <svg> element alone, without the XML declaration before it."""
    drawn = draw(plot, "svg").decode()
    return drawn[drawn.index("<svg") :]
