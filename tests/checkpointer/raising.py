"""A job that fails on one rank while a save is on its way, and is started again by torchrun.

torchrun --nproc-per-node 2 --max-restarts 1 -m tests.checkpointer.raising URL

The first start saves step SAVED, and rank 1 raises after step FAILED. Each rank prints where it came from, its losses,
its events, and that it has left the block by an exception.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import ckpt
from tests.checkpointer.loops import make
from tests.checkpointer.scripts import say_line
from tests.uncompiled import leave_compiler_out

SAVED, FAILED, STEPS = 6, 9, 15


class Bug(RuntimeError):
    """What a user's code does."""


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    job = make(0 if first else 1)
    try:
        sinks = (lambda event: say_line({"rank": rank, "event": event.name}),)
        with ckpt.Checkpointer(sys.argv[1], job.state, sinks=sinks) as ck:
            say_line({"rank": rank, "restored": ck.restored.step, "level": ck.restored.level})
            for step in ck.steps(STEPS):
                say_line({"rank": rank, "step": step, "loss": job.train(step)})
                if first and step == SAVED:
                    ck.step()
                    ck.save().wait("local", timeout_s=60)
                if first and step == FAILED and rank == 1:
                    raise Bug
    except Bug:
        say_line({"rank": rank, "raised": True})
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    leave_compiler_out()
    main()
