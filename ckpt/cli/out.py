"""The output of commands: text and tables for people, one JSON object on standard output for programs.

Progress and errors go to standard error. rich is imported only to draw a table or a bar.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TextIO

import typer

from ckpt.errors import UsageError
from ckpt.events import replace_nonfinite

WIDTH_MAX = 1000  # of a table in a file or a pipe, where nothing is cut

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
UrlArgument = Annotated[str, typer.Argument(metavar="URL", help="Where the run saves: a path, s3://bucket/run, ...")]
StepOption = Annotated[
    str | None,
    typer.Option("--step", metavar="STEP", help="A step as `ckpt ls` shows it (300, 300.1), or a full identity."),
]


def check_seconds(value: float) -> float:
    """The callback of options in seconds: typer accepts "nan" and "inf" as numbers. Errors: BadParameter for them."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number of seconds")
    return value


class Unwritten(OSError):
    """Standard output cannot be written. It has no errno: click ends with status 1 for that of a broken pipe."""


class Unread(Unwritten, BrokenPipeError):
    """The reader of standard output has gone."""


class Printed:
    """Standard output for all writers, also click (the help) and rich. Errors: Unwritten."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._translate_errors():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._translate_errors():
            self._stream.flush()

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            kind = Unread if isinstance(exc, BrokenPipeError) else Unwritten
            raise kind(f"standard output cannot be written: {exc}") from exc


def print_text(text: str = "", to: TextIO | None = None) -> None:
    """Prints lines, on standard output by default."""
    print("\n".join(map(printable, text.split("\n"))), file=to)


def printable(said: str) -> str:
    """The text without control characters: names and messages from stores and programs must not move the cursor or set
    colours."""
    return said if said.isprintable() else "".join(c if c.isprintable() else "?" for c in said)


def print_json(body: Mapping[str, Any]) -> None:
    """Prints the body as JSON. Infinite and NaN become null."""
    print_text(json.dumps(replace_nonfinite(dict(body)), default=str, indent=1 if sys.stdout.isatty() else None))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """Prints a table, plain, so that it can be piped. The columns named in `right` are aligned to the right. The other
    columns wrap on a narrow terminal, since names differ at their ends."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        is_right = column in right
        drawn.add_column(column, justify="right" if is_right else "left", no_wrap=is_right, overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(printable(str(cell))) for cell in row))
    text = io.StringIO()
    console(text, None if sys.stdout.isatty() else WIDTH_MAX).print(drawn)
    for line in text.getvalue().splitlines():
        print_text(line.rstrip())


def console(stream: TextIO, width: int | None = None) -> Any:
    """A console of rich that takes texts as they are."""
    from rich.console import Console

    return Console(file=stream, width=width, highlight=False, markup=False)


Report = Callable[[int, int], None]


@contextmanager
def progress(label: str, *, json: bool = False, of: Literal["bytes", "rounds"] = "bytes") -> Iterator[Report | None]:
    """Shows a bar on standard error while the block runs. Yields report(done, total), in the unit `of`, callable on any
    thread; None if standard error is no terminal, or with `json`."""
    if json or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amount = (DownloadColumn(binary_units=True), TransferSpeedColumn()) if of == "bytes" else (MofNCompleteColumn(),)
    shown = (TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn())
    with Progress(*shown, console=console(sys.stderr), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def process_id(pid: int) -> str:
    """An agent's process id for people. 0: the process is not visible from here."""
    return str(pid) if pid else "of another pid namespace"


def format_size(count: int | float) -> str:
    """Bytes for people: "3.2 MiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def parse_size(option: str, text: str) -> int:
    """Bytes: "64GiB", "64Gi", "64G", "1.5TiB" (powers of 1024), or a plain number. Errors: UsageError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])i?B?|B)?", text.strip(), re.IGNORECASE)
    count = float(found[1]) * _UNITS[(found[2] or "").upper()] if found is not None else 0.0
    if not 1 <= count < 1 << 60:
        raise UsageError(f"{option} {text!r:.80} is no size; give one such as 64GiB")
    return int(count)


def format_time(unix_s: float) -> str:
    """A Unix time as text, in this machine's time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def format_age(unix_s: float) -> str:
    """The time since then, for people: "3 min ago"."""
    seconds = max(0.0, time.time() - unix_s)
    for unit, span in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * span:
            return f"{seconds / span:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
