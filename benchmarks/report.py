"""What every benchmark prints: the machine, a table of figures against their ceilings in the same run, and JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import ckpt

os.environ.setdefault("CKPT_NOTICES", "off")  # no benchmark asks the cloud that its machine may be in
os.environ.setdefault("CKPT_SIGNALS", "off")  # the one that measures what they cost turns them on


@dataclass(frozen=True, slots=True)
class Row:
    """`ratio`: figure against ceiling, as the question puts it. `bar`: what the ratio (or the figure, where there is no
    ceiling) has to reach, in words. `met`: None where there is no bar."""

    question: str
    figure: float
    unit: str
    bar: str
    met: bool | None
    ceiling: float | None = None
    ratio: float | None = None


def parser(doc: str | None) -> argparse.ArgumentParser:
    """--small: seconds instead of minutes, for the tests. --json FILE: the results, too."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--small", action="store_true", help="a size that the tests run, so that it cannot rot")
    made.add_argument("--json", type=Path, help="write the results to this file")
    return made


def machine() -> dict[str, object]:
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "name": platform.node(),
        "cpu": cpu.partition(":")[2].strip() or platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "ckpt": ckpt.__version__,
    }


def report(benchmark: str, rows: Sequence[Row], args: argparse.Namespace) -> int:
    """The exit code: 1 where a bar is not met, 0 else; with --small always 0, since small sizes say nothing."""
    about = machine()
    print(f"{benchmark} on {about['name']}: {about['cpu']}, {about['cores']} cores, Linux {about['kernel']}")
    width = max(len(row.question) for row in rows)
    for row in rows:
        ceiling = "" if row.ceiling is None else f"  ceiling {row.ceiling:10.4g} {row.unit}"
        ratio = "" if row.ratio is None else f"  ratio {row.ratio:6.3f}"
        met = "" if row.met is None else ("  met" if row.met else "  NOT MET")
        print(f"  {row.question:{width}}  {row.figure:10.4g} {row.unit}{ceiling}{ratio}  (bar: {row.bar}){met}")
    if args.json:
        body = {"benchmark": benchmark, "machine": about, "small": args.small, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(body, indent=1) + "\n")
    sys.stdout.flush()
    return int(not args.small and any(row.met is False for row in rows))


def peak_bytes(pid: int | str = "self") -> int:
    """The largest resident memory of a process so far, shared pages that it touched among it."""
    return _status_bytes(pid, "VmHWM")


def resident_bytes(pid: int | str = "self") -> int:
    return _status_bytes(pid, "VmRSS")


def shared_bytes(pid: int | str = "self") -> int:
    """Of what is resident: shared memory."""
    return _status_bytes(pid, "RssShmem")


def forget_peak(pid: int | str = "self") -> None:
    """The peak begins anew at what is resident now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status_bytes(pid: int | str, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


@contextlib.contextmanager
def environment(wanted: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def median_s(work: Callable[[], object], rounds: int) -> float:
    return statistics.median(timed(work) for _ in range(rounds))
