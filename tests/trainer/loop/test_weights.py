"""Whether other parameters are in a state than at the last boundary: each way to swap averaged weights in, and back."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ckpt.events import Events
from ckpt.trainer.loop.step_tracking import StepTracking
from ckpt.trainer.loop.weights import Weights
from ckpt.trainer.state.mesh_coordinate import coordinate_by_rank
from ckpt.trainer.state.state_walk import StateWalker
from tests.trainer.loop.test_step_tracking import counted

Swap = Callable[[torch.nn.Module, torch.nn.Module], None]


def copy_values(model: torch.nn.Module, other: torch.nn.Module) -> None:
    with torch.no_grad():
        for param, average in zip(model.parameters(), other.parameters(), strict=True):
            kept = param.clone()
            param.copy_(average)
            average.copy_(kept)


def copy_data(model: torch.nn.Module, other: torch.nn.Module) -> None:
    for param, average in zip(model.parameters(), other.parameters(), strict=True):
        kept = param.data.clone()
        param.data.copy_(average.data)
        average.data.copy_(kept)


def exchange_data(model: torch.nn.Module, other: torch.nn.Module) -> None:
    for param, average in zip(model.parameters(), other.parameters(), strict=True):
        param.data, average.data = average.data, param.data


def exchange_parameters(model: torch.nn.Module, other: torch.nn.Module) -> None:
    for module, another in zip(model.modules(), other.modules(), strict=True):
        module._parameters, another._parameters = another._parameters, module._parameters


def exchange_modules(model: torch.nn.Module, other: torch.nn.Module) -> None:
    model._modules, other._modules = other._modules, model._modules


def load(model: torch.nn.Module, other: torch.nn.Module) -> None:
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict(other.state_dict())
    other.load_state_dict(kept)


def update(updates: StepTracking, step: int) -> None:
    updates.finished_updates = 1
    updates.note_step_end(step)
    updates.finished_updates = 0


@pytest.mark.parametrize(
    "swap",
    [copy_values, copy_data, exchange_data, exchange_parameters, exchange_modules, load],
    ids=lambda s: s.__name__,
)
@pytest.mark.parametrize("layers", [1, 100])
def test_weights_that_are_swapped_in_are_seen_until_they_are_swapped_back(swap: Swap, layers: int) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
    average = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
    with counted(model) as updates:
        for step in range(1, 4):
            update(updates, step)
            assert not updates.weights.are_swapped
            swap(model, average)
            assert updates.weights.are_swapped
            swap(model, average)
            assert not updates.weights.are_swapped


def begun(state: dict[str, Any]) -> StepTracking:
    walk = StateWalker(state, coordinate_by_rank(0, 1)).walk()
    updates = StepTracking(state, lambda: walk, Events())
    updates.weights.begin()
    return updates


def test_a_model_that_is_assigned_in_the_state_is_to_be_saved() -> None:
    state = {"model": torch.nn.Linear(2, 2)}
    updates = begun(state)
    state["model"] = torch.nn.Linear(2, 2)
    assert not updates.weights.are_swapped
    del state["model"]
    assert not updates.weights.are_swapped


def test_an_average_that_moves_on_between_two_steps_is_to_be_saved() -> None:
    """As once an epoch, behind its last step."""
    model = torch.nn.Linear(2, 2)
    average = torch.optim.swa_utils.AveragedModel(model)
    updates = begun({"model": model, "average": average, "optim": torch.optim.SGD(model.parameters())})
    with torch.no_grad():
        average.module.weight.add_(1)
        assert not updates.weights.are_swapped
        model.weight.add_(1)
    assert updates.weights.are_swapped


def test_the_same_weights_in_other_memory_are_no_others() -> None:
    """As after they were offloaded, and brought back."""
    model = torch.nn.Linear(2, 2)
    updates = begun({"model": model, "optim": torch.optim.SGD(model.parameters())})
    for param in model.parameters():
        param.data = param.data.clone()
    assert not updates.weights.are_swapped


def test_a_boundary_looks_at_no_plain_value_of_the_state() -> None:
    class Buffer(list[Any]):
        """Of a million transitions, say."""

        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("looked at")

    model = torch.nn.Linear(2, 2)
    state: dict[str, Any] = {"model": model, "buffer": []}
    updates = begun(state)
    state["buffer"] = Buffer([()])
    update(updates, 1)
    assert not updates.weights.are_swapped


def test_frozen_and_nested_kinds_of_parameters_can_be_looked_at() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 5).half(), "b": torch.nn.Conv2d(2, 3, 1).to(torch.bfloat16)})
    model["a"].requires_grad_(False)
    model["b"].weight.data = model["b"].weight.data.transpose(0, 1).contiguous().transpose(0, 1)
    model.register_parameter("none", None)
    model.register_parameter("empty", torch.nn.Parameter(torch.empty(0, 3)))
    model.register_parameter("big", torch.nn.Parameter(torch.randn(3000, 3)))
    with counted(model) as updates:
        update(updates, 1)
        assert not updates.weights.are_swapped
        with torch.no_grad():
            model["a"].weight.add_(1)
        assert updates.weights.are_swapped


def test_memory_that_a_boundary_freed_is_not_read() -> None:
    """As of parameters that are offloaded."""
    model = torch.nn.Linear(100, 100)
    with counted(model) as updates:
        update(updates, 1)
        model.weight.untyped_storage().resize_(0)
        assert updates.weights.are_swapped
        update(updates, 2)
        assert not updates.weights.are_swapped


def test_what_is_looked_at_is_not_kept_alive() -> None:
    model = torch.nn.Linear(2, 2)
    weights = Weights(lambda: [model])
    weights.begin()
    gone = weakref.ref(model.weight)
    model.weight = torch.nn.Parameter(torch.zeros(2, 2))
    weights.note_step_end(False)
    assert gone() is None


def test_parameters_of_other_kinds_are_passed_over() -> None:
    """Those of a module that says itself what is saved."""

    class Wrapping(torch.Tensor):
        pass

    model = torch.nn.Linear(2, 2)
    model.sparse = torch.nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)
    model.wrapping = torch.nn.Parameter(torch.ones(2).as_subclass(Wrapping), requires_grad=False)
    model.nowhere = torch.nn.Parameter(torch.empty(2, device="meta"), requires_grad=False)
    model.later = torch.nn.UninitializedParameter()
    weights = Weights(lambda: [model])
    weights.begin()
    assert not weights.are_swapped
    with torch.no_grad():
        model.bias.add_(1)
    assert weights.are_swapped
