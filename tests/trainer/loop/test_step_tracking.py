"""Which optimizers' steps are counted, and what is left of one that did not end."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.optim import SGD, Optimizer

from ckpt.events import Events
from ckpt.trainer.loop.step_tracking import StepTracking
from ckpt.trainer.state.mesh_coordinate import coordinate_by_rank
from ckpt.trainer.state.state_walk import StateWalker


@contextlib.contextmanager
def counted(model: torch.nn.Module, *registered: Optimizer) -> Iterator[StepTracking]:
    walk = StateWalker({"model": model}, coordinate_by_rank(0, 1)).walk()
    updates = StepTracking({"model": model, "optim": list(registered)}, lambda: walk, Events())
    updates.install_hooks()
    try:
        yield updates
    finally:
        updates.close()


def sgd(*params: torch.nn.Parameter) -> SGD:
    for param in params:
        param.grad = torch.ones_like(param)
    return SGD(params, lr=0.1)


def test_an_optimizer_that_is_made_where_another_one_was_is_not_taken_for_it() -> None:
    """Their addresses come again."""
    model = torch.nn.Linear(2, 2)
    with counted(model) as updates:
        for step in range(200):
            for params in (list(model.parameters()), [torch.nn.Parameter(torch.ones(2))]):
                ours = len(params) == 2
                updates.finished_updates = 0
                sgd(*params).step()
                assert updates.pending_updates == ours, step
            if step % 10 == 9:
                gc.collect()


def test_a_registered_optimizer_counts_though_the_state_has_none_of_its_tensors() -> None:
    optim = sgd(torch.nn.Parameter(torch.ones(2)))
    with counted(torch.nn.Linear(2, 2), optim) as updates:
        optim.step()
        sgd(torch.nn.Parameter(torch.ones(2))).step()
    assert updates.pending_updates == 1


@pytest.mark.parametrize("known", [False, True], ids=["at once", "after it has stepped elsewhere"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("assigned", ["model", "optim", "both"])
def test_what_is_made_anew_in_the_state_counts_before_it_is_walked(assigned: str, nested: bool, known: bool) -> None:
    """The next walk may be far away, and until then half a step would be saved."""
    parts: dict[str, object] = {"model": torch.nn.Linear(2, 2), "optim": sgd(torch.nn.Parameter(torch.ones(2)))}
    state = {"parts": parts} if nested else parts
    walk = StateWalker({"model": parts["model"]}, coordinate_by_rank(0, 1)).walk()
    updates = StepTracking(state, lambda: walk, Events())
    updates.install_hooks()
    with contextlib.closing(updates):
        model = torch.nn.Linear(2, 2)
        optim = sgd(*model.parameters())
        if known:
            optim.step()
        assert not updates.pending_updates
        if assigned != "optim":
            parts["model"] = model
        if assigned != "model":
            parts["optim"] = optim
        optim.step()
        assert updates.pending_updates == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, in its compiler
def test_a_compiled_step_counts_and_has_ended() -> None:
    model = torch.nn.Linear(2, 2)
    with counted(model) as updates:
        step = torch.compile(sgd(*model.parameters()).step, backend="eager")
        for _ in range(3):
            step()
        assert (updates.pending_updates, updates.torn_reason) == (3, "")


def fail() -> float:
    raise RuntimeError("out of memory")


def test_what_an_exception_has_left_of_a_step_is_not_mended_by_whole_ones() -> None:
    model = torch.nn.Linear(2, 2)
    optim = sgd(*model.parameters())
    with counted(model) as updates:
        with pytest.raises(RuntimeError, match="out of memory"):
            optim.step(fail)
        optim.step()
        updates.finished_updates = 0
        del optim
        gc.collect()
        assert "SGD.step() has begun and not ended" in updates.torn_reason


def test_a_step_of_another_optimizer_that_fails_is_none_of_ours() -> None:
    with counted(torch.nn.Linear(2, 2)) as updates:
        with pytest.raises(RuntimeError):
            sgd(torch.nn.Parameter(torch.ones(2))).step(fail)
        assert not updates.torn_reason


def test_steps_within_each_other_and_on_threads_have_ended_when_they_have() -> None:
    model = torch.nn.Linear(2, 2)
    outer, inner, other = (sgd(*model.parameters()) for _ in range(3))
    begun, go_on, seen = threading.Event(), threading.Event(), list[bool]()

    def closure() -> float:
        inner.step()
        seen.append(bool(updates.torn_reason))
        return 0.0

    def wait() -> float:
        begun.set()
        assert go_on.wait(30)
        return 0.0

    with counted(model) as updates:
        outer.step(closure)
        assert (seen, updates.torn_reason, updates.pending_updates) == ([True], "", 2)
        thread = threading.Thread(target=other.step, args=(wait,))
        thread.start()
        assert begun.wait(30)
        outer.step()
        assert updates.torn_reason
        go_on.set()
        thread.join()
        assert (updates.torn_reason, updates.pending_updates) == ("", 4)


def test_an_optimizer_that_has_no_hash_is_counted_like_any_other() -> None:
    class Equal(torch.optim.SGD):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    ours, anothers = Equal(model.parameters(), lr=0.1), Equal(other.parameters(), lr=0.1)
    with counted(model) as updates:
        anothers.step()
        assert (updates.pending_updates, updates.is_torn) == (0, False)
        ours.step()
        assert (updates.pending_updates, updates.is_torn) == (1, False)


def test_one_within_another_counts_wherever_that_has_put_the_parameters() -> None:
    """As in SAM, which gives them memory of their own in each step."""
    model = torch.nn.Linear(2, 2)
    outer, inner = sgd(*model.parameters()), sgd(*model.parameters())

    def closure() -> float:
        for param in model.parameters():
            param.data = param.data.clone()
        inner.step()
        return 0.0

    with counted(model) as updates:
        outer.step(closure)
        assert updates.pending_updates == 2
