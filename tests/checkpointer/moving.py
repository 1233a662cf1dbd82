"""Training loops whose state lies in other memory after each step, or is made anew whenever it is asked for.

    python -m tests.checkpointer.moving KIND URL STEPS EVERY

says at the end of each step what the state is, and first which step was restored and what the state is then. Also under
torchrun, with DDP.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

import ckpt
from tests.checkpointer.scripts import say_line

WIDE = 96  # a weight of it is large enough to be copied under the next step


class Job:
    """A small model; `train` changes all of the state. `seen`: all of it, in one order."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Linear(WIDE, WIDE)
        self.optim: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.state: dict[str, Any] = {}

    def begin(self) -> None:
        """Wraps the model where there are other ranks."""
        self.live = nn.parallel.DistributedDataParallel(self.model) if dist.is_initialized() else self.model
        self.state = {"model": self.model, "optim": self.optim, **self.more()}

    def more(self) -> dict[str, Any]:
        return {}

    def loss(self) -> torch.Tensor:
        self.optim.zero_grad()
        loss: torch.Tensor = self.live(torch.ones(4, WIDE)).square().mean()
        loss.backward()
        return loss

    def train(self, state: dict[str, Any]) -> None:
        self.loss()
        self.optim.step()

    def seen(self, state: dict[str, Any]) -> list[Any]:
        found = [*self.model.parameters(), *self.model.buffers()]
        for parameter in self.model.parameters():
            found += [self.optim.state[parameter].get(name) for name in sorted(self.optim.state.get(parameter, ()))]
        return found


class Rate(Job):
    """A learning rate that is a tensor, replaced by whoever plans it."""

    def __init__(self) -> None:
        super().__init__()
        self.optim = torch.optim.Adam(self.model.parameters(), lr=torch.tensor(1e-2))

    def train(self, state: dict[str, Any]) -> None:
        super().train(state)
        for group in self.optim.param_groups:
            group["lr"] = group["lr"] * 0.99

    def seen(self, state: dict[str, Any]) -> list[Any]:
        return [*super().seen(state), *(group["lr"] for group in self.optim.param_groups)]


class Quasi(Job):
    """L-BFGS keeps its history in lists of tensors, which move on at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.optim = torch.optim.LBFGS(self.model.parameters(), lr=0.01, max_iter=2, history_size=3)

    def train(self, state: dict[str, Any]) -> None:
        self.optim.step(lambda: self.loss().item())


class Counting(nn.Linear):
    """Assigns a buffer in each forward."""

    def __init__(self) -> None:
        super().__init__(WIDE, WIDE)
        self.register_buffer("mean", torch.zeros(WIDE, WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.5 + self.weight.detach()
        return super().forward(x)


class Buffer(Job):
    def __init__(self) -> None:
        super().__init__()
        self.model = Counting()
        self.optim = torch.optim.Adam(self.model.parameters(), lr=1e-2)


class Value(Job):
    """A tensor of the user's own, replaced at each step."""

    def more(self) -> dict[str, Any]:
        return {"y": torch.zeros(5000)}

    def train(self, state: dict[str, Any]) -> None:
        super().train(state)
        state["y"] = state["y"] + 1

    def seen(self, state: dict[str, Any]) -> list[Any]:
        return [*super().seen(state), state["y"]]


class Cloning:
    """Gives copies of what it holds, and the state of a generator."""

    def __init__(self) -> None:
        self.mean, self.dice = torch.zeros(5000), torch.Generator().manual_seed(1)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean.clone(), "dice": self.dice.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"].clone()
        self.dice.set_state(state["dice"])


class Clones(Job):
    def __init__(self) -> None:
        super().__init__()
        self.average = Cloning()

    def more(self) -> dict[str, Any]:
        return {"average": self.average}

    def train(self, state: dict[str, Any]) -> None:
        super().train(state)
        self.average.mean += torch.rand(5000, generator=self.average.dice)

    def seen(self, state: dict[str, Any]) -> list[Any]:
        return [*super().seen(state), self.average.mean, self.average.dice.get_state()]


KINDS: dict[str, Callable[[], Job]] = {
    "rate": Rate,
    "quasi": Quasi,
    "buffer": Buffer,
    "value": Value,
    "clones": Clones,
}


def bits(job: Job, state: dict[str, Any]) -> str:
    """What the state is now."""
    whole = xxhash.xxh3_128()
    for each in job.seen(state):
        whole.update(repr(_plain(each)).encode() if not isinstance(each, torch.Tensor) else _plain(each))
    return whole.hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return list(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def main() -> None:
    kind, url, steps, every = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    job = KINDS[kind]()
    job.begin()
    with ckpt.Checkpointer(url, job.state, policy=ckpt.Every(steps=every)) as ck:
        if ck.restored.step:
            say_line({"rank": rank, "restored": ck.restored.step, "bits": bits(job, ck.state)})
        for step in ck.steps(steps):
            job.train(ck.state)
            say_line({"rank": rank, "step": step, "bits": bits(job, ck.state)})
            ck.step()  # which does not return where all leave
            time.sleep(0.01)
    say_line({"rank": rank, "ended": ck.receipt["committed_step"], "fell_back": ck.receipt["fell_back"]})
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
