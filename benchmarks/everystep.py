"""How much slower are steps of 100 ms with a checkpoint in a peer's memory at every step?

    python -m benchmarks.everystep [--small] [--json FILE]

A job of two ranks, each with an agent of its own, as on two nodes, and 64 MiB of state in all, half on each: a
parameter, and the momentum that its optimizer has of it. It is staged at every step, and the other's agent fetches it.
In turns with that, the same loop without ckpt. The ranks meet where data-parallel ones do: once gradients are there,
before the optimizers step. One core free: of each step a rank computes a quarter, and waits for the rest, so that of
two cores at least one is idle. Saturated: both compute all the time, and the agents take from them what they need.

One generation is in flight: a step that finds it under way is not staged at the peer. How many were is told, and with
one core free nearly all have to be. The store is away, so that no step waits for it: it is not what is asked about.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import ckpt
from benchmarks.report import Row, parser, report
from tests.checkpointer.scripts import ROOT, lines_of, say_line

RANKS = 2
STEP_S = 0.1
BAR = 0.02
SHARE = 0.9  # of the steps, with one core free


class Work:
    """A fixed number of matrix products, a wait until STEP_S is over, and, as a part of it, the optimizer's step once
    the ranks have met. `mib`: of state."""

    def __init__(self, busy_s: float, mib: int) -> None:
        self._a = torch.ones(256, 256)
        weight = torch.nn.Parameter(torch.randn(mib << 17))  # other values on each rank: each stages its own
        weight.grad = torch.randn_like(weight)
        self.model = torch.nn.ParameterDict({"weight": weight})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.optimizer.step()  # from here on it has its momentum
        self._step_s = statistics.median(_seconds(self.optimizer.step) for _ in range(5))
        product_s = statistics.median(_seconds(self._multiply) for _ in range(500))
        self.count = max(1, int((busy_s - self._step_s) / product_s))

    def step(self) -> None:
        until = time.perf_counter() + STEP_S - self._step_s
        for _ in range(self.count):
            self._multiply()
        time.sleep(max(0.0, until - time.perf_counter()))
        dist.barrier()
        self.optimizer.step()

    def _multiply(self) -> None:
        torch.mm(self._a, self._a)


def _seconds(what: Callable[[], object]) -> float:
    """Of this thread's CPU time."""
    began = time.thread_time()
    what()
    return time.thread_time() - began


def worker(folder: str, mib: int, steps: int, rounds: int, busy_s: float) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    work = Work(busy_s, mib // RANKS)
    reached: list[str] = []

    def loop(after: Callable[[], None]) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            work.step()
            after()
        dist.barrier()
        return (time.perf_counter() - began) / steps

    def hear(event: ckpt.Event) -> None:
        if event.name == "replication.done":
            reached.append(event.data["identity"])

    state = {"model": work.model, "optimizer": work.optimizer}
    limits = ckpt.Limits(exit_s=1)
    without: list[float] = []
    with_: list[float] = []
    policy = ckpt.Every(steps=1)
    with ckpt.Checkpointer(f"{folder}/run", state, policy=policy, limits=limits, sinks=(hear,)) as ck:
        if rank == 0:
            run = Path(folder, "run")
            run.mkdir(exist_ok=True)  # the agent may have put nothing yet
            (run / "data").touch()  # a file where a folder is to be: each commit fails at once
        dist.barrier()
        loop(ck.step)  # the arenas are made and warmed
        for _ in range(rounds):
            without.append(loop(lambda: None))
            before = len(reached)
            with_.append(loop(ck.step))
            shown = len(reached) - before
        say_line({"rank": rank, "with": with_, "without": without, "reached": shown, "bytes": ck.receipt})
        dist.barrier()
        os._exit(0)  # what is still to be committed is of no interest


def once(mib: int, steps: int, rounds: int, busy_s: float) -> tuple[float, float, float]:
    """Seconds a step with and without, and the share of steps that reached the peer."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        log = Path(folder, "log")
        processes = []
        for rank in range(RANKS):
            env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CKPT_LINGER_S": "0"}
            env |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            env |= {"CKPT_RUNTIME_DIR": f"{folder}/{rank}", "CKPT_LISTEN": "127.0.0.1:0", "CKPT_LAUNCH": "everystep"}
            call = f"from benchmarks.everystep import worker; worker({folder!r}, {mib}, {steps}, {rounds}, {busy_s})"
            with log.open("ab") as out:
                processes.append(
                    subprocess.Popen([sys.executable, "-c", call], env=env, cwd=ROOT, stdout=out, stderr=out)
                )
        try:
            codes = [process.wait(60 + 4 * STEP_S * steps * (2 * rounds + 1)) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        said = {line["rank"]: line for line in lines_of(log)}
        if any(codes) or len(said) < RANKS:
            raise RuntimeError(f"the job failed: {log.read_text()[-4000:]}")
        _wait_for_agents(Path(folder))
    with_, without = (statistics.median(said[0][name]) for name in ("with", "without"))
    return with_, without, said[0]["reached"] / steps


def _wait_for_agents(folder: Path) -> None:
    """They end by themselves once their ranks are gone."""
    deadline = time.monotonic() + 60
    while list(folder.glob("*/*.sock")) and time.monotonic() < deadline:
        time.sleep(0.1)


def main() -> int:
    args = parser(__doc__).parse_args()
    mib, steps, rounds = (8, 10, 1) if args.small else (64, 50, 3)
    rows = []
    for name, busy_s, bar in (("one core free", STEP_S / 4, BAR), ("saturated", STEP_S, None)):
        with_, without, share = once(mib, steps, rounds, busy_s)
        more = with_ / without - 1
        rows += [
            Row(f"{name}: a step", 1e3 * with_, "ms", "printed", None, 1e3 * without, with_ / without),
            Row(
                f"{name}: slower",
                100 * more,
                "%",
                f"at most {100 * bar:g} %" if bar else "printed",
                more <= bar if bar else None,
            ),
            Row(
                f"{name}: steps that reached the peer",
                100 * share,
                "%",
                f"at least {100 * SHARE:g} %" if bar else "printed",
                share >= SHARE if bar else None,
            ),
        ]
    return report("everystep", rows, args)


if __name__ == "__main__":
    sys.exit(main())
