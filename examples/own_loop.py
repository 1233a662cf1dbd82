"""A loop that counts for itself, with an evaluation every 500 steps: ck.step(n), ck.poll() and ck.save(metrics=).

    python examples/own_loop.py runs/own

`ck.step(n)` says that update n has ended. `ck.poll()` may be called where no registered optimizer steps, such as in a
long evaluation: a save that is due is taken there. `ck.save(metrics=...)` saves now, and gives the checkpoint numbers
by which `ckpt.Keep(best=...)` chooses.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ckpt

EVALUATE_EVERY = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    checkpointer = ckpt.Checkpointer(
        args.url,
        state={"model": model, "optim": optimizer},
        policy=ckpt.Every(seconds=600),
        keep=ckpt.Keep(last=2, best=ckpt.Best("val_loss", "min")),
    )
    with checkpointer as ck:
        step = ck.restored.step  # 0 at a fresh start
        while step < args.steps:
            step += 1
            x, y = batch(128)  # drawn from torch's generator, which is part of the state
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            ck.step(step)

            if step % EVALUATE_EVERY == 0:
                val_loss = evaluate(model, ck.poll)
                saved = ck.save(metrics={"val_loss": val_loss})  # under way; training need not wait
                print(f"step {step} val_loss {val_loss:.6f} level {saved.level}", flush=True)
    print("final", sum(p.double().sum().item() for p in model.parameters()).hex())


def batch(size: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(size, 2) * 2 - 1
    return x, (x[:, :1] * 3).sin() * x[:, 1:]


@torch.no_grad()
def evaluate(model: nn.Module, poll: Callable[[], None]) -> float:
    """The mean error on a grid. It draws nothing, so that a restart in its middle changes nothing."""
    grid = torch.linspace(-1, 1, 64)
    losses = []
    for row in grid:
        x = torch.stack([row.expand(64), grid], dim=1)
        losses.append(F.mse_loss(model(x), (x[:, :1] * 3).sin() * x[:, 1:]))
        poll()
    return torch.stack(losses).mean().item()


if __name__ == "__main__":
    main()
