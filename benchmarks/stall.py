"""How long does training stand still for a snapshot through the whole of ckpt, against a memcpy of the same bytes?

Eager: the first appointed snapshot and the later ones, with the agent idle. Lazy: the stall of proven copies, and what
a loop loses to each snapshot altogether.
"""

from __future__ import annotations

import itertools
import mmap
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import nn

import ckpt
from benchmarks.report import Row, median_s, parser, report


def job(total_bytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Weights and two moments of together about `total_bytes`, in layers of equal size."""
    layers = 24
    side = int((total_bytes / 3 / 4 / layers) ** 0.5)
    model = nn.Sequential(*(nn.Linear(side, side) for _ in range(layers)))
    return model, torch.optim.Adam(model.parameters(), lr=1e-4)


def memcpy_s(total_bytes: int, threads: int, rounds: int) -> float:
    """Into a warm memfd, as an arena is, with as many threads as the copier uses."""
    source = np.ones(total_bytes, dtype=np.uint8)
    fd = os.memfd_create("ceiling")
    os.ftruncate(fd, total_bytes)
    target = np.frombuffer(mmap.mmap(fd, total_bytes), dtype=np.uint8)
    os.close(fd)
    target[:] = source
    cuts = np.linspace(0, total_bytes, threads + 1, dtype=np.int64)
    with ThreadPoolExecutor(threads) as pool:

        def copy() -> None:
            parts = itertools.pairwise(cuts)
            list(pool.map(lambda part: np.copyto(target[part[0] : part[1]], source[part[0] : part[1]]), parts))

        copy()
        return median_s(copy, rounds)


def work(model: nn.Module, optim: torch.optim.Optimizer, seconds: float) -> None:
    """A step of about `seconds` in which no parameter changes before the optimizer does."""
    until = time.perf_counter() + seconds
    x = torch.ones(64, 512)
    w = torch.ones(512, 512)
    while time.perf_counter() < until:
        x = (x @ w) * 1e-3
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-4) if p.grad is None else p.grad
    optim.step()


def run(total_bytes: int, lazy: bool, snapshots: int, step_s: float) -> tuple[list[float], float, float]:
    """(stalls, mean step with saving, mean step without)."""
    model, optim = job(total_bytes)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        state = {"model": model, "optim": optim}
        with ckpt.Checkpointer(folder, state, policy=ckpt.Every(steps=10**8), lazy=lazy, codec="raw") as ck:
            work(model, optim, 0)
            ck.step()
            stalls: list[float] = []
            with_s: list[float] = []
            without_s: list[float] = []
            for _ in range(snapshots):
                started = time.perf_counter()
                work(model, optim, step_s)
                ck.step()
                without_s.append(time.perf_counter() - started)
                handle = ck.save()
                started = time.perf_counter()
                work(model, optim, step_s)
                ck.step()
                with_s.append(time.perf_counter() - started)
                handle.wait("store")
            stalls = list(ck._receipt.stalls_s[:snapshots])
    return stalls, statistics.median(with_s), statistics.median(without_s)


def main() -> None:
    args = parser(__doc__).parse_args()
    total = 64 << 20 if args.small else 1 << 30
    rounds = 5 if args.small else 9
    threads = min(torch.get_num_threads(), 8)
    copy_s = memcpy_s(total, threads, rounds)
    eager, _, _ = run(total, False, rounds, 0.0)
    again_s = memcpy_s(total, threads, rounds)
    copy_s = (copy_s + again_s) / 2
    later = statistics.median(eager[1:])
    lazy, with_s, without_s = run(total, True, rounds, 2 * copy_s + 0.1)
    proven = statistics.median(lazy[3:])
    rows = [
        Row("eager stall", 1e3 * later, "ms", "<= 1.2", later <= 1.2 * copy_s, 1e3 * copy_s, later / copy_s),
        Row("first stall", 1e3 * eager[0], "ms", "<= 1.2", eager[0] <= 1.2 * copy_s, 1e3 * copy_s, eager[0] / copy_s),
        Row("lazy stall", 1e3 * proven, "ms", "<= 0.05 of eager", proven <= 0.05 * later, 1e3 * later, proven / later),
        Row("(loop with - loop without) per lazy snapshot", 1e3 * (with_s - without_s), "ms", "printed", None),
    ]
    report("stall", rows, args)


if __name__ == "__main__":
    main()
