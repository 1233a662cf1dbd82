"""What the launchers start: python tests/examples/launched.py URL [--steps N] [--every N] [--pace S].

Two or more ranks train with DDP and a stateful loader. Each step is recorded (tests/integrations/runs.py). Notices are
printed. A member of a Slurm array records in a folder of its own.
"""

# ruff: noqa: B905 (steps come first and end the loop)
from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import ckpt
from tests.integrations.runs import record


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=1_000_000, help="else only a notice and the end save")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that a step of the first start waits")
    args = parser.parse_args()
    os.environ["RECORDS"] = os.path.join(os.environ["RECORDS"], os.environ.get("SLURM_ARRAY_TASK_ID", ""))
    os.makedirs(os.environ["RECORDS"], exist_ok=True)

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = list(enumerate(torch.randn(256, 4)))
    sampler = StatefulDistributedSampler(data, dist.get_world_size(), dist.get_rank(), shuffle=True, seed=0)
    loader = StatefulDataLoader(data, batch_size=4, sampler=sampler, generator=torch.Generator())

    state = {"model": model, "optim": optimizer, "loader": loader, "epoch": 0}
    with ckpt.Checkpointer(args.url, state, policy=ckpt.Every(steps=args.every), sinks=(say,)) as ck:
        pace_s = 0.0 if ck.restored.step else args.pace
        print(f"rank {dist.get_rank()} restored {ck.restored.step} from {ck.restored.level}", flush=True)
        batches = endless(loader, sampler, ck.state)
        for step, (indices, inputs) in zip(ck.steps(args.steps), batches):
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            record(step, loss.item(), indices.tolist())
            time.sleep(pace_s)
    dist.destroy_process_group()


def say(event: ckpt.Event) -> None:
    if event.name.startswith("notice"):
        print(f"{event.name}: {event.message}", flush=True)


def endless(loader, sampler, state):
    while True:
        sampler.set_epoch(state["epoch"])
        yield from loader
        state["epoch"] += 1


if __name__ == "__main__":
    main()
