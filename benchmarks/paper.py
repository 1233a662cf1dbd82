"""The same job with torch.save to the store and with ckpt: pause, checkpoint time, makespan, and a node that is lost.

    python -m benchmarks.paper [--small] [--server rclone|ceph] [--rounds N] [--json FILE] [--plot FILE.png]

One process with 667 MB and with 1.31 GB of fp32 weights and Adam moments takes N steps, with a checkpoint every K. No
peers: torch.save blocks until boto3 has put the object; ckpt has its levels local and store. Makespan is from the first
step to the end of the last one. Then the node is lost in the middle between two checkpoints: SIGKILL to the process and
to all its helpers, ckpt's agent among them. A new process restores and goes on; makespan counts all of that, ckpt's
wait for two heartbeats of the former job too.

The bars: ckpt pauses the loop for less than 1 % of torch.save's time, and its makespan without a failure is less than
0.01 % longer than without checkpoints. The error is the standard error over the rounds. Where it is larger than the bar
the machine cannot decide, and the row says so.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import BY_NAME, Blocking, Job, Tool, quiet
from benchmarks.peers import MARK, Loop, Marked, empty, products_in, serving
from benchmarks.report import Row, parser, report
from ckpt.report.document import Plot, Series
from ckpt.report.plots import draw
from tests import ceph

PAUSE_BAR, IMPACT_BAR = 0.01, 1e-4
TOOLS = {"torch.save": "torch.save, boto3", "ckpt": "ckpt, auto, deferred"}
NOTHING = "no checkpoints"
PROCESS_S = 900.0


@dataclass(frozen=True)
class Size:
    total_bytes: int
    steps: int
    every: int
    step_s: float
    products: int = 0  # in a step; counted once, so that all runs do the same work

    @property
    def label(self) -> str:
        return f"{self.total_bytes / 1e6:.0f} MB"


FULL = [Size(667_000_000, 60, 10, 0.5), Size(1_310_000_000, 60, 10, 0.5)]
SMALL = [Size(8 << 20, 12, 4, 0.02)]


class Nothing(Blocking):
    """No checkpoints."""

    def save(self, step: int) -> None:
        pass

    def restore(self) -> None:
        pass


def train(name: str, place: str, size: Size) -> None:
    """A process of its own: restores, trains to the last step, and prints each step and what it cost."""
    torch.set_num_threads(1)
    quiet()
    job = Job(size.total_bytes)
    tool: Tool = Nothing(job, place) if name == NOTHING else BY_NAME[TOOLS[name]].make(job, place)
    tool.restore()
    loop = Loop(job, tool, size.products)
    # One step is taken before the first, so that the moments are there.
    done = int(next(iter(job.optim.state.values()))["step"]) - 1
    say(begins=done)
    began_s = time.monotonic()
    pauses: list[float] = []
    stored: list[float] = []
    waiters: list[threading.Thread] = []
    for step in range(done + 1, size.steps + 1):
        waited_s = loop.step()
        if pauses and waiters and step % size.every == 1:
            pauses[-1] += waited_s
        if step % size.every == 0 and step < size.steps:
            asked_s = time.perf_counter()
            tool.save(step)
            pauses.append(time.perf_counter() - asked_s)
            waiters.append(threading.Thread(target=_stored, args=(tool, asked_s, stored)))
            waiters[-1].start()
        say(step=step)
    makespan_s = time.monotonic() - began_s
    for each in waiters:
        each.join()
    if hasattr(tool, "stalls_s"):
        pauses = tool.stalls_s()
    say(makespan_s=makespan_s, pauses=pauses, stored=stored, digest=job.digest())
    tool.close()
    os._exit(0)


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def _stored(tool: Tool, asked_s: float, stored: list[float]) -> None:
    tool.wait()
    stored.append(time.perf_counter() - asked_s)


def lines_of(name: str, place: str, size: Size, folder: str, mark: str) -> Iterator[dict[str, Any]]:
    """What such a process says. Ending the iteration ends it and its helpers with SIGKILL."""
    runtime = {"CKPT_RUNTIME_DIR": f"{folder}/{mark}", "CKPT_LINGER_S": "0", "PYTHONWARNINGS": "ignore"}
    code = f"from benchmarks.paper import Size, train; train({name!r}, {place!r}, {size!r})"
    marked = Marked(mark)
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[1],
            env={**os.environ, **runtime, MARK: mark},
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdout is not None
        timer = threading.Timer(PROCESS_S, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                if line.startswith(b"{"):
                    yield json.loads(line)
            if process.wait() != 0:
                errors.seek(0)
                raise RuntimeError(errors.read().decode(errors="replace")[-2000:])
        finally:
            timer.cancel()
            for each in marked.processes():
                each.kill()
            process.kill()
            process.wait()
            process.stdout.close()


def whole(name: str, place: str, size: Size, folder: str) -> dict[str, Any]:
    """The last line of a run that nothing happens to."""
    return list(lines_of(name, place, size, folder, secrets.token_hex(8)))[-1]


def with_a_loss(name: str, place: str, size: Size, folder: str) -> dict[str, Any]:
    """The same with the node lost in the middle between two checkpoints."""
    at_step = size.steps // 2 // size.every * size.every + size.every // 2
    began_s = 0.0
    lines = lines_of(name, place, size, folder, secrets.token_hex(8))
    for said in lines:
        began_s = time.monotonic() if "begins" in said else began_s
        if said.get("step") == at_step:
            break
    lost_s = time.monotonic()
    lines.close()
    said, back_at, back_s = {}, 0, 0.0
    for line in lines_of(name, place, size, folder, secrets.token_hex(8)):
        if "begins" in line:
            back_at, back_s = line["begins"], time.monotonic() - lost_s
        if line.get("step") == size.steps:
            said["makespan_s"] = time.monotonic() - began_s
        said["digest"] = line.get("digest", "")
    return {**said, "lost_steps": at_step - back_at, "back_s": back_s}


def of_size(size: Size, root: str, folder: str, rounds: int) -> list[Row]:
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in (NOTHING, *TOOLS)}
    losses: dict[str, list[dict[str, Any]]] = {name: [] for name in TOOLS}
    for number in range(rounds):
        for name in list(runs)[:: -1 if number % 2 else 1]:
            place = f"{root}/{secrets.token_hex(4)}"
            runs[name].append(whole(name, place, size, folder))
            empty(place)
        for name in TOOLS:
            place = f"{root}/{secrets.token_hex(4)}"
            losses[name].append(with_a_loss(name, place, size, folder))
            empty(place)
    label = size.label
    bare_s = statistics.median(each["makespan_s"] for each in runs[NOTHING])
    torch_pause_s = _median(runs["torch.save"], "pauses")
    digest = runs[NOTHING][0]["digest"]
    rows = [Row(f"{label}: {NOTHING}: makespan of {size.steps} steps", bare_s, "s", "shown", None)]
    for name in TOOLS:
        pause_s, stored_s = _median(runs[name], "pauses"), _median(runs[name], "stored")
        ratio = pause_s / torch_pause_s
        words, met = ("shown", None) if name != "ckpt" else (f"below {100 * PAUSE_BAR:g} %", ratio < PAUSE_BAR)
        impact, error = impact_of(runs[name], runs[NOTHING])
        lost = losses[name]
        same = all(each["digest"] == digest for each in (*runs[name], *lost))
        rows += [
            Row(f"{label}: {name}: checkpoint time", stored_s, "s", "shown", None),
            Row(f"{label}: {name}: pause", 1e3 * pause_s, "ms", words, met, 1e3 * torch_pause_s, ratio),
            _impact_row(f"{label}: {name}: makespan without a failure longer by", name, impact, error),
            Row(f"{label}: {name}: ... error of that", 100 * error, "%", "shown", None),
            Row(f"{label}: {name}: makespan with a lost node", _of(lost, "makespan_s"), "s", "shown", None, bare_s),
            Row(f"{label}: {name}: ... lost work", _of(lost, "lost_steps") * size.step_s, "s", "shown", None),
            Row(f"{label}: {name}: ... from the loss to the next step", _of(lost, "back_s"), "s", "shown", None),
            Row(f"{label}: {name}: ends bit for bit as without", float(same), "of 1", "all", same),
        ]
    return rows


def impact_of(runs: list[dict[str, Any]], bare: list[dict[str, Any]]) -> tuple[float, float]:
    """By which part the makespan is longer than in the run without checkpoints of the same round, and its error."""
    parts = [a["makespan_s"] / b["makespan_s"] - 1 for a, b in zip(runs, bare, strict=True)]
    error = statistics.stdev(parts) / len(parts) ** 0.5 if len(parts) > 1 else float("inf")
    return statistics.mean(parts), error


def _impact_row(question: str, name: str, impact: float, error: float) -> Row:
    words: str = "shown"
    met: bool | None = None
    if name == "ckpt":
        words = f"below {100 * IMPACT_BAR:g} %"
        if error > IMPACT_BAR and impact - 2 * error < IMPACT_BAR:
            words += "; undecided: the error is larger"
        else:
            met = impact < IMPACT_BAR
    return Row(question, 100 * impact, "%", words, met)


def _median(runs: list[dict[str, Any]], key: str) -> float:
    """Over all checkpoints but the first of each run."""
    return statistics.median(value for each in runs for value in each[key][1:])


def _of(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(each[key] for each in runs)


def plot_of(rows: list[Row], sizes: list[Size]) -> Plot:
    """The pause, the checkpoint time and the time back after a loss, by tool and size."""
    seconds = {row.question: row.figure / (1e3 if row.unit == "ms" else 1) for row in rows}
    words = {"pause": "pause", "checkpoint time": "checkpoint", "... from the loss to the next step": "back again"}
    series = []
    for name in TOOLS:
        for size in sizes:
            found = [seconds[f"{size.label}: {name}: {row}"] for row in words]
            series.append(Series(f"{name}, {size.label}", tuple(words.values()), found))
    return Plot("torch.save to the store, and ckpt", "", "seconds", tuple(series), kind="bars", log_y=True)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--plot", type=Path, help="also draw the main figures (needs matplotlib)")
    made.add_argument("--server", choices=("rclone", "ceph"), help="by default Ceph, where it can be started")
    made.add_argument("--rounds", type=int, help="of each run (5; with --small 1)")
    args = made.parse_args()
    quiet()
    torch.set_num_threads(1)
    sizes, rounds = (SMALL, args.rounds or 1) if args.small else (FULL, args.rounds or 5)
    server = args.server or ("rclone" if args.small or ceph.why_not() else "ceph")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, serving(server) as root:
        sizes = [replace(size, products=products_in(size.step_s)) for size in sizes]
        for size in sizes:
            rows += of_size(size, root, folder, rounds)
    print(f"store: {server}; {rounds} rounds")
    if args.plot:
        args.plot.write_bytes(draw(plot_of(rows, sizes), "png"))
    return report("paper", rows, args)


if __name__ == "__main__":
    sys.exit(main())
