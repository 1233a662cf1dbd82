"""Ray Train: Ray starts the workers again and keeps the books; ckpt saves and restores.

    python examples/launchers/ray_train.py s3://bucket/run --workers 8

A lost worker has Ray start all workers again; they go on with the step after the newest checkpoint. When Ray announces
that a node goes (PreemptionInfo), all workers save at the same step and train on until it has gone.
docs/guides/launchers.md explains the settings.
"""

# ruff: noqa: B905 (steps come first and end the loop)
from __future__ import annotations

import argparse
from typing import Any

import ray.train
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import ckpt

ASK_EVERY = 50  # steps; the question is a barrier of all workers and takes a second


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    context = ray.train.get_context()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = list(torch.randn(4096, 16))
    sampler = StatefulDistributedSampler(data, context.get_world_size(), context.get_world_rank(), shuffle=True, seed=0)
    loader = StatefulDataLoader(data, batch_size=64, sampler=sampler, generator=torch.Generator())

    state = {"model": model, "optim": optimizer, "loader": loader, "epoch": 0}
    with ckpt.Checkpointer(config["url"], state, policy=ckpt.Every(steps=20)) as ck:
        told = False
        for step, inputs in zip(ck.steps(config["steps"]), endless(loader, sampler, ck.state)):
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % ASK_EVERY == 0 and not told and ray.train.get_preemption_info() is not None:
                told = True  # on all workers: they get the same answer
                ck.step()
                ck.save().wait("store")
            if step % 20 == 0:  # without a checkpoint: Ray would delete what it keeps books on
                ray.train.report({"step": step, "loss": loss.item()})


def endless(loader: StatefulDataLoader, sampler: StatefulDistributedSampler, state: dict[str, Any]):
    while True:
        sampler.set_epoch(state["epoch"])
        yield from loader
        state["epoch"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"url": args.url, "steps": args.steps},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=100)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
