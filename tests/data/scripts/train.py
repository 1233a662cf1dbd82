"""Trains on numbered samples, each step on one batch. Arguments: the run's URL, the number of steps, and the loader:

- "ckpt": ckpt.data.Loader; "early": the same, by an iterator that was drawn from before the block;
- "ahead": the same, by a zip() that draws a batch before its step begins;
- "torchdata": the stateful loader and sampler of torchdata;
- "stream": ckpt.data.StreamLoader over a Hugging Face stream of 6 shards."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.data import Loader, StreamLoader
from tests.integrations.runs import record

URL, STEPS, HOW = sys.argv[1], int(sys.argv[2]), sys.argv[3]
SIZE, BATCH = 50, 3


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        time.sleep(0.002)
        noise = torch.randn(4)  # as augmentation is: the worker's generator
        return index, torch.full((4,), index / SIZE) + noise


def augment(sample):
    time.sleep(0.002)
    return {"n": sample["n"], "x": (torch.full((4,), sample["n"] / SIZE) + torch.randn(4)).tolist()}


def pairs(batches):
    for batch in batches:
        yield (batch["n"], torch.stack(batch["x"], 1).float()) if isinstance(batch, dict) else batch


def make_loader():
    if HOW == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import RandomSampler

        sampler = RandomSampler(Samples())
        return StatefulDataLoader(
            Samples(), BATCH, sampler=sampler, num_workers=2, generator=torch.Generator(), persistent_workers=True
        )
    if HOW == "stream":
        import datasets

        numbers = datasets.Dataset.from_dict({"n": list(range(SIZE))}).to_iterable_dataset(num_shards=6)
        return StreamLoader(numbers.map(augment), BATCH, num_workers=2)
    return Loader(Samples(), BATCH, num_workers=2, persistent_workers=True)


def endless(loader):
    while True:
        yield from loader


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained = DistributedDataParallel(model) if dist.is_initialized() else model
    loader = make_loader()
    batches = pairs(endless(loader))
    if HOW == "early":
        next(batches)
    state = {"model": model, "optim": optimizer, "loader": loader}
    with ckpt.Checkpointer(URL, state=state, policy=ckpt.Every(steps=1)) as ck:
        print("from", ck.restored.step, flush=True)
        steps = ck.steps(STEPS)
        both = ((step, batch) for batch, step in zip(batches, steps, strict=False))
        for step, (numbers, inputs) in both if HOW == "ahead" else zip(steps, batches, strict=False):
            loss = trained(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            record(step, loss.item(), numbers.tolist())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
