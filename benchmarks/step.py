"""What does a step cost when nothing is due?"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time

import torch

import ckpt
from benchmarks.report import Row, parser, report


def main() -> int:
    args = parser(__doc__).parse_args()
    steps = 20_000 if args.small else 500_000
    model = torch.nn.Linear(4, 4)
    optim = torch.optim.Adam(model.parameters())
    with (
        tempfile.TemporaryDirectory() as folder,
        ckpt.Checkpointer(folder, {"model": model, "optim": optim}, policy=ckpt.Every(steps=10**9)) as ck,
    ):
        for _ in range(1000):
            ck.step()
        costs_us = []
        for _ in range(10):
            started = time.perf_counter()
            for _ in range(steps // 10):
                ck.step()
            costs_us.append(1e6 * (time.perf_counter() - started) / (steps // 10))
        started = time.perf_counter()
        for _ in range(steps // 10):
            pass
        empty_us = 1e6 * (time.perf_counter() - started) / (steps // 10)
    cost_us = statistics.median(costs_us) - empty_us
    return report("step", [Row("ck.step(), nothing due", cost_us, "us", "at most 2 us", cost_us <= 2)], args)


if __name__ == "__main__":
    sys.exit(main())
