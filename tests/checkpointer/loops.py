"""Small deterministic training jobs for the tests of the session."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ckpt.ipc import client
from ckpt.settings import read_settings
from ckpt.storage import canonical


def wait_agent_gone(url: str | os.PathLike[str], timeout_s: float = 60.0) -> None:
    """So that the next start finds the store alone, and not the memory of an agent that is about to end."""
    places = client.make_agent_paths(canonical(os.fspath(url)), read_settings())
    deadline = time.monotonic() + timeout_s
    while places.run_lock.exists() or places.socket.exists():
        assert time.monotonic() < deadline, f"the agent of {url} is still there"
        time.sleep(0.01)


@dataclass
class Job:
    """A model whose loss depends on all generators, so that a wrong restore shows in the next loss."""

    model: nn.Module
    optim: torch.optim.Optimizer
    sched: Any

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optim, "sched": self.sched}

    def train(self, step: int, state: object = None) -> float:
        x = torch.randn(8, 16) + random.random() + float(np.random.rand())
        loss = self.model(x).square().mean()
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        self.sched.step()
        return loss.item()


def make(seed: int = 0) -> Job:
    torch.set_num_threads(1)  # these tensors are small, and the cores are shared
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Job(model, optim, torch.optim.lr_scheduler.MultiStepLR(optim, [7, 13]))


def losses(steps: int, seed: int = 0) -> list[float]:
    """What an uninterrupted run gives."""
    job = make(seed)
    return [job.train(step) for step in range(1, steps + 1)]
