"""Train a small transformer on the Python documentation, byte by byte. The demo (run.py) starts this under torchrun.

What a job needs for exact restarts is what it needs anyway: a loader that knows its position, and everything that
changes registered as state. ckpt adds the generators of every rank (dropout draws from them).
"""

# ruff: noqa: B905 (steps come first and end the loop)
from __future__ import annotations

import argparse
import json
import logging
import math
import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ckpt

CONTEXT, WIDTH, DEPTH, HEADS = 64, 192, 3, 6


class Text:
    """Batches of bytes in a shuffled order, a share for each rank. Its state is where it stands."""

    def __init__(self, batch: int, rank: int, world: int) -> None:
        topics = pydoc_data.topics.topics
        data = "\n\n".join(topics[name] for name in sorted(topics)).encode()
        count = len(data) // (CONTEXT + 1)
        self.rows = torch.frombuffer(bytearray(data), dtype=torch.uint8)[: count * (CONTEXT + 1)].view(count, -1)
        self.batch, self.rank, self.world = batch, rank, world
        self.epoch, self.position = 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.epoch))
            mine = order[self.rank :: self.world]
            while (self.position + 1) * self.batch <= len(mine):
                rows = self.rows[mine[self.position * self.batch :][: self.batch]]
                self.position += 1
                yield rows.long()
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, rows: Tensor) -> Tensor:
        """The mean loss of predicting each next byte of `rows` (batch, CONTEXT + 1)."""
        x = self.token(rows[:, :-1]) + self.place.weight
        return F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), rows[:, 1:].flatten())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="where to save")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--every", type=int, default=20, help="save every so many steps")
    parser.add_argument("--folder", type=Path, required=True, help="folder for losses and receipts")
    parser.add_argument("--launch", type=int, default=1, help="which start of the run this is, for the names of files")
    parser.add_argument("--bandwidth", type=float, help="bytes per second to the store")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(format="%(message)s", level=logging.INFO if rank == 0 else logging.WARNING)
    torch.manual_seed(1234)  # the same first weights on every rank
    model = DistributedDataParallel(Transformer())
    torch.manual_seed(rank)  # other dropout on every rank
    text = Text(batch=4, rank=rank, world=world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / args.steps))
    )
    checkpointer = ckpt.Checkpointer(
        args.url,
        state={"model": model, "optim": optimizer, "sched": scheduler, "text": text},
        policy=ckpt.Every(steps=args.every),
        limits=ckpt.Limits(bandwidth=args.bandwidth),
    )
    losses = open(args.folder / f"losses-{rank}.txt", "a", buffering=1)  # noqa: SIM115 (closed below)
    with losses, checkpointer as ck:
        if rank == 0:
            (args.folder / f"restored-{args.launch}.json").write_text(json.dumps(asdict(ck.restored)))
        for step, rows in zip(ck.steps(args.steps), text):
            optimizer.zero_grad(set_to_none=True)
            loss = model(rows)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.write(f"{step} {loss.item().hex()}\n")
            if rank == 0 and step % args.every == 0:
                print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    if rank == 0:
        (args.folder / f"receipt-{args.launch}.json").write_text(json.dumps(ck.receipt))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
