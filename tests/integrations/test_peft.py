"""AdaLoRA, whose scores and masks are outside the model's state_dict()."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import ckpt
from ckpt.integrations.peft import AdaLoraScores

STEPS = 24


def make_model() -> Any:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    config = peft.AdaLoraConfig(
        target_modules=["0", "2"], init_r=12, target_r=3, tinit=2, tfinal=4, deltaT=2, total_step=STEPS
    )
    return peft.get_peft_model(base, config)


def train(url: Path, last: int, with_scores: bool = True) -> dict[int, list[float]]:
    """Up to step `last`, after what is saved. Returns each step's weights of the ranks: zeros are masked ranks."""
    model = make_model()
    optim = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    state = {"model": model, "optim": optim}
    if with_scores:
        state["scores"] = AdaLoraScores(model)
    ranks = {}
    with ckpt.Checkpointer(url, state) as ck:
        for step in ck.steps(last):
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(4, 8, generator=generator)
            optim.zero_grad()
            (model(batch) - batch[:, :4]).square().mean().backward()
            optim.step()
            model.base_model.update_and_allocate(step)
            ranks[step] = [x for name, p in model.named_parameters() if "lora_E" in name for x in p.flatten().tolist()]
    return ranks


@pytest.mark.parametrize("stop", [7, STEPS - 2])
def test_a_restart_masks_the_ranks_that_a_run_without_one_masks(tmp_path: Path, stop: int) -> None:
    """Stopped between two masks, and where the last mask stays."""
    expected = train(tmp_path / "whole", STEPS)
    assert any(value == 0.0 for value in expected[STEPS])
    found = train(tmp_path / "run", stop) | train(tmp_path / "run", STEPS)
    assert found == expected


def test_a_state_without_the_scores_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(
        ckpt.UsageError, match=r"state\['model'\]\.base_model\.rankallocator keeps .*peft\.AdaLoraScores"
    ):
        train(tmp_path / "run", 1, with_scores=False)


def test_a_model_without_the_adapter_has_no_scores() -> None:
    with pytest.raises(ckpt.UsageError, match="Linear has no AdaLoRA adapter"):
        AdaLoraScores(nn.Linear(2, 2))
