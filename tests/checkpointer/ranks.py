"""Checks that several ranks make together, in one launch: torchrun -m tests.checkpointer.ranks FOLDER MODULE ...

A module has CHECKS, functions of a `Job`. Every rank prints what it saw of each, in one line; a test says what that
should be (the fixture `saw`).
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.checkpointer.loops import wait_agent_gone
from tests.checkpointer.scripts import say_line
from tests.uncompiled import leave_compiler_out


@dataclass
class Job:
    folder: Path
    rank: int = field(default_factory=dist.get_rank)

    @cached_property
    def pairs(self) -> list[Any]:
        """The groups of the first two of four ranks, and of the last two. All ranks ask for them first at one time."""
        return [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def ended(self, *urls: Path) -> None:
        """Returns on all ranks once all have left, and no agent of these URLs is left."""
        dist.barrier()
        if self.rank == 0:
            for url in urls:
                wait_agent_gone(url)
        dist.barrier()


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def main() -> None:
    modules = [importlib.import_module(name) for name in sys.argv[2:]]
    if "torch.distributed.fsdp" not in sys.modules:
        leave_compiler_out()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = Job(Path(sys.argv[1]))
    for check in (check for module in modules for check in module.CHECKS):
        began_s = time.monotonic()
        saw = check(job)
        took_s = round(time.monotonic() - began_s, 1)
        say_line({"check": check.__name__, "rank": job.rank, "saw": saw, "took_s": took_s})
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
