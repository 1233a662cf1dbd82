"""Under torchrun, two ranks: 300 tensors that are the same on both, and `own`, which begins so and does not stay so.
No optimizer state appears in the first step. python -m tests.checkpointer.diverging URL

Each start says what it began with; the first ends after step 2, the second right after its restore, the third after
step 20, where `own` and `late` changed in a step in which the structure stayed."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import ckpt
from tests.checkpointer.scripts import say_line
from tests.uncompiled import leave_compiler_out

TENSORS = 300
LATER = ckpt.Every(steps=10**6)  # nothing is appointed


def main() -> None:
    url = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def start(number: int, steps: int) -> None:
        model = nn.ParameterDict({f"w{n:03}": nn.Parameter(torch.ones(7)) for n in range(TENSORS)})
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        own, late, seen = torch.zeros(5000), torch.zeros(100), []
        state = {"model": model, "optim": optim, "own": own, "late": late}
        with ckpt.Checkpointer(url, state, policy=LATER, sinks=(lambda event: seen.append(event.name),)) as ck:
            came = [ck.restored.step, own.unique().tolist(), late.unique().tolist()]
            if came[0]:
                ck.save().wait("store", timeout_s=60)
            for step in ck.steps(steps):
                sum(p.sum() for p in model.values()).backward()
                optim.step()
                optim.zero_grad()
                if step == 1:
                    own[rank * 7] = rank + 1.0  # one element of many, which no sample need meet
                    ck.step()
                    ck.save().wait("store", timeout_s=60)
                if step == 19:
                    late.fill_(rank + 1.0)
                    ck.step()
                    handle = ck.save()
                    try:
                        handle.wait("store", timeout_s=60)
                        seen.append("taken")
                    except ckpt.SaveFailed as exc:
                        seen.append(str(exc))
        dist.barrier()
        say_line({"rank": rank, "start": number, "came": came, "seen": seen})

    for number, steps in enumerate((2, 2, 20, 20)):
        start(number, steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    leave_compiler_out()
    main()
