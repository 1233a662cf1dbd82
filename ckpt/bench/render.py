"""The results of the suite as a report: tables and plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt.bench.figures import Comparison, Figure, SuiteResult
from ckpt.report.document import Document, Plot, Section, Series, Table

TITLES = {"store": "The store", "codecs": "Codecs", "save": "Saving", "restore": "Restoring"}
ABOUT = {
    "store": "Each figure beside the library below ckpt (obstore, or plain files) on the same bytes in the same run. "
    "What was just written to a folder is read from the page cache.",
    "codecs": "One thread, on numbers like those of a model and its optimizer. The ceiling is a copy in memory.",
    "save": "A training job with a model and Adam. The ceiling of a pause is a copy of the state in memory; that of a "
    "commit, putting as many bytes without ckpt.",
    "restore": "From entering the block until the state is back, the agent's start and the listing among it. The "
    "ceiling is getting as many bytes without ckpt, or copying them in memory.",
}
_BYTES = 1 << 20


def to_document(result: SuiteResult) -> Document:
    """The whole report of one run."""
    facts = {
        name: f"{value / 2**30:.1f} GiB"
        if name == "memory_bytes"
        else f"{value / 2**20:.0f} MiB"
        if name == "state_bytes"
        else value
        for name, value in result.facts.items()
    }
    return Document(f"ckpt bench: {result.facts['url']}", facts, [*_sections(result)])


def _sections(result: SuiteResult) -> Iterator[Section]:
    if result.behaviour:
        rows = [(name.replace("_", " "), _answer(value)) for name, value in result.behaviour.items()]
        yield Section("What the store does", [Table(("property", "found"), rows)])
    for name, title in TITLES.items():
        figures = [each for each in result.figures if each.section == name]
        if name in result.failed:
            yield Section(title, [f"Not measured: {result.failed[name]}"])
        elif figures:
            yield Section(title, [ABOUT[name], Table(COLUMNS, figure_rows(figures)), *_plots(name, figures)])


COLUMNS = ("figure", "value", "unit", "ceiling", "ratio")


def figure_rows(figures: Sequence[Figure]) -> list[tuple[str | float | None, ...]]:
    """The rows of a table with COLUMNS."""
    return [(each.name, float(each.value), each.unit, each.ceiling, each.ratio) for each in figures]


def _answer(value: object) -> str | float:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else float(value) if isinstance(value, int | float) else str(value)


def _plots(section: str, figures: Sequence[Figure]) -> Iterator[Plot]:
    if section == "store":
        for direction in ("put", "get"):
            yield _bandwidth_plot(direction, [each for each in figures if each.at and each.name.startswith(direction)])
    elif section in ("save", "restore"):
        timed = [each for each in figures if each.ceiling is not None and each.unit in ("s", "ms")]
        seconds = [each.value / (1e3 if each.unit == "ms" else 1) for each in timed]
        ceilings = [(each.ceiling or 0.0) / (1e3 if each.unit == "ms" else 1) for each in timed]
        names = [each.name.replace(", codec ", "\n").replace(" a checkpoint", "\na checkpoint") for each in timed]
        yield Plot(
            f"{TITLES[section]}: seconds",
            "",
            "s",
            [Series("ckpt", names, seconds), Series("ceiling", names, ceilings)],
            kind="bars",
        )


def _bandwidth_plot(direction: str, figures: Sequence[Figure]) -> Plot:
    series = []
    for threads in sorted({each.at["threads"] for each in figures}):
        of_threads = [each for each in figures if each.at["threads"] == threads]
        sizes = [each.at["bytes"] / _BYTES for each in of_threads]
        series.append(Series(f"ckpt, {threads:g} at once", sizes, [each.value for each in of_threads]))
        if all(each.ceiling is not None for each in of_threads):
            label = f"ceiling, {threads:g} at once"
            series.append(Series(label, sizes, [each.ceiling or 0.0 for each in of_threads]))
    return Plot(f"Bandwidth of {direction}s", "object, MiB", "MB/s", series, log_x=True, log_y=True)


def comparison_rows(found: Sequence[Comparison]) -> list[tuple[str, float, float, str, float, str]]:
    """The rows of a table: figure, old, new, unit, new / old, verdict."""
    return [
        (
            f"{each.new.section}: {each.new.name}",
            each.old.value,
            each.new.value,
            each.new.unit,
            each.ratio,
            each.verdict,
        )
        for each in found
    ]
