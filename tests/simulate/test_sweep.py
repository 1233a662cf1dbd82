"""Sweeps: the same outcomes on one core and on several, the front that none beats, and the report."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from ckpt.cli.exits import Exit
from ckpt.simulate.generators import Fleet, exponential
from ckpt.simulate.render import sweep_columns, sweep_document, sweep_rows
from ckpt.simulate.scenario_file import ScenarioFile
from ckpt.simulate.sweep import pareto_front, run_sweep
from ckpt.simulate.trace_files import save
from tests.cli.stores import run_ckpt

VALUES = {
    "nodes": 4,
    "nodes_min": 2,
    "step_s": 1.0,
    "state_bytes": 1e9,
    "sweep": {"policy": ["every 20 steps", "every 200 steps", "every 2000 steps"], "commit_every": [1, 4]},
}
TRACES = [exponential(Fleet(4, 20, seed), mtbf_h=4) for seed in (1, 2)]


@pytest.fixture
def no_tracker() -> Iterator[None]:
    """Processes that are spawned bring a tracker of resources, which ends with this process, or here."""
    yield
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("no_tracker")
def test_one_process_and_two_give_the_same_in_the_same_order() -> None:
    file, told = ScenarioFile(VALUES, "s"), []
    alone = run_sweep(file, TRACES, jobs=1, report=lambda done, total: told.append((done, total)))
    assert told == [(number, 12) for number in range(1, 13)]
    told.clear()
    assert run_sweep(file, TRACES, jobs=2, report=lambda done, total: told.append((done, total))) == alone
    assert told[-1] == (12, 12)
    assert [run.choice for run in alone[::2]] == file.choices
    assert len({run.outcome for run in alone}) == 12


def test_the_front_is_what_no_other_point_beats() -> None:
    rng = random.Random(0)
    for _ in range(200):
        points = [(rng.randrange(6), rng.randrange(6)) for _ in range(rng.randrange(1, 12))]
        front = pareto_front(points)
        for number, point in enumerate(points):
            beaten = any(other[0] <= point[0] and other[1] <= point[1] and other != point for other in points)
            first = points.index(point) == number
            assert (number in front) == (first and not beaten), (points, front)
        assert [points[number][0] for number in front] == sorted(points[number][0] for number in front)


def test_each_trace_has_its_own_best_runs_and_plots() -> None:
    runs = run_sweep(ScenarioFile(VALUES, "s"), TRACES, jobs=1)
    columns, rows = sweep_columns(runs), sweep_rows(runs)
    assert all(len(row) == len(columns) for row in rows)
    names = ["exponential", "exponential (2)"]
    for name in names:
        assert [row for row in rows if row[0] == name and row[-1] == "*"]
    document = sweep_document(runs, "s", 0)
    titles = [section.title for section in document.sections]
    assert titles == [*(f"Trace {name}" for name in names), "All runs"]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    save(TRACES[0], tmp_path / "spot.csv")
    scenario = tmp_path / "job.toml"
    scenario.write_text("nodes = 4\nnodes_min = 2\nstep_s = 1.0\nstate_bytes = 1e9\npolicy = 'every 60 steps'\n")
    return scenario, tmp_path / "spot.csv"


def test_the_commands_run_and_sweep(files: tuple[Path, Path], tmp_path: Path) -> None:
    scenario, trace = files
    said = run_ckpt("simulate", "run", scenario, trace)
    assert said.code == 0, said.err
    assert "recoveries from peer" in said.out
    found = run_ckpt("simulate", "run", scenario, trace, "--json").json
    parts = [found[name] for name in ("useful_s", "lost_s", "stalled_s", "recovering_s", "waiting_s")]
    assert found["wall_s"] == pytest.approx(sum(parts))
    with scenario.open("a") as file:
        file.write("[sweep]\ncommit_every = [1, 2]\n")
    said = run_ckpt(
        "simulate", "sweep", scenario, trace, "--jobs", "1",
        "--out", tmp_path / "r.html", "--out", tmp_path / "r.json", "--out", tmp_path / "r.md",
    )  # fmt: skip
    assert said.code == 0, said.err
    assert "commit_every" in said.out
    assert "<svg" in (tmp_path / "r.html").read_text()
    assert [run["choice"] for run in json.loads((tmp_path / "r.json").read_text())["runs"]] == [
        {"commit_every": 1},
        {"commit_every": 2},
    ]
    assert "r-plots/" in (tmp_path / "r.md").read_text()


def test_a_run_of_a_sweep_is_refused(files: tuple[Path, Path]) -> None:
    with files[0].open("a") as file:
        file.write("[sweep]\ncommit_every = [1, 2]\n")
    said = run_ckpt("simulate", "run", *files)
    assert said.code == Exit.USAGE
    assert "use ckpt simulate sweep" in said.err
