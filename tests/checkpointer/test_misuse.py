"""What users do by mistake, and half a step: said clearly, and nothing is lost."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import ckpt
from tests.checkpointer.loops import make
from tests.checkpointer.runs import Seen, Stateful, restore

EVERY = ckpt.Every(steps=1)
UNSTORABLE = Stateful(lambda: {"held": Path()})


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
        ({"limits": {"memory": 1}}, r"limits=.*: a ckpt\.Limits"),
        ({"init": 5}, r"init= takes a \.safetensors file, .* another run, not int$"),
        ({"strict": "no"}, "strict='no': a bool, True or False"),
        ({"lazy": 0}, "lazy=0: a bool, True or False"),
        ({"take_over": np.True_}, "take_over=.*: a bool, True or False"),
        ({"codec": "zip"}, "codec='zip'"),
        ({"sinks": print}, "sinks=<built-in function print>: "),
        ({"url": b"run"}, "url=b'run': a folder"),
        ({"url": "memory://run"}, "forgotten with the process"),
        ({"url": "fsspec+memory://run"}, "forgotten with the process"),
        ({"state": {"a": object()}}, r"^state\['a'\]: objects of type object cannot be stored"),
        ({"state": {"a": {"b": [Path("x")]}}}, r"^state\['a'\]\['b'\]\[0\]: objects of type pathlib"),
        ({"state": {"a": {"b": torch.nn.Linear(1, 1), "c": {1: Path()}}}}, r"^state\['a\.c'\]\[1\]: objects"),
        ({"state": {"mine": UNSTORABLE}}, r"^state\['mine'\]\['held'\]: objects of type pathlib"),
        ({"state": {"net": Extra(Path())}}, r"^state\['net\._extra_state'\]: objects of type pathlib"),
        ({"state": group_of(Path())}, r"^state\['optim\.param_groups\.0'\]\['note'\]: objects of type pathlib"),
        (
            {"state": group_of("x") | {"optim": group_of("x")["optim"].state_dict()}},
            r"\['optim'\] is what an optimizer's",
        ),
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
    state = {"a": {"b": [Path("x"), print]}, "mine": UNSTORABLE, **group_of(Path())}
    with pytest.raises(ckpt.UsageError) as caught:
        ckpt.Checkpointer(tmp_path, state).__enter__()
    said = str(caught.value)
    for place in ("['a']['b'][0]", "['a']['b'][1]", "['mine']['held']", "['optim.param_groups.0']['note']"):
        assert f"state{place}" in said


def test_objects_that_cannot_be_saved_are_named_at_once_at_the_users_own_line(tmp_path: Path) -> None:
    """And not where ckpt came to them."""
    loaders = {f"loader{number}": torch.utils.data.DataLoader([1]) for number in range(7)}
    with pytest.raises(
        ckpt.UsageError, match=r"'loader0'\] is a torch DataLoader.*'loader4'\].* and 2 more$"
    ) as caught:
        ckpt.Checkpointer(tmp_path, loaders).__enter__()
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
        *(
            lambda name=name, value=value: ckpt.Limits(**{name: value})
            for name, value in {"memory": -1, "bandwidth": 0.0, "peer_bandwidth": 900.0, "unsaved_s": 0.0}.items()
        ),
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


def test_a_metric_that_is_not_finite_is_left_out_and_training_goes_on(tmp_path: Path) -> None:
    job, seen = make(), Seen()
    with ckpt.Checkpointer(tmp_path, job.state, sinks=(seen,)) as ck:
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
    assert len(seen.named("metric.dropped")) == 2


# ------------------------------------------------------------------------------------------------- half a step


def test_nothing_is_saved_while_a_loader_is_ahead_of_the_last_step(tmp_path: Path) -> None:
    """zip(ck.steps(n), loader) draws the batch before the body begins."""
    loader, model = Loaderlike(), torch.nn.Linear(1, 1)
    where_it_belongs = r"call ck\.step\(\) first, .* After a loop that ended with its loader"
    with ckpt.Checkpointer(tmp_path, {"loader": loader, "model": model}, policy=ckpt.Every(seconds=0.05)) as ck:
        for step in ck.steps(3):
            loader.read += 1
            with pytest.raises(ckpt.UsageError, match=where_it_belongs):
                ck.save()
            until = time.monotonic() + 0.3
            while step == 2 and time.monotonic() < until:
                ck.poll()
            ck.step()
        assert ck.restored.step == 0
    again = Loaderlike()
    ck = restore(tmp_path, {"loader": again, "model": model})
    assert (ck.restored.step, again.read) == (3, 3)


def test_leaving_before_the_update_says_that_a_batch_is_lost(tmp_path: Path) -> None:
    seen = Seen()
    with ckpt.Checkpointer(tmp_path, {"loader": Loaderlike()}, sinks=(seen,)) as ck:
        for step in ck.steps(3):
            if step == 2:
                break
    assert seen.named("step.unfinished")
    assert ck.receipt["committed_step"] == 1


def test_a_step_that_was_left_after_its_update_has_ended(tmp_path: Path) -> None:
    """By a break, and though the optimizer is not registered."""
    model = torch.nn.Linear(2, 2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    updates = 0
    with ckpt.Checkpointer(tmp_path, {"model": model}) as ck:
        for last in (4, 7):
            for step in ck.steps(10):
                model(torch.ones(2)).sum().backward()
                optim.step()
                updates += 1
                if step == last:
                    break
    assert updates == 7
    assert restore(tmp_path, {"model": model}).restored.step == 7


def test_what_takes_the_place_of_a_model_and_its_optimizer_is_saved_in_whole_steps_from_the_first_on(
    tmp_path: Path,
) -> None:
    """The new model is not walked before the next snapshot. If its update did not count, the checkpoint of step 3 would
    hold the state of step 4."""
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
    again = make(seed=3)
    ck = restore(tmp_path, again.state)
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


def test_a_step_of_an_optimizer_in_an_object_that_gives_copies_counts(tmp_path: Path) -> None:
    """Another optimizer is registered. If the step did not count, it would be saved as the step before, and a restart
    would repeat it."""
    agent, other = Agent(0), group_of("beside")
    with ckpt.Checkpointer(tmp_path, {"agent": agent, **other}, policy=ckpt.Every(steps=10**6)) as ck:
        for step in ck.steps(9):
            agent.train()
            if step == 3:
                with pytest.raises(ckpt.UsageError, match=r"call ck\.step\(\) first"):
                    ck.save()
                break
            other["optim"].step()
    again = Agent(1)
    ck = restore(tmp_path, {"agent": again, **other})
    assert ck.restored.step == 3
    assert torch.equal(again.model.weight, agent.model.weight)


@pytest.mark.parametrize("last", ["model", "optim"])
def test_what_was_replaced_in_the_state_is_free_after_the_next_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """The old model may be as large as all of the state."""
    monkeypatch.setenv("CKPT_NOTICES", "given")

    def made() -> dict[str, Any]:
        state = group_of("any")
        for param in state["model"].parameters():
            param.grad = torch.ones_like(param)
        return state if last == "optim" else dict(reversed(state.items()))

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


def test_a_loop_that_ends_no_step_is_told_that_nothing_is_saved(tmp_path: Path) -> None:
    job, seen = make(), Seen()
    with ckpt.Checkpointer(tmp_path, job.state, policy=EVERY, sinks=(seen,)):
        for step in range(1, 4):
            job.train(step)
    (said,) = seen.named("step.none")
    assert said.loud
    assert "3 optimizer updates, but not one ended step" in said.message
