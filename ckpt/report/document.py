"""What a report consists of: values only, so that each writer shows the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below column names. Numbers are aligned to the right and shown with three significant digits; None is an
    empty cell."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour. `names`: a text beside each point, or none. `line`: whether a line joins them."""

    label: str
    xs: Sequence[float | str]
    ys: Sequence[float]
    names: Sequence[str] = ()
    line: bool = True


@dataclass(frozen=True, slots=True)
class Plot:
    """`kind`: "points", or "bars" (one group for each x). Axes with `log_x` or `log_y` are logarithmic."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    kind: Literal["points", "bars"] = "points"
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """`parts` in order: paragraphs, tables and plots."""

    title: str
    parts: Sequence[str | Table | Plot]


@dataclass(frozen=True, slots=True)
class Document:
    """`facts`: what holds for the whole report, such as the machine and the versions."""

    title: str
    facts: Mapping[str, Cell]
    sections: Sequence[Section]


def format_cell(value: Cell) -> str:
    """A cell as text."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
