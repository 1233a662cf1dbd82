"""What users do by mistake, and what their own code does at a bad moment: said clearly, and nothing is lost."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import ckpt
from ckpt.ipc import messages
from ckpt.ipc.arena import Arena
from ckpt.trainer.link.link import Link
from tests.checkpointer.loops import losses, make, wait_agent_gone
from tests.checkpointer.runs import Seen, kill_agent
from tests.checkpointer.test_one_process import agent_pid, wait_gone

EVERY = ckpt.Every(steps=1)


class Loaderlike(torch.utils.data.DataLoader[Any]):
    """What is taken for a loader: a DataLoader that has a state."""

    def __init__(self) -> None:
        super().__init__([0])
        self.read = 0

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


class Pair(NamedTuple):
    a: torch.Tensor
    b: int


class Named(dict[str, Any]):
    pass


class Trouble:
    """An object of the user's; `at_save` runs whenever its state is read."""

    def __init__(self) -> None:
        self.at_save: Callable[[], None] = lambda: None

    def state_dict(self) -> dict[str, int]:
        self.at_save()
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Unstorable:
    def __init__(self, held: object) -> None:
        self.held = held

    def state_dict(self) -> dict[str, object]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.held = state["held"]


class Extra(torch.nn.Module):
    def __init__(self, held: object) -> None:
        super().__init__()
        self.held = held

    def get_extra_state(self) -> object:
        return self.held

    def set_extra_state(self, state: object) -> None:
        self.held = state


def group_of(note: object) -> dict[str, Any]:
    """A model and an optimizer, in a group of which is a note."""
    model = torch.nn.Linear(1, 1)
    return {"model": model, "optim": torch.optim.SGD([{"params": model.parameters(), "note": note}])}


# ------------------------------------------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"policy": 100}, r"policy=100: a ckpt\.Adaptive\(\.\.\.\) or a ckpt\.Every"),
        ({"keep": 3}, r"keep=3: a ckpt\.Keep"),
        ({"keep": 0}, r"keep=0: a ckpt\.Keep"),
        ({"limits": {"memory": 1}}, r"limits=.*: a ckpt\.Limits"),
        ({"limits": {}}, r"limits={}: a ckpt\.Limits"),
        ({"init": 5}, r"init= takes a \.safetensors file, .* another run, not int$"),
        ({"init": {"weight": torch.ones(2)}}, "init= takes .*, not dict$"),
        ({"init": b"w.safetensors"}, "init= takes .*, not bytes$"),
        ({"strict": "no"}, "strict='no': a bool, True or False"),
        ({"lazy": 0}, "lazy=0: a bool, True or False"),
        ({"generators": None}, "generators=None: a bool, True or False"),
        ({"take_over": np.True_}, "take_over=.*: a bool, True or False"),
        ({"codec": "zip"}, "codec='zip'"),
        ({"sinks": print}, "sinks=<built-in function print>: "),
        ({"url": None}, "url=None: a folder"),
        ({"url": b"run"}, "url=b'run': a folder"),
        ({"url": "memory://run"}, "forgotten with the process"),
        ({"url": "fsspec+memory://run"}, "forgotten with the process"),
        ({"state": {"a": object()}}, r"^state\['a'\]: objects of type object cannot be stored"),
        ({"state": {"a": {"b": [Path("x")]}}}, r"^state\['a'\]\['b'\]\[0\]: objects of type pathlib"),
        ({"state": {"a": {"b": torch.nn.Linear(1, 1), "c": {1: Path()}}}}, r"^state\['a\.c'\]\[1\]: objects"),
        ({"state": {"mine": Unstorable(Path())}}, r"^state\['mine'\]\['held'\]: objects of type pathlib"),
        ({"state": {"net": Extra(Path())}}, r"^state\['net\._extra_state'\]: objects of type pathlib"),
        ({"state": group_of(Path())}, r"^state\['optim\.param_groups\.0'\]\['note'\]: objects of type pathlib"),
        ({"mesh": "dp"}, "mesh='dp': give a torch DeviceMesh"),
        ({"state": {"x": [Pair(torch.ones(2), 1)]}}, r"x\.0 is a Pair with tensors in it"),
        ({"state": {"x": Named(a=torch.ones(2))}}, "x is a Named with tensors in it"),
        ({"process_group": object()}, r"process_group= .* torch\.distributed is not initialized"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path: Path, what: dict[str, Any], said: str) -> None:
    given = {"url": tmp_path, "state": {"x": torch.ones(2)}} | what
    with pytest.raises(ckpt.UsageError, match=said):
        ckpt.Checkpointer(given.pop("url"), given.pop("state"), **given).__enter__()


def test_all_values_that_cannot_be_saved_are_named_at_once(tmp_path: Path) -> None:
    state = {"a": {"b": [Path("x"), print]}, "mine": Unstorable(Path()), **group_of(Path())}
    with pytest.raises(ckpt.UsageError) as caught:
        ckpt.Checkpointer(tmp_path, state).__enter__()
    said = str(caught.value)
    for place in ("['a']['b'][0]", "['a']['b'][1]", "['mine']['held']", "['optim.param_groups.0']['note']"):
        assert f"state{place}" in said


def test_all_objects_that_cannot_be_saved_are_named_at_once(tmp_path: Path) -> None:
    loaders = {f"loader{number}": torch.utils.data.DataLoader([1]) for number in range(7)}
    with pytest.raises(ckpt.UsageError, match=r"'loader0'\] is a torch DataLoader.*'loader4'\].* and 2 more$"):
        ckpt.Checkpointer(tmp_path, loaders).__enter__()


def test_a_state_that_is_refused_shows_the_users_own_line_and_not_how_ckpt_came_to_it(tmp_path: Path) -> None:
    with pytest.raises(ckpt.UsageError, match="a torch DataLoader, which has no position") as caught:
        ckpt.Checkpointer(tmp_path, {"loader": torch.utils.data.DataLoader([1])}).__enter__()
    assert [entry.name for entry in caught.traceback][1:] == ["__enter__"]
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ckpt.Every(steps="3"),  # type: ignore[arg-type]
        lambda: ckpt.Every(steps=2.5),  # type: ignore[arg-type]
        lambda: ckpt.Every(seconds=float("nan")),
        lambda: ckpt.Keep(last=2.5),  # type: ignore[arg-type]
        lambda: ckpt.Keep(best="val"),  # type: ignore[arg-type]
        lambda: ckpt.Best("val", "lowest"),  # type: ignore[arg-type]
        lambda: ckpt.Limits(memory="8GB"),  # type: ignore[arg-type]
        lambda: ckpt.Limits(exit_s=None),  # type: ignore[arg-type]
        lambda: ckpt.Limits(exit_s=float("inf")),
    ],
)
def test_a_rule_that_means_nothing_is_refused_where_it_is_made(wrong: Callable[[], object]) -> None:
    with pytest.raises(ckpt.UsageError, match=r"ckpt\."):
        wrong()


def test_shards_that_leave_a_hole_are_named_at_once_and_when_they_are_saved(tmp_path: Path) -> None:
    said: list[str] = []
    state = {"table": ckpt.Shard(torch.ones(3, 2), (8, 2), (0, 0))}
    with (  # noqa: PT012
        pytest.raises(ckpt.CommitFailed, match="no rank holds some part of table"),
        ckpt.Checkpointer(tmp_path, state, sinks=(lambda event: said.append(event.message),)) as ck,
    ):
        for _ in ck.steps(1):
            deadline = time.monotonic() + 30
            while not any("no rank holds some part of table" in text for text in said):
                assert time.monotonic() < deadline, said
                time.sleep(0.01)


@pytest.mark.parametrize("trained", ["its own", "another", "another first", "assigned", "assigned late", "held"])
def test_a_loop_that_trains_another_model_than_the_one_that_is_saved_is_told_so_once(
    tmp_path: Path, trained: str
) -> None:
    """As where the loop's own name is given to a new one. An optimizer beside those of the state is none of its, and
    one that an object in the state holds may be saved by that."""
    seen, other = Seen(), group_of("another")
    held = {"agent": Wrapper(other["optim"])} if trained == "held" else {}
    with ckpt.Checkpointer(tmp_path, {**group_of("saved"), **held}, sinks=(seen,)) as ck:
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


def test_a_metric_that_is_not_finite_is_left_out_and_training_goes_on(tmp_path: Path) -> None:
    job, seen = make(), []
    with ckpt.Checkpointer(tmp_path, job.state, sinks=(lambda e: seen.append(e.name),)) as ck:
        for step in ck.steps(2):
            job.train(step)
            ck.step()
            ck.save(metrics={"loss": float("nan"), "accuracy": 0.5}).wait(timeout_s=60)
        for wrong in ({"loss": "low"}, {"loss": 10**400}, {"loss": 10**5000}, {"loss": torch.ones(2)}, {1: 0.5}, [0.5]):
            with pytest.raises(ckpt.UsageError, match="metrics="):
                ck.save(metrics=wrong)  # type: ignore[arg-type]
        for many in ({str(n): 0.0 for n in range(1025)}, {"a" * 1025: 0.0}, {str(n) * 90: 0.0 for n in range(999)}):
            with pytest.raises(ckpt.UsageError, match="at most 1024 numbers"):
                ck.save(metrics=many)
        with pytest.raises(ckpt.UsageError, match="no level 'peers'"):
            ck.wait("peers")  # type: ignore[arg-type]
    assert seen.count("metric.dropped") == 2


# ------------------------------------------------------------------------------------------------- half a step


def test_nothing_is_saved_while_a_loader_is_ahead_of_the_last_step(tmp_path: Path) -> None:
    """zip(ck.steps(n), loader) draws the batch before the body begins."""
    loader, model = Loaderlike(), torch.nn.Linear(1, 1)
    with ckpt.Checkpointer(tmp_path, {"loader": loader, "model": model}, policy=ckpt.Every(seconds=0.05)) as ck:
        for step in ck.steps(3):
            loader.read += 1
            with pytest.raises(ckpt.UsageError, match=r"call ck\.step\(\) first"):
                ck.save()
            until = time.monotonic() + 0.3
            while step == 2 and time.monotonic() < until:
                ck.poll()
            ck.step()
        assert ck.restored.step == 0
    wait_agent_gone(tmp_path)
    again = Loaderlike()
    with ckpt.Checkpointer(tmp_path, {"loader": again, "model": model}) as ck:
        assert (ck.restored.step, again.read) == (3, 3)


def test_a_save_behind_a_loop_that_ended_with_its_loader_is_told_where_it_belongs(tmp_path: Path) -> None:
    loader = Loaderlike()
    with ckpt.Checkpointer(tmp_path, {"loader": loader}) as ck:
        for _step, _batch in zip(ck.steps(9), range(2), strict=False):
            loader.read += 1
        with pytest.raises(ckpt.UsageError, match=r"After a loop that ended with its loader"):
            ck.save()
    assert ck.receipt["end_step"] == 2


def test_leaving_before_the_update_says_that_a_batch_is_lost(tmp_path: Path) -> None:
    seen: list[str] = []
    with ckpt.Checkpointer(tmp_path, {"loader": Loaderlike()}, sinks=(lambda e: seen.append(e.name),)) as ck:
        for step in ck.steps(3):
            if step == 2:
                break
    assert "step.unfinished" in seen


@pytest.mark.parametrize("registered", [True, False])
def test_a_step_that_was_left_after_its_update_has_ended(tmp_path: Path, registered: bool) -> None:
    """By a break; also where the optimizer is not registered, or hidden in an object."""
    model = torch.nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optim": optim} if registered else {"model": model}
    updates = 0

    def train() -> None:
        nonlocal updates
        model(torch.ones(2)).sum().backward()
        optim.step()
        updates += 1

    with ckpt.Checkpointer(tmp_path, state) as ck:
        for step in ck.steps(10):
            train()
            if step == 4:
                break
        with pytest.raises(ckpt.UsageError, match="whole number"):
            next(ck.steps("10"))  # type: ignore[arg-type]
        for step in ck.steps(10):
            train()
            if step == 7:
                break
    wait_agent_gone(tmp_path)
    assert updates == 7
    with ckpt.Checkpointer(tmp_path, state) as ck:
        assert ck.restored.step == 7


def test_what_takes_the_place_of_a_model_and_its_optimizer_is_saved_in_whole_steps_from_the_first_on(
    tmp_path: Path,
) -> None:
    """Though nothing of it is known before the next snapshot: that of step 3 had the state of step 4."""
    job = make()
    with ckpt.Checkpointer(tmp_path, job.state, policy=ckpt.Every(steps=10**6)) as ck:
        for step in ck.steps(10):
            if step == 4:
                job = make(seed=5)
                ck.state.update(job.state)
            job.train(step)
            if step == 4:
                with pytest.raises(ckpt.UsageError, match=r"call ck\.step\(\) first"):
                    ck.save()
                break
    wait_agent_gone(tmp_path)
    again = make(seed=3)
    with ckpt.Checkpointer(tmp_path, again.state) as ck:
        assert ck.restored.step == 4
        assert torch.equal(again.model[0].weight, job.model[0].weight)  # type: ignore[index]


class Agent:
    """Gives copies of all that it has, as of a device's memory."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(2, 2)
        self.optims = {"of it": torch.optim.SGD(self.model.parameters(), lr=0.1)}

    def train(self) -> None:
        self.model(torch.ones(2)).sum().backward()
        self.optims["of it"].step()

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.model.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)


@pytest.mark.parametrize("beside", [False, True])
def test_a_step_of_an_optimizer_in_an_object_that_gives_copies_counts(tmp_path: Path, beside: bool) -> None:
    """It was saved under the step before, and made once more after a restart."""
    agent, other = Agent(0), group_of("beside") if beside else {}
    with ckpt.Checkpointer(tmp_path, {"agent": agent, **other}, policy=ckpt.Every(steps=10**6)) as ck:
        for step in ck.steps(9):
            agent.train()
            if step == 3:
                with pytest.raises(ckpt.UsageError, match=r"call ck\.step\(\) first"):
                    ck.save()
                break
            if beside:
                other["optim"].step()
    wait_agent_gone(tmp_path)
    again = Agent(1)
    with ckpt.Checkpointer(tmp_path, {"agent": again, **other}) as ck:
        assert ck.restored.step == 3
        assert torch.equal(again.model.weight, agent.model.weight)


class Stepped:
    """An optimizer that is none of torch's."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def step(self) -> None:
        for param in self.model.parameters():
            param.data.sub_(0.1)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("last", ["model", "optim"])
@pytest.mark.parametrize("kind", ["torch", "own"])
def test_what_was_replaced_in_the_state_is_free_after_the_next_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, last: str
) -> None:
    """It may be as large as all of the state."""
    monkeypatch.setenv("CKPT_NOTICES", "given")

    def made() -> dict[str, Any]:
        model = torch.nn.Linear(2, 2)
        optim = torch.optim.SGD(model.parameters(), lr=0.1) if kind == "torch" else Stepped(model)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        return {"optim": optim, "model": model} if last == "model" else {"model": model, "optim": optim}

    with ckpt.Checkpointer(tmp_path, made(), policy=ckpt.Every(steps=10**6)) as ck:
        before = weakref.ref(ck.state["model"].weight)
        for step in range(1, 5):
            if step == 2:
                ck.state.update(made())
            ck.state["optim"].step()
            ck.step()
            ck.save().wait(timeout_s=60)
        gc.collect()
        assert before() is None


class Wrapper:
    """Saves the optimizer that it holds."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.inner = [optim]

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self.inner[0].param_groups[0]["lr"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner[0].param_groups[0]["lr"] = state["lr"]


class Elsewhere:
    """Saves what it does not hold itself."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self.state_dict = read

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _named_unsaved(
    folder: Path, second: torch.optim.Optimizer, state: dict[str, Any], passing: bool = False
) -> list[ckpt.Event]:
    seen: list[ckpt.Event] = []
    with ckpt.Checkpointer(folder, state, sinks=(seen.append,)) as ck:
        for step in ck.steps(6):
            if step % 2 == 0:  # as of a GAN whose second part is trained less often
                for group in second.param_groups:
                    for param in group["params"]:
                        param.grad = torch.ones_like(param)
                second.step()
                if passing:
                    second = type(second)(second.param_groups[0]["params"], lr=0.1)
    return [event for event in seen if event.name == "optimizer.unsaved"]


@pytest.mark.parametrize("scheduled", [False, True])
def test_an_optimizer_that_was_not_registered_is_named(tmp_path: Path, scheduled: bool) -> None:
    """A restart would begin with a new one. A scheduler holds its optimizer, and does not save it."""
    model = torch.nn.Linear(2, 2)
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    state: dict[str, Any] = {"model": model}
    if scheduled:
        state["sched"] = torch.optim.lr_scheduler.StepLR(optim, 3)
    (event,) = _named_unsaved(tmp_path, optim, state)
    assert event.loud
    assert event.data["optimizer"] == "Adam"
    assert event.data["tensor"] == "model.bias"


class Around(torch.optim.Optimizer):
    """As of Accelerate: it steps another one, whose state is its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_an_optimizer_that_an_object_may_save_out_of_sight_is_named_with_that_exception(tmp_path: Path) -> None:
    """ckpt searches the attributes of the objects in the state, and nothing deeper."""
    model = torch.nn.Linear(2, 2)
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    app = Elsewhere(lambda: {"optim": copy.deepcopy(optim.state_dict())})
    (event,) = _named_unsaved(tmp_path, optim, {"model": model, "app": app})
    assert "unless an object of the state saves it in its own way" in event.message


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
    model = torch.nn.Linear(2, 2)
    trained = torch.nn.Linear(2, 2) if kind == "of another model" else model
    optim: torch.optim.Optimizer = torch.optim.Adam(trained.parameters(), lr=0.1)
    if kind == "without state":
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
    elif kind == "around another":
        optim = Around(optim)
    also = {
        "registered": {"optims": {"a": optim}},
        "around another": {"optim": optim},
        "in a wrapper": {"wrapper": Wrapper(optim)},
        "saved by another": {"app": Elsewhere(lambda: {"optim": optim.state_dict()})},
    }
    assert _named_unsaved(tmp_path, optim, {"model": model, **also.get(kind, {})}, kind == "passing") == []


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


def test_an_optimizer_within_another_is_named_wherever_the_parameters_lie(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optim = Sharp(model.parameters())
    (event,) = _named_unsaved(tmp_path, optim, {"model": model, "optim": optim})
    assert (event.data["optimizer"], event.data["tensor"]) == ("SGD", "model.bias")


def test_an_optimizer_for_each_parameter_is_named_once_for_all(tmp_path: Path) -> None:
    seen, model = Seen(), torch.nn.Linear(2, 2)
    optims = [torch.optim.Adam([param], lr=0.1) for param in model.parameters()]
    with ckpt.Checkpointer(tmp_path, {"model": model}, sinks=(seen,)) as ck:
        for _ in ck.steps(3):
            for param, optim in zip(model.parameters(), optims, strict=True):
                param.grad = torch.ones_like(param)
                optim.step()
    (event,) = seen.named("optimizer.unsaved")
    assert "(and 1 other like it)" in event.message


def test_an_optimizer_that_is_not_saved_is_named_after_two_steps_however_late_the_first_save(tmp_path: Path) -> None:
    """And objects are asked for their state where all ranks ask theirs: at the first two boundaries. One rank alone may
    have such an optimizer, and an object may answer by a collective."""
    seen, asked, model = Seen(), list[int](), torch.nn.Linear(2, 2)
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    app = Elsewhere(lambda: {"asked": asked.append(1)})
    with ckpt.Checkpointer(tmp_path, {"model": model, "app": app}, sinks=(seen,), policy=ckpt.Every(steps=10**6)) as ck:
        for step in ck.steps(6):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optim.step()
            assert len(seen.named("optimizer.unsaved")) == (1 if step > 2 else 0)
            if step == 3:
                asked.clear()
        assert not asked


def test_an_optimizer_that_is_made_anew_every_few_steps_is_named_once(tmp_path: Path) -> None:
    seen, model = Seen(), torch.nn.Linear(2, 2)
    with ckpt.Checkpointer(tmp_path, {"model": model}, sinks=(seen,)) as ck:
        for step in ck.steps(12):
            if step % 3 == 1:
                optim = torch.optim.Adam(model.parameters(), lr=0.1)
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optim.step()
    assert len(seen.named("optimizer.unsaved")) == 1


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_another_checkpointer_of_the_process_saves_is_not_named(tmp_path: Path, wrapped: bool) -> None:
    """As of a GAN whose parts are saved apart, and of weights that are saved once more for themselves. Nor is it named
    while the other has not walked the state that the first step has made."""
    seen, first, second = Seen(), group_of("first"), group_of("second")
    trained = torch.optim.Adam(second["model"].parameters(), lr=0.1)
    second["optim"] = Wrapper(trained) if wrapped else trained
    weights = {"model": second["model"]}
    with (
        ckpt.Checkpointer(tmp_path / "first", first, sinks=(seen,)) as one,
        ckpt.Checkpointer(tmp_path / "second", second, sinks=(seen,)) as two,
        ckpt.Checkpointer(tmp_path / "weights", weights, sinks=(seen,)) as three,
    ):
        for step in range(4):
            for param in second["model"].parameters():
                param.grad = torch.ones_like(param)
            trained.step()
            if step > 1:
                first["optim"].step()
            for each in (three, one, two) if step > 1 else (three, one):
                each.step()
    assert not seen.named("optimizer.unsaved")
    assert not seen.named("optimizer.not_registered")


def test_a_first_step_that_a_scaler_skips_is_not_one_of_another_model(tmp_path: Path) -> None:
    seen, other, job = Seen(), group_of("probe"), group_of("saved")
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


# ------------------------------------------------------------------------------------------------- troubled code


def test_a_value_that_cannot_be_saved_for_a_while_costs_only_that_while(tmp_path: Path) -> None:
    job = make()
    with ckpt.Checkpointer(tmp_path, {**job.state, "note": 1}, policy=EVERY) as ck:
        for step in ck.steps(9):
            job.train(step)
            ck.state["note"] = (lambda: 1) if step in (3, 4) else step
            ck.step()
        ck.save().wait(timeout_s=60)
    wait_agent_gone(tmp_path)
    again = make(seed=3)
    with ckpt.Checkpointer(tmp_path, {**again.state, "note": 0}) as ck:
        assert (ck.restored.step, ck.state["note"]) == (9, 9)


def test_an_object_that_fails_when_it_is_read_does_not_fail_training(tmp_path: Path) -> None:
    job, trouble, seen = make(), Trouble(), []

    def fail() -> None:
        raise RuntimeError("not now")

    found = []
    with ckpt.Checkpointer(
        tmp_path, {**job.state, "mine": trouble}, policy=EVERY, sinks=(lambda e: seen.append(e.message),)
    ) as ck:
        for step in ck.steps(6):
            found.append(job.train(step))
            ck.step()
            trouble.at_save = fail if step in (3, 4) else lambda: None
            handle = ck.save()
            if step in (3, 4):
                with pytest.raises(ckpt.SaveFailed, match="not now"):
                    handle.wait(timeout_s=60)
    assert found == losses(6)
    assert any("not now" in message for message in seen)
    assert ck.receipt["committed_step"] == 6


def test_a_sink_that_fails_is_not_called_again_and_harms_nothing(tmp_path: Path) -> None:
    job, called = make(), []

    def sink(event: ckpt.Event) -> None:
        called.append(threading.get_ident())
        raise RuntimeError("sink")

    with ckpt.Checkpointer(tmp_path, job.state, policy=EVERY, sinks=(sink,)) as ck:
        for step in ck.steps(3):
            job.train(step)
    # Two threads may have an event for it at the same moment.
    assert 0 < len(called) == len(set(called))
    assert ck.receipt["committed_step"] == 3


def test_a_sink_that_exits_on_a_thread_of_ours_costs_itself_alone(tmp_path: Path) -> None:
    """sys.exit() ends nothing there but that thread: the one that hears the agent, or that ends snapshots."""
    job, called, seen = make(), [], Seen()

    def sink(event: ckpt.Event) -> None:
        if threading.current_thread() is not threading.main_thread():
            called.append(event.name)
            sys.exit(f"{event.name} was not to happen")

    with ckpt.Checkpointer(tmp_path, job.state, policy=EVERY, sinks=(seen, sink)) as ck:
        for step in ck.steps(3):
            job.train(step)
            ck.step()
            ck.save().wait(timeout_s=60)
    assert len(called) == 1
    assert not seen.named("agent.lost")
    assert ck.receipt["committed_step"] == 3


def test_an_interrupted_snapshot_makes_nobody_wait(tmp_path: Path) -> None:
    """Ctrl-C while the state is read, caught by the user, who goes on."""
    job, trouble = make(), Trouble()

    def interrupt() -> None:
        trouble.at_save = lambda: None
        raise KeyboardInterrupt

    with ckpt.Checkpointer(tmp_path, {**job.state, "mine": trouble}, policy=EVERY) as ck:
        interrupted = 0
        for step in ck.steps(6):
            job.train(step)
            ck.step()
            trouble.at_save = interrupt if step == 3 else lambda: None
            try:
                ck.save()
            except KeyboardInterrupt:
                interrupted += 1
        ck.save().wait("store")  # without a time-out: nothing is in the way
    assert interrupted == 1
    assert ck.receipt["committed_step"] == 6


@pytest.mark.parametrize("granted", [False, True])
def test_an_interrupt_between_what_is_asked_of_the_agent_and_the_snapshot_makes_nobody_wait(
    granted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, seen = Link.request, Seen()

    def interrupted(link: Link, kind: str, fields: dict[str, Any], *rest: Any) -> None:
        monkeypatch.undo()
        request(link, kind, fields, *rest) if granted else link.start_request(kind, fields)
        raise KeyboardInterrupt

    with ckpt.Checkpointer(tmp_path, {"x": torch.zeros(2)}, policy=ckpt.Every(steps=10**6), sinks=(seen,)) as ck:
        ck.step()
        ck.save().wait()
        ck.step()
        monkeypatch.setattr(Link, "request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ck.save()
        ck.step()
        ck.save().wait()
    assert ck.receipt["committed_step"] == 3
    given_up = [event.message for event in seen.named("save.abandoned")]
    assert all("rank 0 missed it (interrupted)" in message for message in given_up), "the agent was not told"


class Alarm(Exception):
    """What a watchdog's handler raises."""


def test_what_a_signals_handler_raises_in_the_midst_of_a_save_is_what_the_loop_gets(tmp_path: Path) -> None:
    job, trouble, seen = make(), Trouble(), Seen()

    def sink(event: ckpt.Event) -> None:
        seen(event)
        if event.name == "save.failed":
            signal.raise_signal(signal.SIGALRM)

    def ring(number: int, frame: object) -> None:
        raise Alarm

    def fail() -> None:
        raise ValueError("of the object's own")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with ckpt.Checkpointer(
            tmp_path, {**job.state, "mine": trouble}, policy=ckpt.Every(steps=10**6), sinks=(sink,)
        ) as ck:
            for step in ck.steps(6):
                job.train(step)
                trouble.at_save = lambda: signal.raise_signal(signal.SIGALRM)
                if step == 3:
                    with pytest.raises(Alarm):  # noqa: PT012
                        ck.step()
                        ck.save()
                trouble.at_save = fail
                if step == 5:
                    ck.step()
                    with pytest.raises(Alarm):  # in the sink
                        ck.save()
                trouble.at_save = lambda: None
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ck.receipt["committed_step"] == 6
    assert seen.named("receipt"), "the sink stays"


def test_an_agent_that_dies_while_the_state_is_read_costs_that_snapshot_and_no_more(tmp_path: Path) -> None:
    job, trouble, lost = make(), Trouble(), threading.Event()

    def note(event: ckpt.Event) -> None:
        if event.name == "agent.lost":
            lost.set()

    def kill() -> None:
        trouble.at_save = lambda: None
        pid = agent_pid(str(tmp_path))
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_gone(pid)
        assert lost.wait(20)

    found = []
    with ckpt.Checkpointer(tmp_path, {**job.state, "mine": trouble}, policy=EVERY, sinks=(note,)) as ck:
        for step in ck.steps(4):
            found.append(job.train(step))
            ck.step()
        ck.wait("local")
        trouble.at_save = kill
        for step in ck.steps(12):
            found.append(job.train(step))
            ck.step()
            time.sleep(0.05)
        trouble.at_save = kill
        handle = ck.save()
        with pytest.raises(ckpt.SaveFailed):
            handle.wait("store")  # without a time-out: it has to be told
    assert found == losses(12)
    assert ck.receipt["committed_step"] == 12
    assert ck.receipt["agent_restarts"] >= 1


# ------------------------------------------------------------------------------------------------- other processes


def test_a_forked_child_cannot_touch_what_its_parent_saves(tmp_path: Path) -> None:
    job = make()
    read, write = os.pipe()
    with ckpt.Checkpointer(tmp_path, job.state, policy=EVERY) as ck:
        for step in ck.steps(6):
            job.train(step)
            if step == 3:
                pid = os.fork()
                if pid == 0:
                    said = ""
                    try:
                        with ck:  # __enter__ again is misuse as well
                            pass
                    except ckpt.UsageError:
                        said += "enter "
                    try:
                        ck.step()
                    except ckpt.UsageError as exc:
                        said += "step " if "leave saving to the parent" in str(exc) else str(exc)
                    ck.__exit__(None, None, None)
                    os.write(write, (said + "left").encode())
                    os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0
    assert os.read(read, 100) == b"enter step left"
    os.close(read)
    os.close(write)
    assert ck.receipt["committed_step"] == 6


def test_a_forked_child_keeps_none_of_the_memory_that_its_parent_saves_to(tmp_path: Path) -> None:
    """A loader's worker lives as long as training does, and slots that the state has outgrown long before that go. So
    does what another thread has just received, or is about to close."""

    def held() -> list[str]:
        open_now = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        mapped = Path("/proc/self/maps").read_text().splitlines()
        return [each for each in (*map(os.path.realpath, open_now), *mapped) if "ckpt-arena" in each]

    job = make()
    read, write = os.pipe()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ckpt.Checkpointer(tmp_path, job.state, policy=EVERY) as ck, here, there:
        for step in ck.steps(6):
            job.train(step)
            if step == 3:
                ck.step()
                ck.save().wait("store", timeout_s=60)
                assert held()
                made = Arena.create(1 << 20)
                messages.send(here, {"t": "grant-arena"}, [made.fd])
                received = messages.receive(there)
                assert received is not None
                pid = os.fork()
                if pid == 0:
                    os.write(write, json.dumps(held()).encode())
                    made.view[:8] = b"nobody's"
                    os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0
                assert bytes(made.view[:8]) == bytes(8)
                received.close()
                made.close()
    assert json.loads(os.read(read, 1 << 16)) == []
    os.close(read)
    os.close(write)
    assert ck.receipt["committed_step"] == 6


def test_a_checkpointer_that_is_sent_to_another_process_is_named(tmp_path: Path) -> None:
    for send in (pickle.dumps, copy.deepcopy):
        with pytest.raises(ckpt.UsageError, match="do not keep it in a loader"):
            send(ckpt.Checkpointer(tmp_path, {"x": 1}))


UNGUARDED = """
import multiprocessing, sys
import ckpt

with ckpt.Checkpointer(sys.argv[1], {"n": 0}, policy=ckpt.Every(steps=10**6)) as ck:
    for step in ck.steps(1):
        helper = multiprocessing.get_context("spawn").Process(target=print)
        helper.start()
        helper.join()
"""


def test_a_script_that_a_spawned_helper_imports_does_not_take_the_place_of_its_own_job(tmp_path: Path) -> None:
    """Such a helper imports the script before it does its work: without a guard it would train, too."""
    (tmp_path / "train.py").write_text(UNGUARDED)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": os.fspath(Path(ckpt.__file__).parents[1])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert 'below `if __name__ == "__main__":`' in done.stderr


def test_a_truth_value_is_no_number_of_steps(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, {"x": torch.ones(2)}) as ck:
        with pytest.raises(ckpt.UsageError, match=r"ck\.step\(True\)"):
            ck.step(True)
        with pytest.raises(ckpt.UsageError, match=r"ck\.steps\(True\)"):
            next(ck.steps(True))
        for wrong in (2.0, np.bool_(True), "1", torch.tensor([1, 1])):
            with pytest.raises(ckpt.UsageError, match=r"ck\.steps\("):
                next(ck.steps(wrong))  # type: ignore[arg-type]
            with pytest.raises(ckpt.UsageError, match=r"ck\.step\("):
                ck.step(wrong)  # type: ignore[arg-type]
        ck.step(1)


def test_whatever_counts_is_a_number_of_steps(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, {"x": torch.ones(2)}) as ck:
        assert list(ck.steps(np.int64(3))) == [1, 2, 3]
        ck.step(np.int32(4))
        ck.step(torch.tensor(5))


def test_a_handle_says_what_was_last_known_of_it_after_the_block(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, {"x": torch.ones(2)}) as ck:
        ck.step()
        handle = ck.save()
        handle.wait("store", timeout_s=60)
        last = ck.save()
    handle.wait()
    last.wait("store")
    assert handle.level == "store"
    assert repr(handle) == "<ckpt.Handle step 1 level store>"


def test_a_time_to_wait_is_a_number_be_it_endless(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, {"x": torch.ones(2)}) as ck:
        ck.step()
        handle = ck.save()
        handle.wait(timeout_s=float("inf"))
        for wait in (handle.wait, ck.wait):
            with pytest.raises(ckpt.UsageError, match=r"timeout_s='1': a number of seconds, or None"):
                wait(timeout_s="1")
            wait(timeout_s=np.float32(60))


def test_who_waits_on_another_thread_for_what_is_not_known_at_the_end_of_the_block_is_told(tmp_path: Path) -> None:
    errors: list[Exception] = []

    def wait() -> None:
        try:
            handle.wait()
        except ckpt.SaveFailed as exc:
            errors.append(exc)

    pad = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    limits = ckpt.Limits(bandwidth=1000, exit_s=1)
    with pytest.raises(ZeroDivisionError), ckpt.Checkpointer(tmp_path, {"x": pad}, limits=limits) as ck:  # noqa: PT012
        ck.step()
        handle = ck.save()
        thread = threading.Thread(target=wait)
        thread.start()
        raise ZeroDivisionError
    thread.join(20)
    kill_agent(tmp_path)
    assert "the block was left before that was known" in str(errors[0])
    with pytest.raises(ckpt.SaveFailed, match="the block was left"):
        handle.wait()


def test_another_thread_cannot_end_a_step(tmp_path: Path) -> None:
    errors: list[Exception] = []

    def end(ck: ckpt.Checkpointer) -> None:
        try:
            ck.step()
        except ckpt.UsageError as exc:
            errors.append(exc)

    with ckpt.Checkpointer(tmp_path, {"x": torch.ones(2)}) as ck:
        thread = threading.Thread(target=end, args=(ck,))
        thread.start()
        thread.join()
    assert "the thread that entered it" in str(errors[0])


# ------------------------------------------------------------------------------------------------- what is not saved


def test_a_loop_that_ends_no_step_is_told_that_nothing_is_saved(tmp_path: Path) -> None:
    job, told = make(), []
    with ckpt.Checkpointer(tmp_path / "run", job.state, policy=EVERY, sinks=(told.append,)):
        for step in range(1, 4):
            job.train(step)
    (said,) = [event for event in told if event.name == "step.none"]
    assert said.loud
    assert "3 optimizer updates, but not one ended step" in said.message
    wait_agent_gone(tmp_path / "run")


def test_what_state_dict_gave_is_not_taken_for_the_optimizer(tmp_path: Path) -> None:
    job = make()
    state = job.state | {"optim": job.state["optim"].state_dict()}
    with pytest.raises(ckpt.UsageError, match=r"state\['optim'\] is what an optimizer's state_dict\(\) gave"):
        ckpt.Checkpointer(tmp_path / "run", state).__enter__()


def test_a_tensor_that_is_only_in_the_checkpoint_is_named_once(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "run", {"a": torch.ones(2), "old": torch.ones(3)}, policy=EVERY) as ck:
        ck.step()
    wait_agent_gone(tmp_path / "run")
    with pytest.raises(ckpt.StateMismatch) as caught:
        ckpt.Checkpointer(tmp_path / "run", {"a": torch.ones(2)}).__enter__()
    assert str(caught.value).count("old") == 1
    wait_agent_gone(tmp_path / "run")
