"""How fast does a state come back from this host's memory into warm tensors, hash included, against memcpy?

Only fetching, copying and checking is timed, not finding out what there is. What a restore needs beside the state is
measured by peak.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import ckpt
from benchmarks.memcpy import Pieces, Whole
from benchmarks.report import Row, parser, report, timed
from benchmarks.stall import job, sizes
from ckpt.trainer.restore import restore


def save(folder: str, model: nn.Module, optim: torch.optim.Optimizer) -> None:
    """Leaves a checkpoint in the agent's memory only: the process ends without leaving the block."""
    ck = ckpt.Checkpointer(folder, {"model": model, "optim": optim}, codec="raw")
    ck.__enter__()
    ck.step()
    ck.save().wait("store")
    os._exit(0)


@contextlib.contextmanager
def timed_fill() -> Iterator[list[float]]:
    """Seconds to fetch, copy and check the tensors of each restore inside."""
    spent: list[float] = []
    inner = restore.fill

    def fill(*args: object) -> dict[str, int]:
        started = time.perf_counter()
        found = inner(*args)  # type: ignore[arg-type]
        spent.append(time.perf_counter() - started)
        return found

    restore.fill = fill  # type: ignore[assignment]
    try:
        yield spent
    finally:
        restore.fill = inner


def load(folder: str, total: int) -> tuple[float, str]:
    """Those seconds; the level they came from."""
    model, optim = job(total)
    policy = ckpt.Every(steps=10**8)
    with timed_fill() as spent, ckpt.Checkpointer(folder, {"model": model, "optim": optim}, policy=policy) as ck:
        return spent[0], ck.restored.level


def main() -> int:
    args = parser(__doc__).parse_args()
    total, rounds = (32 << 20, 2) if args.small else (1 << 30, 5)
    threads = min(torch.get_num_threads(), 8)
    os.environ["CKPT_LINGER_S"] = "120"
    seconds: list[float] = []
    copies: list[float] = []
    wholes: list[float] = []
    with (
        Pieces(sizes(job(total)[0]), threads) as copy,
        Whole(total, threads) as whole,
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
    ):
        for number in range(rounds):
            url = f"{folder}/{number}"
            code = f"from benchmarks.restore import job, save; save({url!r}, *job({total}))"
            subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
            spent, level = load(url, total)
            assert level == "local", level
            seconds.append(spent)
            copies += [timed(copy) for _ in range(3)]
            wholes += [timed(whole) for _ in range(3)]
            shutil.rmtree(url)
    spent, copy_s, whole_s = map(statistics.median, (seconds, copies, wholes))
    speed, ratio = total / spent / 1e9, copy_s / spent
    rows = [
        Row("restore from memory", speed, "GB/s", "at least 0.6", ratio >= 0.6, total / copy_s / 1e9, ratio),
        Row("... against one memcpy a thread", speed, "GB/s", "shown", None, total / whole_s / 1e9, whole_s / spent),
    ]
    return report("restore", rows, args)


if __name__ == "__main__":
    sys.exit(main())
