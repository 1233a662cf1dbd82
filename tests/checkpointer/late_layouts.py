"""Late copies of sharded and replicated models, by a copier that stops between tensors wherever training may run into
it: a check of four ranks (tests/checkpointer/ranks.py).

Each layout is trained until every rank has copied late some times, and each step is saved while the next one runs. Rank
0 compares what is in the store with what the model and its optimizer held after that step.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import nn

import ckpt
from ckpt.store.reader import open_record
from ckpt.store.run import Run
from ckpt.trainer.loop import entry
from ckpt.types import SMALL_BYTES
from tests.checkpointer.layouts import distributed, whole
from tests.checkpointer.ranks import Job
from tests.checkpointer.runs import LATER
from tests.cli.stores import opened
from tests.store.build import read_all
from tests.trainer.snapshots import TearingCopier

KINDS = ("ddp", "fsdp", "tp", "hsdp")
LATE, STEPS_MAX = 3, 60
ACCUMULATE = 2  # micro-batches, under all of which a copy stays open
WIDTH, INNER = 512, 2048  # of each weight every one of four ranks holds as much as may be copied late


class Net(nn.Module):
    """Training runs into a copy in the middle of forward and of backward, where FSDP2 has gathered its parts."""

    def __init__(self, copier: TearingCopier) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.copy_some = copier.copy_some

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.first(x).relu()
        self.copy_some()
        inner.register_hook(lambda grad: self.copy_some())
        return self.last(inner)


def held(plain: nn.Module, optim: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """All of it whole, by the names that it is saved under; a collective where it is sharded."""
    for name, p in plain.named_parameters():
        yield f"model.{name}", whole(p)
        for key, value in optim.state[p].items():
            yield f"optim.state.{name}.{key}", whole(value)


def hashed(data: object) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def differing(url: Path, expected: dict[int, dict[str, str]]) -> list[str]:
    """What the store has otherwise, or not at all."""
    wrong, found = [], set()
    with opened(url) as backend:
        for ref in Run(backend).view().history:
            step = ref.identity.version.step
            found.add(step)
            stored = read_all(backend, open_record(backend, ref), 64 << 20)
            hashes = {
                name if not owner else f"{name} of {owner}": hashed(bits) for (name, owner), bits in stored.items()
            }
            names = hashes.keys() | expected[step].keys()
            wrong += [f"step {step}: {each}" for each in names if hashes.get(each) != expected[step].get(each)]
    return [*wrong, *(f"step {step} is not there" for step in expected.keys() - found)]


def train(job: Job, kind: str) -> dict[str, object]:
    url = job.folder / kind
    torch.manual_seed(1)
    copier = TearingCopier()
    entry.make_copier = lambda: copier
    plain = Net(copier)
    model = distributed(kind, plain, dist.get_world_size(), parts=("first", "last"))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected: dict[int, dict[str, str]] = {}
    handles: list[ckpt.Handle] = []
    late = 0
    with ckpt.Checkpointer(url, {"model": model, "optim": optim}, policy=LATER, codec="raw") as ck:
        for step in ck.steps(STEPS_MAX):
            before = copier.copied_late
            copier.copy_some()
            for part in range(ACCUMULATE):
                generator = torch.Generator().manual_seed(100 * step + part)
                model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
            optim.step()
            optim.zero_grad()
            late += copier.copied_late > before
            expected[step] = {name: hashed(tensor.numpy()) for name, tensor in held(plain, optim)}
            ck.step()
            handles.append(ck.save())
            fewest = torch.tensor(late)
            dist.all_reduce(fewest, dist.ReduceOp.MIN)
            if fewest >= LATE:
                break
        for handle in handles:
            handle.wait("store", timeout_s=60)
    job.ended(url)
    wrong = []
    if job.rank == 0:
        wrong = differing(url, expected)
        shutil.rmtree(url)
    dist.barrier()
    return {"wrong": wrong, "late": late, "fell_back": ck.receipt["fell_back"]}


def late_copies(job: Job) -> dict[str, object]:
    """By layout: how often this rank copied late, and what was not as it should be."""
    assert 4 * WIDTH * INNER // dist.get_world_size() >= SMALL_BYTES
    return {kind: train(job, kind) for kind in KINDS}


CHECKS = (late_copies,)
