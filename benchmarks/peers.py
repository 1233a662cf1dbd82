"""ckpt beside its peers on the same work: what does a save cost the loop, and how soon is it back?

    python -m benchmarks.peers [--small] [--place folder|rclone|ceph ...] [--only NAME ...] [--rounds N] [--json FILE]

One process with fp32 weights and Adam moments of 1 GiB in 448 tensors, and a loop of one thread beside the save: matrix
products, then an optimizer step, which changes every byte. Each contender has a process of its own, all take turns, and
figures are medians. `benchmarks/contenders.py` says how each tool is used.

- stall: how long the loop stands still for the first save, and for a later one (waits before the optimizer step too).
- lost: the loop with a save, less as many steps without. Two windows without a save differ by the row "noise".
- durable: from the call until the tool says that the checkpoint is stored. Not every tool fsyncs: see `league`.
- CPU: of the process and all its helpers, without the loop's own. memory: their peak above what they had before.
- restore: by a new process, after its imports, from a folder whose pages are dropped (cold), then again (warm).

The bar: what is restored is the state at the save, bit for bit. Peers: pip install multilevel-ckpt[bench-peers]. Who
cannot run is named with the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import psutil
import torch

from benchmarks.contenders import BY_NAME, CONTENDERS, Contender, Job, Tool, quiet
from benchmarks.entry import forget
from benchmarks.report import Row, parser, report
from benchmarks.store import direct_store
from tests import ceph, servers
from tests.servers import Server

MARK = "CKPT_BENCHMARK_MARK"  # helpers inherit it, however they detach
SAVES = 3
SAMPLE_S = 0.02
PROCESS_S = 600.0
SIDE = 384  # of the matrices that the loop multiplies
WARM_PRODUCTS, TIMED_PRODUCTS = 10, 50
FIGURES = {
    "stall, first save": "ms",
    "stall, later saves": "ms",
    "training lost": "s",
    "noise of lost": "s",
    "durable": "s",
    "written": "MiB",
    "CPU": "s",
    "memory above the state": "MiB",
    "restore, cold": "s",
    "restore, warm": "s",
}


class Marked:
    """All processes that inherited this one's mark: itself, its children, and helpers that detached."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._ours: dict[int, psutil.Process] = {}
        self._others: set[int] = set()

    def processes(self) -> list[psutil.Process]:
        for pid in psutil.pids():
            if pid not in self._ours and pid not in self._others:
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    if process.environ().get(MARK) == self._mark:
                        self._ours[pid] = process
                    else:
                        self._others.add(pid)
        self._ours = {pid: each for pid, each in self._ours.items() if each.is_running()}
        return list(self._ours.values())

    def cpu_s(self) -> float:
        """What they and the children that they waited for have used."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                total += sum(process.cpu_times()[:4])
        return total

    def memory_bytes(self) -> int:
        """Private memory of all, and the largest shared part: one arena is mapped by several."""
        private, shared = 0, [0]
        for process in self.processes():
            with contextlib.suppress(OSError, psutil.Error):
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith(" kB")}
                private += sizes.get("RssAnon", 0)
                shared.append(sizes.get("RssShmem", 0))
        return private + max(shared)

    def end(self) -> None:
        for process in self.processes():
            if process.pid != os.getpid():
                with contextlib.suppress(psutil.Error):
                    process.kill()
        psutil.wait_procs(list(self._ours.values()), timeout=10)


class Loop:
    """Training beside the saves: one thread, products and an optimizer step."""

    def __init__(self, job: Job, tool: Tool, products: int) -> None:
        self._job, self._tool, self._products = job, tool, products
        self._matrix = torch.ones(SIDE, SIDE)
        self.cpu_s = 0.0

    def step(self) -> float:
        """How long it waited before the optimizer step."""
        cpu_s = time.thread_time()
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix)
        self.cpu_s += time.thread_time() - cpu_s
        asked_s = time.perf_counter()
        with self._tool.guard():
            waited_s = time.perf_counter() - asked_s
            cpu_s = time.thread_time()
            self._job.optim.step()
            self.cpu_s += time.thread_time() - cpu_s
        self._tool.step_ended()
        return waited_s

    def steps_s(self, count: int) -> float:
        began_s = time.perf_counter()
        for _ in range(count):
            self.step()
        return (time.perf_counter() - began_s) / count


def products_in(step_s: float) -> int:
    """How many products of the loop one thread makes in that time on this machine."""
    matrix = torch.ones(SIDE, SIDE)
    for _ in range(WARM_PRODUCTS):
        torch.mm(matrix, matrix)
    began_s = time.perf_counter()
    for _ in range(TIMED_PRODUCTS):
        torch.mm(matrix, matrix)
    return max(1, int(step_s * TIMED_PRODUCTS / (time.perf_counter() - began_s)))


def save(name: str, place: str, total: int, step_s: float) -> None:
    """A process of its own: saves, and prints what each cost."""
    torch.set_num_threads(1)
    quiet()
    job = Job(total)
    tool = BY_NAME[name].make(job, place)
    loop = Loop(job, tool, products_in(step_s))
    marked = Marked(os.environ[MARK])
    loop.steps_s(2)
    print(json.dumps({"begins": True}), flush=True)
    found: list[dict[str, float]] = []
    digest = ""
    for number in range(SAVES):
        without_s = [loop.steps_s(4), loop.steps_s(4)]
        digest = job.digest()
        loop.cpu_s, cpu_s, began_s = 0.0, marked.cpu_s(), time.perf_counter()
        tool.save(number + 1)
        stall_s = time.perf_counter() - began_s
        stored: list[float] = []
        waiter = threading.Thread(target=lambda began_s=began_s, stored=stored: _wait(tool, began_s, stored))
        waiter.start()
        steps = 0
        while waiter.is_alive() or steps < 4:
            stall_s += loop.step()
            steps += 1
        waiter.join()
        spent_s = time.perf_counter() - began_s
        own_s = marked.cpu_s() - cpu_s - loop.cpu_s
        stall_s = tool.stalls_s()[-1] if hasattr(tool, "stalls_s") else stall_s
        step = statistics.mean(without_s)
        noise_s = abs(without_s[0] - without_s[1]) * steps
        lost = {"stall": stall_s, "lost": spent_s - steps * step, "noise": noise_s}
        found.append({**lost, "durable": stored[0], "cpu": own_s, "written": stored_bytes(place)})
    print(json.dumps({"saves": found, "digest": digest}), flush=True)
    tool.close()
    os._exit(0)


def _wait(tool: Tool, began_s: float, stored: list[float]) -> None:
    tool.wait()
    stored.append(time.perf_counter() - began_s)


def restore(name: str, place: str, total: int) -> None:
    """A process of its own: prints the seconds, and the digest of what was restored."""
    quiet()
    job = Job(total, seed=1)
    began_s = time.perf_counter()
    tool = BY_NAME[name].make(job, place)
    tool.restore()
    print(json.dumps({"seconds": time.perf_counter() - began_s, "digest": job.digest()}), flush=True)
    tool.close()
    os._exit(0)


def run(call: str, runtime: str) -> tuple[dict[str, Any], int]:
    """The last line that a process of its own prints, and its peak memory between "begins" and the end."""
    mark = secrets.token_hex(8)
    env = {**os.environ, MARK: mark, "CKPT_RUNTIME_DIR": runtime, "CKPT_LINGER_S": "0", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", f"from benchmarks.peers import restore, save; {call}"]
    marked, said, before, peak = Marked(mark), {}, 0, 0
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, cwd=Path(__file__).parents[1], env=env, stdout=subprocess.PIPE, stderr=errors
        )
        assert process.stdout is not None
        deadline_s = time.monotonic() + PROCESS_S
        try:
            with selectors.DefaultSelector() as ready:
                ready.register(process.stdout, selectors.EVENT_READ)
                while process.poll() is None or ready.select(0):
                    if time.monotonic() > deadline_s:
                        raise RuntimeError(f"did not end within {PROCESS_S:g} s")
                    if ready.select(SAMPLE_S):
                        line = process.stdout.readline()
                        if not line:
                            break
                        if line.startswith(b"{"):
                            said = json.loads(line)
                            before = marked.memory_bytes() if "begins" in said else before
                    elif before:
                        peak = max(peak, marked.memory_bytes())
            if process.wait(30) != 0:
                errors.seek(0)
                raise RuntimeError(_last_error(errors.read().decode(errors="replace")))
        finally:
            process.kill()
            process.wait()
            marked.end()
            process.stdout.close()
    return said, max(0, peak - before)


def _last_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(" ")]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "it ended")[:200]


def once(contender: Contender, place: str, total: int, step_s: float) -> dict[str, float]:
    """One turn: the figures, by name. Errors: RuntimeError with what a process ended with."""
    with tempfile.TemporaryDirectory() as runtime:
        said, peak = run(f"save({contender.name!r}, {place!r}, {total}, {step_s})", runtime)
        first, *later = said["saves"]
        restores = []
        for number in range(2):
            if "://" not in place and not number:
                forget(place)
            restores.append(run(f"restore({contender.name!r}, {place!r}, {total})", f"{runtime}/{number}")[0])
    middle = {key: statistics.median(each[key] for each in later) for key in first}
    return {
        "stall, first save": 1e3 * first["stall"],
        "stall, later saves": 1e3 * middle["stall"],
        "training lost": middle["lost"],
        "noise of lost": middle["noise"],
        "durable": middle["durable"],
        "written": first["written"] / 2**20,
        "CPU": middle["cpu"],
        "memory above the state": peak / 2**20,
        "restore, cold": restores[0]["seconds"],
        "restore, warm": restores[1]["seconds"],
        "bit for bit": float(all(each["digest"] == said["digest"] for each in restores)),
    }


def stored_bytes(place: str) -> int:
    if "://" not in place:
        return sum(path.stat().st_size for path in Path(place).rglob("*") if path.is_file())
    return sum(each["size"] for part in obstore.list(_store(place)) for each in part)


def empty(place: str) -> None:
    """The next one finds an empty disk or server."""
    if "://" not in place:
        shutil.rmtree(place, ignore_errors=True)
    else:
        obstore.delete(_store(place), [each["path"] for part in obstore.list(_store(place)) for each in part])


def _store(place: str) -> obstore.store.S3Store:
    bucket, _, prefix = place.removeprefix("s3://").partition("/")
    return direct_store(Server("", "", bucket), prefix)


@contextlib.contextmanager
def serving(kind: str) -> Iterator[str]:
    """Where places of that kind begin."""
    if kind == "folder":
        with tempfile.TemporaryDirectory() as folder:
            yield folder
        return
    with servers.rclone() if kind == "rclone" else ceph.ceph(24 << 30) as server:
        os.environ.update(server.environment() | {"AWS_DEFAULT_REGION": servers.REGION})
        yield f"s3://{server.bucket}"


def at(kind: str, names: list[str], total: int, rounds: int, step_s: float) -> list[Row]:
    found: dict[str, list[dict[str, float]]] = {}
    reasons: dict[str, str] = {}
    entrants = [BY_NAME[name] for name in names if BY_NAME[name].at(kind)]
    with serving(kind) as root:
        for number in range(rounds):
            # Who comes first meets another machine than who comes last: every second round goes backwards.
            for contender in entrants[:: -1 if number % 2 else 1]:
                if contender.name in reasons:
                    continue
                if why := contender.why_not():
                    reasons[contender.name] = why
                    continue
                place = f"{root}/{secrets.token_hex(4)}"
                try:
                    found.setdefault(contender.name, []).append(once(contender, place, total, step_s))
                except RuntimeError as exc:
                    reasons[contender.name] = f"failed: {exc}"
                finally:
                    empty(place)
    rows: list[Row] = []
    for contender in entrants:
        label = f"{kind}: {contender.name}"
        if contender.name in reasons:
            rows.append(Row(f"{label}: NOT MEASURED: {reasons[contender.name]}", 0.0, "figures", "shown", None))
            continue
        turns = found[contender.name]
        for figure, unit in FIGURES.items():
            rows.append(
                Row(f"{label}: {figure}", statistics.median(each[figure] for each in turns), unit, "shown", None)
            )
        equal = min(each["bit for bit"] for each in turns)
        rows.append(Row(f"{label}: restored bit for bit", equal, "of 1", "all", equal == 1.0))
    return rows


def table(rows: list[Row]) -> None:
    """The same as one line for each contender and place."""
    lines: dict[str, dict[str, float]] = {}
    for row in rows:
        label, _, figure = row.question.rpartition(": ")
        if figure in FIGURES:
            lines.setdefault(label, {})[figure] = row.figure
    width = max(map(len, lines), default=0)
    print(f"{'':{width}}  " + "  ".join(f"{name} [{unit}]" for name, unit in FIGURES.items()))
    for label, figures in lines.items():
        cells = (f"{figures[name]:{len(name) + len(unit) + 3}.3g}" for name, unit in FIGURES.items())
        print(f"{label:{width}}  " + "  ".join(cells))


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--place", action="append", choices=("folder", "rclone", "ceph"), help="by default all")
    made.add_argument("--only", action="append", choices=list(BY_NAME), help="by default all")
    made.add_argument("--rounds", type=int, help="turns of each contender (3; with --small 1)")
    args = made.parse_args()
    quiet()
    total, rounds, step_s = (8 << 20, args.rounds or 1, 0.01) if args.small else (1 << 30, args.rounds or 3, 0.2)
    kinds = args.place or (["folder", "rclone"] if args.small else ["folder", "rclone", "ceph"])
    rows: list[Row] = []
    for kind in kinds:
        if kind == "ceph" and (why := ceph.why_not()):
            rows.append(Row(f"ceph: NOT MEASURED: {why}", 0.0, "figures", "shown", None))
            continue
        rows += at(kind, args.only or [each.name for each in CONTENDERS], total, rounds, step_s)
    table(rows)
    print(f"{total >> 20} MiB, medians of {rounds}")
    return report("peers", rows, args)


if __name__ == "__main__":
    sys.exit(main())
