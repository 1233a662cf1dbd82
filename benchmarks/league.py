"""What is left after a crash, a power loss, a damaged byte or a missing file, in ckpt and in the tools beside it?

    python -m benchmarks.league [--small] [--only NAME ...] [--points N] [--json FILE]

Each tool saves step 1 and then step 2 into a folder on a disk of `benchmarks/faulty_disk.py`, which meets every change
of a file, in order, before it is made. So the moments are enumerated, and a tool with one writing thread meets the same
ones in each run. A new process then restarts as users of that tool do (`benchmarks/contenders.py`).

- killed: SIGKILL to the process and all its helpers (with ckpt its agent) before each change of the save of step 2.
- process killed: the process alone; helpers such as ckpt's agent live on. Only for tools that have some.
- power: the disk after "killed", with what was not synced lost; once with all names kept (as XFS may; ext4 often
  syncs a file that is renamed over another), once without. Step 1 is old by then: all of it is on the disk.
- power, saved: the same after the tool has said that step 2 is stored.
- torn: the last KiB of one file is missing, for each file of step 2 in turn. flipped: one byte in its middle.
  missing: that file.

Outcomes: newest (step 2), older (step 1), refused (an error), WRONG (it restarts with neither, and says nothing), lost
(it starts anew). Before the save of step 2 is complete, older is as good as newest. Needs root and /dev/fuse.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from benchmarks import faulty_disk
from benchmarks.contenders import BY_NAME, Job, quiet
from benchmarks.faulty_disk import Disk, Node, Refusal, Tree
from benchmarks.peers import MARK, Marked
from benchmarks.report import Row, parser, report

ENTRANTS = {
    "torch.save": (),
    "torch.save, renamed": (),
    "safetensors": (),
    "DCP save": (),
    "torchsnapshot": (),
    "torch_checkpointing": ("process killed",),
    "LMResiliency": (),
    "ckpt, auto, deferred": ("process killed",),
}
OUTCOMES = ("newest", "older", "refused", "WRONG", "lost")
STATE_BYTES, LAYERS = 1 << 20, 2
CUT_BYTES = 1 << 10
HEARTBEATS = "/alive"  # ckpt writes some by the clock: they are no moments of a save
QUIET_S = 0.3  # what follows a save that is stored is over by then
MISSES_MAX = 3  # saves in succession that were over before the moment came
RESTART_S = 90.0
OURS = "ckpt"
_forks = multiprocessing.get_context("forkserver")


@dataclass
class Digests:
    """Of step 1, step 2, and of a job that nothing was restored into."""

    older: str
    newest: str
    fresh: str


def job_after(steps: int, seed: int = 0) -> Job:
    job = Job(STATE_BYTES, seed, LAYERS)
    for _ in range(steps):
        job.optim.step()
    return job


def _begin(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.setsid()
    quiet()
    torch.set_num_threads(1)
    # What the tools say of a damaged file is expected here.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def save(name: str, place: str, environment: dict[str, str], there: Connection) -> None:
    """A process of its own: saves step 1, says so, and on a word saves step 2."""
    _begin(environment)
    job = job_after(0)
    tool = BY_NAME[name].make(job, place)
    for step in (1, 2):
        with tool.guard():
            job.optim.step()
        tool.step_ended()
        tool.save(step)
        with tool.guard():
            pass
        tool.wait()
        there.send(step)
        there.recv()
    os._exit(0)


def restart(name: str, place: str, environment: dict[str, str], there: Connection) -> None:
    """A process of its own: what a restart of that tool finds."""
    _begin(environment)
    job = job_after(0, seed=1)
    try:
        tool = BY_NAME[name].make(job, place)
        tool.restore()
    except BaseException as exc:
        there.send(("refused", f"{type(exc).__name__}: {exc}"[:200]))
    else:
        there.send(("digest", job.digest()))
        with contextlib.suppress(BaseException):
            tool.close()
    os._exit(0)


@dataclass
class Left:
    """What a run leaves: the disk after step 1, the disk at its end, and how many changes the save of step 2 made.
    `crashed`: whether the moment to kill came. `restarted`: the outcome of a restart beside living helpers, where only
    the process was killed."""

    before: Tree
    after: Tree
    changes: int
    crashed: bool
    restarted: str | None


class Tried:
    """One tool's runs: a saving process, and restarts on what it leaves."""

    def __init__(self, name: str, folder: str, digests: Digests) -> None:
        self._name, self._folder, self._digests = name, folder, digests
        self.said: Counter[str] = Counter()

    def run(self, crash_at: int | None, whom: str) -> Left:
        """Saves both steps. With `crash_at`, `whom` says who is killed before that change of the save of step 2."""
        tree, mount = Tree(), f"{self._folder}/{secrets.token_hex(4)}"
        environment = self._environment(linger=whom == "process killed")
        marked = Marked(environment[MARK])
        here, there = _forks.Pipe()
        process = _forks.Process(target=save, args=(self._name, f"{mount}/run", environment, there))
        dead = threading.Event()
        seen, outcome = itertools.count(), None
        with Disk(tree, mount) as disk:
            process.start()
            there.close()
            try:
                self._await(here, 1)
                time.sleep(QUIET_S)
                before = disk.settled()

                def before_change(what: str, path: str) -> None:
                    if dead.is_set():
                        if whom == "killed":
                            raise Refusal(5)
                    elif HEARTBEATS not in path and next(seen) == crash_at:
                        dead.set()
                        self._kill(process, marked, whom)
                        if whom == "killed":
                            raise Refusal(5)

                disk.before_change = before_change
                here.send("go on")
                with contextlib.suppress(EOFError):
                    self._await(here, 2)
                if whom == "process killed":
                    self._kill(process, marked, whom)
                    process.join(10)
                    outcome = self._restart(f"{mount}/run", environment)
                changes, crashed = next(seen), dead.is_set()
                self._kill(process, marked, "killed")
            finally:
                self._kill(process, marked, "killed")
                process.join(10)
                marked.end()
                here.close()
        return Left(before, tree, changes, crashed, outcome)

    def restarted(self, tree: Tree, change: Callable[[Tree], None] = lambda tree: None) -> str:
        """The outcome of a restart on a copy of that disk, changed."""
        own, mount = copy.deepcopy(tree), f"{self._folder}/{secrets.token_hex(4)}"
        change(own)
        with Disk(own, mount):
            return self._restart(f"{mount}/run", self._environment(linger=False))

    def _restart(self, place: str, environment: dict[str, str]) -> str:
        here, there = _forks.Pipe()
        process = _forks.Process(target=restart, args=(self._name, place, environment, there))
        process.start()
        there.close()
        try:
            what, found = here.recv() if here.poll(RESTART_S) else ("refused", f"nothing within {RESTART_S:g} s")
        except EOFError:
            what, found = "refused", "the process ended"
        process.join(5)
        self._kill(process, Marked(environment[MARK]), "killed")
        process.join(10)
        here.close()
        if what == "refused":
            self.said[found] += 1
            return "refused"
        known = {self._digests.newest: "newest", self._digests.older: "older", self._digests.fresh: "lost"}
        return known.get(found, "WRONG")

    def _environment(self, linger: bool) -> dict[str, str]:
        runtime = tempfile.mkdtemp(dir=self._folder, prefix="agent-")
        ours = {"CKPT_RUNTIME_DIR": runtime, "CKPT_LINGER_S": "30" if linger else "0", "CKPT_HEARTBEAT_S": "0.5"}
        return {**ours, MARK: secrets.token_hex(8), "CKPT_NOTICES": "off", "CKPT_SIGNALS": "off"}

    def _await(self, here: Connection, step: int) -> None:
        if not here.poll(RESTART_S):
            raise RuntimeError(f"{self._name} did not save step {step} within {RESTART_S:g} s")
        try:
            here.recv()
        except EOFError:
            if step == 1:
                raise RuntimeError(f"{self._name} ended in its first save") from None
            raise

    def _kill(self, process: BaseProcess, marked: Marked, whom: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGKILL)
        if whom == "killed":
            for each in marked.processes():
                if each.pid != os.getpid():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(each.pid, signal.SIGKILL)


@dataclass
class Table:
    counts: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, fault: str, outcome: str) -> None:
        self.counts.setdefault(fault, Counter())[outcome] += 1


def of_tool(name: str, folder: str, digests: Digests, points: int | None) -> tuple[Table, Tried]:
    tried, table = Tried(name, folder, digests), Table()
    whole, misses = tried.run(None, "killed"), 0
    for at in moments(whole.changes, points):
        left = tried.run(at, "killed")
        # One save may make fewer changes than another one does.
        misses = 0 if left.crashed else misses + 1
        if misses == MISSES_MAX:
            break
        if misses:
            continue
        table.add("killed", tried.restarted(left.after))
        for fault, keep in (("power, names kept", True), ("power, names too", False)):
            table.add(fault, tried.restarted(left.after, lambda tree, keep=keep: tree.lose_power(keep)))
        for whom in ENTRANTS[name]:
            outcome = tried.run(at, whom).restarted
            assert outcome is not None
            table.add(whom, outcome)
    saved = whole.after
    for fault, keep in (("power, saved, names kept", True), ("power, saved, names too", False)):
        table.add(fault, tried.restarted(saved, lambda tree, keep=keep: tree.lose_power(keep)))
    for path in of_newest(whole.before, saved):
        table.add("torn", tried.restarted(saved, lambda tree, path=path: _cut(tree.files()[path])))
        table.add("flipped", tried.restarted(saved, lambda tree, path=path: _flip(tree.files()[path])))
        table.add("missing", tried.restarted(saved, lambda tree, path=path: tree.remove(path)))
    return table, tried


def moments(count: int, points: int | None) -> Iterable[int]:
    """All, until a save is over before the next one; or so many of `count`, evenly spread."""
    if points is None:
        return itertools.count()
    return sorted({round(n * (count - 1) / max(1, points - 1)) for n in range(points)})


def of_newest(before: Tree, saved: Tree) -> Iterator[str]:
    """The files with bytes in them that the save of step 2 made or changed."""
    old = {path: bytes(node.data) for path, node in before.files().items()}
    for path, node in saved.files().items():
        if HEARTBEATS not in path and node.data and old.get(path) != bytes(node.data):
            yield path


def _cut(node: Node) -> None:
    del node.data[max(0, len(node.data) - CUT_BYTES) :]


def _flip(node: Node) -> None:
    node.data[len(node.data) // 2] ^= 0x10


def rows_of(name: str, table: Table) -> list[Row]:
    rows = []
    for fault, counts in table.counts.items():
        total = sum(counts.values())
        for outcome in OUTCOMES:
            bad = outcome not in ("newest", "older")
            met = counts[outcome] == 0 if bad and name.startswith(OURS) else None
            words = "none" if met is not None else "shown"
            rows.append(Row(f"{name}: {fault}: {outcome}", counts[outcome], f"of {total}", words, met))
    return rows


def show(tables: dict[str, Table], tried: dict[str, Tried]) -> None:
    faults = list(dict.fromkeys(fault for table in tables.values() for fault in table.counts))
    width = max(map(len, tables), default=0)
    for fault in faults:
        print(f"{fault}")
        for name, table in tables.items():
            if counts := table.counts.get(fault):
                print(f"  {name:{width}}  " + "  ".join(f"{outcome} {counts[outcome]:3}" for outcome in OUTCOMES))
    for name, each in tried.items():
        for text, count in each.said.most_common(4):
            print(f"  {name} said {count} x: {text[:160]}")


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--only", action="append", choices=list(ENTRANTS), help="by default all")
    made.add_argument("--points", type=int, help="so many moments of each save, evenly spread (all; with --small 3)")
    args = made.parse_args()
    quiet()
    rows: list[Row] = []
    tables: dict[str, Table] = {}
    tried: dict[str, Tried] = {}
    names = args.only or list(ENTRANTS)
    if why := faulty_disk.why_not():
        rows.append(Row(f"NOT MEASURED: {why}", 0.0, "figures", "shown", None))
        names = []
    torch.set_num_threads(1)
    digests = Digests(job_after(1).digest(), job_after(2).digest(), job_after(0, seed=1).digest())
    _forks.set_forkserver_preload(["benchmarks.league", "torch.distributed.checkpoint"])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name in names:
            if missing := BY_NAME[name].why_not():
                rows.append(Row(f"{name}: NOT MEASURED: {missing}", 0.0, "figures", "shown", None))
                continue
            began_s = time.monotonic()
            try:
                tables[name], tried[name] = of_tool(name, folder, digests, args.points or (3 if args.small else None))
            except RuntimeError as exc:
                rows.append(Row(f"{name}: NOT MEASURED: {exc}", 0.0, "figures", "shown", None))
                continue
            print(f"{name}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
            rows += rows_of(name, tables[name])
    show(tables, tried)
    return report("league", rows, args)


if __name__ == "__main__":
    sys.exit(main())
