"""Recorded signals, as agents write them (CKPT_SIGNALS_LOG), read back: by node, when it read what, and when it failed.

The lines of one agent (its `node`, `url` and `pid`) are one **run**, in the order of their times, in whatever order
files are given; what begins where that has not ended is another: in a container that is started again processes are
numbered anew. A line that is given twice counts once. A run has failed where it says so (`signals.failure`), and at its
last reading where it never said that it ended (`signals.end`) while a later run of the same node began: then the node
itself was lost. A run that neither ended nor was followed may still go on: it has not failed. Lines that are no JSON,
or of something else, are passed over and counted: a file that was rotated or cut off begins in the middle. Of values
those are left out that have no name, or are no number from -10^12 to 10^12.
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

Said = dict[tuple[float, str], dict[str, float]]  # by when, and the event: the values of a reading


@dataclass(slots=True)
class RecordedRun:
    """Of one agent. `times_s`: Unix time of each reading, `values`: what it was. `failures_s`: when it failed. `ended`:
    nothing was read since it said so."""

    node: str
    times_s: list[float] = field(default_factory=list)
    values: list[dict[str, float]] = field(default_factory=list)
    failures_s: list[float] = field(default_factory=list)
    ended: bool = True


@dataclass(frozen=True, slots=True)
class Recorded:
    """`runs`: in the order of time. `skipped`: lines that were none."""

    runs: Sequence[RecordedRun]
    skipped: int

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted({run.node for run in self.runs}))

    @property
    def failures(self) -> int:
        return sum(len(run.failures_s) for run in self.runs)

    def of(self, nodes: Iterable[str]) -> list[RecordedRun]:
        wanted = set(nodes)
        return [run for run in self.runs if run.node in wanted]


def read(paths: Iterable[str | os.PathLike[str]]) -> Recorded:
    """All of these files together; of a file that was renamed as it was full (PATH.1) each is given. Errors:
    UsageError where there are more readings than READINGS_MAX; OSError."""
    agents: dict[tuple[str, str, int], Said] = {}
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
                    raise UsageError(f"more than {READINGS_MAX} readings: give fewer files")
    found = [run for (node, _, _), said in agents.items() for run in _runs(node, said)]
    found.sort(key=lambda run: run.times_s[0])
    _add_losses(found)
    return Recorded(found, skipped)


def _line(raw: bytes) -> dict[str, Any] | None:
    """One that is right, or None."""
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
    """Of a size that a reading can have: what sums and squares of it are is a number, too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def _values(line: Mapping[str, Any]) -> dict[str, float]:
    """Of a reading; of any other line there are none."""
    read = line["values"].items() if line["event"] == "signals" else ()
    return {name[:100]: float(value) for name, value in list(read)[:SIGNALS_MAX] if name and _is_number(value)}


def _runs(node: str, said: Said) -> list[RecordedRun]:
    """Of one agent, or of several of one number."""
    found = [RecordedRun(node)]
    for time_s, event in sorted(said, key=itemgetter(0)):
        run = found[-1]
        match event:
            case "signals":
                run.times_s.append(time_s)
                run.values.append(said[time_s, event])
                run.ended = False
            case "signals.failure":
                run.failures_s.append(time_s)
            case "signals.begin" if run.ended:
                run.ended = False
            case "signals.begin":
                found.append(RecordedRun(node, ended=False))
            case "signals.end":
                run.ended = True
    return [run for run in found if run.times_s]


def _add_losses(runs: Sequence[RecordedRun]) -> None:
    """Who never ended, and came back, was lost."""
    for i, run in enumerate(runs):
        last_s = run.times_s[-1]
        came_back = any(later.node == run.node and later.times_s[0] > last_s for later in runs[i + 1 :])
        known = any(failure_s >= last_s for failure_s in run.failures_s)
        if not run.ended and came_back and not known:
            run.failures_s.append(last_s)
