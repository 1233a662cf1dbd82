"""The option --out of commands that write a report: JSON, Markdown or HTML by the file's name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.errors import UsageError
from ckpt.events import replace_nonfinite

if TYPE_CHECKING:
    from ckpt.report.document import Document

ENDINGS = (".json", ".md", ".html")

OutOption = Annotated[
    list[Path] | None,
    typer.Option("--out", metavar="FILE", help="Write .json, .md (with a folder of plots) or .html. Repeatable."),
]


def check_files(files: list[Path]) -> None:
    """Before anything is measured. Errors: UsageError for another ending, a folder that is not there, or a plot without
    matplotlib."""
    for file in files:
        if file.suffix not in ENDINGS:
            raise UsageError(f"--out {file}: the name must end with {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}")
        if not file.parent.is_dir():
            raise UsageError(f"--out {file}: {file.parent} is no folder; make one, or give another name")
    if any(file.suffix != ".json" for file in files):
        from ckpt.report.plots import check_can_draw

        check_can_draw()


def write_files(files: list[Path], document: Callable[[], Document], body: Mapping[str, Any]) -> None:
    """Writes each file: `body` as JSON, or the document. Errors: UsageError if one cannot be written."""
    from ckpt.report.html import write_html
    from ckpt.report.markdown import write_markdown

    for file in files:
        try:
            if file.suffix == ".json":
                file.write_text(json.dumps(replace_nonfinite(dict(body)), indent=1) + "\n")
            elif file.suffix == ".md":
                write_markdown(document(), file)
            else:
                write_html(document(), file)
        except OSError as exc:
            raise UsageError(f"--out {os.fspath(file)}: {exc}") from exc
