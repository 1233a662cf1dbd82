"""Under torchrun: a tensor that is the same on both ranks ceases to be; python -m tests.checkpointer.replicas URL."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import ckpt
from tests.checkpointer.scripts import say_line
from tests.uncompiled import leave_compiler_out


def main() -> None:
    url = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    table, other = torch.zeros(5000), torch.zeros(4)
    seen: list[str] = []
    with ckpt.Checkpointer(
        url,
        {"table": table, "other": other},
        policy=ckpt.Every(steps=2),
        sinks=(lambda event: seen.append(event.name),),
    ) as ck:
        for step in ck.steps(100_000):
            other += 1
            table += 1
            if rank == 1 and step == 20:
                table += 100
            time.sleep(0.005)
            flag = torch.tensor([int("replica.differs" in seen)])
            dist.all_reduce(flag)
            if flag.item():
                ck.step()
                break
    expected, last = table.clone(), step
    dist.barrier()
    table, other = torch.zeros(5000), torch.zeros(4)
    with ckpt.Checkpointer(url, {"table": table, "other": other}) as ck:
        same = bool(torch.equal(table, expected)) and ck.restored.step == last
    say_line({"rank": rank, "same": same, "step": last, "loud": "replica.differs" in seen})
    dist.destroy_process_group()


if __name__ == "__main__":
    leave_compiler_out()
    main()
