"""The command `ckpt bench`: measures a store and this machine, and compares two results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.cli import out, reports
from ckpt.cli.exits import Exit
from ckpt.errors import UsageError
from ckpt.types import format_count

if TYPE_CHECKING:
    from ckpt.bench.figures import SuiteResult
    from ckpt.simulate.scenario import StorePrices


def bench(
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="A store; a folder is made below it, and removed.")
    ] = None,
    size: Annotated[str, typer.Option("--size", metavar="SIZE", help="Of the state that is saved.")] = "256MiB",
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="SECTION", help="store, codecs, save or restore. Repeatable.")
    ] = None,
    to: reports.OutOption = None,
    prices: Annotated[
        str | None,
        typer.Option(
            "--prices", metavar="PUT,GET,GB", help="USD for 1000 puts, for 1000 gets, and for a GB and month."
        ),
    ] = None,
    against: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="OLD NEW", help="Compare two .json results; measure nothing."),
    ] = None,
    json: out.JsonOption = False,
) -> None:
    """Measure what checkpoints cost on this machine and store, each figure beside its ceiling."""
    if against is not None:
        if url is not None:
            raise UsageError("--compare measures nothing; give no URL with it")
        _compare(*against, json)
        return
    if url is None:
        raise UsageError("give the URL of a store, or --compare OLD NEW")
    reports.check_files(to or [])
    from ckpt.bench.render import to_document
    from ckpt.bench.suite import SECTIONS, run_suite

    nbytes, costs = out.parse_size("--size", size), _parse_prices(prices)
    tell: Callable[[str], None] = (lambda text: None) if json else _tell
    result = run_suite(url, nbytes, only or SECTIONS, costs, tell)
    reports.write_files(to or [], lambda: to_document(result), result.to_json())
    if json:
        out.print_json(result.to_json())
    else:
        _print_result(result)
    if result.failed:
        raise typer.Exit(Exit.FAILED)


def _tell(section: str) -> None:
    import sys

    out.print_text(f"measuring: {section}", sys.stderr)


def _parse_prices(text: str | None) -> StorePrices:
    from ckpt.simulate.scenario import StorePrices

    if text is None:
        return StorePrices()
    try:
        put, get, month = (float(each) for each in text.split(","))
    except ValueError:
        raise UsageError(f"--prices {text!r:.80}: give three numbers, such as 0.005,0.0004,0.023") from None
    if not all(0 <= each < 1e6 for each in (put, get, month)):
        raise UsageError(f"--prices {text!r:.80}: give three numbers of USD, none below 0")
    return StorePrices(gb_month=month, put_1000=put, get_1000=get)


def _print_result(result: SuiteResult) -> None:
    from ckpt.bench.render import COLUMNS, TITLES, figure_rows
    from ckpt.report.document import format_cell

    facts: dict[str, Any] = dict(result.facts)
    out.print_text(f"{facts['url']} from {facts['processor']}, {facts['cores']} cores, Linux {facts['kernel']}")
    for name, value in result.behaviour.items():
        out.print_text(f"  {name.replace('_', ' '):<26} {value}")
    for section, title in TITLES.items():
        figures = [each for each in result.figures if each.section == section]
        if section in result.failed:
            out.print_text(f"{title}: not measured: {result.failed[section]}")
        elif figures:
            out.print_text()
            rows = [[format_cell(cell) for cell in row] for row in figure_rows(figures)]
            out.print_table([title, *COLUMNS[1:]], rows, right=("value", "ceiling", "ratio"))


def _compare(old: Path, new: Path, json: bool) -> None:
    from ckpt.bench.figures import compare, read_result
    from ckpt.bench.render import comparison_rows
    from ckpt.report.document import format_cell

    before, after = read_result(old), read_result(new)
    found = compare(before, after)
    if not found:
        raise UsageError(f"{old} and {new} have no figure in common")
    columns = ("figure", "old", "new", "unit", "new / old", "verdict")
    rows = comparison_rows(found)
    if json:
        out.print_json({"figures": [dict(zip(columns, row, strict=True)) for row in rows]})
        return
    for name, result in (("old", before), ("new", after)):
        facts = result.facts
        size = out.format_size(facts["state_bytes"])
        out.print_text(f"{name}  {facts['url']}, {size}, {facts['processor']}, {facts['cores']} cores, {facts['time']}")
    shown = [[format_cell(cell) for cell in row] for row in rows]
    out.print_table(columns, shown, right=("old", "new", "new / old"))
    if alone := len(before.figures) + len(after.figures) - 2 * len(found):
        out.print_text(f"{format_count(alone, 'figure')} of one of them only")
