"""Every code block of the docs that says python runs, with stand-ins for what the reader brings."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

import ckpt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHORTER = {"10_000": "3", "2000": "3", "steps(400)": "steps(3)", "range(10**6)": "range(3)"}  # loops
# A metadata service on loopback that refuses, in the place of the one of the cloud that the test runs in.
HERE = {"which_cloud(), Endpoints()": 'None, Endpoints(gcp="127.0.0.1:1")'}
# Pages whose blocks go on from one another: tests/policy runs them and compares what they print.
ONE_AFTER_THE_OTHER = {"docs/guides/intervals.md"}


def blocks() -> Iterator[Any]:
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        if name not in ONE_AFTER_THE_OTHER:
            for number, text in enumerate(BLOCK.findall(page.read_text())):
                yield pytest.param(text, id=f"{name}-{number}")


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


class Averages:
    def __init__(self, model: nn.Module) -> None:
        self.shadow_params = [each.detach().clone() for each in model.parameters()]

    def store(self, params: object) -> None: ...

    copy_to = restore = store


def names(folder: Path, ck: ckpt.Checkpointer, model: nn.Module, optim: Any, sched: Any, loader: Any) -> dict[str, Any]:
    """What a reader of the fragments has."""

    def train_one(batch: object = None) -> None:
        optim.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optim.step()

    def loss(batch: object) -> torch.Tensor:
        return model(torch.ones(2, 4)).square().mean()

    def evaluate(model: object, poll: Any = lambda: None) -> float:
        poll()
        return 1.0

    calls = itertools.count()
    sampler = type("Sampler", (), {"set_epoch": lambda self, epoch: None})()
    return {
        "ckpt": ckpt,
        "torch": torch,
        "nn": nn,
        "itertools": itertools,
        "logging": logging,
        "StatefulDataLoader": StatefulDataLoader,
        "RandomSampler": RandomSampler,
        "endless": endless,
        "model": model,
        "body": model[0],
        "optimizer": optim,
        "optim": optim,
        "scheduler": sched,
        "sched": sched,
        "loader": loader,
        "sampler": sampler,
        "data": [torch.ones(4)] * 16,
        "batches": endless(loader),
        "Join": lambda models: contextlib.nullcontext(),
        "url": str(folder / "by-url"),
        "n": 3,
        "step": 500,
        "ck": ck,
        "group": None,
        "ema": Averages(model),
        "train_one": train_one,
        "evaluate": evaluate,
        "done": lambda: next(calls) >= 3,
        "loss": loss,
        "dead": torch.tensor([0]),
        "fresh": torch.zeros(1, 4),
        "state": {"model": model, "optim": optim, "loader": loader},
    }


@pytest.mark.parametrize("text", list(blocks()))
@pytest.mark.filterwarnings("ignore")
def test_a_block_of_the_docs_that_says_python_runs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for written, instead in (SHORTER | HERE).items():
        text = text.replace(written, instead)
    text = text.replace('"s3://bucket/run"', '"run"').replace('ck.state["best"], loss)', 'ck.state["best"], 1.0)')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CKPT_LINGER_S", "0")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_parameter("codebook", nn.Parameter(torch.ones(1, 4), requires_grad=False))
    optim = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 10)
    loader = StatefulDataLoader([torch.ones(4)] * 16, batch_size=4)
    state = {"model": model, "optim": optim, "sched": sched, "loader": loader, "epoch": 7}
    with contextlib.ExitStack() as stack:
        ck = None
        if re.search(r"\bck\b", text) and " as ck:" not in text:
            ck = stack.enter_context(ckpt.Checkpointer("within", state))
        given = names(tmp_path, ck, model, optim, sched, loader)  # type: ignore[arg-type]
        if "load_file" in text:
            from safetensors.torch import save_file

            save_file(dict(model.state_dict()), "model.safetensors")
        if "ckpt.open(" in text:
            with ckpt.Checkpointer("run", {"model": model, "optim": optim}) as first:
                first.step()
                first.save(metrics={"val_loss": 1.0}).wait("store")
        if "with Join(" in text:
            given["batches"] = loader
        running = set(threading.enumerate())
        exec(compile(text, "block", "exec"), given)
        if "stop" in given:
            given["stop"].set()
            for thread in set(threading.enumerate()) - running:
                thread.join(5)
    assert os.getcwd() == str(tmp_path)
