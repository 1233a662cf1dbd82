"""Trains on numbered samples, each step on one batch. Arguments: the run's URL, the number of steps, and the loader:

- "ckpt": ckpt.data.Loader; "early": the same, by an iterator that was drawn from before the block;
- "torchdata": the stateful loader and sampler of torchdata;
- "stream": ckpt.data.StreamLoader over a Hugging Face stream of 6 shards."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.data import Loader
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


def make_loader():
    if HOW == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        sampler = StatefulDistributedSampler(Samples(), seed=0)
        return StatefulDataLoader(
            Samples(), BATCH, sampler=sampler, num_workers=2, generator=torch.Generator(), persistent_workers=True
        )
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
    batches = endless(loader)
    if HOW == "early":
        next(batches)
    state = {"model": model, "optim": optimizer, "loader": loader}
    with ckpt.Checkpointer(URL, state=state, policy=ckpt.Every(steps=1)) as ck:
        print("from", ck.restored.step, flush=True)
        for step, (numbers, inputs) in zip(ck.steps(STEPS), batches, strict=False):
            loss = trained(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            record(step, loss.item(), numbers.tolist())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
