"""ck.swapped(): averaged weights for an evaluation, during which nothing is saved."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ckpt
from tests.checkpointer.loops import wait_agent_gone
from tests.checkpointer.runs import Seen


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


AVERAGES: dict[str, Any] = {
    "torch": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)),
    "module": lambda model: net(7),
    "shadow": lambda model: SimpleNamespace(shadow_params=[p.detach() + 1 for p in model.parameters()]),
    "dict": lambda model: {name: p.detach() + 1 for name, p in model.named_parameters()},
}


def averaged(average: Any, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the model gives with the averaged weights, by torch's own means."""
    if isinstance(average, nn.Module):
        inner = average.module if isinstance(average, AveragedModel) else average
        weights = inner.state_dict()
    else:
        held = average if isinstance(average, dict) else None
        pairs = zip(model.named_parameters(), getattr(average, "shadow_params", [None] * 99), strict=False)
        weights = {**model.state_dict(), **(held or {name: each for (name, _), each in pairs})}
    return torch.func.functional_call(model, weights, (x,))


@pytest.mark.parametrize("kind", AVERAGES)
def test_averaged_weights_are_in_and_out_bit_for_bit_and_never_saved(tmp_path: Path, kind: str) -> None:
    model, x, seen = net(1), torch.randn(5, 4), Seen()
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = AVERAGES[kind](model)
    state = {"model": model, "optim": optim}
    if kind == "torch":
        state["ema"] = average
    with ckpt.Checkpointer(tmp_path, state, policy=ckpt.Every(steps=1), sinks=(seen,)) as ck:
        for step in ck.steps(3):
            optim.zero_grad()
            model.train()
            model(x * step).square().sum().backward()
            optim.step()
            if kind == "torch":
                average.update_parameters(model)
            if step == 2:
                ck.step()
                model.eval()
                before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                expected = averaged(average, model, x)
                with ck.swapped(average):
                    assert torch.equal(model(x), expected)
                    ck.poll()
                    with pytest.raises(ckpt.UsageError, match=r"inside ck\.swapped"):
                        ck.save()
                    with pytest.raises(ckpt.UsageError, match=r"inside ck\.swapped"), ck.swapped(average):
                        pass
                    with pytest.raises(ckpt.UsageError, match="a step ends inside"):
                        ck.step()
                assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
                ck.save().wait()
    wait_agent_gone(tmp_path)
    assert not seen.named("weights.swapped")
    with ckpt.open(tmp_path) as reader:
        saved = [each for each in reader.checkpoints if each.step == 2]
        assert saved  # step 2 and its sub-step of ck.save()
        assert all(torch.equal(each.torch_tensor("model.0.weight"), before["0.weight"]) for each in saved)


def test_weights_come_back_if_the_evaluation_fails(tmp_path: Path) -> None:
    model = net(1)
    with ckpt.Checkpointer(tmp_path, {"model": model}) as ck:
        before = model[0].weight.detach().clone()
        with contextlib.suppress(ZeroDivisionError), ck.swapped(net(2)):
            assert not torch.equal(model[0].weight, before)
            raise ZeroDivisionError
        assert torch.equal(model[0].weight, before)


def test_an_average_that_fits_no_model_or_two_is_refused(tmp_path: Path) -> None:
    one, two = net(1), net(2)
    with ckpt.Checkpointer(tmp_path, {"one": one, "two": two}) as ck:
        with pytest.raises(ckpt.UsageError, match="fits 2 modules of the state; give the model"), ck.swapped(net(3)):
            pass
        with pytest.raises(ckpt.UsageError, match="fits no module"), ck.swapped(nn.Linear(1, 1)):
            pass
        average = net(3)
        with ck.swapped(average, two):
            assert torch.equal(two[0].weight, average[0].weight)
        with pytest.raises(ckpt.UsageError, match="not a int"), ck.swapped(5):
            pass
