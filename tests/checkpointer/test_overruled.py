"""A start whose script gives other hyper-parameters than the checkpoint has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt
from tests.checkpointer.loops import wait_agent_gone


def run(url: Path, lr: float, parts: int = 1, strict: bool = True) -> tuple[torch.optim.Optimizer, list[ckpt.Event]]:
    seen: list[ckpt.Event] = []
    model = torch.nn.Linear(2, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}] if parts == 2 else [{"params": model.parameters()}]
    optim = torch.optim.SGD(groups, lr=lr)
    state = {"model": model, "optim": optim}
    with ckpt.Checkpointer(url, state, strict=strict, sinks=(seen.append,)) as ck:
        for _ in ck.steps(ck.restored.step + 1):
            optim.step()
    wait_agent_gone(url)
    return optim, [event for event in seen if event.name in ("restore.overridden", "restore.mismatch")]


def test_entry_says_what_holds_and_refuses_groups_that_were_split(tmp_path: Path) -> None:
    assert not run(tmp_path, 0.5)[1]
    assert not run(tmp_path, 0.5)[1]
    optim, said = run(tmp_path, 0.25)
    assert optim.param_groups[0]["lr"] == 0.5
    assert [event.data["lines"] for event in said] == [["optim.param_groups[0].lr: 0.25 given, 0.5 restored"]]
    with pytest.raises(ckpt.StateMismatch, match=r"optim.param_groups.0 and optim.param_groups.1 hold .* in one group"):
        run(tmp_path, 0.25, parts=2)
    wait_agent_gone(tmp_path)
    optim, said = run(tmp_path, 0.25, parts=2, strict=False)
    assert [group["lr"] for group in optim.param_groups] == [0.25, 0.25]
    assert [event.name for event in said] == ["restore.mismatch"]
