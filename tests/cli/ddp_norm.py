"""A script for torchrun: DDP with BatchNorm, whose statistics differ between the ranks."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import ckpt

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
wrapped = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
optim = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
with ckpt.Checkpointer(sys.argv[1], state={"model": wrapped, "optim": optim}) as ck:
    for _ in ck.steps(3):
        optim.zero_grad()
        wrapped(torch.randn(8, 4) + dist.get_rank()).square().mean().backward()
        optim.step()
torch.save(model[1].running_mean, f"{sys.argv[1]}.{os.environ['RANK']}.pt")
dist.destroy_process_group()
