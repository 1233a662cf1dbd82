"""A training script on one CUDA device, for tests that kill it: python -m tests.checkpointer.device_script URL STEPS
KIND

KIND: fused (AdamW and a gradient scaler under autocast), graph (one whole step as a CUDA graph), compiled, ema (an
average of the weights, on the host). Under torchrun the ranks share the device and reduce over gloo (DDP).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # equal losses to the last bit, before CUDA is started

import torch
import torch.distributed as dist
from torch import nn

import ckpt
from tests.checkpointer.scripts import say_line

WIDTH = 512
Train = Callable[[int], torch.Tensor]


def batch(step: int) -> torch.Tensor:
    noise = torch.Generator().manual_seed(step)
    return torch.randn(64, WIDTH, generator=noise).cuda()


def network() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.1)) for _ in "1234"]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 8)).cuda()


def fused(compiled: bool = False) -> tuple[dict[str, Any], Train]:
    model: nn.Module = network()
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    sched = torch.optim.lr_scheduler.StepLR(optim, 7, gamma=0.7)
    scaler = torch.amp.GradScaler("cuda", growth_interval=5)
    if compiled:
        model = torch.compile(model)  # type: ignore[assignment]

    def train(step: int) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16):
            loss = model(batch(step)).square().mean()
        optim.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optim)
        scaler.update()
        sched.step()
        return loss

    return {"model": model, "optim": optim, "sched": sched, "scaler": scaler}, train


def graph() -> tuple[dict[str, Any], Train]:
    """The step is captured at the first call, after the state was restored."""
    model = network()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    given, captured, lost = (
        torch.zeros(64, WIDTH, device="cuda"),
        torch.cuda.CUDAGraph(),
        torch.zeros((), device="cuda"),
    )
    ready: list[bool] = []

    def once() -> None:
        loss = model(given).square().mean()
        loss.backward()
        optim.step()
        lost.copy_(loss)
        for p in model.parameters():
            assert p.grad is not None
            p.grad.zero_()

    def train(step: int) -> torch.Tensor:
        given.copy_(batch(step))
        if not ready:  # this step warms up, without a graph; a capture runs nothing
            ready.append(True)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                once()
            torch.cuda.current_stream().wait_stream(side)
            return lost
        if len(ready) == 1:
            ready.append(True)
            with torch.cuda.graph(captured):
                once()
        captured.replay()
        return lost

    return {"model": model, "optim": optim}, train


def ema() -> tuple[dict[str, Any], Train]:
    model = network()
    average = torch.optim.swa_utils.AveragedModel(
        model, "cpu", multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn()
    )
    optim = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)

    def train(step: int) -> torch.Tensor:
        loss = model(batch(step)).square().mean()
        optim.zero_grad(set_to_none=False)
        loss.backward()
        optim.step()
        average.update_parameters(model)
        return loss + sum(p.double().sum().item() for p in average.parameters())

    return {"model": model, "average": average, "optim": optim}, train


KINDS = {"fused": fused, "graph": graph, "compiled": lambda: fused(compiled=True), "ema": ema}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("steps", type=int)
    parser.add_argument("kind", choices=KINDS)
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    if dist.is_torchelastic_launched():
        dist.init_process_group("cpu:gloo,cuda:gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    state, train = KINDS[args.kind]()
    torch.manual_seed(rank)  # dropout differs between ranks

    def say(**fields: object) -> None:
        say_line({"rank": rank, **fields})

    with ckpt.Checkpointer(
        args.url, state, policy=ckpt.Every(steps=3), sinks=(lambda event: say(event=event.name, message=event.message),)
    ) as ck:
        say(restored=ck.restored.step, level=ck.restored.level, pid=os.getpid())
        for step in ck.steps(args.steps):
            say(step=step, loss=train(step).item())
    say(receipt=ck.receipt)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
