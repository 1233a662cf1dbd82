"""Trains with Accelerate, and records each update. Argument: a JSON object: how ("ckpt", or "own": save_state and
load_state of Accelerate, as its guide shows), folder, and words that choose a case:

accumulate, seedable, stateful, workers, dispatch, fsdp, peft
"""

import json
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import peft
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from ckpt import Every
from ckpt.integrations.accelerate import attach
from tests.integrations.runs import record, shard_on_cpu

FOLDER, WORDS = Path(), set()
EPOCHS = 3
PAUSE_S = 0.02


class Noisy(Dataset):
    """40 samples. Reading one draws from torch's, NumPy's and Python's generators, as augmentations do."""

    def __init__(self):
        self.points = torch.randn(40, 8, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        if "workers" in WORDS:
            return index, self.points[index]
        with (FOLDER / f"reads-{os.getpid()}").open("a") as out:
            out.write(f"{index}\n")
        noise = torch.randn(8) * 0.1 + np.random.rand() * 0.1 + random.random() * 0.1
        return index, self.points[index] + noise


class Average:
    """An object of the user's, for register_for_checkpointing."""

    value = 0.0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def make_accelerator():
    plugin = None
    if "fsdp" in WORDS:
        shard_on_cpu()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    return Accelerator(
        cpu=True,
        gradient_accumulation_steps=3 if "accumulate" in WORDS else 1,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler="seedable" in WORDS,
            use_stateful_dataloader="stateful" in WORDS,
            dispatch_batches=True if "dispatch" in WORDS else None,
        ),
        fsdp_plugin=plugin,
    )


def make_model():
    layers = [torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(32, 1)]
    model = torch.nn.Sequential(*layers)
    if "peft" in WORDS:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0", "3"], r=2, lora_dropout=0.1))
    return model


def main(options):
    global FOLDER
    FOLDER = Path(options["folder"])
    WORDS.update(options["words"])
    accelerator = make_accelerator()
    torch.manual_seed(1 + accelerator.process_index)
    random.seed(1)
    np.random.seed(1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
    data = Noisy()
    workers = {"num_workers": 1, "persistent_workers": True} if "workers" in WORDS else {}
    loader = DataLoader(data, batch_size=4, shuffle=True, **workers)
    held_out = DataLoader(data, batch_size=8)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
    assert all(isinstance(each, DTensor) for each in model.parameters()) == ("fsdp" in WORDS)
    average = Average()
    accelerator.register_for_checkpointing(average)
    seen = []

    def train(batch):
        """One batch. Returns whether it ended an update."""
        samples, points = batch
        seen.extend(samples.tolist())
        with accelerator.accumulate(model):
            loss = model(points).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        average.value = 0.9 * average.value + 0.1 * loss.item()
        return accelerator.sync_gradients

    def record_step(step):
        record(step, average.value + scheduler.get_last_lr()[0], seen)
        seen.clear()
        time.sleep(PAUSE_S)

    def evaluate():
        model.eval()
        with torch.no_grad():
            for n, (_, points) in enumerate(held_out):
                model(points)
                if n == 1:
                    break
        model.train()

    if options["how"] == "ckpt":
        with attach(accelerator, FOLDER / "run", policy=Every(steps=2)) as ck:
            step = ck.restored.step
            for _ in range(loader.iteration, EPOCHS):
                for batch in loader:
                    if train(batch):
                        step += 1
                        record_step(step)
                        ck.step()
                evaluate()
    else:
        step = first = skipped = 0
        if kept := sorted(FOLDER.glob("step-*")):
            accelerator.load_state(kept[-1])
            step = int(kept[-1].name.split("-")[1])
            first, skipped = divmod(step * accelerator.gradient_accumulation_steps, len(loader))
        for epoch in range(first, EPOCHS):
            batches = loader
            if epoch == first and skipped and "stateful" not in WORDS:
                batches = skip_first_batches(loader, skipped)
            for batch in batches:
                if train(batch):
                    step += 1
                    record_step(step)
                    if step % 2 == 0:
                        accelerator.save_state(FOLDER / f"step-{step:03}")
            evaluate()
    accelerator.end_training()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
