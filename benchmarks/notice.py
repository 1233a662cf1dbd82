"""How long from a notice that reaches one of four nodes until all ranks have the same step staged?

    python -m benchmarks.notice [--small] [--json FILE]

Four ranks in lock-step, each with an agent of its own, as on four nodes; the last one is signalled at a moment of no
step in particular. What follows is printed in its parts: until the word is where rank 0 reads it (signal, that node's
agent, the coordinator), until the last rank has it too, until the last rank is at the end of the step that it names,
and the copy. The bar: one step, or 50 ms where that is longer, and the 99th percentile of an announcement (of some 200
snapshots before it: from the first rank that reads the word to the last), and the copy.

With steps of 10 ms and of 100 ms. Ranks read the word every half millisecond, which the parts are as fine as.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Row, parser, report
from ckpt.ipc.control_page import ControlWord, WordKind
from tests.checkpointer.scripts import ROOT, lines_of, say_line

NODES = 4
FLOOR_S = 0.05
READ_S = 0.0005
SNAPSHOTS = 40  # that are in the store when the notice comes: so many announcements of each of five jobs are known
LOST_S = 120.0  # a job that takes longer has failed


def worker(folder: str, mib: int, step_s: float) -> None:
    """One rank: trains until it is told to leave, then says when it saw what."""
    import torch
    import torch.distributed as dist

    import ckpt

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    state = torch.zeros(mib << 18)
    shard = ckpt.Shard(state, (NODES * len(state),), (rank * len(state),))
    seen: list[tuple[int, float]] = []
    stop = threading.Event()
    ended_s, policy, tell = 0.0, ckpt.Every(seconds=0.25), lambda event: say_line({"event": event.name})
    ck = ckpt.Checkpointer(f"{folder}/run", {"own": shard}, policy=policy, sinks=(tell,))

    def read() -> None:
        link, words = ck._block.saver.link, list[int]()
        while not stop.wait(READ_S):
            found = link.view.words.tolist()
            seen.extend((word, time.monotonic()) for word in found if word and word not in words)
            words = found

    reader = threading.Thread(target=read, daemon=True)
    try:
        with ck:
            reader.start()
            while True:
                time.sleep(step_s)
                dist.barrier()
                state[0] += 1
                ended_s = time.monotonic()
                ck.step()
    finally:
        stop.set()
        copy_s = ck._receipt.stalls_s[-1]
        say_line({"rank": rank, "left": ck.receipt["end_step"], "ended_s": ended_s, "copy_s": copy_s, "seen": seen})


@dataclass(frozen=True)
class Found:
    """Seconds. `announced`: of each snapshot before the last that all ranks have read the word of."""

    told: float
    spread: float
    waited: float
    copied: float
    total: float
    announced: list[float]


def once(mib: int, step_s: float, moment: float, snapshots: int) -> Found:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        log = Path(folder, "log")
        processes = [_start(folder, rank, port, log, f"{mib}, {step_s}") for rank in range(NODES)]
        try:
            _await(log, processes, lambda lines: sum(line.get("event") == "commit.done" for line in lines) >= snapshots)
            time.sleep(moment)
            signalled_s = time.monotonic()
            processes[-1].send_signal(signal.SIGTERM)
            codes = [process.wait(LOST_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        left = {line["rank"]: line for line in lines_of(log) if "left" in line}
        outcome = json.loads(Path(folder, "outcome.json").read_text())
        if set(codes) != {143} or len(left) < NODES or {each["left"] for each in left.values()} != {outcome["step"]}:
            raise RuntimeError(f"the job did not leave at one step: {codes}, {outcome}; {log.read_text()[-4000:]}")
        _await_agents(Path(folder))
    return _found(signalled_s, list(left.values()))


def _found(signalled_s: float, ranks: list[dict[str, Any]]) -> Found:
    by_word: dict[int, list[float]] = {}
    for rank in ranks:
        for word, at_s in rank["seen"]:
            by_word.setdefault(word, []).append(at_s)
    hold = next(
        word for word in by_word if (told := ControlWord.unpack(word)) is not None and told.kind is WordKind.HOLD
    )
    first_s, last_s = min(by_word[hold]), max(by_word[hold])
    ended_s = max(rank["ended_s"] for rank in ranks)
    staged_s = max(rank["ended_s"] + rank["copy_s"] for rank in ranks)
    announced = [max(times) - min(times) for word, times in by_word.items() if len(times) == NODES and word != hold]
    copied = max(rank["copy_s"] for rank in ranks)
    return Found(first_s - signalled_s, last_s - first_s, ended_s - last_s, copied, staged_s - signalled_s, announced)


def _start(folder: str, rank: int, port: int, log: Path, size: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CKPT_LINGER_S": "0"}
    env |= {"RANK": str(rank), "WORLD_SIZE": str(NODES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"CKPT_RUNTIME_DIR": f"{folder}/{rank}", "CKPT_LISTEN": "127.0.0.1:0", "CKPT_LAUNCH": "notice"}
    env |= {"CKPT_NOTICES": "given", "CKPT_OUTCOME_FILE": f"{folder}/outcome.json"}
    call = f"from benchmarks.notice import worker; worker({folder!r}, {size})"
    with log.open("ab") as out:
        return subprocess.Popen([sys.executable, "-c", call], env=env, cwd=ROOT, stdout=out, stderr=out)


def _await(log: Path, processes: list[subprocess.Popen[bytes]], what: Any) -> None:
    deadline_s = time.monotonic() + LOST_S
    while not what(lines_of(log)):
        if time.monotonic() > deadline_s or any(process.poll() is not None for process in processes):
            raise RuntimeError(f"the job does not train: {log.read_text()[-4000:]}")
        time.sleep(0.05)


def _await_agents(folder: Path) -> None:
    """They end by themselves once their ranks are gone."""
    deadline_s = time.monotonic() + 60
    while list(folder.glob("*/*.sock")) and time.monotonic() < deadline_s:
        time.sleep(0.1)


def rows_of(step_s: float, found: list[Found]) -> list[Row]:
    name = f"steps of {1e3 * step_s:g} ms"
    announced = sorted(each for one in found for each in one.announced)
    p99_s = announced[min(len(announced) - 1, int(0.99 * len(announced)))]
    bars = [max(step_s, FLOOR_S) + p99_s + one.copied for one in found]
    over = [one.total - bar for one, bar in zip(found, bars, strict=True)]
    parts = {
        "notice to rank 0's word": [one.told for one in found],
        "to the last rank's": [one.spread for one in found],
        "to the end of that step": [one.waited for one in found],
        "the copy": [one.copied for one in found],
    }
    rows = [Row(f"{name}: {part}", 1e3 * statistics.median(s), "ms", "printed", None) for part, s in parts.items()]
    rows.append(Row(f"{name}: an announcement, p99 of {len(announced)}", 1e3 * p99_s, "ms", "printed", None))
    worst = max(range(len(found)), key=lambda number: over[number])
    bar = f"at most {1e3 * bars[worst]:.0f} ms: max(one step, 50 ms) + announcement p99 + the copy"
    total_s = found[worst].total
    rows.append(Row(f"{name}: notice to staged, the worst", 1e3 * total_s, "ms", bar, over[worst] <= 0))
    return rows


def main() -> int:
    args = parser(__doc__).parse_args()
    mib, rounds, snapshots = (1, 1, 3) if args.small else (16, 5, SNAPSHOTS)
    moments, rows = random.Random(0), []
    for step_s in (0.01, 0.1):
        rows += rows_of(step_s, [once(mib, step_s, moments.random() * step_s, snapshots) for _ in range(rounds)])
    return report("notice", rows, args)


if __name__ == "__main__":
    sys.exit(main())
