"""Ray Train: Ray starts the workers again and keeps the books; ckpt saves and restores.

    python examples/launchers/ray_train.py s3://bucket/run s3://bucket/ray --workers 8

A lost worker has Ray start all workers again; they go on with the step after the newest checkpoint. When Ray announces
that a node goes (PreemptionInfo), ckpt gets that as a notice: all workers save at the same step and leave just before.
docs/guides/launchers.md explains the settings.
"""

# ruff: noqa: B905 (steps come first and end the loop)
from __future__ import annotations

import argparse
import os
import tempfile
import uuid
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from ray.train import CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import ckpt

ASK_EVERY = 50  # steps; the question is a barrier of all workers and takes a second
REPORT_EVERY = 20  # steps; a barrier too
NAME = "books"


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    context = ray.train.get_context()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = list(torch.randn(4096, 16))
    sampler = StatefulDistributedSampler(data, context.get_world_size(), context.get_world_rank(), shuffle=True, seed=0)
    loader = StatefulDataLoader(data, batch_size=64, sampler=sampler, generator=torch.Generator())

    state = {"model": model, "optim": optimizer, "loader": loader, "epoch": 0}
    notice = notice_file(config["url"])
    with ckpt.Checkpointer(config["url"], state, policy=ckpt.Every(steps=REPORT_EVERY)) as ck:
        for step, inputs in zip(ck.steps(config["steps"]), endless(loader, sampler, ck.state)):
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % ASK_EVERY == 0 and (info := ray.train.get_preemption_info()):
                pass_on(info, notice)
            if step % REPORT_EVERY == 0:
                metrics = {"step": step, "loss": loss.item()}
                entry = book_entry(config, metrics) if context.get_world_rank() == 0 else None
                ray.train.report(metrics, entry, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


def notice_file(url: str) -> Path:
    """The file on this node that is a notice to ckpt once it exists. It does not exist when a start begins."""
    path = Path(tempfile.gettempdir(), f"ckpt-notice-{uuid.uuid5(uuid.NAMESPACE_URL, url)}")
    path.unlink(missing_ok=True)
    os.environ["CKPT_NOTICE_FILE"] = str(path)
    return path


def pass_on(info: ray.train.PreemptionInfo, notice: Path) -> None:
    """Tells ckpt on each node that goes when it goes; without a time ckpt takes 30 s."""
    rank = ray.train.get_context().get_world_rank()
    if rank in info.preempted_ranks:
        part = notice.with_name(f"{notice.name}.{rank}")
        part.write_text(str(info.deadline_ms / 1000) if info.deadline_ms else "")
        part.replace(notice)


def book_entry(config: dict[str, Any], metrics: dict[str, Any]) -> ray.train.Checkpoint:
    """A small folder in Ray's storage that names the run and the step. Ray may delete the folder; the run stays."""
    entry = ray.train.Checkpoint(f"{config['storage']}/{NAME}/step-{metrics['step']}-{uuid.uuid4().hex[:8]}")
    entry.filesystem.create_dir(entry.path)
    entry.set_metadata({"url": config["url"], **metrics})
    return entry


def endless(loader: StatefulDataLoader, sampler: StatefulDistributedSampler, state: dict[str, Any]):
    while True:
        sampler.set_epoch(state["epoch"])
        yield from loader
        state["epoch"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="where ckpt saves")
    parser.add_argument("storage", help="where Ray keeps its books; all nodes reach it")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"url": args.url, "storage": args.storage, "steps": args.steps},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(name=NAME, storage_path=args.storage, failure_config=FailureConfig(max_failures=100)),
    )
    result = trainer.fit()
    if result.checkpoint is not None:
        entry = result.checkpoint.get_metadata()
        with ckpt.open(entry["url"]) as run:
            print(f"Ray's newest checkpoint is step {run.find(entry['step']).step} of {entry['url']}")


if __name__ == "__main__":
    main()
