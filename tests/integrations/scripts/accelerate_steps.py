"""Trains 8 steps with Accelerate over ck.steps(). Argument: a JSON object: folder, and words that choose a case:

saves       accelerator.save_state() in the body of each fourth step
zip         draws the batch before the step
late        registers an object after attach()
epoch       begins at epoch 0 in each life
untested    another version of accelerate
slow        pauses in each step
split       DataLoaderConfiguration(split_batches=True)
"""

import json
import sys
import time
from pathlib import Path

import accelerate
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

import ckpt
from ckpt.integrations.accelerate import attach
from tests.integrations.runs import record


def endless(loader):
    while True:
        yield from loader


def main(options):
    folder, words = Path(options["folder"]), options["words"]
    if "untested" in words:
        accelerate.__version__ = "9.1.0"
    config = DataLoaderConfiguration(split_batches="split" in words, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    points = torch.randn(48, 8, generator=torch.Generator().manual_seed(2))
    data = torch.utils.data.TensorDataset(torch.arange(48), points)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    )
    ck = attach(accelerator, folder / "run", policy=ckpt.Every(steps=100 if "saves" in words else 1))
    if "late" in words:
        accelerator.register_for_checkpointing(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 5))
    with ck:
        print("restored", ck.restored.step, flush=True)
        if ck.restored.step and "saves" in words:
            accelerator.load_state(folder / "nothing")
        if "epoch" in words:
            loader.set_epoch(0)
        pairs = zip(ck.steps(20 if "epoch" in words else 8), endless(loader), strict=False)
        if "zip" in words:
            pairs = (
                (step, batch)
                for batch, step in zip(endless(loader), ck.steps(20 if "epoch" in words else 8), strict=False)
            )
        for step, (samples, points) in pairs:
            loss = model(points).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            record(step, loss.item(), samples.tolist())
            if "saves" in words and step % 4 == 0:
                print("saved to", accelerator.save_state(folder / f"folder-{step}"), flush=True)
            time.sleep(0.2 if "slow" in words else 0.01)
    accelerator.end_training()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
