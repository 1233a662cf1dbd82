"""Simulated runs as tables and plots: one run, and a sweep with its Pareto front."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ckpt.report.document import Cell, Document, Plot, Section, Series, Table
from ckpt.simulate.outcome import RunOutcome
from ckpt.simulate.scenario_file import choice_texts
from ckpt.simulate.sweep import SweepRun, pareto_front

HOUR_S = 3600.0
GB = 1e9
PARTS = ("lost_s", "stalled_s", "recovering_s", "waiting_s")


def store_gb_hour(outcome: RunOutcome) -> float:
    """Traffic to the store, GB (10^9 bytes) per hour of the run."""
    return outcome.store_bytes_in / GB / (outcome.wall_s / HOUR_S) if outcome.wall_s else 0.0


def outcome_rows(outcome: RunOutcome) -> list[tuple[str, Cell, str]]:
    """Rows of quantity, value and unit for one run."""
    hours = {name: getattr(outcome, name) / HOUR_S for name in ("wall_s", "useful_s", *PARTS)}
    levels = outcome.recoveries_by_level
    lost = outcome.lost_steps_by_level
    rows: list[tuple[str, Cell, str]] = [
        ("wall time", hours["wall_s"], "h"),
        ("useful training", hours["useful_s"], "h"),
        ("training lost", hours["lost_s"], "h"),
        ("stalled by saves", hours["stalled_s"], "h"),
        ("recovering", hours["recovering_s"], "h"),
        ("waiting for nodes", hours["waiting_s"], "h"),
        ("overhead", 100 * outcome.overhead, "% of useful training"),
        ("slower than ideal", 100 * outcome.slowdown, "% of the same steps on all wanted nodes, nothing lost"),
        ("steps", outcome.useful_steps, "" if outcome.finished else "when the trace ended"),
        ("snapshots", outcome.snapshots, ""),
        ("commits", outcome.commits, ""),
        *((f"recoveries from {level}", count, f"{lost[level]} steps lost") for level, count in levels.items()),
        ("written to the store", outcome.store_bytes_in / GB, "GB"),
        ("read from the store", outcome.store_bytes_out / GB, "GB"),
        ("store, all in all", outcome.store_usd, "USD"),
    ]
    if outcome.node_usd is not None:
        rows.append(("nodes", outcome.node_usd, "USD"))
    return rows


def outcome_json(outcome: RunOutcome) -> dict[str, Any]:
    """The outcome as plain values."""
    from dataclasses import asdict

    return {
        **asdict(outcome),
        "overhead": outcome.overhead,
        "slowdown": outcome.slowdown,
        "recoveries_by_level": outcome.recoveries_by_level,
        "lost_steps_by_level": outcome.lost_steps_by_level,
    }


def sweep_columns(runs: Sequence[SweepRun]) -> tuple[str, ...]:
    """The columns of `sweep_rows`."""
    keys = tuple(runs[0].choice)
    figures = ("slower %", "steps", "lost h", "stalled h", "recovering h", "waiting h", "store GB/h", "USD", "best")
    return ("trace", *keys, *figures)


def sweep_rows(runs: Sequence[SweepRun]) -> list[tuple[Cell, ...]]:
    """A row for each run. "best" is * if none of the same trace has both a smaller slowdown and less traffic."""
    best = {id(runs[number]) for trace in _traces(runs) for number in _front(runs, trace)}
    return [
        (
            run.trace,
            *choice_texts(run.choice),
            100 * run.outcome.slowdown,
            run.outcome.useful_steps,
            *(getattr(run.outcome, part) / HOUR_S for part in PARTS),
            store_gb_hour(run.outcome),
            run.outcome.store_usd + (run.outcome.node_usd or 0.0),
            "*" if id(run) in best else "",
        )
        for run in runs
    ]


def sweep_document(runs: Sequence[SweepRun], name: str, seed: int) -> Document:
    """The report of a sweep."""
    facts: dict[str, Cell] = {"scenario": name, "traces": ", ".join(_traces(runs)), "runs": len(runs), "seed": seed}
    return Document(f"ckpt simulate: {name}", facts, [*_sections(runs)])


def _sections(runs: Sequence[SweepRun]) -> Iterator[Section]:
    for trace in _traces(runs):
        of_trace = [run for run in runs if run.trace == trace]
        yield Section(
            f"Trace {trace}",
            [
                "Slower: wall time against the same steps on all wanted nodes with nothing lost. Marked with * in the "
                "table and joined in the plot: no other run has both a smaller slowdown and less traffic to the store.",
                _pareto_plot(of_trace),
                *_plots_by_key(of_trace),
                _parts_plot(of_trace),
            ],
        )
    yield Section("All runs", [Table(sweep_columns(runs), sweep_rows(runs))])


def _pareto_plot(runs: Sequence[SweepRun]) -> Plot:
    points = _points(runs)
    front = pareto_front(points)
    names = [", ".join(choice_texts(runs[number].choice)) for number in front]
    return Plot(
        "Slowdown against traffic to the store",
        "GB to the store per hour",
        "slower than ideal, %",
        [
            Series("all runs", [each[1] for each in points], [each[0] for each in points], line=False),
            Series("best", [points[n][1] for n in front], [points[n][0] for n in front], names),
        ],
        log_x=_spans_decades([each[1] for each in points]),
        log_y=_spans_decades([each[0] for each in points]),
    )


def _spans_decades(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) / min(values) > 20 and max(values) < float("inf")


def _plots_by_key(runs: Sequence[SweepRun]) -> Iterator[Plot]:
    """The slowdown for each value of a key that has several numbers: the least over the other keys."""
    for key in runs[0].choice:
        values = {run.choice[key] for run in runs if isinstance(run.choice[key], int | float)}
        if len(values) < 2:
            continue
        least = {
            value: min(100 * run.outcome.slowdown for run in runs if run.choice[key] == value)
            for value in sorted(values)
        }
        yield Plot(
            f"Slowdown by {key}",
            key,
            "least slowdown, %",
            [Series(key, list(least), list(least.values()))],
            log_x=_spans_decades([*values]),
        )


def _parts_plot(runs: Sequence[SweepRun]) -> Plot:
    """Where the time of the best runs goes."""
    best = [runs[number] for number in pareto_front(_points(runs))]
    names = ["\n".join(choice_texts(run.choice)) for run in best]
    return Plot(
        "Where the time goes",
        "",
        "% of useful training",
        [
            Series(
                part.removesuffix("_s"),
                names,
                [
                    100 * getattr(run.outcome, part) / run.outcome.useful_s if run.outcome.useful_s else 0
                    for run in best
                ],
            )
            for part in PARTS
        ],
        kind="bars",
    )


def _points(runs: Sequence[SweepRun]) -> list[tuple[float, float]]:
    """Slowdown and traffic with the digits that are shown: smaller differences make no run better."""
    return [(_rounded(100 * run.outcome.slowdown), _rounded(store_gb_hour(run.outcome))) for run in runs]


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _front(runs: Sequence[SweepRun], trace: str) -> list[int]:
    numbers = [number for number, run in enumerate(runs) if run.trace == trace]
    return [numbers[at] for at in pareto_front(_points([runs[number] for number in numbers]))]


def _traces(runs: Sequence[SweepRun]) -> list[str]:
    return list(dict.fromkeys(run.trace for run in runs))
