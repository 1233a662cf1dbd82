"""The figures of one run of the suite, as values and as JSON, and the comparison of two runs."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from ckpt.errors import UsageError
from ckpt.threads import Tasks

T = TypeVar("T")

FORMAT = 1
CHANGE_MIN = 0.1  # a figure that differs by less is called equal
VERSIONS = ("multilevel-ckpt", "torch", "numpy", "obstore", "fsspec", "zstandard", "xxhash")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value. `ceiling`: what the library or hardware below does for the same work in the same run, in the
    same unit; None if there is none. `at`: the parameters under which it was measured, such as bytes and threads."""

    section: str
    name: str
    value: float
    unit: str
    better: Literal["lower", "higher", ""] = ""
    ceiling: float | None = None
    at: Mapping[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        return self.value / self.ceiling if self.ceiling else None


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """A run of the suite. `facts`: machine, versions, URL and sizes. `behaviour`: what the store does. `failed`: the
    sections that could not be measured, with the reason."""

    facts: Mapping[str, Any]
    behaviour: Mapping[str, Any]
    figures: Sequence[Figure]
    failed: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {
            "ckpt_bench": FORMAT,
            "facts": dict(self.facts),
            "behaviour": dict(self.behaviour),
            "figures": [asdict(each) for each in self.figures],
            "failed": dict(self.failed),
        }


def read_result(path: Path) -> SuiteResult:
    """What `ckpt bench --out FILE.json` wrote. Errors: UsageError if the file is something else."""
    try:
        body = json.loads(path.read_bytes())
        if body["ckpt_bench"] != FORMAT:
            raise UsageError(f"{path} was written by another version of ckpt bench; run it again")
        figures = [Figure(**each) for each in body["figures"]]
        return SuiteResult(body["facts"], body["behaviour"], figures, body["failed"])
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc}") from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise UsageError(f"{path} is no result of ckpt bench; give a file that --out FILE.json wrote") from exc


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure in two runs; `ratio` is new / old. `verdict`: "better", "worse" or "equal"; "" if neither is better."""

    old: Figure
    new: Figure
    ratio: float
    verdict: str


def compare(old: SuiteResult, new: SuiteResult) -> list[Comparison]:
    """The figures that both runs have, in the order of the new one."""
    before = {(each.section, each.name): each for each in old.figures}
    found = []
    for each in new.figures:
        former = before.get((each.section, each.name))
        if former is not None and former.unit == each.unit and former.value > 0:
            ratio = each.value / former.value
            found.append(Comparison(former, each, ratio, _verdict(each.better, ratio)))
    return found


def _verdict(better: str, ratio: float) -> str:
    if not better:
        return ""
    if 1 / (1 + CHANGE_MIN) <= ratio <= 1 + CHANGE_MIN:
        return "equal"
    return "better" if (ratio < 1) == (better == "lower") else "worse"


def machine_facts() -> dict[str, Any]:
    """Processor, cores, memory, kernel, versions, and the commit if ckpt is a git checkout."""
    import importlib.metadata

    facts: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    for name in VERSIONS:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if commit := _commit():
        facts["commit"] = commit
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.machine()


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            ["git", "-C", os.fspath(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def timed(work: Callable[[], object]) -> float:
    """The seconds that `work` takes."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def run_all(tasks: Tasks, work: Callable[..., T], items: Iterable[Any]) -> list[T]:
    """`work(item)` for each, on the threads of the pool. Errors: those of the first that failed, once all are over."""
    jobs = [tasks.submit(work, item) for item in items]
    for job in jobs:
        job.wait_until_done()
    return [job.result() for job in jobs]


def in_turns(works: Mapping[str, Callable[[], object]], rounds: int, limit_s: float) -> dict[str, float]:
    """The median seconds of each. They take turns, in the other order each round, after one round that warms up. No
    round begins once `limit_s` seconds are spent, but for the first that counts."""
    spent: dict[str, list[float]] = {name: [] for name in works}
    began_s = time.monotonic()
    for number in range(rounds + 1):
        if number > 1 and time.monotonic() - began_s > limit_s:
            break
        for name in sorted(works, reverse=bool(number % 2)):
            seconds = timed(works[name])
            if number:
                spent[name].append(seconds)
    return {name: statistics.median(each) for name, each in spent.items()}
