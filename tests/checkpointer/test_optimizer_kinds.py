"""Optimizers of other packages in a job: what cannot be saved is refused after the first step, with a way out."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.checkpointer import runs

pytestmark = pytest.mark.filterwarnings("ignore")


class AsBytes:
    """The way out that docs/guides/optimizers.md names: the state of an optimizer as torch's own bytes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        buffer = io.BytesIO()
        torch.save(self.optimizer.state_dict(), buffer)
        return {"bytes": buffer.getvalue()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(torch.load(io.BytesIO(state["bytes"]), weights_only=False))


class Job:
    def __init__(self, name: str, seed: int, wrap: Any) -> None:
        kind = pytest.importorskip("pytorch_optimizer").load_optimizer(name)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        self.optim = kind(self.model.parameters(), lr=0.01)
        self.state = {"model": self.model, "optim": wrap(self.optim)}

    def train(self, step: int) -> float:
        self.optim.zero_grad()
        loss = self.model(torch.full((3, 8), float(step))).square().sum()
        loss.backward()
        self.optim.step()
        return float(loss.item())


def run(url: Path, name: str, steps: int, seed: int, wrap: Any = lambda optim: optim) -> list[float]:
    ended = runs.run(url, steps, Job(name, seed, wrap), generators=False)
    assert not ended.seen.named("optimizer.unsaved")
    return ended.losses


@pytest.mark.parametrize("name", ["conda", "scalableshampoo"])
def test_objects_in_an_optimizers_state_are_refused_after_the_first_step(tmp_path: Path, name: str) -> None:
    with pytest.raises(ckpt.UsageError, match=r"after step 1 .*state\['optim\.state\.0\.weight'\].*optimizers\.md"):
        run(tmp_path / "run", name, 3, seed=1)


@pytest.mark.parametrize("name", ["scalableshampoo"])
def test_an_object_that_gives_an_optimizers_state_as_bytes_is_a_way_out(tmp_path: Path, name: str) -> None:
    whole = run(tmp_path / "whole", name, 8, seed=1, wrap=AsBytes)
    assert run(tmp_path / "run", name, 4, seed=1, wrap=AsBytes) == whole[:4]
    assert run(tmp_path / "run", name, 8, seed=2, wrap=AsBytes) == whole[4:]


class Counting(torch.optim.SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.calls, self.fixed = 0, 3

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)


class Saving(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state.pop("calls")
        super().load_state_dict(state)


@pytest.mark.parametrize(("kind", "named"), [(Counting, [["optim.calls"]]), (Saving, []), (torch.optim.Adam, [])])
def test_a_counter_in_an_attribute_that_is_not_saved_is_said_once(tmp_path: Path, kind: Any, named: Any) -> None:
    model = nn.Linear(2, 2)
    optim = kind(model.parameters(), lr=0.1)

    def at(ck: ckpt.Checkpointer, step: int) -> None:
        optim.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optim.step()

    seen = runs.run(tmp_path, 4, {"model": model, "optim": optim}, at).seen
    assert [event.data["names"] for event in seen.named("optimizer.attribute")] == named


def test_the_checkpoints_rate_wins_and_one_that_is_set_in_the_block_holds_from_then_on(tmp_path: Path) -> None:
    def go(rate: float, steps: int, change: float | None = None) -> tuple[float, list[list[str]]]:
        """The rate at the end, and what is said of it."""
        model = nn.Linear(2, 2)
        optim = torch.optim.SGD(model.parameters(), lr=rate)

        def at(ck: ckpt.Checkpointer, step: int) -> None:
            if change is not None:
                optim.param_groups[0]["lr"] = change

        seen = runs.run(tmp_path, steps, {"model": model, "optim": optim}, at).seen
        return optim.param_groups[0]["lr"], [event.data["lines"] for event in seen.named("restore.overridden")]

    assert go(0.5, 1) == (0.5, [])
    assert go(0.25, 2, change=0.125) == (0.125, [["optim.param_groups[0].lr: 0.25 given, 0.5 restored"]])
    assert go(0.125, 3) == (0.125, [])
