"""How long does training stand still for a snapshot through the whole of ckpt, against a memcpy of the same bytes?

Eager: the first appointed snapshot of several runs and the later ones, with the agent idle. Lazy: the stall of proven
copies, and what a loop with a fixed number of matrix products loses to each snapshot altogether, the agent's hashing
and writing (to shared memory, on the same cores) among it. Figures are medians, taken in turns with their ceilings.

Crowded: the longest of such loops beside two busy processes for each core, with a snapshot and without. A copy that is
kept from the processor there is one that training waits for.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack

import torch
from torch import nn

import ckpt
from benchmarks.memcpy import Pieces, Whole
from benchmarks.report import Row, parser, report, timed

LAYERS = 24


def job(total_bytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Weights and two moments of together about `total_bytes`, in layers of equal size, after their first update."""
    side = int((total_bytes / 3 / 4 / LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(side, side) for _ in range(LAYERS)))
    optim = torch.optim.Adam(model.parameters(), lr=1e-4)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-4)
    optim.step()
    return model, optim


def sizes(model: nn.Module) -> list[int]:
    """Of the tensors that `job` makes, in bytes."""
    return [p.nbytes for p in model.parameters() for _ in range(3)]


def products(count: int) -> None:
    a = torch.ones(512, 512)
    for _ in range(count):
        torch.mm(a, a)


def step(ck: ckpt.Checkpointer, optim: torch.optim.Optimizer, count: int) -> None:
    products(count)
    optim.step()
    ck.step()


def eager(total_bytes: int, threads: int, runs: int, rounds: int) -> tuple[list[Row], float]:
    """The rows, and the seconds that a later snapshot stalls. Each run has an agent, and so arenas, of its own."""
    model, optim = job(total_bytes)
    copies: list[float] = []
    wholes: list[float] = []
    firsts: list[float] = []
    later: list[float] = []
    with Pieces(sizes(model), threads) as copy, Whole(total_bytes, threads) as whole:
        for _ in range(runs):
            with (
                tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
                ckpt.Checkpointer(
                    folder, {"model": model, "optim": optim}, policy=ckpt.Every(steps=1), lazy=False, codec="raw"
                ) as ck,
            ):
                while len(ck._receipt.stalls_s) <= rounds:
                    taken = len(ck._receipt.stalls_s)
                    copies.append(timed(copy))
                    wholes.append(timed(whole))
                    optim.step()
                    ck.step()
                    if len(ck._receipt.stalls_s) > taken:
                        ck.wait("store")  # the agent is idle when the next one is taken
                first, *others = ck._receipt.stalls_s
            firsts.append(first)
            later += others
    copy_s, whole_s, stall_s, first_s = map(statistics.median, (copies, wholes, later, firsts))
    ratio, first_ratio = stall_s / copy_s, first_s / copy_s
    bar = "at most 1.2"
    return [
        Row(f"eager stall, {total_bytes >> 20} MiB", 1e3 * stall_s, "ms", bar, ratio <= 1.2, 1e3 * copy_s, ratio),
        Row("... of the first one", 1e3 * first_s, "ms", bar, first_ratio <= 1.2, 1e3 * copy_s, first_ratio),
        Row("... against one memcpy a thread", 1e3 * stall_s, "ms", "shown", None, 1e3 * whole_s, stall_s / whole_s),
    ], stall_s


def lazy(total_bytes: int, rounds: int, eager_s: float) -> list[Row]:
    model, optim = job(total_bytes)
    count = max(1, int((3 * eager_s + 0.05) / (timed(lambda: products(50)) / 50)))
    with_s: list[float] = []
    without_s: list[float] = []

    def steps(ck: ckpt.Checkpointer) -> None:
        for _ in range(2):
            step(ck, optim, count)

    def saving(ck: ckpt.Checkpointer) -> ckpt.Handle:
        handle = ck.save()
        steps(ck)
        return handle

    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        ckpt.Checkpointer(folder, {"model": model, "optim": optim}, policy=ckpt.Every(steps=10**8), codec="raw") as ck,
    ):
        ck.step()
        handles: list[ckpt.Handle] = []
        for number in range(rounds + 3):
            if number == 3:  # by now the copies are proven
                ck._receipt.stalls_s.clear()
                with_s.clear()
                without_s.clear()
            with_s.append(timed(lambda: handles.append(saving(ck))))
            handles.pop().wait("store")
            without_s.append(timed(lambda: steps(ck)))
        stall_s = statistics.median(ck._receipt.stalls_s)
    lost_s = statistics.median(with_s) - statistics.median(without_s)
    share = stall_s / eager_s
    return [
        Row("lazy stall", 1e3 * stall_s, "ms", "at most 0.05 of eager", share <= 0.05, 1e3 * eager_s, share),
        Row("lazy, loop with - loop without", 1e3 * lost_s, "ms", "shown", None, 1e3 * eager_s, lost_s / eager_s),
    ]


def crowded(total_bytes: int, rounds: int) -> Row:
    torch.set_num_threads(1)  # several would wait for each other, longer than for any copy
    model, optim = job(total_bytes)
    count = max(1, int(0.05 / (timed(lambda: products(50)) / 50)))
    with_s: list[float] = []
    without_s: list[float] = []

    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        ckpt.Checkpointer(folder, {"model": model, "optim": optim}, policy=ckpt.Every(steps=10**8), codec="raw") as ck,
        ExitStack() as ends,
    ):
        ck.step()
        for number in range(rounds + 3):
            if number == 3:  # by now the copies are proven
                for _ in range(2 * (os.cpu_count() or 1)):
                    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                    ends.callback(busy.wait)
                    ends.callback(busy.kill)
                with_s.clear()
                without_s.clear()
            handle = ck.save()
            with_s.append(timed(lambda: step(ck, optim, count)))
            handle.wait("store")
            without_s.append(timed(lambda: step(ck, optim, count)))
    longest, other = max(with_s), max(without_s)
    text = "crowded: longest step with a deferred copy"
    return Row(text, 1e3 * longest, "ms", "shown", None, 1e3 * other, longest / other)


def main() -> int:
    args = parser(__doc__).parse_args()
    total, runs, rounds = (64 << 20, 2, 3) if args.small else (1 << 30, 5, 9)
    rows, eager_s = eager(total, min(torch.get_num_threads(), 8), runs, rounds // runs + 1)
    return report("stall", [*rows, *lazy(total, rounds, eager_s), crowded(total // 8, rounds)], args)


if __name__ == "__main__":
    sys.exit(main())
