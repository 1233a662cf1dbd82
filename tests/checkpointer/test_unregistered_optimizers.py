"""A loop that steps an optimizer which is not in the state: named once, where a restart would lose its state."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from tests.checkpointer.runs import Seen, Stateful


class Wrapper:
    """Saves the optimizer that it holds."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.inner = [optim]

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self.inner[0].param_groups[0]["lr"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner[0].param_groups[0]["lr"] = state["lr"]


class Around(torch.optim.Optimizer):
    """As of Accelerate: it steps another one, whose state is its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Sharp(torch.optim.Optimizer):
    """As SAM does: it steps another one, and gives each parameter other memory before."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data = param.data.clone()
        self.base.step()


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.1)


def update(optim: torch.optim.Optimizer) -> None:
    for group in optim.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optim.step()


def trained(folder: Path, optims: list[torch.optim.Optimizer], state: dict[str, Any], lives: int = 99) -> Seen:
    """Every second step makes an update, as for the part of a GAN that is trained less often. `lives`: after so many
    updates each optimizer is replaced by another one of its kind."""
    seen = Seen()
    with ckpt.Checkpointer(folder, state, sinks=(seen,)) as ck:
        for step in ck.steps(12):
            if step % 2 == 0:
                for optim in optims:
                    update(optim)
                if step // 2 % lives == 0:
                    optims = [type(optim)(optim.param_groups[0]["params"], lr=0.1) for optim in optims]
    return seen


@pytest.mark.parametrize("kind", ["alone", "scheduled", "out of sight", "within another", "many", "made anew"])
def test_an_optimizer_of_which_a_restart_would_lose_the_state_is_named_once(tmp_path: Path, kind: str) -> None:
    """A scheduler holds its optimizer, and does not save it. An object of the state may save one out of sight."""
    model = torch.nn.Linear(2, 2)
    optim = Sharp(model.parameters()) if kind == "within another" else adam(model.parameters())
    more = {
        "scheduled": lambda: {"sched": torch.optim.lr_scheduler.StepLR(optim, 3)},
        "out of sight": lambda: {"app": Stateful(lambda: {"optim": copy.deepcopy(optim.state_dict())})},
        "within another": lambda: {"optim": optim},
    }
    optims = [adam([param]) for param in model.parameters()] if kind == "many" else [optim]
    state = {"model": model, **more.get(kind, dict)()}
    (event,) = trained(tmp_path, optims, state, 3 if kind == "made anew" else 99).named("optimizer.unsaved")
    assert event.loud
    assert event.data["optimizer"] == ("SGD" if kind == "within another" else "Adam")
    assert event.data["tensor"] in (("model.bias", "model.weight") if kind == "many" else ("model.bias",))
    said = {"out of sight": "unless an object of the state saves it in its own way", "many": "(and 1 other like it)"}
    assert said.get(kind, "") in event.message


@pytest.mark.parametrize(
    "kind",
    [
        "registered",
        "around another",
        "without state",
        "in a wrapper",
        "saved by another",
        "of another model",
        "passing",
    ],
)
def test_an_optimizer_of_which_nothing_is_lost_is_not_named(tmp_path: Path, kind: str) -> None:
    """Passing: one that is made anew for each step, as in an inner loop."""
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    inner = adam((other if kind == "of another model" else model).parameters())
    optim = Around(inner) if kind == "around another" else inner
    if kind == "without state":
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
    more = {
        "registered": {"optims": {"a": optim}},
        "around another": {"optim": optim},
        "in a wrapper": {"wrapper": Wrapper(optim)},
        "saved by another": {"app": Stateful(lambda: {"optim": optim.state_dict()})},
    }
    seen = trained(tmp_path, [optim], {"model": model, **more.get(kind, {})}, 1 if kind == "passing" else 99)
    assert not seen.named("optimizer.unsaved")


def test_an_optimizer_is_named_after_two_steps_however_late_the_first_save(tmp_path: Path) -> None:
    """Objects are asked for their state at the first two boundaries only, where all ranks ask: an object may answer by
    a collective, and one rank alone may have such an optimizer."""
    seen, asked, model = Seen(), list[int](), torch.nn.Linear(2, 2)
    optim = adam(model.parameters())
    app = Stateful(lambda: {"asked": asked.append(1)})
    with ckpt.Checkpointer(tmp_path, {"model": model, "app": app}, sinks=(seen,), policy=ckpt.Every(steps=10**6)) as ck:
        for step in ck.steps(6):
            update(optim)
            assert len(seen.named("optimizer.unsaved")) == (1 if step > 2 else 0)
            if step == 3:
                asked.clear()
        assert not asked


def saved() -> dict[str, Any]:
    model = torch.nn.Linear(1, 1)
    return {"model": model, "optim": torch.optim.SGD(model.parameters())}


@pytest.mark.parametrize("trained", ["its own", "another", "another first", "assigned", "assigned late", "held"])
def test_a_loop_that_trains_another_model_than_the_one_that_is_saved_is_told_so_once(
    tmp_path: Path, trained: str
) -> None:
    """For example, the loop's variable is bound to a new model. An optimizer that steps beside registered ones is no
    sign of that. An optimizer that an object in the state holds may be saved by that object."""
    seen, other = Seen(), saved()
    held = {"agent": Wrapper(other["optim"])} if trained == "held" else {}
    with ckpt.Checkpointer(tmp_path, {**saved(), **held}, sinks=(seen,)) as ck:
        if trained == "assigned":
            ck.state.update(other)
        for _ in ck.steps(3):
            if trained != "its own":
                other["optim"].step()
            if trained == "assigned late":
                ck.state.update(other)
            elif trained in ("its own", "another first"):
                ck.state["optim"].step()
    assert len(seen.named("optimizer.not_registered")) == (1 if trained == "another" else 0)


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_another_checkpointer_of_the_process_saves_is_not_named(tmp_path: Path, wrapped: bool) -> None:
    """As of a GAN whose parts are saved apart, and of weights that are saved once more for themselves. Nor is it named
    while the other has not walked the state that the first step has made."""
    seen, first, second = Seen(), saved(), saved()
    optim = adam(second["model"].parameters())
    second["optim"] = Wrapper(optim) if wrapped else optim
    with (
        ckpt.Checkpointer(tmp_path / "first", first, sinks=(seen,)) as one,
        ckpt.Checkpointer(tmp_path / "second", second, sinks=(seen,)) as two,
        ckpt.Checkpointer(tmp_path / "weights", {"model": second["model"]}, sinks=(seen,)) as three,
    ):
        for step in range(4):
            update(optim)
            if step > 1:
                first["optim"].step()
            for each in (three, one, two) if step > 1 else (three, one):
                each.step()
    assert not seen.named("optimizer.unsaved")
    assert not seen.named("optimizer.not_registered")


def test_a_first_step_that_a_scaler_skips_is_not_one_of_another_model(tmp_path: Path) -> None:
    seen, other, job = Seen(), saved(), saved()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    with ckpt.Checkpointer(tmp_path, {**job, "scaler": scaler}, sinks=(seen,)) as ck:
        for _ in ck.steps(2):
            other["optim"].step()
            for param in job["model"].parameters():
                param.grad = torch.full_like(param, float("inf"))
            scaler.scale(torch.ones(()))
            scaler.step(job["optim"])
            scaler.update()
    assert not seen.named("optimizer.not_registered")
