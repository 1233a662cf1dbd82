"""A sweep: the outcomes of many scenarios under many traces, on all cores, and which of them none other beats."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from ckpt.simulate.engine import simulate
from ckpt.simulate.outcome import RunOutcome
from ckpt.simulate.scenario import Scenario
from ckpt.simulate.scenario_file import Choice, ScenarioFile
from ckpt.simulate.trace import Trace

Report = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One scenario under one trace."""

    choice: Choice
    trace: str
    outcome: RunOutcome


def run_sweep(
    scenarios: ScenarioFile,
    traces: Sequence[Trace],
    seed: int = 0,
    jobs: int | None = None,
    report: Report | None = None,
) -> list[SweepRun]:
    """Every scenario of the file under every trace, in the order of the file. `jobs`: processes; None: one for each
    core. `report` is told (done, total) after each. Errors: UsageError."""
    names = _distinct_names(traces)
    runs = [
        (choice, scenarios.scenario(choice), number) for choice in scenarios.choices for number in range(len(traces))
    ]
    count = min(jobs or len(os.sched_getaffinity(0)), len(runs))
    tell = report or (lambda done, total: None)
    if count == 1:
        found = []
        for done, (choice, scenario, number) in enumerate(runs, 1):
            found.append(SweepRun(choice, names[number], simulate(scenario, traces[number], seed)))
            tell(done, len(runs))
        return found
    # Not fork: the caller may have threads, such as that of a progress bar.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context, initializer=_keep_traces, initargs=(tuple(traces),)) as pool:
        jobs_under_way = [pool.submit(_simulate, scenario, number, seed) for _, scenario, number in runs]
        for done, _ in enumerate(as_completed(jobs_under_way), 1):
            tell(done, len(runs))
        return [
            SweepRun(choice, names[number], job.result())
            for (choice, _, number), job in zip(runs, jobs_under_way, strict=True)
        ]


def _distinct_names(traces: Sequence[Trace]) -> list[str]:
    """The traces' names; of equal ones the second is called "name (2)"."""
    seen: Counter[str] = Counter()
    names = []
    for trace in traces:
        seen[trace.name] += 1
        names.append(trace.name if seen[trace.name] == 1 else f"{trace.name} ({seen[trace.name]})")
    return names


_traces: tuple[Trace, ...] = ()  # of this process; sent to it once


def _keep_traces(traces: tuple[Trace, ...]) -> None:
    global _traces
    _traces = traces


def _simulate(scenario: Scenario, trace: int, seed: int) -> RunOutcome:
    return simulate(scenario, _traces[trace], seed)


def pareto_front(points: Iterable[tuple[float, float]]) -> list[int]:
    """The indices of the points (both coordinates: less is better) that no other point beats in one coordinate without
    being worse in the other; by the first coordinate, and of equal points the first."""
    ordered = sorted(enumerate(points), key=lambda each: (*each[1], each[0]))
    front: list[int] = []
    least = float("inf")
    for number, (_, second) in ordered:
        if second < least:
            front.append(number)
            least = second
    return front
