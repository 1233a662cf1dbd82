"""What do snapshots of a CUDA device cost its training, and how fast does the state come back onto it?

    python -m benchmarks.device [--small] [--json FILE]

Against one stream that copies the same tensors, one after the other, between the device and page-locked memory. Through
the whole of ckpt, the agent idle:

- eager: what training stands still for, as the device sees it; and what three steps take longer with a snapshot than
  without. A step: matrix products for one and a half times as long as the copy, then the optimizer. The host is a step
  ahead of the device, as in training.
- lazy: the same once deferred copies are proven: the copy runs under the products of the next step.
- many: a snapshot of 20,000 small tensors.
- starting: the longest of the steps in which the arenas are made and page-locked, against a usual one.
- restore: from this host's memory onto the device, hashes included.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import ckpt
from benchmarks.report import Row, parser, report, timed
from benchmarks.restore import timed_fill

LAYERS = 24
WARM = 6


class Job:
    """Weights and two moments of together about `total_bytes` on the device, after their first update."""

    def __init__(self, total_bytes: int, layers: int = LAYERS) -> None:
        side = max(8, int((total_bytes / 3 / 4 / layers) ** 0.5))
        self.model = nn.Sequential(*(nn.Linear(side, side) for _ in range(layers))).cuda()
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        for p in self.model.parameters():
            p.grad = torch.full_like(p, 1e-4)
        self.optim.step()
        self.factor = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optim": self.optim}

    @property
    def tensors(self) -> list[Tensor]:
        moments = [value for of_one in self.optim.state.values() for value in of_one.values()]
        return [t for t in [*(p.data for p in self.model.parameters()), *moments] if t.is_cuda]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def step(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self.factor, self.factor)
        self.optim.step()


def done(work: Callable[[], object]) -> float:
    """Seconds until the device has done it."""

    def finish() -> None:
        work()
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return timed(finish)


def ceilings(tensors: list[Tensor], rounds: int) -> tuple[float, float]:
    """Median seconds from the device into page-locked memory, and back."""
    host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]

    def down() -> None:
        for to, of in zip(host, tensors, strict=True):
            to.copy_(of, non_blocking=True)

    def up() -> None:
        for to, of in zip(tensors, host, strict=True):
            to.copy_(of, non_blocking=True)

    times = [(done(down), done(up)) for _ in range(rounds + 1)][1:]
    down_s, up_s = (statistics.median(column) for column in zip(*times, strict=True))
    return down_s, up_s


def stalls(job: Job, lazy: bool, rounds: int, down_s: float) -> tuple[float, float, float, list[float]]:
    """Median seconds: the stall; what three steps with a snapshot take longer; what they take. And the first stalls."""
    one_s = statistics.median(done(lambda: job.step(20)) - done(lambda: job.step(0)) for _ in range(5)) / 20
    products = max(1, int(1.5 * down_s / one_s))
    with_s: list[float] = []
    without_s: list[float] = []
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        ckpt.Checkpointer(folder, job.state, policy=ckpt.Every(steps=10**8), codec="raw", lazy=lazy) as ck,
    ):
        handles: list[ckpt.Handle] = []

        def steps(saves: bool) -> None:
            for number in range(3):
                if saves and number == 1:
                    handles.append(ck.save())
                job.step(products)
                ck.step()

        ck.step()
        for _ in range(WARM):  # until the arenas are warm and the copies proven
            steps(True)
            handles.pop().wait("store")
        first = list(ck._receipt.stalls_s)
        ck._receipt.stalls_s.clear()
        for _ in range(rounds):
            with_s.append(done(lambda: steps(True)))
            handles.pop().wait("store")
            without_s.append(done(lambda: steps(False)))
        assert bool(ck.receipt["proven"]) == lazy, ck.receipt
        stall_s = statistics.median(ck._receipt.stalls_s)
    without = statistics.median(without_s)
    return stall_s, statistics.median(with_s) - without, without, first


def many(count: int, rounds: int) -> tuple[float, int]:
    """Median seconds that a snapshot of `count` small tensors takes; their bytes."""
    job = Job(count * 256, count // 6)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        ckpt.Checkpointer(folder, job.state, policy=ckpt.Every(steps=10**8), codec="raw") as ck,
    ):
        for _ in range(rounds + 3):
            job.step(1)
            ck.step()
            ck.save().wait("store")
        return statistics.median(ck._receipt.stalls_s[3:]), job.nbytes


def starting(job: Job, steps: int) -> tuple[float, float]:
    """The longest step until the first snapshot is stored, and a usual one, in seconds."""
    usual = [done(lambda: job.step(20)) for _ in range(20)]
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        ckpt.Checkpointer(folder, job.state, policy=ckpt.Every(steps=10**8), codec="raw") as ck,
    ):

        def step() -> None:
            job.step(20)
            ck.step()

        found = []
        ends = time.monotonic() + 5
        for _ in range(steps):
            found.append(done(step))
            if time.monotonic() > ends:
                break
    return max(found), statistics.median(usual)


def restored(total_bytes: int, rounds: int) -> float:
    os.environ["CKPT_LINGER_S"] = "120"
    seconds = []
    job = Job(total_bytes)
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            code = "from benchmarks.device import Job; from benchmarks.restore import save; "
            code += f"job = Job({total_bytes}); save({folder!r}, job.model, job.optim)"
            subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
            with timed_fill() as spent, ckpt.Checkpointer(folder, job.state, policy=ckpt.Every(steps=10**8)) as ck:
                assert ck.restored.level == "local", ck.restored.level
                seconds.append(spent[0])
    return statistics.median(seconds)


def main() -> int:
    args = parser(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("device: not run, it needs a CUDA device")
        return 0
    total, count, rounds = (64 << 20, 2000, 2) if args.small else (2 << 30, 20_000, 7)
    job = Job(total)
    size = f"{job.nbytes >> 20} MiB"
    down_s, up_s = ceilings(job.tensors, rounds)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {size}: {job.nbytes / down_s / 1e9:.1f} GB/s down"
    )
    longest_s, usual_s = starting(job, 2000)
    eager_s, eager_lost_s, step_s, first = stalls(job, False, rounds, down_s)
    lazy_s, lazy_lost_s, _, lazy_first = stalls(job, True, rounds, down_s)
    print("first stalls, ms:", *(f"{1e3 * s:.1f}" for s in first), "then lazy", *(f"{1e3 * s:.1f}" for s in lazy_first))
    many_s, many_bytes = many(count, rounds)
    back_s = restored(total, 3)

    def row(question: str, seconds: float, ceiling_s: float, bar: float = 0.0, of: str = "") -> Row:
        ratio = seconds / ceiling_s
        text = f"at most {bar:g}{of}" if bar else "shown"
        return Row(question, 1e3 * seconds, "ms", text, ratio <= bar if bar else None, 1e3 * ceiling_s, ratio)

    speed, ceiling = (job.nbytes / s / 1e9 for s in (back_s, up_s))
    rows = [
        row(f"eager stall, {size}", eager_s, down_s, 1.2),
        row("eager, steps with - steps without", eager_lost_s, down_s),
        row("lazy stall", lazy_s, eager_s, 0.05, " of eager"),
        row("lazy, steps with - steps without", lazy_lost_s, eager_s),
        Row("the three steps", 1e3 * step_s, "ms", "shown", None),
        Row(f"{count} small tensors, {many_bytes >> 20} MiB", 1e3 * many_s, "ms", "at most 30 ms", many_s <= 0.03),
        row("starting: the longest step", longest_s, usual_s),
        Row("restore onto the device", speed, "GB/s", "at least 0.6", speed >= 0.6 * ceiling, ceiling, speed / ceiling),
    ]
    return report("device", rows, args)


if __name__ == "__main__":
    sys.exit(main())
