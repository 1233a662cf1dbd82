"""States that lie in other memory after each step, or are made anew whenever they are asked for: jobs of the training
script, by the names of KINDS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
import xxhash
from torch import nn

WIDE = 96  # a weight of it is large enough to be copied under the next step


class Job:
    """A small model; `train` changes all of the state. `seen`: all of it, in one order."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Linear(WIDE, WIDE)
        self.optim: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.state: dict[str, Any] = {}

    def begin(self) -> Self:
        """Wraps the model where there are other ranks."""
        self.live = nn.parallel.DistributedDataParallel(self.model) if dist.is_initialized() else self.model
        self.state = {"model": self.model, "optim": self.optim, **self.more()}
        return self

    def more(self) -> dict[str, Any]:
        return {}

    def loss(self) -> torch.Tensor:
        self.optim.zero_grad()
        loss: torch.Tensor = self.live(torch.ones(4, WIDE)).square().mean()
        loss.backward()
        return loss

    def train(self, step: int, state: dict[str, Any]) -> None:
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

    def train(self, step: int, state: dict[str, Any]) -> None:
        super().train(step, state)
        for group in self.optim.param_groups:
            group["lr"] = group["lr"] * 0.99

    def seen(self, state: dict[str, Any]) -> list[Any]:
        return [*super().seen(state), *(group["lr"] for group in self.optim.param_groups)]


class Quasi(Job):
    """L-BFGS keeps its history in lists of tensors, which move on at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.optim = torch.optim.LBFGS(self.model.parameters(), lr=0.01, max_iter=2, history_size=3)

    def train(self, step: int, state: dict[str, Any]) -> None:
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

    def train(self, step: int, state: dict[str, Any]) -> None:
        super().train(step, state)
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

    def train(self, step: int, state: dict[str, Any]) -> None:
        super().train(step, state)
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
