"""Recorded signals, read back from the logs that agents write (CKPT_SIGNALS_LOG): readings and failures by node.

- The lines of one agent (its `node`, `url` and `pid`) are one **run**, in the order of their times, whatever the order
  of the files. A `signals.begin` before the run has ended starts another run: a restarted container numbers its
  processes anew. A repeated line counts once.
- A run has failed at each `signals.failure`. It has also failed at its last reading, if it has no `signals.end` and a
  later run of the same node began: then the node itself was lost. A run without an end and without a successor may
  still go on: it has not failed.
- Lines that are no JSON, or no signals, are skipped and counted: a rotated or truncated file begins in the middle.
  Values without a name, and values that are no number from -10^12 to 10^12, are left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from ckpt.errors import UsageError
from ckpt.predict.scoring import LARGEST

LINE_BYTES_MAX = 1 << 16
READINGS_MAX = 2_000_000  # in all files: some 115 days of one node, each 5 s
SIGNALS_MAX = 64

ReadingsByEvent = dict[tuple[float, str], dict[str, float]]  # by time and event: the values of a reading


@dataclass(slots=True)
class RecordedRun:
    """One agent's run. `times_s`: the Unix time of each reading; `values`: the reading. `failures_s`: when it failed.
    `is_ended`: nothing was read since its `signals.end`."""

    node: str
    times_s: list[float] = field(default_factory=list)
    values: list[dict[str, float]] = field(default_factory=list)
    failures_s: list[float] = field(default_factory=list)
    is_ended: bool = True


@dataclass(frozen=True, slots=True)
class Recorded:
    """All runs, in the order of time. `skipped`: the number of invalid lines."""

    runs: Sequence[RecordedRun]
    skipped: int

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted({run.node for run in self.runs}))

    @property
    def failures(self) -> int:
        return sum(len(run.failures_s) for run in self.runs)

    def runs_of(self, nodes: Iterable[str]) -> list[RecordedRun]:
        """The runs of these nodes."""
        wanted = set(nodes)
        return [run for run in self.runs if run.node in wanted]


def read_signals(paths: Iterable[str | os.PathLike[str]]) -> Recorded:
    """Reads these files together. Give a rotated file (PATH.1), too. Errors: UsageError for more than READINGS_MAX
    readings; OSError."""
    agents: dict[tuple[str, str, int], ReadingsByEvent] = {}
    skipped = count = 0
    for path in paths:
        with open(path, "rb") as file:
            while raw := file.readline(LINE_BYTES_MAX):
                line = _line(raw)
                if line is None:
                    skipped += 1
                    continue
                said = agents.setdefault((line["node"], line["url"], line["pid"]), {})
                said[float(line["time"]), line["event"]] = _values(line)
                count += line["event"] == "signals"
                if count > READINGS_MAX:
                    raise UsageError(f"the files hold more than {READINGS_MAX} readings; give fewer files")
    found = [run for (node, _, _), said in agents.items() for run in _split_runs(node, said)]
    found.sort(key=lambda run: run.times_s[0])
    _add_losses(found)
    return Recorded(found, skipped)


def _line(raw: bytes) -> dict[str, Any] | None:
    """The parsed line, or None if it is invalid."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not raw.endswith(b"\n"):
        return None
    texts = all(isinstance(line.get(name), str) for name in ("event", "node", "url"))
    if (
        not texts
        or not _is_number(line.get("time"))
        or type(line.get("pid")) is not int
        or not line["event"].startswith("signals")
    ):
        return None
    if line["event"] == "signals" and not isinstance(line.get("values"), dict):
        return None
    return line


def _is_number(value: object) -> bool:
    """Whether it is a number of at most LARGEST, so that sums and squares of it stay finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def _values(line: Mapping[str, Any]) -> dict[str, float]:
    """The values of a reading; empty for any other line."""
    read = line["values"].items() if line["event"] == "signals" else ()
    return {name[:100]: float(value) for name, value in list(read)[:SIGNALS_MAX] if name and _is_number(value)}


def _split_runs(node: str, said: ReadingsByEvent) -> list[RecordedRun]:
    """The runs of one agent, or of several with the same number."""
    found = [RecordedRun(node)]
    for time_s, event in sorted(said, key=itemgetter(0)):
        run = found[-1]
        match event:
            case "signals":
                run.times_s.append(time_s)
                run.values.append(said[time_s, event])
                run.is_ended = False
            case "signals.failure":
                run.failures_s.append(time_s)
            case "signals.begin" if run.is_ended:
                run.is_ended = False
            case "signals.begin":
                found.append(RecordedRun(node, is_ended=False))
            case "signals.end":
                run.is_ended = True
    return [run for run in found if run.times_s]


def _add_losses(runs: Sequence[RecordedRun]) -> None:
    """Adds a failure to each run that never ended and has a successor on its node."""
    for i, run in enumerate(runs):
        last_s = run.times_s[-1]
        came_back = any(later.node == run.node and later.times_s[0] > last_s for later in runs[i + 1 :])
        known = any(failure_s >= last_s for failure_s in run.failures_s)
        if not run.is_ended and came_back and not known:
            run.failures_s.append(last_s)
