"""A structure that changes in mid-run costs one appointed version at most, and nothing of an explicit save."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from tests.checkpointer.loops import wait_agent_gone
from tests.checkpointer.runs import Seen, restore, run


class Scaled(nn.Linear):
    """A scale that is a tensor only from its first use on, as of FP8 and observers."""

    scale: torch.Tensor | None = None

    def get_extra_state(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


def test_a_value_that_becomes_a_tensor_is_in_the_next_checkpoint(tmp_path: Path) -> None:
    model = Scaled(4, 4)
    optim = torch.optim.Adam(model.parameters(), lr=0.1)

    def at(ck: ckpt.Checkpointer, step: int) -> None:
        if step == 4:
            model.scale = torch.tensor([3.0])
            optim.param_groups[0]["betas"] = (torch.tensor(0.5), torch.tensor(0.75))

    run(tmp_path, 7, {"model": model, "optim": optim}, at, policy=ckpt.Every(steps=2))
    again = Scaled(4, 4)
    other = torch.optim.Adam(again.parameters(), lr=0.1)
    ck = restore(tmp_path, {"model": again, "optim": other})
    assert ck.restored.step == 7
    assert again.scale is not None
    assert again.scale.tolist() == [3.0]
    assert [float(beta) for beta in other.param_groups[0]["betas"]] == [0.5, 0.75]


class Fickle:
    """Gives a tensor more when it is asked for the `late`-th time from now."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {"n": 1}
        self.late = 0

    def state_dict(self) -> dict[str, Any]:
        self.late -= 1
        if self.late == 0:
            self.held["late"] = torch.full((2,), 5.0)
        return dict(self.held)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state


@pytest.mark.parametrize("late", [1, 2, 3])
def test_no_checkpoint_refers_to_a_tensor_that_it_does_not_hold(late: int, tmp_path: Path) -> None:
    """A save asks what there is before it asks all ranks, and after. What it asks for then is what it saves."""
    state: dict[str, Any] = {"fickle": Fickle(), "x": torch.ones(3)}
    with ckpt.Checkpointer(tmp_path / "run", state) as ck:
        for _ in ck.steps(2):
            ck.step()
            ck.save().wait("store", timeout_s=60)
        state["fickle"].late = late
        with contextlib.suppress(ckpt.SaveFailed):  # the structure has changed while all ranks were asked
            ck.save().wait("store", timeout_s=60)
        shutil.copytree(tmp_path / "run", tmp_path / "then")
    wait_agent_gone(tmp_path / "run")
    for url in ("then", "run"):
        again: dict[str, Any] = {"fickle": Fickle(), "x": torch.zeros(3)}
        with ckpt.Checkpointer(tmp_path / url, again) as ck:
            assert ck.restored.step == 2
            assert again["x"].tolist() == [1.0] * 3
    assert again["fickle"].held["late"].tolist() == [5.0, 5.0]


def test_a_fence_before_a_change_by_hand_keeps_the_snapshot_whole(tmp_path: Path) -> None:
    """EMA-like edits under no_grad in the middle of a step, after ck.fence(): late copies stay trusted, and what an
    appointment took is of one step."""
    model = nn.Linear(1000, 1000)
    optim = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    seen = Seen()

    def train(step: int) -> None:
        with torch.no_grad():
            model.weight.fill_(float(step))
        model.weight.grad = torch.zeros_like(model.weight)
        optim.step()

    with (  # noqa: PT012
        pytest.raises(ZeroDivisionError),
        ckpt.Checkpointer(
            tmp_path,
            {"model": model, "optim": optim},
            policy=ckpt.Every(steps=1),
            sinks=(seen,),
        ) as ck,
    ):
        more = 5  # snapshots once late copies are proven
        for step in ck.steps(1_000_000):
            taken = ck.receipt["snapshots"]
            ck.fence()
            train(step)
            if "lazy" in str(ck.receipt["proven"]) and ck.receipt["snapshots"] > taken:
                more -= 1
            if more == 0:
                raise ZeroDivisionError  # what is restored was appointed, not saved at the exit
    assert more == 0
    assert ck.receipt["fell_back"] == []
    fallen = {"deferred_copy.off", "deferred_copy.changed", "snapshot.abandoned"}
    assert not fallen & {event.name for event in seen.events}
    again = nn.Linear(1000, 1000)
    other = torch.optim.SGD(again.parameters(), lr=1.0, momentum=0.9)
    ck = restore(tmp_path, {"model": again, "optim": other})
    assert again.weight.detach().unique().tolist() == [float(ck.restored.step)]
    assert ck.restored.step > 5
