"""How long does the command line take to begin, beside Python itself?

    python -m benchmarks.startup [--small] [--json FILE]

Whole commands, from the start of the process to its end, in turns with `python -c pass`; medians. The run that is
listed lies in a local folder.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import ckpt
from benchmarks.report import Row, parser, report, timed

BAR_S = 0.3
CLI = ("-m", "ckpt.cli.main")


def save(url: str) -> None:
    model = torch.nn.Linear(4, 4)
    with ckpt.Checkpointer(url, {"model": model}, policy=ckpt.Every(steps=1)) as ck:
        for _ in ck.steps(20):
            pass


def main() -> int:
    args = parser(__doc__).parse_args()
    rounds = 2 if args.small else 15
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CKPT_RUNTIME_DIR"] = f"{folder}/agent"
        save(f"{folder}/run")
        commands = {
            "python -c pass": ("-c", "pass"),
            "ckpt --help": (*CLI, "--help"),
            "ckpt ls --json": (*CLI, "ls", "--json", f"{folder}/run"),
            "ckpt ls": (*CLI, "ls", f"{folder}/run"),
        }

        def run(name: str) -> None:
            words = [sys.executable, *commands[name]]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[1])

        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, of_one in times.items():
                of_one.append(timed(lambda name=name: run(name)))  # type: ignore[misc]
    python_s, *others = (statistics.median(of_one) for of_one in times.values())
    rows = [
        Row(name, spent_s, "s", f"at most {BAR_S:g} s", spent_s <= BAR_S, python_s, spent_s / python_s)
        for name, spent_s in zip(list(commands)[1:], others, strict=True)
    ]
    return report("startup", rows, args)


if __name__ == "__main__":
    sys.exit(main())
