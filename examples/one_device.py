"""One process on one device: the smallest loop that survives.

    python examples/one_device.py runs/one            # train; stop it in any way, start it again

The state is what the loop would have to recreate: the model, the optimizer, the schedule, the position in the data,
and a plain value. Python's, NumPy's and torch's generators are saved without being named. A path is a store like any
other: s3://bucket/run works the same.
"""

# ruff: noqa: B905 (steps come first and end the loop)
from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

import ckpt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    points = torch.randn(4096, 16)
    data = torch.utils.data.TensorDataset(points, points.pow(2).sum(dim=1, keepdim=True).sqrt())
    # A plain DataLoader has no position to save. The generator is there so that the loader does not draw from torch's
    # default one, which dropout uses, whenever an iterator is made: after a restart that would be once too often.
    loader = StatefulDataLoader(data, batch_size=64, sampler=RandomSampler(data), generator=torch.Generator())

    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

    state = {"model": model, "optim": optimizer, "sched": schedule, "loader": loader, "best": float("inf")}
    with ckpt.Checkpointer(args.url, state=state, policy=ckpt.Every(steps=20)) as ck:
        batches = endless(loader)  # made after entering: an iterator made before would not know the restored position
        for step, (x, y) in zip(ck.steps(args.steps), batches):  # steps first: else a batch is drawn and lost
            loss = F.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            ck.state["best"] = min(ck.state["best"], loss.item())
            if step % 20 == 0:
                print(f"step {step} loss {loss.item():.4f} best {ck.state['best']:.4f}", flush=True)
    print("final", sum(p.double().sum().item() for p in model.parameters()).hex())


def endless(loader: StatefulDataLoader):
    while True:
        yield from loader


if __name__ == "__main__":
    main()
