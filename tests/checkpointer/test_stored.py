"""What a Checkpointer of each released version wrote stays restorable: not only the frames and records, but also the
names, and the values that say what is whose. `python -m tests.checkpointer.test_stored DIR` writes such a folder.

Keep every older folder as it is. Without the machine's name: unshare --uts sh -c 'hostname node0; ...'
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import ckpt
from tests.checkpointer.loops import wait_agent_gone
from tests.checkpointer.scripts import ROOT

STORED = Path(__file__).parent / "stored"
STEPS = 3


class Net(nn.Module):
    """Tied weights, buffers, extra state, a frozen parameter of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16), requires_grad=False)
        self.more: Any = None

    def get_extra_state(self) -> Any:
        return self.more

    def set_extra_state(self, state: Any) -> None:
        self.more = state


class Custom:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.count, self.mean = 0, torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.mean = state["count"], state["mean"]


class Loader:
    """What it gives is not its point: it knows its position."""

    def __init__(self) -> None:
        self.at, self.order = 0, np.zeros(5, np.int64)

    def __iter__(self) -> Iterator[int]:
        yield from range(self.at, 100)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], state["order"]


class Job:
    """Before a restore nothing in it is as `fill` makes it."""

    def __init__(self) -> None:
        self.net = Net()
        self.optim = torch.optim.AdamW([p for p in self.net.parameters() if p.requires_grad], lr=1.0)
        self.sched = torch.optim.lr_scheduler.MultiStepLR(self.optim, [50, 70])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.custom, self.loader, self.table = Custom(), Loader(), torch.zeros(2, 3, dtype=torch.complex64)
        self.bits, self.dice = torch.Generator().manual_seed(1), random.Random(1)
        self.choice = np.random.default_rng(1)
        objects = {"net": self.net, "optim": self.optim, "sched": self.sched, "scaler": self.scaler}
        others = {"custom": self.custom, "loader": self.loader, "table": self.table}
        generators = {"bits": self.bits, "dice": self.dice, "choice": self.choice}
        rows = ckpt.Shard(torch.zeros(4), (4,), (0,))
        self.state: dict[str, Any] = {**objects, **others, **generators, "rows": rows, "best": 0.0, "nested": None}

    def fill(self, state: dict[str, Any]) -> None:
        """By formulas alone, the same on every machine and with every torch. Where optimizer and scaler have no state
        yet they get it by a step."""
        if not self.optim.state:
            sum(p.sum() for p in self.net.parameters() if p.requires_grad).backward()  # type: ignore[union-attr]
            self.scaler.scale(torch.ones(()))
            self.optim.step()
        self.sched.last_epoch, self.sched._last_lr = 12, [0.25]
        self.scaler.update(32.0)
        for group in self.optim.param_groups:
            group.update(lr=0.25, betas=(0.5, 0.75))
        held = [value for of_one in self.optim.state.values() for _, value in sorted(of_one.items())]
        rows = state["rows"].tensor
        with torch.no_grad():
            for number, tensor in enumerate([*self.net.parameters(), *self.net.buffers(), *held, rows, self.table]):
                flat = (torch.arange(tensor.numel()) * 8 + number) % 125
                tensor.copy_(flat.reshape(tensor.shape).to(tensor.dtype))
        self.net.more = {"tokens": 7, "seen": torch.tensor([1, 2])}
        self.custom.count, self.custom.mean = 5, torch.tensor([1.0, 2.0, 4.0])
        self.loader.at, self.loader.order = 9, np.arange(5)
        self.bits.manual_seed(7)
        self.dice.seed(7)
        self.choice.bit_generator.state = np.random.default_rng(7).bit_generator.state
        torch.manual_seed(8)
        random.seed(8)
        np.random.seed(8)
        state["best"], state["nested"] = 0.5, {"a": (1, [2, {3}]), 4: "text"}

    def facts(self, state: dict[str, Any]) -> dict[str, str]:
        objects = (self.net, self.optim, self.sched, self.scaler, self.custom, self.loader)
        parts = {type(each).__name__: each.state_dict() for each in objects}
        parts |= {"table": self.table, "rows": state["rows"].tensor, "best": state["best"], "nested": state["nested"]}
        parts |= {"bits": self.bits.get_state(), "choice": self.choice.bit_generator.state}
        parts |= {"dice": self.dice.getstate(), "python": random.getstate()}
        parts |= {"torch": torch.get_rng_state(), "numpy": np.random.get_state()}
        return {name: repr(tree_map(_plain, part)) for name, part in parts.items()}


def _plain(value: Any) -> Any:
    return (value.dtype, value.tolist()) if isinstance(value, torch.Tensor | np.ndarray) else value


def write(folder: Path) -> None:
    job = Job()
    with ckpt.Checkpointer(folder, job.state) as ck:
        for _ in ck.steps(STEPS):
            job.fill(ck.state)
    wait_agent_gone(folder)


@pytest.fixture(params=[*sorted(each.name for each in STORED.iterdir()), "fresh"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of each kept folder, and one that was just written."""
    if request.param == "fresh":
        write(tmp_path / "run")
    else:
        shutil.copytree(STORED / request.param, tmp_path / "run")
    return tmp_path / "run"


def test_what_each_released_version_saved_is_restored(run: Path) -> None:
    wanted = Job()
    wanted.fill(wanted.state)
    expected = wanted.facts(wanted.state)
    job = Job()
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    told: list[str] = []
    # The script gives other hyper-parameters than the ones that were saved, and is told so.
    sink = lambda event: told.append(event.message) if event.loud and event.name != "restore.overridden" else None  # noqa: E731
    with ckpt.Checkpointer(run, job.state, sinks=(sink,)) as ck:
        assert (ck.restored.step, ck.restored.level) == (STEPS, "store")
        found = job.facts(ck.state)
    wait_agent_gone(run)
    assert [name for name in expected if found[name] != expected[name]] == []
    assert job.net.last.weight is job.net.first.weight
    assert told == []


def test_the_stand_alone_reader_reads_what_each_released_version_saved(run: Path, tmp_path: Path) -> None:
    job = Job()
    job.fill(job.state)
    expected = {f"net.{name}": t for name, t in [*job.net.named_parameters(), *job.net.named_buffers()]}
    names = {p: name for name, p in job.net.named_parameters()}
    for p, held in job.optim.state.items():
        expected |= {f"optim.state.{names[p]}.{key}": value for key, value in held.items()}
    expected |= {"net._extra_state.seen": job.net.more["seen"], "custom.mean": job.custom.mean}
    expected |= {"table": job.table, "rows": job.state["rows"].tensor}
    words = [sys.executable, str(ROOT / "tools" / "read_ckpt.py"), str(run), "--out", str(tmp_path / "x.npz")]
    said = subprocess.run(words, capture_output=True, text=True)
    assert (said.returncode, said.stderr) == (0, "")
    with np.load(tmp_path / "x.npz") as found:
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            wanted = tensor.detach()
            wanted = wanted.float() if wanted.dtype is torch.bfloat16 else wanted
            assert (found[name].dtype, found[name].tobytes()) == (wanted.numpy().dtype, wanted.numpy().tobytes()), name
    for part in ("'kind': 'optimizer', 'class': 'AdamW'", "'aliases': {'net.last.weight': 'net.first.weight'}"):
        assert part in said.stdout
    assert "rank-values@rank=0: {'coordinate': 'rank=0'" in said.stdout


if __name__ == "__main__":
    write(Path(sys.argv[1]))
