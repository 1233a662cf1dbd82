"""Writes a report as Markdown. Plots become links to PNG files in a folder beside it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckpt.report.document import Document, Plot, Table, format_cell
from ckpt.report.plots import draw


def write_markdown(report: Document, path: Path) -> None:
    """Writes the file, and its plots into the folder `<name of the file>-plots`. Errors: OSError; UsageError as
    `plots.check_can_draw`."""
    lines = list(_lines(report, path.with_name(f"{path.stem}-plots")))
    path.write_text("\n".join(lines) + "\n")


def _lines(report: Document, folder: Path) -> Iterator[str]:
    yield f"# {report.title}"
    yield ""
    yield from (f"- {name}: {format_cell(value)}" for name, value in report.facts.items())
    for number, section in enumerate(report.sections, 1):
        yield from ("", f"## {section.title}")
        for part in section.parts:
            yield ""
            if isinstance(part, Table):
                yield from _table(part)
            elif isinstance(part, Plot):
                yield _picture(part, folder, number)
            else:
                yield part


def _table(table: Table) -> Iterator[str]:
    numbers = [any(isinstance(row[at], int | float) for row in table.rows) for at in range(len(table.columns))]
    yield _row(table.columns)
    yield "|" + "|".join("---:" if right else "---" for right in numbers) + "|"
    yield from (_row([format_cell(cell) for cell in row]) for row in table.rows)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _picture(plot: Plot, folder: Path, section: int) -> str:
    """Plots of two sections may have one title."""
    folder.mkdir(exist_ok=True)
    name = f"{section}-" + re.sub(r"[^a-z0-9]+", "-", plot.title.lower()).strip("-") + ".png"
    (folder / name).write_bytes(draw(plot, "png"))
    return f"![{plot.title}]({os.fspath(folder.name)}/{name})"
