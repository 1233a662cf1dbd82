"""The benchmarks of lost nodes run small, so that they cannot rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.replay import take_seats
from ckpt.simulate.trace import EventKind, Trace, TraceEvent
from tests.checkpointer.scripts import ROOT
from tests.nodes import lan as lans
from tests.nodes.jobs import NO_ANSWER


@pytest.mark.torchrun
@pytest.mark.timeout(400)
@pytest.mark.flaky(reruns=1, only_rerun=[NO_ANSWER])
@pytest.mark.parametrize("name", ["recover", "soak"])
def test_a_benchmark_of_lost_nodes_runs(name: str, tmp_path: Path) -> None:
    if why := lans.why_not():
        pytest.skip(why)
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--small", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=390)
    why = f"({NO_ANSWER}) " if NO_ANSWER in done.stderr else ""
    assert done.returncode == 0, f"{why}{done.stderr[-6000:]}"
    assert json.loads(out.read_text())["rows"]


def test_a_window_of_a_trace_holds_no_more_nodes_than_the_job_has_seats() -> None:
    """Who is seated when the window begins comes at 0; who found no seat never goes either."""
    add, remove, crash = EventKind.ADD, EventKind.REMOVE, EventKind.CRASH
    events = [(0, add, "a"), (0, add, "b"), (0, add, "c"), (3600, remove, "c"), (5400, remove, "a"), (7200, crash, "b")]
    events += [(9000, add, "d"), (9000, add, "e"), (10800, remove, "e"), (14400, remove, "b")]
    trace = Trace("made", 20_000.0, tuple(TraceEvent(float(at_s), kind, node) for at_s, kind, node in events))
    cut = take_seats(trace, seats=2, begin_s=3000.0, window_h=3.0, compress=60.0)
    assert cut.span_s == 180.0
    assert [(each.time_s, each.kind, each.node) for each in cut.events] == [
        (0.0, add, "a"),
        (0.0, add, "b"),
        (40.0, remove, "a"),
        (70.0, crash, "b"),
        (100.0, add, "d"),
    ]
