"""A training job whose state has every kind of thing that can be saved, and its bits, to be compared.

    python -m tests.checkpointer.kinds URL STEPS

trains so far, saves into this host's memory, prints the loss of each step, and waits to be killed.
"""

from __future__ import annotations

import math
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

import ckpt
from tests.checkpointer.scripts import say_line
from tests.uncompiled import leave_compiler_out

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),  # torch 2.6 has none
    *(torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
]
SKIPPED = 3  # the step whose gradient is infinite, so that the scaler skips it


class Net(nn.Module):
    """Tied weights, a part in bfloat16, a complex parameter, a 0-d one, buffers that change in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.inner.weight
        self.norm = nn.BatchNorm1d(8)
        self.low = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.spun = nn.Parameter(torch.randn(40, 8))
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.idle, self.none = nn.Parameter(torch.randn(3)), nn.Parameter(torch.empty(0, 5))
        self.drop = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        x = self.drop(self.norm(self.tied(self.inner(x).relu())))
        x = x + (self.spun @ x.mT).mT.mean(1, keepdim=True)
        x = self.low(x.to(torch.bfloat16)).float() * self.gain
        return (x * self.turn.detach().real).square().mean()


class Turned(torch.optim.Optimizer):
    """Its state is in memory column by column, as SOAP's is: what linalg.qr gives is."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            held = self.state[parameter]
            if not held:
                held["basis"] = torch.linalg.qr(torch.randn(len(parameter), len(parameter)))[0]
            parameter -= self.param_groups[0]["lr"] * held["basis"] @ parameter.grad.nan_to_num(0, 0, 0)


class Average:
    """An object of the user's own: an exponential average of the parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.mean, self.count = model, [p.detach().clone() for p in model.parameters()], 0

    def update(self) -> None:
        self.count += 1
        for mean, parameter in zip(self.mean, self.model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": list(self.mean), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.count = list(state["mean"]), state["count"]


class Shadow(nn.Module):
    """What only inference uses, and was made so: torch changes such tensors under inference_mode() only."""

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.large, self.norm = nn.Linear(300, 30).requires_grad_(False), nn.BatchNorm1d(3)
            self.register_buffer("across", torch.zeros(7, 5).t())

    @torch.inference_mode()
    def update(self, model: Net) -> None:
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.add_(model.gain.to(tensor.dtype))


def empty_tensors() -> dict[str, torch.Tensor]:
    """One of each dtype and shape, and some that are not contiguous."""
    shapes: dict[str, tuple[int, ...]] = {"zero_d": (), "empty": (0, 3), "odd": (3, 5), "large": (1000, 33)}
    found = {f"{kind}"[6:] + f".{name}": torch.zeros(s, dtype=kind) for kind in DTYPES for name, s in shapes.items()}
    found["transposed"] = torch.zeros(7, 5).t()
    found["channels_last"] = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    found["stepped"] = torch.zeros(10, 6, dtype=torch.bfloat16)[::2, 1::2]
    found["offset"] = torch.zeros(20, dtype=torch.float8_e5m2)[3:9]
    return found


class Job:
    """Its next state depends on all of its state, so that what is restored wrongly shows for ever."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = Net()
        apart = {self.model.turn, self.model.idle, self.model.spun}
        self.optim = torch.optim.AdamW((p for p in self.model.parameters() if p not in apart), lr=1e-2, amsgrad=True)
        self.twist = torch.optim.Adam([self.model.turn], lr=1e-2)  # a scaler takes no complex gradients
        self.turned = Turned([self.model.spun])
        self.idle = torch.optim.SGD([self.model.idle], lr=0.1)  # never steps, and has no state
        self.sched = torch.optim.lr_scheduler.MultiStepLR(self.optim, [2, 5])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        self.average = Average(self.model)
        self.shadow = Shadow()
        self.tensors = empty_tensors()
        self.bits = torch.Generator().manual_seed(seed)
        self.choice, self.dice = np.random.default_rng(seed), random.Random(seed)
        data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 40 * 8).reshape(40, 8))
        sampler = RandomSampler(data)  # torchdata's own: with shuffle=True its loader forgets the next epoch's order
        self.loader = StatefulDataLoader(data, batch_size=4, sampler=sampler, generator=torch.Generator())
        self._batches: Iterator[Any] | None = None
        values = {"best": math.inf, "low": -0.0, "never": None, "text": "ä", "raw": b"\0\xff", "big": 1 << 100}
        self.state: dict[str, Any] = {
            "model": self.model,
            "optim": self.optim,
            "twist": self.twist,
            "turned": self.turned,
            "idle": self.idle,
            "sched": self.sched,
            "scaler": self.scaler,
            "average": self.average,
            "shadow": self.shadow,
            "tensors": self.tensors,
            "loader": self.loader,
            "bits": self.bits,
            "choice": self.choice,
            "dice": self.dice,
            "values": values,
            "counted": Counter(),
            "nested": {1: (0, [0.5, {"x": (1, 2)}]), (1, "k"): {2, 3}},
        }

    def train(self, step: int, state: dict[str, Any]) -> float:
        """`state`: ck.state, or self.state where nothing is saved."""
        self._batches = self._batches or endless(self.loader)  # not before the position is restored
        (x,) = next(self._batches)
        noise = random.random() + float(np.random.rand()) + self.dice.random() + float(self.choice.random())
        loss = self.model(x + noise + torch.randn(()))
        self.model.zero_grad()
        self.scaler.scale(loss * (math.inf if step == SKIPPED else 1.0)).backward()
        self.scaler.step(self.optim)
        self.scaler.update()
        (self.model.turn - loss.detach() * 1j).abs().square().sum().backward()
        self.twist.step()
        self.turned.step()
        self.sched.step()
        self.average.update()
        self.shadow.update(self.model)
        for tensor in self.tensors.values():
            shuffle_bits(tensor, self.bits)
        state["values"] = {**state["values"], "best": min(state["values"]["best"], loss.item())}
        state["counted"] = state["counted"] + Counter({step % 3: 1})
        state["nested"] = {**state["nested"], 1: (step, [0.5, {"x": (step, math.nan)}])}
        return loss.item()


def shuffle_bits(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Any bits there may be, NaNs of every payload among them."""
    top = 2 if tensor.dtype is torch.bool else 256
    size = tensor.numel() * tensor.itemsize
    raw = torch.randint(0, top, (size,), dtype=torch.uint8, generator=generator)
    if size:
        tensor.copy_(raw.view(tensor.dtype).reshape(tensor.shape))


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def facts(job: Job, state: dict[str, Any]) -> dict[str, Any]:
    """All of it by name: bits of tensors with their dtype and shape, values as they print."""
    found: dict[str, Any] = {}
    shadow = job.shadow.state_dict(prefix="shadow.", keep_vars=True)
    for name, tensor in [*job.model.state_dict(keep_vars=True).items(), *shadow.items(), *job.tensors.items()]:
        found[name] = bits_of(tensor)
    for number, parameter in enumerate(job.model.parameters()):
        for optim in (job.optim, job.twist, job.turned):
            for name, value in optim.state.get(parameter, {}).items():
                found[f"optim {number} {name}"] = (*bits_of(value), value.stride())
    for number, mean in enumerate(job.average.mean):
        found[f"average {number}"] = bits_of(mean)
    for name, generator in {"bits": job.bits.get_state(), "torch": torch.get_rng_state()}.items():
        found[name] = bits_of(generator)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in job.optim.param_groups]
    others = [job.choice.bit_generator.state, np.random.get_state(), job.dice.getstate(), random.getstate()]
    others += [groups, job.sched.state_dict(), job.scaler.state_dict(), job.average.count, len(job.idle.state)]
    others += [state[name] for name in ("values", "counted", "nested")]
    found["tied"] = job.model.tied.weight is job.model.inner.weight
    return found | {f"other {number}": repr(value) for number, value in enumerate(others)}


def bits_of(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    flat = tensor.detach().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return str(tensor.dtype), tuple(tensor.shape), raw


def main() -> None:
    url, steps = sys.argv[1], int(sys.argv[2])
    job = Job(0)
    with ckpt.Checkpointer(url, job.state) as ck:
        for step in ck.steps(steps + 1):
            say_line({"rank": 0, "step": step, "loss": job.train(step, ck.state)})
            if step == steps:
                ck.step()
                ck.save().wait("local", timeout_s=60)
                say_line({"saved": step})
                threading.Event().wait()


if __name__ == "__main__":
    leave_compiler_out()
    main()
