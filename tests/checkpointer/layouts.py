"""Many layouts in one launch: save under each, or restore each under others and compare every tensor.

python -m tests.checkpointer.layouts (save|load|cross FOLDER MODE)...   (plain, or under torchrun with gloo)

save: under each layout. load: each under every layout that fits. cross: each under one other layout. Several are done
one after the other.
MODE "store": the saving block is left normally. MODE "memory": the saving processes end at once without leaving it, so
that only the agents' memory and what they still commit is left; nothing can follow it.
LAYOUTS in the environment: these and no others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ckpt
from tests.checkpointer.scripts import say_line

STEPS = 3
KINDS = os.environ.get("LAYOUTS", "ddp fsdp tp hsdp stages hand").split()
SHARDED = tuple(kind for kind in KINDS if kind in ("ddp", "fsdp", "tp", "hsdp"))  # one model, in several layouts
OTHERS = tuple(kind for kind in KINDS if kind not in SHARDED)


class Net(nn.Module):
    """Seven outputs, which no number of ranks divides; one frozen weight, one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.last = nn.Linear(24, 7)
        self.frozen = nn.Parameter(torch.arange(5.0), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x))) + self.frozen.sum()


def distributed(kind: str, plain: nn.Module, world: int, parts: Iterable[str] = ()) -> nn.Module:
    """The model in that layout, where so many ranks have it. `parts`: modules that FSDP2 gathers one by one."""
    if world == 1 or (kind == "hsdp" and (world < 4 or world % 2)):
        return plain
    if kind == "ddp":
        return DistributedDataParallel(plain)
    if kind == "tp":
        plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
        return parallelize_module(plain, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)), plan)
    shape, names = ((world,), None) if kind == "fsdp" else ((2, world // 2), ("replicate", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for part in (*(getattr(plain, name) for name in parts), plain):
        fully_shard(part, mesh=mesh)
    return plain


class Job:
    """One layout of the model. `plain` is the module without a wrapper; `state` what is registered."""

    def __init__(self, kind: str, rank: int, world: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.kind, self.rank, self.world = kind, rank, world
        self.plain: nn.Module = Net()
        model: nn.Module = self.plain
        if kind in SHARDED:
            model = distributed(kind, self.plain, world)
        if kind == "stages":
            every = [nn.Linear(6, 6) for _ in range(8)]
            self.plain = model = nn.ModuleDict({str(i): every[i] for i in range(8) if i % world == rank})
        self.model = model
        self.optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.state: dict[str, Any] = {"model": model, "optim": self.optim, "note": ("x", 1)}
        if kind == "hand":
            rows = [row for row in range(11) if row * world // 11 == rank]
            self.hand = torch.zeros(len(rows), 4)
            if seed == 0 and rows:
                self.hand += torch.tensor([[100.0 * row] for row in rows]) + torch.arange(4.0)
            self.state = {"table": ckpt.Shard(self.hand, (11, 4), (rows[0] if rows else 11, 0))}

    def train(self, step: int) -> None:
        if self.kind == "hand":
            return
        torch.manual_seed(1000 + step)
        x = torch.randn(4, 6 if self.kind == "stages" else 12)
        self.optim.zero_grad()
        if self.kind == "stages":
            torch.stack([layer(x).square().mean() for layer in self.plain.values()]).sum().backward()  # type: ignore[operator]
        else:
            self.model(x).square().mean().backward()
            self.plain.seen += 1
        self.optim.step()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, whole, by name; a collective where they are sharded."""
        if self.kind == "hand":
            yield f"rows of {self.rank}", self.hand
            return
        names = {id(p): name for name, p in self.plain.named_parameters()}
        for name, p in self.plain.named_parameters():
            yield name, whole(p)
        for name, b in self.plain.named_buffers():
            yield name, whole(b)
        for p, held in self.optim.state.items():
            for key, value in held.items():
                yield f"{names[id(p)]}/{key}", whole(value)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def save(folder: Path, mode: str, rank: int, world: int) -> None:
    blocks = []
    names: list[str] = []
    for kind in (*SHARDED, *OTHERS):
        job = Job(kind, rank, world, seed=0)
        ck = ckpt.Checkpointer(
            folder / kind, job.state, policy=ckpt.Every(steps=10**6), sinks=(lambda e: names.append(e.name),)
        )
        ck.__enter__()
        for step in ck.steps(STEPS):
            job.train(step)
        found = dict(job.tensors())
        torch.save(found, folder / f"{kind}.{rank}.pt")
        if mode == "memory":
            ck.save().wait("local", timeout_s=60)
            blocks.append(ck)
        else:
            ck.__exit__(None, None, None)
    assert not {"replica.differs", "layout.differs", "snapshot.differs"} & set(names), names
    if mode == "memory":
        if world > 1:
            dist.barrier()
        say(rank, saved=len(blocks))
        os._exit(0)


def load(what: str, folder: Path, mode: str, rank: int, world: int) -> None:
    wanted_mode = mode
    for kind in (*SHARDED, *OTHERS):
        references: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob(f"{kind}.*.pt")):
            references.update(torch.load(file, weights_only=True))
        others: tuple[str, ...] = SHARDED if kind in SHARDED else (kind,)
        if what == "cross" and kind in SHARDED:
            others = (SHARDED[SHARDED.index(kind) - 1],)
        for target in others:
            job = Job(target, rank, world, seed=7)
            with ckpt.Checkpointer(folder / kind, job.state, policy=ckpt.Every(steps=10**6)) as ck:
                assert ck.restored.step == STEPS, (kind, target, ck.restored)
                wanted = "local" if mode == "memory" else "store"
                assert mode == "any" or ck.restored.level == wanted, (kind, target, ck.restored)
                found = dict(job.tensors())
                if kind == "hand":
                    for row, values in zip([r for r in range(11) if r * world // 11 == rank], job.hand, strict=True):
                        assert torch.equal(values, 100.0 * row + torch.arange(4.0)), (kind, rank, row)
                else:
                    assert ck.state["note"] == ("x", 1)
                    for name, tensor in found.items():
                        assert torch.equal(tensor, references[name]), (kind, target, name)
                    assert kind == "stages" or found.keys() == references.keys(), (kind, target)
            mode = "any" if mode == "memory" else mode  # what a memory restore leaves behind is in the store
            say(rank, kind=kind, target=target, source=ck.restored.source)
        mode = wanted_mode


def say(rank: int, **fields: Any) -> None:
    if rank == 0:
        say_line({"rank": rank, **fields})


def main() -> None:
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    else:
        rank, world = 0, 1
    for what, folder, mode in zip(sys.argv[1::3], map(Path, sys.argv[2::3]), sys.argv[3::3], strict=True):
        if what == "save":
            save(folder, mode, rank, world)
        else:
            load(what, folder, mode, rank, world)
    say(rank, done=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
