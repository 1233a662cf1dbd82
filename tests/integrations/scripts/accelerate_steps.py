"""Trains 8 steps with Accelerate over ck.steps(). Arguments: a folder, and words that choose a case:

saves       accelerator.save_state() in the body of each fourth step
zip         draws the batch before the step
late        registers an object after attach()
epoch       begins at epoch 0 in each life
untested    another version of accelerate
slow        pauses in each step
split       DataLoaderConfiguration(split_batches=True)
"""

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

FOLDER, WORDS = Path(sys.argv[1]), sys.argv[2:]
STEPS = 20 if "epoch" in WORDS else 8


def endless(loader):
    while True:
        yield from loader


def main():
    if "untested" in WORDS:
        accelerate.__version__ = "9.1.0"
    config = DataLoaderConfiguration(split_batches="split" in WORDS, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    points = torch.randn(48, 8, generator=torch.Generator().manual_seed(2))
    data = torch.utils.data.TensorDataset(torch.arange(48), points)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    )
    ck = attach(accelerator, FOLDER / "run", policy=ckpt.Every(steps=100 if "saves" in WORDS else 1))
    if "late" in WORDS:
        accelerator.register_for_checkpointing(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 5))
    with ck:
        print("restored", ck.restored.step, flush=True)
        if ck.restored.step and "saves" in WORDS:
            accelerator.load_state(FOLDER / "nothing")
        if "epoch" in WORDS:
            loader.set_epoch(0)
        pairs = zip(ck.steps(STEPS), endless(loader), strict=False)
        if "zip" in WORDS:
            pairs = ((step, batch) for batch, step in zip(endless(loader), ck.steps(STEPS), strict=False))
        for step, (samples, points) in pairs:
            loss = model(points).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            record(step, loss.item(), samples.tolist())
            if "saves" in WORDS and step % 4 == 0:
                print("saved to", accelerator.save_state(FOLDER / f"folder-{step}"), flush=True)
            time.sleep(0.2 if "slow" in WORDS else 0.01)
    accelerator.end_training()


main()
