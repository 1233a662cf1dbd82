"""Trains a small net with an optimizer of another package. Arguments: the URL, the package and class, the last step."""

from __future__ import annotations

import importlib
import sys

import torch
from torch import nn

import ckpt
from tests.integrations.runs import record


def main(url: str, where: str, last: int) -> None:
    module, _, kind = where.partition(":")
    torch.compiler.set_stance("force_eager")  # torchao compiles its steps
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    optim = getattr(importlib.import_module(module), kind)(model.parameters(), lr=0.01)
    with ckpt.Checkpointer(url, {"model": model, "optim": optim}, policy=ckpt.Every(steps=1)) as ck:
        for step in ck.steps(last):
            if hasattr(optim, "train"):
                optim.train()
            optim.zero_grad()
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            optim.step()
            record(step, loss.item())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
