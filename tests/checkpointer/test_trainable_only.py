"""trainable_only=True: the frozen parameters of a PEFT model are not saved, and come from init= or the script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckpt
from tests.checkpointer import runs
from tests.checkpointer.loops import wait_agent_gone
from tests.checkpointer.runs import Ended

pytestmark = pytest.mark.filterwarnings("ignore")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.proj(x)))  # type: ignore[no-any-return]


def adapted(seed: int) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=["proj"], lora_dropout=0.0, modules_to_save=["head"])
    made: nn.Module = peft.get_peft_model(Base(), config)
    return made


class Job:
    def __init__(self, seed: int) -> None:
        self.model = adapted(seed)
        self.optim = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.05)
        self.state = {"model": self.model, "optim": self.optim}

    def train(self, step: int) -> float:
        self.optim.zero_grad()
        loss = self.model(torch.full((3, 16), 0.1 * step)).square().sum()
        loss.backward()
        self.optim.step()
        return float(loss.item())


def run(url: Path, seed: int, steps: int, **options: Any) -> Ended:
    return runs.run(url, steps, Job(seed), **{"trainable_only": True, **options})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_file(Base().state_dict(), tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


def test_only_the_adapter_is_saved_and_the_base_comes_from_init(tmp_path: Path, base: Path) -> None:
    whole = run(tmp_path / "whole", 1, 6, init=base).losses
    first = run(tmp_path / "run", 1, 3, init=base).losses
    with ckpt.open(tmp_path / "run") as reader:
        names = {name for name in reader.newest.tensors if name.startswith("model.")}
    assert names
    assert all("lora_" in name or "modules_to_save" in name for name in names), names
    # The base of the second process has other random weights before the start.
    assert first + run(tmp_path / "run", 5, 6, init=base).losses == whole


def test_without_init_the_script_loads_the_base_and_another_one_is_named(tmp_path: Path) -> None:
    run(tmp_path, 1, 3)
    assert run(tmp_path, 1, 6).from_step == 3
    with pytest.raises(ckpt.StateMismatch, match=r"frozen parameters model\.base_model.*base_layer.* same base model"):
        run(tmp_path, 2, 9)
    wait_agent_gone(tmp_path)
    third = run(tmp_path, 2, 9, strict=False)
    assert third.from_step == 6
    assert len(third.seen.named("base.differs")) == 1


def test_a_start_that_forgets_the_option_is_told_of_it(tmp_path: Path) -> None:
    run(tmp_path, 1, 3)
    with pytest.raises(ckpt.StateMismatch, match="It was saved with trainable_only=True"):
        run(tmp_path, 1, 6, trainable_only=False)


def test_a_parameter_that_is_unfrozen_in_the_run_is_saved_from_then_on(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)

    def at(ck: ckpt.Checkpointer, step: int) -> None:
        if step == 3:
            model[0].requires_grad_(True)
        model(torch.ones(1, 4)).sum().backward()
        optim.step()

    runs.run(tmp_path, 4, {"model": model, "optim": optim}, at, trainable_only=True, policy=ckpt.Every(steps=1))
    with ckpt.open(tmp_path) as reader:
        held = {each.step: "model.0.weight" in each.tensors for each in reader.checkpoints}
    assert held == {1: False, 2: False, 3: True, 4: True}


def test_a_module_without_a_trainable_parameter_is_saved_as_it_may_be_an_average(tmp_path: Path) -> None:
    model, average = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    runs.run(tmp_path, 1, {"model": model, "ema": average}, trainable_only=True)
    with ckpt.open(tmp_path) as reader:
        assert {"ema.weight", "model.weight"} <= set(reader.newest.tensors)
