"""Trains with Accelerate over ck.steps(). Argument: a JSON object: folder, and words that choose a case:

steps=N, batch=N, length=N: other than 8 steps in all, a batch size of 4 and 48 samples

saves       accelerator.save_state() in the body of each fourth step
zip         draws the batch before the step
late        registers an object after attach()
epoch       begins at epoch 0 in each life
untested    another version of accelerate
slow        pauses in each step
split       DataLoaderConfiguration(split_batches=True)
dispatch    DataLoaderConfiguration(dispatch_batches=True)
iterable    an iterable data set
rounds      two epochs, in the guide's loop over loader.iteration
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


def rounds(ck, loader, count):
    step = ck.restored.step
    for _ in range(loader.iteration, 2):
        for batch in loader:
            step += 1
            yield step, batch
            ck.step()
            if step == count:
                return


class Iterable(torch.utils.data.IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


def main(options):
    folder, words = Path(options["folder"]), options["words"]
    numbers = {"steps": 8, "batch": 4, "length": 48}
    numbers |= {name: int(number) for name, _, number in (word.partition("=") for word in words) if number}
    if "untested" in words:
        accelerate.__version__ = "9.1.0"
    config = DataLoaderConfiguration(
        split_batches="split" in words,
        dispatch_batches=True if "dispatch" in words else None,
        use_seedable_sampler=True,
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    points = torch.randn(numbers["length"], 8, generator=torch.Generator().manual_seed(2))
    data = torch.utils.data.TensorDataset(torch.arange(numbers["length"]), points)
    if "iterable" in words:
        data = Iterable(data)
    loader = torch.utils.data.DataLoader(data, batch_size=numbers["batch"], shuffle="iterable" not in words)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ck = attach(accelerator, folder / "run", policy=ckpt.Every(steps=100 if "saves" in words else 1))
    if "late" in words:
        accelerator.register_for_checkpointing(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 5))
    with ck:
        print(f"restored {ck.restored.step}\n", end="", flush=True)  # in one write: two ranks print
        if ck.restored.step and "saves" in words:
            accelerator.load_state(folder / "nothing")
        if "epoch" in words:
            loader.set_epoch(0)
        count = numbers["steps"]
        pairs = zip(ck.steps(count), endless(loader), strict=False)
        if "zip" in words:
            pairs = ((step, batch) for batch, step in zip(endless(loader), ck.steps(count), strict=False))
        if "rounds" in words:
            pairs = rounds(ck, loader, count)
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
