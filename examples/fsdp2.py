"""FSDP2 under torchrun: sharded model and optimizer, gradient accumulation, schedule, gradient scaler, stateful loader.

    torchrun --standalone --nproc-per-node=2 examples/fsdp2.py runs/fsdp2

Each rank saves only its shards. The next start may have another number of ranks: the tensors are cut anew, from this
host's memory or from the store. The loader's position is a rank's own, so a loader that cannot be resharded needs the
same number of ranks.
"""

# ruff: noqa: B905 (steps come first and end the loop)
from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import ckpt

ACCUMULATE = 2  # micro-batches per optimizer update; a step is one update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)

    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)), nn.Linear(64, 8)).to(device)
    for block in model[:4]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)
    scaler = torch.amp.GradScaler(device, growth_interval=10)

    x = torch.randn(2048, 64)
    data = torch.utils.data.TensorDataset(x, x[:, :8].sin())
    sampler = StatefulDistributedSampler(data, dist.get_world_size(), dist.get_rank(), shuffle=True, seed=0)
    # A generator of its own: otherwise making an iterator after a restart would draw from the one that dropout uses.
    loader = StatefulDataLoader(data, batch_size=16, sampler=sampler, generator=torch.Generator())

    state = {"model": model, "optim": optimizer, "sched": schedule, "scaler": scaler, "loader": loader, "epoch": 0}
    with ckpt.Checkpointer(args.url, state=state, policy=ckpt.Every(steps=10), mesh=mesh) as ck:
        batches = endless(loader, sampler, ck.state)
        for step in ck.steps(args.steps):
            optimizer.zero_grad()
            for _, (inputs, wanted) in zip(range(ACCUMULATE), batches):
                loss = F.mse_loss(model(inputs.to(device)), wanted.to(device)) / ACCUMULATE
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            if step % 10 == 0 and dist.get_rank() == 0:
                print(f"step {step} loss {loss.item():.6f} scale {scaler.get_scale():g}", flush=True)
    total = sum(p.full_tensor().double().sum().item() for p in model.parameters())
    if dist.get_rank() == 0:
        print("final", total.hex())
    dist.destroy_process_group()


def endless(loader: StatefulDataLoader, sampler: StatefulDistributedSampler, state: dict[str, Any]):
    while True:
        sampler.set_epoch(state["epoch"])  # no part of the sampler's own state: a restart goes on in this epoch
        yield from loader
        state["epoch"] += 1


if __name__ == "__main__":
    main()
