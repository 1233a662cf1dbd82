"""Under torchrun: what the receipts of both ranks say, at the exit and on a restore; python -m
tests.checkpointer.receipts URL."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import ckpt
from tests.checkpointer.runs import Seen
from tests.checkpointer.scripts import say_line
from tests.uncompiled import leave_compiler_out

LATER = ckpt.Every(steps=10**6)  # nothing is appointed


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(4)))
    state = {"model": model, "own": torch.full((5000,), float(rank))}
    for start in ("first", "again"):
        seen = Seen()
        with ckpt.Checkpointer(sys.argv[1], state, policy=LATER, codec="raw", sinks=(seen,)) as ck:
            for _ in ck.steps(3 if start == "first" else 4):
                with torch.no_grad():
                    model[0].weight += 1
                ck.step()
                ck.save().wait("store", timeout_s=60)
        restored = [event.message for event in seen.named("restored")]
        say_line({"rank": rank, "start": start, "receipt": ck.receipt, "restored": restored})
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    leave_compiler_out()
    main()
